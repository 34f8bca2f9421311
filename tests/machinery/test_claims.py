"""Claims: the rule's words by hand, every interval computed again with scipy from runs.jsonl, what a seed, a
precision, a device or another claim's run cannot move, the search, and a page's words."""

import dataclasses
import itertools
import re
import statistics
import subprocess
import tomllib
from types import SimpleNamespace

from reproduce import claims
from reproduce.cells import missing
from reproduce.claims import (Answer, Claim, Measured, Method, Paper, Specification, answers, measure,
                              metric_of, printed_gain, read_paper, runs_for, runs_of)
from reproduce.claims_pages import (answer_words, functions, gain_words, learned_words,
                                    differing, missing_words, row_of, sentence_of, setting_row,
                                    where_learned)
from reproduce.records import known_arguments
from tests.committed import PAPERS, RECORDS, TABLES
from tests.conftest import ROOT, RUNS, read_json, stops
from tests.small_table import record, recorded, records_in

import pytest
from scipy import stats

ANSWERS = answers(PAPERS, TABLES, RECORDS)


# A claim by hand

CLAIM = Claim("c", "FDSE gains", "q", "p", "fdse-1", "officecaltech", ["ALL"], ["FDSE", "FedAvg"],
              ["FDSE", "FedAvg"], "best/ALL", own="own", others=["slow"], seeds=3)
OWN = Specification("own", "at hand", "digits", "fp32", "cpu", "--rounds 20")
SLOW = Specification("slow", "a smaller rate", "digits", "fp32", "cpu", "--rounds 20 --lr 0.01")
METHODS = {"FDSE": Method("fdse"), "FedAvg": Method("fedavg")}
A_PAPER = Paper("fdse", "FDSE", "CVPR", 1, "", [], METHODS, {"own": OWN, "slow": SLOW}, [CLAIM])


def lines_of(values: dict[str, list[float]], *more: str, precision: str = "fp32", losses: dict | None = None,
             sources: dict | None = None, **of_each) -> list[dict]:
    """A record of 20 rounds for each method and seed."""
    made = []
    for name, of_seeds in values.items():
        for seed, value in enumerate(of_seeds):
            flags = ["--dataset", "digits", "--rounds", "20", "--seed", str(seed), "--precision", precision,
                     *more]
            logs = {"loss": [2.0, losses[name]]} if losses else {}
            last = {"ALL": sources[name]} if sources else {}
            made.append(record(name, flags, best={"ALL": value}, last=last, logs=logs, **of_each))
    return made


def measured(tmp_path, lines: list[dict], *printed, specification: Specification = OWN) -> Measured:
    """`printed`: the gain, its deviation, the trials behind it."""
    return measure(A_PAPER, CLAIM, specification, records_in(tmp_path, lines), *(printed or (4.0, None, 0)))


THREE = {"fdse": [0.91, 0.92, 0.93], "fedavg": [0.90, 0.90, 0.90]}  # gains of 1, 2 and 3 points


def test_a_claim_of_three_seeds_by_hand(tmp_path):
    """2 +- 4.303 / sqrt 3."""
    one = measured(tmp_path, lines_of(THREE))
    assert [*one.gains] == [0, 1, 2] and one.decided
    assert one.gain().interval == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)
    assert gain_words(one) == "+2.0 (-0.5 to +4.5)" and answer_words(one) == "open"
    assert one.level("FDSE") == pytest.approx(92)


@pytest.mark.parametrize("gains, printed, words", [
    ([3.9, 4.0, 4.1], 4.1, "gains, as printed"),  # 3.75 to 4.25
    ([3.9, 4.0, 4.1], 4.3, "gains, less than printed"),
    ([3.9, 4.0, 4.1], 3.7, "gains"),
    ([-1.1, -1.0, -0.9], 4.0, "loses, less than printed"),
    ([-1.0, 0.0, 1.0], 4.0, "open, less than printed"),
    ([-4.0, 1.0, 6.0], 4.0, "open"),
])
def test_the_words_of_an_answer(tmp_path, gains, printed, words):
    values = {"fdse": [0.9 + gain / 100 for gain in gains], "fedavg": [0.9] * 3}
    assert answer_words(measured(tmp_path, lines_of(values), printed, None, 0)) == words


