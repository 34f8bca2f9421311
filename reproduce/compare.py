"""Several runs in one plot, finished or not: curves over the rounds, mean and deviation over the seeds.

    python -m reproduce.compare runs/fedavg-... runs/fdse-... --out curves.png
    python -m reproduce.compare runs/fedavg-... runs/fdse-... --metric loss

A folder stands for the run in it, or for all runs below it. Runs that differ in the seed alone are one curve:
their mean at the rounds that all of them have, and around it their sample deviation. The legend says in what
the curves differ.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from plumbing.errors import Stop, ending
from plumbing.files import write_json
from plumbing.results import no_formula
from plumbing.runfolder import is_run
from plumbing.settings import Parser, shown_value
from reproduce.drawing import figure_format, new_figure, write_figure
from reproduce.measures.finished import labels_of

from tabulate import tabulate

# Okabe and Ito's colours, without their yellow, that most people with any colour vision can tell apart; after
# the last one they come again with another stroke.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STROKES = ("-", "--", ":", "-.")
ACCURACIES = ("ALL", "AVG", "target", "val")


@dataclass
class OneRun:
    """What a run has recorded so far."""

    folder: Path
    key: dict  # the arguments that decide its numbers
    entries: list[dict]  # of metrics.jsonl

    @property
    def rounds(self) -> int:
        return len(self.entries)


@dataclass
class Group:
    """Runs of the same arguments with different seeds: one curve."""

    label: str
    runs: list[OneRun]
    curve: dict[int, list[float]]  # of each round that all of them have, the values

    def described(self) -> str:
        """The label, how many seeds, and how far they are if not to the end."""
        words = self.label
        if len(self.runs) > 1:
            words += f", {len(self.runs)} seeds"
        done, wanted = min(run.rounds for run in self.runs), self.runs[0].key["rounds"]
        if done < wanted:
            words += f", {done} of {wanted} rounds"
        return words


# What the runs have recorded


def runs_in(folders: list[str]) -> list[OneRun]:
    """The runs in these folders and below, each once, in their order; what a shell's * adds of files is left
    out. Stop if a folder has no run."""
    found = {}
    for folder in folders:
        if Path(folder).is_file() and len(folders) > 1:
            continue
        below = sorted(path.parent for path in Path(folder).rglob("metrics.jsonl"))
        here = [path for path in below if is_run(path)]
        if not here:
            raise Stop(f"{folder} has no run with a metrics.jsonl in it: give the output folder of a run", 2)
        for path in here:
            found.setdefault(path.resolve(), path)
    if not found:
        raise Stop(f"{folders[0]} is a file: give the output folder of a run", 2)
    return [OneRun(path, arguments(path), rounds_of(path)) for path in found.values()]


def rounds_of(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl, one for each round that is done. Stop if it has others or none."""
    path = folder / "metrics.jsonl"
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        rounds = [entry["round"] for entry in entries]
        for entry in entries:
            check_entry(entry)
        if entries and rounds == list(range(1, len(entries) + 1)):
            return entries
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise Stop(f"{path} is damaged, or no round is done: expected one line of metrics for each round", 2)


def check_entry(entry: dict) -> None:
    """KeyError, TypeError or AttributeError unless a line of metrics has what is read of it."""
    numbers = [entry["val"]["ALL"]] if "val" in entry else []
    for log in entry["clients"].values():
        numbers += log.values()
    test = entry.get("test", {})
    numbers += test.get("clients", {}).values()
    numbers += [test[name] for name in ("ALL", "AVG") if name in test]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError


