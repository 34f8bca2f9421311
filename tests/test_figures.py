"""The figures that are drawn from the records."""

from reproduce import figures
from reproduce.cells import Cell, FilledBlock, FilledRow
from reproduce.tables import read_tables

import pytest

BY_ID = {table.id: table for table in read_tables() if table.figure}
ARGS = {"dataset": "officecaltech", "limit": 0, "split": "0.8/0.1/0.1"}
RECORDS = {0: {"curve": {"round": [1, 2], "ALL": [0.5, 0.6]}, "best": {"clients": {"a": 0.5, "b": 0.2}},
               "args": ARGS},
           1: {"curve": {"round": [1, 2], "ALL": [0.7, 0.9]}, "best": {"clients": {"a": 0.7, "b": 0.4}},
               "args": ARGS}}


def filled(id: str, cells: list[list[Cell]]) -> FilledBlock:
    """The first block of a figure whose rows have these cells."""
    block = BY_ID[id].blocks[0]
    return FilledBlock(block, [FilledRow(row, of_row) for row, of_row in zip(block.rows, cells)])


@pytest.fixture
def panel_of(monkeypatch, tmp_path):
    """panel_of(id, cells) is the only panel of a figure whose rows have these cells."""
    drawn = []
    monkeypatch.setattr(figures, "write_figure", lambda path, figure, mark: drawn.append(figure))

    def panel(id, cells):
        assert figures.draw(BY_ID[id], [filled(id, cells)], tmp_path / "f.png", "paper")
        (only,) = drawn.pop().axes
        return only
    return panel


def first_and_last(id: str, records: dict) -> list[list[Cell]]:
    """Cells of which the first and the last row have records."""
    cells = [[Cell([])] for _ in BY_ID[id].blocks[0].rows]
    cells[0], cells[-1] = [Cell([], records=records)], [Cell([], records=records)]
    return cells


def test_curves_are_means_over_the_seeds(panel_of):
    panel = panel_of("fdse-fig5", first_and_last("fdse-fig5", RECORDS))
    assert panel.lines[0].get_xydata().tolist() == [[1, pytest.approx(60)], [2, pytest.approx(75)]]
    assert len(panel.lines) == 2


def test_deviations_are_of_three_seeds_at_least(panel_of):
    assert not panel_of("fdse-fig5", first_and_last("fdse-fig5", RECORDS)).collections
    assert panel_of("fdse-fig5", first_and_last("fdse-fig5", RECORDS | {2: RECORDS[0]})).collections


def test_logs_leave_out_rounds_without_a_value(panel_of):
    logs = {0: {"curve": {"round": [5]}, "logs": {"discarded": [None, 0.6, 0.4]}}}
    panel = panel_of("fedgala-fig2b", [[Cell([], records=logs)], [Cell([])]])
    assert panel.lines[0].get_xydata().tolist() == [[2, 60], [3, 40]]


def test_a_line_over_a_parameter(panel_of):
    two_seeds, one_seed = Cell([], {0: 60.0, 1: 62.0}, records=RECORDS), Cell([], {0: 70.0}, records=RECORDS)
    panel = panel_of("fedgala-fig2c", [[two_seeds, Cell([]), one_seed, Cell([])]])
    assert panel.lines[0].get_xydata().tolist() == [[0, 61], [2, 70]]