def test_the_printed_deviation_widens_the_comparison_with_print(tmp_path):
    """Gains of 2 +- 1 beside a printed one with a deviation of 4 of 4 trials: Welch's interval."""
    freedom = (1 / 3 + 4) ** 2 / ((1 / 3) ** 2 / 2 + 4 ** 2 / 3)
    half = stats.t.ppf(0.975, freedom) * (1 / 3 + 4) ** 0.5
    near, far = (measured(tmp_path, lines_of(THREE), 2 + half + more, 4.0, 4) for more in (-0.01, 0.01))
    assert (near.beside_print, far.beside_print) == ("", "less than printed")
    assert measured(tmp_path, lines_of(THREE), 2 + half - 0.01, None, 0).beside_print == "less than printed"


def test_too_few_seeds_have_a_mean_and_no_answer(tmp_path):
    one = measured(tmp_path, lines_of({"fdse": [0.91, 0.92], "fedavg": [0.90, 0.90, 0.90]}))
    assert gain_words(one) == gain_words(one, "FedAvg") == "+1.5 (no interval: 2 of 3 seeds)"
    assert answer_words(one) == "2 of 3 seeds" and not one.decided
    none = measured(tmp_path, lines_of({"fdse": [0.91]}))
    assert gain_words(none) == answer_words(none) == "not measured"


# What cannot move an answer


@pytest.mark.parametrize("more", [
    lines_of({"fdse": [0.5] * 4, "fedavg": [0.9] * 4})[3::4],  # a seed pair that is not planned
    lines_of({"fedavg": [0.1] * 4})[3:],
    lines_of({"fdse": [0.5] * 5, "fedavg": [0.9] * 5}, precision="bf16", finished="2999"),
    lines_of({"fdse": [0.5] * 5, "fedavg": [0.9] * 5}, hardware={"gpu": "a GPU"}, finished="2999"),
    lines_of({"fdse": [0.5] * 3, "fedavg": [0.9] * 3}, "--lr", "0.01"),
], ids=["a fourth seed pair", "a fourth seed of FedAvg", "another precision", "a GPU", "another setting"])
def test_what_moves_no_answer(tmp_path, more):
    """Neither the answer nor the levels, nor what was learned."""
    def all_of(one):
        return one.gains, one.gain(), answer_words(one), one.level("FedAvg"), one.learned("FedAvg")
    lines = lines_of(THREE, losses={"fdse": 1.0, "fedavg": 0.5})
    assert all_of(measured(tmp_path, lines + more)) == all_of(measured(tmp_path, lines))


def test_a_seed_that_one_method_has_changes_no_level(tmp_path):
    """Levels, too, are of the paired seeds."""
    lines = lines_of({"fdse": [0.91, 0.92], "fedavg": [0.90, 0.90, 0.10]})
    one = measured(tmp_path, lines)
    assert one.level("FedAvg") == pytest.approx(90) and one.learned("FedAvg").loss is None


def test_another_claims_runs_change_no_answer(tmp_path):
    more = lines_of({"fdse": [0.5] * 5, "fedavg": [0.4] * 5})
    every = answers(PAPERS, TABLES, records_in(tmp_path, recorded(RUNS) + more))
    assert [one.gain() for one in every[0].measured] == [one.gain() for one in ANSWERS[0].measured]


# Had it learned?


@pytest.mark.parametrize("sources, mark", [({"fdse": 0.879, "fedavg": 0.9}, True),
                                           ({"fdse": 0.881, "fedavg": 0.9}, False)])
