"""What a run has logged, over the rounds (FedGaLA, Figs. 2(b), 3(b), 3(d))."""

from __future__ import annotations

import argparse

from plumbing.errors import Stop
from reproduce.drawing import new_figure, plot_curves, write_figure
from reproduce.measures.finished import finished, history, labels

import numpy as np
from tabulate import tabulate

LINES = 12  # most lines of the table in the terminal


def curve_of(folder, of: str) -> tuple[list[int], list[float]]:
    """Rounds and values of what a run has logged: `target`, an accuracy by its name in the result's curve
    (`ALL`, `photo 0.1`), or the mean over the clients of what they log (`loss`, `discarded`). Accuracies and
    shares are in [0, 1]."""
    result, entries = finished(folder), history(folder)
    if of in result["curve"]:
        return result["curve"]["round"], result["curve"][of]
    rounds, means = [], []
    logged = set(result["curve"]) - {"round"}
    for entry in entries:
        values = []
        for log in entry["clients"].values():
            logged |= set(log)
            if of in log:
                values.append(log[of])
        if values:
            rounds.append(entry["round"])
            means.append(float(np.mean(values)))
    if not rounds:
        raise Stop(f"{folder} has not logged {of!r}; it has {', '.join(sorted(logged))}", 2)
    return rounds, means


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--of", default="target", help="what is drawn over the rounds: target, ALL, AVG, loss, "
                                                       "discarded, ... [target]")


def show(flags) -> dict:
    """A table, the figure, and the numbers."""
    curves = {}
    for folder, name in zip(flags.folders, labels(flags.folders)):
        curves[name] = curve_of(folder, flags.of)
    if flags.out:
        figure = new_figure(5.4, 3.8)
        plot_curves(figure.subplots(), curves, flags.of)
        write_figure(flags.out, figure)
    by_round = {}  # {round: {label: value}}
    for name, (rounds, values) in curves.items():
        for t, value in zip(rounds, values):
            by_round.setdefault(t, {})[name] = value
    rounds = sorted(by_round)
    if len(rounds) > LINES:
        places = np.linspace(0, len(rounds) - 1, LINES).round().astype(int)
        rounds = [rounds[i] for i in places]
    table = []
    for t in rounds:
        table.append([t, *(by_round[t].get(name) for name in curves)])
    print(tabulate(table, [f"{flags.of}, round", *curves], floatfmt=".4f"))
    numbers = {name: {"round": rounds, "value": values} for name, (rounds, values) in curves.items()}
    return {"of": flags.of, "curves": numbers}
