"""The state of all published cells at a glance: a strip of squares for each table, the counts in a table, and
one sentence.

A cell counts if the paper has measured it itself: rows that it quotes and rows of ours are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from reproduce.cells import Cell, FilledBlock
from reproduce.drawing import new_figure, write_figure
from reproduce.tables import PAPERS, Row, Table

from tabulate import tabulate

# Of each state: what it says, the colour of its square and the sign in it.
STATES = {
    "agrees": ("no difference found", "#1b7837", "="),
    "unclear": ("differs by its own test alone", "#c98500", "~"),
    "differs": ("differs", "#d6604d", "*"),
    "untested": ("measured, too few runs to test", "#4393c3", "?"),
    "laptop": ("laptop scale only, not comparable", "#fee391", ""),
    "not run": ("not run", "#ffffff", ""),
    "no method": ("method not written yet", "#d0d0d0", ""),
    "lost": ("lost in the text of the paper", "#ffffff", "x"),
}
MEASURED = ("agrees", "unclear", "differs", "untested")
PER_LINE = 60  # squares of a strip in a line
HEAD = ["table", "cells", *(words for words, _, _ in STATES.values())]


Placed = tuple[float, float, str]  # x and y of the upper left corner of a square, and its state


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
            if line.row.quoted or line.row.ours:
                continue
            for cell, small in zip(line.cells, small_line.cells):
                squares.append(state_of(line.row, cell, small))
    return Strip(table, squares)


def state_of(row: Row, cell: Cell, small: Cell) -> str:
    """One of STATES, from a cell at the paper's scale and at laptop scale."""
    if not cell.published:
        return "lost"
    if cell.verdict:
        return cell.verdict
    if not row.implemented:
        return "no method"
    return "laptop" if small.values else "not run"


def totals(strips: list[Strip]) -> Strip:
    """All strips as one."""
    return Strip(None, [state for strip in strips for state in strip.squares])


def sentence(strips: list[Strip]) -> str:
    """The state of all published cells in words."""
    every = totals(strips)
    counts = every.counts
    printed = len(every.squares) - counts["lost"]
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
    for strip in strips:
        name = strip.table.title.partition(":")[0]
        rows.append(row_of(f"[{name}](tables/{strip.table.id}.md)", strip))
    rows.append(row_of("all", totals(strips)))
    parts = ["# Scoreboard", sentence(strips), "![A square for each published cell](scoreboard.png)",
             tabulate(rows, HEAD, "github")]
    return "\n\n".join(parts) + "\n"


def row_of(name: str, strip: Strip) -> list:
    return [name, len(strip.squares), *(strip.counts[state] for state in STATES)]


def draw(strips: list[Strip], path: Path) -> None:
    """The picture: below the legend, for each paper, a strip for each table."""
    lines = 4.5  # of the legend
    places = {}  # of each strip its first line
    for paper in PAPERS:
        of_paper = [strip for strip in strips if strip.table.paper == paper and strip.squares]
        lines += 0.8 if of_paper else 0
        for strip in of_paper:
            places[strip.table.id] = lines
            lines += -(-len(strip.squares) // PER_LINE) + 0.35
    figure = new_figure(12.5, 0.13 * lines + 0.45)
    panel = figure.add_subplot()
    panel.set(xlim=(-32, PER_LINE + 14), ylim=(lines, -0.5), aspect="equal")
    panel.axis("off")
    every = totals(strips)
    lost = every.counts["lost"]
    words = f"{len(every.squares) - lost} numbers"
    if lost:
        words += f" and {lost} that were lost when the papers were read as text"
    panel.set_title("Each square is a number that a paper printed of its own experiments\n"
                    f"{words}; {every.measured} measured at the paper's scale, or computed from the network",
                    fontsize=10)
    placed = []
    states = [state for state in STATES if every.counts[state]]
    for i, state in enumerate(states):
        x, y = -31 + 27 * (i % 4), 0.2 + 1.6 * (i // 4)
        placed.append((x, y, state))
        panel.text(x + 1.5, y + 0.5, f"{STATES[state][0]}: {every.counts[state]}", va="center", fontsize=9)
    for strip in strips:
        if strip.table.id in places:
            placed += draw_strip(panel, strip, places[strip.table.id])
    draw_squares(panel, placed)
    write_figure(path, figure)


def draw_strip(panel, strip: Strip, top: float) -> list[Placed]:
    """The title on the left, and on the right how many are measured; returns where the squares are."""
    title = strip.table.title
    title = title if len(title) <= 54 else title[:51] + "..."
    panel.text(-1, top + 0.5, title, ha="right", va="center", fontsize=8)
    words = f"{strip.measured} of {len(strip.squares) - strip.counts['lost']} measured"
    if strip.counts["lost"]:
        words += f", {strip.counts['lost']} lost"
    panel.text(PER_LINE + 1, top + 0.5, words, va="center", fontsize=8)
    return [(i % PER_LINE, top + i // PER_LINE, state) for i, state in enumerate(strip.squares)]


def draw_squares(panel, placed: list[Placed]) -> None:
    """All squares at once."""
    from matplotlib.collections import PolyCollection
    squares, colours = [], []
    for x, y, state in placed:
        _, colour, sign = STATES[state]
        low_x, high_x, low_y, high_y = x + 0.06, x + 0.94, y + 0.06, y + 0.94
        squares.append([(low_x, low_y), (high_x, low_y), (high_x, high_y), (low_x, high_y)])
        colours.append(colour)
        if sign:
            panel.text(x + 0.5, y + 0.56, sign, ha="center", va="center", fontsize=6,
                       color="0.4" if state == "lost" else "white")
    panel.add_collection(PolyCollection(squares, facecolors=colours, edgecolors="0.5", linewidths=0.5))
