"""reproduce_tables.py and runner.py: the tables against the published numbers, rendering against a golden file, running."""

import csv
import dataclasses
import email.message
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import common
import reproduce_tables as rt
from tests.conftest import ROOT, run_here, start

import pytest
import runner
from basics import Stop
from cells import Block, Cell, Column, Records, Row, arguments, cells_of, paired, read_tables, run_of

EVERY = read_tables()
TABLES, FIGURES = [t for t in EVERY if not t.figure], [t for t in EVERY if t.figure]
PUBLISHED = Path(__file__).parent / "published"
BASELINES = "local centralized fedprox scaffold feddyn moon lgfedavg ditto partialfed fedbn fedfa fedheal feddg_ga fedproc fedgen fedema".split()


def published() -> dict[str, list[dict]]:
    """{table id: its rows}; FedADG's Figure 4 has sentences, not a table."""
    found = {}
    for path in sorted(PUBLISHED.glob("*_table*.csv")):
        paper, _, number = path.stem.partition("_table")
        found[f"{paper}-{number}"] = list(csv.DictReader(open(path)))
    return found


def numbers(row: dict) -> tuple[float, ...]:
    return tuple(float(row[k]) for k in ("mean", "std") if row[k])


def settings(table, block, row) -> dict[str, str]:
    """What the published files say of a cell beside its method and column."""
    if table.id == "fdse-3":
        return {"setting": {"none of A, B, C": "A=0;B=0;C=0", "without A": "A=0;B=1;C=1", "without B": "A=1;B=0;C=1",
                            "without C": "A=1;B=1;C=0", "FDSE (A, B, C)": "A=1;B=1;C=1"}[row.method]}
    share = [f"labeled={s}" for s in ("10%", "30%") if s in block.title and table.id != "fedgala-5"]
    return {"setting": share[0]} if share else {"method": row.method.removeprefix("FDSE ") if row.method == "FDSE - align" else row.method}


def test_every_published_table_is_there_with_every_number():
    """Cell by cell: dataset, row, column, mean, deviation, and whether the paper quotes it."""
    names = {"domainnet10": "domainnet", "domainnet20": "domainnet", "officecaltech": "officecaltech10", "rotatedmnist-t10k": "rotatedmnist"}
    theirs, seen = published(), Counter()
    assert {t.id for t in TABLES} == set(theirs) and len(theirs) == 24
    for table in TABLES:
        for b in table.block:
            for r in b.row:
                for column, cell in zip(b.columns, r.published):
                    said = settings(table, b, r)
                    method = {} if table.id == "fdse-3" else {"method": said.get("method", r.method)}
                    found = [x for x in theirs[table.id] if x["dataset"] in (names.get(b.dataset, b.dataset), "") and x["column"] == column.name
                             and all(x[k] == v for k, v in (said | method).items())]
                    where = table.id, b.title, r.method, column.name
                    assert len(found) == 1 and numbers(found[0]) == tuple(map(float, cell)), (where, found)
                    assert (found[0]["kind"] == "quoted") == r.quoted, where
                    seen[table.id] += 1
    assert seen == Counter({name: len(rows) for name, rows in theirs.items()})


ABBREVIATED = {"officecaltech": dict(A="amazon", C="caltech", D="dslr", W="webcam"),
               "pacs": dict(P="photo", A="art_painting", C="cartoon", S="sketch", Art="art_painting"),
               "vlcs": dict(V="voc2007", L="labelme", C="caltech101", S="sun09"),
               "officehome": dict(A="art", C="clipart", P="product", R="real_world"),
               "domainnet": dict(C="clipart", I="infograph", P="painting", Q="quickdraw", O="quickdraw", R="real", S="sketch"),
               "terrainc": {f"L{i}": f"location_{i}" for i in (38, 43, 46, 100)}}


def test_columns_leave_out_the_domain_that_they_name():
    checked = 0
    for table in TABLES:
        for b in table.block:
            known = ABBREVIATED.get(b.dataset.rstrip("0123456789"), {})
            for c in b.columns:
                if "--target " in c.flags and b.dataset != "rotatedmnist-t10k" and not (table.id == "fedgala-2" and b.dataset == "domainnet20"):
                    assert c.flags.split("--target ")[1].split()[0] == known[c.name.split("-")[0].strip()], (table.id, b.title, c)
                    checked += 1
                if b.dataset == "rotatedmnist-t10k" and c.value != "mean":
                    assert c.flags == f"--target {c.name.lower()}"
    assert checked > 80


