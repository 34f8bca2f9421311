"""Values reported elsewhere: what other papers and public repositories print of a cell
(papers/elsewhere.csv), and how far their values of FedAvg lie apart (results/elsewhere.md)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from plumbing.run.errors import UserError
from plumbing.run.files import write_text
from reproduce.drawing import Line, draw_forest, table_text
from reproduce.tables import Table

PAGE = """# How far published values lie apart

The same method on the same data, as the paper prints it and as others do. The differences are of protocol,
network and length too: each line says which. Made by `python reproduce_tables.py` from
[elsewhere.csv](../papers/elsewhere.csv).

![FedAvg as others print it, less the paper's value](elsewhere.png)

"""
COLUMNS = ["table", "data set", "cell", "paper", "elsewhere", "difference", "where", "protocol"]


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
    paper: str = ""  # the paper's own value: not of the file

    @property
    def difference(self) -> float:
        """To the paper's value."""
        return float(self.value) - float(self.paper)


HEAD = list(Reported._fields[:-1])


def read_reported(folder: Path, tables: list[Table]) -> None:
    """Give each table what others print of its cells. Stop if a value stands beside no cell."""
    path, printed = folder / "elsewhere.csv", {}
    for table in tables:
        for block in table.blocks:
            for row in block.rows:
                for column, numbers in zip(block.columns, row.published):
                    if numbers:
                        place = table.id, block.dataset, row.method, column.name
                        printed.setdefault(place, (table, numbers[0]))
    try:
        text = path.read_text() if path.exists() else ""
        reported = [Reported(**row) for row in csv.DictReader(text.splitlines())]
        [float(line.value) for line in reported]  # an error if one is no number
    except (TypeError, ValueError) as e:
        raise UserError(f"{path}: expected {','.join(HEAD)} ({e})", 2)
    for line in reported:
        if line[:4] not in printed:
            raise UserError(f"{path}: no cell {', '.join(line[:4])} is in papers/", 2)
    for place, (table, value) in printed.items():
        table.elsewhere += [line._replace(paper=value) for line in reported if line[:4] == place]


def write_reported(tables: list[Table], out: Path) -> None:
    """A page with a line for each number beside the paper's, FedAvg first; a plot of FedAvg's."""
    every = [reported for table in tables for reported in table.elsewhere]
    every.sort(key=lambda reported: reported.method.lower() != "fedavg")
    lines, of_fedavg = [], {}
    for reported in every:
        value = f"{reported.value} ± {reported.deviation}" if reported.deviation else reported.value
        lines.append([reported.table, reported.dataset, f"{reported.method}, {reported.column}",
                      reported.paper, value, f"{reported.difference:+.1f}", reported.source,
                      reported.protocol])
        if reported.method.lower() == "fedavg":
            label = f"{reported.dataset}, {reported.column} ({reported.table}: {reported.paper})"
            of_fedavg.setdefault(label, []).append(reported.difference)
    if every:
        page = table_text(lines, COLUMNS)
        write_text(out / "elsewhere.md", f"{PAGE}{page}\n")
        draw_forest(out / "elsewhere.png", [Line(*of_cell) for of_cell in of_fedavg.items()],
                    "FedAvg, others' accuracy less the paper's, points")
