"""Runs and their records: what makes two runs the same, and what is no record."""

import json

from reproduce.cells import missing, run_of
from reproduce.records import Records
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
    ({"precision": "bf16"}, True),
    ({"device": "cuda"}, True),
    ({"augment": None}, True),
    ({"future": 1}, True),
    ({"seed": 4}, False),
    ({"lr": 0.1}, False),
    ({"scale": "smoke"}, False),
])
def test_a_run_is_known_by_its_arguments(tmp_path, change, same):
    """Whatever flags gave them, on whatever hardware, also of a record that lacks a field of today (None) or
    has another."""
    run = run_of(DIGITS, Row("", module="fedavg", flags="--lr 0.05"), ALL, "paper", 3)
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
