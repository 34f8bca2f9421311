"""The benchmark measures every row; its numbers are no test."""

import json
import os
import re
import subprocess
import sys

from bench import bench
from tests.conftest import ROOT, zipped
from tests.small_table import recorded, two_tables

import pytest


def test_the_clock_waits_for_a_gpu(monkeypatch):
    waited = []
    monkeypatch.setattr(bench.torch.cuda, "synchronize", waited.append)
    bench.now("cpu")
    assert waited == [] and bench.now("cuda:1") > 0 and waited == ["cuda:1"]


@pytest.mark.slow
def test_a_round_of_office(tmp_path, office):
    zipped(office, tmp_path / "archives" / "Office_Caltech_DA_Dataset-main.zip")
    folders = ["--archives", str(tmp_path / "archives"), "--data", str(tmp_path / "data")]
    bench.main([*folders, "--size", "64", "--rounds", "2", "--out", str(tmp_path / "b.json")])
    seconds = {row[0]: row[1] for row in json.loads((tmp_path / "b.json").read_text())["rows"]}
    assert len(seconds) == 12 and min(seconds.values()) > 0
    for name in ("fedavg fp32", "fdse bf16"):
        assert seconds[f"{name}: ours, training"] < seconds[f"{name}: ours, whole round"]


def all_at_once(out, *flags) -> subprocess.CompletedProcess:
    """bench/gpu.sh with these flags."""
    env = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "bench/gpu.sh", *map(str, flags)], cwd=ROOT, env=env, capture_output=True,
                          text=True)


@pytest.mark.parametrize("flags, words", [
    (["--quikc"], "--quikc is no flag"),
    (["--seconds"], "--seconds needs a value"),
    (["--seconds", "ten"], "--seconds is ten; expected a number"),
    (["--device", "tpu"], "--device is tpu; expected cuda, cuda:N or cpu"),
    (["--archives", "nowhere"], "--archives nowhere is no folder"),
])
def test_bad_usage_of_all_at_once(tmp_path, flags, words):
    done = all_at_once(tmp_path / "out", *flags)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_all_at_once_at_tiny_scale(tmp_path):
    """Every step's command runs; what needs the archive is left out with a line; a step that fails does not
    stop the next."""
    two_tables(tmp_path)
    done = all_at_once(tmp_path / "out", "--device", "cpu", "--quick", "--seconds", 3000, "--tables",
                       tmp_path / "tables")
    summary = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert done.stdout.splitlines() == summary, done.stderr
    steps = [line.split(":")[0] for line in summary[:-1]]
    assert steps == ["tests", "rounds", "fedavg", "fdse", "table"]
    of_step = dict(zip(steps, summary))
    for step in ("tests", "fedavg", "fdse"):
        assert re.search(r": (done in|ended at its limit of) \d+ s", of_step[step]), of_step
    assert "left out" in of_step["rounds"] and "failed with exit code 1" in of_step["table"]
    assert done.returncode == 1 and len(recorded(tmp_path / "out" / "runs.jsonl")) >= 2
    assert (tmp_path / "out" / "results" / "tables" / "fdse-91-smoke.md").exists()


@pytest.mark.slow
def test_all_at_once_ends_when_its_time_is_over(tmp_path):
    done = all_at_once(tmp_path / "out", "--device", "cpu", "--quick", "--seconds", 25)
    assert done.returncode == 0 and "fdse: not begun, the time is over" in done.stdout, done.stdout