def test_the_mark_of_what_had_not_learned(tmp_path, sources, mark):
    """More than 2 points below the baseline on the sources."""
    claim = dataclasses.replace(CLAIM, metric="best/target")
    lines = lines_of(THREE, "--protocol", "lodo", "--target", "d0", losses={"fdse": 1.32, "fedavg": 0.004},
                     sources=sources)
    for line in lines:
        line["best"]["target"] = line["best"]["ALL"]
    lodo = dataclasses.replace(OWN, flags="--rounds 20 --protocol lodo --target d0")
    one = measure(A_PAPER, claim, lodo, records_in(tmp_path, lines), 4.0, None, 0)
    assert one.learned("FDSE").loss == 1.32 and one.not_learned == mark
    assert ("was behind" in learned_words(one)) == mark
    words = learned_words(one)
    assert "1.32 (FedAvg 0.004)" in words and f"{100 * sources['fdse']:.1f}%" in words


def test_in_domain_there_is_no_mark(tmp_path):
    one = measured(tmp_path, lines_of(THREE, losses={"fdse": 1.32, "fedavg": 0.1},
                                      sources={"fdse": 0.1, "fedavg": 0.9}))
    assert one.learned("FDSE").sources is None and not one.not_learned
    assert learned_words(one) == "FDSE had trained: training loss after the last round 1.32 (FedAvg 0.10)."


# Which network is tested


def test_both_readings_of_one_run(tmp_path):
    """What the server sends, and each client's network after its local training: of both, or of one."""
    lines = lines_of(THREE)
    for line in lines:
        trained = {"ALL": line["best"]["ALL"] + (0.05 if line["method"] == "fdse" else 0.01)}
        line["after_training"] = {"best": trained, "last": trained, "curve": line["curve"]}
    both = dataclasses.replace(OWN, after_training=["FDSE", "FedAvg"])
    alone = dataclasses.replace(OWN, after_training=["FDSE"])
    differences = [measured(tmp_path, lines, specification=of).difference for of in (OWN, both, alone)]
    assert differences == pytest.approx([2, 6, 7])
    without = [{name: of for name, of in line.items() if name != "after_training"} for line in lines]
    assert not measured(tmp_path, without, specification=both).gains
    assert measured(tmp_path, without).gains


# A search

SEARCHED = dataclasses.replace(OWN, name="searched", search_seed=7,
                               search={"FDSE": ["--lr 0.01", "--lr 0.02"],
                                       "FedAvg": ["--lr 0.1", "--lr 0.3"]})


def draws(scores: dict[tuple[str, str], float]) -> list[dict]:
    """A record of each draw: 25 evaluations, of which only the last five count; the worse the draw, the
    better the others."""
    made = []
    for (name, lr), score in scores.items():
        flags = ["--dataset", "digits", "--rounds", "20", "--seed", "7", "--lr", lr, "--precision", "fp32"]
        values = [1 - score] * 20 + [score] * 5
        curve = {"round": [*range(1, 26)], "val": values, "ALL": values}
        made.append(record(name, flags, best={"ALL": 0.0}, curve=curve))
    return made


def test_a_search_takes_the_best_draw_and_of_equals_the_earlier(tmp_path):
    scores = {("fdse", "0.01"): 0.5, ("fdse", "0.02"): 0.7, ("fedavg", "0.1"): 0.6, ("fedavg", "0.3"): 0.6}
    records = records_in(tmp_path, draws(scores))
    flags = [runs_of(A_PAPER, CLAIM, SEARCHED, name, 0, records)[0].args.lr for name in CLAIM.methods]
    assert flags == [0.02, 0.1]


def test_a_search_asks_for_its_draws_first(tmp_path):
    """And has no answer while one is missing."""
    paper = dataclasses.replace(A_PAPER, specifications={"own": SEARCHED, "slow": SLOW})
    records = records_in(tmp_path, draws({("fdse", "0.01"): 0.5}))
    runs = [run for part, run in runs_for([paper], {"claim-c"}, [0], records) if part == "claim-c, own"]
    assert [(run.module, run.args.lr, run.seed) for run in runs] == [
        ("fdse", 0.01, 7), ("fdse", 0.02, 7), ("fedavg", 0.1, 7), ("fedavg", 0.3, 7)]
    assert not measure(A_PAPER, CLAIM, SEARCHED, records, 4.0, None, 0).gains


# Runs and words


