"""The papers' figures that are drawn from the records: curves over the rounds, accuracy over a parameter, and
accuracy on each domain."""

from __future__ import annotations

import math
from pathlib import Path

from plumbing.run.results import empty_figure
from reproduce.cells import Cell, FilledBlock
from reproduce.drawing import colour_of, draw_line, percentages, write_figure
from reproduce.tables import Table

import numpy as np


def draw(table: Table, blocks: list[FilledBlock], path: Path, scale: str) -> bool:
    """Draw a figure into `path`, a panel for each block; whether there is one."""
    least = 2 if table.figure == "parameter" else 1  # records of a row; one point is no line to see
    shown = []
    for block in blocks:
        rows = sum(sum(bool(cell.records) for cell in line) >= least for line in block.rows)
        one_is_enough = block.block.columns[0].kind == "logs" or len(block.rows) == 1
        if rows > 1 or rows and one_is_enough:  # the accuracy of one method compares nothing
            shown.append(block)
    if not shown:
        path.unlink(missing_ok=True)  # what records that are no longer there have left
        return False
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = empty_figure((4.6 * columns, 3.6 * lines + 0.3))
    title, setting = table.title, f"{scale} scale"
    if all(block.block.ours for block in shown):
        title, setting = f"As in {title}", "other data than the paper's"
    figure.suptitle(f"{title}\n{setting}, mean ± deviation over the seeds", fontsize=10)
    draw_panel = {"curves": draw_curves, "domains": draw_domains, "parameter": draw_parameter}[table.figure]
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flat
    for panel, block in zip(panels, shown):
        draw_panel(panel, block, table.axis)
        panel.legend(fontsize=8)
        panel.grid(axis="y", color="0.9", linewidth=0.6)
        panel.set_title(block.block.title, fontsize=9)
        panel.label_outer(remove_inner_ticks=False)
    for panel in panels:
        panel.remove()
    write_figure(path, figure, None)
    return True


def draw_curves(panel, block: FilledBlock, axis: str) -> None:
    """A curve of the records (`curve/ALL`, `logs/discarded`) over the rounds, a line for each row."""
    column = block.block.columns[0]
    for line in block.rows:
        curves, rounds = [], []
        for record in line[0].records.values():
            if column.path in record.get(column.kind, {}):
                curves.append(record[column.kind][column.path])
                rounds = range(1, len(curves[0]) + 1) if column.kind == "logs" else record["curve"]["round"]
        draw_line(panel, percentages(rounds, curves), seeds_of(line, len(curves)), line[0].row.module)
    if block.block.levels:
        panel.plot(*zip(*block.block.levels), "x", color="0.3", label="stated in the paper's text")
    better = ", higher is better" if column.kind == "curve" else ""
    panel.set(xlabel="round", ylabel=f"{axis} (%){better}")


def draw_parameter(panel, block: FilledBlock, axis: str) -> None:
    """Accuracy at each value of a parameter, a line for each row; published points as crosses."""
    names = [column.name for column in block.block.columns]
    stated = [(names.index(name), number) for name, number in block.block.levels]
    for line in block.rows:
        measured = {i: list(cell.values.values()) for i, cell in enumerate(line) if cell.values}
        seeds = max(map(len, measured.values()), default=0)
        draw_line(panel, measured, seeds_of(line, seeds), line[0].row.module)
        stated += [(i, cell.published[0]) for i, cell in enumerate(line) if cell.published]
    if stated:
        panel.plot(*zip(*stated), "x", color="0.3", label="published")
    panel.set_xticks(range(len(names)), names)
    panel.set(xlabel=axis or block.block.title.rpartition(", ")[2], ylabel="accuracy (%), higher is better")


def draw_domains(panel, block: FilledBlock, _axis: str) -> None:
    """Accuracy on each client, the methods beside each other: mean over the seeds, and their deviation."""
    column, names = block.block.columns[0], []
    for i, line in enumerate(line for line in block.rows if line[0].records):
        outcomes = [record[column.kind][column.path] for record in line[0].records.values()]
        names = list(outcomes[0])
        values = 100 * np.array([[outcome[name] for name in names] for outcome in outcomes])
        spread = values.std(axis=0, ddof=1) if len(values) > 2 else None
        panel.errorbar(np.arange(len(names)) + 0.12 * i, values.mean(axis=0), spread, fmt="os^vD"[i % 5],
                       capsize=3, color=colour_of(line[0].row.module), label=seeds_of(line, len(values)))
    panel.set_xticks(range(len(names)), names)
    panel.set(xlabel="client", ylabel="accuracy (%), higher is better")


def seeds_of(line: list[Cell], seeds: int) -> str:
    """A row's name in a legend."""
    return f"{line[0].row.method}, {'one seed' if seeds == 1 else f'{seeds} seeds'}"
