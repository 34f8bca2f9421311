"""What a benchmark has found: a page, tables and figures in its folder."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path

from plumbing.files import write_csv, write_text
from plumbing.provenance import ROOT
from plumbing.several import accuracies_of
from reproduce.drawing import draw_line, new_panel, write_figure
from reproduce.statistics import LEVEL, BySeed, Paired, mean, paired

import numpy as np
from tabulate import tabulate

DRAWS = 2000  # of the bootstrap


def write(out: Path, chosen: list, trials: list[list], which: str, command: str) -> str:
    """Write all files; returns table and differences. `chosen`: of each method the trial that counts, of
    `trials`."""
    which = "last" if "linear" in chosen[0].results()[min(chosen[0].commands)][0]["last"] else which
    values = {one.entry.label: columns_of(one.results(), which) for one in chosen}
    shared = [name for name in next(iter(values.values())) if all(name in of for of in values.values())]
    heads = headline(shared)
    table = [[label, *(cell(of[name]) for name in shared), *costs(one.results())]
             for (label, of), one in zip(values.items(), chosen)]
    names = ["method", *shared, "minutes a run", "MB a round"]
    contrasts = compared(values, heads)
    tasks = {one.entry.label: tasks_of(one.results(), which) for one in chosen}
    differences = contrast_words(contrasts, tasks)
    forest = ["![Differences with their intervals](forest.png)"] if contrasts else []
    commands = [shlex.join(["export", f"PYTHONPATH={ROOT}"])]
    commands += [shlex.join(["python", *words]) for one in chosen for words in one.commands.values()]
    seeds = ", ".join(map(str, chosen[0].commands))
    page = ["# Benchmark", f"`{command}`",
            f"Accuracy (%), {'last' if which == 'last' else 'best validation'} round, mean ± deviation over "
            f"the seeds {seeds}.", tabulate(table, names, "github", disable_numparse=True),
            *differences, *forest, "![Accuracy over the rounds](curves.png)", *tuning_words(chosen, trials),
            "## The commands, seed by seed", "```\n" + "\n".join(commands) + "\n```"]
    write_text(out / "benchmark.md", "\n\n".join(page) + "\n")
    write_text(out / "table.tex", tabulate(table, names, "latex_booktabs", disable_numparse=True) + "\n")
    write_csv(out / "benchmark.csv", tidy(chosen, values))
    draw_forest(out / "forest.png", contrasts)
    draw_curves(out / "curves.png", chosen)
    return "\n\n".join([tabulate(table, names, "plain", disable_numparse=True), *differences])


# Numbers


def columns_of(of_seeds: dict[int, list[dict]], which: str) -> dict[str, BySeed]:
    """{name: {seed: percent}}: ALL and AVG, or each target and their mean."""
    found = {}
    for seed, results in of_seeds.items():
        for name, accuracy in accuracies_of(results, which).items():
            found.setdefault(name, {})[seed] = 100 * accuracy
    return found


def headline(names: list[str]) -> list[str]:
    """The columns that methods are compared by: means over targets, a target alone, or ALL and AVG."""
    means = [name for name in names if name.startswith("mean")]
    targets = [name for name in names if name not in ("ALL", "AVG")]
    return means or targets or ["ALL", "AVG"]


def tasks_of(of_seeds: dict[int, list[dict]], which: str) -> dict[str, list[float]]:
    """{task: its values of the seeds}: the targets, or where there is none the clients."""
    found = {}
    for results in of_seeds.values():
        values = {name: v for name, v in accuracies_of(results, which).items()
                  if name not in ("ALL", "AVG") and not name.startswith("mean")}
        for name, value in (values or results[0][which]["clients"]).items():
            found.setdefault(name, []).append(value)
    return found


def compared(values: dict[str, dict[str, BySeed]], heads: list[str]) -> list[tuple[str, str, Paired, Paired]]:
    """(name, column, difference at 95%, the same corrected) of the first method minus each other one. The
    corrected ones hold together (Bonferroni); none with fewer than three seeds."""
    first, *others = values
    pairs = []
    for other in others:
        for name in heads:
            one = paired(values[first][name], values[other][name])
            if one:
                pairs.append((other, name, one))
    level = LEVEL / max(len(pairs), 1)
    return [(f"{first} minus {other}", name, one, paired(values[first][name], values[other][name], level))
            for other, name, one in pairs]


def improvement(a: dict[str, list[float]], b: dict[str, list[float]]) -> tuple[float, float, float]:
    """The probability that a run of the first is better than one of the second, mean over the tasks, and its
    95% interval by a bootstrap of the seeds within each task (Agarwal et al., NeurIPS 2021)."""
    tasks = [(np.array(a[name]), np.array(b[name])) for name in a if name in b]
    random = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        draws.append(chance_better([(random.choice(x, len(x)), random.choice(y, len(y))) for x, y in tasks]))
    low, high = np.percentile(draws, [2.5, 97.5])
    return chance_better(tasks), float(low), float(high)


def chance_better(tasks: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """The mean over tasks of the share of pairs in which x is above y, ties as half."""
    shares = [np.mean((x[:, None] > y) + 0.5 * (x[:, None] == y)) for x, y in tasks]
    return float(np.mean(shares))


def costs(of_seeds: dict[int, list[dict]]) -> list[str]:
    """Minutes of a run, and the megabytes of a round, both ways."""
    results = [result for of_seed in of_seeds.values() for result in of_seed]
    minutes = statistics.mean(sum(result["seconds"].values()) for result in results) / 60
    sent = statistics.mean(r["bytes"]["up_per_round"] + r["bytes"]["down_per_round"] for r in results)
    return [f"{minutes:.1f}", f"{sent / 1e6:.1f}"]


# Words


def cell(values: BySeed) -> str:
    """95.10 ± 0.31; without a deviation if there is one seed."""
    spread = f" ± {statistics.stdev(values.values()):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}"


def verdict(corrected: Paired) -> str:
    low, high = corrected.interval
    return "above" if low > 0 else "below" if high < 0 else "cannot be told apart"


def contrast_words(contrasts: list, tasks: dict[str, dict]) -> list[str]:
    """The table of differences, or why there is none."""
    if not contrasts:
        return ["Differences need three seeds."]
    first, rows = next(iter(tasks)), []
    for words, name, one, corrected in contrasts:
        other = words.removeprefix(f"{first} minus ")
        p, low, high = improvement(tasks[first], tasks[other])
        rows.append([words, name, f"{one.difference:+.2f}", "{:+.2f} to {:+.2f}".format(*one.interval),
                     "{:+.2f} to {:+.2f}".format(*corrected.interval), verdict(corrected),
                     f"{p:.2f} ({low:.2f} to {high:.2f})"])
    heads = ["difference", "column", "points", "95% interval", "corrected", "verdict", "P(better)"]
    return [tabulate(rows, heads, "github", disable_numparse=True),
            "Differences are paired by seed, with Student's interval; *corrected* ones hold together "
            "(Bonferroni); the verdict is by them. P(better): the probability that a run of the first is "
            "better than one of the other on the same target (or client), with a bootstrap's 95% interval."]


def tuning_words(chosen: list, trials: list[list]) -> list[str]:
    """What was tried, and what was taken."""
    rows = []
    for one, of_entry in zip(chosen, trials):
        for trial in of_entry:
            if trial.values:
                said = ", ".join(f"{name} {value}" for name, value in trial.values)
                rows.append([one.entry.label, said, f"{100 * trial.validation():.2f}",
                             "taken" if trial is one else ""])
    if not rows:
        return []
    return ["## Tuning", "Mean validation accuracy (%) of the last ten evaluations, over seeds and targets.",
            tabulate(rows, ["method", "values", "validation", ""], "github", disable_numparse=True)]


def tidy(chosen: list, values: dict[str, dict[str, BySeed]]) -> list[list]:
    """A line for each number, below the heads."""
    lines = [["method", "tuned", "column", "seed", "accuracy"]]
    for one in chosen:
        tuned = " ".join(f"{name}={value}" for name, value in one.values)
        for name, by_seed in values[one.entry.label].items():
            lines += [[one.entry.label, tuned, name, seed, f"{v:.4f}"] for seed, v in by_seed.items()]
    return lines


# Figures


def draw_forest(path: Path, contrasts: list) -> None:
    """A row for each difference: thick its 95% interval, thin the corrected one."""
    panel = new_panel(8.0, 0.32 * len(contrasts) + 1.2)
    panel.axvline(0, color="0.5", linewidth=0.8)
    for i, (_, _, one, corrected) in enumerate(contrasts):
        panel.plot(corrected.interval, [i, i], color="C0", linewidth=0.9)
        panel.plot(one.interval, [i, i], color="C0", linewidth=2.6)
        panel.plot([one.difference], [i], "o", color="C0")
    panel.set_yticks(range(len(contrasts)), [f"{words}, {name}" for words, name, _, _ in contrasts])
    panel.set(ylim=(max(len(contrasts), 1) - 0.5, -0.5), xlabel="points; thick: 95%, thin: corrected")
    write_figure(path, panel.figure)


def draw_curves(path: Path, chosen: list) -> None:
    """The accuracy over the rounds, on the targets or over all clients' test images."""
    panel = new_panel(7.2, 4.8)
    for one in chosen:
        curves, rounds = [], []
        for results in one.results().values():
            for result in results:
                name = "target" if "target" in result["curve"] else "ALL"
                if name in result["curve"] and None not in result["curve"][name]:
                    curves.append(result["curve"][name])
                    rounds = result["curve"]["round"]
        points = {t: [100 * value for value in of_runs] for t, of_runs in zip(rounds, zip(*curves))}
        draw_line(panel, points, f"{one.entry.label} ({len(curves)} runs)", one.entry.name)
    panel.set(xlabel="round", ylabel="accuracy (%), higher is better")
    panel.legend(fontsize=8)
    write_figure(path, panel.figure)
