"""The tables and figures of the papers as data: tables/<paper>-<number>.toml, read and checked.

A table has blocks (one for each dataset) of rows (a method file and its flags) and columns (more flags, and
where in a run's record the number is). What stands in a cell is in cells.py.
"""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from plumbing.errors import Stop
from reproduce.methods import ROOT, file_of

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
FIGURES = ("curves", "parameter", "radar", "measure")  # how a figure is drawn, see figures.py


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
    published: list[list[float]] = field(default_factory=list)  # of each column [mean, deviation], [mean], []
    module: str = ""  # fedavg, baselines.fedbn; empty: a row that the paper quotes from elsewhere
    flags: str = ""
    laptop: str = ""  # flags that give the row the laptop budget of its block
    quoted: bool = False
    start: bool = False  # what the row's runs had before their first step, in place of the last round
    ours: bool = False  # a row that the paper does not have, such as a control: nothing of it is published
    note: str = ""

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
        except (AttributeError, TypeError, KeyError, ValueError) as e:  # a TOMLDecodeError is a ValueError
            raise Stop(f"{path} is no table ({type(e).__name__}: {e})", 2)
    if not tables:
        raise Stop(f"{folder} has no tables", 2)
    return tables


def place_in_order(path: Path) -> tuple[int, str]:
    """What tables are sorted by: the place of the paper, and the name."""
    papers = list(PAPERS)
    paper = path.stem.partition("-")[0]
    if paper not in papers:
        return len(papers), path.stem
    return papers.index(paper), path.stem


def read_table(path: Path) -> Table:
    """One table; ValueError, TypeError or KeyError say what is wrong with it."""
    content = tomllib.loads(path.read_text())
    blocks = [block_of(block) for block in content.pop("block")]
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
    for block in blocks:
        check_block(block, is_figure=bool(table.figure))
    return table


def block_of(content: dict) -> Block:
    """A block of a file of tables."""
    columns = [Column(**column) for column in content.pop("columns")]
    rows = [Row(**row) for row in content.pop("row")]
    return Block(columns=columns, rows=rows, **content)


def check_block(block: Block, is_figure: bool) -> None:
    """ValueError or TypeError if a block is not as it should be. Rows of a figure and rows of ours need no
    published numbers: they get empty ones."""
    of_type(block, title=str, dataset=str, flags=str, laptop=str, levels=list)
    for level in block.levels:
        known = [column.name for column in block.columns]
        if len(level) != 2 or not (type(level[0]) is int or level[0] in known):
            raise ValueError(f"{block.title}: a level is [round, number] or [name of a column, number]")
    for column in block.columns:
        check_column(block, column)
    if all(column.value == "mean" for column in block.columns):
        raise ValueError(f"{block.title} has no column of its own")
    for row in block.rows:
        if (is_figure or row.ours) and not row.published:
            row.published = [[] for _ in block.columns]
        check_row(block, row)
    shlex.split(block.flags)
    shlex.split(block.laptop)


def check_column(block: Block, column: Column) -> None:
    of_type(column, name=str, value=str, flags=str)
    needs_path = column.kind not in WHOLE_KINDS
    valid = column.kind in KINDS and bool(column.path) == needs_path
    if column.kind == "cost" and column.path not in COSTS:
        valid = False
    if not valid:
        raise ValueError(f"{block.title}, {column.name}: {column.value!r} is no value of a column")
    shlex.split(column.flags)


def check_row(block: Block, row: Row) -> None:
    of_type(row, method=str, module=str, flags=str, laptop=str, quoted=bool, start=bool, ours=bool,
            note=str)
    where = f"{block.title}, {row.method}"
    if bool(row.module) == row.quoted:
        raise ValueError(f"{where}: it needs a module, or quoted = true")
    if row.ours and (row.quoted or any(row.published)):
        raise ValueError(f"{where}: a row of ours has nothing published")
    if len(row.published) != len(block.columns):
        raise ValueError(f"{where} has {len(row.published)} published cells for {len(block.columns)} columns")
    for cell in row.published:
        numbers = isinstance(cell, list) and all(type(value) in (int, float) for value in cell)
        if not numbers or len(cell) > 2:
            raise ValueError(f"{where}: a published cell is [mean, deviation], [mean] or []")
    shlex.split(row.flags)
    shlex.split(row.laptop)


def of_type(thing, **kinds: type) -> None:
    """TypeError unless the thing's attributes have these types."""
    for name, kind in kinds.items():
        if type(getattr(thing, name)) is not kind:
            raise TypeError(f"{name} is {getattr(thing, name)!r}; expected {kind.__name__}")
