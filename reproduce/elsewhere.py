"""Values reported elsewhere: what other papers and public repositories print of a cell
(tables/published/elsewhere.csv), and how far their values of FedAvg lie apart (results/elsewhere.md)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from plumbing.errors import UserError
from plumbing.files import check_regular_file
from reproduce.cells import FilledBlock
from reproduce.drawing import new_panel, write_figure
from reproduce.tables import Table

from tabulate import tabulate

PAGE = """# How far published values lie apart

The same method on the same data, as the paper prints it and as others do. The differences are of protocol,
network and length too: each line says which. Made by `python reproduce_tables.py` from
[elsewhere.csv](../tables/published/elsewhere.csv)."""


class Reported(NamedTuple):
    """A number that stands beside a cell of a table: a line of the file."""

    table: str
    dataset: str
    method: str
    column: str
    value: str  # in percent, as printed
    deviation: str
    trials: str
    source: str
    protocol: str  # and what differs from the paper's
    near: str  # yes, if network, data and protocol are the paper's or nearly so; else no


HEAD = list(Reported._fields)


def read_reported(folder: Path, tables: list[Table]) -> dict[tuple, list[Reported]]:
    """{cell: what is reported of it elsewhere}, in the tables' order; none without a file. Stop if a value
    stands beside no cell."""
    path = folder / "published" / "elsewhere.csv"
    found = {place: [] for place in places(tables)}
    try:
        text = check_regular_file(path).read_text() if path.exists() else ""
        reported = [Reported(**row) for row in csv.DictReader(text.splitlines())]
        [float(one.value) for one in reported]  # an error if one is no number
    except (TypeError, ValueError) as e:
        raise UserError(f"{path}: expected {','.join(HEAD)} ({e})", 2)
    for one in reported:
        place = one[:4]
        if place not in found:
            raise UserError(f"{path}: no cell {', '.join(place)} is in tables/", 2)
        found[place].append(one)
    return {place: of for place, of in found.items() if of}


def places(tables: list[Table]) -> dict[tuple, str]:
    """{cell: its published mean}, of all rows that have one."""
    found = {}
    for table in tables:
        for block in table.blocks:
            for row in block.rows:
                for column, printed in zip(block.columns, row.published):
                    if printed:
                        found.setdefault((table.id, block.dataset, row.method, column.name), printed[0])
    return found


def attach(reported: dict[tuple, list[Reported]], table: Table, blocks: list[FilledBlock]) -> None:
    """Give each cell of a table what others print of it in nearly the paper's setting."""
    for block in blocks:
        for line in block.rows:
            for column, cell in zip(block.block.columns, line.cells):
                place = table.id, block.block.dataset, line.row.method, column.name
                near = [one.value for one in reported.get(place, []) if one.near == "yes"]
                cell.elsewhere = near if cell.printed else []


def reported_page(reported: dict[tuple, list[Reported]], tables: list[Table]) -> str:
    """A line for each number beside the paper's, FedAvg first."""
    printed, lines = places(tables), []
    for place in sorted(reported, key=lambda place: place[2].lower() != "fedavg"):
        for one in reported[place]:
            value = f"{one.value} ± {one.deviation}" if one.deviation else one.value
            difference = f"{float(one.value) - float(printed[place]):+.1f}"
            lines.append([one.table, one.dataset, f"{one.method}, {one.column}", printed[place], value,
                          difference, one.source, one.protocol])
    head = ["table", "data set", "cell", "paper", "elsewhere", "difference", "where", "protocol"]
    return "\n\n".join([PAGE, "![FedAvg as each prints it](elsewhere.png)",
                        tabulate(lines, head, "github", disable_numparse=True)]) + "\n"


def draw_reported(reported: dict[tuple, list[Reported]], tables: list[Table], path: Path) -> None:
    """FedAvg: a row for each cell, the paper's value and the others'."""
    printed = places(tables)
    cells = [place for place in reported if place[2].lower() == "fedavg"]
    panel = new_panel(9.0, 0.24 * len(cells) + 1.2)
    for i, place in enumerate(cells):
        values, of_paper = [float(one.value) for one in reported[place]], float(printed[place])
        panel.plot([min(*values, of_paper), max(*values, of_paper)], [i, i], color="0.8")
        panel.plot(values, [i] * len(values), "o", color="#2166ac", markersize=5)
        panel.plot([of_paper], [i], "|", color="black", markersize=10, markeredgewidth=2)
    names = [f"{dataset}, {column} ({table})" for table, dataset, _, column in cells]
    panel.set_yticks(range(len(cells)), names, fontsize=8)
    panel.set(ylim=(len(cells) - 0.5, -0.5), xlabel="FedAvg, accuracy (%): the paper's (|) and others' (o)")
    write_figure(path, panel.figure, None)
