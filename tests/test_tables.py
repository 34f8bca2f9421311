"""The tables as data: every published number is there, and every row is what its name says."""

import re

from plumbing.errors import Stop
from reproduce.cells import run_of
from reproduce.methods import arguments
from reproduce.published import HEAD
from reproduce.tables import read_tables
from tests.conftest import ROOT
from tests.small_table import PUBLISHED, TABLE, write_table

import pytest

EVERY = read_tables()
TABLES = [table for table in EVERY if not table.figure and not table.id.startswith("ours-")]
README = (ROOT / "tables" / "README.md").read_text()
BASELINES = ("local centralized fedprox scaffold feddyn moon lgfedavg ditto partialfed fedbn fedfa fedheal "
             "feddg_ga fedproc fedgen fedema").split()
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


@pytest.mark.parametrize("table, block, row, column, cell", [
    ("fdse-1", "Office-Caltech10", "FDSE", "ALL", ["87.15", "2.06"]),
    ("fdse-2", "DomainNet", "FDSE - align", "S", ["62.59"]),
    ("fdse-3", "PACS", "none of A, B, C", "ALL", ["82.46"]),
    ("fdse-4", "Office-Caltech10", "Ditto", "Comm.", ["49.52"]),
    ("fdse-A8", "PACS, ViT-B/8", "FedHeal", "ALL", ["30.05", "3.44"]),
    ("fedadg-4", "PACS", "FedADG", "Avg.", ["73.82"]),
    ("fedadg-fig4", "PACS, sketch", "FedADG", "2000", ["63.35"]),
    ("fedcir-2", "PACS, lambda_align = 5e-6", "FedCiR", "lambda_reg=0.5", ["67.58"]),
    ("fedcir-3", "DomainNet", "FedGen", "GPU memory (GB)", ["7.85"]),
    ("fedgala-1", "PACS, 30% of the labels", "FedSimSiam", "A", ["35.7", "9.6"]),
    ("fedgala-fig3b", "PACS, target photo", "FedGaLA", "accuracy", []),
    ("fedgala-7", "TerraInc", "FedGaLa+L2 (lambda=0.01)", "L100", ["57.8", "3.3"]),
    ("fedsr-1", "RotatedMNIST", "HIR", "M0", ["90.34"]),
    ("fedsr-4", "DomainNet", "FedL2R", "C", []),
])
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


def test_values_of_the_tables():
    """Which round counts: the best validation round for FedSR, FedCiR and FDSE, the last for FedADG, FedGaLA
    and FedSR's Table 1."""
    for table in TABLES:
        kinds = {column.kind for block in table.blocks for column in block.columns}
        of_last = table.paper in ("fedadg", "fedgala") or table.id == "fedsr-1"
        expected = {"last"} if of_last else {"best"}
        if table.id in ("fdse-4", "fedcir-3"):
            expected = {"cost", "none"} if table.id == "fdse-4" else {"none"}
        assert kinds - {"mean"} == expected, table.id


def test_every_command_parses_and_rows_of_a_block_have_one_budget():
    """Otherwise a difference of rows would be the budget's. At laptop scale all columns have one, at paper
    scale columns may be about it. A row without a file is a baseline to come."""
    for table in EVERY:
        for block in table.blocks:
            laptop, paper = set(), {}
            for row in block.rows:
                assert bool(row.module) != row.quoted
                assert row.implemented or row.quoted or row.module.removeprefix("baselines.") in BASELINES
                for column in block.columns if row.implemented else []:
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


@pytest.mark.parametrize("change, words", [
    (('paper = "fdse"', 'paper = "x"'), "paper x, figure '': expected one of"),
    (('flags = "--lambda 0"', "ours = true"), "no row has the number of digits, FDSE without C, ALL"),
    (('flags = "--lambda 0"', 'flag = "--lambda 0"'), "unexpected keyword argument 'flag'"),
    (('method = "FedX"', 'method = "FedY"'), "Digits, FedY, ALL: published/ has no number for it"),
    (('value = "best/ALL"', 'value = "bset/ALL"'), "is no value of a column"),
    (('module = "fdse"', ""), "it needs a module, or quoted"),
    (("trials = 4", 'figure = "pie"'), "figure 'pie': expected one of"),
    (('dataset = "digits"', 'dataset = "digits"\nrows = ["FedAvg"]'), "no row has the number of digits"),
])
def test_bad_tables(tmp_path, change, words):
    assert TABLE.count(change[0]) == 1
    path = write_table(tmp_path, "fdse-9", "", PUBLISHED)
    path.write_text(TABLE.replace(*change), encoding="latin-1")
    with pytest.raises(Stop, match=re.escape(words)) as stop:
        read_tables(tmp_path)
    assert stop.value.code == 2 and str(path) in str(stop.value)


LINE = "fdse,9,digits,,FedAvg,ALL,accuracy_percent,90.0,2.0,measured\n"


@pytest.mark.parametrize("change, words", [
    ((LINE, ""), "Digits, FedAvg, ALL: published/ has no number for it"),
    ((LINE, LINE + LINE), "has not one number for digits, FedAvg, ALL alone: published_setting says which"),
    ((LINE, LINE.replace("90.0", "9O.0")), "could not convert string to float"),
    ((LINE, LINE.replace("measured", "quoted")), "or one that is quoted where the row is not"),
    ((LINE, LINE.replace("measured", "measured,x")), "line 2: expected paper,table"),
])
def test_bad_published_numbers(tmp_path, change, words):
    assert PUBLISHED.count(change[0]) == 1
    write_table(tmp_path, "fdse-9", TABLE, PUBLISHED.replace(*change))
    with pytest.raises(Stop, match=re.escape(words)):
        read_tables(tmp_path)


def test_every_file_of_published_numbers_is_of_a_table():
    ids = {table.id for table in EVERY}
    named = {path.stem for path in (ROOT / "tables" / "published").glob("*.csv")}
    assert named - {"witnesses"} <= ids
    for table in EVERY:
        for block in table.blocks:
            names = {column.name for column in block.columns}
            assert all(type(at) is int or at in names for at, _ in block.levels)