@pytest.mark.parametrize("table, row, flags", [
    ("fdse-3", "none of A, B, C", {"consensus": False, "similarity": False, "lambda_": 0.0}),
    ("fdse-3", "without A", {"consensus": False, "similarity": True, "lambda_": 0.1}),
    ("fdse-3", "without B", {"consensus": True, "similarity": False, "lambda_": 0.1}),
    ("fdse-3", "without C", {"consensus": True, "similarity": True, "lambda_": 0.0}),
    ("fdse-3", "FDSE (A, B, C)", {"consensus": True, "similarity": True, "lambda_": 0.1}),
    ("fedadg-6", "N ~ (0, I)", {"reference": "gaussian"}), ("fedadg-6", "U ~ [-1, 1]", {"reference": "uniform"}),
    ("fedadg-6", "Laplace (1/sqrt(2))", {"reference": "laplace"}), ("fedadg-6", "FedADG", {"reference": "generated"}),
    ("fedadg-5", "FedADG w/o. RP", {"projection": "none", "onehot": True}), ("fedadg-5", "FedADG w/o. one-hot", {"onehot": False}),
    ("fedadg-5", "FedAvg", {"adversarial": False}),
    ("fedgala-4", "w/o GA", {"global_alignment": False, "local_alignment": "discard"}),
    ("fedgala-4", "w/o LA", {"global_alignment": True, "local_alignment": "off"}),
    ("fedgala-4", "w/o GA & LA", {"global_alignment": False, "local_alignment": "off"}),
    ("fedsr-1", "FedCMI", {"variant": "fedcmi"}), ("fedsr-1", "FedL2R", {"variant": "fedl2r"}), ("fedsr-1", "FedSR", {"variant": "fedsr"}),
])
def test_rows_are_what_their_names_say(table, row, flags):
    (found,) = [t for t in TABLES if t.id == table]
    for b in found.block:
        (r,) = [r for r in b.row if r.method == row]
        args = arguments(r.module, run_of(b, r, b.columns[0], "paper", 0).flags)
        assert {k: getattr(args, k) for k in flags} == flags


def test_values_of_the_tables():
    """Which round counts: the best validation round for FedSR, FedCiR and FDSE, the last for FedADG, FedGaLA and FedSR's Table 1."""
    for table in TABLES:
        kinds = {c.value.partition("/")[0] for b in table.block for c in b.columns} - {"mean"}
        assert kinds == ({"cost", "seconds"} if table.id == "fdse-4" else {"reach"} if table.id == "fedcir-3" else
                         {"last"} if table.paper in ("fedadg", "fedgala") or table.id == "fedsr-1" else {"best"}), table.id


def test_rows_of_a_block_have_one_budget_at_laptop_scale():
    """Otherwise their difference would be the budget's: rounds, steps, image size, images; the batch is the method's own."""
    for table in EVERY:
        for b in table.block:
            budgets = set()
            for r in b.row:
                for c in b.columns if r.implemented else ():
                    run = run_of(b, r, c, "laptop", 0) if c.value != "mean" else None
                    if run:
                        args = arguments(r.module, run.flags)
                        budgets.add((args.rounds, args.steps, args.epochs, args.image_size, args.limit))
            assert len(budgets) < 2, (table.id, b.title, budgets)


def test_rows_of_a_block_have_one_budget_at_paper_scale():
    """In FDSE's and FedCiR's tables, whose papers train every method equally long on the same images; FedADG and FedGaLA have rows about it."""
    for table in EVERY:
        for b in table.block if table.paper in ("fdse", "fedcir") else ():
            for c in b.columns:
                runs = [run_of(b, r, c, "paper", 0) for r in b.row if r.implemented and c.value != "mean"]
                args = [arguments(r.module, r.flags) for r in runs]
                found = {(a.rounds, a.steps or f"{a.epochs} epochs", a.image_size, a.batch_size) for a in args}
                assert len(found) < 2, (table.id, b.title, c.name, found)


def test_a_smaller_scale_has_its_own_budget():
    """A table's rounds and image sizes are the paper's; where they are what a column is about, there is no smaller cell."""
    block = Block("", "pacs", [], [], flags="--target photo")
    row = Row("", module="fedgala", flags="--rounds 900 --image-size 224 --tau 0.1")
    small = run_of(block, row, Column("", "last/target"), "smoke", 0)
    args = arguments("fedgala", small.flags)
    assert args.rounds < 10 and args.image_size == 64 and args.tau == 0.1
    assert run_of(block, row, Column("", "last/target", "--epochs 5"), "laptop", 0) is None
    assert arguments("fedgala", run_of(block, row, Column("", "last/target"), "paper", 0).flags).rounds == 900


