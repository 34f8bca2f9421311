"""What is said of several seeds, by hand."""

from reproduce.statistics import means_over_columns, paired, welch

import pytest
from scipy import stats


def test_paired_differences_by_hand():
    """Student's t with two degrees of freedom: 4.303 times the deviation of the differences over sqrt 3."""
    a, b = {0: 5.0, 1: 6.0, 2: 10.0, 7: 0.0}, {0: 4.0, 1: 4.0, 2: 7.0, 8: 50.0}
    pair = paired(a, b)
    half = 4.302653 * 1 / 3 ** 0.5
    assert (pair.difference, pair.seeds) == (2, 3)
    assert pair.interval == pytest.approx((2 - half, 2 + half), rel=1e-5)
    assert paired(a, {0: 1.0, 1: 2.0}) is None


def test_a_mean_over_columns_has_the_seeds_of_all():
    assert means_over_columns([{0: 1.0, 1: 2.0}, {1: 4.0, 2: 5.0}]) == {1: 3.0}
    assert means_over_columns([{0: 1.0}, {}]) == {}


def test_welch_by_hand():
    """Student's t of sqrt(1/3 + 4/4) with the degrees of freedom of Welch and Satterthwaite."""
    three = {0: 95.0, 1: 97.0, 2: 96.0}
    freedom = (1 / 3 + 1) ** 2 / ((1 / 3) ** 2 / 2 + 1 ** 2 / 3)
    assert welch(three, [90.0, 2.0], 4) == pytest.approx(stats.t.ppf(0.975, freedom) * (1 / 3 + 1) ** 0.5)
    for ours, published, trials in (({0: 96.0}, [90.0, 2.0], 4), (three, [90.0], 4), (three, [90.0, 2.0], 0),
                                    (three, [90.0, 2.0], 1), ({0: 96.0, 1: 96.0}, [90.0, 0.0], 4)):
        assert welch(ours, published, trials) is None
