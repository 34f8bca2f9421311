"""What is said of several seeds, by hand."""

from reproduce.statistics import means_over_columns, paired

import pytest


def test_paired_differences_by_hand():
    """Student's t with two degrees of freedom: 4.303 times the deviation of the differences over sqrt 3."""
    a, b = {0: 5.0, 1: 6.0, 2: 10.0, 7: 0.0}, {0: 4.0, 1: 4.0, 2: 7.0, 8: 50.0}
    pair = paired(a, b)
    half = 4.302653 * 1 / 3 ** 0.5
    assert (pair.difference, pair.seeds) == (2, 3) and pair.half_width == pytest.approx(half, rel=1e-5)
    assert pair.interval == pytest.approx((2 - half, 2 + half), rel=1e-5)
    assert paired(a, {0: 1.0}) is None


def test_a_mean_over_columns_has_the_seeds_of_all():
    assert means_over_columns([{0: 1.0, 1: 2.0}, {1: 4.0, 2: 5.0}]) == {1: 3.0}
    assert means_over_columns([{0: 1.0}, {}]) == {}
