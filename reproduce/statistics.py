"""What is said of several seeds: means, deviations, and whether a difference can be told from chance."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.05  # of a page's tests together
BySeed = dict[int, float]  # {seed: value}


def mean(values: BySeed) -> float | None:
    """The mean over the seeds; None without any."""
    if not values:
        return None
    return statistics.mean(values.values())


def deviation(values: BySeed) -> float | None:
    """The sample deviation over the seeds; None with fewer than two."""
    if len(values) < 2:
        return None
    return statistics.stdev(values.values())


def welch(ours: BySeed, published: list[float], trials: int) -> float | None:
    """The probability of a difference at least as large if our seeds and the paper's trials were drawn from
    distributions of the same mean: Welch's test.

    `published` is [mean, deviation], `trials` the number of trials behind it. None if that cannot be told:
    one seed here, no deviation or number of trials in the paper, or no deviation at all on both sides.
    """
    if len(ours) < 2 or len(published) < 2 or trials < 2:
        return None
    theirs, their_deviation = published
    our_deviation = deviation(ours)
    if our_deviation == 0 and their_deviation == 0:
        return None
    test = stats.ttest_ind_from_stats(mean(ours), our_deviation, len(ours), theirs, their_deviation, trials,
                                      equal_var=False)
    return float(test.pvalue)


def holm(probabilities: list[float]) -> list[float]:
    """The probabilities of several tests, each as large as it takes that all tests together err with the
    level that it is compared with: Holm's step-down correction."""
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    corrected = [0.0] * len(probabilities)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * probabilities[i]))
        corrected[i] = largest
    return corrected


@dataclass(frozen=True)
class Paired:
    """A mean difference over seeds that two methods share, and half the width of its 95% confidence
    interval."""

    difference: float
    half_width: float
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        return self.difference - self.half_width, self.difference + self.half_width


def paired(a: BySeed, b: BySeed) -> Paired | None:
    """The difference a - b over the seeds that both have, by Student's t; None with fewer than three."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 3:
        return None
    differences = {seed: a[seed] - b[seed] for seed in shared}
    error = deviation(differences) / math.sqrt(len(shared))
    quantile = stats.t.ppf(0.975, len(shared) - 1)
    return Paired(mean(differences), float(quantile * error), len(shared))


def means_over_columns(columns: list[BySeed]) -> BySeed:
    """The mean of several columns for each seed that has all of them."""
    shared = set.intersection(*(set(values) for values in columns))
    return {seed: statistics.mean(values[seed] for values in columns) for seed in sorted(shared)}
