"""Claims: the rule's two questions by hand, every interval computed again with scipy from runs.jsonl, what a
run and a wider interval cannot do, and a page's words."""

import dataclasses
import json
import re
import statistics
import subprocess
import tomllib

from reproduce import claims
from reproduce.cells import missing
from reproduce.claims import (Answer, Claim, Measured, Method, Paper, Specification, answers, measure,
                              printed_gain, read_claims, read_paper, runs_for)
from reproduce.claims_pages import answer_words, gain_words
from reproduce.templates import in_words
from reproduce.records import known_arguments, REMOVED, Records, moved, work_of
from reproduce.tables import read_tables
from tests.conftest import ROOT, RUNS, read_json, stops
from tests.small_table import record, recorded, records_in, write_checked

import pytest
from scipy import stats

PAPERS = read_claims()
TABLES = read_tables()
ANSWERS = answers(PAPERS, TABLES, Records(RUNS))
LINES = [moved(line) for line in recorded(RUNS)]
for line in LINES:
    line["work"] = work_of(line["method"], known_arguments(line))


# A claim by hand

CLAIM = Claim("c", "FDSE gains", "q", "p", "fdse-1", "officecaltech", ["ALL"], ["FDSE", "FedAvg"],
              ["FDSE", "FedAvg"], "best/ALL", own="own", others=["slow"], seeds=3)
OWN = Specification("own", "at hand", "digits", "--rounds 20")
SLOW = Specification("slow", "a smaller rate", "digits", "--rounds 20 --lr 0.01", choices={"rate": "0.01"})
AXES = {"rate": {"0.05": "text", "0.01": "ours"}}
METHODS = {"FDSE": Method("fdse"), "FedAvg": Method("fedavg")}
A_PAPER = Paper("fdse", METHODS, AXES, {"own": OWN, "slow": SLOW}, [CLAIM], "", [], [], [])


def lines_of(values: dict[str, list[float]], curves: dict[str, list[float]] | None = None, *more: str,
             precision: str = "fp32") -> list[dict]:
    """A record of 20 rounds for each method and seed; a curve ends with round 20."""
    made = []
    for name, of_seeds in values.items():
        for seed, value in enumerate(of_seeds):
            flags = ["--dataset", "digits", "--rounds", "20", "--seed", str(seed), "--precision", precision,
                     *more]
            curve = (curves or {}).get(name, [0.9] * 5)
            rounds = range(21 - len(curve), 21)
            made.append(record(name, flags, best={"ALL": value}, curve={"round": [*rounds], "ALL": curve}))
    return made


def measured(tmp_path, lines: list[dict], printed: float = 4.0, deviation: float | None = None,
             trials: int = 0) -> Measured:
    records = records_in(tmp_path, lines)
    return measure(A_PAPER, CLAIM, OWN, records, printed, deviation, trials)


THREE = {"fdse": [0.91, 0.92, 0.93, 0.99], "fedavg": [0.90, 0.90, 0.90]}  # gains of 1, 2 and 3 points


def test_a_claim_of_three_seeds_by_hand(tmp_path):
    """2 +- 4.303 / sqrt 3; a seed that one method alone has does not count."""
    one = measured(tmp_path, lines_of(THREE))
    assert [*one.gains] == [0, 1, 2] and one.decided
    assert one.gain().interval == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)
    assert gain_words(one) == "+2.0 (-0.5 to +4.5)" and answer_words(one) == ("open", "open")


@pytest.mark.parametrize("gains, printed, above, as_printed", [
    ([3.9, 4.0, 4.1], 4.5, "yes", "yes"),        # 3.75 to 4.25 is above 3.5
    ([3.9, 4.0, 4.1], 7.0, "yes", "smaller"),    # and below 6
    ([3.9, 4.0, 4.1], 5.0, "yes", "open"),       # 4 lies inside
    ([-1.1, -1.0, -0.9], 4.0, "no", "smaller"),
    ([-1.0, 0.0, 1.0], 4.0, "open", "smaller"),
    ([-4.0, 1.0, 6.0], 4.0, "open", "open"),
])
def test_the_two_questions(tmp_path, monkeypatch, gains, printed, above, as_printed):
    """And a wider interval never makes an answer stronger."""
    values = {"fdse": [0.9 + gain / 100 for gain in gains], "fedavg": [0.9] * 3}
    one = measured(tmp_path, lines_of(values), printed)
    assert (one.above_zero, one.as_printed) == (above, as_printed)
    for level in (0.02, 0.005, 0.0001):
        wide = one.gain(level)
        monkeypatch.setattr(Measured, "gain", lambda *_, wide=wide: wide)
        assert one.above_zero in (above, "open") and one.as_printed in (as_printed, "open")
        monkeypatch.undo()


