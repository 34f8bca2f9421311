"""The tables and figures of the papers as data: tables/<paper>-<number>.toml, read and checked.

A table has blocks (one for each dataset) of rows (a method file and its flags) and columns (more flags, and
where in a run's record the number is). A file states rows once for all blocks, and columns if all blocks have
the same; the published numbers are in published.py. What stands in a cell is in cells.py.
"""

from __future__ import annotations

import dataclasses
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.errors import Stop
from reproduce.methods import ROOT, file_of
from reproduce.published import Published

PAPERS = {
    "fedsr": "FedSR (Nguyen et al., NeurIPS 2022)",
    "fedadg": "FedADG (Zhang et al., arXiv 2111.10487)",
    "fedgala": "FedGaLA (Pourpanah et al., AAAI 2025)",
    "fedcir": "FedCiR (Li et al., IEEE TMC)",
    "fdse": "FDSE (Wang et al., CVPR 2025)",
}
KINDS = ("best", "last", "curve", "logs", "mean", "cost", "reach", "seconds")  # of a column's value
WHOLE_KINDS = ("mean", "seconds")  # those without a path behind them
COSTS = ("parameters", "flops", "mib")  # behind cost/
PUBLISHED = "published"  # the folder of the published numbers beside the tables
FIGURES = ("curves", "parameter", "radar", "measure")  # how a figure is drawn, see figures.py
# What may stand in a file.
TABLE_KEYS = "title paper protocol trials notes figure axis average measure rows columns blocks".split()
BLOCK_KEYS = "title dataset flags laptop levels ours published_setting rows columns".split()
ROW_KEYS = ("method module flags flags_on laptop laptop_on quoted start ours published_method "
            "published_setting").split()
COLUMN_KEYS = "name value flags".split()


@dataclass
class Column:
    """`value`: a path in the record such as best/ALL; `mean` of the other columns; `cost/...` of the network;
    `seconds` of a client's training in a round; or `reach/...`, what is measured of the run's folder."""

    name: str
    value: str
    flags: str = ""

    @property
    def kind(self) -> str:
        """The first part of the value: one of KINDS."""
        return self.value.partition("/")[0]

    @property
    def path(self) -> str:
        """What is behind the kind: ALL of best/ALL."""
        return self.value.partition("/")[2]


@dataclass
class Row:
    method: str
    published: list[list[str]] = field(default_factory=list)  # of each column [mean, deviation], [mean] or []
    module: str = ""  # fedavg, baselines.fedbn; empty: a row that the paper quotes from elsewhere
    flags: str = ""
    flags_on: dict[str, str] = field(default_factory=dict)  # {dataset: more flags on it}
    laptop: str = ""  # flags that give the row the laptop budget of its block
    laptop_on: dict[str, str] = field(default_factory=dict)  # {dataset: more flags on it at laptop scale}
    quoted: bool = False
    start: bool = False  # what the row's runs had before their first step, in place of the last round
    ours: bool = False  # a row that the paper does not have, such as a control: nothing of it is published
    published_method: str = ""  # the file's name of the published method, where it is not the row's
    published_setting: str = ""  # and its setting, where a method has several numbers in a column

    @property
    def implemented(self) -> bool:
        return bool(self.module) and file_of(self.module).is_file()


@dataclass
class Block:
    title: str
    dataset: str
    columns: list[Column]
    rows: list[Row]
    flags: str = ""
    laptop: str = ""
    ours: bool = False  # a block that the paper does not have
    published_setting: str = ""  # of its rows
    levels: list[list] = field(default_factory=list)  # of a figure, stated in the text: [round or column, %]


@dataclass
class Table:
    id: str
    title: str
    paper: str
    protocol: str
    blocks: list[Block]
    trials: int = 0  # behind a published mean; 0: not said
    notes: list[str] = field(default_factory=list)
    figure: str = ""  # of a figure: one of FIGURES
    axis: str = ""  # of a figure: its x axis (parameter) or y axis (curves)
    average: str = ""  # of a figure over a parameter: the title of a last panel, the mean over the others
    measure: str = ""  # of a figure that reproduce.measures makes of the runs' folders: its command

    def file_name(self, scale: str) -> str:
        """The name of its files at a scale, without their ending."""
        return self.id if scale == "paper" else f"{self.id}-{scale}"


