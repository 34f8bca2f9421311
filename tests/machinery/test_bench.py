"""The benchmark measures every row; its numbers are no test."""

import os
import re
import subprocess
import sys
import time

from bench import bench
from tests.conftest import ROOT, read_json
from tests.machinery.test_archives import write_office
from tests.small_table import recorded, two_tables

import pytest


def test_the_clock_waits_for_a_gpu(monkeypatch):
    waited = []
    monkeypatch.setattr(bench.torch.cuda, "synchronize", waited.append)
    bench.now("cpu")
    assert waited == [] and bench.now("cuda:1") > 0 and waited == ["cuda:1"]


@pytest.mark.slow
def test_a_round_of_office(tmp_path, monkeypatch):
    write_office(tmp_path, monkeypatch, {})
    folders = ["--archives", str(tmp_path / "archives"), "--data", str(tmp_path / "data")]
    bench.main([*folders, "--size", "64", "--rounds", "2", "--out", str(tmp_path / "b.json")])
    seconds = {row[0]: row[1] for row in read_json(tmp_path / "b.json")["rows"]}
    assert len(seconds) == 12 and min(seconds.values()) > 0
    for name in ("fedavg fp32", "fdse bf16"):
        assert seconds[f"{name}: ours, training"] < seconds[f"{name}: ours, whole round"]


def all_at_once(out, *flags) -> subprocess.CompletedProcess:
    """bench/gpu.sh with these flags."""
    env = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
                        "KEPT": str(out.parent / "kept")}
    return subprocess.run(["bash", "bench/gpu.sh", *map(str, flags)], cwd=ROOT, env=env, capture_output=True,
                          text=True)


@pytest.mark.parametrize("flags, words", [
    (["--quikc"], "--quikc is no flag"),
    (["--seconds"], "--seconds needs a value"),
    (["--seconds", "ten"], "--seconds is ten; expected a number"),
    (["--device", "tpu"], "--device is tpu; expected cuda, cuda:N or cpu"),
    (["--steps", "tests,all"], "--steps is tests,all; expected some of tests,comparison,runs"),
    (["--archives", "nowhere"], "--archives nowhere is no folder"),
])
def test_bad_usage_of_all_at_once(tmp_path, flags, words):
    done = all_at_once(tmp_path / "out", *flags)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_all_at_once_at_tiny_scale(tmp_path):
    """Every step's command runs, and one that fails does not stop the next. A second call has what the first
    one recorded. No more than eight files come out."""
    two_tables(tmp_path)
    flags = ["--device", "cpu", "--jobs", 2, "--only", "f*-91", "--seconds"]
    tables = ["--", "--papers", tmp_path / "papers"]
    done = all_at_once(tmp_path / "out", *flags, 400, *tables)
    summary = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert done.stdout.splitlines() == summary, done.stderr
    assert [line.split(":")[0] for line in summary[:-1]] == ["tests", "comparison", "runs"]
    assert re.search(r": (done in|ended at its limit of) \d+ s", summary[0]), summary
    assert "failed with exit code 1" in summary[2] and done.returncode == 1, summary
    assert len(recorded(tmp_path / "out" / "runs.jsonl")) == 2
    rows = read_json(tmp_path / "out" / "comparison.json")["rows"]
    assert [row[0].rpartition(" ")[2] for row in rows] == ["fedavg", "fdse"] and rows[0][-2] > 0
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) <= 8 and {path.parent for path in files} == {tmp_path / "out"}
    done = all_at_once(tmp_path / "again", *flags, 100, "--steps", "runs", *tables)
    assert "1 failed" in (tmp_path / "again" / "runs.log").read_text(), done.stdout
    assert len(recorded(tmp_path / "again" / "runs.jsonl")) == 2


@pytest.mark.slow
def test_all_at_once_ends_when_its_time_is_over(tmp_path):
    started = time.monotonic()
    done = all_at_once(tmp_path / "out", "--device", "cpu", "--seconds", 20)
    assert time.monotonic() - started < 40 and "runs: not begun, the time is over" in done.stdout, done.stdout
