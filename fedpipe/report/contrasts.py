"""Statistics of a comparison: the difference of two means with its confidence interval, and the order of a column.

Runs are assumed to vary by at least the sampling error of their test set, because one run, or two runs that happen to
agree, show no variance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

RELATIVE_TOLERANCE = 1e-3  #: of a formula's value: the papers print four digits
RESOLVED_ERRORS = 2  #: standard errors by which the paper has to separate two methods, so that their order counts
DEFAULT_STD = 1.0  #: points between the runs of a column in which neither side has a standard deviation


@dataclass(frozen=True)
class RunMean:
    """A mean over runs. ``std`` and ``runs`` are None if nothing is known of them.

    ``values`` are those of the runs by seed. ``min_std`` is the standard deviation that runs have at least: the
    sampling error of their test set.
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    min_std: float = 0.0

    @classmethod
    def from_values(cls, values: Mapping[int, float]) -> RunMean:
        """The mean of these values by seed."""
        run_values = list(values.values())
        std = float(np.std(run_values, ddof=1)) if len(run_values) > 1 else None
        return cls(float(np.mean(run_values)), std, len(run_values), values)

    def compute_scaled_difference(self, other: RunMean, factor: float = 1.0) -> RunMean:
        """The difference, times a factor. It is paired by seed if both have the same seeds."""
        if self.values and self.values.keys() == other.values.keys():
            return RunMean.from_values(
                {seed: factor * (value - other.values[seed]) for seed, value in self.values.items()}
            )
        return RunMean(factor * (self.mean - other.mean), None, min(self.runs or 1, other.runs or 1))


class Spread(NamedTuple):
    """A standard deviation between runs, or a variance of a mean, with its degrees of freedom."""

    std: float
    df: float


class Contrast(NamedTuple):
    """A difference of means with its confidence interval of 95%. ``low`` and ``high`` are None if it is unknown."""

    difference: float
    low: float | None = None
    high: float | None = None
    is_paired: bool = False

    @property
    def width(self) -> float:
        """Width of the interval. 0 if it is unknown."""
        return 0.0 if self.low is None or self.high is None else self.high - self.low

    @property
    def sign(self) -> str:
        """``+`` or ``−`` if the interval excludes zero, else ``?``."""
        if self.low is None or self.high is None:
            return "?"
        return "+" if self.low > 0 else "−" if self.high < 0 else "?"


class ColumnOrder(NamedTuple):
    """How the order of a column's methods compares with the published order.

    ``resolved_pairs`` is the number of pairs that the paper separates by two standard errors. ``tau`` is Kendall's tau
    over these pairs: pairs in the published order minus reversed pairs, over all. ``is_winner_confirmed`` is true if
    the published best is within one standard error of the measured best.
    """

    methods: int
    resolved_pairs: int
    tau: float | None
    best_published: str
    best_measured: str
    is_winner_confirmed: bool


def compute_sampling_error(mean: float, test_samples: int) -> float:
    """The standard error of an accuracy in percent on this number of test samples."""
    return math.sqrt(mean * (100 - mean) / test_samples)


def pool_standard_deviations(numbers: Iterable[RunMean]) -> Spread | None:
    """The standard deviation of all numbers that have one, weighted by their degrees of freedom."""
    known_stds = [(number.std, (number.runs or 1) - 1) for number in numbers if number.std is not None]
    df = sum(run_df for _, run_df in known_stds)
    return Spread(math.sqrt(sum(run_df * std**2 for std, run_df in known_stds) / df), df) if df else None


def compute_contrast(
    first: RunMean, second: RunMean, spread: Spread | None, partition_spread: Spread | None = None
) -> Contrast:
    """How much higher one mean is than another.

    ``spread`` replaces a missing standard deviation. ``partition_spread`` is the one between draws of the partition. It
    adds to the error of means without a standard deviation between seeds. The interval is
    the wider of two: with ``min_std``, and without it. With few seeds, the second can be wider, because it has fewer
    degrees of freedom.
    """
    own_numbers = dataclasses.replace(first, min_std=0.0), dataclasses.replace(second, min_std=0.0)
    contrasts = [_compute_interval(one, two, spread, partition_spread) for one, two in ((first, second), own_numbers)]
    return max(contrasts, key=lambda contrast: contrast.width)


