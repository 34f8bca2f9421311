"""The pages of the results: each published number is on one of them once, with what was measured of it, by
which command and which code, and what that says. In a real browser, where there is one (-m browser): the
filters show what they name, a square leads to its cell, nothing needs a script."""

import re
from collections import Counter
from html import unescape
from pathlib import Path

from docs import curve
from docs.equations import ROOT
from plumbing.sources import hash_of
from reproduce.cells import Cell, run_of
from reproduce.methods import method
from reproduce.published import Published
from reproduce.records import Records, command_of
from reproduce.tables import read_tables
from tests.pages import Opened, Read
from tests.small_table import recorded, small_folder, write_records

import pytest

for library in ("markdown_it", "pygments", "math_core"):
    pytest.importorskip(library, reason="needs `pip install -r requirements-docs.txt`")

from docs import build, results_cell, results_page, results_table  # noqa: E402

pytestmark = pytest.mark.xdist_group("docs")  # the pages are made once
TABLES = read_tables()


@pytest.fixture(scope="module")
def results() -> results_table.Results:
    return results_table.Results(TABLES, Records(ROOT / "results" / "runs.jsonl"))


def words_of(html: str) -> str:
    """What a reader sees, in one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def cards_of(html: str) -> dict[str, str]:
    """{anchor: words} of the cards of a page."""
    cards = re.findall(r'<article class="cell [^"]*" id="([^"]*)">(.*?)</article>', html, flags=re.DOTALL)
    return {anchor: words_of(card) for anchor, card in cards}


def states_in(html: str, kind: str) -> Counter:
    return Counter(re.findall(rf'<{kind} class="(?:cell|sq) s-([a-z-]+)', html))


def text_of(site: Path, table) -> str:
    return (site / results_table.page_of(table)).read_text()


# All tables


def test_every_published_cell_has_one_square_and_one_card(site, results):
    """As many as the published numbers have lines that are not quoted; each square leads to a card of its
    own."""
    text = (site / "results.html").read_text()
    squares = re.findall(r'<a class="sq [^"]*" href="cells/([^"]*).html#([^"]*)" title', text)
    assert len(squares) == len(set(squares))
    for table in TABLES:
        cards = cards_of(text_of(site, table))
        assert len(cards) == sum(len(block.rows) * len(block.columns) for block in table.blocks)
        own = [anchor for name, anchor in squares if name == table.id]
        lines = Published(ROOT / "tables" / "published" / f"{table.id}.csv").lines
        expected = 0 if table.figure else sum(not line.quoted for line in lines)
        assert len(own) == expected, table.id
        assert set(own) <= cards.keys()
        for place in results.places(table):
            assert (" ± ".join(place.cells["paper"].printed) or "Published") in cards[place.anchor]


def test_the_states_are_those_of_the_scoreboard(site, results):
    every = Counter()
    for table in TABLES:
        if table.figure:
            continue
        counts = results.strip(table).counts
        every += counts
        shown = Counter()
        for place in results.places(table):
            if place.counted:
                shown[place.state] += 1
                assert results_cell.WORDS[place.state] in cards_of_table(site, table)[place.anchor]
        assert shown == counts, table.id
    text = (site / "results.html").read_text()
    assert states_in(text, "a") == {results_cell.slug(state): n for state, n in every.items() if n}
    for state, n in every.items():
        assert not n or f"{results_cell.WORDS[state]} ({n})" in text


READ: dict[str, dict[str, str]] = {}


def cards_of_table(site: Path, table) -> dict[str, str]:
    """The cards of a table's page, read once."""
    if table.id not in READ:
        READ[table.id] = cards_of(text_of(site, table))
    return READ[table.id]


def test_every_recorded_run_is_there_with_its_command_and_code(site, results):
    """Once on each page that has it, and each cell names its seeds' values."""
    seen, at = 0, r"( at [a-z' ]+)? ?"
    for table in TABLES:
        text = text_of(site, table)
        cards, words = cards_of_table(site, table), words_of(text)
        for place in results.places(table):
            for cell in place.cells.values():
                for seed, record in cell.records.items():
                    seen += 1
                    assert text.count(f'id="run-{record["id"]}"') == 1
                    assert command_of(record) in words
                    assert (record["commit"] or "not known")[:12] in words
                    value = f": {results_cell.number(cell.values[seed])}" if seed in cell.values else ""
                    said = re.search(rf"[Ss]eed {seed}{at}{re.escape(value)}", cards[place.anchor])
                    assert said, (table.id, place.anchor, seed)
    assert seen > 50


