"""The papers' figures that are drawn from the records: curves over the rounds, and accuracy over a parameter.
Those that reproduce.measures makes of the runs' folders are only shown."""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from reproduce.cells import Cell, FilledBlock, FilledRow, cells_in, run_of
from reproduce.drawing import new_figure, plot_curve, write_figure
from reproduce.methods import ROOT
from reproduce.records import Place, Records, folder_of_run
from reproduce.statistics import means_over_columns
from reproduce.tables import Table

import numpy as np

def draw(table: Table, blocks: list[FilledBlock], path: Path, scale: str) -> bool:
    """Draw a figure into `path`, a panel for each block; whether there is one."""
    if table.figure == "measure":
        return path.exists()
    shown = [block for block in blocks if has_something(table, block)]
    if not shown:
        return False
    if table.average and len(shown) == len(blocks):
        shown.append(mean_of(blocks, table.average))
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = new_figure(4.6 * columns, 3.6 * lines + 0.3)
    figure.suptitle(f"{table.title}\n{scale} scale, {seeds_in(shown)}", fontsize=10)
    for i, block in enumerate(shown, 1):
        panel = figure.add_subplot(lines, columns, i)
        if table.figure == "curves":
            draw_curves(panel, block, table.axis)
        else:
            draw_parameter(panel, block, table.axis)
        panel.legend(fontsize=7)
        panel.set_title(block.block.title, fontsize=9)
    write_figure(path, figure)
    return True


def measure(table: Table, records: Records, path: Path, scale: str, place: Place) -> str:
    """Draw a figure that reproduce.measures makes, if it is not there, of the blocks all of whose runs, of seed
    0, are recorded; returns what went wrong, or nothing."""
    folders = []
    for block in table.blocks:
        runs = [run_of(block, row, block.columns[0], scale, 0) for row in block.rows if row.implemented]
        if all(run is not None and records.get(run) for run in runs):
            folders += [str(folder_of_run(run)) for run in runs]
    if table.figure != "measure" or path.exists() or not folders:
        return ""
    what, *flags = shlex.split(table.measure)
    words = ["-m", "reproduce.measures", what, *folders, *flags, "--out", str(path), *place.flags]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    return f"{table.id}: {done.stderr.strip()}" if done.returncode else ""


def mean_of(blocks: list[FilledBlock], title: str) -> FilledBlock:
    """A panel with the mean over the others, row by row and column by column, of the seeds that all have."""
    rows = []
    for lines in zip(*(block.rows for block in blocks)):
        cells = []
        for of_column in zip(*(line.cells for line in lines)):
            values = means_over_columns([cell.values for cell in of_column])
            behind = {seed: record for seed, record in of_column[0].records.items() if seed in values}
            cells.append(Cell([], values=values, records=behind))
        rows.append(FilledRow(lines[0].row, cells))
    return FilledBlock(dataclasses.replace(blocks[0].block, title=title, levels=[]), rows)


def seeds_in(blocks: list[FilledBlock]) -> str:
    """1 seed, 3 seeds, 1 to 3 seeds: those behind the lines of a figure."""
    counts = {len(cell.records) for cell in cells_in(blocks) if cell.records}
    least, most = min(counts), max(counts)
    many = str(most) if least == most else f"{least} to {most}"
    return "1 seed" if many == "1" else f"{many} seeds"


def has_something(table: Table, block: FilledBlock) -> bool:
    """Whether a row has a record; for a line over a parameter two, else there is nothing to see."""
    least = 2 if table.figure == "parameter" else 1
    return any(sum(bool(cell.records) for cell in line.cells) >= least for line in block.rows)


def draw_curves(panel, block: FilledBlock, axis: str) -> None:
    """The mean over the seeds of a curve of the record (`curve/ALL`, `logs/discarded`) over the rounds, and
    from three seeds on its deviation."""
    column = block.block.columns[0]
    for line in block.rows:
        records = list(line.cells[0].records.values())
        curves = []
        for record in records:
            if column.path in record.get(column.kind, {}):
                curves.append(record[column.kind][column.path])
        if not curves:
            continue
        if column.kind == "curve":
            all_rounds = records[0]["curve"]["round"]
        else:
            all_rounds = range(1, len(curves[0]) + 1)
        rounds, means, deviations = [], [], []
        for t, values in zip(all_rounds, zip(*curves)):
            if None in values:  # nothing was logged in this round
                continue
            rounds.append(t)
            means.append(100 * statistics.mean(values))
            if len(values) > 2:
                deviations.append(100 * statistics.stdev(values))
        curve = plot_curve(panel, rounds, means, f"{line.row.method} ({len(curves)})")
        if deviations:
            middle, spread = np.array(means), np.array(deviations)
            panel.fill_between(rounds, middle - spread, middle + spread, alpha=0.2, color=curve.get_color())
    if block.block.levels:
        panel.plot(*zip(*block.block.levels), "x", color="0.3", label="stated in the paper's text")
    better = ", higher is better" if column.kind == "curve" else ""
    panel.set(xlabel="round", ylabel=f"{axis} (%){better}")
    panel.xaxis.get_major_locator().set_params(integer=True)


def draw_parameter(panel, block: FilledBlock, axis: str) -> None:
    """A line for each row: mean over the seeds at each value of the parameter, from three seeds on with the
    deviation; published points as crosses."""
    for line in block.rows:
        places, means, deviations = [], [], []
        published_places, published_means = [], []
        for i, cell in enumerate(line.cells):
            if cell.values:
                places.append(i)
                means.append(cell.mean)
                deviations.append(cell.deviation if len(cell.values) > 2 else 0)
            if cell.published:
                published_places.append(i)
                published_means.append(cell.published[0])
        if places:
            panel.errorbar(places, means, deviations, marker="o", markersize=4, linewidth=1.2, capsize=2,
                           label=line.row.method)
        if published_places:
            panel.plot(published_places, published_means, "x", color="0.3",
                       label=f"{line.row.method}, published")
    names = [column.name for column in block.block.columns]
    if block.block.levels:
        stated = [(names.index(name), number) for name, number in block.block.levels]
        panel.plot(*zip(*stated), "x", color="0.3", label="stated in the paper's text")
    panel.set_xticks(range(len(names)), names)
    panel.set(xlabel=axis or block.block.title.rpartition(", ")[2], ylabel="accuracy (%), higher is better")
