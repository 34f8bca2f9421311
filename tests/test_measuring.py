"""What tables and figures need of the runs' output folders."""

from reproduce import measuring
from reproduce.cells import cells_of
from reproduce.records import Place, Records
from reproduce.tables import read_tables
from tests.small_table import record, write_records, write_table

import pytest

REACH = """
title = "t"
paper = "fedcir"
protocol = "p"
trials = 0
rows = [{method = "FedAvg", module = "fedavg"}]

[[blocks]]
title = "b"
dataset = "digits"
columns = [{name = "TFLOPs", value = "reach/tflops"}]
"""
REACH_PUBLISHED = """
fedcir,91,digits,,FedAvg,TFLOPs,tflops,84.0,,measured
"""
FIGURE = """
title = "f"
paper = "fedcir"
protocol = "p"
figure = "measure"
measure = "risk"
rows = [{method = "FedAvg", module = "fedavg"}]

[[blocks]]
title = "b"
dataset = "digits"
columns = [{name = "z", value = "best/ALL"}]
"""


@pytest.fixture
def measured(tmp_path):
    """measured() measures what a table and a figure need of one recorded run, whose folder is not here."""
    write_table(tmp_path, "fedcir-91", REACH, REACH_PUBLISHED)
    (tmp_path / "fedcir-fig91.toml").write_text(FIGURE)
    path = write_records(tmp_path / "runs.jsonl", [record("fedavg", ["--dataset", "digits"])])

    def measure() -> list[str]:
        tables, records = read_tables(tmp_path), Records(path)
        return measuring.measure_folders(tables, records, tmp_path, "paper", [0], Place())
    return measure


def test_what_cannot_be_measured_is_said(measured, tmp_path):
    problems = measured()
    assert len(problems) == 2 and "not here is" in problems[1] and not (tmp_path / "reach.jsonl").exists()


def test_fedcirs_table_3_is_measured_once_and_then_read(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "reach", lambda folder, place: {"tflops": 80.0})
    measured()
    measured()
    assert len((tmp_path / "reach.jsonl").read_text().splitlines()) == 1
    table = read_tables(tmp_path)[0]
    block = table.blocks[0]
    (cell,) = cells_of(table, block, block.rows[0], Records(tmp_path / "runs.jsonl"), "paper", [])
    assert cell.values == {0: 80.0}
