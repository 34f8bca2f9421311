"""--test-rounds best: the test parts only where the validation is better, with the numbers of a run that has
them everywhere; and which of the tables' runs have it."""

import dataclasses

import common
import fedgala
from reproduce.cells import missing
from reproduce.records import Records
from reproduce.tables import read_tables
from tests.small_table import FEDSR, FEDSR_PUBLISHED, PUBLISHED, TABLE, record, write_records, write_table


CURVE = TABLE.replace("trials = 4", 'figure = "curves"').replace("best/", "curve/")


def test_without_labels_the_last_round_alone_is_evaluated():
    args = fedgala.arguments(["--rounds", "20", "--eval-every", "5"])
    assert [t for t in range(1, 21) if common.is_evaluated(args, t)] == [5, 10, 15, 20]
    args = dataclasses.replace(args, test_rounds="best")
    assert [t for t in range(1, 21) if common.is_evaluated(args, t)] == [20]


def test_a_run_has_the_whole_curve_if_one_of_its_tables_asks_for_it(tmp_path):
    """A record without it is none for the table with the curve: the run is made again from the start."""
    write_table(tmp_path, "fdse-9", TABLE, PUBLISHED)
    write_table(tmp_path, "fedsr-9", FEDSR, FEDSR_PUBLISHED)
    records = Records(tmp_path / "runs.jsonl")
    todo = [one.run for one in missing(read_tables(tmp_path), records, "paper", [0])]
    assert all(run.command.endswith("--test-rounds best") for run in todo)
    (tmp_path / "fdse-91.toml").write_text(CURVE)
    todo = {one.run.words[0]: one.run for one in missing(read_tables(tmp_path), records, "paper", [0])}
    assert todo["fdse.py"].curve and "--test-rounds" not in todo["fdse.py"].command
    curve = {"round": [10, 20], "val": [0.5, 0.5], "ALL": [0.5, None]}
    flags = ["--dataset", "digits", "--lambda", "0"]
    gaps = record("fdse", flags, best={"ALL": 0.5, "AVG": 0.5}, curve=curve)
    write_records(tmp_path / "runs.jsonl", [gaps])
    todo = missing(read_tables(tmp_path), Records(tmp_path / "runs.jsonl"), "paper", [0])
    (again,) = [one for one in todo if one.run.module == "fdse"]
    assert again.tables == ["fdse-91"] and again.run.command.endswith("--no-resume")
