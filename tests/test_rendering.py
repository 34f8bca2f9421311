"""Rendering: a small table against its golden file, and the repository's results against its records."""

import re
import shutil
from pathlib import Path

from plumbing.errors import Stop
from reproduce.cells import Cell, filled
from reproduce.records import Records
from reproduce.rendering import MARKS, Tally, cell_text, read_agreement, render, update_readme
from reproduce.tables import PAPERS, read_tables
from tests.conftest import ROOT
from tests.small_table import small_folder

import pytest

GOLDEN = Path(__file__).parent / "golden"


def test_rendering_against_the_golden_file(tmp_path):
    records = Records(small_folder(tmp_path) / "runs.jsonl")
    text = render(read_tables(tmp_path / "tables"), records, tmp_path)
    for name in ("fdse-9.md", "fdse-9.csv"):
        assert (tmp_path / "tables" / name).read_text() == (GOLDEN / name).read_text()
    assert "A small table" in text and "5 recorded runs" in (tmp_path / "README.md").read_text()


def test_rows_of_ours_are_shown_and_not_counted(tmp_path):
    """A control that the paper does not have."""
    path = small_folder(tmp_path) / "tables" / "fdse-9.toml"
    path.write_text(path.read_text().replace("published = [[95.0, 1.0], [], []]", "ours = true"))
    tables, records = read_tables(tmp_path / "tables"), Records(tmp_path / "runs.jsonl")
    assert "FDSE without C (ours)" in render(tables, records, tmp_path)
    tally = Tally()
    tally.count(filled(tables[0], records, "paper"))
    assert tally.cells == 6  # FedAvg and FedX; the quoted row is not counted either


def test_cells_as_text():
    three = {0: 95.0, 1: 97.0, 2: 96.0}
    cell = Cell([90.0, 2.0], three, trials=4)
    assert cell_text(cell, 0, with_difference=True) == "90 ± 2 / 96.00 ± 1.00 (3), +6.00 *"
    assert cell_text(cell, 1, with_difference=False) == "90.0 ± 2.0 / 96.00 ± 1.00 (3)"
    one_seed = Cell([90.0, 2.0], {0: 96.0}, trials=4)
    assert cell_text(one_seed, 1, with_difference=True) == "90.0 ± 2.0 / 96.00 (1), +6.00 ?"
    assert cell_text(Cell([]), 0, with_difference=True) == "- / -"
    assert cell_text(Cell([90.0]), 2, with_difference=True) == "90.00 / -"


def test_the_readme_has_the_state_of_the_records(tmp_path):
    """A row for each paper stands between the marks; other text stays."""
    readme = tmp_path / "README.md"
    before = (ROOT / "README.md").read_text()
    readme.write_text(before)
    tallies = {"paper": {"fdse": Tally(cells=10, measured=3, computed=1), "fedsr": Tally()},
               "laptop": {"fdse": Tally(cells=10, measured=7), "fedsr": Tally()}}
    update_readme(readme, tallies, {"fdse": "it does", "fedsr": "unseen"})
    now = readme.read_text()
    first, last = MARKS
    row = next(line for line in now.splitlines() if "it does" in line)
    assert [cell.strip() for cell in row.split("|")][2:5] == ["4 of 10", "7", "it does"]
    assert "unseen" not in now  # a paper without a table
    assert now.split(first)[0] == before.split(first)[0]
    assert now.split(last)[1] == before.split(last)[1]
    readme.write_text("no marks")
    with pytest.raises(Stop, match="has lost a mark"):
        update_readme(readme, tallies, {})


def test_each_paper_needs_a_sentence_on_its_agreement(tmp_path):
    path = tmp_path / "agreement.toml"
    for text, words in (("[", "cannot be read"), ('fdse = "yes"', "no sentence for fedsr"),
                        ("fdse = 3", "fdse")):
        path.write_text(text)
        with pytest.raises(Stop, match=words):
            read_agreement(path)
    assert read_agreement(ROOT / "results" / "agreement.toml").keys() == PAPERS.keys()


def test_the_results_are_those_of_the_records(tmp_path):
    """What is in results/ and between the README's marks is what rendering the recorded runs gives."""
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results" / "figures", results / "figures")
    shutil.copy(ROOT / "results" / "agreement.toml", results)
    between = re.compile(f"{MARKS[0]}.*{MARKS[1]}", re.DOTALL)
    emptied = between.sub(f"{MARKS[0]}\n{MARKS[1]}", (ROOT / "README.md").read_text())
    (tmp_path / "README.md").write_text(emptied)
    render(read_tables(), Records(ROOT / "results" / "runs.jsonl"), results)
    for path in [tmp_path / "README.md", *results.glob("*.md"), *(results / "tables").iterdir()]:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path.name
    made = {path.name for path in (results / "tables").iterdir()}
    assert made == {path.name for path in (ROOT / "results" / "tables").iterdir()}
