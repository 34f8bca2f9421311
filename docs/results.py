"""The results as pages: site/results.html has a square for each number that a paper printed. Behind it is a page
for each table and figure (site/cells/), with a card for each cell and the runs behind it.

They are made of tables/ and results/runs.jsonl; nothing is run.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from docs import curve
from docs.equations import ROOT, slug
from docs.pages import TITLES, Site
from reproduce.cells import Cell, FilledBlock, chance, filled, run_of
from reproduce.records import Records, command_of
from reproduce.rendering import budget, cell_text, comparisons, number, ours
from reproduce.scoreboard import STATES, sentence, state_of, strip_of
from reproduce.statistics import LEVEL
from reproduce.tables import PAPERS, Block, Column, Row, Table, read_tables

# Of each state of a cell what it says; the first ones are the scoreboard's.
WORDS = {state: words for state, (words, _, _) in STATES.items()}
WORDS |= {"recorded": "recorded, nothing published to compare with", "quoted": "quoted by the paper"}
SCALES = {"paper": "the paper's scale", "laptop": "laptop scale"}
OTHERS = Path("cells/other-runs.html")


@dataclass
class Place:
    """A cell at both scales, and where it stands."""

    table: Table
    block: Block
    row: Row
    column: Column
    cells: dict[str, Cell]  # by scale
    anchor: str = ""  # on the table's page

    @property
    def name(self) -> str:
        return f"{self.row.method}, {self.column.name}"

    @property
    def counted(self) -> bool:
        """Whether it is in the scoreboard."""
        return not (self.table.figure or self.row.quoted or self.row.ours)

    @property
    def scales(self) -> list[str]:
        """The scales at which it has a value or runs."""
        return [scale for scale, cell in self.cells.items() if cell.values or cell.records]

    @property
    def state(self) -> str:
        """One of WORDS: of what has a published number the scoreboard's."""
        if self.row.quoted:
            return "quoted"
        if self.counted or self.cells["paper"].published:
            return state_of(self.row, self.cells["paper"], self.cells["laptop"])
        if "paper" in self.scales:
            return "recorded"
        return "laptop" if self.scales else "not run"

    @property
    def is_accuracy(self) -> bool:
        return chance(self.block, self.column) is not None


@dataclass
class Section:
    """A block of a table at both scales, and its cells row by row."""

    block: FilledBlock
    smaller: FilledBlock
    lines: list[list[Place]]

    @property
    def anchor(self) -> str:
        return f"block-{slug(self.block.block.title)}"


@dataclass
class Filled:
    """A table with what is recorded of it."""

    table: Table
    sections: list[Section]

    @property
    def page(self) -> Path:
        return Path("cells") / f"{self.table.id}.html"

    @property
    def places(self) -> list[Place]:
        return [place for section in self.sections for line in section.lines for place in line]

    @property
    def strip(self):
        return strip_of(self.table, [section.block for section in self.sections],
                        [section.smaller for section in self.sections])

    @property
    def summary(self) -> str:
        """How many cells there are of each state."""
        counts = Counter(place.state for place in self.places if place.counted or self.table.figure)
        return "; ".join(f"{counts[state]} {words}" for state, words in WORDS.items() if counts[state])


def read(table: Table, records: Records) -> Filled:
    """A table at both scales; its cells get their anchors."""
    sections, taken = [], Counter()
    for block, smaller in zip(filled(table, records, "paper"), filled(table, records, "laptop")):
        lines = []
        for line, small_line in zip(block.rows, smaller.rows):
            places = []
            for column, cell, small in zip(block.block.columns, line.cells, small_line.cells):
                place = Place(table, block.block, line.row, column, {"paper": cell, "laptop": small})
                name = slug(f"{block.block.title} {place.name}")
                taken[name] += 1
                place.anchor = name if taken[name] == 1 else f"{name}-{taken[name]}"
                places.append(place)
            lines.append(places)
        sections.append(Section(block, smaller, lines))
    return Filled(table, sections)


def build(site: Site) -> None:
    """Write the pages into a site."""
    records = Records(ROOT / "results" / "runs.jsonl")
    tables = [read(table, records) for table in read_tables()]
    counted = [table for table in tables if not table.table.figure]
    figures = [table for table in tables if table.table.figure]
    site.write(Path("results.html"), "results.html", "Results", tables=counted, figures=figures, papers=PAPERS,
               titles=TITLES, sentence=sentence([table.strip for table in counted]), others=OTHERS, **SHARED)
    for table in tables:
        write_table(site, table)
    site.add(Path("results/findings.md"))
    site.write(OTHERS, "other_runs.html", "Other runs", groups=other_runs(tables, records), **SHARED)


