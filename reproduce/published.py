"""The published numbers of a table as printed: tables/published/<paper>-<number>.csv, a line for each.

A cell finds its number by dataset, method and column, and by the setting where these have several. What the
files have is said in tables/published/README.md.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

HEAD = "paper,table,dataset,setting,method,column,metric,mean,std,kind".split(",")


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

    def is_of(self, dataset: str, setting: str, method: str, column: str) -> bool:
        """Whether it is the number of a cell; without a setting whatever the line's is."""
        place = self.dataset in (dataset, "") and (not setting or self.setting == setting)
        return place and self.method == method and self.column == column


class Published:
    """The lines of a file; none if there is no file. ValueError if it is not as it should be."""

    def __init__(self, path: Path):
        self.name = f"{path.parent.name}/{path.name}"
        self.lines: list[Line] = []
        if not path.exists():
            return
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                if list(row) != HEAD or row["kind"] not in ("measured", "quoted"):
                    raise ValueError(f"{self.name}, line {len(self.lines) + 2}: expected {','.join(HEAD)}")
                printed = [row[name] for name in ("mean", "std") if row[name]]
                for number in printed:
                    float(number)
                self.lines.append(Line(row["dataset"], row["setting"], row["method"], row["column"], printed,
                                       row["kind"] == "quoted"))

    def take(self, dataset: str, setting: str, method: str, column: str) -> Line | None:
        """The line of a cell, None if there is none. ValueError unless it is this cell's alone."""
        found = [line for line in self.lines if line.is_of(dataset, setting, method, column)]
        if not found:
            return None
        if len(found) > 1 or found[0].taken:
            raise ValueError(f"{self.name} has not one number for {dataset}, {method}, {column} alone: "
                             "published_setting says which")
        found[0].taken = True
        return found[0]

    def check_all_taken(self) -> None:
        """ValueError if a number has no cell."""
        for line in self.lines:
            if not line.taken:
                raise ValueError(f"{self.name}: no row has the number of {line.dataset}, {line.method}, "
                                 f"{line.column}")
