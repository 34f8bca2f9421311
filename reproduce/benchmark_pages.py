"""What a benchmark has found: a page, tables and figures in its folder."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import statistics
from functools import partial
from pathlib import Path

from plumbing.run.errors import UserError
from plumbing.run.files import write_csv, write_text
from plumbing.run.provenance import ROOT
from plumbing.run.settings import Args, flag_of
from plumbing.run.several import BySeed, by_seed, columns_of, mean_and_deviation, with_means
from reproduce.drawing import (OURS, Line, draw_forest, draw_line, new_panel, percentages, table_text,
                               write_figure)
from reproduce.intervals import LEVEL, Paired, mean, paired

import numpy as np

NOT_LEARNED = ("untrained: ", "one class: ", "domain gap: ")  # so begin the lines of logs that are repeated
WIDEST = 12  # domains that a table has a column for; the CSV file has all


def write(out: Path, chosen: list, trials: list[list], which: str, measure: str, command: str) -> str:
    """Write all files; returns table and differences. `chosen`: of each method the trial that counts, of
    `trials`."""
    runs = {trial.entry.label: trial.results() for trial in chosen}
    first, *_ = runs.values()
    which = "last" if "linear" in first[0]["last"] else which
    values = {label: values_of(results, which, measure) for label, results in runs.items()}
    columns = distinct(values)
    every = {label: values[label] | sites_of(results, which, measure) for label, results in runs.items()}
    domains = [name for name in shared_names(every) if name not in values[chosen[0].entry.label]]
    names = columns + (domains if len(domains) <= WIDEST else [])
    table = [[*row, megabytes(results)] for row, results in zip(accuracy_rows(every, names), runs.values())]
    heads = ["method", *names, "MB a round"]
    contrasts = compared(values, headline(columns))
    differences = [*contrast_words(contrasts), *untrained_words(chosen)]
    forest = ["![Differences with their intervals](forest.png)"] if contrasts else []
    commands = [shlex.join(["export", f"PYTHONPATH={ROOT}"])]
    commands += [shlex.join(["python", *words]) for trial in chosen for words in trial.commands.values()]
    seeds = ", ".join(map(str, chosen[0].commands))
    page = ["# Benchmark", f"`{command}`",
            f"{measure} (%), {'last' if which == 'last' else 'best validation'} round, mean ± deviation over "
            f"the seeds {seeds}; the best of each column is bold.",
            table_text(table, heads),
            *counts_words(chosen, which, measure), *differences, *settings_words(chosen), *forest,
            "![Accuracy over the rounds](curves.png)",
            *tuning_words(chosen, trials),
            "## The commands, seed by seed", "```\n" + "\n".join(commands) + "\n```"]
    write_text(out / "benchmark.md", "\n\n".join(page) + "\n")
    latex = table_text(table, heads, "latex_booktabs")
    write_text(out / "table.tex", re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", latex) + "\n")
    write_csv(out / "benchmark.csv", tidy(chosen, every, measure))
    lines = [Line(f"{words}, {name}", [plain.difference], plain.interval, wider=corrected.interval)
             for words, name, plain, corrected in contrasts]
    (out / "forest.png").unlink(missing_ok=True)
    if lines:
        draw_forest(out / "forest.png", lines, "points; thick: 95%, thin: corrected", mark=OURS)
    draw_curves(out / "curves.png", chosen)
    plain = []
    for row in table:
        plain.append([words.replace("**", "") for words in row])
    return "\n\n".join([table_text(plain, heads, "plain"), *differences, *settings_words(chosen)])


# Numbers


def values_of(results: list[dict], which: str, measure="accuracy") -> dict[str, BySeed]:
    """The accuracies, or another measure of each target or client, and the means."""
    if measure == "accuracy":
        return columns_of(results, which)
    return with_means(by_seed(results, partial(measured, which, measure)))


def measured(which: str, measure: str, result: dict) -> dict[str, float]:
    """A measure of the target, or of each client. Stop if one of them has none."""
    of, of_site = result.get("measures", {}).get(which, {}), {}
    for name in [result["args"]["target"]] if "target" in result[which] else of:
        of_site[name] = of.get(name, {}).get(measure)
        if of_site[name] is None:
            raise UserError(f"--measure {measure}: {name} has none, since its test images lack a class, "
                            "or its network has no classifier; --measure accuracy has one, of these runs", 2)
    return of_site


def sites_of(results: list[dict], which: str, measure: str) -> dict[str, BySeed]:
    """The accuracies of the clients, where there is no target."""
    if measure != "accuracy" or "clients" not in results[0][which] or "target" in results[0][which]:
        return {}
    return by_seed(results, lambda result: result[which]["clients"])


def shared_names(values: dict[str, dict]) -> list[str]:
    """The columns that all methods have."""
    first, *others = values.values()
    return [name for name in first if all(name in names for names in others)]


def distinct(values: dict[str, dict[str, BySeed]]) -> list[str]:
    """The columns that all methods have, without AVG where it is ALL: all clients have as many images."""
    names = shared_names(values)
    for by_name in values.values():
        if "AVG" not in names or not np.allclose([*by_name["ALL"].values()], [*by_name["AVG"].values()]):
            return names
    names.remove("AVG")
    return names


def headline(names: list[str]) -> list[str]:
    """The columns that methods are compared by: means over targets, a target alone, or ALL and AVG."""
    # mean, or of runs without labels mean, 10% of the labels; a domain's name has no comma
    means = [name for name in names if name.partition(",")[0] == "mean"]
    targets = [name for name in names if name not in ("ALL", "AVG")]
    return means or targets or names


def compared(values: dict[str, dict[str, BySeed]], heads: list[str]) -> list[tuple[str, str, Paired, Paired]]:
    """(name, column, difference at 95%, the same corrected) of the first method minus each other one. The
    corrected ones hold together (Bonferroni); none with fewer than three seeds."""
    first, *others = values
    pairs = []
    for other in others:
        for name in heads:
            plain = paired(values[first][name], values[other][name])
            if plain:
                pairs.append((other, name, plain))
    level = LEVEL / max(len(pairs), 1)
    return [(f"{first} minus {other}", name, plain, paired(values[first][name], values[other][name], level))
            for other, name, plain in pairs]


def megabytes(results: list[dict]) -> str:
    """The megabytes of a round, both ways."""
    sent = [result["bytes"]["up_per_round"] + result["bytes"]["down_per_round"]
            for result in results]
    return f"{statistics.mean(sent) / 1e6:.1f}"


# Words


def cell(values: BySeed) -> str:
    """95.10 ± 0.31; without a deviation if there is one seed."""
    return mean_and_deviation([*values.values()]).replace("+-", "±")


def accuracy_rows(values: dict[str, dict[str, BySeed]], names: list[str]) -> list[list[str]]:
    """A row for each method; the best mean of each column is bold."""
    best = {name: max(mean(by_name[name]) for by_name in values.values()) for name in names}
    rows = []
    for label, by_name in values.items():
        row = [label]
        for name in names:
            shown = cell(by_name[name])
            row.append(f"**{shown}**" if mean(by_name[name]) == best[name] else shown)
        rows.append(row)
    return rows


def side(pair: Paired) -> str:
    low, high = pair.interval
    return "above" if low > 0 else "below" if high < 0 else "cannot be told apart"


def verdict(plain: Paired, corrected: Paired) -> str:
    """What the plain interval says, and whether the corrected one says it too."""
    if side(plain) == side(corrected):
        return side(plain)
    return f"{side(plain)}; corrected: {side(corrected)}"


def contrast_words(contrasts: list) -> list[str]:
    """The table of differences, or why there is none."""
    if not contrasts:
        return ["Differences need three seeds."]
    rows = []
    for words, name, plain, corrected in contrasts:
        rows.append([words, name, f"{plain.difference:+.2f}", "{:+.2f} to {:+.2f}".format(*plain.interval),
                     "{:+.2f} to {:+.2f}".format(*corrected.interval), verdict(plain, corrected)])
    heads = ["difference", "column", "points", "95% interval", "corrected", "verdict"]
    return [table_text(rows, heads),
            "Differences are paired by seed, with Student's 95% interval. *Corrected* intervals are wider: "
            f"all ({len(rows)}) hold together (Bonferroni). The verdict is of the plain interval; where the "
            "corrected one says less, it says so."]


def counts_words(chosen: list, which: str, measure: str) -> list[str]:
    """On how many images of each class a measure of each client or target stands; of accuracies the tables
    of the runs say it."""
    if measure == "accuracy":
        return []
    counts, classes = {}, []
    for result, path in zip(chosen[0].results(), chosen[0].paths()):
        classes = json.loads((path / "settings.json").read_bytes())["data"]["classes"]
        of_sites = result["measures"][which]
        for name in [result["args"]["target"]] if "target" in result[which] else of_sites:
            tested = [sum(row) for row in of_sites[name]["confusion"]]
            counts.setdefault(name, []).append(tested)
    rows = []
    for name, of_runs in counts.items():
        rows.append([name, *("/".join(map(str, of_class)) for of_class in zip(*of_runs))])
    seeds = "/".join(map(str, chosen[0].commands))
    return [table_text(rows, [f"images tested, seeds {seeds}", *classes])]


def settings_words(chosen: list) -> list[str]:
    """The settings that all methods have, where their values differ."""
    lines = []
    for f in dataclasses.fields(Args):
        values = {trial.entry.label: getattr(trial.args, f.name) for trial in chosen}
        if f.metadata["numbers"] and len(set(values.values())) > 1:
            each = ", ".join(f"{value} ({label})" for label, value in values.items())
            lines.append(f"{flag_of(f.name)} {each}")
    return [f"Settings in which the methods differ: {'; '.join(lines)}."] if lines else []


def untrained_words(chosen: list) -> list[str]:
    """The runs whose log says that they are no better than chance, somewhere."""
    lines = []
    for trial in chosen:
        for seed in trial.commands:
            log = trial.folder / f"s{seed}" / "log.txt"
            said = log.read_text(errors="replace", encoding="utf-8").splitlines() if log.exists() else []
            lines += [f"- {trial.entry.label}, seed {seed}: {line}" for line in dict.fromkeys(said)
                      if line.startswith(NOT_LEARNED)]
    return ["\n".join(lines)] if lines else []


def tuning_words(chosen: list, trials: list[list]) -> list[str]:
    """What was tried, and what was taken."""
    rows = []
    for taken, of_entry in zip(chosen, trials):
        for trial in of_entry:
            if trial.values:
                said = ", ".join(f"{name} {value}" for name, value in trial.values)
                rows.append([taken.entry.label, said, f"{100 * trial.validation():.2f}",
                             "taken" if trial is taken else ""])
    if not rows:
        return []
    return ["## Tuning", "Mean validation accuracy (%) of the last ten evaluations, over seeds and targets.",
            table_text(rows, ["method", "values", "validation", ""])]


def tidy(chosen: list, values: dict[str, dict[str, BySeed]], measure: str) -> list[list]:
    """A line for each number, below the heads."""
    lines = [["method", "tuned", "column", "seed", measure]]
    for trial in chosen:
        tuned = " ".join(f"{name}={value}" for name, value in trial.values)
        for name, of_seed in values[trial.entry.label].items():
            lines += [[trial.entry.label, tuned, name, seed, f"{v:.4f}"] for seed, v in of_seed.items()]
    return lines


# Figures


def draw_curves(path: Path, chosen: list) -> None:
    """The accuracy over the rounds, on the targets or over all clients' test images; where these were not
    tested in every evaluation (--test-rounds best), on the validation images."""
    panel = new_panel(7.2, 4.8)
    for trial in chosen:
        curves = [result["curve"] for result in trial.results()]
        name = "target" if "target" in curves[0] else "ALL"
        words = ""
        if any(None in curve[name] for curve in curves):
            name, words = "val", ", validation"
        points = percentages(curves[0]["round"], [curve[name] for curve in curves])
        draw_line(panel, points, f"{trial.entry.label} ({len(curves)} runs{words})", trial.entry.name)
    panel.set(xlabel="round", ylabel="accuracy (%), higher is better")
    panel.legend(fontsize=8)
    write_figure(path, panel.figure)
