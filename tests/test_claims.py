"""Claims: verdicts from intervals, every one computed again with scipy from runs.jsonl; a page's words."""

import dataclasses
import json
import re
import statistics

from reproduce.cells import missing
from reproduce.claims import (VERDICTS, Claim, Judged, Measured, Method, Paper, Reading, judge_all,
                              measure, printed_gain, read_claims, read_paper, rise_of, runs_for, verdict,
                              verdict_of)
from reproduce.claims_pages import gain_words
from reproduce.methods import method
from reproduce.records import Records, moved, work_of
from reproduce.tables import read_tables
from tests.conftest import ROOT
from tests.small_table import record, write_records

import pytest
from scipy import stats

PAPERS = read_claims()
TABLES = read_tables()
JUDGED = judge_all(PAPERS, TABLES, Records(ROOT / "results" / "runs.jsonl"))
LINES = [moved(json.loads(line)) for line in (ROOT / "results" / "runs.jsonl").open()]
for line in LINES:
    line["work"] = work_of(line["method"], method(line["method"]).Args, line["args"])
PAPER_OF = {claim.id: paper for paper in PAPERS for claim in paper.claims}


@pytest.mark.parametrize("interval, words", [
    ((0.1, 7.6), "holds"), ((0.1, 7.4), "holds, smaller"), ((-1.0, 7.4), "not found"),
    ((-1.0, 7.6), "cannot tell"), ((-3.0, -0.1), "reverse"), ((8.0, 9.0), "holds"),
])
def test_what_an_interval_says_of_a_printed_gain(interval, words):
    assert verdict(*interval, printed=7.5) == words and words in VERDICTS


def without_seed(work: str) -> str:
    return re.sub(r'"seed": \d+', "", work)


def of_records(one: Measured, name: str) -> dict[int, float]:
    """{seed: percent} of a method under a reading, from the lines of runs.jsonl, by their arguments alone: of
    several runs the newest, of two precisions the one with more seeds."""
    metric, by_precision = one.reading.metric or one.claim.metric, {}
    start = PAPER_OF[one.claim.id].methods[name].start
    for i, run in enumerate(one.runs[name]):
        for line in LINES:
            args = line["args"]
            if without_seed(line["work"]) == without_seed(run.work):
                of_seeds = by_precision.setdefault(args["precision"], {})
                of_seeds.setdefault(args["seed"], {})[i] = at(line, metric, start)
    whole = {}
    for precision, of_seeds in by_precision.items():
        cases = len(one.runs[name])
        full = {seed: of for seed, of in of_seeds.items() if len(of) == cases}
        whole[precision] = {seed: statistics.mean(of.values()) for seed, of in full.items()}
    return max(whole.values(), key=len)


def at(record: dict, metric: str, start: bool) -> float:
    """In percent."""
    value, path = record, metric.replace("TARGET", record["args"]["target"])
    for part in (path.replace("last/", "start/", 1) if start else path).split("/"):
        value = value[part]
    return 100 * value


WITH_GAIN = [(judged, one) for judged in JUDGED for one in judged.measured if one.gain()]


NAMES = [f"{judged.claim.id}, {one.reading.name}" for judged, one in WITH_GAIN]


@pytest.mark.parametrize("judged, one", WITH_GAIN, ids=NAMES)
def test_every_gain_is_that_of_the_records(judged, one):
    """The interval at the claim's level and the verdict, by scipy's paired test."""
    a, b = (of_records(one, name) for name in one.claim.methods)
    shared = sorted(a.keys() & b.keys())
    assert len(shared) == one.seeds > 2
    test = stats.ttest_rel([a[seed] for seed in shared], [b[seed] for seed in shared])
    for level in (0.05, judged.level):
        low, high = test.confidence_interval(1 - level)
        assert one.gain(level).interval == pytest.approx((low, high), abs=1e-9)
    words = verdict_of(judged, one)
    if words in [*VERDICTS][:5]:
        assert words == verdict(low, high, judged.printed)


def test_the_levels_share_the_error():
    """Among the claims with a reading that counts; the others' intervals are as wide."""
    assert sum(one.level for one in JUDGED if one.counting) == pytest.approx(0.05)
    assert len({one.level for one in JUDGED}) == 1
    assert 12 <= len(JUDGED) <= 16


def test_printed_gains_by_hand():
    by_id = {one.claim.id: one for one in JUDGED}
    assert by_id["fedsr-outer"].printed == pytest.approx((93.5 + 93.6 - 85.9 - 86.2) / 2, abs=0.2)
    assert by_id["fdse-all"].printed == pytest.approx(87.15 - 82.60)
    assert by_id["fdse-all"].deviation == pytest.approx((2.06 ** 2 + 3.14 ** 2) ** 0.5)
    assert by_id["fedcir-pacs"].printed == pytest.approx(58.81 - 52.61)
    assert by_id["fedgala-10"].printed == pytest.approx(1.4) and by_id["fedgala-10"].deviation is None


def test_the_readings_begin_with_the_text():
    """What counts is the nearest to the text, whatever it gives."""
    for judged in JUDGED:
        assert judged.measured[0].reading.name.startswith("text")
        names = [name for paper in PAPERS if paper.id == judged.paper for name in paper.readings]
        order = [names.index(one.reading.name) for one in judged.measured]
        assert order == sorted(order)
        for one in judged.measured:
            if one is judged.counting:
                break
            assert verdict_of(judged, one) not in [*VERDICTS][:5]


def test_no_number_is_typed_into_the_words():
    """Gains and levels come from the templates; settings of a run may stand there."""
    for path in (ROOT / "claims").glob("*.toml"):
        for line in path.read_text().splitlines():
            if line.startswith(("    \"", "idea", "says", "why")):
                words = re.sub(r"\{\{.*?\}\}", "", line)
                assert not re.search(r"[+-]\d|\d points?\b|\d\.\d+%", words), line


