"""Confusion matrices of the tested images: which class is taken for which, of all clients and of each."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from plumbing.run.errors import UserError
from plumbing.run.results import empty_figure
from reproduce.drawing import check_figure_path, write_figure
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
    matrix_of = {name: np.array(of["confusion"]) for name, of in result["measures"][which].items()}
    pooled = sum(matrix for name, matrix in matrix_of.items() if name != result["args"]["target"])
    return {POOLED: pooled} | matrix_of


def draw(path: str, label: str, matrix_of: dict[str, np.ndarray], classes: list[str]) -> None:
    """A panel for each matrix, coloured by the share of a true class; with few classes their numbers too."""
    from sklearn.metrics import ConfusionMatrixDisplay
    across = min(3, len(matrix_of))
    down = math.ceil(len(matrix_of) / across)
    figure = empty_figure((4.4 * across, 4.2 * down))
    for panel, (name, matrix) in zip(figure.subplots(down, across, squeeze=False).flat, matrix_of.items()):
        shown = ConfusionMatrixDisplay(matrix / matrix.sum(1, keepdims=True).clip(1), display_labels=classes)
        shown.plot(ax=panel, cmap="Blues", colorbar=False, include_values=len(classes) <= 12,
                   xticks_rotation="vertical", im_kw={"vmin": 0, "vmax": 1})
        for text, count in zip(shown.text_.flat if shown.text_ is not None else (), matrix.flat):
            text.set_text(count or "")
        panel.set(title=f"{name}: {matrix.trace()} of {matrix.sum()} right", xlabel="predicted",
                  ylabel="true")
    for panel in figure.axes[len(matrix_of):]:
        panel.set_axis_off()
    figure.suptitle(label)
    write_figure(path, figure)


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
        matrix_of = matrices(folder, flags.which)
        classes = json.loads(Path(folder, "settings.json").read_bytes())["data"]["classes"]
        rows = [[name, *row] for name, row in zip(classes, matrix_of[POOLED].tolist())]
        print(f"{label}, {POOLED}: images of each true class (rows) by predicted class")
        print(tabulate(rows, ["", *classes], disable_numparse=True))
        rows = [[name, f"{100 * matrix.trace() / matrix.sum():.2f}", matrix.sum()]
                for name, matrix in matrix_of.items()]
        print(tabulate(rows, ["", "accuracy (%)", "images"], disable_numparse=True))
        if flags.out:
            draw(flags.out, label, matrix_of, classes)
        numbers.append({"folder": folder, "method": label, "which": flags.which, "classes": classes,
                        "confusion": {name: matrix.tolist() for name, matrix in matrix_of.items()}})
    return numbers
