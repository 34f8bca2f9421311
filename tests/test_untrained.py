"""A run that ends no better than chance says so."""

from plumbing.results import untrained
from tests.conftest import one_run, parsed, run_all

import pytest
from scipy.stats import binom


def line_of(accuracy: float, of_classes: list[int], *flags, name: str = "ALL") -> str:
    return untrained(parsed("fedavg", *flags), {"ALL": 1.0, name: accuracy}, of_classes)


@pytest.mark.parametrize("of_classes", [[100] * 10, [500, 100, 100]])
def test_the_border_is_that_of_the_binomial_interval(of_classes):
    n = sum(of_classes)
    _, highest = binom.interval(0.95, n, max(of_classes) / n)
    for hits in range(n + 1):
        assert bool(line_of(hits / n, of_classes)) == (hits <= highest), hits


@pytest.mark.parametrize("method, flags, says", [
    ("fedavg", ["--scale", "smoke"], True),
    ("fedavg", ["--scale", "smoke", "--protocol", "lodo", "--target", "d30"], True),
    ("fedavg", ["--rounds", "4", "--lr", "0.03"], False),
    ("fedgala", ["--scale", "smoke", *one_run("fedgala")], False),  # no classifier is trained
])
def test_runs_on_digits(tmp_path, capsys, method, flags, says):
    run_all(method, parsed(method, *flags, "--precision", "fp32", "--no-figures", "--out", tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("untrained: ") == says
    assert sum(line.startswith("untrained: ") for line in lines) == says
