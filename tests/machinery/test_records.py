"""Runs and their records: what makes two runs the same, what is no record, and fields that were removed."""

import json

import reproduce.records
from plumbing.run.files import write_json
from plumbing.run.settings import identity
from reproduce.cells import missing, run_of
from reproduce.methods import arguments
from reproduce.records import Records, command_of, lacks_reading, moved
from reproduce.tables import Block, Column, Row, read_tables
from tests.committed import RECORDS
from tests.conftest import RUNS
from tests.small_table import record, recorded, records_in, small_folder, write_records

import pytest

DIGITS = Block("", "digits", [], [])
ALL = Column("", "best/ALL")
FEDAVG = run_of(DIGITS, Row("", module="fedavg", flags="--lr 0.05 --precision fp32"), ALL, "paper", 3)


@pytest.mark.parametrize("change, same", [
    ({}, True),
    ({"precision": "tf32"}, False),
    ({"device": "cuda"}, True),
    ({"augment": None}, True),
    ({"future": 1, "clients": 0}, True),
    ({"clients": 4}, False),  # no flag any more
    ({"seed": 4}, False),
    ({"lr": 0.1}, False),
    ({"scale": "smoke"}, False),
])
def test_a_run_is_known_by_its_arguments(tmp_path, change, same):
    """Whatever flags gave them, on whatever device, also of a record that lacks a field of today (None) or
    has another."""
    made = record("fedavg", ["--dataset", "digits", "--seed", "3", "--precision", "fp32"])
    args = {name: value for name, value in (made["args"] | change).items() if value is not None}
    path = write_records(tmp_path / "r.jsonl", [made | {"args": args}])
    assert bool(Records(path).get(FEDAVG)) == same


def test_a_derived_value_stands_for_what_an_older_record_has(tmp_path):
    """FedADG's records have 0 where today's have the rate and the size of the noise that 0 stood for."""
    column = Column("", "last/target", "--protocol lodo --target d0")
    run = run_of(DIGITS, Row("", module="fedadg"), column, "paper", 0)
    made = record("fedadg", ["--dataset", "digits", "--protocol", "lodo", "--target", "d0"])
    older = made | {"args": made["args"] | {"lr_adversarial": 0.0, "noise": 0}}
    for one, there in ((made, True), (older, True), (made | {"args": made["args"] | {"noise": 3}}, False)):
        assert bool(records_in(tmp_path, [one]).get(run)) == there


def test_removed_fields():
    """At the value that the file still has the record is as it was without the field, at another one it is of
    official/, with the values that the file had."""
    made = record("fedadg", ["--dataset", "digits"])
    assert moved(made | {"args": made["args"] | {"order": "paper"}}) == made
    other = moved(made | {"args": made["args"] | {"order": "code"}})
    assert other["method"] == other["args"]["method"] == "official.fedadg"
    assert (other["args"]["order"], other["args"]["warmup"]) == ("code", 0)


def test_a_run_without_the_reading_that_is_needed_is_made_anew(tmp_path, monkeypatch):
    run = run_of(DIGITS, Row("", module="fedavg", flags="--after-training"), ALL, "paper", 3)
    monkeypatch.setattr(reproduce.records, "folder_of_run", lambda run: tmp_path)
    for begun_with in (True, False):
        write_json(tmp_path / "settings.json", {"settings": {"after_training": {"value": begun_with}}})
        assert lacks_reading(run) is not begun_with


def test_no_record_is_lost():
    """Every line of the repository's records is of a method that is there."""
    assert RECORDS.damaged == [] and len(RECORDS.every) == len(recorded(RUNS)) >= 504


def test_the_command_that_gives_a_records_bytes():
    """Older ones lack precision and threads and may have the folder of their records."""
    made = record("fedavg", ["--precision", "fp32"], hardware={"threads": 2})
    older = made | {"command": "python fedavg.py --seed 0 --record runs/r.jsonl"}
    assert command_of(older) == "python fedavg.py --seed 0 --precision fp32 --threads 2"
    values = {"lr": 0.7, "backbone": "net.py:build 0123456789abcdef"}  # a default of then; a file
    assert command_of(older | {"args": made["args"] | values}) == (
        "python fedavg.py --seed 0 --backbone net.py:build --lr 0.7 --precision fp32 --threads 2")
    unknown = older | {"command": "python fedavg.py --gone"}
    assert identity(arguments("fedavg", tuple(command_of(unknown).split()[2:]))) == made["args"]
    whole = made | {"command": "python fedavg.py --precision fp32 --threads 1"}
    assert command_of(whole) == whole["command"]


