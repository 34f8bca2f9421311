"""Confusion matrices of the tested images: which class is taken for which, of all clients and of each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from plumbing.errors import UserError
from reproduce.drawing import check_figure_path, new_panel, write_figure
from reproduce.measures.finished import finished, labels_of

import numpy as np
from tabulate import tabulate

POOLED = "all clients"


def matrices(folder: str, which: str) -> dict[str, np.ndarray]:
    """{"all clients" or a client's or target's name: its images by true and predicted class, int64 [C, C]}
    after the best or the last round. A left-out domain is not among the clients."""
    result = finished(folder)
    if not result.get("measures"):
        raise UserError(f"{folder} has no confusion matrices: its networks have no classifier, or its "
                        "clients are on other machines", 2)
    found = {name: np.array(of["confusion"]) for name, of in result["measures"][which].items()}
    pooled = sum(matrix for name, matrix in found.items() if name != result["args"]["target"])
    return {POOLED: pooled} | found


def classes_of(folder: str) -> list[str]:
    """The names of a finished run's classes."""
    return json.loads((Path(folder) / "settings.json").read_text())["data"]["classes"]


def draw(path: str, title: str, matrix: np.ndarray, classes: list[str]) -> None:
    """A matrix [C, C] of counts."""
    from sklearn.metrics import ConfusionMatrixDisplay
    panel = new_panel(5.6, 5.2)
    shown = ConfusionMatrixDisplay(matrix, display_labels=classes)
    shown.plot(ax=panel, cmap="Blues", colorbar=False, include_values=len(classes) <= 12,
               xticks_rotation="vertical")
    panel.set(title=title, xlabel="predicted", ylabel="true")
    write_figure(path, panel.figure)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="", metavar="FILE", help="file of the figure of one run [none]")


def show(flags) -> list[dict]:
    """The matrix of all clients together, the accuracy of each, the figure of one run, and the numbers."""
    if flags.out:
        check_figure_path(flags.out)
    if flags.out and len(flags.folders) != 1:
        raise UserError(f"--out draws the matrices of one run: give one folder, not {len(flags.folders)}", 2)
    labels, numbers = labels_of([finished(folder)["args"] for folder in flags.folders]), []
    for folder, label in zip(flags.folders, labels):
        found, classes = matrices(folder, flags.which), classes_of(folder)
        rows = [[name, *row] for name, row in zip(classes, found[POOLED].tolist())]
        print(f"{label}, {POOLED}: images of each true class (rows) by predicted class")
        print(tabulate(rows, ["", *classes], disable_numparse=True))
        rows = [[name, f"{100 * matrix.trace() / matrix.sum():.2f}", matrix.sum()]
                for name, matrix in found.items()]
        print(tabulate(rows, ["", "accuracy (%)", "images"], disable_numparse=True))
        if flags.out:
            draw(flags.out, f"{label}, {POOLED}", found[POOLED], classes)
        numbers.append({"folder": folder, "method": label, "which": flags.which, "classes": classes,
                        "confusion": {name: matrix.tolist() for name, matrix in found.items()}})
    return numbers
