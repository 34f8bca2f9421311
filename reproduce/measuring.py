"""What tables and figures need of the runs' output folders, beyond their records: the figures that
reproduce.measures draws, and FedCiR's Table 3, which goes into reach.jsonl beside the records."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shlex
from pathlib import Path

from plumbing.errors import Stop
from plumbing.runfolder import folder_of
from reproduce.cells import run_of
from reproduce.measures.command import main as measure
from reproduce.measures.finished import rebuilt
from reproduce.measures.overhead import cost_to_reach, training_flops
from reproduce.methods import ROOT, arguments
from reproduce.records import Place, Records, Run
from reproduce.tables import Table

REACHED = 0.6  # the accuracy of FedCiR's Table 3


def measure_folders(tables: list[Table], records: Records, out: Path, scale: str, seeds: list[int],
                    place: Place) -> list[str]:
    """Make what is not made yet; returns a line for each that could not be made."""
    problems = []
    for table in tables:
        if table.figure == "measure":
            problems += make_figure(table, records, out, scale, place)
        elif any(column.kind == "reach" for block in table.blocks for column in block.columns):
            problems += make_reach(table, records, scale, seeds, place)
    return problems


def folder_of_run(run: Run) -> Path:
    """The output folder of a run."""
    args = dataclasses.replace(arguments(run.module, run.flags), seed=run.seed)
    return ROOT / folder_of(args)


def make_figure(table: Table, records: Records, out: Path, scale: str, place: Place) -> list[str]:
    """Draw a figure of the blocks all of whose runs, of seed 0, are recorded, unless it is newer than these
    runs; returns what went wrong, or nothing."""
    folders = []
    for block in table.blocks:
        runs = [run_of(block, row, block.columns[0], scale, 0) for row in block.rows if row.implemented]
        if all(run is not None and records.get(run) for run in runs):
            folders += [folder_of_run(run) for run in runs]
    path = out / "figures" / f"{table.file_name(scale)}.png"
    gone = [str(folder) for folder in folders if not (folder / "result.json").exists()]
    if not folders or (gone and path.exists()):
        return []
    if gone:
        return [f"{table.id}: the runs are recorded, but not here is {', '.join(gone)}"]
    newest = max((folder / "result.json").stat().st_mtime for folder in folders)
    if path.exists() and path.stat().st_mtime > newest:
        return []
    what, *flags = shlex.split(table.measure)
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            measure([what, *map(str, folders), *flags, "--out", str(path), *place.flags])
        except SystemExit:
            return [f"{table.id}: {said.getvalue().strip()}"]
    return []


def make_reach(table: Table, records: Records, scale: str, seeds: list[int], place: Place) -> list[str]:
    """Measure the recorded runs of FedCiR's Table 3 that are not in reach.jsonl; returns a line for each that
    cannot be measured."""
    problems = []
    for block in table.blocks:
        for row in block.rows:
            for seed in seeds if row.implemented else []:
                run = run_of(block, row, block.columns[0], scale, seed)
                record = records.get(run) if run else None
                if record is None or records.reach_of(record) is not None:
                    continue
                try:
                    spent = reach(folder_of_run(run), place)
                except Stop as stop:
                    problems.append(f"{table.id}, {row.method}: {stop}")
                    continue
                line = {"id": record["id"], "finished": record["finished"], "reach": spent}
                with open(records.path.with_name("reach.jsonl"), "a") as file:
                    file.write(json.dumps(line) + "\n")
    return problems


def reach(folder: Path, place: Place) -> dict[str, float]:
    """What a client spends until the mean over the clients is 60%; empty if it never is."""
    per_image = training_flops(rebuilt(folder, "last", place.data, place.archives))
    spent = cost_to_reach(folder, REACHED, per_image, data=place.data, archives=place.archives)
    if spent is None:
        return {}
    memory = spent.pop("gpu_memory_mib")
    if memory:
        spent["gpu_memory_gb"] = memory * 2 ** 20 / 1e9
    return spent