def test_the_results_are_those_of_the_records(tmp_path):
    """What is in results/ and between the README's marks is what rendering the recorded runs gives."""
    shutil.copytree(ROOT / "results" / "figures", tmp_path / "results" / "figures")
    (tmp_path / "README.md").write_text(re.sub(f"{rt.MARKS[0]}.*{rt.MARKS[1]}", f"{rt.MARKS[0]}\n{rt.MARKS[1]}",
                                               (ROOT / "README.md").read_text(), flags=re.DOTALL))
    rt.render(EVERY, Records(ROOT / "results" / "runs.jsonl"), tmp_path / "results")
    for path in [tmp_path / "README.md", *(tmp_path / "results").glob("*.md"), *(tmp_path / "results" / "tables").iterdir()]:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path.name
    assert {p.name for p in (tmp_path / "results" / "tables").iterdir()} == {p.name for p in (ROOT / "results" / "tables").iterdir()}


def test_every_command_parses():
    """Of every row that has a method file, at each scale; the others name a baseline that is to come."""
    for table in EVERY:
        for b in table.block:
            for r in b.row:
                assert bool(r.module) != r.quoted
                if r.module and not r.implemented:
                    assert r.module.removeprefix("baselines.") in BASELINES, r.module
                for column in b.columns if r.implemented else ():
                    assert column.value == "mean" or run_of(b, r, column, "paper", 0)
                    if column.value != "mean":
                        run_of(b, r, column, "laptop", 1)


def test_figures():
    """The figures of the five papers; FedADG's Fig. 4 has the accuracies that its text states."""
    assert {t.id for t in FIGURES} == {"fedsr-fig1", "fedadg-fig4", *(f"fedgala-fig{i}" for i in "2a 2b 2c 2d 3a 3b 3c 3d".split()),
                                       *(f"fedcir-fig{i}" for i in range(3, 13)), *(f"fdse-fig{i}" for i in "3 4 5 6 A8".split())}
    stated = [r for r in csv.DictReader(open(PUBLISHED / "fedadg_fig4.csv")) if r["metric"] == "accuracy_percent"]
    (shown,) = [t for t in FIGURES if t.id == "fedadg-fig4"]
    cells = {(c.name, r.published[i][0]) for b in shown.block if "sketch" in b.title for r in b.row for i, c in enumerate(b.columns)
             if r.published[i]}
    assert cells == {(r["setting"].removeprefix("rp_size="), float(r["mean"])) for r in stated}


def record(method: str, flags: list[str], **outcome) -> dict:
    args = arguments(method, tuple(flags))
    key = common.identity(args)
    return {"id": "x", "method": method, "args": key, "command": f"python {method}.py", "best": {}, "last": {}, "curve": {},
            "seconds": {}, "bytes": {}, "finished": "", "versions": {}, "hardware": {}} | outcome


SMALL = """
title = "A small table"
paper = "fdse"
protocol = "in-domain, best validation round"
trials = 4
notes = ["A note."]

[[block]]
title = "Digits"
dataset = "digits"
columns = [
    {name = "ALL", value = "best/ALL"},
    {name = "AVG", value = "best/AVG"},
    {name = "Mean", value = "mean"},
]

[[block.row]]
method = "FedAvg"
module = "fedavg"
published = [[90.0, 2.0], [88.5], [89.25]]

[[block.row]]
method = "FDSE without C"
module = "fdse"
flags = "--lambda 0"
published = [[95.0, 1.0], [], []]

[[block.row]]
method = "Quoted"
quoted = true
published = [[50.0], [51.0], [50.5]]

[[block.row]]
method = "FedX"
module = "baselines.fedx"
published = [[60.0, 1.0], [61.0, 1.0], [60.5]]
"""


