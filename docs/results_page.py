"""The results as pages: site/results.html, a square for each number that a paper printed, and behind it a
page for each table and figure (site/cells/), a card for each cell with the runs behind it.

They are made from what the tables are made from: tables/, results/runs.jsonl. Nothing is run; filters are
style sheets alone.
"""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path

from docs.results_cell import SCALES, WORDS, Place, run_card, slug
from docs.results_table import FOLDER, HOME, Results, in_short, page_of, table_page
from reproduce.cells import missing
from reproduce.cost import Plan
from reproduce.methods import ROOT
from reproduce.records import Records
from reproduce.rendering import ours
from reproduce.scoreboard import STATES, Strip, sentence
from reproduce.statistics import LEVEL
from reproduce.tables import PAPERS, Table, read_tables

OTHERS = FOLDER / "other-runs.html"
FINDINGS = Path("results/findings.md")
STYLE = Path(__file__).parent / "results.css"
SHORT = {"fedsr": "FedSR", "fedadg": "FedADG", "fedgala": "FedGaLA", "fedcir": "FedCiR", "fdse": "FDSE"}
FILTER_SCALES = {"paper": "runs at the paper's scale, or computed", "laptop": "runs at laptop scale",
                 "none": "no runs"}


def build(site, with_times: bool = False) -> None:
    """Write the pages into a site (build.Site). `with_times`: with the estimated times of runs that are not
    recorded, which takes a minute."""
    tables, records = read_tables(), Records(ROOT / "results" / "runs.jsonl")
    results = Results(tables, records)
    if with_times:
        results.times, results.basis = estimated(tables, records)
    style = STYLE.read_text()
    site.write(HOME, "Results", overview(results), style + filter_rules())
    for table in tables:
        site.write(page_of(table), table.title, table_page(site, results, table), style)
    site.add(FINDINGS)
    site.write(OTHERS, "Other runs", other_runs(results), style)


def estimated(tables: list[Table], records: Records) -> tuple[dict[str, float | None], str]:
    """Seconds on this machine of seed 0 of each cell that is not recorded, by the runs' keys, and what these
    are worth."""
    times = {}
    for scale in SCALES:
        plan = Plan(missing(tables, records, scale, [0]))
        plan.time_runs(records)
        times |= plan.times
    error = f"; {plan.error.described}" if plan.error else ""
    return times, f"{plan.device.described}{error}"


# The scoreboard


def overview(results: Results) -> str:
    tables = [table for table in results.tables if not table.figure]
    strips = [results.strip(table) for table in tables]
    html = ["<h1>Results: the published numbers, and those measured here</h1>",
            f'<p class="text">{escape(sentence(strips))}</p>',
            '<p class="text">Each square below is one of these numbers, and leads to its cell: what is '
            "published, what was measured here, the test behind the verdict, and the runs, each with its "
            'command, code, machine and curve. <a href="#verdicts">How a number is judged</a>.</p>',
            jumps(), filters(strips), '<div class="boards">']
    for paper, name in PAPERS.items():
        html.append(f'<section class="paper p-{paper}" id="{paper}"><h2>{escape(name)}</h2>')
        for table, strip in zip(tables, strips):
            if table.paper == paper:
                html.append(strip_html(results, table, strip))
        html.append(figures_html(results, paper))
        html.append("</section>")
    html += [f'<p>Runs that are behind none of these, such as tuning: <a href="{OTHERS}">other runs</a>.</p>',
             "</div>", '<p class="shown" aria-live="polite">Shown: </p>', verdicts()]
    return f'<div class="results overview">{"".join(html)}</div>'


def jumps() -> str:
    links = [f'<a href="#{paper}">{SHORT[paper]}</a>' for paper in PAPERS]
    return f'<p class="jumps">Go to {" ".join(links)}</p>'


def strip_html(results: Results, table: Table, strip: Strip) -> str:
    """A table: its name, its counts in words, and its squares."""
    squares = []
    for place in results.places(table):
        if place.counted:
            squares.append(square(place))
    page = page_of(table)
    head = f'<h3><a href="{page}">{escape(table.title)}</a></h3>'
    return (f'<section class="strip" id="{table.id}">{head}<p class="counts">{escape(in_short(strip))}</p>'
            f'<div class="squares">{"".join(squares)}</div></section>')


def square(place: Place) -> str:
    """A square, which has its words as its title."""
    classes = ["sq", f"s-{slug(place.state)}", *(f"at-{scale}" for scale in place.scales() or ["none"])]
    published = " ± ".join(place.cells["paper"].printed) or "unreadable"
    words = f"{place.block.title}, {place.name}: {WORDS[place.state]}; published {published}"
    for scale in place.scales():
        words += f", here at {SCALES[scale]} {ours(place.cells[scale]) or 'a curve'}"
    return (f'<a class="{" ".join(classes)}" href="{page_of(place.table)}#{place.anchor}" '
            f'title="{escape(words)}"></a>')


def figures_html(results: Results, paper: str) -> str:
    """The paper's figures: they are not counted, since few of their numbers are printed."""
    items = []
    for table in results.tables:
        if table.paper == paper and table.figure:
            runs = {scale: set() for scale in SCALES}
            for place in results.places(table):
                for scale, cell in place.cells.items():
                    runs[scale] |= {record["id"] for record in cell.records.values()}
            words = ", ".join(f"{len(ids)} at {SCALES[scale]}" for scale, ids in runs.items() if ids)
            items.append(f'<li><a href="{page_of(table)}">{escape(table.title)}</a>: '
                         f"{'runs: ' + words if words else 'no runs'}</li>")
    if not items:
        return ""
    return f'<section class="figures"><h3>Figures, not counted</h3><ul>{"".join(items)}</ul></section>'