def write_table(site: Site, table: Filled) -> None:
    of = table.table
    pictures, files = {}, {}
    for scale, words in SCALES.items():
        name = of.file_name(scale)
        pictures[words] = Path("results/figures") / f"{name}.png"
        files[f"as one table, {words}"] = Path("results/tables") / f"{name}.md"
        files[f"as CSV, {words}"] = Path("results/tables") / f"{name}.csv"
    if not of.figure:
        pictures = {}
    site.write(table.page, "table.html", of.title, table=table, of=of, pictures=existing(pictures),
               files=existing(files), notes=linked(of.notes), once=Once(), **SHARED)


def existing(files: dict[str, Path]) -> dict[str, Path]:
    return {words: path for words, path in files.items() if (ROOT / path).exists()}


def linked(notes: list[str]) -> str:
    """Notes as a Markdown list, in which a table's page and findings.md are links."""
    text = "\n".join(f"- {note}" for note in notes)
    text = re.sub(r"`((?:fedsr|fedadg|fedgala|fedcir|fdse)-\w+)`", r"[\1](../results/tables/\1.md)", text)
    return text.replace("(findings.md)", "([findings](../results/findings.md))")


def note_of(row: Row) -> Path | None:
    """The note of a row's method."""
    note = Path("docs/methods") / f"{row.module.rpartition('.')[2]}.md"
    return note if (ROOT / note).is_file() else None


def other_runs(tables: list[Filled], records: Records) -> dict[str, list[dict]]:
    """{method and dataset: the runs that no table and no figure has}."""
    used = set()
    for table in tables:
        for place in table.places:
            for cell in place.cells.values():
                used |= {record["id"] for record in [*cell.records.values(), *cell.behind]}
    groups = {}
    for record in records.by_key.values():
        if record["id"] not in used:
            args = record["args"]
            name = f"{record['method']} on {args['dataset']}, {SCALES.get(args['scale'], args['scale'])}"
            groups.setdefault(name, []).append(record)
    return dict(sorted(groups.items()))


# The words of a cell


def published_words(place: Place) -> str:
    """What stands behind the published number, or in its place."""
    printed = place.cells["paper"].printed
    if not printed:
        if place.row.ours:
            return "nothing: the paper does not have this row"
        return "not printed" if place.table.figure else "lost when the paper was read as text"
    if place.row.quoted:
        return ", which the paper quotes from another one"
    if len(printed) < 2:
        return ", without a deviation"
    trials = f"{place.table.trials} trials" if place.table.trials else "an unknown number of trials"
    return f" (mean ± deviation of {trials})"


def measured_words(place: Place, scale: str) -> str:
    """What stands behind our number at a scale."""
    cell = place.cells[scale]
    if cell.computed:
        return ", computed from the network, without a run"
    if place.column.kind == "seconds":
        return ", of the longest run that had its machine to itself"
    seeds = ", ".join(map(str, cell.values))
    words = f" (one seed: {seeds})"
    if cell.deviation is not None:
        words = f" (mean ± deviation of {len(cell.values)} seeds: {seeds})"
    if place.is_accuracy:
        words += f"; chance is {number(chance(place.block, place.column))}"
    return words


def budgets(cell: Cell) -> str:
    """Images and rounds of a cell's runs."""
    return "; ".join(dict.fromkeys(budget(record["args"]) for record in cell.records.values()))


def reason(place: Place, scale: str) -> str:
    """Why there is no number; empty if a command would make it."""
    if place.row.quoted:
        return "the paper has not measured it itself"
    if not place.row.implemented:
        return f"not run: the method is not written yet ({place.row.module})"
    if place.cells[scale].records:
        return "a curve, in the runs below"
    if place.column.kind == "mean":
        return "not run: the mean of the other columns, of the seeds that all of them have"
    if place.column.kind in ("seconds", "cost") and scale != "paper":
        return "none: it is a number of the paper's scale"
    if run_of(place.block, place.row, place.column, scale, 0) is None:
        return "none: there is nothing to make smaller, or it is what the column varies"
    return ""


