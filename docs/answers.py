"""What is measured of the papers' claims, for rows with a picture each (templates/forest.html), and the
learning curves of a method beside those of the method that it is to beat."""

from __future__ import annotations

import functools
from statistics import fmean

from docs.equations import ROOT
from docs.pages import TEMPLATES
from reproduce.claims import Answer, Measured, answers, curve_name, metric_of, read_claims
from reproduce.claims_pages import answer_words, gain_words, in_words, missing_words
from reproduce.records import Records
from reproduce.rendering import budget
from reproduce.tables import read_tables

WIDEST = 25.0  # points: an interval of few seeds may be longer, and is cut there


@functools.cache
def records() -> Records:
    """The recorded runs, read once."""
    return Records(ROOT / "results" / "runs.jsonl")


def read_answers() -> dict[str, list[Answer]]:
    """{paper: its claims with what is measured of them}."""
    papers = read_claims()
    every = answers(papers, read_tables(), records())
    return {paper.id: [answer for answer in every if answer.paper is paper] for paper in papers}


def nearest(every: list[Answer]) -> tuple[Answer, Measured] | None:
    """The first claim that has runs, in the paper's own setting or else in the first other one: its curves
    are shown, with its name."""
    with_runs = ((answer, measured) for answer in every for measured in answer.measured if measured.gains)
    return next(with_runs, None)


def by_claim(every: list[Answer]) -> list[tuple[Answer, Measured]]:
    """The rows of a figure of several claims: answers A alone, by papers/RULE.md."""
    return [(answer, answer.own) for answer in every]


def by_specification(answer: Answer) -> list[tuple[Answer, Measured]]:
    """The rows of a claim's specification plot: those with runs, by their gain."""
    with_runs = [measured for measured in answer.measured if measured.gains]
    return [(answer, measured) for measured in sorted(with_runs, key=lambda measured: measured.difference)]


def limits(rows: list[tuple[Answer, Measured]]) -> tuple[float, float]:
    """Where the axis of a figure begins and ends, in points."""
    ends = [0.0]
    for _, measured in rows:
        ends.append(measured.printed)
        if measured.gains:
            ends.append(measured.difference)
        if measured.gain():
            ends += measured.gain().interval
    return max(min(ends), -WIDEST) - 1, min(max(ends), WIDEST) + 1


def learning(measured: Measured, megabytes: bool = False) -> dict[str, list[tuple[float, float]]]:
    """{method: [(round, percent)]}: its mean accuracy over seeds and targets; or after how many megabytes
    that travelled, up and down."""
    metric, curves = metric_of(measured.claim, measured.specification), {}
    for name in measured.claim.methods:
        records = [by_seed[seed] for by_seed in measured.cases[name] for seed in measured.gains]
        per_round = fmean(r["bytes"]["up_per_round"] + r["bytes"]["down_per_round"] for r in records) / 1e6
        by_round = {}
        for record in records:
            for t, value in zip(record["curve"]["round"], record["curve"][curve_name(record, metric)]):
                if value is not None:
                    by_round.setdefault(t, []).append(100 * value)
        unit = per_round if megabytes else 1
        whole = [(t * unit, fmean(values)) for t, values in by_round.items() if len(values) == len(records)]
        curves[name] = whole
    return curves


for function in (answer_words, budget, by_claim, gain_words, in_words, learning, limits, missing_words,
                 nearest, records):
    TEMPLATES.globals[function.__name__] = function
