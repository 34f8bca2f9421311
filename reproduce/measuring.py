"""What tables and figures need of the runs' output folders, beyond their records: the figures that
reproduce.measures draws, and FedCiR's Table 3, which goes into reach.jsonl beside the records."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path

from plumbing.errors import Stop
from reproduce.cells import run_of
from reproduce.measures.__main__ import main as measure
from reproduce.measures.finished import rebuilt
from reproduce.measures.overhead import cost_to_reach
from reproduce.records import Place, Records
from reproduce.runner import folder_of_run
from reproduce.tables import Table

REACHED = 0.6  # the accuracy of FedCiR's Table 3


def measure_folders(tables: list[Table], records: Records, out: Path, scale: str, seeds: list[int],
                    place: Place) -> list[str]:
    """Make what is not made yet; returns a line for each that could not be made."""
    problems = []
    for table in tables:
        try:
            if table.figure == "measure":
                make_figure(table, records, out / "figures" / f"{table.file_name(scale)}.png", scale, place)
            elif any(column.kind == "reach" for block in table.blocks for column in block.columns):
                make_reach(table, records, scale, seeds, place)
        except Stop as stop:
            problems.append(f"{table.id}: {stop}")
    return problems


def make_figure(table: Table, records: Records, path: Path, scale: str, place: Place) -> None:
    """Draw a figure that is not there of the blocks all of whose runs, of seed 0, are recorded."""
    folders, said = [], io.StringIO()
    for block in table.blocks:
        runs = [run_of(block, row, block.columns[0], scale, 0) for row in block.rows if row.implemented]
        if all(run is not None and records.get(run) for run in runs):
            folders += [str(folder_of_run(run)) for run in runs]
    if not folders or path.exists():
        return
    what, *flags = shlex.split(table.measure)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            measure([what, *folders, *flags, "--out", str(path), *place.flags])
        except SystemExit:
            raise Stop(said.getvalue().strip())


def make_reach(table: Table, records: Records, scale: str, seeds: list[int], place: Place) -> None:
    """Measure the recorded runs of FedCiR's Table 3 that are not in reach.jsonl. Stop if a folder is gone."""
    for block in table.blocks:
        for row in block.rows:
            for seed in seeds if row.implemented else []:
                run = run_of(block, row, block.columns[0], scale, seed)
                record = records.get(run) if run else None
                if record is None or records.reach_of(record) is not None:
                    continue
                reached = cost_to_reach(rebuilt(folder_of_run(run), "last", place.data, place.archives),
                                        REACHED)
                spent = reached or {}
                memory = spent.pop("gpu_memory_mib", None)
                if memory:
                    spent["gpu_memory_gb"] = memory * 2 ** 20 / 1e9
                line = {"id": record["id"], "finished": record["finished"], "reach": spent}
                with open(records.path.with_name("reach.jsonl"), "a") as file:
                    file.write(json.dumps(line) + "\n")