@pytest.mark.parametrize("values, words", [
    ({"rounds": 0}, "rounds is 0, expected at least 1"),
    ({"lr": float("inf")}, "lr is inf, expected above 0"),
])
def test_numbers_that_no_run_has_are_no_record(tmp_path, values, words):
    made = record("fedavg", ["--dataset", "digits"])
    path = write_records(tmp_path / "r.jsonl", [made | {"args": made["args"] | values}])
    path.write_text(path.read_text().replace("Infinity", "1e999"))
    records = Records(path)
    assert not records.every and words in records.damaged[0]


def changed(made: dict, place: str, value) -> dict:
    """A record with another value at a place, or, with None, without one."""
    made = json.loads(json.dumps(made))
    *above, name = place.split(".")
    inner = made
    for part in above:
        inner = inner[part]
    if value is None:
        del inner[name]
    else:
        inner[name] = value
    return made


@pytest.mark.parametrize("place, value, words", [
    ("best.ALL", "high", "best.ALL is high, expected a fraction from 0 to 1"),
    ("last.AVG", [0.5], "last.AVG is [0.5], expected a fraction"),
    ("best.val", 1e308, "best.val is 1e+308, expected a fraction"),
    ("best.ALL", 5.0, "best.ALL is 5.0, expected a fraction"),
    ("last.ALL", -5.0, "last.ALL is -5.0, expected a fraction"),
    ("last.ALL", True, "last.ALL is True, expected a fraction"),
    ("best.clients", {"a": 7}, "best.clients.a is 7, expected a fraction"),
    ("best.round", "1", "best.round is 1, expected a number of rounds"),
    ("curve.ALL", [0.5], "curve.ALL: expected a value for each of its rounds"),
    ("curve.ALL", "0.5", "curve.ALL: expected a value for each of its rounds"),
    ("args.rounds", None, "args.rounds is None, expected int"),
    ("args.rounds", "3", "args.rounds is 3, expected int"),
    ("args.scale", None, "args.scale is None, expected str"),
    ("args.seed", [0], "args.seed is [0], expected int"),
    ("args.lr", None, "args.lr is None, expected float"),
    ("args.method", None, "args.method is None, expected str"),
    ("best.ALL", {}, "best: expected numbers as ALL"),
    ("logs", [1], "'list' object has no"),
    ("logs", {"loss": ["x"]}, "logs.loss: expected numbers"),
    ("bytes.up_per_round", "many", "bytes: expected numbers"),
])
def test_a_line_is_checked_and_the_others_count(tmp_path, place, value, words):
    """One odd record ended the whole rendering."""
    path = small_folder(tmp_path) / "runs.jsonl"
    lines = path.read_text().splitlines()
    odd = changed(json.loads(lines[0]), place, value)
    path.write_text("\n".join([json.dumps(odd), *lines]) + "\n")
    records = Records(path)
    assert len(records.every) == len(lines)
    (said,) = records.damaged
    assert f"line 1 is skipped: {words}" in said


@pytest.mark.parametrize("line", ['{"id": "x"', "[]", "\x00", "{}", '{"best": NaN}', '{"method": "../x"}',
                                  '{"args": {}}'])
def test_a_damaged_record_is_named_and_counts_for_nothing(tmp_path, line):
    """Also for the plan: a run whose record is damaged is missing."""
    path = small_folder(tmp_path) / "runs.jsonl"
    first = path.read_text().splitlines()[0]
    changed = line.startswith('{"') and line.endswith("}")  # the last value of a name counts
    path.write_text(f"{first[:-1]}, {line[1:]}\n" if changed else f"{line}\n")
    records = Records(path)
    assert not records.every and not records.by_work
    assert len(records.damaged) == 1 and "line 1 is skipped" in records.damaged[0]
    assert len(missing(read_tables(tmp_path / "papers"), records, "paper", [0])) == 3
