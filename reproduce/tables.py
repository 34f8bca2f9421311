"""The tables and figures of the papers as data: papers/<paper>/tables/*.toml, read and checked.

A table has blocks (one for each dataset) of rows (a method file and its flags) and columns (more flags, and
where in a run's record the number is). A file states rows once for all blocks, and columns if all blocks have
the same; the published numbers are in published.py. What stands in a cell is in cells.py.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_origin, get_type_hints

from plumbing.run.errors import UserError
from reproduce.methods import ROOT, file_of
from reproduce.published import read_published, read_reported, take

PLACE = ROOT / "papers"  # a folder for each paper
KINDS = ("best", "last", "start", "curve", "logs", "mean", "cost", "none")  # of a column's value
FIGURES = ("curves", "parameter", "domains")  # how a figure is drawn, see figures.py


@dataclass
class Column:
    """`value`: a path in the record such as best/ALL; `mean` of the other columns; `cost/...` of the network;
    or `none`, what no record has."""

    name: str
    value: str
    flags: str = ""

    def __post_init__(self):
        self.kind, _, self.path = self.value.partition("/")  # best and ALL of best/ALL
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: {self.value!r} is no value of a column")


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

    def __post_init__(self):
        if self.module and not file_of(self.module).is_file():
            raise ValueError(f"{self.method}: there is no module {self.module}")


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
    elsewhere: list[dict] = field(default_factory=list)  # what others print of its cells

    def file_name(self, scale: str) -> str:
        """The name of its files at a scale, without their ending."""
        return self.id if scale == "paper" else f"{self.id}-{scale}"


@functools.cache
def papers() -> dict[str, str]:
    """{paper: its name and where it is published}, by the folders that have claims, in the pages' order."""
    found = []
    for path in PLACE.glob("*/claims.toml"):
        of = tomllib.loads(path.read_text(encoding="utf-8"))
        found.append((of["order"], path.parent.name, f"{of['name']} ({of['cited']})"))
    return {paper: title for _, paper, title in sorted(found)}


def read_tables(folder: Path = PLACE) -> list[Table]:
    """All tables below a folder of papers, in their order. UserError, with the file's name, if one is no
    table."""
    tables = []
    for path in sorted(folder.glob("*/tables/*.toml")):
        try:
            tables.append(read_table(path))
        except (AttributeError, KeyError, TypeError, ValueError) as e:  # TOMLDecodeError too
            raise UserError(f"{path} is no table ({type(e).__name__}: {e})", 2)
    reported = read_reported(folder / "elsewhere.csv")
    for table in tables:
        table.elsewhere = [line for line in reported if line["table"] == table.id]
    if not tables:
        raise UserError(f"{folder} has no tables: expected <paper>/tables/<paper>-<number>.toml", 2)
    return sorted(tables, key=lambda table: [*papers()].index(table.paper))


def read_table(path: Path) -> Table:
    """One table with its published numbers; ValueError, KeyError or TypeError say what is wrong with it."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = {row["method"]: typed(Row, row) for row in content.pop("rows")}
    columns = [typed(Column, column) for column in content.pop("columns", [])]
    blocks = [block_of(block, rows, columns) for block in content.pop("blocks")]
    table = typed(Table, {"id": path.stem, "blocks": blocks, **content})
    if table.paper not in papers() or table.figure not in ("", *FIGURES):
        raise ValueError(f"paper {table.paper}, figure {table.figure!r}: expected one of "
                         f"{', '.join(papers())} and of {', '.join(FIGURES)}")
    lines = read_published(path.parents[1] / "printed.csv", path.stem)
    for block in blocks:
        take_published(block, lines, is_figure=bool(table.figure))
    for line in lines:
        if not line["taken"]:
            raise ValueError("no row has the number of {dataset}, {method}, {column}".format(**line))
    return table


def typed(cls: type, content: dict):
    """An object of `cls` with these values; TypeError if one is of another type."""
    for name, kind in get_type_hints(cls).items():
        if name in content and not isinstance(content[name], get_origin(kind) or kind):
            raise TypeError(f"{name} is {content[name]!r}, expected {kind}")
    return cls(**content)


def block_of(content: dict, rows: dict[str, Row], columns: list[Column]) -> Block:
    """A block of a file: with the table's rows, those of them that it names, in its order, or all; and with
    the table's columns, or its own."""
    named = content.pop("rows", list(rows))
    own = [typed(Column, column) for column in content.pop("columns", [])]
    block = typed(Block, {"columns": own or columns, "rows": [], **content})
    block.rows = [row_in(block, rows[name]) for name in named]
    return block


def row_in(block: Block, row: Row) -> Row:
    """A row of the file in a block: with its flags on the block's dataset."""
    if bool(row.module) == row.quoted:
        raise ValueError(f"{row.method}: it needs a module, or quoted = true")
    flags = f"{row.flags} {row.flags_on.get(block.dataset, '')}".strip()
    laptop = f"{row.laptop} {row.laptop_on.get(block.dataset, '')}".strip()
    return dataclasses.replace(row, flags=flags, laptop=laptop, ours=row.ours or block.ours, published=[],
                               published_setting=row.published_setting or block.published_setting)


def take_published(block: Block, lines: list[dict], is_figure: bool) -> None:
    """Give the rows of a block their published numbers. ValueError if one has none; a row of ours has
    nothing published, and of a figure few points are."""
    for row in block.rows:
        if row.ours:
            row.published = [[] for _ in block.columns]
            continue
        for column in block.columns:
            method = row.published_method or row.method
            line = take(lines, block.dataset, row.published_setting, method, column.name)
            if (line is None and not is_figure) or (line and (line["kind"] == "quoted") != row.quoted):
                raise ValueError(f"{block.title}, {row.method}, {column.name}: published/ has no number for "
                                 "it, or one that is quoted where the row is not")
            row.published.append(line["printed"] if line else [])
