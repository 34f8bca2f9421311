"""What is said of several seeds, by hand. Paired differences: test_claims.py, test_judged_by_hand.py."""

from reproduce.statistics import means_over_columns, paired, welch

import numpy as np
import pytest
from scipy import stats


def test_a_mean_over_columns_has_the_seeds_of_all():
    assert means_over_columns([{0: 1.0, 1: 2.0}, {1: 4.0, 2: 5.0}]) == {1: 3.0}
    assert means_over_columns([{0: 1.0}, {}]) == {}


def test_the_paired_interval_covers_what_it_should():
    """Of 2,000 simulated claims of five seeds 95% of the intervals hold the true gain."""
    rng, hits = np.random.default_rng(1), 0
    for _ in range(2000):
        low, high = paired(dict(enumerate(rng.normal(3, 2, 5))), dict.fromkeys(range(5), 0)).interval
        hits += low < 3 < high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_welch_by_hand():
    """Student's t of sqrt(1/3 + 4/4) with the degrees of freedom of Welch and Satterthwaite."""
    three = {0: 95.0, 1: 97.0, 2: 96.0}
    freedom = (1 / 3 + 1) ** 2 / ((1 / 3) ** 2 / 2 + 1 ** 2 / 3)
    assert welch(three, [90.0, 2.0], 4) == pytest.approx(stats.t.ppf(0.975, freedom) * (1 / 3 + 1) ** 0.5)
    for ours, published, trials in (({0: 96.0}, [90.0, 2.0], 4), (three, [90.0], 4), (three, [90.0, 2.0], 0),
                                    (three, [90.0, 2.0], 1), ({0: 96.0, 1: 96.0}, [90.0, 0.0], 4)):
        assert welch(ours, published, trials) is None