@pytest.fixture
def small(tmp_path):
    """(folder of one small table, its records)."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "fdse-9.toml").write_text(SMALL)
    lines = [record("fedavg", ["--dataset", "digits", "--seed", str(s)], best={"ALL": a, "AVG": b})
             for s, a, b in ((0, 0.95, 0.94), (1, 0.97, 0.95), (2, 0.96, 0.93))]
    lines.append(record("fdse", ["--dataset", "digits", "--lambda", "0"], best={"ALL": 0.951, "AVG": 0.9}))
    lines.append(record("fdse", ["--dataset", "digits", "--lambda", "0.5"], best={"ALL": 0.1, "AVG": 0.1}))  # of no cell
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    return tmp_path


def test_rendering_against_the_golden_file(small):
    records = Records(small / "runs.jsonl")
    text = rt.render(read_tables(small / "tables"), records, small)
    golden = Path(__file__).parent / "golden"
    assert (small / "tables" / "fdse-9.md").read_text() == (golden / "fdse-9.md").read_text()
    assert (small / "tables" / "fdse-9.csv").read_text() == (golden / "fdse-9.csv").read_text()
    assert "A small table" in text and "5 recorded runs" in (small / "README.md").read_text()


def test_the_readme_has_the_state_of_the_records(tmp_path):
    """What stands between its marks is what the recorded runs give; other text stays."""
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    summary = "| x |"
    rt.update_readme(readme, [("paper", "fdse-1", "", True), ("laptop", "fdse-1-laptop", "", True), ("paper", "fdse-2", "", False)], [], summary)
    now, before = readme.read_text(), (ROOT / "README.md").read_text()
    assert "| x |" in now and "[fdse-1-laptop](results/tables/fdse-1-laptop.md)" in now and "fdse-2.md" not in now
    assert now.split(rt.MARKS[0])[0] == before.split(rt.MARKS[0])[0] and now.split(rt.MARKS[1])[1] == before.split(rt.MARKS[1])[1]
    readme.write_text("no marks")
    with pytest.raises(Stop, match="has lost a mark"):
        rt.update_readme(readme, [], [], "")


def test_statistics_by_hand():
    """Mean, deviation and difference; far: beyond two combined standard errors, None where that is not known."""
    cell = Cell([90.0, 2.0], {0: 95.0, 1: 97.0, 2: 96.0}, trials=4)
    assert (cell.mean, cell.deviation, cell.difference) == (96, 1, 6)
    assert cell.far  # 6 > 2 sqrt(1 / 3 + 4 / 4)
    assert Cell([94.0, 2.0], {0: 95.0, 1: 97.0, 2: 96.0}, trials=4).far is False  # 2 < 2.31
    assert Cell([93.5, 2.0], {0: 95.0, 1: 97.0, 2: 96.0}, trials=4).far  # 2.5 > 2.31
    unknown = Cell([90.0, 2.0], {0: 96.0}, trials=4), Cell([90.0], {0: 95.0, 1: 97.0}, trials=4), Cell([90.0, 2.0], {0: 95.0, 1: 97.0})
    assert [c.far for c in unknown] == [None] * 3 and unknown[0].text(1) == "90.0 ± 2.0 / 96.00 (1), +6.00 ?"
    assert cell.text(0) == "90 ± 2 / 96.00 ± 1.00 (3), +6.00 *" and cell.text(1, other_scale=True) == "90.0 ± 2.0 / 96.00 ± 1.00 (3)"
    assert Cell([]).text(0) == "- / -" and Cell([90.0]).text(2) == "90.00 / -"


def test_paired_differences_by_hand():
    """Student's t with two degrees of freedom: 4.303 times the deviation of the differences over sqrt 3."""
    a, b = {0: 5.0, 1: 6.0, 2: 10.0, 7: 0.0}, {0: 4.0, 1: 4.0, 2: 7.0, 8: 50.0}
    mean, half, n = paired(a, b)
    assert (mean, n) == (2, 3) and half == pytest.approx(4.302653 * 1 / 3 ** 0.5, rel=1e-5)
    assert paired(a, {0: 1.0}) is None


def drawn(table, cells, monkeypatch, tmp_path):
    """The panels of a figure whose rows have these cells."""
    from matplotlib.figure import Figure
    made = []
    monkeypatch.setattr("measures.write_figure", lambda path, figure: made.append(figure))
    block = table.block[0]
    assert rt.figures.draw(table, [(block, list(zip(block.row, cells)))], tmp_path / "f.png", "paper")
    assert isinstance(made[0], Figure)
    return made[0].axes


def test_what_figures_show(monkeypatch, tmp_path):
    """Means over the seeds of curves, logs, parameters and domains."""
    by_id = {t.id: t for t in FIGURES}
    records = {0: {"curve": {"round": [1, 2], "ALL": [0.5, 0.6]}, "best": {"clients": {"a": 0.5, "b": 0.2}}},
               1: {"curve": {"round": [1, 2], "ALL": [0.7, 0.9]}, "best": {"clients": {"a": 0.7, "b": 0.4}}}}
    rows = len(by_id["fdse-fig5"].block[0].row)
    cells = [[Cell([], records=records if i in (0, rows - 1) else {})] for i in range(rows)]
    (panel,) = drawn(by_id["fdse-fig5"], cells, monkeypatch, tmp_path)
    assert panel.lines[0].get_xydata().tolist() == [[1, pytest.approx(60)], [2, pytest.approx(75)]] and len(panel.lines) == 2
    (panel,) = drawn(by_id["fdse-fig3"], cells, monkeypatch, tmp_path)
    assert panel.lines[0].get_ydata().tolist() == [1, 1, 1] and "60.0%" in panel.get_xticklabels()[0].get_text()
    logs = {0: {"curve": {"round": [5]}, "logs": {"discarded": [None, 0.6, 0.4]}}}
    (panel,) = drawn(by_id["fedgala-fig2b"], [[Cell([], records=logs)], [Cell([])]], monkeypatch, tmp_path)
    assert panel.lines[0].get_xydata().tolist() == [[2, 60], [3, 40]]
    known = [Cell([], {0: 60.0, 1: 62.0}, records=records), Cell([]), Cell([], {0: 70.0}, records=records), Cell([])]
    (panel,) = drawn(by_id["fedgala-fig2c"], [known], monkeypatch, tmp_path)
    assert panel.lines[0].get_xydata().tolist() == [[0, 61], [2, 70]]
    block = by_id["fdse-fig5"].block[0]
    assert not rt.figures.draw(by_id["fdse-fig5"], [(block, [(r, [Cell([])]) for r in block.row])], tmp_path / "f.png", "paper")