def test_a_cell_without_runs_says_so_and_has_its_command(site, results):
    counts = Counter()
    for table in TABLES:
        for place in results.places(table):
            if place.state != "not run" or place.column.kind in ("mean", "seconds"):
                continue
            card = cards_of_table(site, table)[place.anchor]
            run = run_of(place.block, place.row, place.column, "paper", 0)
            assert f"Here, {results_cell.setting(place.block, 'paper')}" in card and "not run" in card
            has = f"not run. Seed 0: {run.command}" in card
            counts[has or "gives it" in card] += 1
    assert counts[True] > 500 and not counts[False]


def test_every_other_run_is_on_the_page_of_these(site, results):
    """What no table has, each once: together all that is recorded."""
    text = (site / results_page.OTHERS).read_text()
    others = re.findall(r'class="run" id="run-([^"]*)"', text)
    shown = set()
    for table in TABLES:
        shown |= set(re.findall(r'class="run" id="run-([^"]*)"', text_of(site, table)))
    recorded_ids = {record["id"] for record in results.records.by_key.values()}
    assert len(others) == len(set(others)) and not shown & set(others)
    assert shown | set(others) == recorded_ids


def test_pages_of_methods_tables_and_the_start_lead_there(site):
    assert "results.html" in Read(site / "index.html").links
    for name in ("fedsr", "fedadg", "fedgala", "fedcir", "fdse"):
        assert f"../../results.html#{name}" in Read(site / "docs" / "methods" / f"{name}.html").links
    assert "../results.html" in Read(site / "results" / "findings.html").links
    assert "../../cells/fdse-1.html" in Read(site / "results" / "tables" / "fdse-1-laptop.html").links


def test_the_pages_stay_small(site):
    """In bytes: what a phone loads."""
    sizes = {path.name: path.stat().st_size for path in [site / "results.html", *(site / "cells").iterdir()]}
    assert max(sizes.values()) < 1_000_000, sizes


# A small table


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """The page of the small table of the tests of reproduce/."""
    folder = small_folder(tmp_path_factory.mktemp("small"))
    runs = recorded(folder / "runs.jsonl")
    for number, run in enumerate(runs):
        run["id"] = f"a{number}"
    tables, records = read_tables(folder / "tables"), Records(write_records(folder / "runs.jsonl", runs))
    return results_table.table_page(build.Site(folder), results_table.Results(tables, records), tables[0])


@pytest.mark.parametrize("anchor, parts", [
    ("digits-fedavg-all", ["differs", "90.0 ± 2.0 (mean ± deviation of 4 trials)", "96.00 ± 1.00 (mean ± "
                           "deviation of 3 seeds: 0, 1, 2)", "chance (guessing a class) is 10.00",
                           "the difference is +6.00; Welch's test has p = 0.0045", "p = 0.0045, below 0.05",
                           "Seed 1 at the paper's scale : 97.00", "commit 0123456789ab", "other code than",
                           "Command python fedavg.py"]),
    ("digits-fedavg-avg", ["88.5 , without a deviation", "94.00 ± 1.00", "the paper prints no deviation",
                           "seed 0: 94.00 , the run of FedAvg, ALL"]),
    ("digits-fdse-without-c-all", ["one seed here", "with changes that no commit has"]),
    ("digits-fdse-without-c-avg", ["lost when the paper was read as text", "90.00 (one seed: 0)"]),
    ("digits-quoted-avg", ["Quoted, AVG quoted by the paper", "51.0 , which the paper quotes",
                           "has not measured it itself"]),
    ("digits-fedx-all", ["the method is not written yet (baselines.fedx)"]),
])
def test_the_words_of_a_cell(small, anchor, parts):
    card = cards_of(small)[anchor]
    for part in parts:
        assert part in card, card