def test_the_printed_deviation_widens_the_second_question(tmp_path):
    """Gains of 2 +- 1 beside a printed one of 5 +- 4 of 4 trials: 4 less 2 is 1.96 standard errors of
    sqrt(1/3 + 4), Welch's interval has 3.5 degrees of freedom."""
    without, with_it = (measured(tmp_path, lines_of(THREE), 6.0, *of) for of in ((None, 0), (4.0, 4)))
    freedom = (1 / 3 + 4) ** 2 / ((1 / 3) ** 2 / 2 + 4 ** 2 / 3)
    half = stats.t.ppf(0.975, freedom) * (1 / 3 + 4) ** 0.5
    assert without.as_printed == "smaller" and 2 + half > 5 and with_it.as_printed == "open"
    far = measured(tmp_path, lines_of(THREE), 3 + half + 0.01, 4.0, 4)
    assert far.as_printed == "smaller"


def test_precisions_and_machines_are_never_pooled(tmp_path):
    """Two seeds at bf16 and three at fp32, of which one is from a GPU: two and two remain, the newest."""
    lines = lines_of(THREE) + lines_of({"fdse": [0.97, 0.98], "fedavg": [0.9, 0.9]}, precision="bf16")
    for one in lines:
        if one["args"]["seed"] == 2:
            one["hardware"] = one["hardware"] | {"gpu": "a GPU"}
        if one["args"]["precision"] == "bf16":
            one["finished"] = "2999-01-01T00:00:00Z"
    one = measured(tmp_path, lines)
    assert one.gains == pytest.approx({0: 7, 1: 8}) and not one.decided
    assert {of["args"]["precision"] for of in one.records} == {"bf16"} and one.older == 0


def test_two_rising_curves(tmp_path):
    """By 0.4 and 0.1 points a round over the last four of twenty: the gain rises by 1.2 in each seed."""
    curves = {"fdse": [0.1] * 15 + [0.8 + 0.004 * i for i in range(5)],
              "fedavg": [0.7 + 0.001 * i for i in range(20)]}
    one = measured(tmp_path, lines_of(THREE, curves))
    assert one.slopes["FDSE"][0] == pytest.approx(1.6) and one.slopes["FedAvg"][0] == pytest.approx(0.4)
    assert one.slope.difference == pytest.approx(1.2) and answer_words(one)[0] == "open"
    few = measured(tmp_path, lines_of(THREE, {"fdse": [0.9, 0.9], "fedavg": [0.9, 0.9]}))
    assert few.slope is None and few.gain()


def test_too_few_seeds_have_a_mean_and_no_answer(tmp_path):
    one = measured(tmp_path, lines_of({"fdse": [0.91, 0.92], "fedavg": [0.90, 0.90, 0.90]}))
    assert gain_words(one) == gain_words(one, "FedAvg") == "+1.5 (no interval: 2 of 3 seeds)"
    assert answer_words(one) == ("not decided, 2 of 3 seeds",) * 2
    five = dataclasses.replace(one, claim=dataclasses.replace(CLAIM, seeds=5))
    five.values = {name: dict.fromkeys(range(4), 0.0) for name in one.values}
    assert not five.decided and answer_words(five) == ("not decided, 4 of 5 seeds",) * 2
    none = measured(tmp_path, lines_of({"fdse": [0.91]}))
    assert gain_words(none) == "not measured yet" and answer_words(none) == ("not measured",) * 2


def test_a_record_that_differs_answers_nothing(tmp_path):
    lines = lines_of(THREE)
    write_checked(tmp_path, lines[0], "differs")
    records = records_in(tmp_path, lines)
    assert records.differs(records.every[0])
    assert measure(A_PAPER, CLAIM, OWN, records, 4.0, None, 0).gains == {}