def test_what_a_claim_lacks(tmp_path):
    """Each run once, of the claims that are asked for: the paper's own setting first, both methods of a seed
    together, each at the precision and on the device that the setting names."""
    records = records_in(tmp_path, [])
    lacking = missing([], records, "paper", [0, 1], runs_for([A_PAPER], {"claim-c"}, [0, 1], records))
    commands = []
    for rate in ("", " --lr 0.01"):
        for seed, name in itertools.product((0, 1), ("fdse", "fedavg")):
            commands.append(f"python {name}.py --dataset digits --rounds 20{rate} --precision fp32 "
                            f"--device cpu --seed {seed}")
    assert [one.run.command for one in lacking] == commands
    assert lacking[0].tables == ["claim-c"] and not [*runs_for([A_PAPER], {"claim-d"}, [0], records)]
    assert len([*runs_for([A_PAPER], {"claim-c"}, None, records)]) == 2 * 2 * 3


def test_the_sentence_and_the_row_of_a_claim(tmp_path):
    one = measured(tmp_path, lines_of({"fdse": [0.94, 0.941, 0.939], "fedavg": [0.9] * 3}))
    answer = Answer(A_PAPER, CLAIM, 4.0, [92.0, 88.0], one, [], [])
    assert sentence_of(answer) == ("**FDSE gains over FedAvg**: +4.0 (+3.8 to +4.2) points, as printed. The "
                                   "paper prints +4.0.")
    assert row_of(answer, "there") == ["[FDSE over FedAvg](there/fdse.md), officecaltech (p, ALL)", "+4.0",
                                       "gains, as printed: +4.0 (+3.8 to +4.2)", "-", "-"]
    none = dataclasses.replace(answer, own=measured(tmp_path, []), others=[one])
    assert row_of(none, "")[2::2] == ["not measured", "own: +4.0 (+3.8 to +4.2)"]
    assert "Not measured yet" in sentence_of(none)
    better = measured(tmp_path, lines_of({"fdse": [0.95, 0.951, 0.949], "fedavg": [0.9] * 3}))
    second = dataclasses.replace(answer, claim=dataclasses.replace(CLAIM, id="d"), own=better)
    assert functions([answer, second])["over"]("d", CLAIM.id, OWN.name) == "+1.0 (+1.0 to +1.0)"


def an_answer(tmp_path, *gains: float, **parts) -> Answer:
    """Of a claim with these gains by seed over 90%; printed is +5.0."""
    values = {"fdse": [0.9 + gain / 100 for gain in gains], "fedavg": [0.9] * len(gains)}
    own = measured(tmp_path, lines_of(values), 5.0, None, 0)
    return Answer(A_PAPER, CLAIM, 5.0, [92.0, 88.0], own, parts.get("others", []), [])


LOSES = "-1.0 (-1.2 to -0.8)"


@pytest.mark.parametrize("gains, said, short", [
    ((-1.1, -1.0, -0.9), f"**FDSE loses against FedAvg**: {LOSES} points, less than printed. The paper",
     f"loses: {LOSES}"),
    ((-4.0, 1.0, 6.0), "**Open whether FDSE gains over FedAvg**: +1.0 (-11.4 to +13.4) points. The paper",
     "open: +1.0 (-11.4 to +13.4)"),
    ((2.0, 3.0), "**Not decided**: +2.5 (no interval: 2 of 3 seeds) points so far. The paper prints +5.0.",
     "2 of 3 seeds: +2.5 (no interval: 2 of 3 seeds)"),
])
def test_the_sentences_of_each_answer(tmp_path, gains, said, short):
    answer = an_answer(tmp_path, *gains)
    assert sentence_of(answer).startswith(said) and row_of(answer, "")[2] == short


def test_a_command_by_what_differs():
    first = "a.py --lr 1 --clip"
    assert differing("a.py --lr 1 --lr 2 --clip --mu 0", first) == "--lr 2 --mu 0"
    for other in ("a.py --lr 2", "b.py --lr 1 --clip"):  # nothing takes --clip away
        assert differing(other, first) == other