def test_a_page_explains_its_marks_and_its_scales(small, site):
    """Of the marks those that it has; the two laptop budgets of FDSE, each on its own page."""
    words = words_of(small)
    assert "* it differs." in words and "? cannot be tested." in words
    assert "= no difference is found." not in words
    assert "Laptop scale: smaller images and fewer rounds than the paper" in words
    for table, budget in (("fdse-1", "40 rounds of 1 epoch of 50 images, 64x64"),
                          ("fdse-3", "60 rounds of 1 epoch of 50 images, 160x160")):
        text = (site / "cells" / f"{table}.html").read_text()
        assert f"Not comparable with the published number : {budget}" in words_of(text)
    assert '<a href="fdse-3.html">fdse-3</a>' in (site / "cells" / "fdse-1.html").read_text()
    own = words_of((site / "cells" / "fedgala-fig2b.html").read_text())
    assert "Here, own setting" in own and "Seed 0 at own setting" in own


@pytest.mark.parametrize("cell, words", [
    (Cell(["1.30"], {0: 1.314}, computed=True, verdict="agrees"),
     "no difference found: the difference is +0.01400, less than 0.015"),
    (Cell(["4.4"], {0: 4.6}, computed=True, verdict="differs"),
     "differs: the difference is +0.20000, not less than 0.15"),
    (Cell(["90", "1"], {0: 91.0, 1: 92.0}, trials=0, verdict="untested"), "does not say of how many trials"),
    (Cell(["90", "0"], {0: 91.0, 1: 91.0}, trials=3, verdict="untested"), "neither side has a deviation"),
    (Cell(["90", "2"], {0: 91.0, 1: 92.0}, trials=3, corrected=0.4, verdict="agrees"),
     "p = 0.4, not below 0.05"),
    (Cell(["4.03"], {0: 1.0}, elsewhere=True, verdict="untested"), "another machine"),
])
def test_what_a_verdict_rests_on(cell, words):
    assert words in re.sub(r"<[^>]*>", "", results_cell.verdict_words(cell))


def test_the_code_of_a_run_is_told_apart(tmp_path):
    records = Records(tmp_path / "runs.jsonl")
    here = hash_of(Path(method("fedavg").__file__).resolve())
    record = {"method": "fedavg", "commit": "0123456789abcdef", "uncommitted_changes": False, "sources": here}
    assert results_cell.code_words(record, records).endswith("the code here")
    records.same["fedavg"] = {here, "0a"}
    assert "an earlier version" in results_cell.code_words(record | {"sources": "0a"}, records)
    assert "other code" in results_cell.code_words(record | {"sources": "0b"}, records)
    assert "was not recorded" in results_cell.code_words(record | {"sources": "unknown"}, records)
    assert "no commit has" in results_cell.code_words(record | {"uncommitted_changes": True}, records)


def test_the_time_of_a_run_stands_behind_its_command(results):
    """Where it is estimated; a second cell of the same run leads to the first."""
    first, second = results.lines["fdse-1"][0][0][:2]
    run = run_of(first.block, first.row, first.column, "paper", 0)
    evidence = results_cell.Evidence(results.records, {run.key: 7200.0})
    assert results_cell.command_for(first, "paper", evidence).endswith("</code> about 2.0 h")
    assert f'href="#{first.anchor}"' in results_cell.command_for(second, "paper", evidence)


# Curves


def test_a_curve_has_its_points_axes_and_words():
    svg = curve.draw({"ALL": [(1, 20.0), (3, 60.0)], "validation": [(1, 30.0), (2, 40.0)]}, best=2)
    assert re.findall(r'points="([^"]*)"', svg) == ["40.0,138.0 324.0,34.0", "40.0,112.0 182.0,86.0"]
    assert [float(tick) for tick in re.findall(r'text-anchor="end">([^<]*)', svg)] == [20, 30, 40, 50, 60]
    assert re.findall(r'text-anchor="middle">([^<]*)', svg) == ["1", "2", "3", "round"]
    assert 'class="best" d="M182.0,34V138"' in svg and "accuracy, %</text>" in svg
    assert "ALL 20.0 in round 1, 60.0 in round 3, at most 60.0" in svg and "best validation in round 2" in svg


def test_a_curve_of_a_record():
    """Without gaps, in percent, and without one that is there twice."""
    record = {"curve": {"round": [1, 2, 3], "val": [0.1, 0.2, 0.3], "ALL": [0.5, None, 0.6],
                        "d0 0.1": [0.7, 0.7, 0.7], "target": [0.7, 0.7, 0.7]}, "logs": {"loss": [0.5, 0.25]}}
    curves = curve.curves_of(record)
    assert list(curves) == ["ALL", "d0 0.1", "validation"]
    assert curves["ALL"] == [(1, 50.0), (3, 60.0)]
    assert curve.curves_of(record, "loss") == {"loss": [(1, 50.0), (2, 25.0)]}
    assert curve.curves_of(record, "other") == {} and curve.draw({"ALL": [(1, 50.0)]}, None) == ""