def read_tables(folder: Path = ROOT / "tables") -> list[Table]:
    """All tables of a folder, in the papers' order. Stop, with the file's name, if one is not as it should
    be."""
    tables = []
    for path in sorted(folder.glob("*.toml"), key=place_in_order):
        try:
            tables.append(read_table(path))
        except (AttributeError, TypeError, ValueError, RecursionError) as e:  # TOMLDecodeError too
            raise Stop(f"{path} is no table ({type(e).__name__}: {e})", 2)
    if not tables:
        raise Stop(f"{folder} has no tables", 2)
    ids = [table.id for table in tables]
    for path in sorted((folder / PUBLISHED).glob("*.csv")):
        if path.stem not in ids:
            raise Stop(f"{path} is of no table: {folder / path.stem}.toml is missing", 2)
    return tables


def place_in_order(path: Path) -> tuple[int, str]:
    """What tables are sorted by: the place of the paper, and the name."""
    papers = list(PAPERS)
    paper = path.stem.partition("-")[0]
    if paper not in papers:
        return len(papers), path.stem
    return papers.index(paper), path.stem


def read_table(path: Path) -> Table:
    """One table with its published numbers; ValueError or TypeError say what is wrong with it."""
    content = tomllib.loads(path.read_text())
    check_keys(content, TABLE_KEYS, ["title", "paper", "protocol", "rows", "blocks"], "the table")
    rows = [row_of(row) for row in content.pop("rows")]
    columns = columns_of(content.pop("columns", []))
    blocks = [block_of(block, rows, columns) for block in content.pop("blocks")]
    table = Table(id=path.stem, blocks=blocks, **content)
    of_type(table, title=str, paper=str, protocol=str, trials=int, notes=list)
    of_type(table, figure=str, axis=str, average=str, measure=str)
    if table.paper not in PAPERS:
        raise ValueError(f"the paper is {table.paper}; expected one of {', '.join(PAPERS)}")
    if table.figure:
        known = table.figure in FIGURES
    else:
        known = "trials" in content
    if not known:
        raise ValueError(f"it needs trials, or figure, one of {', '.join(FIGURES)}")
    check_rows(rows, blocks)
    published = Published(path.parent / PUBLISHED / f"{path.stem}.csv")
    for block in blocks:
        check_block(block)
        take_published(block, published, is_figure=bool(table.figure))
    published.check_all_taken()
    return table


def check_keys(content: dict, known: list[str], needed: list[str], where: str) -> None:
    """ValueError if a part of a file has a key that there is not, or lacks one."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} is {content!r}; expected keys and values")
    for key in content:
        if key not in known:
            raise ValueError(f"{where} has {key}, which is none of {', '.join(known)}")
    for key in needed:
        if key not in content:
            raise ValueError(f"{where} has no {key}")


def row_of(content: dict) -> Row:
    """A row as the file states it, for all blocks."""
    check_keys(content, ROW_KEYS, ["method"], "a row")
    row = Row(**content)
    of_type(row, method=str, module=str, flags=str, flags_on=dict, laptop=str, laptop_on=dict, quoted=bool)
    of_type(row, start=bool, ours=bool, published_method=str, published_setting=str)
    if bool(row.module) == row.quoted:
        raise ValueError(f"{row.method}: it needs a module, or quoted = true")
    if row.ours and row.quoted:
        raise ValueError(f"{row.method}: a row of ours is not quoted")
    for flags in (row.flags, row.laptop, *row.flags_on.values(), *row.laptop_on.values()):
        shlex.split(flags)
    return row


def columns_of(content: list[dict]) -> list[Column]:
    """Columns of a file."""
    columns = []
    for column in content:
        check_keys(column, COLUMN_KEYS, ["name", "value"], "a column")
        columns.append(Column(**column))
    return columns


def block_of(content: dict, rows: list[Row], columns: list[Column]) -> Block:
    """A block of a file: with the table's rows, those of them that it names, in its order, or all; and with
    the table's columns, or its own."""
    check_keys(content, BLOCK_KEYS, ["title", "dataset"], "a block")
    named = content.pop("rows", [row.method for row in rows])
    own = columns_of(content.pop("columns", []))
    block = Block(columns=own or columns, rows=[], **content)
    of_type(block, title=str, dataset=str, flags=str, laptop=str, levels=list, ours=bool)
    of_type(block, published_setting=str)
    by_name = {row.method: row for row in rows}
    for name in named:
        if name not in by_name:
            raise ValueError(f"{block.title}: {name} is no row; expected one of {', '.join(by_name)}")
        block.rows.append(row_in(block, by_name[name]))
    return block


