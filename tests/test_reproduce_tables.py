"""The command line of reproduce_tables.py: bad flags, a plan, runs, Ctrl-C."""

import random
import shutil
import signal
import time
from collections import Counter

from plumbing.files import locked
from tests.conftest import ROOT, start
from tests.small_table import recorded, two_tables

import pytest


@pytest.fixture(autouse=True)
def alone():
    """One test at a time: they leave folders in runs/."""
    with locked(ROOT / "runs" / ".tests.lock"):
        yield


@pytest.mark.slow
def test_run_plan_and_run_again(tmp_path):
    """Two tables with a shared run: three runs, of which one fails and does not stop the others; again:
    nothing but the failed."""
    flags = two_tables(tmp_path)
    for left in (ROOT / "runs").glob("*-digits-*-smoke-s0-*"):  # of an earlier test, perhaps by other code
        shutil.rmtree(left)
    said, error = start(*[flag if flag != "--run" else "--plan" for flag in flags]).communicate()
    assert "all, each run once  3" in said and "fedsr-91" in said, (said, error)
    first = start(*flags, "--jobs", "2")
    said, error = first.communicate()
    assert first.returncode == 1 and "2 done" in said and "1 failed" in said, (said, error)
    assert "failed: python fedavg.py" in error and "no longer finite" in error
    records = recorded(tmp_path / "runs.jsonl")
    assert Counter(one["method"] for one in records) == {"fedavg": 1, "fdse": 1}
    (of_fdse,) = [one for one in records if one["method"] == "fdse"]
    pages = tmp_path / "out" / "tables"
    assert f"{100 * of_fdse['best']['ALL']:.2f} (1)" in (pages / "fdse-91-smoke.md").read_text()
    assert "SMOKE scale" in (pages / "fedsr-91-smoke.md").read_text()
    again = start(*flags)
    assert "1 failed" in again.communicate()[0] and len(recorded(tmp_path / "runs.jsonl")) == 2


@pytest.mark.slow
def test_two_runners_killed_at_random_moments(tmp_path):
    """Two runners in one folder, one of them killed again and again: every run is recorded once, none is
    lost."""
    flags = [*two_tables(tmp_path, with_failing=False), "--seeds", "3"]
    rng = random.Random(0)
    other = start(*flags)
    for _ in range(3):
        process = start(*flags, start_new_session=True)
        time.sleep(6 + 6 * rng.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert other.wait() == 0
    last = start(*flags)
    assert last.wait() == 0
    runs = Counter((one["method"], one["args"]["seed"]) for one in recorded(tmp_path / "runs.jsonl"))
    assert runs == {(method, seed): 1 for method in ("fedavg", "fdse") for seed in range(3)}


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path):
    flags = [*two_tables(tmp_path, with_failing=False), "--seeds", "4"]
    records = tmp_path / "runs.jsonl"
    process = start(*flags)
    while not recorded(records):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    kept = recorded(records)
    assert start(*flags).wait() == 0
    assert recorded(records)[:len(kept)] == kept and len(recorded(records)) == 8
