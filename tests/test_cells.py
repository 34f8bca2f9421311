"""Cells: the run behind each, and its numbers."""

import json
import statistics

from reproduce.cells import Cell, cells_of, missing, run_of
from reproduce.methods import arguments
from reproduce.records import Records
from reproduce.tables import Block, Column, Row, read_tables
from tests.small_table import small_folder, two_tables

import pytest


def test_a_smaller_scale_has_its_own_budget():
    """A table's rounds and image sizes are the paper's; where they are what a column is about, there is no
    smaller cell."""
    block = Block("", "pacs", [], [], flags="--target photo")
    row = Row("", module="fedgala", flags="--rounds 900 --image-size 224 --tau 0.1")
    column = Column("", "last/target")
    small = run_of(block, row, column, "smoke", 0)
    args = arguments("fedgala", small.flags)
    assert args.rounds < 10 and args.image_size == 64 and args.tau == 0.1
    assert run_of(block, row, Column("", "last/target", "--epochs 5"), "laptop", 0) is None
    assert arguments("fedgala", run_of(block, row, column, "paper", 0).flags).rounds == 900


def test_averages_take_the_seeds_that_have_all_columns(tmp_path):
    path = small_folder(tmp_path) / "runs.jsonl"
    lines = path.read_text().splitlines()
    broken = json.loads(lines[1]) | {"best": {"ALL": 0.97}}
    path.write_text("\n".join([lines[0], json.dumps(broken), lines[2]]))
    (table,) = read_tables(tmp_path / "tables")
    block = table.blocks[0]
    all_, avg, mean = cells_of(table, block, block.rows[0], Records(path), "paper", [])
    assert set(all_.values) == {0, 1, 2} and set(avg.values) == {0, 2}
    assert mean.values == pytest.approx({0: statistics.mean((95, 94)), 2: statistics.mean((96, 93))})


def test_numbers_of_a_cell_by_hand():
    """Mean, deviation and difference; far: beyond two combined standard errors, None where that is not
    known."""
    three = {0: 95.0, 1: 97.0, 2: 96.0}
    cell = Cell([90.0, 2.0], three, trials=4)
    assert (cell.mean, cell.deviation, cell.difference) == (96, 1, 6)
    assert cell.far  # 6 > 2 sqrt(1 / 3 + 4 / 4)
    assert Cell([94.0, 2.0], three, trials=4).far is False  # 2 < 2.31
    assert Cell([93.5, 2.0], three, trials=4).far  # 2.5 > 2.31
    assert Cell([90.0, 2.0], {0: 96.0}, trials=4).far is None  # one seed
    assert Cell([90.0], {0: 95.0, 1: 97.0}, trials=4).far is None  # no deviation is printed
    assert Cell([90.0, 2.0], {0: 95.0, 1: 97.0}).far is None  # the number of trials is not said


def test_a_run_that_tables_share_is_missing_once(tmp_path):
    two_tables(tmp_path)
    tables = read_tables(tmp_path / "tables")
    runs = missing(tables, Records(tmp_path / "none.jsonl"), "smoke", [0, 1])
    needed_by = {one.run.command: one.tables for one in runs}
    assert len(runs) == 6 == len(needed_by)
    assert needed_by["python fedavg.py --dataset digits --scale smoke --seed 1"] == ["fedsr-91", "fdse-91"]
    assert needed_by["python fdse.py --dataset digits --scale smoke --seed 0"] == ["fdse-91"]
