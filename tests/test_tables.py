"""The tables as data: every published number is there, and every row is what its name says."""

import csv
from collections import Counter
from pathlib import Path

from plumbing.errors import Stop
from reproduce.cells import run_of
from reproduce.methods import arguments
from reproduce.tables import FIGURES, read_tables
from tests.small_table import TABLE, small_folder

import pytest

EVERY = read_tables()
TABLES = [table for table in EVERY if not table.figure]
PUBLISHED = Path(__file__).parent / "published"
BASELINES = ("local centralized fedprox scaffold feddyn moon lgfedavg ditto partialfed fedbn fedfa fedheal "
             "feddg_ga fedproc fedgen fedema").split()
# Names of datasets in the published files where they are others.
DATASETS = {"domainnet10": "domainnet", "domainnet20": "domainnet", "officecaltech": "officecaltech10"}
# Names of FDSE's Table 3 in the published files.
SWITCHES = {"none of A, B, C": "A=0;B=0;C=0", "without A": "A=0;B=1;C=1", "without B": "A=1;B=0;C=1",
            "without C": "A=1;B=1;C=0", "FDSE (A, B, C)": "A=1;B=1;C=1"}
# What columns call the domains that they leave out.
DOMAINS = {
    "officecaltech": {"A": "amazon", "C": "caltech", "D": "dslr", "W": "webcam"},
    "pacs": {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch", "Art": "art_painting"},
    "vlcs": {"V": "voc2007", "L": "labelme", "C": "caltech101", "S": "sun09"},
    "officehome": {"A": "art", "C": "clipart", "P": "product", "R": "real_world"},
    "domainnet": {"C": "clipart", "I": "infograph", "P": "painting", "Q": "quickdraw", "O": "quickdraw",
                  "R": "real", "S": "sketch"},
    "terrainc": {"L38": "location_38", "L43": "location_43", "L46": "location_46", "L100": "location_100"},
}


def read_published(name: str) -> list[dict]:
    with open(PUBLISHED / name) as file:
        return list(csv.DictReader(file))


def published() -> dict[str, list[dict]]:
    """{table id: its rows}; FedADG's Figure 4 has sentences, not a table."""
    tables = {}
    for path in sorted(PUBLISHED.glob("*_table*.csv")):
        paper, _, number = path.stem.partition("_table")
        tables[f"{paper}-{number}"] = read_published(path.name)
    return tables


def numbers(row: dict) -> tuple[float, ...]:
    return tuple(float(row[name]) for name in ("mean", "std") if row[name])


def settings(table, block, row) -> dict[str, str]:
    """What the published files say of a cell beside its dataset and column."""
    if table.id == "fdse-3":
        return {"setting": SWITCHES[row.method]}
    name = row.method
    if table.id != "fedgala-5":
        for share in ("10%", "30%"):
            if share in block.title:
                return {"setting": f"labeled={share}", "method": name}
    if name == "FDSE - align":
        name = "- align"
    return {"method": name}


def cells_of_tables(tables):
    """(table, block, row, column, published cell) of each cell but those of the rows that are ours."""
    for table in tables:
        for block in table.blocks:
            for row in block.rows:
                if row.ours:
                    continue
                for column, cell in zip(block.columns, row.published):
                    yield table, block, row, column, cell


def test_every_published_table_is_there_with_every_number():
    """Cell by cell: dataset, row, column, mean, deviation, and whether the paper quotes it."""
    theirs, seen = published(), Counter()
    assert {table.id for table in TABLES} == set(theirs) and len(theirs) == 24
    for table, block, row, column, cell in cells_of_tables(TABLES):
        expected = settings(table, block, row) | {"column": column.name}
        datasets = DATASETS.get(block.dataset, block.dataset), ""
        of_cell = []
        for line in theirs[table.id]:
            if line["dataset"] in datasets and expected.items() <= line.items():
                of_cell.append(line)
        where = table.id, block.title, row.method, column.name
        assert len(of_cell) == 1 and numbers(of_cell[0]) == tuple(map(float, cell)), (where, of_cell)
        assert (of_cell[0]["kind"] == "quoted") == row.quoted, where
        seen[table.id] += 1
    assert seen == {name: len(lines) for name, lines in theirs.items()}


def test_columns_leave_out_the_domain_that_they_name():
    checked = 0
    for table in TABLES:
        for block in table.blocks:
            known = DOMAINS.get(block.dataset.rstrip("0123456789"), {})
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


@pytest.mark.parametrize("table, row, flags", [
    ("fdse-3", "none of A, B, C", {"consensus": False, "similarity": False, "lambda_": 0.0}),
    ("fdse-3", "without A", {"consensus": False, "similarity": True, "lambda_": 0.1}),
    ("fdse-3", "without B", {"consensus": True, "similarity": False, "lambda_": 0.1}),
    ("fdse-3", "without C", {"consensus": True, "similarity": True, "lambda_": 0.0}),
    ("fdse-3", "FDSE (A, B, C)", {"consensus": True, "similarity": True, "lambda_": 0.1}),
    ("fedadg-6", "N ~ (0, I)", {"reference": "gaussian"}),
    ("fedadg-6", "U ~ [-1, 1]", {"reference": "uniform"}),
    ("fedadg-6", "Laplace (1/sqrt(2))", {"reference": "laplace"}),
    ("fedadg-6", "FedADG", {"reference": "generated"}),
    ("fedadg-5", "FedADG w/o. RP", {"projection": "none", "onehot": True}),
    ("fedadg-5", "FedADG w/o. one-hot", {"onehot": False}),
    ("fedadg-5", "FedAvg", {"adversarial": False}),
    ("fedgala-4", "w/o GA", {"global_alignment": False, "local_alignment": "discard"}),
    ("fedgala-4", "w/o LA", {"global_alignment": True, "local_alignment": "off"}),
    ("fedgala-4", "w/o GA & LA", {"global_alignment": False, "local_alignment": "off"}),
    ("fedsr-1", "FedCMI", {"variant": "fedcmi"}),
    ("fedsr-1", "FedL2R", {"variant": "fedl2r"}),
    ("fedsr-1", "FedSR", {"variant": "fedsr"}),
])
def test_rows_are_what_their_names_say(table, row, flags):
    (of_id,) = [one for one in TABLES if one.id == table]
    for block in of_id.blocks:
        (of_name,) = [one for one in block.rows if one.method == row]
        run = run_of(block, of_name, block.columns[0], "paper", 0)
        args = arguments(of_name.module, run.flags)
        assert {name: getattr(args, name) for name in flags} == flags


def kinds_of(table) -> set[str]:
    """Where the numbers of a table come from."""
    if table.id == "fdse-4":
        return {"cost", "seconds"}
    if table.id == "fedcir-3":
        return {"reach"}
    if table.paper in ("fedadg", "fedgala") or table.id == "fedsr-1":
        return {"last"}
    return {"best"}


def test_values_of_the_tables():
    """Which round counts: the best validation round for FedSR, FedCiR and FDSE, the last for FedADG, FedGaLA
    and FedSR's Table 1."""
    for table in TABLES:
        kinds = {column.kind for block in table.blocks for column in block.columns}
        assert kinds - {"mean"} == kinds_of(table), table.id


def arguments_of_cells(block, scale: str):
    """(column, arguments) of each cell of a block that has a run at a scale."""
    for row in block.rows:
        for column in block.columns:
            if row.implemented and column.value != "mean":
                run = run_of(block, row, column, scale, 0)
                if run:
                    yield column, arguments(row.module, run.flags)


def test_rows_of_a_block_have_one_budget_at_laptop_scale():
    """Otherwise their difference would be the budget's: rounds, steps, image size, images; the batch is the
    method's own."""
    for table in EVERY:
        for block in table.blocks:
            budgets = set()
            for _, args in arguments_of_cells(block, "laptop"):
                budgets.add((args.rounds, args.steps, args.epochs, args.image_size, args.limit))
            assert len(budgets) < 2, (table.id, block.title, budgets)


def test_rows_of_a_block_have_one_budget_at_paper_scale():
    """In FDSE's, FedCiR's and FedSR's tables, whose methods train equally long on the same images; FedADG and
    FedGaLA have rows about it. The best validation round is one of equally many."""
    for table in EVERY:
        if table.paper not in ("fdse", "fedcir", "fedsr"):
            continue
        for block in table.blocks:
            budgets = {}
            for column, args in arguments_of_cells(block, "paper"):
                work = args.steps or f"{args.epochs} epochs"
                budget = args.rounds, work, args.image_size, args.batch_size, args.eval_every
                budgets.setdefault(column.name, set()).add(budget)
            for name, of_column in budgets.items():
                assert len(of_column) == 1, (table.id, block.title, name, of_column)


def test_every_command_parses():
    """Of every row that has a method file, at each scale; the others name a baseline that is to come."""
    for table in EVERY:
        for block in table.blocks:
            for row in block.rows:
                assert bool(row.module) != row.quoted
                if row.module and not row.implemented:
                    assert row.module.removeprefix("baselines.") in BASELINES, row.module
                for column in block.columns:
                    if row.implemented and column.value != "mean":
                        assert run_of(block, row, column, "paper", 0)
                        run_of(block, row, column, "laptop", 1)


def test_the_figures_of_the_papers_are_there():
    """FedADG's Fig. 4 has the accuracies that its text states."""
    by_id = {table.id: table for table in EVERY if table.figure}
    expected = {"fedsr-fig1", "fedadg-fig4"}
    expected |= {f"fedgala-fig{i}" for i in "2a 2b 2c 2d 3a 3b 3c 3d".split()}
    expected |= {f"fedcir-fig{i}" for i in range(3, 13)}
    expected |= {f"fdse-fig{i}" for i in "3 4 5 6 A8".split()}
    assert set(by_id) == expected and {table.figure for table in by_id.values()} == set(FIGURES)
    stated, shown = set(), set()
    for line in read_published("fedadg_fig4.csv"):
        if line["metric"] == "accuracy_percent":
            stated.add((line["setting"].removeprefix("rp_size="), float(line["mean"])))
    for _, block, _, column, cell in cells_of_tables([by_id["fedadg-fig4"]]):
        if "sketch" in block.title and cell:
            shown.add((column.name, cell[0]))
    assert shown == stated


@pytest.mark.parametrize("change, words", [
    (('paper = "fdse"', 'paper = "x"'), "the paper is x; expected one of"),
    (("published = [[90.0, 2.0], [88.5], [89.25]]", "published = []"), "0 published cells for 3 columns"),
    (("trials = 4", ""), "needs trials"),
    (("[[block]]", "[[block"), "is no table"),
    (("trials = 4", 'trials = "x"'), "trials is 'x'; expected int"),
    (("published = [[95.0, 1.0], [], []]", "published = [[95.0], [], []]\nours = true"), "a row of ours has"),
    (("published = [[90.0, 2.0], [88.5], [89.25]]", "published = 5"), "is no table"),
    (("published = [[90.0, 2.0], [88.5], [89.25]]", 'published = [["x"], [], []]'), "a published cell is"),
    (("published = [[95.0, 1.0], [], []]", "published = [[1, 2, 3], [], []]"), "a published cell is"),
    (('flags = "--lambda 0"', "flags = \"--lambda '0\""), "No closing quotation"),
    (('value = "best/ALL"', 'value = "bset/ALL"'), "is no value of a column"),
    (('value = "best/ALL"', 'value = "cost/foo"'), "is no value of a column"),
    (('value = "best/ALL"', 'value = "best"'), "is no value of a column"),
    (('module = "fdse"', ""), "it needs a module, or quoted"),
    (("trials = 4", 'figure = "pie"'), "needs trials, or figure, one of"),
    (("[[block]]", "# \xff\n[[block]]"), "is no table"),
])
def test_bad_tables(tmp_path, change, words):
    path = small_folder(tmp_path) / "tables" / "fdse-9.toml"
    path.write_text(TABLE.replace(*change), encoding="latin-1")
    with pytest.raises(Stop, match=words.replace("[", r"\[")):
        read_tables(tmp_path / "tables")
