"""Runs and their records: what makes two runs the same, and what is no record."""

import dataclasses
import json
from pathlib import Path

import fedavg
from plumbing.sources import hash_of
from reproduce.cells import missing, run_of
from reproduce.records import Records, alone, command_of, committed
from reproduce.rendering import render
from reproduce.tables import Block, Column, Row, read_tables
from tests.conftest import run_here
from tests.small_table import record, small_folder, write_records

import pytest

DIGITS = Block("", "digits", [], [])
ALL = Column("", "best/ALL")


def without_gaps(args: dict) -> dict:
    """The arguments that are not None."""
    return {name: value for name, value in args.items() if value is not None}


@pytest.mark.parametrize("change, same", [
    ({}, True),
    ({"precision": "tf32"}, False),
    ({"device": "cuda"}, True),
    ({"augment": None}, True),
    ({"future": 1}, True),
    ({"seed": 4}, False),
    ({"lr": 0.1}, False),
    ({"scale": "smoke"}, False),
])
def test_a_run_is_known_by_its_arguments(tmp_path, change, same):
    """Whatever flags gave them, on whatever device, also of a record that lacks a field of today (None) or
    has another."""
    run = run_of(DIGITS, Row("", module="fedavg", flags="--lr 0.05 --precision fp32"), ALL, "paper", 3)
    made = record("fedavg", ["--dataset", "digits", "--seed", "3", "--precision", "fp32"])
    path = write_records(tmp_path / "r.jsonl", [made | {"args": without_gaps(made["args"] | change)}])
    assert bool(Records(path).get(run)) == same


def test_a_derived_value_stands_for_what_an_older_record_has(tmp_path):
    """FedADG's records have 0 where today's have the rate and the size of the noise that 0 stood for."""
    column = Column("", "last/target", "--protocol lodo --target d0")
    run = run_of(DIGITS, Row("", module="fedadg"), column, "paper", 0)
    made = record("fedadg", ["--dataset", "digits", "--protocol", "lodo", "--target", "d0"])
    older = made | {"args": made["args"] | {"lr_adversarial": 0.0, "noise": 0}}
    for one, there in ((made, True), (older, True), (made | {"args": made["args"] | {"noise": 3}}, False)):
        assert bool(Records(write_records(tmp_path / "r.jsonl", [one])).get(run)) == there


def test_a_real_record_is_found(tmp_path):
    """A run's own record, through the whole of the machinery."""
    result = run_here("fdse", tmp_path / "run", "--record", tmp_path / "r.jsonl")
    run = run_of(DIGITS, Row("", module="fdse", flags="--precision fp32"), ALL, "smoke", 0)
    assert Records(tmp_path / "r.jsonl").get(run)["best"] == result["best"]


def test_the_newest_record_of_a_run_counts(tmp_path):
    older, newer = record("fedavg", [], finished="2025"), record("fedavg", [], finished="2026")
    run = run_of(DIGITS, Row("", module="fedavg"), ALL, "paper", 0)
    for lines in ([older, newer], [newer, older]):
        assert Records(write_records(tmp_path / "r.jsonl", lines)).get(run)["finished"] == "2026"


def test_a_record_of_other_code_is_stale(tmp_path):
    """So is one whose run was begun by other code, or that does not say by which; a run that is to be made
    anew finds none of them."""
    now = hash_of(Path(fedavg.__file__))
    run = run_of(DIGITS, Row("", module="fedavg"), ALL, "paper", 0)
    for code, stale in (({"sources": now}, False), ({"sources": "0123456789ab"}, True), ({}, True),
                        ({"sources": now, "code": [{"sources": "0123456789ab"}, {"sources": now}]}, True)):
        records = Records(write_records(tmp_path / "r.jsonl", [record("fedavg", []) | code]))
        found = records.get(run)
        assert records.stale(found) == stale
        assert bool(records.get(dataclasses.replace(run, anew=True))) != stale


