"""A cell of a table as a card of a page: what is published, what was measured here, what that says, and the
runs behind it, each with its command, code, machine and curve."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from docs import curve
from plumbing.sources import hash_of
from reproduce.cells import Cell, asks_curve, chance, decimals, run_of
from reproduce.cost import clock
from reproduce.methods import method
from reproduce.records import UNKNOWN, Records, Run, alone, command_of, committed, sources_of
from reproduce.rendering import budget, number
from reproduce.scoreboard import STATES, state_of
from reproduce.statistics import LEVEL
from reproduce.tables import Block, Column, Row, Table
from reproduce.throughput import arguments_of

# Of each state of a cell what it says; the first ones are the scoreboard's.
WORDS = {state: words for state, (words, _, _) in STATES.items()}
WORDS |= {"recorded": "recorded, nothing published to compare with", "quoted": "quoted by the paper"}
SCALES = {"paper": "the paper's scale", "laptop": "laptop scale"}
NOT_IN_PAPER = "(not in the paper)"  # in the title of a block of ours
RECORD = "--record results/runs.jsonl"  # what puts a run beside the others


@dataclass
class Place:
    """A cell at both scales, and where it stands."""

    table: Table
    block: Block
    row: Row
    column: Column
    cells: dict[str, Cell]  # by scale
    anchor: str  # on the table's page
    state: str  # one of WORDS
    counted: bool  # in the scoreboard

    @property
    def name(self) -> str:
        return f"{self.row.method}, {self.column.name}"

    def scales(self) -> list[str]:
        """The scales at which it has a value or runs."""
        return [scale for scale, cell in self.cells.items() if cell.values or cell.records]


def place_of(table: Table, block: Block, row: Row, column: Column, cells: dict[str, Cell],
             anchor: str) -> Place:
    """A cell with its state: of what is counted the scoreboard's, of the rest whether it has anything."""
    counted = not (table.figure or row.quoted or row.ours)
    place = Place(table, block, row, column, cells, anchor, "not run", counted)
    scales = place.scales()
    if row.quoted:
        place.state = "quoted"
    elif counted or cells["paper"].published:
        place.state = state_of(row, cells["paper"], cells["laptop"])
    elif scales:
        place.state = "recorded" if "paper" in scales else "laptop"
    return place


def slug(words: str) -> str:
    """Words as a part of an anchor or a class: "not run" -> not-run."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "x"


@dataclass
class Evidence:
    """What the cards of a page draw on, and what they have shown already."""

    records: Records
    times: dict[str, float | None]  # of runs that are not recorded: seconds, by their keys
    runs: dict[str, Place] = field(default_factory=dict)  # {id of a run: the card that has it}
    commands: dict[str, Place] = field(default_factory=dict)


# The card


def card(place: Place, evidence: Evidence) -> str:
    html = [f'<article class="cell s-{slug(place.state)}" id="{place.anchor}">',
            f'<h4><a href="#{place.anchor}">{escape(place.name)}</a> '
            f'<span class="state">{escape(WORDS[place.state])}</span></h4>', "<dl>",
            f"<dt>Published{unit(place)}</dt><dd>{published_words(place)}</dd>"]
    for scale, cell in place.cells.items():
        words = measured(place, scale, cell, evidence)
        html.append(f"<dt>Here, {setting(place.block, scale)}{unit(place)}</dt><dd>{words}</dd>")
        if scale == "paper" and cell.verdict:
            html.append(f"<dt>What that says</dt><dd>{verdict_words(cell)}</dd>")
    html.append("</dl>")
    for scale, cell in place.cells.items():
        html.append(runs_of(place, scale, cell, evidence))
    html.append("</article>")
    return "".join(html)


def setting(block: Block, scale: str) -> str:
    """The scale in words; a block of ours, such as the digits, is at no scale of the paper."""
    return "own setting" if NOT_IN_PAPER in block.title and scale == "paper" else SCALES[scale]


def unit(place: Place) -> str:
    """Percent where the number is an accuracy."""
    return "" if chance(place.block, place.column) is None else " (%)"


def published_words(place: Place) -> str:
    printed = place.cells["paper"].printed
    if not printed:
        if place.row.ours:
            return "nothing: the paper does not have this row"
        return "not printed" if place.table.figure else "lost when the paper was read as text"
    number_printed = f"<b>{escape(' ± '.join(printed))}</b>"
    if place.row.quoted:
        return f"{number_printed}, which the paper quotes from another one"
    trials = place.table.trials
    if len(printed) < 2:
        return f"{number_printed}, without a deviation"
    if trials:
        return f"{number_printed} (mean ± deviation of {trials} trials)"
    return f"{number_printed} (mean ± deviation; of how many trials is not said)"


def measured(place: Place, scale: str, cell: Cell, evidence: Evidence) -> str:
    """Our number at a scale; without one, what would make it."""
    if not cell.values:
        return without_value(place, scale, cell, evidence)
    words = f"<b>{number(cell.mean)}"
    if cell.deviation is not None:
        words += f" ± {number(cell.deviation)}"
    words += "</b>"
    if cell.computed:
        return f"{words}, computed from the network, without a run"
    if place.column.kind == "seconds":
        return f"{words}, of the longest run that had its machine to itself"
    seeds = ", ".join(map(str, cell.values))
    if cell.deviation is not None:
        words += f" (mean ± deviation of {len(cell.values)} seeds: {seeds})"
    else:
        words += f" (one seed: {seeds})"
    guess = chance(place.block, place.column)
    if guess is not None:
        words += f"; chance (guessing a class) is {number(guess)}"
    if scale != "paper":
        words += f". <b>Not comparable with the published number</b>: {smaller(cell)}"
    return words


def smaller(cell: Cell) -> str:
    """Images and rounds of a cell's runs at laptop scale."""
    budgets = dict.fromkeys(budget_of(record) for record in cell.records.values())
    return escape("; ".join(budgets)) or "smaller images, fewer rounds"


