"""The tables as data: every published number is there, and every row is what its name says."""

import csv
import tomllib

from reproduce.cells import run_of
from reproduce.published import HEAD, take
from reproduce.tables import read_tables
from tests.committed import TABLES as EVERY
from tests.conftest import ROOT
from tests.small_table import write_table

import pytest

TABLES = [table for table in EVERY if not table.figure and not table.id.startswith("ours-")]
README = (ROOT / "papers" / "README.md").read_text()
PAPERS = tomllib.loads((ROOT / "tests" / "papers.toml").read_text())


def row_of(table: str, block: str | None, row: str) -> list[tuple]:
    """The blocks of a table, or the one of this title, each with its row of this name."""
    (blocks,) = [one.blocks for one in EVERY if one.id == table]
    return [(one, line) for one in blocks for line in one.rows
            if line.method == row and block in (None, one.title)]


@pytest.mark.parametrize("table, block, row, column, cell", PAPERS["cells"])
def test_cells_have_the_numbers_of_the_papers(table, block, row, column, cell):
    """A few of each table, typed here once more."""
    ((of_title, of_name),) = row_of(table, block, row)
    names = [one.name for one in of_title.columns]
    assert of_name.published[names.index(column)] == cell


def test_columns_leave_out_the_domain_that_they_name():
    checked = 0
    for table in TABLES:
        for block in table.blocks:
            if table.id == "fedgala-2" and block.dataset == "domainnet20":
                continue  # its columns name the domains that train
            known = PAPERS["domains"].get(block.dataset.rstrip("0123456789"), {})
            for column in block.columns:
                name = column.name.split("-")[0].strip()
                if block.dataset == "rotatedmnist":
                    assert column.value == "mean" or column.flags == f"--target {name.lower()}"
                elif "--target " in column.flags:
                    assert f"--target {known[name]} " in f"{column.flags} ", (table.id, block.title, column)
                    checked += 1
    assert checked > 80


@pytest.mark.parametrize("table, row, flags", PAPERS["rows"])
def test_rows_are_what_their_names_say(table, row, flags):
    rows = row_of(table, None, row)
    assert rows
    for block, of_name in rows:
        run = run_of(block, of_name, block.columns[0], "paper", 0)
        assert {name: getattr(run.args, name) for name in flags} == flags


def test_values_of_the_tables():
    """Which round counts: the best validation round for FedSR, FedADG, FedCiR and FDSE, the last for FedGaLA
    and FedSR's Table 1."""
    others = {"fdse-4": {"cost", "none"}, "fedcir-3": {"none"}, "fedsr-1": {"last"}}
    for table in TABLES:
        kinds = {column.kind for block in table.blocks for column in block.columns}
        of_paper = {"last"} if table.paper == "fedgala" else {"best"}
        assert kinds - {"mean"} == others.get(table.id, of_paper), table.id


def test_every_command_parses_and_rows_of_a_block_have_one_budget():
    """Otherwise a difference of rows would be the budget's. At laptop scale all columns have one, at paper
    scale columns may be about it."""
    for table in EVERY:
        for block in table.blocks:
            assert all(bool(row.module) != row.quoted for row in block.rows)
            rows = [row for row in block.rows if row.module]
            laptop = set()
            for column in [column for column in block.columns if column.value != "mean"]:
                paper = {budget_of(block, row, column, "paper", ("batch_size", "eval_every")) for row in rows}
                laptop |= {budget_of(block, row, column, "laptop", ("limit",)) for row in rows}
                for row in rows:
                    run_of(block, row, column, "smoke")  # flags that do not go with it: there is no run
                assert len(paper) < 2, (table.id, block.title, column.name)
            assert len(laptop - {None}) < 2, (table.id, block.title)


def budget_of(block, row, column, scale: str, more: tuple[str, ...]) -> tuple | None:
    """What a run may take: its rounds, its steps or else epochs, its size of images, and more."""
    run = run_of(block, row, column, scale, 0)
    if run is None:
        return None
    args = run.args
    return args.rounds, args.steps or -args.epochs, args.image_size, *(getattr(args, name) for name in more)


def test_the_example_of_the_readme(tmp_path):
    """As printed: a table, a row, and a baseline's values for each dataset."""
    toml, lines = [README.split(f"```{language}\n")[1].split("```")[0] for language in ("toml", "csv")]
    assert len(toml.splitlines()) <= 12
    head = ",".join(HEAD)
    write_table(tmp_path, "fdse-1", toml, lines.removeprefix(head))
    assert lines.startswith(head)
    (table,) = read_tables(tmp_path)
    shown = []
    for block in table.blocks:
        (row,) = block.rows
        run = run_of(block, row, block.columns[0], "paper", 0)
        shown.append((block.dataset, run.args.mu, row.published))
    assert shown == [("officecaltech", 0.1, [["82.69", "1.52"]]), ("pacs", 0.01, [["74.38", "1.55"]])]


def test_a_published_line_is_of_one_cell():
    """Two rows that both take it would show one number twice."""
    lines = [{"dataset": "pacs", "setting": "", "method": "fdse", "column": "AVG", "taken": False}]
    assert take(lines, "pacs", "", "fdse", "ALL") is None
    assert take(lines, "pacs", "", "fdse", "AVG") is lines[0]
    with pytest.raises(ValueError, match="has not one number for pacs, fdse, AVG alone"):
        take(lines, "pacs", "", "fdse", "AVG")


def test_every_file_of_published_numbers_is_of_a_table():
    ids = {table.id for table in EVERY}
    for path in (ROOT / "papers").glob("*/printed.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            assert row["paper"] == path.parent.name and f"{row['paper']}-{row['table']}" in ids
    for table in EVERY:
        for block in table.blocks:
            names = {column.name for column in block.columns}
            assert all(type(at) is int or at in names for at, _ in block.levels)
