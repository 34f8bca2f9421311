"""What is said of several seeds, by hand. Paired differences: test_claims.py, test_judged_by_hand.py."""

from plumbing.run.several import means_over_columns
from reproduce.intervals import welch

import pytest
from scipy import stats


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