def test_answer_b_by_hand(tmp_path):
    """One other specification, its gain -1 and its baseline within 2 points of a printed 88."""
    lines = lines_of(THREE) + lines_of({"fdse": [0.88] * 3, "fedavg": [0.89] * 3}, None, "--lr", "0.01")
    records = records_in(tmp_path, lines)
    of = [measure(A_PAPER, CLAIM, one, records, 4.0, None, 0) for one in (OWN, SLOW)]
    answer = Answer(A_PAPER, CLAIM, 4.0, [92.0, 88.0], of[0], [of[1]], [])
    assert answer.is_near(of[0]) and answer.is_near(of[1])
    for printed in (86.9, 91.1):
        assert not dataclasses.replace(answer, levels=[92.0, printed]).is_near(of[1])
    assert in_words("others", answer) == ("Of 1 other settings one has runs: slow, -1.0 (-1.0 to -1.0), with "
                                          "a baseline within 2 points of print.")
    axis, one, other = answer.moves_most()
    assert axis == "rate" and [one.difference, other.difference] == pytest.approx([2, -1])
    assert in_words("row", answer).startswith("| [FDSE](results/claims/fdse.md): ")


def test_what_a_claim_lacks(tmp_path):
    """Each run once, of the claims that are asked for: answer A first, both methods of a seed together."""
    records = records_in(tmp_path, [])
    lacking = missing([], records, "paper", [0, 1], runs_for([A_PAPER], {"claim-c"}, [0, 1], records))
    commands = [f"python {name}.py --dataset digits --rounds 20{rate} --seed {seed}"
                for rate in ("", " --lr 0.01") for seed in (0, 1) for name in ("fdse", "fedavg")]
    assert [one.run.command for one in lacking] == commands
    assert lacking[0].tables == ["claim-c"] and not [*runs_for([A_PAPER], {"claim-d"}, [0], records)]
    assert len([*runs_for([A_PAPER], {"claim-c"}, None, records)]) == 2 * 2 * 3


def test_a_claims_file_names_what_it_has():
    content = tomllib.loads((ROOT / "papers" / "fdse" / "claims.toml").read_text())
    content["claims"][0]["methods"] = ["FDSE", "FedX"]
    with pytest.raises(ValueError, match="fdse-all names a method"):
        read_paper("fdse", content)
    content["specifications"][1]["choices"] = {"tau": "3"}
    with pytest.raises(ValueError, match="tau = 3 is on no axis"):
        read_paper("fdse", content)
    stops("FDSE, M0: 0 published numbers", printed_gain, dataclasses.replace(CLAIM, columns=["M0"]),
          {table.id: table for table in TABLES}, code=2)


# The committed claims


def of_records(one: Measured, name: str) -> dict[int, float]:
    """{seed: percent} of a method under a specification, from the lines of runs.jsonl, by their arguments
    alone: those of the precision and the machine of the gain's records, of several runs the newest."""
    paper = next(of for of in PAPERS if one.claim in of.claims)
    kind, by_seed = kind_of(one.records[0]), {}
    for i, run in enumerate(one.runs[name]):
        for line in LINES:
            if line["work"] == run.work and kind_of(line) == kind:
                value = at(line, claims.metric_of(one.claim, one.specification), paper.methods[name].start)
                by_seed.setdefault(line["args"]["seed"], {})[i] = value
    cases = len(one.runs[name])
    return {seed: statistics.mean(of.values()) for seed, of in by_seed.items() if len(of) == cases}


def kind_of(record: dict) -> tuple[str, bool]:
    return record["args"]["precision"], bool(record["hardware"].get("gpu"))


def at(record: dict, metric: str, start: bool) -> float:
    """In percent."""
    value, path = record, metric.replace("TARGET", record["args"]["target"])
    for part in (path.replace("last/", "start/", 1) if start else path).split("/"):
        value = value[part]
    return 100 * value


WITH_GAIN = [(answer, one) for answer in ANSWERS for one in answer.measured if one.gain()]
NAMES = [f"{answer.claim.id}, {one.specification.name}" for answer, one in WITH_GAIN]