def test_what_is_answered_and_what_is_missing(tmp_path, monkeypatch):
    """One claim is answered, one has runs in another setting alone; of six runs each three are there."""
    there = an_answer(tmp_path, 3.9, 4.0, 4.1)
    none = an_answer(tmp_path, others=[there.own])
    records = records_in(tmp_path, lines_of({"fdse": [0.9], "fedavg": [0.9, 0.9]}))
    assert missing_words(none, records).endswith(
        "begins with the paper's own setting: 3 trainings on one processor core (time unknown). The other "
        "settings lack 6 trainings.")
    assert functions([there])["level"]("c", "own") == "90.0%"
    row = ["own", "+4.0 (+3.8 to +4.2)", "gains, less than printed", "-", "-", "90.0", "3 of 3", "fp32, cpu"]
    assert setting_row(there, there.own) == row
    monkeypatch.setattr(Measured, "not_learned", True)
    assert row_of(there, "")[2] == "gains, less than printed, **behind**: +4.0 (+3.8 to +4.2)"
    monkeypatch.setattr(Measured, "alike", False)
    assert setting_row(there, there.own)[2] == "-"


def test_where_a_method_had_learned_stands_beside_where_it_had_not():
    def one(gain, **changes):
        usual = {"difference": gain, "decided": True, "alike": True, "not_learned": False,
                 "specification": SimpleNamespace(other_data=""), "records": [gain]}
        return SimpleNamespace(**usual | changes)

    others = [one(1.0), one(-2.0), one(9.0, not_learned=True), one(9.0, alike=False), one(9.0, decided=False)]
    lost = SimpleNamespace(own=one(-9.0, not_learned=True), others=others)
    assert where_learned(lost) == "not behind in 2 (-2.0 to +1.0), behind in 1 (+9.0)"
    assert not where_learned(SimpleNamespace(own=one(1.0), others=others[3:]))


def test_a_claims_file_names_what_it_has():
    content = tomllib.loads((ROOT / "papers" / "fdse" / "claims.toml").read_text(encoding="utf-8"))
    content["claims"][0]["methods"] = ["FDSE", "FedX"]
    with pytest.raises(ValueError, match="fdse-all names a method"):
        read_paper("fdse", content)
    del content["specifications"][1]["device"]
    with pytest.raises(TypeError, match="device"):
        read_paper("fdse", content)
    stops("FDSE, M0: 0 published numbers", printed_gain, dataclasses.replace(CLAIM, columns=["M0"]),
          {table.id: table for table in TABLES}, code=2)


# The committed claims


RECORDED = [(line, vars(known_arguments(line))) for line in RECORDS.every]


def by_hand(answer: Answer, one: Measured, name: str) -> dict[int, float]:
    """{seed: percent} of a method under a specification, from the lines of runs.jsonl, by their arguments
    alone, of several runs the newest."""
    of, by_seed = one.specification, {}
    runs = runs_of(answer.paper, answer.claim, of, name, 0, RECORDS)
    for i, run in enumerate(runs):
        for line, known in RECORDED:
            on = "gpu" if line["hardware"].get("gpu") else "cpu"
            if (line["args"]["precision"], on) != (of.precision, of.device):
                continue
            same = all(known[field] == value for field, value in vars(run.args).items()
                       if field in line["args"] and field not in ("seed", "device", "precision"))
            if same and line["method"] == run.module.removeprefix("baselines."):
                value = at(line, metric_of(answer.claim, of, name), answer.paper.methods[name].start)
                if value is not None and line["args"]["seed"] < answer.claim.seeds:
                    by_seed.setdefault(line["args"]["seed"], {})[i] = value
    return {seed: statistics.mean(of.values()) for seed, of in by_seed.items() if len(of) == len(runs)}


def at(record: dict, metric: str, start: bool) -> float | None:
    """In percent."""
    value, path = record, metric.replace("TARGET", record["args"]["target"])
    for part in (path.replace("last/", "start/", 1) if start else path).split("/"):
        value = value.get(part) if value else None
    return None if value is None else 100 * value


