"""Where numbers are from: the lists of runs, what is made again, and the whole way of a repaired method."""

import json
import shutil
import subprocess
import sys

from reproduce import origins
from reproduce.cells import Missing
from reproduce.origins import filled_by_other_code, reruns, runs_text, stale_text
from reproduce.records import Records, Run
from reproduce.tables import read_tables
from tests.conftest import ROOT
from tests.small_table import recorded, small_folder, write_table

import pytest


def test_the_runs_behind_a_table(tmp_path):
    records = Records(small_folder(tmp_path) / "runs.jsonl")
    (table,) = read_tables(tmp_path / "tables")
    lines = runs_text(table, records, "paper").splitlines()
    assert len(lines) == 3 + 8  # two columns of three seeds and two of one
    assert lines[3].split()[:6] == ["Digits", "FedAvg", "ALL", "0", "95.00", "x"]
    assert "unknown †" in lines[3] and "0123456789ab " in lines[3] and "a1b2c3 ‡" in lines[-1]
    assert lines[3].endswith("python fedavg.py --precision fp32")
    assert "no run is recorded at smoke scale" in runs_text(table, records, "smoke")


def test_stale_runs_are_listed_with_their_commands(tmp_path):
    records = Records(small_folder(tmp_path) / "runs.jsonl")
    lines = stale_text(read_tables(tmp_path / "tables"), records, "paper").splitlines()
    assert len(lines) == 2 + 4 + 1 and lines[2].startswith("fdse-9") and "unknown" in lines[2]
    assert "python fdse.py --dataset digits --lambda 0 " in lines[5] and "--seed 0" in lines[5]
    assert "4 at paper scale, 0 at laptop scale" in lines[-1]


@pytest.mark.parametrize("parts, other", [
    (["a"], False),
    (["a", "b"], True),
    (None, True),
])
def test_whose_run_a_folder_has(tmp_path, parts, other):
    """One without a run is nobody's; one that does not say is another's."""
    if parts:
        content = {"code": [{"sources": part} for part in parts]}
        (tmp_path / "settings.json").write_text(json.dumps(content))
    assert not filled_by_other_code(tmp_path, {"a"})
    (tmp_path / "checkpoint.pt").touch()
    assert filled_by_other_code(tmp_path, {"a"}) == other


def test_a_run_that_is_made_again_replaces_what_other_code_left(tmp_path, monkeypatch):
    records = Records(small_folder(tmp_path) / "runs.jsonl")
    run = Run("fedavg", ("--dataset", "digits"), 0, "w", "fp32", anew=True)
    records.same["fedavg"] = {"a"}
    monkeypatch.setattr(origins, "stale", lambda *asked: [Missing(run, ["fdse-9"])])
    monkeypatch.setattr(origins, "folder_of_run", lambda run: tmp_path / "folder")
    (one,) = reruns([], records, "paper")
    assert one.run.command == "python fedavg.py --dataset digits --seed 0"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "result.json").touch()
    (one,) = reruns([], records, "paper")
    assert one.run.command == "python fedavg.py --dataset digits --seed 0 --no-resume"


TABLE = """
title = "One"
paper = "fdse"
protocol = "p"
trials = 1
rows = [{method = "FedAvg", module = "fedavg"}]

[[blocks]]
title = "Digits"
dataset = "digits"
columns = [{name = "ALL", value = "best/ALL"}]
"""
PUBLISHED = """
fdse,91,digits,,FedAvg,ALL,accuracy_percent,90.0,,measured
"""


@pytest.mark.slow
def test_a_repaired_method_is_marked_and_measured_again(tmp_path):
    """In a copy of the repository: run, change the loss, and then the refusal, the mark, the list, the run
    anew. What changes no byte takes none of this, once that is noted."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("runs", "data", "results", ".git", ".venv"))
    for path in [*(tree / "tables").glob("*.toml"), *(tree / "tables" / "published").glob("*.csv")]:
        path.unlink()
    write_table(tree / "tables", "fdse-91", TABLE, PUBLISHED)
    (tree / "results").mkdir()
    shutil.copy(ROOT / "results" / "agreement.toml", tree / "results")

    def said(*words: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tree, text=True, capture_output=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def page() -> str:
        return (tree / "results" / "tables" / "fdse-91-smoke.md").read_text()

    def records() -> list[dict]:
        return recorded(tree / "results" / "runs.jsonl")
    method = ["fedavg.py", "--scale", "smoke"]
    said("reproduce_tables.py", "--run", "--scale", "smoke")
    assert len(records()) == 1 and " †" not in page().split("## Digits")[1]

    source = (tree / "fedavg.py").read_text()
    assert source.count("loss.backward()") == 1
    (tree / "fedavg.py").write_text(source.replace("loss.backward()", "(3 * loss).backward()"))
    assert "holds a run by other code" in said(*method, code=2)
    said("reproduce_tables.py")
    assert "1 of other code (†)" in page() and " †" in page().split("## Digits")[1]
    listed = said("reproduce_tables.py", "--stale", "--scale", "smoke")
    assert "python fedavg.py --dataset digits --scale smoke --seed 0" in listed and " --no-resume" in listed
    said("reproduce_tables.py", "--rerun", "--scale", "smoke")
    first, second = records()
    assert first["id"] == second["id"] and first["sources"] != second["sources"]
    assert first["logs"] != second["logs"] and " †" not in page().split("## Digits")[1]

    pair = f'[[same]]\nmethod = "fedavg"\nsources = ["{first["sources"]}", "{second["sources"]}"]\n'
    (tree / "results" / "equivalent_sources.toml").write_text(pair)
    (tree / "fedavg.py").write_text(source)
    said(*method)
