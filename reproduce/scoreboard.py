"""The state of all published cells: counts, and one sentence.

A cell counts if the paper has measured it itself: rows that it quotes and rows of ours are left out, and what
no record can have, such as times. A number that a paper prints in two tables counts once.
"""

from __future__ import annotations

from collections import Counter

from reproduce.cells import Cell

MEASURED = ("agrees", "unclear", "differs", "untested")  # accuracies
COSTS = ("cost", "other cost")


def counts_of(rows: list[tuple[list[Cell], list[Cell]]], seen: set) -> Counter:
    """{state: published cells} of a table, from its rows at the papers' scale and at laptop scale. `seen`:
    numbers that other tables have, which are left out; those of this one are added."""
    counts = Counter()
    for cells, smaller in rows:
        if cells[0].row.quoted or cells[0].row.ours:
            continue
        for cell, small in zip(cells, smaller):
            number = number_of(cell, cells)
            if number not in seen and (number or not cell.printed):
                counts[state_of(cell, small)] += 1
                seen |= {number} - {None}
    return counts


def number_of(cell: Cell, row: list[Cell]) -> tuple | None:
    """What makes a published number the same as one of another table: the run, the place in its record, and
    the digits. None where nothing is printed, or where no record can have it."""
    if not cell.printed or cell.column.kind == "none":
        return None
    runs = tuple(of.run.work for of in (row if cell.column.kind == "mean" else [cell]))
    return runs, cell.column.value, cell.printed[0]


def state_of(cell: Cell, small: Cell) -> str:
    """A cell's verdict at the paper's scale (agrees, unclear, differs, untested), or why it has none: lost in
    the text of the paper; cost or other cost, which are computed; laptop, if it has runs there alone; not
    run."""
    if not cell.printed:
        return "lost"
    if cell.computed and cell.verdict:
        return "cost" if cell.verdict == "agrees" else "other cost"
    return cell.verdict or ("laptop" if small.values else "not run")


def sentence(counts: Counter) -> str:
    """The state of all published cells in words."""
    measured = sum(counts[state] for state in MEASURED)
    costs = sum(counts[state] for state in COSTS)
    accuracies = counts.total() - counts["lost"] - costs
    said = f" ({outcome(counts)})" if measured else ""
    words = (f"Of the {accuracies} accuracies that the papers print of their own experiments, {measured} "
             "are measured here at the paper's scale, with the default settings and the flags of their row"
             f"{said}. At laptop scale alone {counts['laptop']} have runs, and {counts['not run']} are not "
             f"run. Of {costs} costs that are computed from the network {counts['cost']} are as printed.")
    if counts["lost"]:
        words += f" {counts['lost']} more printed numbers were unreadable in our text of the papers."
    return words


def outcome(counts: Counter) -> str:
    """What the intervals of the measured cells say, in words."""
    said = {"agrees": "without a difference", "differs": "with a difference",
            "unclear": "with a wide interval", "untested": "not decided"}
    return ", ".join(f"{counts[state]} {words}" for state, words in said.items() if counts[state])
