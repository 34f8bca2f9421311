"""The command line of reproduce_tables.py: bad flags, a plan and its seconds, curves, runs."""

import random
import re
import shutil
import time
from collections import Counter
from types import SimpleNamespace

import common
import reproduce_tables
from plumbing.run.files import locked
from reproduce import plan
from reproduce.cells import Missing, missing
from reproduce.methods import arguments
from reproduce.records import Place, PlannedRun, Records
from reproduce.tables import read_tables
from tests.conftest import ROOT, parsed, start
from tests.small_table import (FEDSR, FEDSR_PUBLISHED, PUBLISHED, TABLE, record, recorded, records_in,
                               two_tables, write_table)

import pytest


@pytest.fixture(autouse=True)
def alone():
    """One test at a time: they leave folders in runs/, perhaps by other code."""
    with locked(ROOT / "runs" / ".tests.lock"):
        for left in (ROOT / "runs").glob("*-digits-*-smoke-s*-*"):
            shutil.rmtree(left)
        yield


@pytest.mark.slow
def test_run_plan_and_run_again(tmp_path):
    """Two tables with a shared run: three runs, of which one fails and does not stop the others; again:
    nothing but the failed."""
    flags = two_tables(tmp_path)
    said, error = start(*[flag if flag != "--run" else "--plan" for flag in flags]).communicate()
    assert "all, each run once  3" in said and "fedsr-91" in said, (said, error)
    first = start(*flags, "--jobs", "2")
    said, error = first.communicate()
    assert first.returncode == 1 and "2 done" in said and "1 failed" in said, (said, error)
    assert "failed: python fedavg.py" in error and "no longer finite" in error
    records = recorded(tmp_path / "runs.jsonl")
    by_method = {one["method"]: one for one in records}
    pages = tmp_path / "out" / "tables"
    shown = f"{100 * by_method['fdse']['best']['ALL']:.2f} (1)"
    assert shown in (pages / "fdse-91-smoke.md").read_text()
    assert "SMOKE scale" in (pages / "fedsr-91-smoke.md").read_text()
    assert by_method.keys() == {"fedavg", "fdse"} and "1 failed" in start(*flags).communicate()[0]
    assert recorded(tmp_path / "runs.jsonl") == records


@pytest.mark.slow
def test_two_runners_killed_at_random_moments(tmp_path):
    """Two runners in one folder, one of them killed again and again: every run is recorded once, none is
    lost."""
    flags = [*two_tables(tmp_path, with_failing=False), "--seeds", "0,1,2"]
    rng, other = random.Random(0), start(*flags)
    for _ in range(3):
        process = start(*flags, start_new_session=True)
        time.sleep(6 + 6 * rng.random())
        process.kill()
        process.wait()
    assert other.wait() == start(*flags).wait() == 0
    runs = Counter((one["method"], one["args"]["seed"]) for one in recorded(tmp_path / "runs.jsonl"))
    assert runs == {(method, seed): 1 for method in ("fedavg", "fdse") for seed in range(3)}


def entry(*flags: str, module: str = "fedavg", tables: tuple = ("t",), curve: bool = True) -> Missing:
    run = PlannedRun(module, ("--dataset", "digits", *flags), 0)
    return Missing(type(run)(**vars(run) | {"curve": curve}), list(tables))


@pytest.fixture
def records(tmp_path):
    """FedAvg's rounds take 2 s with batches of 50 and 3 s with those of 20."""
    made = []
    for flags, seconds in (([], 2.0), (["--batch-size", "20"], 3.0)):
        one = record("fedavg", ["--dataset", "digits", *flags])
        made.append(one | {"seconds": {"train": seconds * one["args"]["rounds"]}})
    tested = made[0] | {"trained_by": "x", "seconds": {"train": 0.0}, "finished": "2000"}
    return records_in(tmp_path, [*made, tested])


def test_the_cheapest_come_first_and_the_tests_of_a_training_behind_it(records, monkeypatch):
    """The seconds of a run are the median of its setting's."""
    monkeypatch.setattr(plan, "unavailable", lambda run, place: "no" if run.args.weight_decay == 7 else "")
    lodo = ("--protocol", "lodo", "--target", "d0")
    long, short = entry("--batch-size", "20"), entry("--lr", "0.7")
    gone = entry("--weight-decay", "7", tables=("t", "u"))
    tested = entry(*lodo, "--adapt-epochs", "0", module="fdse", curve=False)
    trained = entry(*lodo, module="fdse")
    found = plan.planned([long, tested, gone, short, trained], records, Place())
    assert [one for one in found if one is not gone] == [short, long, trained, tested]
    assert gone.why == "no"
    flags = SimpleNamespace(gpus="", executor="local", jobs=1)
    assert reproduce_tables.run_missing([gone], flags, Place()) == 1
    said = plan.plan_text(found, ["--record", "r.jsonl"])
    rows = [re.split("  +", line.strip()) for line in plan.plan_text(found, []).splitlines()]
    seconds = 5 * arguments("fedavg", ("--dataset", "digits")).rounds
    assert rows[2] == ["t", "5", f"{plan.clock(seconds)} and 3 runs of unknown time", "1"]
    assert rows[3][:2] == ["u", "1"] and rows[4][:2] == ["all, each run once", "5"]
    assert rows[-1] == ["Not here (1 runs): no"]
    assert said.count("python fedavg.py") == 3 and said.count("python fdse.py") == 2
    assert said.count("--record r.jsonl") == 5
    assert plan.plan_text([], []) == "Nothing is missing."


CURVE = TABLE.replace("trials = 4", 'figure = "curves"').replace("best/", "curve/")


@pytest.mark.parametrize("how, evaluated", [("all", [5, 10, 15, 20]), ("best", [20])])
def test_without_labels_the_last_round_alone_is_evaluated(how, evaluated):
    args = parsed("fedgala", "--rounds", 20, "--eval-every", 5, "--test-rounds", how)
    assert [t for t in range(1, 21) if common.is_evaluated(args, t)] == evaluated


def test_a_run_has_the_whole_curve_if_one_of_its_tables_asks_for_it(tmp_path):
    """A record without it is none for the table with the curve: the run is made again from the start."""
    write_table(tmp_path, "fdse-9", TABLE, PUBLISHED)
    write_table(tmp_path, "fedsr-91", FEDSR, FEDSR_PUBLISHED)
    records = Records(tmp_path / "runs.jsonl")
    todo = [one.run for one in missing(read_tables(tmp_path), records, "paper", [0])]
    assert all(run.command.endswith("--test-rounds best") for run in todo)
    (tmp_path / "fdse" / "tables" / "fdse-91.toml").write_text(CURVE)
    todo = {one.run.words[0]: one.run for one in missing(read_tables(tmp_path), records, "paper", [0])}
    assert todo["fdse.py"].curve and "--test-rounds" not in todo["fdse.py"].command
    curve = {"round": [10, 20], "val": [0.5, 0.5], "ALL": [0.5, None]}
    flags = ["--dataset", "digits", "--lambda", "0"]
    gaps = record("fdse", flags, best={"ALL": 0.5, "AVG": 0.5}, curve=curve)
    todo = missing(read_tables(tmp_path), records_in(tmp_path, [gaps]), "paper", [0])
    (again,) = [one for one in todo if one.run.module == "fdse"]
    assert again.tables == ["fdse-91"] and again.run.command.endswith("--no-resume")
