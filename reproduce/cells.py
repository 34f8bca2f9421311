"""The cells of the tables: the run behind each, the numbers that the records have of it, and the runs that
are missing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from plumbing.settings import identity
from reproduce import statistics
from reproduce.measures.overhead import network_cost
from reproduce.methods import arguments, short_name
from reproduce.records import Records, Run, key_of
from reproduce.tables import Block, Column, Row, Table

BUDGET = ("--rounds", "--epochs", "--steps", "--image-size")  # what a smaller scale sets itself
# Arguments of runs whose rounds take equally long.
SAME_WORK = ("dataset", "backbone", "image_size", "batch_size", "epochs", "scale")


# The run behind a cell


def run_of(block: Block, row: Row, column: Column, scale: str, seed: int) -> Run | None:
    """The run behind a cell; None where a smaller scale has none.

    A smaller scale has its own budget (rounds, epochs, steps, image size), so that of the tables is left out;
    there is no cell if the budget is the column's subject, or if nothing is smaller.
    """
    dataset = ["--dataset", block.dataset]
    own = shlex.split(f"{block.flags} {row.flags}")
    of_column = shlex.split(column.flags)
    if scale == "paper":
        return run_with(row.module, [*dataset, *own, *of_column], seed)
    if set(BUDGET) & set(of_column):
        return None
    own = without_budget(own)
    laptop = []
    if scale == "laptop":
        laptop = shlex.split(f"{block.laptop} {row.laptop}")
    flags = [*dataset, *own, "--scale", scale, *laptop, *of_column]
    smaller = arguments(row.module, tuple(flags))
    whole = arguments(row.module, (*dataset, *own, *of_column))
    if dataclasses.replace(smaller, scale="paper") == whole:
        return None
    return run_with(row.module, flags, seed)


def run_with(module: str, flags: list[str], seed: int) -> Run:
    """The run of a method with flags and a seed."""
    args = dataclasses.replace(arguments(module, tuple(flags)), seed=seed)
    key = key_of(short_name(module), type(args), identity(args))
    return Run(module, tuple(flags), seed, key)


def without_budget(flags: list[str]) -> list[str]:
    """The flags without those of the budget and their values."""
    kept = []
    words = iter(flags)
    for word in words:
        if word in BUDGET:
            next(words, None)
        else:
            kept.append(word)
    return kept


# A cell and its numbers


@dataclass
class Cell:
    """A published number and what was measured here, in the published unit."""

    published: list[float]  # [mean, deviation], [mean] or []
    values: dict[int, float] = field(default_factory=dict)  # by seed
    missing: list[Run] = field(default_factory=list)  # the runs that are not recorded
    trials: int = 0  # behind the published mean; 0: not said
    records: dict[int, dict] = field(default_factory=dict)  # of a figure, by seed
    computed: bool = False  # from the network alone, without a run
    elsewhere: bool = False  # a time or cost of another machine, or counted otherwise: no difference is shown

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.deviation(self.values)

    @property
    def difference(self) -> float | None:
        """Our mean minus the published one; None if there is none of them."""
        if not self.values or not self.published:
            return None
        return self.mean - self.published[0]

    @property
    def far(self) -> bool | None:
        """Whether the difference is beyond two combined standard errors; None if that cannot be told."""
        return statistics.beyond_two_errors(self.values, self.published, self.trials)


@dataclass
class FilledRow:
    row: Row
    cells: list[Cell]


@dataclass
class FilledBlock:
    block: Block
    rows: list[FilledRow]

    @property
    def measured(self) -> bool:
        """Whether any cell has a value."""
        return any(cell.values for row in self.rows for cell in row.cells)


def filled(table: Table, records: Records, scale: str) -> list[FilledBlock]:
    """A table's blocks with what is recorded at a scale."""
    blocks = []
    for block in table.blocks:
        rows = [FilledRow(row, cells_of(table, block, row, records, scale, [])) for row in block.rows]
        blocks.append(FilledBlock(block, rows))
    return blocks


