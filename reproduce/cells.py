"""The cells of the tables: the run behind each, the numbers that the records have of it, and the runs that
are missing."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from plumbing.data.catalog import FOLDERS
from plumbing.run.errors import UserError
from plumbing.run.several import means_over_columns
from reproduce import intervals
from reproduce.measures.overhead import network_cost
from reproduce.methods import setting, short_name
from reproduce.records import PlannedRun, Records, cut_off, lacks_reading, reading_of
from reproduce.tables import Block, Column, Row, Table

WIDE = 3.0  # points: an interval with 0 that reaches further cannot tell
SEEDS = 5  # with fewer nothing is decided
BUDGET = re.compile(r"--(rounds|epochs|steps|image-size) \S+")  # what a smaller scale sets itself


# The run behind a cell


def run_of(block: Block, row: Row, column: Column, scale: str, seed: int = 0) -> PlannedRun | None:
    """The run behind a cell; None where a smaller scale has none.

    A smaller scale has its own budget (rounds, epochs, steps, image size), so that of the tables is left out;
    there is no cell if the budget is the column's subject, or if nothing is smaller.
    """
    start = f"--dataset {block.dataset} {block.flags} {row.flags}"
    whole = tuple(f"{start} {column.flags}".split())
    if scale == "paper":
        return PlannedRun(row.module, whole, seed)
    if BUDGET.search(column.flags):
        return None
    laptop = f"{block.laptop} {row.laptop}" if scale == "laptop" else ""
    smaller = tuple(f"{BUDGET.sub('', start)} --scale {scale} {laptop} {column.flags}".split())
    try:
        same = dataclasses.replace(setting(row.module, smaller), scale="paper")
    except UserError:
        if scale != "smoke":
            raise
        return None  # its two rounds do not go with a flag of the table
    if same == setting(row.module, whole):
        return None
    return PlannedRun(row.module, smaller, seed)


# A cell and its numbers


@dataclass
class Cell:
    """A published number and what was measured here, in the published unit."""

    printed: list[str]  # what is published: [mean, deviation], [mean] or []
    values: dict[int, float] = field(default_factory=dict)  # by seed
    table: Table | None = None  # where it stands
    block: Block | None = None
    row: Row | None = None
    column: Column | None = None
    scale: str = "paper"
    missing: list[PlannedRun] = field(default_factory=list)  # the runs that are not recorded
    trials: int = 0  # behind the published mean; 0: not said
    records: dict[int, dict] = field(default_factory=dict)  # by seed, all of one precision
    behind: list[dict] = field(default_factory=list)  # the records that the values are from; of a mean all
    precision: str = ""  # of the records
    computed: bool = False  # from the network alone, without a run
    of_columns: float | None = None  # the published deviation of a mean, by those of its columns
    elsewhere: list[str] = field(default_factory=list)  # what others print of it
    verdict: str = ""  # of a published and measured cell: agrees, unclear, differs or untested

    @functools.cached_property
    def run(self) -> PlannedRun | None:
        return run_of(self.block, self.row, self.column, self.scale)

    @property
    def published(self) -> list[float]:
        numbers = [float(number) for number in self.printed]
        if len(numbers) == 1 and self.of_columns is not None:
            numbers.append(self.of_columns)
        return numbers

    @property
    def mean(self) -> float | None:
        return intervals.mean(self.values)

    @property
    def deviation(self) -> float | None:
        return intervals.deviation(self.values)

    @property
    def difference(self) -> float | None:
        """Our mean minus the published one; None if there is none of them."""
        return self.mean - self.published[0] if self.values and self.printed else None

    @property
    def half_width(self) -> float | None:
        """Of the 95% interval of the difference; None if it has none."""
        if self.computed or not self.printed:
            return None
        return intervals.welch(self.values, self.published, self.trials)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the difference; None if it has none."""
        half = self.half_width
        return None if half is None else (self.difference - half, self.difference + half)


