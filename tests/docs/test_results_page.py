"""The pages of the results: each published number is on one of them once, with what was measured of it, by
which command and which code, and what that says. In a real browser, where there is one (-m browser): a number
leads to its cell, a click selects a command, and nothing needs a script."""

import re
from pathlib import Path

from docs.equations import ROOT
from reproduce.published import read_published
from reproduce.records import Records, command_of
from reproduce.tables import read_tables
from tests.conftest import RUNS
from tests.pages import words_of
from tests.small_table import recorded, small_folder, write_records

import pytest

from docs import pages, results


@pytest.fixture(scope="module")
def tables() -> list[results.Filled]:
    records = Records(RUNS)
    return [results.read(table, records) for table in read_tables()]


def cards_of(path: Path) -> dict[str, str]:
    """{anchor: words} of the cards of a page."""
    article = r'<article class="cell [^"]*" id="([^"]*)">(.*?)</article>'
    cards = re.findall(article, path.read_text(), flags=re.S)
    return {anchor: words_of(card) for anchor, card in cards}


def test_every_published_number_is_counted_and_has_one_card(site, tables):
    """As many as the published numbers have lines that are not quoted, of tables with runs first. What is
    measured opens a table, and is large."""
    text = words_of((site / "results.html").read_text())
    for each in tables:
        first = re.search(r"<tbody>\s*<tr>.*?</tr>", (site / each.page).read_text(), flags=re.S)[0]
        assert ("<b>" in first) == each.has_runs
        cards = cards_of(site / each.page)
        assert len(cards) == len(each.places)
        lines = read_published(ROOT / "papers" / each.table.paper / "printed.csv", each.table.id)
        expected = sum(line["kind"] != "quoted" for line in lines)
        if each.table.figure:
            expected = 0
        else:
            assert f"{each.table.title} {each.summary}" in text
        assert sum(place.counted for place in each.places) == expected, each.table.id
        for place in each.places:
            card = cards[place.anchor]
            if place.state == "not run" and place.cell.column.kind != "mean":
                assert f"not run. Seed 0: {results.command(place, 'paper')}" in card
            assert results.WORDS[place.state] in card and " ± ".join(place.cells["paper"].printed) in card


def test_every_run_of_a_cell_is_there_with_its_command_and_code(site, tables):
    """Once on each page that has it, and each cell names its seeds' values. What seeds share of a command is
    said once."""
    for each in tables:
        text, cards = (site / each.page).read_text(), cards_of(site / each.page)
        runs = dict(re.findall(r'<section class="run" id="run-(\w+)">(.*?)</section>', text, flags=re.S))
        assert len(runs) == text.count('<section class="run"')
        for place in each.places:
            for cell in place.cells.values():
                for seed, record in cell.records.items():
                    words, whole = words_of(runs[record["id"]]), " ".join(command_of(record).split())
                    assert f"Command the same with --seed {seed} " in words or f"Command {whole} " in words
                    assert record["commit"][:12] in words
                    value = f": {results.number(cell.values[seed])}" if seed in cell.values else ""
                    assert re.search(rf"Seed {seed} at [a-z' ]+{re.escape(value)}", cards[place.anchor])


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, str]:
    """The cards of the small table of the tests of reproduce/."""
    folder = small_folder(tmp_path_factory.mktemp("small"))
    runs = [one | {"id": f"a{i}"} for i, one in enumerate(recorded(folder / "runs.jsonl"))]
    records = Records(write_records(folder / "runs.jsonl", runs))
    each = results.read(read_tables(folder / "papers")[0], records)
    results.write_table(pages.Site(folder), each)
    return cards_of(folder / each.page)


@pytest.mark.parametrize("anchor, parts", [
    ("digits-fedavg-all", ["not decided", "90.0 ± 2.0 (mean ± deviation of 4 trials)", "96.00 ± 1.00 (mean ± "
                           "deviation of 3 seeds: 0, 1, 2)", "chance is 10.00",
                           "the difference is +6.00, by Welch's 95% interval +2.95",
                           "Seed 1 at the paper's scale: 97.00", "commit 0123456789ab",
                           "Command python fedavg.py"]),
    ("digits-fedavg-avg", ["88.5 , without a deviation", "94.00 ± 1.00", "the paper prints no deviation",
                           "Seed 0 at the paper's scale: 94.00, the run of FedAvg, ALL"]),
    ("digits-fdse-without-c-all", ["one seed here", "with changes that no commit has"]),
    ("digits-fdse-without-c-avg", ["lost when the paper was read as text", "90.00 (one seed: 0)"]),
    ("digits-quoted-avg", ["Quoted, AVG quoted by the paper", "51.0 , which the paper quotes",
                           "has not measured it itself"]),
])
def test_the_words_of_a_cell(small, anchor, parts):
    for part in parts:
        assert part in small[anchor], small[anchor]


def test_a_curve_has_its_points_axes_and_words():
    """Of a record without gaps, in percent, and without one that is there twice; or of one of its logs."""
    curve = {"round": [1, 2, 3], "ALL": [0.0, None, 1.0], "d0 0.1": [0.0, None, 1.0], "val": [0.3, 0.5, None]}
    record = {"curve": curve, "logs": {"loss": [0.5, 0.25]}, "best": {"round": 2}}
    svg = results.drawing(record)
    assert re.findall(r'points="([^"]*)"', svg) == ["40.0,138.0 324.0,34.0 ", "40.0,106.8 182.0,86.0 "]
    assert re.findall(r'text-anchor="middle">([^<]*)', svg) == ["rounds 1 to 3"]
    assert 'class="best" d="M182.0,34V138"' in svg and "accuracy, %</text>" in svg
    assert "ALL 0.0 at 1, 100.0 at 3, at most 100.0; validation 30.0" in svg
    assert results.curves_of(record, "loss") == {"loss": [(1, 50.0), (2, 25.0)]}
    assert results.drawing({"curve": {}, "best": {}}) == ""
