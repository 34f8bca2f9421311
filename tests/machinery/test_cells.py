"""Cells: the run behind each, and its numbers."""


from reproduce.cells import Cell, cells_of, fill_means, judge, missing, run_of
from reproduce.methods import arguments
from reproduce.records import Records
from reproduce.tables import Block, Column, Row, Table, read_tables
from tests.small_table import record, records_in, two_tables

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


def judged(cells: list[Cell]) -> list[str]:
    """The verdicts of a page of these cells."""
    judge(cells)
    return [cell.verdict for cell in cells]


def test_what_a_page_says_of_its_cells():
    """With fewer than five seeds nothing is decided."""
    five = {0: 95.0, 1: 97.0, 2: 96.0, 3: 95.0, 4: 97.0}
    printed = ["90.0", "1.0"], ["95.5", "1.0"], ["95.5"], []
    cells = [Cell(numbers, five, trials=4) for numbers in printed]
    cells.append(Cell(["90.0", "1.0"], trials=4))
    assert judged(cells) == ["differs", "agrees", "untested", "", ""]
    assert [cell.half_width is None for cell in cells] == [False, False, True, True, True]
    wide = Cell(["95.5", "1.0"], {0: 92.0, 1: 100.0, 2: 96.0, 3: 92.0, 4: 100.0}, trials=4)
    assert judged([wide]) == ["unclear"] and 4 < wide.half_width < 6
    assert judged([Cell(["90.0", "1.0"], {0: 95.0, 1: 97.0, 2: 96.0, 3: 96.0}, trials=4)]) == ["untested"]


DIGITS_ALL = Block("", "digits", [Column("ALL", "best/ALL")], [Row("FedAvg", [["90.0"]], module="fedavg")])
TABLE = Table("fdse-1", "", "fdse", "", [DIGITS_ALL])


def cell_with(tmp_path, made: list[dict], seeds: tuple = ()) -> Cell:
    """The cell of DIGITS_ALL with these records."""
    records = records_in(tmp_path, made)
    (cell,) = cells_of(TABLE, DIGITS_ALL, DIGITS_ALL.rows[0], records, "paper", list(seeds))
    return cell


def of_seed(seed: int, precision: str, all_: float, **more) -> dict:
    flags = ["--dataset", "digits", "--seed", str(seed), "--precision", precision]
    return record("fedavg", flags, best={"ALL": all_}) | more


def test_a_cell_has_one_precision(tmp_path):
    """That of the most seeds, of equals the newest; what it lacks of the seeds that are asked for is missing
    at the same."""
    here = arguments("fedavg", ("--dataset", "digits")).precision
    (other,) = {"fp32", "bf16"} - {here}
    made = [of_seed(0, here, 0.5), of_seed(0, other, 0.6), of_seed(1, other, 0.7)]
    cell = cell_with(tmp_path, made, seeds=(0, 1))
    assert cell.values == {0: 60, 1: 70} and not cell.missing
    cell = cell_with(tmp_path, made, seeds=(0, 1, 2))
    assert [(run.seed, run.precision) for run in cell.missing] == [(2, other)]
    newer = [of_seed(0, here, 0.5, finished="2026"), of_seed(0, other, 0.6, finished="2025")]
    assert cell_with(tmp_path, newer).values == {0: 50}


def test_a_mean_is_of_one_precision(tmp_path):
    """Columns of different ones have no mean, and rows of different ones are not compared."""
    columns = [Column("d0", "last/target", "--protocol lodo --target d0"),
               Column("d15", "last/target", "--protocol lodo --target d15"), Column("Average", "mean")]
    rows = [Row("FedAvg", module="fedavg", published=[[], [], []])]
    block = Block("", "digits", columns, rows)
    for precision, mean in (("fp32", {0: 65, 1: 66}), ("bf16", {})):
        made = []
        for target, of_run, accuracies in (("d0", "fp32", (0.6, 0.61)), ("d15", precision, (0.7, 0.71))):
            for seed, accuracy in enumerate(accuracies):
                flags = ["--dataset", "digits", "--protocol", "lodo", "--target", target, "--seed", str(seed)]
                made.append(record("fedavg", [*flags, "--precision", of_run], last={"target": accuracy}))
        records = records_in(tmp_path, made)
        cells = cells_of(TABLE, block, rows[0], records, "paper", [])
        assert cells[2].values == pytest.approx(mean)
        assert [cell.precision for cell in cells[:2]] == ["fp32", precision]


def test_a_run_that_tables_share_is_missing_once(tmp_path):
    two_tables(tmp_path)
    tables = read_tables(tmp_path / "papers")
    runs = missing(tables, Records(tmp_path / "none.jsonl"), "smoke", [0, 1])
    needed_by = {one.run.command: one.tables for one in runs}
    assert len(runs) == 6 == len(needed_by)
    shared = "python fedavg.py --dataset digits --scale smoke --seed 1 --test-rounds best"
    assert needed_by[shared] == ["fedsr-91", "fdse-91"]
    own = "python fdse.py --dataset digits --scale smoke --seed 0 --test-rounds best"
    assert needed_by[own] == ["fdse-91"]


def test_a_printed_mean_has_the_deviation_of_its_columns():
    """sqrt(0.6^2 + 0.8^2) / 2, as if the columns were independent."""
    columns = [Column("M0", "last/target"), Column("M75", "last/target"), Column("Average", "mean")]
    cells = [Cell(["90.0", "0.6"], {0: 90.0, 1: 92.0}, trials=3),
             Cell(["80.0", "0.8"], {0: 82.0, 1: 80.0}, trials=3), Cell(["85.0"], trials=3)]
    for cell, column in zip(cells, columns):
        cell.column = column
    fill_means(cells)
    assert cells[2].published == pytest.approx([85.0, 0.5]) and cells[2].values == {0: 86.0, 1: 86.0}
    cells[0].printed = ["90.0"]
    cells[2].of_columns = None
    fill_means(cells)
    assert cells[2].published == [85.0] and cells[2].half_width is None
