"""The page of a table or figure of the results (site/cells/): its blocks as tables whose cells lead to their
cards, and the cards."""

from __future__ import annotations

import os
import re
from collections import Counter
from html import escape
from pathlib import Path

from docs.results_cell import SCALES, WORDS, Evidence, Place, card, copyable, place_of, setting, slug
from reproduce.cells import Cell, FilledBlock, filled
from reproduce.methods import ROOT
from reproduce.records import Records
from reproduce.rendering import (CODE_MARKS, VERDICT_MARKS, budgets, cell_text, comparisons, label, ours,
                                 published_place)
from reproduce.scoreboard import MEASURED, STATES, Strip, outcome, strip_of
from reproduce.tables import Table

MARKS = {"agrees": "no difference is found", "unclear": "it differs by its own test alone",
         "differs": "it differs", "untested": "cannot be tested"}
HOME = Path("results.html")
RUNS = Path("docs/runs.md")
FOLDER = Path("cells")
Lines = list[list[Place]]  # the cells of a block, row by row


class Results:
    """All tables and figures with what is recorded of them."""

    def __init__(self, tables: list[Table], records: Records):
        self.tables, self.records = tables, records
        self.times: dict[str, float | None] = {}  # of runs that are not recorded: seconds, by their keys
        self.basis = ""  # what these times are of
        self.blocks = {}  # {(table, scale): its blocks}
        self.lines: dict[str, list[Lines]] = {}  # {table: the cells of its blocks}
        for table in tables:
            for scale in SCALES:
                self.blocks[table.id, scale] = filled(table, records, scale)
            self.lines[table.id] = self.lines_of(table)

    def lines_of(self, table: Table) -> list[Lines]:
        taken: Counter = Counter()
        found = []
        for block, smaller in zip(self.blocks[table.id, "paper"], self.blocks[table.id, "laptop"]):
            lines = []
            for line, small_line in zip(block.rows, smaller.rows):
                places = []
                for column, cell, small in zip(block.block.columns, line.cells, small_line.cells):
                    name = slug(f"{block.block.title} {line.row.method} {column.name}")
                    taken[name] += 1
                    anchor = name if taken[name] == 1 else f"{name}-{taken[name]}"
                    cells = {"paper": cell, "laptop": small}
                    places.append(place_of(table, block.block, line.row, column, cells, anchor))
                lines.append(places)
            found.append(lines)
        return found

    def strip(self, table: Table) -> Strip:
        return strip_of(table, self.blocks[table.id, "paper"], self.blocks[table.id, "laptop"])

    def places(self, table: Table) -> list[Place]:
        """The cells of a table, one after the other."""
        return [place for lines in self.lines[table.id] for places in lines for place in places]


def page_of(table: Table) -> Path:
    return FOLDER / f"{table.id}.html"


def in_short(strip: Strip) -> str:
    """Was a table measured, and does it agree?"""
    counts = strip.counts
    printed = len(strip.squares) - counts["lost"]
    words = f"{strip.measured} of {printed} measured at the paper's scale"
    if strip.measured:
        words += f": {outcome(counts)}"
    for state in STATES:
        if counts[state] and state not in MEASURED:
            words += f"; {counts[state]} {WORDS[state]}"
    return words


# The page of a table


def table_page(site, results: Results, table: Table) -> str:
    page = page_of(table)
    evidence = Evidence(results.records, results.times)
    html = [f"<h1>{escape(table.title)}</h1>", f'<p class="sum">{escape(state_words(results, table))}</p>',
            f'<div class="text">{about(site, table, page)}</div>']
    if results.basis:
        html.append(f'<p class="text">Times of runs that are not recorded are estimates on '
                    f"{escape(results.basis)}.</p>")
    if len(table.blocks) > 1:
        html.append(contents(results, table))
    of_paper, of_laptop = results.blocks[table.id, "paper"], results.blocks[table.id, "laptop"]
    for lines, block, smaller in zip(results.lines[table.id], of_paper, of_laptop):
        title = block.block.title
        html += [f'<h2 id="block-{slug(title)}">{escape(title)}</h2>', grid(lines, block),
                 notes_of(table, block, smaller)]
        for places, line in zip(lines, block.rows):
            cards = "".join(card(place, evidence) for place in places)
            back = f'<a class="to" href="#block-{slug(title)}">back to the table</a>'
            html.append(f"<h3>{escape(label(line.row))}{method_link(line.row.module, page)} {back}</h3>"
                        f'<div class="cards">{cards}</div>')
    return f'<div class="results">{"".join(html)}</div>'


def state_words(results: Results, table: Table) -> str:
    """Was it measured, and does it agree?"""
    if table.figure:
        counts = Counter(place.state for place in results.places(table))
        words = [f"{counts[state]} {WORDS[state]}" for state in WORDS if counts[state]]
        return f"A figure, whose points are not counted: {'; '.join(words)}."
    strip = results.strip(table)
    words = f"{in_short(strip)}."
    if not strip.measured:
        words += " So nothing can be said yet of whether the published numbers are met."
    return words


def contents(results: Results, table: Table) -> str:
    """Links to the blocks, each with how many of its cells have something."""
    items = []
    for block, lines in zip(table.blocks, results.lines[table.id]):
        places = [place for line in lines for place in line]
        words = []
        for scale in SCALES:
            count = sum(scale in place.scales() for place in places)
            if count:
                words.append(f"{count} at {setting(block, scale)}")
        said = " and ".join(words) or "none"
        items.append(f'<li><a href="#block-{slug(block.title)}">{escape(block.title)}</a>: {len(places)} '
                     f"cells, {said} measured</li>")
    return f'<ul>{"".join(items)}</ul>'