# A claim by hand

CLAIM = Claim("c", "FDSE gains", "q", "p", "fdse-1", "officecaltech", ["ALL"], ["FDSE", "FedAvg"],
              ["FDSE", "FedAvg"], "best/ALL", readings=["digits"])
OF_DIGITS = Reading("digits", "at hand", "digits", "--rounds 20")
METHODS = {"FDSE": Method("fdse"), "FedAvg": Method("fedavg")}
A_PAPER = Paper("fdse", METHODS, {"digits": OF_DIGITS}, [CLAIM], "", [], [])


def measured(tmp_path, values: dict[str, list[float]], curve: list[float], every: int = 1) -> Measured:
    made = []
    for name, of_seeds in values.items():
        for seed, value in enumerate(of_seeds):
            flags = ["--dataset", "digits", "--rounds", "20", "--seed", str(seed), "--precision", "fp32"]
            rounds = [20 - every * i for i in reversed(range(len(curve)))]
            made.append(record(name, flags, best={"ALL": value}, curve={"round": rounds, "ALL": curve}))
    return measure(A_PAPER, CLAIM, OF_DIGITS, Records(write_records(tmp_path / "r.jsonl", made)))


def test_a_claim_of_three_seeds_by_hand(tmp_path):
    """Gains of 1, 2 and 3 points: 2 +- 4.303 / sqrt 3."""
    values = {"fdse": [0.91, 0.92, 0.93, 0.99], "fedavg": [0.90, 0.90, 0.90]}
    one = measured(tmp_path, values, [0.9] * 10)
    assert one.seeds == 3 and one.gain().interval == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)
    assert gain_words(one) == "+2.0 (-0.5 to +4.5)" and one.rise == pytest.approx(0)
    assert verdict_of(Judged(CLAIM, "fdse", 4.55, None, [one]), one) == "not found"
    assert verdict_of(Judged(CLAIM, "fdse", 4.4, None, [one]), one) == "cannot tell"
    made = [of | {"args": of["args"] | {"precision": "bf16"}} for of in one.records[:4]]  # FDSE's alone
    records = Records(write_records(tmp_path / "more.jsonl", made + one.records[1:]))
    assert [*measure(A_PAPER, CLAIM, OF_DIGITS, records).gains] == [1, 2]


def test_a_curve_that_rises_has_no_verdict(tmp_path):
    """A point and more over the last four of twenty rounds, whatever was before."""
    values = {"fdse": [0.91, 0.92, 0.93], "fedavg": [0.90, 0.90, 0.90]}
    for step, words in ((0.004, "not converged"), (0.002, "cannot tell")):
        curve = [0.1] * 15 + [0.8 + step * i for i in range(5)]
        one = measured(tmp_path, values, curve)
        assert one.rise == one.rises["FedAvg"] == pytest.approx(400 * step)
        judged = Judged(CLAIM, "fdse", 4.0, None, [one])
        assert verdict_of(judged, one) == words
        assert (judged.counting is one) == (words == "cannot tell")
    one = measured(tmp_path, values, [0.9, 0.9])
    assert one.rise is None and verdict_of(Judged(CLAIM, "fdse", 4.0, None, [one]), one) == "no curve"
    assert rise_of([], "best/ALL") is None
    sparse = measured(tmp_path, values, [0.1, 0.8, 0.81, 0.82], every=6)  # at 2, 8, 14, 20: the last three
    assert sparse.rise == pytest.approx(4 / 6)


def test_too_few_seeds_have_a_mean_and_no_verdict(tmp_path):
    one = measured(tmp_path, {"fdse": [0.91, 0.92], "fedavg": [0.90, 0.90, 0.90]}, [0.9] * 5)
    judged = Judged(CLAIM, "fdse", 4.0, None, [one])
    assert gain_words(one) == "+1.5 (no interval: 2 seeds)" and judged.verdict == "too few seeds"
    none = measured(tmp_path, {"fdse": [0.91]}, [0.9] * 5)
    assert gain_words(none) == "not measured yet"
    assert Judged(CLAIM, "fdse", 4, None, [none]).verdict == "not measured"


def test_what_a_claim_lacks(tmp_path):
    """Each run once, of the claims that are asked for."""
    records = Records(write_records(tmp_path / "r.jsonl", []))
    lacking = missing([], records, "paper", [0, 1], runs_for([A_PAPER], {"claim-c"}, [0, 1], records))
    commands = [f"python {name}.py --dataset digits --rounds 20 --seed {seed}"
                for seed in (0, 1) for name in ("fdse", "fedavg")]
    assert [one.run.command for one in lacking] == commands
    assert lacking[0].tables == ["claim-c"] and not [*runs_for([A_PAPER], {"claim-d"}, [0], records)]


def test_a_claims_file_names_what_it_has():
    content = {"methods": {"A": {"module": "fdse"}}, "idea": "", "decides": [], "tables": [],
               "readings": [{"name": "text", "why": "w", "dataset": "digits"}],
               "claims": [{"id": "c", "says": "", "quotation": "", "place": "", "table": "fdse-1",
                           "dataset": "d", "columns": [], "rows": [], "methods": ["A", "B"],
                           "metric": "best/ALL"}]}
    with pytest.raises(ValueError, match="c names a method"):
        read_paper("fdse", content)
    with pytest.raises(ValueError, match="FDSE, M0: 0 published numbers"):
        printed_gain(dataclasses.replace(CLAIM, columns=["M0"]), {table.id: table for table in TABLES})