def test_averages_take_the_seeds_that_have_all_columns(small):
    lines = (small / "runs.jsonl").read_text().splitlines()
    broken = json.loads(lines[1]) | {"best": {"ALL": 0.97}}
    (small / "runs.jsonl").write_text("\n".join([lines[0], json.dumps(broken), lines[2]]))
    (table,) = read_tables(small / "tables")
    cells = cells_of(table, table.block[0], table.block[0].row[0], Records(small / "runs.jsonl"), "paper", [])
    assert set(cells[0].values) == {0, 1, 2} and set(cells[1].values) == {0, 2}
    assert cells[2].values == pytest.approx({0: statistics.mean((95, 94)), 2: statistics.mean((96, 93))})


def test_damaged_records_are_named_and_skipped(small):
    good = (small / "runs.jsonl").read_text()
    first = good.splitlines()[0]
    bad = [first[:100], "[]", json.dumps(json.loads(first) | {"best": 3}), json.dumps(json.loads(first) | {"method": "../x"}), "\x00"]
    (small / "runs.jsonl").write_text(bad[0] + "\n" + good + "\n".join(bad[1:]))
    records = Records(small / "runs.jsonl")
    assert records.count == 5 and len(records.damaged) == 5
    assert [int(line.split("line ")[1].split()[0]) for line in records.damaged] == [1, 7, 8, 9, 10]
    assert not Records(small / "none.jsonl").count


@pytest.mark.parametrize("change", [
    {"best": {"ALL": float("nan")}}, {"best": {"ALL": True}}, {"best": {"ALL": 85.0}}, {"best": {"ALL": "0.9"}}, {"best": {"clients": {"a": -1}}},
    {"curve": {"ALL": [0.1, "x"]}}, {"logs": {"loss": [float("inf")]}}, {"seconds": {"train": None}},
    {"args": {"seed": "0"}}, {"args": {"seed": None}}, {"args": {"rounds": None}}, {"args": {"scale": "huge"}}, {"args": {"lr": "0.1"}},
])
def test_records_with_odd_contents_are_skipped_and_count_for_nothing(small, change):
    """Also for the plan: a run whose record is damaged is missing."""
    good = json.loads((small / "runs.jsonl").read_text().splitlines()[0])
    args = {k: v for k, v in (good["args"] | change.get("args", {})).items() if v is not None}
    (small / "runs.jsonl").write_text(json.dumps(good | change | {"args": args}) + "\n")
    records = Records(small / "runs.jsonl")
    assert not records.count and not records.by_key and not records.seeds and "line 1 is skipped" in records.damaged[0]
    assert len(rt.missing(read_tables(small / "tables"), records, "paper", [0])) == 2
    assert "FedAvg" in rt.render(read_tables(small / "tables"), records, small / "results")


def test_a_run_is_known_by_its_arguments(tmp_path):
    """Whatever flags gave them, on whatever hardware, also of a record that lacks a field of today."""
    run = run_of(Block("", "digits", [], []), Row("", module="fedavg", flags="--lr 0.05"), Column("", "best/ALL"), "paper", 3)
    made = record("fedavg", ["--dataset", "digits", "--seed", "3", "--precision", "fp32"])
    for change in ({}, {"precision": "bf16"}, {"device": "cuda"}, {"augment": None}, {"future": 1}):
        args = {k: v for k, v in (made["args"] | change).items() if v is not None}
        (tmp_path / "r.jsonl").write_text(json.dumps(made | {"args": args}) + "\n")
        assert Records(tmp_path / "r.jsonl").get(run), change
    for change in ({"seed": 4}, {"lr": 0.1}, {"scale": "smoke"}):
        (tmp_path / "r.jsonl").write_text(json.dumps(made | {"args": made["args"] | change}) + "\n")
        assert not Records(tmp_path / "r.jsonl").get(run), change


def test_a_real_record_is_found(tmp_path):
    """A run's own record, through the whole of the machinery."""
    result = run_here("fdse", tmp_path / "run", "--record", tmp_path / "r.jsonl")
    run = run_of(Block("", "digits", [], []), Row("", module="fdse", flags="--precision fp32"), Column("", "best/ALL"), "smoke", 0)
    assert Records(tmp_path / "r.jsonl").get(run)["best"] == result["best"]