def without_value(place: Place, scale: str, cell: Cell, evidence: Evidence) -> str:
    """What would make a number that is not there."""
    row, column = place.row, place.column
    if row.quoted:
        return "the paper has not measured it itself"
    if not row.implemented:
        return f"not run: the method is not written yet ({escape(row.module)})"
    if cell.records:
        return "a curve, in the runs below"
    if column.kind == "mean":
        return "not run: the mean of the other columns, of the seeds that all of them have"
    if column.kind == "seconds" and scale == "paper":
        return ("not measured: it is the time of a run that had its machine to itself, and none is recorded. "
                + command_for(place, scale, evidence))
    if column.kind in ("seconds", "cost"):
        return "none: it is a number of the paper's scale"
    return command_for(place, scale, evidence)


def command_for(place: Place, scale: str, evidence: Evidence) -> str:
    """The command of seed 0, and its time where it is estimated; a link if another card has it."""
    run = run_of(place.block, place.row, place.column, scale, 0)
    if run is None:
        return "none: there is nothing to make smaller, or it is what the column varies"
    run = dataclasses.replace(run, curve=asks_curve(place.table, place.column))
    command = f"{run.command} {RECORD}"
    if command in evidence.commands:
        other = evidence.commands[command]
        return f'not run; the command of <a href="#{other.anchor}">{escape(other.name)}</a> gives it'
    evidence.commands[command] = place
    return f"not run. Seed 0: {copyable(command)}{estimate(run, evidence)}"


def estimate(run: Run, evidence: Evidence) -> str:
    seconds = evidence.times.get(run.key)
    return "" if seconds is None else f" about {clock(seconds)}"


def copyable(command: str) -> str:
    """A command that a click selects as a whole; its lines end between words alone."""
    return f'<code class="command">{escape(command).replace(" ", " <wbr>")}</code>'


# What a verdict rests on


def verdict_words(cell: Cell) -> str:
    """The test behind a verdict: which, the difference, the probability or the tolerance."""
    verdict = f"<b>{escape(WORDS[cell.verdict])}</b>"
    if cell.elsewhere:
        return f"{verdict}: {why_untested(cell)}"
    if cell.computed:
        tolerance = 1.5 * 10 ** -decimals(cell.printed[0])
        side = "less" if cell.verdict == "agrees" else "not less"
        return (f"{verdict}: the difference is {cell.difference:+.5f}, {side} than {tolerance:g}, one and a "
                "half of the last printed digit")
    difference = f"{verdict}: the difference is {cell.difference:+.2f}"
    if cell.corrected is None:
        return f"{difference}; no test, since {why_untested(cell)}"
    side = "below" if cell.verdict == "differs" else "not below"
    return (f"{difference}; Welch's test has p = {cell.probability:.3g}, by Holm's correction for all tests "
            f"of this table p = {cell.corrected:.3g}, {side} {LEVEL}")


def why_untested(cell: Cell) -> str:
    """Why Welch's test cannot be made."""
    if cell.elsewhere:
        return "it is a time or a cost of another machine, or counted otherwise"
    if len(cell.values) < 2:
        return "there is one seed here, and it takes two"
    if len(cell.printed) < 2:
        return "the paper prints no deviation"
    if cell.trials < 2:
        return "the paper does not say of how many trials its deviation is"
    return "neither side has a deviation"


# The runs