@pytest.mark.parametrize("answer, one", WITH_GAIN, ids=NAMES)
def test_every_gain_is_that_of_the_records(answer, one):
    """The plain and the corrected interval by scipy's paired test, and the answer to the first question."""
    a, b = (of_records(one, name) for name in one.claim.methods)
    shared = sorted(a.keys() & b.keys())
    assert shared == [*one.gains]
    test = stats.ttest_rel([a[seed] for seed in shared], [b[seed] for seed in shared])
    for level in (0.05 / 18, 0.05):
        low, high = test.confidence_interval(1 - level)
        assert one.gain(level).interval == pytest.approx((low, high), abs=1e-9)
    assert one.above_zero == ("yes" if low > 0 else "no" if high < 0 else "open")


def test_printed_gains_by_hand():
    by_id = {one.claim.id: one for one in ANSWERS}
    assert by_id["fedsr-outer"].printed == pytest.approx((93.5 + 93.6 - 85.9 - 86.2) / 2, abs=0.2)
    assert by_id["fdse-all"].printed == pytest.approx(87.15 - 82.60)
    assert by_id["fdse-all"].levels == pytest.approx([87.15, 82.60])
    assert by_id["fdse-all"].own.deviation == pytest.approx((2.06 ** 2 + 3.14 ** 2) ** 0.5)
    assert by_id["fedgala-10"].printed == pytest.approx(1.4) and by_id["fedgala-10"].own.deviation is None


def settings_of_answers_a() -> dict[str, dict]:
    """{a claim's id and method: what its runs do}, but for seed and target."""
    settings = {}
    for answer in ANSWERS:
        for name, runs in answer.own.runs.items():
            module, values = json.loads(runs[0].work)
            values = {k: v for k, v in values.items() if k not in ("seed", "target")}
            values |= REMOVED.get(module, {})  # flags that are gone, at the value that is left
            settings[f"{answer.claim.id}, {name}"] = {"module": module} | values
    return settings


def test_answers_a_keep_their_settings():
    """A default that moves does not move answer A: the claims file then needs a flag with the old value."""
    frozen = read_json(ROOT / "tests" / "answers_a.json")
    now = settings_of_answers_a()
    assert frozen["answers"].keys() == now.keys()
    for name, i in frozen["answers"].items():
        assert frozen["settings"][i].items() <= now[name].items(), name


def test_specifications_differ_from_answer_a_in_their_choices_alone():
    """No two of a claim's specifications are the same; illustrations name their data."""
    for answer in ANSWERS:
        names = [one.specification for one in (answer.own, *answer.others)]
        chosen = [tuple(sorted(answer.paper.choices(of).items())) for of in names]
        assert len(set(chosen)) == len(chosen) and not answer.own.specification.choices
        assert not any(of.other_data for of in names)
        assert all(one.specification.other_data for one in answer.illustrations)


def test_another_claims_runs_change_no_answer(tmp_path):
    """Nor its interval, corrected or not: the correction counts the claims at the rule's commit."""
    before = ANSWERS[0].own, [one.gain(0.05 / claims.CLAIMS) for one in ANSWERS[0].measured]
    more = lines_of({"fdse": [0.5] * 5, "fedavg": [0.4] * 5})
    every = answers(PAPERS, TABLES, records_in(tmp_path, recorded(RUNS) + more))
    assert [one.gain(0.05 / claims.CLAIMS) for one in every[0].measured] == before[1]
    assert len(ANSWERS) == claims.CLAIMS == 18


def test_the_rule_is_older_than_what_it_judges():
    """Its commit has the date that the pages name."""
    words = ["git", "-C", str(ROOT), "log", "--diff-filter=A", "--format=%cI", "--", "papers/RULE.md"]
    dates = subprocess.run(words, capture_output=True, text=True).stdout.split()
    if not dates:
        pytest.skip("this is no git checkout, or one without a history")
    assert claims.COMMITTED[:10] == dates[-1][:10]


def test_no_number_is_typed_into_the_words():
    """Gains and levels come from the templates; settings of a run may stand there."""
    for path in (ROOT / "papers").glob("*/claims.toml"):
        for line in path.read_text().splitlines():
            if line.startswith(("    \"", "idea", "says", "why")):
                words = re.sub(r"\{\{.*?\}\}", "", line)
                assert not re.search(r"[+-]\d|\d points?\b|\d\.\d+%", words), line
