"""What judges a user's method, by hand: the benchmark's columns, the rounds that count, and the
precision inside a network."""

from types import SimpleNamespace

from plumbing.run.several import columns_of
from reproduce import benchmark
from reproduce.benchmark_pages import (accuracy_rows, cell, compared, contrast_words, distinct,
                                       megabytes, sites_of, untrained_words, values_of, verdict)
from tests.conftest import parsed, run_all, write_files

import pytest
import torch
from scipy import stats


# The benchmark


def by_seed(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_two_columns_and_two_methods_are_four_differences():
    """Each corrected one is at a quarter of the level, by scipy."""
    values = {"a": {"ALL": by_seed(5.0, 6.0, 9.0), "AVG": by_seed(4.0, 4.5, 7.0)},
              "b": {"ALL": by_seed(4.0, 5.5, 8.0), "AVG": by_seed(4.1, 4.0, 6.0)},
              "c": {"ALL": by_seed(5.5, 2.0, 9.0), "AVG": by_seed(1.0, 1.5, 4.0)}}
    found = compared(values, ["ALL", "AVG"])
    assert [(words, column) for words, column, _, _ in found] == [
        ("a minus b", "ALL"), ("a minus b", "AVG"), ("a minus c", "ALL"), ("a minus c", "AVG")]
    test = stats.ttest_rel([4.0, 4.5, 7.0], [4.1, 4.0, 6.0])
    assert found[1][2].interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert found[1][3].interval == pytest.approx(tuple(test.confidence_interval(1 - 0.05 / 4)))


def test_a_verdict_is_the_plain_one_and_says_what_is_corrected():
    """Differences of 1.5, 2.5 and 3.5 leave 0 out alone, but not beside two others."""
    values = {"a": {"ALL": by_seed(1.5, 2.5, 3.5)}, "b": {"ALL": by_seed(0.0, 0.0, 0.0)},
              "c": {"ALL": by_seed(9.0, 0.0, 0.0)}, "d": {"ALL": by_seed(0.0, 9.0, 0.0)}}
    (words, _, plain, corrected), *_ = found = compared(values, ["ALL"])
    assert words == "a minus b" and plain.interval[0] == pytest.approx(2.5 - 4.3027 / 3 ** 0.5, abs=1e-3)
    assert corrected.interval[0] == pytest.approx(2.5 - stats.t.ppf(1 - 0.05 / 6, 2) / 3 ** 0.5)
    both = "above; corrected: cannot be told apart"
    assert verdict(plain, plain) == "above" and verdict(plain, corrected) == both
    assert contrast_words(found)[0].splitlines()[2].split("|")[6].strip() == both
    assert "all (3) hold together" in contrast_words(found)[1]


def test_costs_and_deviations_by_hand():
    """Megabytes both ways; the sample's deviation."""
    results = []
    for up, down in ((1e6, 5e5), (2e6, 1.5e6)):
        results.append({"bytes": {"up_per_round": up, "down_per_round": down}})
    assert megabytes(results) == "2.5"
    assert cell(by_seed(1.0, 2.0, 3.0)) == "2.00 ± 1.00"


def test_avg_is_no_column_where_it_is_all():
    """Of clients with as many images each: it would count twice in the correction."""
    same = {"a": {"ALL": by_seed(5.0, 6.0), "AVG": by_seed(5.0, 6.0 + 1e-12)}}
    other = {"b": {"ALL": by_seed(4.0, 5.5), "AVG": by_seed(4.0, 5.4)}}
    assert distinct(same) == ["ALL"] and distinct(same | other) == ["ALL", "AVG"]


def test_the_best_of_each_column_is_bold():
    values = {"a": {"ALL": by_seed(5.0), "AVG": by_seed(1.0)},
              "b": {"ALL": by_seed(4.0), "AVG": by_seed(2.0)}}
    assert accuracy_rows(values, ["ALL", "AVG"]) == [["a", "**5.00**", "1.00"], ["b", "4.00", "**2.00**"]]


def test_untrained_runs_are_named(tmp_path):
    """As their logs say it; a run that was resumed may say it twice."""
    line = "untrained: ALL 10.00% of 300 images is no better than chance"
    write_files(tmp_path, {"s1/log.txt": f"fedavg: 1/2\rfedavg: 2/2\n{line}\n{line}\n"})
    trial = benchmark.Trial(SimpleNamespace(label="fedavg"), (), {0: [], 1: []}, tmp_path, "")
    assert untrained_words([trial]) == [f"- fedavg, seed 1: {line}"]


def test_tuning_looks_at_the_last_ten_validations():
    """At --metric's where there are some; never at the test part."""
    curves = [{"val": [0.0] * 5 + [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.6], "ALL": [0.9] * 15},
              {"val": [0.9] * 30, "metric": [0.1] * 20 + [0.2] * 9 + [0.7]},
              {"val": [0.9] * 10}]
    trial = benchmark.Trial(None, (), {}, None, "")
    trial.results = lambda: [{"curve": curve} for curve in curves]
    assert trial.validation() == pytest.approx((0.15 + 0.25 + 0.9) / 3)


def test_three_unequal_targets_and_their_best_round():
    """The mean is over targets, not images; best and last are two numbers."""
    results = []
    for target, best, last in (("a", 0.9, 0.2), ("b", 0.6, 0.5), ("c", 0.0, 0.8)):
        of = {"best": {"target": best, "ALL": 1, "AVG": 1}, "last": {"target": last, "ALL": 1, "AVG": 1}}
        results.append({"args": {"target": target, "seed": 7}, **of})
    best = columns_of(results, "best")
    assert {name: of[7] for name, of in best.items()} == pytest.approx(dict(a=90, b=60, c=0, mean=50))
    assert columns_of(results, "last")["mean"] == pytest.approx({7: 50.0})


@pytest.mark.parametrize("which", ["best", "last"])
def test_the_round_that_is_asked_for(which):
    """Of accuracies, of each client's, and of another measure."""
    result = {"args": {"target": "all", "seed": 7}, "measures": {}}
    for other, x in (("best", 0.25), ("last", 0.75)):
        result[other] = {"ALL": x, "AVG": x + 0.1, "clients": {"a": x + 0.2}}
        result["measures"][other] = {"a": {"auc": x + 0.1}, "b": {"auc": x - 0.1}}
    x = 100 * result[which]["ALL"]
    assert values_of([result], which) == {"ALL": {7: x}, "AVG": {7: pytest.approx(x + 10)}}
    assert sites_of([result], which, "accuracy") == {"a": {7: pytest.approx(x + 20)}}
    expected = {"a": x + 10, "b": x - 10, "mean": x}
    found = values_of([result], which, "auc")
    assert {name: of[7] for name, of in found.items()} == pytest.approx(expected)


# Inside the network


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_precision_inside_the_network(tmp_path, monkeypatch, precision, dtype):
    """Of every convolution in training and in the evaluation; losses and weights are float32."""
    seen, forward = {True: set(), False: set()}, torch.nn.Conv2d.forward

    def noting(module, x):
        out = forward(module, x)
        if len(x) > 2:  # two images try the network out before a run
            seen[module.training].add(out.dtype)
        assert module.weight.dtype == torch.float32
        return out
    monkeypatch.setattr(torch.nn.Conv2d, "forward", noting)
    args = parsed("fedavg", "--scale", "smoke", "--rounds", 1, "--precision", precision, "--out", tmp_path,
                  "--no-figures")
    run_all("fedavg", args)
    assert seen == {True: {dtype}, False: {dtype}}
