"""What is said of several seeds: means, deviations, whether a difference can be told from chance, and whether
rows are in the published order."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass

import numpy as np
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


# The published order


@dataclass(frozen=True)
class Order:
    """How far our order of some rows is the published one: Kendall's tau, 1 for the same order and -1 for its
    reverse."""

    tau: float
    rows: int
    by_chance: float  # probability that a random order has a tau as large
    interval: tuple[float, float] | None  # 95% of the taus of resampled seeds


def published_order(published: list[float], ours: list[BySeed]) -> Order | None:
    """Our means of several rows against the published ones; None with fewer than two rows, or if all are
    equal. The interval is from three seeds on that all rows share."""
    if len(ours) < 2:
        return None
    means = np.array([[mean(values) for values in ours]])
    (tau,) = taus(np.array(published), means)
    if math.isnan(tau):
        return None
    by_chance = stats.kendalltau(published, means[0], alternative="greater").pvalue
    interval = None
    shared = sorted(set.intersection(*(set(values) for values in ours)))
    if len(shared) >= 3:
        by_seed = np.array([[values[seed] for values in ours] for seed in shared])
        resampled = taus(np.array(published), by_seed[draws(len(shared))].mean(1))
        low, high = np.nanquantile(resampled, (0.025, 0.975))
        interval = float(low), float(high)
    return Order(float(tau), len(ours), float(by_chance), interval)


def taus(published: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Kendall's tau (b) of published values [rows] with each line of ours [draws, rows]; nan where all values
    of a side are equal."""
    first, second = np.triu_indices(len(published), 1)
    theirs = np.sign(published[first] - published[second])
    mine = np.sign(ours[:, first] - ours[:, second])
    with np.errstate(invalid="ignore"):
        return mine @ theirs / np.sqrt((mine ** 2).sum(1) * (theirs ** 2).sum())


def draws(n: int) -> np.ndarray:
    """Samples of n of n seeds with replacement, as rows of indices: all that there are, or 2,000 of them."""
    if n <= 4:
        return np.array(list(itertools.product(range(n), repeat=n)))
    return np.random.default_rng(0).integers(0, n, (2000, n))
