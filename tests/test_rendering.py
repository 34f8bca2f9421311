"""Rendering: a small table against its golden file, and the repository's results against its records."""

import re
import shutil
from pathlib import Path

import reproduce_tables
from reproduce.claims import read_claims
from reproduce.records import Records
from reproduce.rendering import MARKS, render
from reproduce.tables import read_tables
from reproduce.witnesses import read_witnesses
from tests.conftest import ROOT, fails
from tests.small_table import small_folder

import pytest

GOLDEN = Path(__file__).parent / "golden"


def test_rendering_against_the_golden_file(tmp_path):
    records = Records(small_folder(tmp_path) / "runs.jsonl")
    text = render(read_tables(tmp_path / "tables"), records, tmp_path)
    assert (tmp_path / "tables" / "fdse-9.md").read_text() == (GOLDEN / "fdse-9.md").read_text()
    assert (tmp_path / "results.csv").read_text() == (GOLDEN / "results.csv").read_text()
    assert "A small table" in text and "5 recorded runs" in (tmp_path / "README.md").read_text()


def test_a_readme_that_is_of_something_else_stays(tmp_path, capsys):
    """Found before anything is run or written."""
    small_folder(tmp_path)
    (tmp_path / "README.md").write_text("# Results of my own")
    flags = ["--tables", tmp_path / "tables", "--records", tmp_path / "runs.jsonl", "--out", tmp_path]
    fails(capsys, 2, "has files of something else, which might be lost: give another --out; nothing was",
          reproduce_tables.main, [str(flag) for flag in flags])
    assert (tmp_path / "README.md").read_text() == "# Results of my own"
    assert not (tmp_path / "results.csv").exists()


def test_folders_are_those_of_where_one_is(tmp_path, monkeypatch, capsys):
    """As typed, from another folder than the repository's; above a folder `results` a README.md of one's own
    stays."""
    small_folder(tmp_path)
    (tmp_path / "README.md").write_bytes(b"my own notes \xff")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        reproduce_tables.main(["--tables", "tables", "--records", "runs.jsonl", "--out", "results"])
    assert not end.value.code and "A small table" in capsys.readouterr().out
    assert "5 recorded runs" in (tmp_path / "results" / "README.md").read_text()
    assert (tmp_path / "README.md").read_bytes() == b"my own notes \xff"


def test_the_results_are_those_of_the_records(tmp_path):
    """What is in results/ and between the README's marks is what rendering the recorded runs gives."""
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results" / "figures", results / "figures")
    between = re.compile(f"{MARKS[0]}.*{MARKS[1]}", re.DOTALL)
    emptied = between.sub(f"{MARKS[0]}\n{MARKS[1]}", (ROOT / "README.md").read_text())
    (tmp_path / "README.md").write_text(emptied)
    tables = read_tables()
    elsewhere = read_witnesses(ROOT / "tables", tables)
    render(tables, Records(ROOT / "results" / "runs.jsonl"), results, True, read_claims(), elsewhere)
    for path in [tmp_path / "README.md", *results.glob("*.*"), *(results / "tables").iterdir(),
                 *(results / "claims").glob("*.md")]:
        if path.suffix == ".png":
            continue
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path.name
    made = {path.name for path in (results / "tables").iterdir()}
    assert made == {path.name for path in (ROOT / "results" / "tables").iterdir()}