def _compute_interval(
    first: RunMean, second: RunMean, spread: Spread | None, partition_spread: Spread | None
) -> Contrast:
    """The contrast of two means, whose runs vary by ``min_std`` if they have a lower standard deviation."""
    difference, error, df, is_paired = _compute_difference_with_error(first, second, spread)
    if df is None:
        return Contrast(difference, is_paired=is_paired)
    draws = [number.runs or 1 for number in (first, second) if number.std is None or (number.runs or 1) == 1]
    if partition_spread and draws:
        variance, partition_variance = error**2, partition_spread.std**2 * sum(1 / count for count in draws)
        error = math.sqrt(variance + partition_variance)
        df = error**4 / (variance**2 / df + partition_variance**2 / partition_spread.df)
    half_width = float(stdtrit(df, 0.975)) * error
    return Contrast(difference, difference - half_width, difference + half_width, is_paired)


def compare_method_orders(published: Mapping[str, RunMean], measured: Mapping[str, RunMean]) -> ColumnOrder | None:
    """Compare the order of the methods that both columns contain. None for fewer than two."""
    names = [name for name in published if name in measured]
    if len(names) < 2:
        return None
    spread = pool_standard_deviations([*published.values(), *measured.values()]) or Spread(DEFAULT_STD, 1)
    agreements = []
    for method, rival in combinations(names, 2):
        difference, error, _, _ = _compute_difference_with_error(published[method], published[rival], spread)
        if abs(difference) > RESOLVED_ERRORS * error:
            agreements.append(float(np.sign(difference) * np.sign(measured[method].mean - measured[rival].mean)))
    best_published = max(names, key=lambda name: (published[name].mean, measured[name].mean))
    best_measured = max(names, key=lambda name: measured[name].mean)
    deficit, error, _, _ = _compute_difference_with_error(measured[best_measured], measured[best_published], spread)
    tau = float(np.mean(agreements)) if agreements else None
    return ColumnOrder(len(names), len(agreements), tau, best_published, best_measured, deficit <= error)


def _compute_variance_of_mean(number: RunMean, spread: Spread | None) -> Spread | None:
    """The variance of a mean with its degrees of freedom, or None if nothing is known of it."""
    runs = number.runs or 1
    run_spread = Spread(number.std, runs - 1) if number.std is not None and runs > 1 else spread
    if number.min_std and (run_spread is None or run_spread.std < number.min_std):
        run_spread = Spread(number.min_std, math.inf)
    return Spread(run_spread.std**2 / runs, run_spread.df) if run_spread else None


def _has_pooled_variance(number: RunMean, spread: Spread) -> bool:
    """Whether the variance of a mean is that of a spread, because the mean has no standard deviation."""
    return (number.std is None or (number.runs or 1) < 2) and spread.std >= number.min_std


def _compute_difference_with_error(
    first: RunMean, second: RunMean, spread: Spread | None
) -> tuple[float, float, float | None, bool]:
    """A difference of means, its standard error and degrees of freedom (Welch), and whether it is paired by seed."""
    min_error = math.hypot(*(number.min_std / math.sqrt(number.runs or 1) for number in (first, second)))
    paired = first.compute_scaled_difference(second)
    if paired.std is not None and paired.runs:
        error = paired.std / math.sqrt(paired.runs)
        return paired.mean, max(error, min_error), paired.runs - 1 if error >= min_error else math.inf, True
    variances = [variance for number in (first, second) if (variance := _compute_variance_of_mean(number, spread))]
    total = sum(variance for variance, _ in variances)
    denominator = sum(variance**2 / df for variance, df in variances)
    df = total**2 / denominator if denominator else math.inf
    if spread and all(_has_pooled_variance(number, spread) for number in (first, second)):
        df = spread.df  # one estimate, which both means share
    return first.mean - second.mean, math.sqrt(total), df if variances else None, False