def command(place: Place, scale: str) -> str:
    """What runs seed 0 of a cell, and records it."""
    run = run_of(place.block, place.row, place.column, scale, 0)
    return f"{run.command} --record results/runs.jsonl"


def verdict_words(cell: Cell) -> str:
    """The test behind a verdict: the difference and the probability, or why there is none."""
    if cell.elsewhere:
        return "it is a time or a cost of another machine, or counted otherwise"
    difference = f"the difference is {cell.difference:+.2f}"
    if cell.computed:
        return f"the difference is {cell.difference:+.5f}, and one in the last printed digit is allowed"
    if cell.corrected is not None:
        side = "below" if cell.verdict == "differs" else "not below"
        return (f"{difference}; Welch's test has p = {cell.probability:.3g}, by Holm's correction for all tests "
                f"of this table p = {cell.corrected:.3g}, {side} {LEVEL}")
    if len(cell.values) < 2:
        return f"{difference}; no test, since there is one seed here, and it takes two"
    if len(cell.printed) < 2:
        return f"{difference}; no test, since the paper prints no deviation"
    if cell.trials < 2:
        return f"{difference}; no test, since the paper does not say of how many trials its deviation is"
    return f"{difference}; no test, since neither side has a deviation"


# The runs


class Once:
    """On a page each run is shown in one place; others link to it."""

    def __init__(self):
        self.places: dict[str, Place] = {}  # {id of a run: the card that has it}

    def first(self, record: dict, place: Place) -> Place:
        """The card that has a run: the first one that asks."""
        return self.places.setdefault(record["id"], place)


def runs_of(place: Place, scale: str) -> dict[int, dict]:
    """{seed: record} behind a cell."""
    cell = place.cells[scale]
    if place.column.kind == "seconds":
        return {record["args"]["seed"]: record for record in cell.behind}
    return cell.records


def drawing(record: dict, column: Column | None = None):
    """The curve of a run: its accuracies, or the log that a column shows."""
    logged = column.path if column and column.kind == "logs" else ""
    best = record["best"].get("round") if "val" in record["curve"] else None
    return curve.draw(curve.curves_of(record, logged), best, f"{logged}, %" if logged else "accuracy, %")


def facts(record: dict) -> dict[str, str]:
    """{what: words} of a run, beside its command."""
    code = f"commit {(record.get('commit') or 'not known')[:12]}"
    if record.get("dirty", record.get("uncommitted_changes")):
        code += ", with changes that no commit has"
    hardware, seconds = record["hardware"], record["seconds"]
    device = hardware.get("gpu") or hardware.get("cpu") or "a processor that is not known"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    minutes = sum(seconds.values()) / 60
    return {"Code": code,
            "Accuracy, %": "; ".join(accuracies(record)) or "none",
            "Budget": f"{budget(record['args'])}; {record['args']['backbone']}",
            "Machine": f"{record['args'].get('precision', 'precision not known')}, threads: "
                       f"{hardware.get('threads', '?')}, {device}; {versions}",
            "Time": f"{minutes:.1f} minutes; ended {record['finished']}"}


def accuracies(record: dict) -> list[str]:
    """Best and last round, pooled, averaged, and on each client or target."""
    found = []
    for part, name in (("best", "best validation round"), ("last", "last round")):
        of_part = record[part]
        if part == "best" and "val" not in record["curve"]:
            continue
        numbers = [f"{key} {100 * of_part[key]:.2f}" for key in ("ALL", "AVG", "target") if key in of_part]
        numbers += [f"{client} {100 * value:.1f}" for client, value in of_part.get("clients", {}).items()]
        for target, shares in of_part.get("linear", {}).items():
            for share, value in shares.items():
                numbers.append(f"{target} with {100 * float(share):.0f}% of its labels {100 * value:.2f}")
        if numbers:
            found.append(f"{name} {of_part.get('round', '')}: {', '.join(numbers)}")
    return found


# What the templates of these pages use.
SHARED = {"WORDS": WORDS, "SCALES": SCALES, "LEVEL": LEVEL, "number": number, "ours": ours, "cell_text": cell_text,
          "comparisons": comparisons, "published_words": published_words, "measured_words": measured_words,
          "budgets": budgets, "reason": reason, "command": command, "verdict_words": verdict_words,
          "runs_of": runs_of, "drawing": drawing, "facts": facts, "command_of": command_of, "note_of": note_of}
