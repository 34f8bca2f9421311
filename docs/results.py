"""The results as pages: site/results.html counts the numbers that the papers print, table by table. Behind it
is a page for each table and figure (site/cells/), with a card for each cell and the runs behind it.

They are made of papers/*/tables/ and results/runs.jsonl; nothing is run.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from docs.answers import records
from docs.equations import ROOT, slug
from docs.pages import TEMPLATES, TITLES, Site
from reproduce.cells import WIDE, Cell, FilledBlock, chance, filled, rows_of
from reproduce.records import Records, command_of
from reproduce.rendering import budget, comparisons, number, ours
from reproduce.scoreboard import STATES, counts_of, sentence, state_of
from reproduce.tables import Table, papers, read_tables

from markupsafe import Markup

# Of each state of a cell what it says.
WORDS = STATES | {"recorded": "recorded, nothing published to compare with", "quoted": "quoted by the paper"}
SCALES = {"paper": "the paper's scale", "laptop": "laptop scale"}
LINES = 4  # of a curve; as many styles has docs/page.css


@dataclass
class Place:
    """A cell at both scales."""

    cells: dict[str, Cell]  # by scale

    @property
    def cell(self) -> Cell:
        """That of the paper's scale, for what both share."""
        return self.cells["paper"]

    @property
    def name(self) -> str:
        return f"{self.cell.row.method}, {self.cell.column.name}"

    @property
    def anchor(self) -> str:
        """Its address on the table's page."""
        return slug(f"{self.cell.block.title} {self.name}".replace(" -", " minus "))

    @property
    def counted(self) -> bool:
        """Whether it is in the scoreboard."""
        return not (self.cell.table.figure or self.cell.row.quoted or self.cell.row.ours)

    @property
    def scales(self) -> list[str]:
        """The scales at which it has a value or runs."""
        return [scale for scale, cell in self.cells.items() if cell.values or cell.records]

    @property
    def state(self) -> str:
        """One of WORDS: of what has a published number the scoreboard's."""
        if self.cell.row.quoted:
            return "quoted"
        if self.counted or self.cell.published:
            return state_of(*self.cells.values())
        if "paper" in self.scales:
            return "recorded"
        return "laptop" if self.scales else "not run"


@dataclass
class Filled:
    """A table with what is recorded of it."""

    table: Table
    # Of each block what it is at the paper's scale and at laptop scale, and its cells, row by row.
    parts: list[tuple[FilledBlock, FilledBlock, list[list[Place]]]]

    @property
    def page(self) -> Path:
        return Path("cells") / f"{self.table.id}.html"

    @property
    def places(self) -> list[Place]:
        return [place for _, _, lines in self.parts for line in lines for place in line]

    @property
    def has_runs(self) -> bool:
        """Whether any of its cells has a value or runs."""
        return not without_runs(self.places)

    @property
    def summary(self) -> str:
        """How many cells there are of each state."""
        counts = Counter(place.state for place in self.places if place.counted or self.table.figure)
        return "; ".join(f"{counts[state]} {words}" for state, words in WORDS.items() if counts[state])


def read(table: Table, records: Records) -> Filled:
    """A table at both scales, blocks and rows with runs first."""
    parts = []
    for block, small in zip(filled(table, records, "paper"), filled(table, records, "laptop")):
        lines = []
        for rows in rows_of([block], [small]):
            lines.append([Place(dict(zip(SCALES, cells))) for cells in zip(*rows)])
        parts.append((block, small, sorted(lines, key=without_runs)))
    return Filled(table, sorted(parts, key=lambda part: all(map(without_runs, part[2]))))


def without_runs(line: list[Place]) -> bool:
    """Whether nothing of a row is measured."""
    return not any(place.scales for place in line)


def build(site: Site) -> None:
    """Write the pages into a site."""
    tables = [read(table, records()) for table in read_tables()]
    counts, seen = Counter(), set()
    for each in tables:
        if not each.table.figure:
            blocks, smaller, _ = zip(*each.parts)
            counts += counts_of(rows_of(blocks, smaller), seen)
    site.write(Path("results.html"), "results.html", "Results", tables=tables, papers=papers(), titles=TITLES,
               sentence=sentence(counts))
    for each in tables:
        write_table(site, each)


def write_table(site: Site, each: Filled) -> None:
    """The page of a table; of a figure with what was drawn of it at each scale."""
    of, pictures = each.table, {}
    for scale, words in SCALES.items():
        path = Path("results/figures") / f"{of.file_name(scale)}.png"
        if of.figure and (ROOT / path).exists():
            pictures[words] = path
    site.write(each.page, "table.html", of.title, table=each, of=of, shown={}, notes=linked(of.notes),
               pictures=pictures)


def linked(notes: list[str]) -> str:
    """Notes as a Markdown list, in which a table's page and a claims page are links."""
    text = "\n".join(f"- {note}" for note in notes)
    text = re.sub(r"`((?:fedsr|fedadg|fedgala|fedcir|fdse)-\w+)`", r"[\1](../results/tables/\1.md)", text)
    return re.sub(r"\((?:results/)?(claims/\w+.md)\)", r"([claims](../results/\1))", text)


def command(place: Place, scale: str) -> str:
    """What runs seed 0 of a cell, and records it; empty where a smaller scale has none."""
    run = place.cells[scale].run
    return f"{run.command} --record results/runs.jsonl" if run else ""


# The runs


def curves_of(record: dict, logged: str = "") -> dict[str, list[tuple[int, float]]]:
    """{name: [(round, percent)]} of a record's rounds, without gaps and without a curve that is there twice.

    `logged`: of its logs the one to take in place of the accuracies, a share as well.
    """
    curve, drawn = dict(record["curve"]), {}
    rounds = curve.pop("round", [])
    if logged:
        values = record.get("logs", {}).get(logged, [])
        rounds, curve = range(1, len(values) + 1), {logged: values}
    if "val" in curve:
        curve["validation"] = curve.pop("val")  # the last one
    for name, values in curve.items():
        points = [(t, 100 * value) for t, value in zip(rounds, values) if value is not None]
        if len(points) > 1 and points not in drawn.values() and len(drawn) < LINES:
            drawn[name] = points
    return drawn


def plotted(curves: dict[str, list[tuple[float, float]]], xlabel: str, ylabel: str = "accuracy, %",
            best: int | None = None, floor: int = 0) -> Markup:
    """Curves in percent as SVG, from `floor` on. Empty without a line."""
    return Markup(TEMPLATES.get_template("curve.svg").render(
        curves=curves, xlabel=xlabel, ylabel=ylabel, best=best, floor=floor))


def drawing(record: dict, logged: str = "") -> Markup:
    """The curve of a run: its accuracies, or one of its logs."""
    best = record["best"].get("round") if "val" in record["curve"] else None
    return plotted(curves_of(record, logged), "rounds", f"{logged or 'accuracy'}, %", best)


# What the templates of these pages use.
for function in (number, ours, chance, comparisons, command, drawing, plotted, command_of):
    TEMPLATES.globals[function.__name__] = function
TEMPLATES.filters["budget"] = budget
TEMPLATES.globals |= {"WORDS": WORDS, "SCALES": SCALES, "WIDE": WIDE}