def test_commits_that_are_not_there():
    whole = {"commit": "abc", "uncommitted_changes": False}
    assert committed(whole)
    for change in ({"commit": None}, {"uncommitted_changes": True}, {"uncommitted_changes": None}):
        assert not committed(whole | change)


def test_a_run_is_alone_if_nobody_else_wants_a_core():
    def with_loads(*loads):
        hardware = {"threads": 2, "load": loads[-1]}
        return {"hardware": hardware, "code": [{"load": load} for load in loads[:-1]]}
    assert alone(with_loads(0.3, 2.1)) and alone(with_loads(0.3, 2.4, 2.4))
    assert not alone(with_loads(0.3, 2.6)) and not alone(with_loads(3.0, 2.0))
    assert not alone(with_loads(None, 2.0)) and not alone({"hardware": {"threads": 2}})


def test_the_command_that_gives_a_records_bytes():
    """Older ones lack precision and threads and may have the folder of their records."""
    made = record("fedavg", ["--precision", "fp32"], hardware={"threads": 2})
    older = made | {"command": "python fedavg.py --seed 1 --record runs/r.jsonl"}
    assert command_of(older) == "python fedavg.py --seed 1 --precision fp32 --threads 2"
    older["command"] = "python fedavg.py --record runs/r.jsonl --seed 1"
    assert command_of(older) == "python fedavg.py --seed 1 --precision fp32 --threads 2"
    whole = made | {"command": "python fedavg.py --precision fp32 --threads 1"}
    assert command_of(whole) == whole["command"]


def test_damaged_records_are_named_and_skipped(tmp_path):
    path = small_folder(tmp_path) / "runs.jsonl"
    good = path.read_text()
    first = good.splitlines()[0]
    no_best = json.dumps(json.loads(first) | {"best": 3})
    no_method = json.dumps(json.loads(first) | {"method": "../x"})
    path.write_text("\n".join([first[:100], good + "[]", no_best, no_method, "\x00"]))
    records = Records(path)
    assert records.count == 5 and len(records.damaged) == 5
    assert [int(line.split("line ")[1].split()[0]) for line in records.damaged] == [1, 7, 8, 9, 10]
    assert not Records(tmp_path / "none.jsonl").count


@pytest.mark.parametrize("field", [{"code": [{}]}, {"code": None}, {"code": 3}, {"sources": ["a"]},
                                   {"commit": 5}])
def test_a_record_with_odd_code_is_skipped(tmp_path, field):
    path = small_folder(tmp_path) / "runs.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(first | field))
    records = Records(path)
    assert records.count == 0 and len(records.damaged) == 1


@pytest.mark.parametrize("change", [
    {"best": {"ALL": float("nan")}},
    {"best": {"ALL": True}},
    {"best": {"ALL": 85.0}},
    {"best": {"ALL": "0.9"}},
    {"best": {"clients": {"a": -1}}},
    {"curve": {"ALL": [0.1, "x"]}},
    {"logs": {"loss": [float("inf")]}},
    {"seconds": {"train": None}},
    {"args": {"seed": "0"}},
    {"args": {"seed": None}},
    {"args": {"rounds": None}},
    {"args": {"scale": "huge"}},
    {"args": {"lr": "0.1"}},
])
def test_records_with_odd_contents_are_skipped_and_count_for_nothing(tmp_path, change):
    """Also for the plan: a run whose record is damaged is missing."""
    path = small_folder(tmp_path) / "runs.jsonl"
    good = json.loads(path.read_text().splitlines()[0])
    args = without_gaps(good["args"] | change.get("args", {}))
    records = Records(write_records(path, [good | change | {"args": args}]))
    tables = read_tables(tmp_path / "tables")
    assert not records.count and not records.by_key and not records.seeds
    assert len(records.damaged) == 1 and "line 1 is skipped" in records.damaged[0]
    assert len(missing(tables, records, "paper", [0])) == 2
    assert "FedAvg" in render(tables, records, tmp_path / "results")