@pytest.mark.parametrize("low, high, ticks", [(0.0, 100.0, [0, 20, 40, 60, 80, 100]), (97.2, 98.1, None),
                                              (50.0, 50.0, None)])
def test_the_ticks_enclose_the_curve(low, high, ticks):
    found = curve.ticks_of(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 6
    assert ticks is None or found == ticks


# In a browser


def visible(tab) -> list[str]:
    """The classes of the squares that are shown."""
    return tab.evaluate("[...document.querySelectorAll('.squares .sq')].filter(e => e.checkVisibility())"
                        ".map(e => e.className)")


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1400])
def test_filters_show_what_they_name(browser, site, results, width):
    """Alone and together; a table of which nothing is left goes too; "Show all" brings all back."""
    counts = sum((results.strip(table).counts for table in TABLES if not table.figure), Counter())
    with Opened(browser, site, "results.html", width) as opened:
        tab = opened.tab
        every = len(visible(tab))
        assert every == sum(counts.values())
        tab.check("#state-agrees")
        assert visible(tab) and all("s-agrees" in names for names in visible(tab))
        assert len(visible(tab)) == counts["agrees"]
        assert tab.evaluate("[...document.querySelectorAll('.strip')].filter(e => e.checkVisibility())"
                            ".every(e => e.querySelector('.s-agrees'))")
        tab.check("#scale-none")
        assert visible(tab) == []
        assert tab.evaluate("[...document.querySelectorAll('.strip, .paper, .figures')]"
                            ".every(e => !e.checkVisibility())")
        tab.click("button[type=reset]")
        assert len(visible(tab)) == every
        tab.check("#paper-fdse")
        assert not tab.is_visible("#fedsr") and tab.is_visible("#fdse .figures")
        tab.focus("#scale-all")
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("ArrowDown")
        assert tab.is_checked("#scale-laptop")
        assert visible(tab) and all("at-laptop" in names for names in visible(tab))
        assert opened.complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("script", [True, False])
def test_a_square_leads_to_its_cell(browser, site, script):
    """Also by the keyboard; with scripts switched off too."""
    with Opened(browser, site, "results.html", 390, java_script_enabled=script) as opened:
        square = opened.tab.locator("#fdse-4 .sq").first
        address = square.get_attribute("href")
        square.focus()
        opened.tab.keyboard.press("Enter")
        opened.tab.wait_for_url(f"**/{address}")
        box = opened.tab.locator(f"#{address.partition('#')[2]}").bounding_box()
        assert box and -1 <= box["y"] < 900 and box["height"] > 0
        assert opened.complaints == []


@pytest.mark.browser
def test_a_click_selects_a_whole_command(browser, site):
    with Opened(browser, site, "cells/fdse-1.html") as opened:
        command = opened.tab.locator(".run .command").first
        command.click()
        assert opened.tab.evaluate("getSelection().toString()") == command.inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_curves_stand_out_from_the_page(browser, site, scheme):
    """Lines and words of a curve have three times the contrast of nothing, as WCAG asks of graphics."""
    with Opened(browser, site, "cells/fdse-1.html", color_scheme=scheme) as opened:
        colours = opened.tab.evaluate(
            "[...document.querySelector('.curve').querySelectorAll('polyline, .axis')]"
            ".map(e => getComputedStyle(e).stroke)")
        behind = opened.tab.evaluate("getComputedStyle(document.querySelector('.run')).backgroundColor")
        assert len(colours) > 3
        assert min(contrast(colour, behind) for colour in colours) >= 3


def contrast(one: str, other: str) -> float:
    """Of two colours as a style sheet computes them: rgb(...). WCAG's relative luminances, each and 0.05."""
    lights = []
    for colour in (one, other):
        light = 0.05
        for weight, value in zip((0.2126, 0.7152, 0.0722), re.findall(r"\d+", colour)):
            light += weight * linear(int(value) / 255)
        lights.append(light)
    return max(lights) / min(lights)


def linear(share: float) -> float:
    """A share of sRGB as one of light."""
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4
