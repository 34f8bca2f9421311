"""Where the numbers of a table are from: the runs behind its cells, and those that other code has made than
that of now."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

from plumbing.settings import SCALES
from reproduce.cells import Missing, filled, stale
from reproduce.measuring import folder_of_run
from reproduce.methods import short_name
from reproduce.records import Records, command_of, sources_of
from reproduce.tables import Table

from tabulate import tabulate

RUNS_HEAD = ["block", "row", "column", "seed", "value", "run", "sources", "commit", "precision", "threads",
             "finished", "command"]


def runs_text(table: Table, records: Records, scale: str) -> str:
    """The runs behind each cell of a table."""
    rows = []
    for block in filled(table, records, scale):
        for line in block.rows:
            for column, cell in zip(block.block.columns, line.cells):
                for seed, record in cell.records.items():
                    if seed in cell.values:
                        where = [block.block.title, line.row.method, column.name, seed]
                        rows.append([*where, f"{cell.values[seed]:.2f}", *origin(records, record)])
    if not rows:
        return f"{table.title}: no run is recorded at {scale} scale."
    return f"{table.title}\n{tabulate(rows, RUNS_HEAD, disable_numparse=True)}"


def origin(records: Records, record: dict) -> list[str]:
    """Of a row of the list: id, sources, commit, precision, threads, date and command of a record."""
    sources = ", ".join(dict.fromkeys(sources_of(record)))
    if records.stale(record):
        sources += " †"
    commit = (record.get("commit") or "unknown")[:12]
    if record.get("uncommitted_changes") is not False:
        commit += " ‡"
    threads = record["hardware"].get("threads", "")
    precision = record["args"].get("precision", "")
    return [record["id"], sources, commit, precision, threads, record["finished"], command_of(record)]


def stale_text(tables: list[Table], records: Records, scale: str) -> str:
    """The runs of tables made by an earlier version of the methods' code, with their commands, and how many
    there are at each scale."""
    found = reruns(tables, records, scale)
    rows = []
    for one in found:
        sources = ", ".join(dict.fromkeys(sources_of(records.by_key[one.run.key])))
        rows.append([", ".join(one.tables), sources, one.run.command])
    lines = []
    if rows:
        lines.append(tabulate(rows, ["tables", "sources", "command"], disable_numparse=True))
    counts = {name: len(stale(tables, records, name)) for name in SCALES}
    each = ", ".join(f"{count} at {name} scale" for name, count in counts.items())
    lines.append(f"Runs of tables and figures that an earlier version of the methods' code made: {each}. "
                 f"--rerun --scale {scale} makes those of {scale} scale again.")
    return "\n".join(lines)


def reruns(tables: list[Table], records: Records, scale: str) -> list[Missing]:
    """The runs whose records are stale, to be made anew: from the start where their output folder is of other
    code, else from the checkpoint in it."""
    found = stale(tables, records, scale)
    for one in found:
        other = filled_by_other_code(folder_of_run(one.run), records.same[short_name(one.run.module)])
        one.run = dataclasses.replace(one.run, replace=other)
    return found


def filled_by_other_code(folder: Path, same: set[str]) -> bool:
    """Whether an output folder has a run that sources outside of `same` have begun or gone on with."""
    if not (folder / "checkpoint.pt").exists() and not (folder / "result.json").exists():
        return False
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        parts = json.loads((folder / "settings.json").read_text())["code"]
        return not {part["sources"] for part in parts} <= same
    return True