def runs_of(place: Place, scale: str, cell: Cell, evidence: Evidence) -> str:
    """The runs behind a cell; one that another card of the page has is a link to it."""
    values = cell.values
    of_seed = cell.records
    if place.column.kind == "seconds":
        of_seed = {record["args"]["seed"]: record for record in cell.behind}
    if not of_seed:
        return ""
    links, cards = [], []
    for seed, record in of_seed.items():
        value = f": <b>{number(values[seed])}</b>" if seed in values else ""
        other = evidence.runs.get(record["id"])
        if other:
            links.append(f'<li>seed {seed}{value}, <a href="#run-{record["id"]}">the run of '
                         f"{escape(other.name)}</a></li>")
        else:
            evidence.runs[record["id"]] = place
            title = f"Seed {seed} at {setting(place.block, scale)}"
            logged = place.column.path if place.column.kind == "logs" else ""
            cards.append(run_card(title, record, evidence.records, value, logged))
    html = f'<ul class="links">{"".join(links)}</ul>' if links else ""
    if cards:
        html += f'<div class="runs">{"".join(cards)}</div>'
    return html


def run_card(title: str, record: dict, records: Records, value: str = "", logged: str = "") -> str:
    """A recorded run, and its value behind the title; its curve is that of the accuracies or of a log."""
    best = record["best"].get("round") if "val" in record["curve"] else None
    ylabel = f"{logged}, %" if logged else "accuracy, %"
    drawing = curve.draw(curve.curves_of(record, logged), best, ylabel)
    parts = [("Command", copyable(command_of(record))), ("Code", code_words(record, records)),
             ("Accuracy, %", accuracies(record)), ("Budget", escape(budget_of(record))),
             ("Machine", machine(record)), ("Time", time_words(record))]
    rows = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in parts)
    anchor = f"run-{record['id']}"
    head = f'<h5><a href="#{anchor}">{escape(title)}</a>{value}</h5>'
    return f'<section class="run" id="{anchor}">{head}{drawing}<dl>{rows}</dl></section>'


def code_words(record: dict, records: Records) -> str:
    """Commit and hash of the sources, and whether the code here gives the same."""
    commit = (record.get("commit") or "not known")[:12]
    words = f"commit <code>{escape(commit)}</code>"
    if not committed(record):
        words += ", <b>with changes that no commit has</b>"
    sources = list(dict.fromkeys(sources_of(record)))
    if UNKNOWN in sources:
        return (f"{words}; the hash of its sources was not recorded, so it may be <b>other code than that "
                "here</b>")
    words += f"; sources <code>{escape(' '.join(sources))}</code>: "
    here = hash_of(Path(method(record["method"]).__file__).resolve())
    if records.stale(record):
        return words + "<b>other code than that here</b>; the numbers of the code here may differ"
    if sources == [here]:
        return words + "the code here"
    return words + "an earlier version, of which a short run gave the same bytes as the code here"


def accuracies(record: dict) -> str:
    """Best and last round, pooled, averaged, and on each client or target."""
    found = []
    for part, name in (("best", "best validation round"), ("last", "last round")):
        of_part = record[part]
        if part == "best" and "val" not in record["curve"]:
            continue
        numbers = []
        for key in ("ALL", "AVG", "target"):
            if key in of_part:
                numbers.append(f"{key} {100 * of_part[key]:.2f}")
        for client, value in of_part.get("clients", {}).items():
            numbers.append(f"{client} {100 * value:.1f}")
        for target, shares in of_part.get("linear", {}).items():
            for share, value in shares.items():
                numbers.append(f"{target} with {100 * float(share):.0f}% of its labels {100 * value:.2f}")
        if numbers:
            found.append(f"{name} {of_part.get('round', '')}: {', '.join(numbers)}")
    return escape("; ".join(found)) or "none"


def budget_of(record: dict) -> str:
    """How long it was trained, on which images and with which network."""
    args = dataclasses.asdict(arguments_of(record))
    return f"{budget(args)}; {args['backbone']}"


def machine(record: dict) -> str:
    """Precision, threads, processor and versions."""
    hardware, versions = record["hardware"], record["versions"]
    device = hardware.get("gpu") or hardware.get("cpu") or "a processor that is not known"
    precision = record["args"].get("precision", "precision not known")
    threads, processes = hardware.get("threads", "?"), hardware.get("processes", 1)
    known = [f"{name} {version}" for name, version in versions.items()]
    return escape(f"{precision}, threads: {threads}, processes: {processes}, {device}; {', '.join(known)}")


def time_words(record: dict) -> str:
    """How long it took, whether the machine was its own, and when it ended."""
    seconds = record["seconds"]
    each = ", ".join(f"{name} {clock(value)}" for name, value in seconds.items())
    own = "alone on its machine" if alone(record) else "beside other processes, or not known"
    return escape(f"{clock(sum(seconds.values()))} ({each}), {own}; ended {record['finished']}")
