"""The papers' figures that are drawn from the records: curves over the rounds, accuracy over a parameter, and
accuracy on each domain. Those that reproduce.measures makes of the runs' folders are only shown."""

from __future__ import annotations

import math
from pathlib import Path

from plumbing.results import empty_figure
from reproduce.cells import FilledBlock, cells_in
from reproduce.drawing import colour_of, draw_line, earlier_lines, write_figure
from reproduce.tables import Table


def draw(table: Table, blocks: list[FilledBlock], path: Path, scale: str) -> bool:
    """Draw a figure into `path`, a panel for each block; whether there is one."""
    if table.figure == "measure":
        return path.exists()
    least = 2 if table.figure == "parameter" else 1  # records of a row; one point is no line to see
    shown = [block for block in blocks if any(sum(bool(cell.records) for cell in line.cells) >= least
                                              for line in block.rows)]
    if not shown:
        return False
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    figure = empty_figure((4.6 * columns, 3.6 * lines + 0.3))
    counts = {len(cell.records) for cell in cells_in(shown) if cell.records}
    many = " to ".join(map(str, sorted({min(counts), max(counts)})))
    seeds = "1 seed" if many == "1" else f"{many} seeds"
    figure.suptitle(f"{table.title}\n{scale} scale, {seeds}", fontsize=10)
    draw_panel = {"curves": draw_curves, "domains": draw_domains, "parameter": draw_parameter}[table.figure]
    for i, block in enumerate(shown, 1):
        panel = figure.add_subplot(lines, columns, i)
        draw_panel(panel, block, table.axis)
        panel.legend(fontsize=7)
        panel.set_title(block.block.title, fontsize=9)
    write_figure(path, figure, None)
    return True


def draw_curves(panel, block: FilledBlock, axis: str) -> None:
    """A curve of the records (`curve/ALL`, `logs/discarded`) over the rounds, a line for each row."""
    column = block.block.columns[0]
    for line in block.rows:
        curves, rounds, points = [], [], {}
        for record in line.cells[0].records.values():
            if column.path in record.get(column.kind, {}):
                curves.append(record[column.kind][column.path])
                rounds = range(1, len(curves[0]) + 1) if column.kind == "logs" else record["curve"]["round"]
        for t, of_seeds in zip(rounds, zip(*curves)):
            if None not in of_seeds:  # something was logged in this round
                points[t] = [100 * value for value in of_seeds]
        draw_line(panel, points, f"{line.row.method} ({len(curves)})", line.row.module)
    if block.block.levels:
        panel.plot(*zip(*block.block.levels), "x", color="0.3", label="stated in the paper's text")
    better = ", higher is better" if column.kind == "curve" else ""
    panel.set(xlabel="round", ylabel=f"{axis} (%){better}")


def draw_parameter(panel, block: FilledBlock, axis: str) -> None:
    """Accuracy at each value of a parameter, a line for each row; published points as crosses."""
    names = [column.name for column in block.block.columns]
    stated = [(names.index(name), number) for name, number in block.block.levels]
    for line in block.rows:
        measured = {i: list(cell.values.values()) for i, cell in enumerate(line.cells) if cell.values}
        draw_line(panel, measured, line.row.method, line.row.module)
        stated += [(i, cell.published[0]) for i, cell in enumerate(line.cells) if cell.published]
    if stated:
        panel.plot(*zip(*stated), "x", color="0.3", label="published")
    panel.set_xticks(range(len(names)), names)
    panel.set(xlabel=axis or block.block.title.rpartition(", ")[2], ylabel="accuracy (%), higher is better")


def draw_domains(panel, block: FilledBlock, _axis: str) -> None:
    """The mean accuracy on each client, a row of dots for each method; all clients have one scale."""
    column, names = block.block.columns[0], []
    for line in block.rows:
        outcomes = [record[column.kind][column.path] for record in line.cells[0].records.values()]
        if outcomes:
            names = list(outcomes[0])
            means = [100 * sum(found[name] for found in outcomes) / len(outcomes) for name in names]
            colour = colour_of(line.row.module)
            mark = "os^v"[earlier_lines(panel, colour) % 4]
            panel.plot(range(len(names)), means, mark, color=colour, alpha=0.7,
                       label=f"{line.row.method} ({len(outcomes)})")
    panel.set_xticks(range(len(names)), names)
    panel.set(xlabel="client", ylabel="accuracy (%), higher is better")
