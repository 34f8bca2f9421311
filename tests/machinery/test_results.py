"""The records, and runs no better than chance. What is made of records: test_rendering.py, test_claims.py."""

import re
import subprocess

from plumbing.run.results import next_step, untrained
from tests import committed
from tests.conftest import ROOT, RUNS, one_run, parsed, run_all, small_images
from tests.small_table import recorded

import pytest
from scipy.stats import binom

LINES = recorded(RUNS)
RECORDS = committed.RECORDS.newest  # the newest of each run


def start_of(method: str) -> str:
    """With what a method's command begins."""
    if (ROOT / "baselines" / f"{method}.py").exists():
        return f"python -m baselines.{method} "
    if method.startswith("official."):
        return f"python -m {method} "
    return f"python {method}.py "


def test_every_record_says_where_it_comes_from():
    assert len({(run["id"], run["finished"]) for run in LINES}) == len(LINES)
    for run in LINES:
        assert run["command"].startswith(start_of(run["method"]))
        dirty = run["dirty"] if "dirty" in run else run["uncommitted_changes"]  # its name until 0.2.0
        assert run["commit"] and not dirty
        assert run["curve"]["round"][-1] == run["args"]["rounds"]
        assert {"torch", "numpy"} <= run["versions"].keys()


def test_no_record_ever_vanishes():
    """Each that history once had is in runs.jsonl, or in withdrawn.jsonl with a reason."""
    command = ["git", "log", "-p", "--format=", "--", "results/runs.jsonl"]
    history = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    removed = set(re.findall(r'^-\{"id": "([0-9a-f]+)"', history, re.MULTILINE))
    withdrawn = recorded(ROOT / "results" / "withdrawn.jsonl")
    assert all(record["withdrawn"]["reason"] for record in withdrawn) and len(withdrawn) == 322
    kept = {record["id"] for record in (*LINES, *withdrawn)}
    assert removed <= kept


def test_a_records_best_round_is_that_of_its_curve():
    for run in RECORDS:
        curve, best = run["curve"], run["best"]
        if run["args"]["protocol"] == "linear":  # without labels, no validation: the last round
            assert best == run["last"] and abs(curve["target"][-1] - run["last"]["target"]) < 1e-5
        else:
            i = curve["val"].index(max(curve["val"]))
            assert curve["round"][i] == best["round"] and abs(curve["ALL"][i] - best["ALL"]) < 1e-5


@pytest.mark.parametrize("of_classes", [[100] * 10, [500, 100, 100]])
def test_the_border_is_that_of_the_binomial_interval(of_classes):
    n, settings = sum(of_classes), parsed("fedavg")
    _, highest = binom.interval(0.95, n, max(of_classes) / n)
    for hits in range(n + 1):
        assert bool(untrained(settings, {"ALL": hits / n}, of_classes)) == (hits <= highest), hits


def test_a_few_images_tell_nothing():
    """By chance four of four are right in 6% of the cases, six of six in 1.6%."""
    settings = parsed("fedavg")
    few = "4 tested images are too few to tell ALL from chance (50.00%)"
    assert untrained(settings, {"ALL": 1.0}, [2, 2]) == few
    assert untrained(settings, {"ALL": 1.0}, [3, 3]) == ""
    assert untrained(settings, {"ALL": 0.5}, [3, 3]).startswith("untrained: ")
    short = untrained(parsed("fedavg", "--rounds", 4), {"ALL": 0.5}, [3, 3])
    assert "--rounds 4 may be too few" in short


def measured(confusion, auc=None) -> dict:
    return {"confusion": confusion, "auc": auc}


SURE, BLIND = measured([[40, 0], [0, 40]], 1.0), measured([[20, 20], [20, 20]], 0.5)
ONE = measured([[40, 0], [40, 0]], 1.0)
LEFT_OUT = ["--protocol", "lodo", "--target", "t"]
AUC, BALANCED, F1 = (["--metric", metric] for metric in ("auc", "balanced", "f1"))


@pytest.mark.parametrize("flags, sites, says", [
    (BALANCED, {"a": SURE, "b": SURE}, ""),
    (BALANCED, {"a": BLIND, "b": ONE}, "untrained: ALL balanced accuracy 50.00% of 160 images"),
    (F1, {"a": measured([[90, 0], [10, 0]])}, "untrained: ALL balanced accuracy 50.00% of 100"),
    (F1, {"a": measured([[90, 0], [2, 8]])}, ""),
    (AUC, {"a": SURE, "b": SURE}, ""),
    (AUC, {"a": BLIND, "b": measured([[3, 0], [0, 0]])}, "untrained: ALL AUC 0.500 of 83"),
    (AUC, {"a": ONE}, "one class: ALL AUC 1.000, yet all 80 images are called the same class"),
    (AUC + LEFT_OUT, {"a": SURE, "t": BLIND}, "domain gap: target t AUC"),
    (AUC + LEFT_OUT, {"a": BLIND, "t": BLIND}, "untrained: target t AUC"),
    (LEFT_OUT, {"a": SURE, "t": BLIND}, "domain gap: target t 50.00% of 80 images"),
    (LEFT_OUT, {"a": BLIND, "t": BLIND}, "untrained: target t 50.00% of 80 images"),
    (LEFT_OUT, {}, "untrained: target t 50.00% of 80 images"),  # on nodes
])
def test_no_better_than_chance_is_told_from_a_domain_gap(flags, sites, says):
    """By hand: 20 of 40 of each class; all of one class; of the sources and of a target."""
    best = {"ALL": 1.0} | ({"target": 0.5} if "lodo" in flags else {})
    said = untrained(parsed("fedavg", *flags), best, [40, 40], sites)
    assert said.startswith(says) and bool(said) == bool(says)
    assert ("--lr" in said) == said.startswith("untrained")


@pytest.mark.parametrize("method, flags, says", [
    ("fedavg", ["--scale", "smoke"], True),
    ("fedavg", ["--scale", "smoke", "--protocol", "lodo", "--target", "d30"], True),
    ("fedavg", ["--rounds", "4", "--lr", "0.03", "--image-size", "14"], False),
    ("fedgala", ["--scale", "smoke", *one_run("fedgala"), *small_images("fedgala")], False),  # no classifier
])
def test_runs_on_digits(tmp_path, capsys, method, flags, says):
    run_all(method, parsed(method, *flags, "--precision", "fp32", "--no-figures", "--out", tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("untrained: ") == says
    assert sum(line.startswith("untrained: ") for line in lines) == says


def test_the_next_command_has_the_flags_that_all_methods_understand():
    """Not those that the benchmark has itself, nor the method's own."""
    flags = ["--lambda", 0.2, "--rounds", 3, "--protocol", "lodo", "--target", "d0", "--seed", 4]
    said = next_step(parsed("fdse", *flags), ROOT / "runs", ROOT / "fdse.py")
    assert said.endswith("--methods fdse,fedavg --dataset digits --targets d0 --flags '--rounds 3'")