def filters(strips: list[Strip]) -> str:
    """Three groups of choices; the style sheet does the rest."""
    counts = sum((strip.counts for strip in strips), Counter())
    papers = {"all": "all", **SHORT}
    states = {"all": "all"}
    for state in STATES:
        if counts[state]:
            states[slug(state)] = f"{WORDS[state]} ({counts[state]})"
    groups = [("paper", "Paper", papers), ("state", "State", states),
              ("scale", "Measured", {"all": "all", **FILTER_SCALES})]
    html = []
    for name, legend, choices in groups:
        inputs = []
        for value, words in choices.items():
            checked = " checked" if value == "all" else ""
            sample = f'<span class="sq s-{value}"></span>' if name == "state" and value != "all" else ""
            inputs.append(f'<label><input type="radio" name="{name}" id="{name}-{value}"{checked}>{sample} '
                          f"{escape(words)}</label>")
        html.append(f"<fieldset><legend>{legend}</legend>{''.join(inputs)}</fieldset>")
    return f'<form class="filters" aria-label="Which numbers are shown">{"".join(html)}' \
           '<button type="reset">Show all</button></form>'


def filter_rules() -> str:
    """What each choice hides: squares, and tables and papers of which nothing is left."""
    rules = []

    def hide(chosen: str, what: str) -> None:
        rules.append(f"main:has({chosen}) {what} {{ display: none }}")

    states = [slug(state) for state in STATES]
    for paper in PAPERS:
        hide(f"#paper-{paper}:checked", f".paper:not(.p-{paper})")
    for kind, prefix, values in (("state", "s", states), ("scale", "at", FILTER_SCALES)):
        for value in values:
            chosen = f"#{kind}-{value}:checked"
            hide(chosen, f".squares .sq:not(.{prefix}-{value})")
            hide(chosen, f":is(.strip, .paper):not(:has(.squares .{prefix}-{value}))")
            hide(chosen, ".figures")
    for state in states:
        for scale in FILTER_SCALES:
            rules.append(f"main:has(#state-{state}:checked):has(#scale-{scale}:checked) :is(.strip, .paper)"
                         f":not(:has(.squares .s-{state}.at-{scale})) {{ display: none }}")
    return "\n".join(rules)


VERDICTS = {
    "agrees": "No difference was found. A number that is computed from the network alone (parameters, "
              "megabytes, FLOPs) agrees if it differs from the printed one by less than one and a half of "
              "its last digit. An accuracy agrees if Welch's t-test between our seeds and the paper's trials "
              f"(its printed mean, deviation and number of trials) gives p of at least {LEVEL}. Few seeds "
              "find only large differences: this is no proof of equality.",
    "unclear": f"Welch's test alone gives p below {LEVEL}, but not after Holm's correction for all tests of "
               "the table, of which one in twenty would do so by chance.",
    "differs": f"The same test with Holm's correction: p below {LEVEL}; or a computed number that is further "
               "away.",
    "untested": "Measured at the paper's scale, but Welch's test needs two seeds here, and a printed "
                "deviation with its number of trials. Times and costs of other machines are not tested.",
    "laptop": "Runs with smaller images and fewer rounds. They say something of our rows among each other, "
              "and nothing of the published number.",
    "not run": "No run at either scale; the cell has the command that would make it.",
    "lost": "The text from which the numbers were taken has lost it.",
}


def verdicts() -> str:
    """What decides a verdict, in words."""
    html = ['<section class="text" id="verdicts"><h2>How a number is judged</h2><dl>']
    for state, text in VERDICTS.items():
        html.append(f'<dt><span class="sq s-{slug(state)}"></span> {escape(WORDS[state])}</dt>'
                    f"<dd>{escape(text)}</dd>")
    html.append("</dl><p>The number of a cell is the mean over its seeds, all of one precision; which round "
                "counts, best validation or last, stands at the top of each table. Rows that a paper quotes "
                "from another one, and rows of ours such as controls, are on the tables' pages but not among "
                "the squares. The sources of a run are a hash of the method's file and of what it imports of "
                "this repository.</p></section>")
    return "".join(html)


# The runs behind no cell


def other_runs(results: Results) -> str:
    """A page of the recorded runs that no table and no figure has, by method and dataset."""
    used = set()
    for table in results.tables:
        for place in results.places(table):
            for cell in place.cells.values():
                used |= {record["id"] for record in [*cell.records.values(), *cell.behind]}
    groups = {}
    for record in results.records.by_key.values():
        if record["id"] not in used:
            args = record["args"]
            scale = "" if args["scale"] == "paper" else f", --scale {args['scale']}"
            groups.setdefault(f"{record['method']} on {args['dataset']}{scale}", []).append(record)
    count = sum(len(group) for group in groups.values())
    html = ["<h1>Other runs</h1>", f'<p class="text">{count} recorded runs are behind no cell of a table or '
            f'figure: searches for settings, and what <a href="../{FINDINGS.with_suffix(".html")}">the '
            "findings</a> compare beyond the papers.</p>", "<ul>"]
    for name, group in sorted(groups.items()):
        html.append(f'<li><a href="#{slug(name)}">{escape(name)}</a>: {len(group)}</li>')
    html.append("</ul>")
    for name, group in sorted(groups.items()):
        cards = "".join(run_card(title_of(record), record, results.records) for record in group)
        html.append(f'<section class="cell others" id="{slug(name)}"><h2>{escape(name)}</h2>'
                    f'<div class="runs">{cards}</div></section>')
    return f'<div class="results">{"".join(html)}</div>'


def title_of(record: dict) -> str:
    """Target and seed."""
    args = record["args"]
    target = f", target {args['target']}" if args.get("protocol") != "indomain" else ""
    return f"Seed {args['seed']}{target}"