@pytest.mark.parametrize("change, words", [
    (('paper = "fdse"', 'paper = "x"'), "the paper is x; expected one of"),
    (("published = [[90.0, 2.0], [88.5], [89.25]]", "published = []"), "0 published cells for 3 columns"),
    (("trials = 4", ""), "needs trials"),
    (("[[block]]", "[[block"), "is no table"),
    (("trials = 4", 'trials = "x"'), "trials is 'x'; expected int"),
    (("published = [[90.0, 2.0], [88.5], [89.25]]", "published = 5"), "is no table"),
    (("published = [[90.0, 2.0], [88.5], [89.25]]", 'published = [["x"], [], []]'), "a published cell is"),
    (('flags = "--lambda 0"', "flags = \"--lambda '0\""), "No closing quotation"),
    (('value = "best/ALL"', 'value = "bset/ALL"'), "is no value of a column"),
    (('value = "best/ALL"', 'value = "cost/foo"'), "is no value of a column"),
    (('module = "fdse"', ""), "it needs a module, or quoted"),
    (("[[block]]", "# \xff\n[[block]]"), "is no table"),
])
def test_bad_tables(small, change, words):
    path = small / "tables" / "fdse-9.toml"
    path.write_text(path.read_text().replace(*change), encoding="latin-1")
    with pytest.raises(Stop, match=words.replace("[", r"\[")):
        read_tables(small / "tables")


@pytest.mark.parametrize("flags, code, words", [
    (["--only", "fdse-77"], 2, "is no table; there are fedsr-1"),
    (["--seeds", "0"], 2, "--seeds is 0"),
    (["--jobs", "x"], 2, "invalid int value"), (["--jobs", "-1"], 2, "--jobs is -1"),
    (["--only", "fdse-1,typo-9"], 2, "--only typo-9 is no table"), (["--gpus", "foo"], 2, "--gpus is foo; expected numbers"),
    (["--gpus", "0,0"], 2, "--gpus is 0,0"), (["--gpus", "0,1", "--executor", "slurm"], 2, "with slurm one number"),
    (["--records", "other.jsonl"], 2, "give another --out"), (["--records", "tests", "--out", "x"], 2, "is a folder"),
    (["--rnu"], 2, "did you mean --run?"),
    (["--tables", "nowhere", "--out", "x"], 2, "has no tables"),
])
def test_bad_flags(capsys, flags, code, words):
    with pytest.raises(SystemExit) as end:
        rt.main(flags)
    lines = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == code and len(lines) == 1 and words in lines[0], lines


