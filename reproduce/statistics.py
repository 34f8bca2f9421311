"""What is said of several seeds: means, deviations, and whether a difference can be told from chance."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from scipy import stats

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


def beyond_two_errors(ours: BySeed, published: list[float], trials: int) -> bool | None:
    """Whether our mean and a published one differ by more than two combined standard errors.

    `published` is [mean, deviation], `trials` the number of trials behind it. None if that cannot be told:
    one seed here, or no deviation or number of trials in the paper.
    """
    if len(ours) < 2 or len(published) < 2 or not trials:
        return None
    theirs, their_deviation = published
    our_error = deviation(ours) / math.sqrt(len(ours))
    their_error = their_deviation / math.sqrt(trials)
    return abs(mean(ours) - theirs) > 2 * math.hypot(our_error, their_error)


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
    """The difference a - b over the seeds that both have, by Student's t; None with fewer than two."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 2:
        return None
    differences = {seed: a[seed] - b[seed] for seed in shared}
    error = deviation(differences) / math.sqrt(len(shared))
    quantile = stats.t.ppf(0.975, len(shared) - 1)
    return Paired(mean(differences), float(quantile * error), len(shared))


def means_over_columns(columns: list[BySeed]) -> BySeed:
    """The mean of several columns for each seed that has all of them."""
    shared = set.intersection(*(set(values) for values in columns))
    return {seed: statistics.mean(values[seed] for values in columns) for seed in sorted(shared)}
