"""The published numbers of a paper's tables as printed: papers/<paper>/printed.csv, a line for each.

A cell finds its number by dataset, method and column, and by the setting where these have several. What the
files have is said in papers/printed.md.
"""

from __future__ import annotations

import csv
from pathlib import Path

from plumbing.run.errors import UserError

REPORTED = "table,dataset,method,column,value,deviation,trials,source,protocol,near".split(",")
HEAD = "paper,table,dataset,setting,method,column,metric,mean,std,kind".split(",")


def read_published(path: Path, table: str) -> list[dict]:
    """The lines of a table in a paper's file by HEAD; none if there is no file. `printed` of each is [mean,
    deviation], [mean] or, where it is lost, []; an empty dataset: the paper names none. ValueError if a line
    is wrong."""
    lines = []
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines()) if path.exists() else []
    for number, row in enumerate(rows, 2):
        if list(row) != HEAD or row["kind"] not in ("measured", "quoted"):
            raise ValueError(f"{path.name}, line {number}: expected {','.join(HEAD)}")
        printed = [row[name] for name in ("mean", "std") if row[name]]
        list(map(float, printed))  # an error if one is no number
        if f"{row['paper']}-{row['table']}" == table:
            lines.append(row | {"printed": printed, "taken": False})
    return lines


def take(lines: list[dict], dataset: str, setting: str, method: str, column: str) -> dict | None:
    """The line of a cell, without a setting whatever the line's is; None if there is none. ValueError unless
    it is this cell's alone."""
    matching = []
    for line in lines:
        place = line["dataset"] in (dataset, "") and setting in ("", line["setting"])
        if place and (line["method"], line["column"]) == (method, column):
            matching.append(line)
    if len(matching) > 1 or any(line["taken"] for line in matching):
        raise ValueError(f"published/ has not one number for {dataset}, {method}, {column} alone: "
                         "published_setting says which")
    for line in matching:
        line["taken"] = True
        return line


def read_reported(path: Path) -> list[dict]:
    """What other papers and public repositories print of a cell: the lines of papers/elsewhere.csv. `near` is
    yes if network, data and protocol are the paper's or nearly so."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = list(csv.DictReader(text.splitlines()))
    try:
        [float(line["value"]) for line in lines]  # an error if one is no number
        complete = all(list(line) == REPORTED for line in lines)
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path}: expected {','.join(REPORTED)} ({e})", 2)
    if not complete:
        raise UserError(f"{path}: expected {','.join(REPORTED)}", 2)
    return lines