def test_estimates(monkeypatch):
    """Steps of all clients and rounds, and a third of a step for each batch that is evaluated, by hand."""
    args = arguments("fedavg", ("--dataset", "officecaltech"))  # 0.8 of 958, 1123, 157, 295; batch 50, E = 1, 500 rounds
    train = [766, 898, 125, 236]
    steps = 500 * sum(-(-n // 50) for n in train)
    assert runner.images_of(args)[0] == train
    evaluated = runner.images_of(args)[1]
    assert abs(evaluated - 0.2 * 2533) < 3
    assert runner.estimate(args, 0.5) == pytest.approx(runner.STARTUP + 0.5 * (steps + 500 * evaluated / 50 / 3))
    shared = arguments("fedcir", ("--dataset", "pacs", "--clients-per-domain", "13", "--participation", "0.5"))
    assert len(runner.images_of(shared)[0]) == 52 and sum(runner.images_of(shared)[0]) == pytest.approx(0.8 * 9991, rel=0.02)
    assert runner.estimate(shared, 1.0) == pytest.approx(runner.STARTUP + 300 * 20 * 26, rel=0.2)  # half of 52 clients, 20 steps each
    linear = arguments("fedgala", ("--dataset", "pacs", "--target", "photo"))
    train, evaluated = runner.images_of(linear)
    assert sorted(train) == [2048, 2344, 3929] and evaluated == 1670
    assert runner.estimate(arguments("fedcir", ("--dataset", "iwildcam")), 1.0) is None
    assert [runner.clock(s) for s in (None, 5, 119, 120, 7200, 200000)] == ["?", "5 s", "119 s", "2.0 min", "2.0 h", "2.3 days"]


TWO = {"fdse-91": 'title = "One"\npaper = "fdse"\nprotocol = "p"\ntrials = 1\n[[block]]\ntitle = "Digits"\ndataset = "digits"\n'
                  'columns = [{name = "ALL", value = "best/ALL"}]\n[[block.row]]\nmethod = "FedAvg"\nmodule = "fedavg"\npublished = [[90.0]]\n'
                  '[[block.row]]\nmethod = "FDSE"\nmodule = "fdse"\npublished = [[95.0]]\n',
       "fedsr-91": 'title = "Two"\npaper = "fedsr"\nprotocol = "p"\ntrials = 1\n[[block]]\ntitle = "Digits"\ndataset = "digits"\n'
                   'columns = [{name = "AVG", value = "best/AVG"}]\n[[block.row]]\nmethod = "FedAvg"\nmodule = "fedavg"\npublished = [[90.0]]\n'
                   '[[block.row]]\nmethod = "Bad"\nmodule = "fedavg"\nflags = "--lr 1e30 --momentum 1"\npublished = [[95.0]]\n'}


def two_tables(folder: Path, *leave_out: str) -> list:
    (folder / "tables").mkdir(exist_ok=True)
    for name, text in TWO.items():
        if name not in leave_out:
            (folder / "tables" / f"{name}.toml").write_text(text)
    return ["reproduce_tables.py", "--run", "--scale", "smoke", "--tables", folder / "tables", "--records", folder / "runs.jsonl", "--out",
            folder / "out"]


def recorded(folder: Path) -> list[dict]:
    path = folder / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_run_plan_and_run_again(tmp_path):
    """Two tables with a shared run: three runs, of which one fails and does not stop the others; again: nothing but the failed."""
    flags = two_tables(tmp_path)
    plan = start(*[f if f != "--run" else "--plan" for f in flags])
    said, error = plan.communicate()
    assert plan.returncode == 0 and "3 runs" in said and "fedsr-91, fdse-91" in said, (said, error)
    first = start(*flags, "--jobs", "2")
    said, error = first.communicate()
    assert first.returncode == 1 and "2 done" in said and "1 failed" in said, (said, error)
    assert "failed: python fedavg.py" in error and "no longer finite" in error
    assert Counter(r["method"] for r in recorded(tmp_path)) == {"fedavg": 1, "fdse": 1}
    pages = [(tmp_path / "out" / "tables" / f"{name}-smoke.md").read_text() for name in TWO]
    value = 100 * next(r for r in recorded(tmp_path) if r["method"] == "fdse")["best"]["ALL"]
    assert f"95 / {value:.2f} (1)" in pages[0] and "SMOKE scale" in pages[1]
    again = start(*flags)
    assert "1 failed" in again.communicate()[0] and len(recorded(tmp_path)) == 2


@dataclasses.dataclass(frozen=True)
class Sleep:
    """A stand-in for a run: a Python process that writes down that it is there and waits."""

    key: str
    module: str = "fedavg"
    command: str = "python sleep"


def sleeping(monkeypatch, tmp_path, seconds: float) -> None:
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    code = f"import sys, time; open(sys.argv[1], 'w'); time.sleep({seconds})"
    monkeypatch.setattr(runner, "command_of", lambda run, place: [sys.executable, "-c", code, str(tmp_path / run.key)])


def test_a_run_that_cannot_start_does_not_stop_the_rest(monkeypatch, tmp_path, capfd):
    sleeping(monkeypatch, tmp_path, 0)
    claim = runner.claim

    def failing(run):
        if run.key == "a":
            raise MemoryError("no room")
        return claim(run)
    monkeypatch.setattr(runner, "claim", failing)
    counts = runner.Local(1).run([Sleep("a"), Sleep("b")], runner.Place(), lambda run: False, {})
    assert counts["failed"] == 1 and counts["done"] == 1 and (tmp_path / "b").exists()
    assert "failed: python sleep" in (said := capfd.readouterr().err) and "no room" in said


def test_a_run_keeps_its_lock_when_its_runner_is_gone(monkeypatch, tmp_path):
    """A second runner passes it by until it has ended."""
    sleeping(monkeypatch, tmp_path, 30)
    left = []

    class Gone(BaseException):
        pass

    def started(process):
        left.append(process)
        raise Gone
    with pytest.raises(Gone):
        runner.execute(Sleep("a"), runner.Place(), lambda run: False, None, started)
    assert runner.execute(Sleep("a"), runner.Place(), lambda run: False) == ("skipped", "another runner is on it")
    left[0].kill()
    left[0].wait()
    with runner.claim(Sleep("a")):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_runs_at_once(monkeypatch, tmp_path, number):
    """Also one that has just started and one that starts meanwhile."""
    sleeping(monkeypatch, tmp_path, 60)
    popen = subprocess.Popen

    def slowly(*args, **kw):
        os.kill(os.getpid(), number)
        time.sleep(0.5)
        return popen(*args, **kw)
    monkeypatch.setattr(runner.subprocess, "Popen", slowly)
    started = time.monotonic()
    counts = runner.Local(1).run([Sleep("a"), Sleep("b")], runner.Place(), lambda run: False, {})
    assert counts["stopped"] and counts["interrupted"] == 1 and not counts["done"] and time.monotonic() - started < 20


def test_what_can_be_had(monkeypatch, tmp_path):
    """An archive that is there; one that its source would send, with its size; a page in its place; no answer."""
    place = runner.Place(str(tmp_path / "data"), str(tmp_path))
    kind, length = "application/zip", "12345"

    class Answer:
        def __init__(self):
            self.headers = email.message.Message()
            self.headers["Content-Type"], self.headers["Content-Length"] = kind, length
        __enter__ = lambda self: self
        __exit__ = lambda *_: None
    monkeypatch.setattr(runner.urllib.request, "urlopen", lambda request, timeout: Answer())
    assert runner.availability("pacs", place) == ("", 12345) and runner.availability("digits", place) == ("", 0)
    kind = "text/html; charset=utf-8"
    assert "by hand from https://drive" in runner.availability("vlcs", place)[0]

    def refused(*_, **__):
        raise OSError("no route")
    monkeypatch.setattr(runner.urllib.request, "urlopen", refused)
    assert "cannot be downloaded here (no route)" in runner.availability("pacs", place)[0]
    (tmp_path / "Homework3-PACS-master.zip").touch()
    assert runner.availability("pacs", place) == ("", 0)
    (tmp_path / "VLCS").mkdir()  # empty: of an archive, say
    assert "cannot be downloaded here" in runner.availability("vlcs", place)[0]
    (tmp_path / "data" / "vlcs").mkdir(parents=True)
    assert runner.availability("vlcs", place) == ("", 0)


def test_what_needs_the_runs_folders(monkeypatch, tmp_path):
    """FedCiR's Table 3 is measured once and then read; what cannot be measured is said and stops nothing."""
    (tmp_path / "fedcir-91.toml").write_text(
        'title = "t"\npaper = "fedcir"\nprotocol = "p"\ntrials = 0\n[[block]]\ntitle = "b"\ndataset = "digits"\n'
        'columns = [{name = "TFLOPs", value = "reach/tflops"}]\n[[block.row]]\nmethod = "FedAvg"\nmodule = "fedavg"\npublished = [[84.0]]\n')
    (tmp_path / "fedcir-fig91.toml").write_text(
        'title = "f"\npaper = "fedcir"\nprotocol = "p"\nfigure = "measure"\nmeasure = "risk"\n[[block]]\ntitle = "b"\ndataset = "digits"\n'
        'columns = [{name = "z", value = "best/ALL"}]\n[[block.row]]\nmethod = "FedAvg"\nmodule = "fedavg"\n')
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(record("fedavg", ["--dataset", "digits"])) + "\n")
    tables, place = read_tables(tmp_path), runner.Place()
    said = rt.measure(tables, Records(path), tmp_path, "paper", [0], place)
    assert len(said) == 2 and "not here is" in said[1] and not (tmp_path / "reach.jsonl").exists()
    monkeypatch.setattr(rt, "reach", lambda folder, place: {"tflops": 80.0})
    for _ in range(2):
        rt.measure(tables, Records(path), tmp_path, "paper", [0], place)
    assert len((tmp_path / "reach.jsonl").read_text().splitlines()) == 1
    cells = cells_of(tables[0], tables[0].block[0], tables[0].block[0].row[0], Records(path), "paper", [])
    assert cells[0].values == {0: 80.0}


@pytest.mark.slow
def test_two_runners_killed_at_random_moments(tmp_path):
    """Two runners in one folder, one of them killed again and again: every run is recorded once, none is lost."""
    flags = [*two_tables(tmp_path, "fedsr-91"), "--seeds", "3"]
    rng = random.Random(0)
    other = start(*flags)
    for _ in range(3):
        process = start(*flags, start_new_session=True)
        time.sleep(6 + 6 * rng.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert other.wait() == 0
    last = start(*flags)
    assert last.wait() == 0
    found = Counter((r["method"], r["args"]["seed"]) for r in recorded(tmp_path))
    assert found == {(m, s): 1 for m in ("fedavg", "fdse") for s in range(3)}


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path):
    flags = [*two_tables(tmp_path, "fedsr-91"), "--seeds", "4"]
    process = start(*flags)
    while not recorded(tmp_path):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    kept = recorded(tmp_path)
    assert start(*flags).wait() == 0
    assert recorded(tmp_path)[:len(kept)] == kept and len(recorded(tmp_path)) == 8


@pytest.mark.slow
def test_slurm_through_submitits_local_executor(tmp_path):
    pytest.importorskip("submitit")
    two_tables(tmp_path, "fedsr-91")
    tables = read_tables(tmp_path / "tables")
    path = tmp_path / "runs.jsonl"
    todo = [run for run, _ in rt.missing(tables, Records(path), "smoke", [0]).values()]
    executor = runner.Slurm(jobs=2, cluster="local", folder=str(tmp_path / "slurm"))
    counts = executor.run(todo, runner.Place(record=str(path)), lambda r: Records(path).get(r) is not None, {})
    assert counts == {"done": 2} and len(recorded(tmp_path)) == 2
    assert executor.run(todo, runner.Place(record=str(path)), None, {}) == {"skipped": 2}
