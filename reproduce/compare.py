"""Several runs in one plot, finished or not: curves over the rounds, mean and deviation over the seeds.

    python -m reproduce.compare runs/fedavg-... runs/fdse-... --out curves.png
    python -m reproduce.compare runs/fedavg-... runs/fdse-... --metric loss

A folder stands for the run in it, or for all runs below it. Runs that differ in the seed alone are one curve:
their mean at the rounds that all of them have, and from three seeds on their sample deviation around it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from plumbing.run.errors import UserError, one_line_on_failure
from plumbing.run.files import check_regular
from plumbing.run.results import best_of, no_formula
from plumbing.run.runfolder import DAMAGED, read_history
from plumbing.run.settings import Parser
from plumbing.run.several import mean_and_deviation
from reproduce.drawing import check_figure_path, draw_line, new_panel, table_text, write_figure
from reproduce.measures.finished import labels_of, numbers_of

ACCURACIES = {"target": "accuracy on the left-out domain (%)", "val": "validation accuracy ALL (%)",
              "ALL": "test accuracy over all images (%)", "AVG": "test accuracy, mean over the clients (%)"}
KEY = {"method": str, "dataset": str, "rounds": int, "seed": int}  # what is read of a run's identity


@dataclass
class OneRun:
    """What a run has recorded so far."""

    folder: Path
    key: dict  # the arguments that decide its numbers
    history: list[dict]  # its metrics, an entry for each round
    rounds: list[dict[str, float]]  # of each its numbers by name
    logged: set[str]  # what its clients log; other numbers are accuracies


@dataclass
class Group:
    """Runs of the same arguments with different seeds: one curve."""

    label: str  # with the number of seeds, and how far they are if not to the end
    method: str
    dataset: str
    curve: dict[int, list[float]]  # the values of all at each round that all of them have
    best: list[float]  # of each run the value after its best validation round, if that is there
    last: list[float]


def runs_in(folders: list[str]) -> list[OneRun]:
    """The runs in these folders and below, each once, in their order. Stop if a folder has no run."""
    by_folder = {}
    for folder in folders:
        here = [path.parent for path in sorted(Path(folder).rglob("metrics.jsonl"))]
        if not here:
            raise UserError(f"{folder} has no run with a metrics.jsonl in it: give the output folder of a "
                            "run", 2)
        for path in here:
            by_folder.setdefault(path.resolve(), path)
    return [read(path) for path in by_folder.values()]


def read(folder: Path) -> OneRun:
    """A run from its folder."""
    rounds, logged = [], set()
    file = folder / "settings.json"
    check_regular(file)
    with contextlib.suppress(OSError, UserError, *DAMAGED):
        key = json.loads(file.read_bytes())["identity"]
        history = read_history(folder)
        for entry in history:
            rounds.append(numbers_of(entry) | entry.get("test", {}).get("clients", {}))
            logged = logged.union(*entry["clients"].values(), entry.get("server", {}))
        if rounds and all(isinstance(key[name], kind) for name, kind in KEY.items()):
            return OneRun(folder, key, history, rounds, logged)
    raise UserError(f"{folder} is damaged, or no round is done: expected settings and a line of metrics for "
                    "each round", 2)


def grouped(runs: list[OneRun], metric: str) -> list[Group]:
    """A group for each set of arguments, whatever the seed, in the order of the runs."""
    by_arguments = {}
    for run in runs:
        text = json.dumps(run.key | {"seed": None}, sort_keys=True)
        other = by_arguments.setdefault(text, {}).setdefault(run.key["seed"], run)
        if other is not run:
            raise UserError(f"{other.folder} and {run.folder} are the same run: give one of them", 2)
    every = [list(members.values()) for members in by_arguments.values()]
    names = labels_of([members[0].key for members in every], ("seed",))
    return [group_of(name, members, metric) for name, members in zip(names, every)]


def group_of(label: str, members: list[OneRun], metric: str) -> Group:
    """The curve of some runs over the rounds that all of them have done. Stop if one has no such metric."""
    done, key = min(len(run.rounds) for run in members), members[0].key
    curves, best = [], []
    for run in members:
        rounds = dict(enumerate(run.rounds[:done], 1))
        curves.append({t: at[metric] for t, at in rounds.items() if metric in at})
        best.append(curves[-1].get(best_of(run.history[:done])["round"]))
        if not curves[-1]:
            names = ", ".join(dict.fromkeys(name for at in run.rounds for name in at))
            raise UserError(f"{run.folder} has no {metric!r}; it has {names}", 2)
    if len(members) > 1:
        label += f", {len(members)} seeds"
    if done < key["rounds"]:
        label += f", {done} of {key['rounds']} rounds"
    shared = [t for t in curves[0] if all(t in curve for curve in curves)]
    return Group(label, key["method"], key["dataset"], {t: [curve[t] for curve in curves] for t in shared},
                 [] if None in best else best, [curve[max(curve)] for curve in curves])


def shown(values: list[float], factor: float) -> str:
    """The mean, and from two values on the sample deviation."""
    digits = 2 if factor == 100 else 4
    return mean_and_deviation([factor * value for value in values], digits) if values else "-"


def table(groups: list[Group], metric: str, factor: float) -> str:
    """A row for each curve."""
    rows = [[group.label, shown(group.best, factor), shown(group.last, factor)] for group in groups]
    heads = [f"{metric} (%)" if factor == 100 else metric, "best validation round", "last round"]
    return table_text(rows, heads, "plain")


def draw(groups: list[Group], metric: str, factor: float, path: str) -> None:
    """Write the curves to a file: mean, and from three seeds on around it their deviation."""
    panel = new_panel(7.2, 4.4 + 0.22 * len(groups))
    for group in groups:
        points = {t: [factor * value for value in values] for t, values in group.curve.items()}
        draw_line(panel, points, no_formula(group.label), group.method)
    of_other = f"test accuracy on {metric} (%)" if factor == 100 else f"{metric}, mean over the clients"
    panel.grid(color="0.9", linewidth=0.6)
    panel.set(xlabel="round", ylabel=no_formula(ACCURACIES.get(metric, of_other)))
    panel.set_title(no_formula(", ".join(sorted({group.dataset for group in groups}))), fontsize=10)
    panel.figure.legend(fontsize=8, loc="outside lower center", frameon=False)
    write_figure(path, panel.figure)


def main(argv: list[str] | None = None) -> None:
    flags = parsed(argv)
    with one_line_on_failure("compare", "the runs are as they were"):
        if flags.out:
            check_figure_path(flags.out)
        runs = runs_in(flags.folders)
        with_target = all(any("target" in at for at in run.rounds) for run in runs)
        metric = flags.metric or ("target" if with_target else "ALL")
        groups = grouped(runs, metric)
        factor = 1 if any(metric in run.logged for run in runs) else 100
        print(table(groups, metric, factor))
        if flags.out:
            draw(groups, metric, factor, flags.out)
            print(f"curves in {flags.out}")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="compare", allow_abbrev=False, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="RUN", help="output folder of a run, or a folder with "
                                                                  "several runs")
    parser.add_argument("--metric", default="", help="value to draw: ALL, AVG, target, val, a client's name, "
                                                     "or a value that the clients log, such as loss [target "
                                                     "if all runs have one, else ALL]")
    parser.add_argument("--out", default="", metavar="FILE", help="file of the figure, .png, .pdf or .svg "
                                                                  "[only the table]")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
