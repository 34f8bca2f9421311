"""The published numbers of a table as printed: tables/published/<paper>-<number>.csv, a line for each.

A cell finds its number by dataset, method and column, and by the setting where these have several. What the
files have is said in tables/published/README.md.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

HEAD = "paper,table,dataset,setting,method,column,metric,mean,std,kind".split(",")
KINDS = ("measured", "quoted")
NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass
class Line:
    """A published number: where it stands, and [mean, deviation], [mean] or, where it is lost, []."""

    dataset: str  # empty: the paper names none
    setting: str
    method: str
    column: str
    printed: list[str]
    quoted: bool
    taken: bool = False  # whether a cell has it


class Published:
    """The lines of a file; none if there is no file. ValueError if it is not as it should be."""

    def __init__(self, path: Path):
        self.name = f"{path.parent.name}/{path.name}"
        self.lines: list[Line] = []
        if path.exists():
            with open(path, newline="") as file:
                self.read(csv.DictReader(file, strict=True))

    def read(self, rows: csv.DictReader) -> None:
        """Take up the lines of the file."""
        try:
            if rows.fieldnames != HEAD:
                raise ValueError(f"{self.name}: the first line must be {','.join(HEAD)}")
            for row in rows:
                self.lines.append(self.line_of(row, f"{self.name}, line {rows.line_num}"))
        except csv.Error as e:
            raise ValueError(f"{self.name}: {e}")

    def line_of(self, row: dict, where: str) -> Line:
        """A line of the file, checked."""
        if None in row or None in row.values():
            raise ValueError(f"{where} has not {len(HEAD)} values")
        printed = [row[name] for name in ("mean", "std") if row[name]]
        if row["std"] and not row["mean"]:
            raise ValueError(f"{where} has a deviation without a mean")
        for number in printed:
            if not NUMBER.fullmatch(number):
                raise ValueError(f"{where}: {number!r} is no number")
        if row["kind"] not in KINDS:
            raise ValueError(f"{where}: the kind is {row['kind']!r}; expected one of {', '.join(KINDS)}")
        return Line(row["dataset"], row["setting"], row["method"], row["column"], printed,
                    row["kind"] == "quoted")

    def take(self, dataset: str, setting: str, method: str, column: str) -> Line | None:
        """The line of a cell, None if there is none; without a setting whatever the line's is. ValueError if
        there are several, or if another cell has it."""
        found = []
        for line in self.lines:
            of_dataset = line.dataset in (dataset, "")
            of_setting = not setting or line.setting == setting
            if of_dataset and of_setting and line.method == method and line.column == column:
                found.append(line)
        if not found:
            return None
        of = f"{dataset}, {method}, {column}"
        if len(found) > 1:
            raise ValueError(f"{self.name} has {len(found)} numbers for {of}: published_setting says which")
        (line,) = found
        if line.taken:
            raise ValueError(f"{self.name}: two cells have the number of {of}")
        line.taken = True
        return line

    def check_all_taken(self) -> None:
        """ValueError if a number has no cell."""
        for line in self.lines:
            if not line.taken:
                where = [part for part in (line.dataset, line.setting, line.method, line.column) if part]
                raise ValueError(f"{self.name}: no row has the number of {', '.join(where)}")