def cells_of(table: Table, block: Block, row: Row, records: Records, scale: str,
             seeds: list[int]) -> list[Cell]:
    """The cells of a row. `seeds` are those that are asked for; recorded ones beyond them count too."""
    cells = [Cell(published, trials=table.trials) for published in row.published]
    if not row.implemented:
        return cells
    for cell, column in zip(cells, block.columns):
        read = column
        if row.start:
            read = dataclasses.replace(column, value=f"start/{column.path}")
        cell.computed = column.kind == "cost"
        cell.elsewhere = column.kind in ("seconds", "reach")
        if column.kind in ("cost", "seconds"):
            if scale == "paper":
                cell.values = without_seeds(column, run_of(block, row, column, scale, 0), records)
        elif column.kind != "mean":
            recorded = records.seeds_of(row.module, block.dataset, scale)
            for seed in sorted(recorded | set(seeds)):
                run = run_of(block, row, column, scale, seed)
                if run:
                    look_up(cell, read, run, records, seed in seeds, keep_record=bool(table.figure))
    fill_means(block, cells)
    return cells


def without_seeds(column: Column, run: Run, records: Records) -> dict[int, float]:
    """The value of a column that has one for all seeds: a network's cost, or a client's time."""
    if column.kind == "cost":
        return {0: network_cost(run.module, run.flags)[column.path]}
    seconds = seconds_of_round(run, records)
    return {} if seconds is None else {0: seconds}


def look_up(cell: Cell, column: Column, run: Run, records: Records, asked: bool, keep_record: bool) -> None:
    """Put into a cell what is recorded of a run; if nothing is and it is `asked` for, it is missing."""
    record = records.get(run)
    if record is None:
        if asked:
            cell.missing.append(run)
        return
    if keep_record:
        cell.records[run.seed] = record
    if column.kind == "reach":
        value = records.reach.get(record["id"], {}).get(column.path)
    else:
        value = found_at(record, column)
    if value is not None:
        cell.values[run.seed] = value


def fill_means(block: Block, cells: list[Cell]) -> None:
    """Columns that are the mean of the others have the seeds that all of these have."""
    own = []
    for cell, column in zip(cells, block.columns):
        if column.kind != "mean":
            own.append(cell.values)
    for cell, column in zip(cells, block.columns):
        if column.kind == "mean":
            cell.values = statistics.means_over_columns(own)


def found_at(record: dict, column: Column) -> float | None:
    """The number at a column's path, such as last/linear/photo/0.1, accuracies in percent; None if there is
    none."""
    value = record
    for part in column.value.split("/"):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    if not isinstance(value, (int, float)):
        return None
    if column.kind in ("best", "last", "start"):
        return 100 * value
    return float(value)


def seconds_of_round(run: Run, records: Records) -> float | None:
    """Seconds of training of a client in a round: the mean of the longest recorded run of the same network,
    images and batch; None without one."""
    args = dataclasses.asdict(arguments(run.module, run.flags))
    longest, most = None, 0
    for record in records.by_key.values():
        theirs, rounds = record["args"], record["args"]["rounds"]
        same_work = all(theirs.get(name) == args[name] for name in SAME_WORK)
        if record["method"] == short_name(run.module) and same_work and rounds > most:
            longest, most = record, rounds
    if longest is None:
        return None
    seconds, clients = longest["seconds"].get("train"), longest["last"].get("clients")
    if seconds is None or not clients:
        return None
    return seconds / most / len(clients)


# All cells


def every_cell(tables: list[Table], records: Records, scale: str,
               seeds: list[int]) -> Iterator[tuple[Table, Block, Row, list[Cell]]]:
    """(table, block, row, its cells) of all rows."""
    for table in tables:
        for block in table.blocks:
            for row in block.rows:
                yield table, block, row, cells_of(table, block, row, records, scale, seeds)


@dataclass
class Missing:
    """A run that is not recorded, and the tables that need it."""

    run: Run
    tables: list[str]  # their ids


def missing(tables: list[Table], records: Records, scale: str, seeds: list[int]) -> list[Missing]:
    """The runs that are not recorded, each once, in the tables' order."""
    by_key = {}
    for table, _, _, cells in every_cell(tables, records, scale, seeds):
        for cell in cells:
            for run in cell.missing:
                one = by_key.setdefault(run.key, Missing(run, []))
                if table.id not in one.tables:
                    one.tables.append(table.id)
    return list(by_key.values())
