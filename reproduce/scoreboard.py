"""The state of all published cells: a bar for each table, the counts in a table, and one sentence.

A cell counts if the paper has measured it itself: rows that it quotes and rows of ours are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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


@dataclass
class Strip:
    """The published cells of a table, in its order."""

    table: Table
    squares: list[str]  # of each its state, one of STATES

    @property
    def counts(self) -> Counter:
        return Counter(self.squares)

    @property
    def measured(self) -> int:
        return sum(self.counts[state] for state in MEASURED)


def strip_of(table: Table, blocks: list[FilledBlock], at_laptop_scale: list[FilledBlock]) -> Strip:
    """A table's strip, from its blocks at the papers' scale and at laptop scale."""
    squares = []
    for block, smaller in zip(blocks, at_laptop_scale):
        for line, small_line in zip(block.rows, smaller.rows):
            if not line.row.quoted and not line.row.ours:
                squares += [state_of(line.row, *pair) for pair in zip(line.cells, small_line.cells)]
    return Strip(table, squares)


def state_of(row: Row, cell: Cell, small: Cell) -> str:
    """One of STATES, from a cell at the paper's scale and at laptop scale."""
    if not cell.printed:
        return "lost"
    if not row.implemented:
        return "no method"
    return cell.verdict or ("laptop" if small.values else "not run")


def totals(strips: list[Strip]) -> Strip:
    """All strips as one."""
    return Strip(None, [state for strip in strips for state in strip.squares])


def sentence(strips: list[Strip]) -> str:
    """The state of all published cells in words."""
    every = totals(strips)
    counts, printed = every.counts, len(every.squares) - every.counts["lost"]
    words = (f"Of the {printed} numbers that the papers print of their own experiments, {every.measured} are "
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


def as_markdown(strips: list[Strip]) -> str:
    """The page behind the picture: the counts of each table, with a link to its page, and of all."""
    rows = []
    for strip in [*strips, totals(strips)]:
        name = "all"
        if strip.table:
            name = f"[{strip.table.title.partition(':')[0]}](tables/{strip.table.id}.md)"
        rows.append([name, len(strip.squares), *(strip.counts[state] for state in STATES)])
    return "\n\n".join(["# Scoreboard", sentence(strips), "![A bar for each table](scoreboard.png)",
                        tabulate(rows, HEAD, "github")]) + "\n"


def draw(strips: list[Strip], path: Path) -> None:
    """The picture: for each table a bar of its cells, in the colours of their states."""
    every = totals(strips)
    states = [state for state in STATES if every.counts[state]]
    figure = new_figure(9.5, 0.19 * len(strips) + 1.2)
    panel = figure.add_subplot()
    for row, strip in enumerate(strips):
        left = 0
        for state in states:
            count = strip.counts[state]
            panel.barh(row, count, 0.8, left, color=STATES[state][1], edgecolor="0.5", linewidth=0.4)
            left += count
    marks = []
    for state in states:
        words, colour = STATES[state]
        marks.append(panel.barh(0, 0, color=colour, edgecolor="0.5", label=f"{words}: {every.counts[state]}"))
    panel.set_yticks(range(len(strips)), [strip.table.title for strip in strips], fontsize=8)
    panel.set(ylim=(len(strips), -1), xlabel="numbers that a paper printed of its own experiments")
    figure.legend(handles=marks, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    write_figure(path, figure)