def arguments(folder: Path) -> dict:
    """The arguments that decide a run's numbers, and its method: from its result, or its settings while it is
    not finished."""
    try:
        result = folder / "result.json"
        if result.exists():
            key = dict(json.loads(result.read_text())["args"])
        else:
            key = dict(json.loads((folder / "settings.json").read_text())["identity"])
        return key | {"method": str(key["method"]), "rounds": int(key["rounds"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise Stop(f"{folder}: neither result.json nor settings.json names its arguments", 2)


def value_of(entry: dict, metric: str) -> float | None:
    """A number of a round's line of metrics: an accuracy, that of a client by its name, or the mean over the
    clients of what they log; None if the round has none."""
    if metric == "val":
        return entry["val"]["ALL"] if "val" in entry else None
    if metric == "target":
        return entry.get("target")
    test = entry.get("test", {})
    if metric in ("ALL", "AVG"):
        return test.get(metric)
    if metric in test.get("clients", {}):
        return test["clients"][metric]
    logged = [log[metric] for log in entry["clients"].values() if metric in log]
    return statistics.mean(logged) if logged else None


def curve_of(run: OneRun, metric: str) -> dict[int, float]:
    """{round: value}. Stop if the run has no such metric."""
    curve = {}
    for entry in run.entries:
        value = value_of(entry, metric)
        if value is not None:
            curve[entry["round"]] = value
    if not curve:
        raise Stop(f"{run.folder} has no {metric!r}; it has {', '.join(metrics_of(run))}", 2)
    return curve


def metrics_of(run: OneRun) -> list[str]:
    """The metrics that a run has."""
    names = {}
    for entry in run.entries:
        names |= dict.fromkeys(name for name in ACCURACIES if value_of(entry, name) is not None)
        names |= dict.fromkeys(entry.get("test", {}).get("clients", {}))
        for log in entry["clients"].values():
            names |= dict.fromkeys(log)
    return list(names)


def is_accuracy(metric: str, run: OneRun) -> bool:
    """Whether a metric is a share of images, shown in percent."""
    clients = set()
    for entry in run.entries:
        clients |= entry.get("test", {}).get("clients", {}).keys()
    return metric in ACCURACIES or metric in clients


def usual_metric(runs: list[OneRun]) -> str:
    """The accuracy on the left-out domain if all runs have one, else ALL."""
    if all("target" in metrics_of(run) for run in runs):
        return "target"
    return "ALL"


# Grouped by what differs


def grouped(runs: list[OneRun], metric: str) -> list[Group]:
    """A group for each set of arguments, whatever the seed, in the order of the runs; of each run the rounds
    that all of its group have done."""
    by_arguments = {}
    for run in runs:
        text = json.dumps(run.key | {"seed": None}, sort_keys=True)
        by_arguments.setdefault(text, []).append(run)
    members = []
    for of_group in by_arguments.values():
        refuse_twice(of_group)
        shortest = min(of_group, key=lambda run: run.rounds)
        curve_of(shortest, metric)  # it has to have what is compared
        done = shortest.rounds
        members.append([replace(run, entries=run.entries[:done]) for run in of_group])
    names = labels_of([of_group[0].key for of_group in members])
    groups = []
    for name, of_group in zip(names, members):
        curves = [curve_of(run, metric) for run in of_group]
        shared = [t for t in curves[0] if all(t in curve for curve in curves)]
        groups.append(Group(name, of_group, {t: [curve[t] for curve in curves] for t in shared}))
    return groups


def refuse_twice(runs: list[OneRun]) -> None:
    """Stop if two folders hold the same run."""
    of_seed = {}
    for run in runs:
        seed = run.key.get("seed")
        if seed in of_seed:
            raise Stop(f"{of_seed[seed].folder} and {run.folder} are the same run (seed {seed}): give one of "
                       "them", 2)
        of_seed[seed] = run


def labels_of(keys: list[dict]) -> list[str]:
    """For each set of arguments the method, and where several are of one method, the arguments in which these
    differ."""
    plain = [name_of(key["method"], key.get("variant")) for key in keys]
    labels = []
    for name, key in zip(plain, keys):
        same = [other for other, of_other in zip(keys, plain) if of_other == name]
        different = []
        for argument in sorted(set().union(*same) - {"seed"}):
            if any(other.get(argument) != key.get(argument) for other in same):
                different.append(f"{argument.strip('_')} {shown_value(key.get(argument))}")
        labels.append(f"{name}, {', '.join(different)}" if different else name)
    return labels


# The table


def best_and_last(group: Group, metric: str) -> tuple[list[float], list[float]]:
    """Of each run the value after its round of the best validation accuracy (the first of equals), if it has
    one, and after the last round that has a value."""
    best, last = [], []
    for run in group.runs:
        curve = curve_of(run, metric)
        last.append(curve[max(curve)])
        validated = [entry for entry in run.entries if "val" in entry]
        if validated:
            chosen = max(validated, key=lambda entry: entry["val"]["ALL"])
            best.append(curve.get(chosen["round"]))
    if None in best:
        best = []
    return best, last


def shown(values: list[float], factor: float) -> str:
    """The mean, and from two values on the sample deviation."""
    if not values:
        return "-"
    digits = 2 if factor == 100 else 4
    text = f"{factor * statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" +- {factor * statistics.stdev(values):.{digits}f}"
    return text


def table(groups: list[Group], metric: str, factor: float) -> str:
    """A row for each curve."""
    rows = []
    for group in groups:
        best, last = best_and_last(group, metric)
        done = [run.rounds for run in group.runs]
        rounds = f"{min(done)} of {group.runs[0].key['rounds']}"
        rows.append([group.label, len(group.runs), rounds, shown(best, factor), shown(last, factor)])
    unit = " (%)" if factor == 100 else ""
    heads = [f"{metric}{unit}", "seeds", "rounds", "best validation round", "last round"]
    return tabulate(rows, heads, tablefmt="plain", disable_numparse=True)


# The figure


def draw(groups: list[Group], metric: str, factor: float, path: str) -> None:
    """Write the curves to a file: mean, and around it the deviation over the seeds."""
    longest = max(len(group.described()) for group in groups)
    below = len(groups) > 4 or longest > 40  # many names, or long ones, would cover the curves
    columns = max(1, min(4, 100 // (longest + 8)))  # of names, as many as are as wide as the figure
    lines = math.ceil(len(groups) / columns)
    figure = new_figure(7.2, 4.4 + (0.22 * lines if below else 0))
    panel = figure.subplots()
    for i, group in enumerate(groups):
        colour = COLOURS[i % len(COLOURS)]
        stroke = STROKES[i // len(COLOURS) % len(STROKES)]
        rounds = sorted(group.curve)
        means = [factor * statistics.mean(group.curve[t]) for t in rounds]
        marker = "o" if len(rounds) < 30 else None
        panel.plot(rounds, means, stroke, color=colour, linewidth=1.6, marker=marker, markersize=3,
                   label=no_formula(group.described()))
        if len(group.runs) > 1:
            deviations = [factor * statistics.stdev(group.curve[t]) for t in rounds]
            least = [mean - deviation for mean, deviation in zip(means, deviations)]
            most = [mean + deviation for mean, deviation in zip(means, deviations)]
            panel.fill_between(rounds, least, most, color=colour, alpha=0.18, linewidth=0)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(color="0.9", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.set(xlabel="round", ylabel=no_formula(axis_label(metric, factor)))
    panel.set_title(no_formula(heading(groups)), fontsize=10)
    if below:
        figure.legend(fontsize=8, loc="outside lower center", frameon=False, ncols=columns)
    else:
        place = "lower right" if factor == 100 else "upper right"  # where rising and falling curves are not
        panel.legend(fontsize=8, frameon=False, loc=place)
    write_figure(path, figure)


def axis_label(metric: str, factor: float) -> str:
    """accuracy ALL (%), or loss, mean over the clients."""
    words = {"target": "accuracy on the left-out domain (%)", "val": "validation accuracy ALL (%)",
             "ALL": "test accuracy over all images (%)", "AVG": "test accuracy, mean over the clients (%)"}
    if metric in words:
        return words[metric]
    return f"test accuracy on {metric} (%)" if factor == 100 else f"{metric}, mean over the clients"


def heading(groups: list[Group]) -> str:
    """What all runs have in common: dataset, protocol with its target, scale; and what the band is."""
    keys = [group.runs[0].key for group in groups]
    words = []
    for name in ("dataset", "protocol", "target", "scale"):
        values = {key.get(name) for key in keys}
        if len(values) == 1 and values != {"all"}:
            value = str(values.pop())
            words.append(f"{value} scale" if name == "scale" else value)
    if any(len(group.runs) > 1 for group in groups):
        words.append("band: sample deviation over the seeds")
    return ", ".join(words)


# The command line


def main(argv: list[str] | None = None) -> None:
    """The command line. Bad usage or a folder that is no run ends it with one line and exit code 2."""
    flags = parsed(argv)
    try:
        if flags.out:
            figure_format(flags.out)
        runs = runs_in(flags.folders)
        metric = flags.metric or usual_metric(runs)
        groups = grouped(runs, metric)
        factor = 100 if all(is_accuracy(metric, run) for run in runs) else 1
        print(table(groups, metric, factor))
        if flags.out:
            draw(groups, metric, factor, flags.out)
            print(f"curves in {flags.out}")
        if flags.json:
            write_json(Path(flags.json), numbers(groups, metric))
        return
    except (Stop, OSError, KeyboardInterrupt, MemoryError) as e:
        message, code = ending(e, "the runs are as they were")
    print(f"compare: {message}", file=sys.stderr)
    sys.exit(code)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="compare", allow_abbrev=False, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="RUN",
                        help="output folder of a run, or a folder of several")
    parser.add_argument("--metric", default="",
                        help="what is drawn: ALL, AVG, target, val, a client's name, or what the clients "
                             "log, such as loss [target if all runs have one, else ALL]")
    parser.add_argument("--out", default="", metavar="FILE",
                        help="file of the figure, .png, .pdf or .svg [the table alone]")
    parser.add_argument("--json", default="", metavar="FILE", help="file for the numbers behind it [none]")
    return parser.parse_args(argv)


def numbers(groups: list[Group], metric: str) -> dict:
    """The curves, for a program: of each the folders, the rounds, and at each round the seeds' values."""
    curves = []
    for group in groups:
        best, last = best_and_last(group, metric)
        rounds = sorted(group.curve)
        curves.append({"label": group.label, "folders": [str(run.folder) for run in group.runs],
                       "seeds": [run.key.get("seed") for run in group.runs], "round": rounds,
                       "values": [group.curve[t] for t in rounds], "best": best, "last": last})
    return {"metric": metric, "curves": curves}


if __name__ == "__main__":
    main()