def about(site, table: Table, page: Path) -> str:
    """Protocol, notes, where the published numbers are from, commands of the whole table, and its files."""
    protocol = table.protocol[:1].upper() + table.protocol[1:]
    judged = f'<a href="{relative(HOME, page)}#verdicts">How a number is judged</a>'
    site.add(RUNS)
    html = [f"<p>{escape(protocol)}. {judged}. Laptop scale: smaller images and fewer rounds than the paper, "
            f'minutes on two cores (<a href="{relative(RUNS.with_suffix(".html"), page)}">runs</a>).</p>']
    for scale in SCALES:
        name = table.file_name(scale)
        picture = Path("results/figures") / f"{name}.png"
        if table.figure and (ROOT / picture).exists():
            site.add(picture)
            html.append(f'<figure><img src="{relative(picture, page)}" alt="{escape(table.title)} at '
                        f'{SCALES[scale]}"><figcaption>At {SCALES[scale]}</figcaption></figure>')
    source = Path("tables") / f"{table.id}.toml"
    if table.notes:
        notes = site.markdown(linked(table.notes), source, page)
        html.append(re.sub(r'"\.\./results/tables/([\w-]+\.html)"', r'"\1"', notes))
    place = published_place(table.id)
    if place:
        html.append(f"<p>The published numbers: {escape(place)}.</p>")
    command = f"python reproduce_tables.py --run --only {table.id} --seeds {table.trials or 1}"
    html.append("<p>A click selects a command. Those below are of one seed; all that is missing of "
                f"this table: {copyable(command)}, at laptop scale with {option('--scale laptop')}; "
                f"{option('--plan')} in place of {option('--run')} says how long that takes. Then "
                f"{copyable('python reproduce_tables.py')} writes the tables. The dotted vertical line of a "
                "curve is its best validation round.</p>")
    links = []
    for scale in SCALES:
        for ending in ("md", "csv"):
            path = Path("results/tables") / f"{table.file_name(scale)}.{ending}"
            if (ROOT / path).exists():
                site.add(path)
                target = path.with_suffix(".html") if ending == "md" else path
                words = "as one table" if ending == "md" else "as CSV"
                links.append(f'<a href="{relative(target, page)}">{words}, {SCALES[scale]}</a>')
    if links:
        html.append(f"<p>The same numbers {'; '.join(links)}.</p>")
    return "".join(html)


def linked(notes: list[str]) -> str:
    """Notes as a Markdown list, in which a table's page and findings.md are links."""
    text = "\n".join(f"- {note}" for note in notes)
    text = re.sub(r"`((?:fedsr|fedadg|fedgala|fedcir|fdse)-\w+)`", r"[\1](../results/tables/\1.md)", text)
    return text.replace("(findings.md)", "([findings](../results/findings.md))")


def option(words: str) -> str:
    return f'<code class="short">{words}</code>'


def grid(lines: Lines, block: FilledBlock) -> str:
    """The block as a table whose cells lead to their cards: published / ours, and ours at laptop scale."""
    head = "".join(f'<th scope="col">{escape(column.name)}</th>' for column in block.block.columns)
    rows = []
    for places, line in zip(lines, block.rows):
        cells = []
        for place in places:
            words = escape(in_grid(place.cells["paper"]))
            if "laptop" in place.scales():
                words += f"<small>laptop: {escape(ours(place.cells['laptop']) or 'a curve')}</small>"
            sample = f'<span class="sq s-{slug(place.state)}"></span>'
            cells.append(f'<td data-column="{escape(place.column.name)}"><a href="#{place.anchor}" '
                         f'title="{escape(WORDS[place.state])}">{sample} {words}</a></td>')
        rows.append(f'<tr><th scope="row">{escape(label(line.row))}</th>{"".join(cells)}</tr>')
    says = "Published / here (seeds), difference. Each number leads to its cell below."
    for verdict, words in MARKS.items():
        sign = VERDICT_MARKS[verdict]
        if any(place.cells["paper"].verdict == verdict for places in lines for place in places):
            says += f" {sign.strip()} {words}."
    if any(mark in "".join(rows) for mark in "†‡"):
        says += f" {CODE_MARKS}"
    return (f'<p class="counts">{says}</p><div class="wide"><table class="grid">'
            f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>")


def in_grid(cell: Cell) -> str:
    """Published and ours; of a curve of a figure that there is one."""
    if cell.records and not cell.values:
        return f"{' ± '.join(cell.printed) or '-'} / a curve"
    return cell_text(cell)


def notes_of(table: Table, block: FilledBlock, smaller: FilledBlock) -> str:
    """What is said of a block's rows among each other: at laptop scale the budget, and paired differences."""
    html = []
    for scale, of_scale in (("paper", block), ("laptop", smaller)):
        if table.figure or not of_scale.measured:
            continue
        lines = comparisons(table, of_scale)
        said = f" {budgets(of_scale, scale)}" if scale == "laptop" else ""
        if lines or said:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            html.append(f"<details><summary>At {SCALES[scale]}: {len(lines)} differences between rows."
                        f"{escape(said)}</summary><ul>{items}</ul></details>")
    return "".join(html)


def method_link(module: str, page: Path) -> str:
    """To the method's page, where it has one."""
    name = module.rpartition(".")[2]
    note = Path("docs/methods") / f"{name}.md"
    if not name or not (ROOT / note).exists():
        return ""
    return f' <a class="to" href="{relative(note.with_suffix(".html"), page)}">about the method</a>'


def relative(target: Path, page: Path) -> str:
    return os.path.relpath(target, page.parent)