WITH_GAIN = [(answer, one) for answer in ANSWERS for one in answer.measured if one.gain()]
NAMES = [f"{answer.claim.id}, {one.specification.name}" for answer, one in WITH_GAIN]


@pytest.mark.parametrize("answer, one", WITH_GAIN, ids=NAMES)
def test_every_gain_is_that_of_the_records(answer, one):
    """The interval by scipy's paired test, and the answer."""
    a, b = (by_hand(answer, one, name) for name in answer.claim.methods)
    shared = sorted(a.keys() & b.keys())
    assert shared == [*one.gains]
    test = stats.ttest_rel([a[seed] for seed in shared], [b[seed] for seed in shared])
    low, high = test.confidence_interval(0.95)
    assert one.gain().interval == pytest.approx((low, high), abs=1e-9)
    if one.decided:
        assert one.verdict == ("gains" if low > 0 else "loses" if high < 0 else "open")


def test_printed_gains_by_hand():
    by_id = {one.claim.id: one for one in ANSWERS}
    assert by_id["fedsr-outer"].printed == pytest.approx((93.5 + 93.6 - 85.9 - 86.2) / 2, abs=0.2)
    assert by_id["fdse-all"].printed == pytest.approx(87.15 - 82.60)
    assert by_id["fdse-all"].levels == pytest.approx([87.15, 82.60])
    assert by_id["fdse-all"].own.deviation == pytest.approx((2.06 ** 2 + 3.14 ** 2) ** 0.5)
    assert by_id["fedgala-10"].printed == pytest.approx(1.4) and by_id["fedgala-10"].own.deviation is None
    assert by_id["fedadg-rotatedmnist"].printed == pytest.approx((89.9 + 90.2 - 85.9 - 86.2) / 2)


def test_the_papers_own_settings_keep_their_values():
    """A default that moves does not move a paper's own setting: the claims file then needs a flag with the
    old value."""
    frozen, seen = read_json(ROOT / "tests" / "own_settings.json"), set()
    for answer in ANSWERS:
        for name in answer.claim.names:
            run = runs_of(answer.paper, answer.claim, answer.own.specification, name, 0, RECORDS)[0]
            now, key = {"module": run.module} | vars(run.args), f"{answer.claim.id}, {name}"
            assert frozen["settings"][frozen["answers"][key]].items() <= now.items(), key
            seen.add(key)
    assert seen == frozen["answers"].keys()


def test_settings_differ_and_illustrations_name_their_data():
    for answer in ANSWERS:
        own = [answer.own, *answer.others]
        names = [one.specification.name for one in answer.measured]
        assert len(set(names)) == len(names)
        assert not any(one.specification.other_data for one in own)
        assert all(one.specification.other_data for one in answer.illustrations)


def test_the_answers_of_the_earlier_rule_are_frozen():
    lines = (ROOT / "papers" / "answers-2026-11-26.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 102
    (of_fdse,) = [line for line in lines if line.startswith("fdse,fdse-avg,the paper's own setting,")]
    assert of_fdse.split(",")[6:9] == ["5.6962", "3.0658", "8.3267"]


def test_the_rule_is_older_than_what_it_judges():
    """A commit of it has the date that the pages name."""
    words = ["git", "-C", str(ROOT), "log", "--follow", "--format=%cI", "--", "papers/RULE.md"]
    dates = subprocess.run(words, capture_output=True, text=True).stdout.split()
    if not dates:
        pytest.skip("this is no git checkout, or one without a history")
    assert claims.RULE in {date[:10] for date in dates}
    assert f" {claims.RULE}," in (ROOT / "papers" / "RULE.md").read_text(encoding="utf-8")


def test_no_number_is_typed_into_the_words():
    """Gains and levels come from the templates; settings of a run may stand there."""
    for path in (ROOT / "papers").glob("*/claims.toml"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("    \"", "idea", "says")):
                words = re.sub(r"\{\{.*?\}\}", "", line)
                assert not re.search(r"[+-]\d|\d points?\b|\d\.\d+%", words) or "--lr" in words, line