@dataclass
class FilledBlock:
    block: Block
    rows: list[list[Cell]]

    @property
    def measured(self) -> bool:
        """Whether any cell has a value."""
        return any(cell.values for cell in cells_in([self]))


def filled(table: Table, records: Records, scale: str) -> list[FilledBlock]:
    """A table's blocks with what is recorded at a scale."""
    blocks = []
    for block in table.blocks:
        rows = [cells_of(table, block, row, records, scale) for row in block.rows]
        blocks.append(FilledBlock(block, rows))
    if scale == "paper":
        judge(cells_in(blocks))
    return blocks


def judge(cells: list[Cell]) -> None:
    """Say of each published and measured cell whether it agrees, differs or cannot be told.

    It differs if 0 is outside the 95% interval of the difference. An interval with 0 that is wider than WIDE
    says nothing, and fewer than SEEDS seeds decide nothing. A number that is computed without a run agrees if
    it is the printed one but for its last digit.
    """
    for cell in cells:
        if cell.difference is None:
            continue
        half, cell.verdict = cell.half_width, "untested"
        if cell.computed:
            last_digit = 10 ** -len(cell.printed[0].partition(".")[2])
            cell.verdict = "agrees" if abs(cell.difference) < 1.5 * last_digit else "differs"
        elif half is None or len(cell.values) < SEEDS:
            continue
        elif abs(cell.difference) > half:
            cell.verdict = "differs"
        else:
            cell.verdict = "agrees" if half <= WIDE else "unclear"


def cells_in(blocks: list[FilledBlock]) -> list[Cell]:
    """All cells of a page."""
    return [cell for block in blocks for line in block.rows for cell in line]


def rows_of(blocks: list[FilledBlock], smaller: list[FilledBlock]) -> list[tuple[list[Cell], list[Cell]]]:
    """The rows of a page at two scales."""
    return [rows for of, small in zip(blocks, smaller) for rows in zip(of.rows, small.rows)]


def cells_of(table: Table, block: Block, row: Row, records: Records, scale: str,
             seeds: tuple[int, ...] = ()) -> list[Cell]:
    """The cells of a row. `seeds` are those that are asked for; recorded ones beyond them count too."""
    cells = [Cell(printed, {}, table, block, row, column, scale, trials=table.trials)
             for printed, column in zip(row.published, block.columns)]
    for cell in cells:
        cell.computed = cell.column.kind == "cost"
        for reported in table.elsewhere if cell.printed else []:
            place = reported["dataset"], reported["method"], reported["column"]
            if reported["near"] == "yes" and place == (block.dataset, row.method, cell.column.name):
                cell.elsewhere.append(reported["value"])
        if row.quoted or not cell.column.path:
            continue
        elif not cell.computed:
            fill(cell, records, seeds)
        elif scale == "paper":
            cell.values = {0: network_cost(cell.run.module, cell.run.flags)[cell.column.path]}
    if not row.quoted:
        fill_means(cells)
    return cells


def fill(cell: Cell, records: Records, asked: tuple[int, ...]) -> None:
    """Put into a cell what is recorded of its run with each seed: of the precision and kind of device with
    the most seeds, of equals that of the newest record. If seeds that are `asked` for lack there, their runs
    are missing. Of a row with --after-training in its flags all is read from `after_training` of the
    records."""
    def rank(by_seed: dict[int, dict]) -> tuple[int, str]:
        return len(by_seed), max((record["finished"] for record in by_seed.values()), default="")
    method = short_name(cell.row.module)
    if not asked and (method, cell.block.dataset, cell.scale) not in records.worked_on:
        return  # before its command is parsed: most cells have no record
    if not cell.run:
        return
    curve = cell.table.figure == "curves" or cell.column.kind == "curve"
    run = dataclasses.replace(cell.run, curve=curve)
    path = f"start/{cell.column.path}" if cell.row.start else cell.column.value
    kinds, trained = records.kinds(run), run.args.after_training
    kind = max(kinds, key=lambda of: rank(kinds[of]), default=None)
    cell.records = {seed: reading_of(record, trained) for seed, record in kinds.get(kind, {}).items()}
    for seed, record in cell.records.items():
        cell.precision, value = record["args"]["precision"], found_at(record, path)
        if value is not None:
            cell.values[seed] = value
            cell.behind.append(record)
    if kind:  # kinds are never pooled: what lacks is run as the rest was
        run = dataclasses.replace(run, flags=(*run.flags, "--precision", kind[0]), device=kind[1])
    cell.missing = [dataclasses.replace(run, seed=seed) for seed in asked if seed not in cell.records]


