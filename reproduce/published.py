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
    """A published number, and where it stands."""

    of: dict[str, str]  # by HEAD; a dataset that is empty: the paper names none
    printed: list[str]  # [mean, deviation], [mean] or, where it is lost, []
    taken: bool = False  # whether a cell has it

    @property
    def quoted(self) -> bool:
        return self.of["kind"] == "quoted"


class Published:
    """The lines of a file; none if there is no file. ValueError if it is not as it should be."""

    def __init__(self, path: Path):
        self.name = f"{path.parent.name}/{path.name}"
        self.lines: list[Line] = []
        for row in csv.DictReader(path.read_text().splitlines()) if path.exists() else []:
            if list(row) != HEAD or row["kind"] not in ("measured", "quoted"):
                raise ValueError(f"{self.name}, line {len(self.lines) + 2}: expected {','.join(HEAD)}")
            printed = [row[name] for name in ("mean", "std") if row[name]]
            list(map(float, printed))  # an error if one is no number
            self.lines.append(Line(row, printed))

    def take(self, dataset: str, setting: str, method: str, column: str) -> Line | None:
        """The line of a cell, without a setting whatever the line's is; None if there is none. ValueError
        unless it is this cell's alone."""
        found = []
        for line in self.lines:
            place = line.of["dataset"] in (dataset, "") and setting in ("", line.of["setting"])
            if place and (line.of["method"], line.of["column"]) == (method, column):
                found.append(line)
        if len(found) > 1 or any(line.taken for line in found):
            raise ValueError(f"{self.name} has not one number for {dataset}, {method}, {column} alone: "
                             "published_setting says which")
        for line in found:
            line.taken = True
            return line

    def check_all_taken(self) -> None:
        """ValueError if a number has no cell."""
        for line in self.lines:
            if not line.taken:
                raise ValueError(f"{self.name}: no row has the number of {line.of['dataset']}, "
                                 f"{line.of['method']}, {line.of['column']}")
