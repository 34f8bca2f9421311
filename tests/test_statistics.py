"""What is said of several seeds, by hand."""

from reproduce.statistics import holm, means_over_columns, paired, published_order, welch

import pytest
from scipy import stats


def test_paired_differences_by_hand():
    """Student's t with two degrees of freedom: 4.303 times the deviation of the differences over sqrt 3."""
    a, b = {0: 5.0, 1: 6.0, 2: 10.0, 7: 0.0}, {0: 4.0, 1: 4.0, 2: 7.0, 8: 50.0}
    pair = paired(a, b)
    half = 4.302653 * 1 / 3 ** 0.5
    assert (pair.difference, pair.seeds) == (2, 3) and pair.half_width == pytest.approx(half, rel=1e-5)
    assert pair.interval == pytest.approx((2 - half, 2 + half), rel=1e-5)
    assert paired(a, {0: 1.0, 1: 2.0}) is None


def test_a_mean_over_columns_has_the_seeds_of_all():
    assert means_over_columns([{0: 1.0, 1: 2.0}, {1: 4.0, 2: 5.0}]) == {1: 3.0}
    assert means_over_columns([{0: 1.0}, {}]) == {}


def test_welch_by_hand():
    """t = 6 / sqrt(1/3 + 4/4) with the degrees of freedom of Welch and Satterthwaite."""
    three = {0: 95.0, 1: 97.0, 2: 96.0}
    t = 6 / (1 / 3 + 4 / 4) ** 0.5
    freedom = (1 / 3 + 1) ** 2 / ((1 / 3) ** 2 / 2 + 1 ** 2 / 3)
    assert welch(three, [90.0, 2.0], 4) == pytest.approx(2 * stats.t.sf(t, freedom))
    for ours, published, trials in (({0: 96.0}, [90.0, 2.0], 4), (three, [90.0], 4), (three, [90.0, 2.0], 0),
                                    (three, [90.0, 2.0], 1), ({0: 96.0, 1: 96.0}, [90.0, 0.0], 4)):
        assert welch(ours, published, trials) is None


def test_holm_by_hand():
    """The smallest of four times 4, the next times 3, ...; none is smaller than one before it."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0] and holm([]) == []


def test_the_published_order():
    """Kendall's tau by hand: of the three pairs one is in the other order; three of the six orders are as
    near."""
    order = published_order([1.0, 2.0, 3.0], [{0: 5.0}, {0: 7.0}, {0: 6.0}])
    assert order.tau == pytest.approx(1 / 3) and order.rows == 3 and order.interval is None
    assert order.by_chance == pytest.approx(3 / 6)
    assert published_order([1.0], [{0: 5.0}]) is None
    assert published_order([1.0, 1.0], [{0: 5.0}, {0: 6.0}]) is None


def test_the_uncertainty_of_the_order_is_that_of_its_seeds():
    same = [{0: 1.0, 1: 2.0, 2: 1.5}, {0: 4.0, 1: 5.0, 2: 4.5}]
    assert published_order([1.0, 2.0], same).interval == (1, 1)
    crossing = [{0: 1.0, 1: 2.0, 2: 9.0}, {0: 4.0, 1: 5.0, 2: 4.5}]
    assert published_order([1.0, 2.0], crossing).interval == (-1, 1)
    six = [{seed: float(seed) for seed in range(6)}, dict.fromkeys(range(6), 9.0)]
    assert published_order([1.0, 2.0], six).interval == (1, 1)
    assert published_order([1.0, 2.0], [{0: 1.0, 1: 2.0}, {0: 4.0, 1: 5.0}]).interval is None