def fill_means(cells: list[Cell]) -> None:
    """Columns that are the mean of the others have the seeds that all of these have, if they are of one
    precision."""
    means = [cell for cell in cells if cell.column.kind == "mean"]
    own = [cell for cell in cells if cell.column.kind != "mean"]
    if len({cell.precision for cell in own}) > 1:
        return
    deviations = [float(other.printed[1]) for other in own if len(other.printed) == 2]
    for cell in means:
        if len(deviations) == len(own):
            cell.of_columns = math.sqrt(sum(value ** 2 for value in deviations)) / len(own)
        cell.values = means_over_columns([other.values for other in own])
        cell.precision = own[0].precision
        for other in own if cell.values else []:
            cell.behind += other.behind


def found_at(record: dict, path: str) -> float | None:
    """The number at a path, such as last/linear/photo/0.1, accuracies in percent; None if there is
    none."""
    value = record
    for part in path.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return 100 * value if isinstance(value, int | float) else None


def chance(cell: Cell) -> float | None:
    """The accuracy (%) of guessing one of a dataset's classes; None where the column is no accuracy or the
    catalogue has no classes."""
    classes = range(10)  # of digits, and MNIST's
    if cell.block.dataset in FOLDERS:
        classes = FOLDERS[cell.block.dataset].classes
    return 100 / len(classes) if classes and cell.column.kind in ("best", "last", "mean") else None


# What is missing


@dataclass
class Missing:
    """A run that is not recorded, and what needs it."""

    run: PlannedRun
    parts: list[str]  # the ids of tables, and those of claims with the specification
    seconds: float | None = None  # what it would take, if that is known
    why: str = ""  # it cannot start here

    @property
    def tables(self) -> list[str]:
        """The same without specifications."""
        return [part.partition(", ")[0] for part in self.parts]


def missing(tables: list[Table], records: Records, scale: str, seeds: list[int] | None,
            of_claims: Iterable[tuple[str, PlannedRun]] = ()) -> list[Missing]:
    """The runs that are not recorded, each once, in the tables' order. Without `seeds` each table has as many
    as its paper's trials, one where it does not state them. `of_claims`: runs that come before, each with its
    claim and specification. A run that is made again and was cut off is resumed."""
    lacking = [(part, run) for part, run in of_claims if not records.get(run)]
    for table in tables:
        asked = tuple(range(table.trials or 1) if seeds is None else seeds)
        for block in table.blocks:
            for row in block.rows:
                for cell in cells_of(table, block, row, records, scale, asked):
                    lacking += [(table.id, run) for run in cell.missing]
    by_key = {}
    for part, run in lacking:
        trains = run.key[:-1]  # what it asks of the run, --after-training or not, is the last
        known = by_key.setdefault(trains, Missing(run, []))
        known.run.curve = known.run.curve or run.curve  # also if another does without
        if run.args.after_training and not known.run.args.after_training:
            known.run.flags += ("--after-training",)  # one run gives both readings
        if part not in known.parts:
            known.parts.append(part)
    for entry in by_key.values():
        run = entry.run
        run.replace = lacks_reading(run) or (records.has(run) and not cut_off(run))
    return list(by_key.values())
