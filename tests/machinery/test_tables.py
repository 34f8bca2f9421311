"""The tables as data: every published number is there, and every row is what its name says."""

import tomllib

from reproduce.cells import run_of
from reproduce.methods import arguments
from reproduce.published import HEAD
from reproduce.tables import read_tables
from tests.conftest import ROOT
from tests.small_table import write_table

import pytest

EVERY = read_tables()
TABLES = [table for table in EVERY if not table.figure and not table.id.startswith("ours-")]
README = (ROOT / "tables" / "README.md").read_text()
PAPERS = tomllib.loads((ROOT / "tests" / "papers.toml").read_text())


@pytest.mark.parametrize("table, block, row, column, cell", PAPERS["cells"])
def test_cells_have_the_numbers_of_the_papers(table, block, row, column, cell):
    """A few of each table, typed here once more."""
    (of_id,) = [one for one in EVERY if one.id == table]
    (of_title,) = [one for one in of_id.blocks if one.title == block]
    (of_name,) = [one for one in of_title.rows if one.method == row]
    names = [one.name for one in of_title.columns]
    assert of_name.published[names.index(column)] == cell


def test_columns_leave_out_the_domain_that_they_name():
    checked = 0
    for table in TABLES:
        for block in table.blocks:
            known = PAPERS["domains"].get(block.dataset.rstrip("0123456789"), {})
            # The columns of this one name the domains that train.
            of_sources = table.id == "fedgala-2" and block.dataset == "domainnet20"
            for column in block.columns:
                if block.dataset == "rotatedmnist":
                    assert column.value == "mean" or column.flags == f"--target {column.name.lower()}"
                elif "--target " in column.flags and not of_sources:
                    target = column.flags.split("--target ")[1].split()[0]
                    assert target == known[column.name.split("-")[0].strip()], (table.id, block.title, column)
                    checked += 1
    assert checked > 80


@pytest.mark.parametrize("table, row, flags", PAPERS["rows"])
def test_rows_are_what_their_names_say(table, row, flags):
    (of_id,) = [one for one in TABLES if one.id == table]
    for block in of_id.blocks:
        (of_name,) = [one for one in block.rows if one.method == row]
        run = run_of(block, of_name, block.columns[0], "paper", 0)
        args = arguments(of_name.module, run.flags)
        assert {name: getattr(args, name) for name in flags} == flags


def test_values_of_the_tables():
    """Which round counts: the best validation round for FedSR, FedADG, FedCiR and FDSE, the last for FedGaLA
    and FedSR's Table 1."""
    for table in TABLES:
        kinds = {column.kind for block in table.blocks for column in block.columns}
        of_last = table.paper == "fedgala" or table.id == "fedsr-1"
        expected = {"last"} if of_last else {"best"}
        if table.id in ("fdse-4", "fedcir-3"):
            expected = {"cost", "none"} if table.id == "fdse-4" else {"none"}
        assert kinds - {"mean"} == expected, table.id


def test_every_command_parses_and_rows_of_a_block_have_one_budget():
    """Otherwise a difference of rows would be the budget's. At laptop scale all columns have one, at paper
    scale columns may be about it."""
    for table in EVERY:
        for block in table.blocks:
            laptop, paper = set(), {}
            for row in block.rows:
                assert bool(row.module) != row.quoted
                for column in block.columns if row.module else []:
                    if column.value == "mean":
                        continue
                    args = arguments(row.module, run_of(block, row, column, "paper", 0).flags)
                    budget = args.rounds, args.steps or -args.epochs, args.image_size
                    paper.setdefault(column.name, set()).add((*budget, args.batch_size, args.eval_every))
                    run = run_of(block, row, column, "laptop", 0)
                    if run:
                        args = arguments(row.module, run.flags)
                        laptop.add((args.rounds, args.steps, args.epochs, args.image_size, args.limit))
            assert len(laptop) < 2, (table.id, block.title)
            assert all(len(found) == 1 for found in paper.values()), (table.id, block.title)


def example(language: str) -> str:
    """The example of tables/README.md in a language."""
    return README.split(f"```{language}\n")[1].split("```")[0]


def test_the_example_of_the_readme(tmp_path):
    """As printed: a table, a row, and a baseline's values for each dataset."""
    assert len(example("toml").splitlines()) <= 12
    head, _, lines = example("csv").partition("\n")
    assert head == ",".join(HEAD)
    write_table(tmp_path, "fdse-1", example("toml"), f"\n{lines}")
    (table,) = read_tables(tmp_path)
    shown = []
    for block in table.blocks:
        (row,) = block.rows
        run = run_of(block, row, block.columns[0], "paper", 0)
        shown.append((block.dataset, arguments(row.module, run.flags).mu, row.published))
    assert shown == [("officecaltech", 0.1, [["82.69", "1.52"]]), ("pacs", 0.01, [["74.38", "1.55"]])]


def test_every_file_of_published_numbers_is_of_a_table():
    ids = {table.id for table in EVERY}
    named = {path.stem for path in (ROOT / "tables" / "published").glob("*.csv")}
    assert named - {"elsewhere"} <= ids
    for table in EVERY:
        for block in table.blocks:
            names = {column.name for column in block.columns}
            assert all(type(at) is int or at in names for at, _ in block.levels)
