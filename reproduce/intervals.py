"""What is said of several seeds: means, deviations, and whether a difference can be told from chance."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from plumbing.run.several import BySeed

from scipy.special import stdtrit  # Student's t; scipy.stats takes a second to import

LEVEL = 0.05  # at which a test errs, or several together


def mean(values: BySeed) -> float | None:
    """The mean over the seeds; None without any."""
    return statistics.mean(values.values()) if values else None


def deviation(values: BySeed) -> float | None:
    """The sample deviation over the seeds; None with fewer than two."""
    return statistics.stdev(values.values()) if len(values) > 1 else None


def welch(ours: BySeed, published: list[float], trials: int) -> float | None:
    """Half the width of the 95% interval of our mean minus the published one: Welch's interval.

    `published` is [mean, deviation]. None if that cannot be told: one seed here, no deviation or number of
    trials in the paper, or no deviation at all on both sides.
    """
    if len(ours) < 2 or len(published) < 2 or trials < 2 or deviation(ours) == published[1] == 0:
        return None
    shares = deviation(ours) ** 2 / len(ours), published[1] ** 2 / trials
    freedom = sum(shares) ** 2 / (shares[0] ** 2 / (len(ours) - 1) + shares[1] ** 2 / (trials - 1))
    return float(stdtrit(freedom, 1 - LEVEL / 2)) * math.sqrt(sum(shares))


@dataclass(frozen=True)
class Paired:
    """A mean difference over seeds that two methods share, and its confidence interval."""

    difference: float
    interval: tuple[float, float]
    seeds: int

    def __str__(self) -> str:
        """+5.5 (+1.2 to +9.8)"""
        low, high = self.interval
        return f"{self.difference:+.1f} ({low:+.1f} to {high:+.1f})"

    @property
    def half_width(self) -> float:
        """The smallest difference that would have been outside such an interval."""
        return (self.interval[1] - self.interval[0]) / 2


def paired(a: BySeed, b: BySeed, level: float = LEVEL) -> Paired | None:
    """The difference a - b over the seeds that both have, with an interval at 1 - level, by Student's t; None
    with fewer than three."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 3:
        return None
    differences = [a[seed] - b[seed] for seed in shared]
    error = statistics.stdev(differences) / math.sqrt(len(shared))
    half = float(stdtrit(len(shared) - 1, 1 - level / 2) * error)
    difference = statistics.mean(differences)
    return Paired(difference, (difference - half, difference + half), len(shared))
