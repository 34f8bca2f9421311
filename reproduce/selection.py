"""What the choice of the round is worth: the recorded curves by four rules (results/selection.md)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from reproduce.claims import Judged, Measured, curve_name
from reproduce.statistics import Paired, means_over_columns, paired

from tabulate import tabulate

LAST = 10  # evaluations; a curve with fewer has no mean of them
RULES = ("best validation", "last round", "mean of the last ten", "oracle")
HEAD = """# Which round counts

The same runs, by four rules: the round with the best validation accuracy, the last round, the mean of the
last ten evaluations, and the best test accuracy of all (the oracle, which nobody has). Only whole curves of
ten evaluations and more count. Accuracies in percent, means over the runs; made by `python
reproduce_tables.py`."""


def by_rules(record: dict, name: str) -> dict[str, float] | None:
    """{rule: percent} of a record's curve, such as AVG; None if it is short, has gaps or no validation."""
    curve = record["curve"]
    values, validation = curve.get(name, []), curve.get("val", [])
    if len(values) < LAST or not validation or None in (*values, *validation):
        return None
    chosen = validation.index(max(validation))
    found = values[chosen], values[-1], statistics.mean(values[-LAST:]), max(values)
    return {rule: 100 * value for rule, value in zip(RULES, found)}


def page(records: Iterable[dict], judged: list[Judged]) -> str:
    """The rules for each data set, and for each claim that has whole curves."""
    lines = []
    for (dataset, protocol), of_runs in of_datasets(records).items():
        means = [statistics.mean(one[rule] for one in of_runs) for rule in RULES]
        lines.append([dataset, protocol, len(of_runs), *(f"{value:.1f}" for value in means)])
    text = [HEAD, tabulate(lines, ["data set", "protocol", "runs", *RULES], "github", disable_numparse=True),
            "The gain of each claim, under the reading that counts or the first with three seeds:"]
    lines = []
    for one in judged:
        gains = gains_of(one.shown)
        if gains:
            lines.append([one.claim.id, one.shown.reading.name, f"{one.printed:+.1f}", *map(str, gains)])
    text.append(tabulate(lines, ["claim", "reading", "printed", *RULES], "github", disable_numparse=True))
    return "\n\n".join(text) + "\n"


def of_datasets(records: Iterable[dict]) -> dict[tuple[str, str], list[dict[str, float]]]:
    """{(data set, protocol): the rules' accuracies of each run}; of a left-out domain on that."""
    found = {}
    for record in records:
        protocol = record["args"]["protocol"]
        rules = by_rules(record, "target" if protocol == "lodo" else "AVG")
        if rules:
            found.setdefault((record["args"]["dataset"], protocol), []).append(rules)
    return dict(sorted(found.items()))


def gains_of(one: Measured) -> list[Paired] | None:
    """The gain of a claim by each rule; None if a curve is not whole or there are fewer than three seeds."""
    gains = []
    for rule in RULES:
        a, b = (values_of(one, name, rule) for name in one.claim.methods)
        gains.append(paired(a, b))
    return gains if all(gains) else None


def values_of(one: Measured, name: str, rule: str) -> dict[int, float]:
    """{seed: percent} of a method by a rule, mean over the cases."""
    cases = []
    for of_seeds in one.cases[name]:
        values = {}
        for seed, record in of_seeds.items():
            rules = by_rules(record, curve_name(record, one.metric))
            if rules:
                values[seed] = rules[rule]
        cases.append(values)
    return means_over_columns(cases)
