"""Rendering: a small table against its golden file, and the repository's results against its records;
figures, and what others print beside the papers' cells."""

import reproduce_tables
from reproduce import figures
from reproduce.cells import Cell, FilledBlock
from reproduce.records import Records
from reproduce.rendering import leaderboards, render
from reproduce.tables import read_tables
from reproduce.published import REPORTED
from tests.committed import TABLES
from tests.conftest import ROOT, fails
from tests.small_table import record, small_folder, write_records

import pytest

GOLDEN = ROOT / "tests" / "golden"


def test_rendering_against_the_golden_file(tmp_path):
    """Also of a record of a copy without git."""
    path = small_folder(tmp_path) / "runs.jsonl"
    text = render(read_tables(tmp_path / "papers"), Records(path), tmp_path)
    assert (tmp_path / "tables" / "fdse-9.md").read_text() == (GOLDEN / "fdse-9.md").read_text()
    assert (tmp_path / "results.csv").read_text() == (GOLDEN / "results.csv").read_text()
    assert "A small table" in text and "5 recorded runs" in (tmp_path / "README.md").read_text()
    path.write_text(path.read_text().replace('"0123456789abcdef"', "null"))
    render(read_tables(tmp_path / "papers"), Records(path), tmp_path)
    assert ",unknown," in (tmp_path / "results.csv").read_text()


def test_a_leaderboard_ranks_settings_of_three_seeds(tmp_path):
    """The best AVG first; scales have tables of their own; with the flags that differ. Two seeds are no
    row, nor is a method with another budget than most have. A row alone is no leaderboard."""
    made = []
    for flags, seeds in ((["--rounds", "2"], 3), (["--lr", "0.3"], 3), ([], 4), (["--lr", "0.7"], 2),
                         (["--scale", "smoke"], 7), (["--scale", "smoke", "--lr", "0.3"], 7)):
        for seed in range(seeds):
            values = {"ALL": 0.5, "AVG": 0.6 + 0.05 * len(flags) + 0.01 * seed}
            made.append(record("fedavg", ["--seed", str(seed), "--precision", "fp32", *flags], best=values))
            if seed > 3:
                made[-1]["args"]["dataset"] = "/x/my data.py c0ffee"  # its content behind it, as in a run
    of_smoke, _, smoke, of_paper, words, board, other, *_ = leaderboards(
        Records(write_records(tmp_path / "r.jsonl", made)))
    assert words.startswith("All rows: 60 rounds of 1 epoch of 32 images, 28x28, `--backbone smallcnn_bn`")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in board.splitlines()[2:]]
    name = "[FedAvg](../papers/fedavg/differences.md)"
    assert rows == [[name, "--lr 0.3", "50.00 ± 0.00 (3)", "71.00 ± 1.00 (3)"],
                    [name, "-", "50.00 ± 0.00 (4)", "61.50 ± 1.29 (4)"]]
    assert (of_paper, other) == ("### digits, in-domain, 60 rounds", "### digits, in-domain, 2 rounds")
    assert of_smoke == "### /x/my data.py c0ffee, in-domain, 2 rounds"
    assert smoke.count("(3)") == 4


def test_folders_are_those_of_where_one_is(tmp_path, monkeypatch, capsys):
    """As typed, from another folder than the repository's; above a folder `results` a README.md of one's own
    stays. In the folder itself nothing is run or written."""
    small_folder(tmp_path)
    (tmp_path / "README.md").write_bytes(b"my own notes \xff")
    monkeypatch.chdir(tmp_path)
    flags = ["--papers", "papers", "--records", "runs.jsonl", "--out"]
    with pytest.raises(SystemExit) as end:
        reproduce_tables.main([*flags, "results"])
    assert not end.value.code and "A small table" in capsys.readouterr().out
    assert "5 recorded runs" in (tmp_path / "results" / "README.md").read_text()
    fails(capsys, 2, "has files of something else, which might be lost: give another --out; nothing was",
          reproduce_tables.main, [*flags, "."])
    assert (tmp_path / "README.md").read_bytes() == b"my own notes \xff"
    assert not (tmp_path / "results.csv").exists()


def test_what_others_print_stands_in_brackets(tmp_path):
    """Of values that are near to the paper's setting; none is beside a cell that there is not."""
    small_folder(tmp_path)
    lines = [",".join(REPORTED), "fdse-9,digits,FedAvg,ALL,91.5,,,a,b,yes",
             "fdse-9,digits,FedAvg,AVG,1,,,a,b,no"]
    (tmp_path / "papers/elsewhere.csv").write_text("\n".join(lines) + "\n")
    page = render(read_tables(tmp_path / "papers"), Records(tmp_path / "runs.jsonl"), tmp_path, False)
    assert "90.0 ± 2.0 [91.5] / " in page and "[1]" not in page


def test_every_number_of_others_stands_beside_a_cell():
    for table in TABLES:
        printed = {(block.dataset, row.method, column.name) for block in table.blocks for row in block.rows
                   for column, numbers in zip(block.columns, row.published) if numbers}
        for line in table.elsewhere:
            assert (line["dataset"], line["method"], line["column"]) in printed, line


BY_ID = {table.id: table for table in TABLES if table.figure}
ARGS = {"dataset": "officecaltech", "limit": 0, "split": "0.8/0.1/0.1"}
RECORDS = {0: {"curve": {"round": [1, 2], "ALL": [0.5, 0.6]}, "best": {"clients": {"a": 0.5, "b": 0.2}},
               "args": ARGS},
           1: {"curve": {"round": [1, 2], "ALL": [0.7, 0.9]}, "best": {"clients": {"a": 0.7, "b": 0.4}},
               "args": ARGS}}


@pytest.fixture
def panel_of(monkeypatch, tmp_path):
    """panel_of(id, cells) is the only panel of a figure whose rows have these cells."""
    drawn = []
    monkeypatch.setattr(figures, "write_figure", lambda path, figure, mark: drawn.append(figure))

    def panel(id, cells):
        block = BY_ID[id].blocks[0]
        for row, (cell, *_) in zip(block.rows, cells):
            cell.row = row
        assert figures.draw(BY_ID[id], [FilledBlock(block, cells)], tmp_path / "f.png", "paper")
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


def test_logs_leave_out_rounds_without_a_value(panel_of):
    logs = {0: {"curve": {"round": [5]}, "logs": {"discarded": [None, 0.6, 0.4]}}}
    panel = panel_of("fedgala-fig2b", [[Cell([], records=logs)], [Cell([])]])
    assert panel.lines[0].get_xydata().tolist() == [[2, 60], [3, 40]]


def test_a_line_over_a_parameter(panel_of):
    two_seeds, one_seed = Cell([], {0: 60.0, 1: 62.0}, records=RECORDS), Cell([], {0: 70.0}, records=RECORDS)
    panel = panel_of("fedgala-fig2c", [[two_seeds, Cell([]), one_seed, Cell([])]])
    assert panel.lines[0].get_xydata().tolist() == [[0, 61], [2, 70]]


def test_domains_have_bars_of_three_seeds(panel_of):
    three = RECORDS | {2: RECORDS[1] | {"best": {"clients": {"a": 0.9, "b": 0.6}}}}
    bars = panel_of("fdse-fig3", first_and_last("fdse-fig3", three)).containers[1][2][0]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[50, 90], pytest.approx([20, 60])]
