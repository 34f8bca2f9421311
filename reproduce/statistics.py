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
    return statistics.mean(values.values()) if values else None


def deviation(values: BySeed) -> float | None:
    """The sample deviation over the seeds; None with fewer than two."""
    return statistics.stdev(values.values()) if len(values) > 1 else None


def welch(ours: BySeed, published: list[float], trials: int) -> float | None:
    """The probability of a difference at least as large if our seeds and the paper's trials were drawn from
    distributions of the same mean: Welch's test.

    `published` is [mean, deviation]. None if that cannot be told: one seed here, no deviation or number of
    trials in the paper, or no deviation at all on both sides.
    """
    if len(ours) < 2 or len(published) < 2 or trials < 2 or deviation(ours) == published[1] == 0:
        return None
    return float(stats.ttest_ind_from_stats(mean(ours), deviation(ours), len(ours), *published, trials,
                                            equal_var=False).pvalue)


def holm(probabilities: list[float]) -> list[float]:
    """The probabilities of several tests, each as large as it takes that all tests together err with the
    level that it is compared with: Holm's step-down correction."""
    corrected, largest = [0.0] * len(probabilities), 0.0
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * probabilities[i]))
        corrected[i] = largest
    return corrected


@dataclass(frozen=True)
class Paired:
    """A mean difference over seeds that two methods share, and its 95% confidence interval."""

    difference: float
    interval: tuple[float, float]
    seeds: int


def paired(a: BySeed, b: BySeed) -> Paired | None:
    """The difference a - b over the seeds that both have, by Student's t; None with fewer than three."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 3:
        return None
    differences = {seed: a[seed] - b[seed] for seed in shared}
    error = deviation(differences) / math.sqrt(len(shared))
    half = float(stats.t.ppf(0.975, len(shared) - 1) * error)
    difference = mean(differences)
    return Paired(difference, (difference - half, difference + half), len(shared))


def means_over_columns(columns: list[BySeed]) -> BySeed:
    """The mean of several columns for each seed that has all of them."""
    shared = set.intersection(*(set(values) for values in columns))
    return {seed: statistics.mean(values[seed] for values in columns) for seed in sorted(shared)}