def row_in(block: Block, row: Row) -> Row:
    """A row of the file in a block: with its flags on the block's dataset."""
    flags = [row.flags, row.flags_on.get(block.dataset, "")]
    laptop = [row.laptop, row.laptop_on.get(block.dataset, "")]
    return dataclasses.replace(row, flags=" ".join(flags).strip(), laptop=" ".join(laptop).strip(),
                               ours=row.ours or block.ours, published=[],
                               published_setting=row.published_setting or block.published_setting)


def check_rows(rows: list[Row], blocks: list[Block]) -> None:
    """ValueError if two rows have one name, if a row is in no block, or has flags on a dataset of none."""
    names = [row.method for row in rows]
    shown = set()
    for block in blocks:
        shown |= {row.method for row in block.rows}
    datasets = {block.dataset for block in blocks}
    for row in rows:
        if names.count(row.method) > 1:
            raise ValueError(f"two rows are {row.method}")
        if row.method not in shown:
            raise ValueError(f"{row.method} is in no block")
        for dataset in [*row.flags_on, *row.laptop_on]:
            if dataset not in datasets:
                raise ValueError(f"{row.method} has flags on {dataset}, of which there is no block")


def check_block(block: Block) -> None:
    """ValueError or TypeError if a block is not as it should be."""
    for level in block.levels:
        known = [column.name for column in block.columns]
        if len(level) != 2 or not (type(level[0]) is int or level[0] in known):
            raise ValueError(f"{block.title}: a level is [round, number] or [name of a column, number]")
    for column in block.columns:
        check_column(block, column)
    if all(column.value == "mean" for column in block.columns):
        raise ValueError(f"{block.title} has no column of its own")
    shlex.split(block.flags)
    shlex.split(block.laptop)


def take_published(block: Block, published: Published, is_figure: bool) -> None:
    """Give the rows of a block their published numbers. ValueError if one has none; a row of ours has
    nothing published, and of a figure few points are."""
    for row in block.rows:
        for column in block.columns:
            if row.ours:
                row.published.append([])
                continue
            method = row.published_method or row.method
            line = published.take(block.dataset, row.published_setting, method, column.name)
            where = f"{block.title}, {row.method}, {column.name}"
            if line is None and not is_figure:
                raise ValueError(f"{where}: {published.name} has no number for it")
            if line and line.quoted != row.quoted:
                raise ValueError(f"{where}: quoted in one of the table and {published.name}, not in both")
            row.published.append(line.printed if line else [])


def check_column(block: Block, column: Column) -> None:
    of_type(column, name=str, value=str, flags=str)
    needs_path = column.kind not in WHOLE_KINDS
    valid = column.kind in KINDS and bool(column.path) == needs_path
    if column.kind == "cost" and column.path not in COSTS:
        valid = False
    if not valid:
        raise ValueError(f"{block.title}, {column.name}: {column.value!r} is no value of a column")
    shlex.split(column.flags)


def of_type(thing, **kinds: type) -> None:
    """TypeError unless the thing's attributes have these types."""
    for name, kind in kinds.items():
        if type(getattr(thing, name)) is not kind:
            raise TypeError(f"{name} is {getattr(thing, name)!r}; expected {kind.__name__}")
