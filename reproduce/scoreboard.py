"""The state of all published cells: a bar for each table, the counts in a table, and one sentence.

A cell counts if the paper has measured it itself: rows that it quotes and rows of ours are left out.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

from reproduce.cells import Cell, FilledBlock
from reproduce.drawing import new_figure, write_figure
from reproduce.tables import Row, Table

from tabulate import tabulate

# Of each state: what it says, and its colour.
STATES = {
    "agrees": ("no difference found", "#1b7837"),
    "unclear": ("differs by its own test alone", "#c98500"),
    "differs": ("differs", "#d6604d"),
    "untested": ("measured, too few runs to test", "#4393c3"),
    "laptop": ("laptop scale only, not comparable", "#fee391"),
    "not run": ("not run", "#ffffff"),
    "no method": ("method not written yet", "#d0d0d0"),
    "lost": ("lost in the text of the paper", "#808080"),
}
MEASURED = ("agrees", "unclear", "differs", "untested")
HEAD = ["table", "cells", *(words for words, _ in STATES.values())]


Board = list[tuple[Table, Counter]]  # of each table the published cells by their state


def counts_of(blocks: list[FilledBlock], at_laptop_scale: list[FilledBlock]) -> Counter:
    """{state: published cells} of a table, from its blocks at the papers' scale and at laptop scale."""
    counts = Counter()
    for block, smaller in zip(blocks, at_laptop_scale):
        for line, small_line in zip(block.rows, smaller.rows):
            if not line.row.quoted and not line.row.ours:
                counts.update(map(partial(state_of, line.row), line.cells, small_line.cells))
    return counts


def state_of(row: Row, cell: Cell, small: Cell) -> str:
    """One of STATES, from a cell at the paper's scale and at laptop scale."""
    if not cell.printed:
        return "lost"
    if not row.implemented:
        return "no method"
    return cell.verdict or ("laptop" if small.values else "not run")


def totals(board: Board) -> Counter:
    """The counts of all tables together."""
    return sum((counts for _, counts in board), Counter())


def sentence(board: Board) -> str:
    """The state of all published cells in words."""
    counts = totals(board)
    measured = sum(counts[state] for state in MEASURED)
    printed = counts.total() - counts["lost"]
    words = (f"Of the {printed} numbers that the papers print of their own experiments, {measured} are "
             f"measured here at the paper's scale, or computed from the network: {outcome(counts)}; "
             f"{counts['laptop']} have runs at laptop scale only, {counts['not run']} are not run.")
    if counts["no method"]:
        words += f" {counts['no method']} are of methods that are not written yet."
    if counts["lost"]:
        words += f" {counts['lost']} more were lost when the papers were read as text."
    return words


def outcome(counts: Counter) -> str:
    """What the tests of the measured cells say, in words."""
    return (f"of {counts['agrees']} no difference is found, {counts['differs']} differ, {counts['unclear']} "
            "differ by their own test alone and not when it is corrected for all tests of their table, "
            f"{counts['untested']} cannot be tested")


def as_markdown(board: Board) -> str:
    """The page behind the picture: the counts of each table, with a link to its page, and of all."""
    rows = []
    for table, counts in board:
        rows.append((f"[{table.title.partition(':')[0]}](tables/{table.id}.md)", counts))
    rows.append(("all", totals(board)))
    lines = [[name, counts.total(), *(counts[state] for state in STATES)] for name, counts in rows]
    return "\n\n".join(["# Scoreboard", sentence(board), "![A bar for each table](scoreboard.png)",
                        tabulate(lines, HEAD, "github")]) + "\n"


def draw(board: Board, path: Path) -> None:
    """The picture: for each table a bar of its cells, in the colours of their states."""
    every, marks = totals(board), []
    figure = new_figure(9.5, 0.19 * len(board) + 1.2)
    panel = figure.add_subplot()
    left = [0] * len(board)
    for state, (words, colour) in STATES.items():
        if every[state]:
            widths = [counts[state] for _, counts in board]
            panel.barh(range(len(board)), widths, 0.8, left, color=colour, edgecolor="0.5", linewidth=0.4)
            left = [start + width for start, width in zip(left, widths)]
            marks.append(panel.barh(0, 0, color=colour, edgecolor="0.5", label=f"{words}: {every[state]}"))
    panel.set_yticks(range(len(board)), [table.title for table, _ in board], fontsize=8)
    panel.set(ylim=(len(board), -1), xlabel="numbers that a paper printed of its own experiments")
    figure.legend(handles=marks, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    write_figure(path, figure)
