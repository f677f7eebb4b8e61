"""Does what is measured agree with what is printed? Of a value, of a column's order, and of a paper's claim.

A value agrees when it is no further from print than the two means' uncertainty allows: the 97.5% quantile of Welch's t
times the standard error, but no less than a floor for what no repetition shows (one point, or the sampling error of
the test set). An order agrees as far as print itself resolves it. Runs are taken to vary by the sampling error of their
test set at least, since a single one, or two that happen to be alike, tell nothing. Nothing is judged that was not run
as print says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.special import stdtrit

Scale: TypeAlias = Literal["paper", "reduced", "smoke"]
VerdictWord: TypeAlias = Literal["agrees", "agrees (one seed)", "agrees (two seeds)", "near", "differs"]

MAX_T = 4.3  #: of t: its quantile at two degrees of freedom
NEAR_FACTOR = 3  #: bands within which a value is near
MIN_BAND = 1.0  #: the floor of a band, in points of accuracy
HIGH_ACCURACY = 95.0  #: percent above which the floor is halved
RELATIVE_TOLERANCE = 1e-3  #: share by which a formula's value may be off: print has four digits
TIE_ERRORS = 2  #: standard errors by which two methods must differ
REPLICA_COUNT = 2000  #: of the replicas that a ceiling is the mean of
DEFAULT_STD = 1.0  #: points; what they are taken to vary where neither side has a standard deviation


@dataclass(frozen=True)
class Number:
    """A mean over runs; what varies is unknown of a single run, and where print has none.

    ``values`` are those of the runs by seed, where they are known. ``least`` is the standard deviation that runs are
    taken to have at least: the sampling error of their test set.
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    min_std: float = 0.0

    @classmethod
    def from_values(cls, values: Mapping[int, float]) -> Number:
        """The number that these values by seed make."""
        run_values = list(values.values())
        std = float(np.std(run_values, ddof=1)) if len(run_values) > 1 else None
        return cls(float(np.mean(run_values)), std, len(run_values), values)

    def subtract(self, subtrahend: Number, factor: float = 1.0) -> Number:
        """The difference, times a factor: by seed where both have run the same seeds, else of the means alone."""
        if self.values and self.values.keys() == subtrahend.values.keys():
            return Number.from_values(
                {seed: factor * (value - subtrahend.values[seed]) for seed, value in self.values.items()}
            )
        return Number(factor * (self.mean - subtrahend.mean), None, min(self.runs or 1, subtrahend.runs or 1))


class Spread(NamedTuple):
    """A standard deviation between runs, and how many degrees of freedom it rests on."""

    std: float
    df: float


class Band(NamedTuple):
    """How far apart two means may be: ``width`` is the larger of t times ``error`` and ``floor``."""

    width: float
    error: float
    t: float
    floor: float


class Verdict(NamedTuple):
    """A word, and for a value what it rests on: measured minus published, and the band."""

    word: VerdictWord
    difference: float | None = None
    band: Band | None = None


class OrderComparison(NamedTuple):
    """How a column's order of methods compares with print's.

    ``tau`` is Kendall's tau-b, where pairs within two standard errors are ties; None where all are. Where neither side
    has a standard deviation, runs are taken to vary by one point. ``estimate_expected_tau`` is what a perfect replica
    with as many
    runs on as many test samples reaches on average. Of ``resolved`` pairs, which print tells apart, ``concordant`` have
    print's sign. ``best`` is print's best method (of equal ones that which is best here), ``ours`` the best measured
    one, and ``holds`` whether the two are within one standard error of each other here.
    """

    methods: int
    tau: float | None
    expected_tau: float | None
    resolved_pairs: int
    concordant_pairs: int
    best_published: str
    best_measured: str
    is_winner_confirmed: bool


class Contrast(NamedTuple):
    """A difference of two methods with its interval of 95%, by seed where both have run the same two seeds or more.

    ``low`` and ``high`` are None where nothing tells how runs vary.
    """

    difference: float
    low: float | None
    high: float | None
    is_paired: bool

    @property
    def sign(self) -> str:
        """``+`` or ``−`` where the interval leaves no doubt, else ``?``."""
        if self.low is None or self.high is None:
            return "?"
        return "+" if self.low > 0 else "−" if self.high < 0 else "?"


def pool_spreads(numbers: Iterable[Number]) -> Spread | None:
    """The standard deviation of all numbers that have one, by their degrees of freedom."""
    known_stds = [(number.std, (number.runs or 1) - 1) for number in numbers if number.std is not None]
    df = sum(run_df for _, run_df in known_stds)
    return Spread(math.sqrt(sum(run_df * std**2 for std, run_df in known_stds) / df), df) if df else None


def compute_sampling_error(mean: float, test_samples: int) -> float:
    """The standard error of an accuracy in percent that is due to so many test samples."""
    return math.sqrt(mean * (100 - mean) / test_samples)


def judge_value(published_number: Number, measured_number: Number, spread: Spread | None, test_samples: int) -> Verdict:
    """Whether a measured mean agrees with a printed one.

    Parameters
    ----------
    published_number, measured_number
        In percent. A number without runs is taken for one run.
    spread
        What runs vary by where a standard deviation is missing: the column's, pooled.
    test_samples
        Number of samples that the accuracy is of.
    """
    agreement_band = compute_band(published_number, measured_number, spread, test_samples)
    difference = measured_number.mean - published_number.mean
    if abs(difference) <= agreement_band.width:
        return Verdict(_choose_agreement(measured_number), difference, agreement_band)
    return Verdict(
        "near" if abs(difference) <= NEAR_FACTOR * agreement_band.width else "differs", difference, agreement_band
    )


def compute_band(published_number: Number, measured_number: Number, spread: Spread | None, test_samples: int) -> Band:
    """How far a measured mean may be from a printed one."""
    _, error, df, _ = _compute_difference(measured_number, published_number, spread)
    t = min(float(stdtrit(df, 0.975)), MAX_T) if df else 0.0
    min_width = max(MIN_BAND, 2 * compute_sampling_error(published_number.mean, test_samples))
    min_width = min_width / 2 if published_number.mean > HIGH_ACCURACY else min_width
    return Band(max(t * error, min_width), error, t, min_width)


def judge_failure(measured_number: Number, diverged: int, classes: int) -> Verdict:
    """Whether a method fails here that fails in print: some run diverged, or it stays at twice chance or below."""
    return Verdict(
        _choose_agreement(measured_number) if diverged or measured_number.mean <= 200 / classes else "differs"
    )


def judge_exact_value(published_value: float, measured_value: float) -> Verdict:
    """Whether a formula's value is that of print, to its digits."""
    is_equal = abs(measured_value - published_value) <= RELATIVE_TOLERANCE * abs(published_value)
    return Verdict("agrees" if is_equal else "differs", measured_value - published_value)


def compare_orders(
    published_numbers: Mapping[str, Number], measured_numbers: Mapping[str, Number]
) -> OrderComparison | None:
    """How the order of the methods that both have compares; None for fewer than two."""
    names = [name for name in published_numbers if name in measured_numbers]
    if len(names) < 2:
        return None
    spread = pool_spreads([*published_numbers.values(), *measured_numbers.values()]) or Spread(DEFAULT_STD, 1)
    pairs = list(combinations(names, 2))
    published_signs = [
        _compute_sign(published_numbers[method], published_numbers[rival], spread) for method, rival in pairs
    ]
    measured_signs = [
        _compute_sign(measured_numbers[method], measured_numbers[rival], spread) for method, rival in pairs
    ]
    mean_signs = [np.sign(measured_numbers[method].mean - measured_numbers[rival].mean) for method, rival in pairs]
    published_winner = max(names, key=lambda name: (published_numbers[name].mean, measured_numbers[name].mean))
    measured_winner = max(names, key=lambda name: measured_numbers[name].mean)
    deficit, error, _, _ = _compute_difference(
        measured_numbers[measured_winner], measured_numbers[published_winner], spread
    )
    return OrderComparison(
        methods=len(names),
        tau=compute_tau_b(published_signs, measured_signs),
        expected_tau=estimate_expected_tau(
            [published_numbers[name] for name in names], [measured_numbers[name] for name in names], spread
        ),
        resolved_pairs=sum(sign != 0 for sign in published_signs),
        concordant_pairs=sum(
            sign != 0 and sign == mean_sign for sign, mean_sign in zip(published_signs, mean_signs, strict=True)
        ),
        best_published=published_winner,
        best_measured=measured_winner,
        is_winner_confirmed=deficit <= error,
    )


def compute_tau_b(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders, each given as the signs of the same pairs, 0 for a tie; None if all are ties."""
    untied_root = math.sqrt(sum(sign != 0 for sign in first) * sum(sign != 0 for sign in second))
    return (
        float(
            sum(
                np.sign(first_sign) * np.sign(second_sign)
                for first_sign, second_sign in zip(first, second, strict=True)
            )
            / untied_root
        )
        if untied_root
        else None
    )


def estimate_expected_tau(
    published_numbers: Sequence[Number], measured_numbers: Sequence[Number], spread: Spread | None
) -> float | None:
    """Tau-b that replicas of what is printed reach on average: the same means, but known by what ours are known by.

    Parameters
    ----------
    published_numbers, measured_numbers
        A column's numbers, of the same methods. A replica has as many runs as the measured ones, by seed, which vary as
        print's do, but no less than ours do ``min_stds``.
    spread
        What runs vary by where print has no standard deviation; one point where nothing tells.
    """
    spread = spread or Spread(DEFAULT_STD, 1)
    runs = min(number.runs or 1 for number in measured_numbers)
    min_stds = np.array([number.min_std for number in measured_numbers])
    means = np.array([number.mean for number in published_numbers])
    stds = np.maximum([spread.std if number.std is None else number.std for number in published_numbers], min_stds)
    values = np.random.default_rng(0).normal(means[:, None], stds[:, None], (REPLICA_COUNT, len(means), runs))
    first, second = np.triu_indices(len(means), 1)
    replica_differences = values[:, first] - values[:, second]
    min_pair_stds, single_stds = np.hypot(min_stds[first], min_stds[second]), np.maximum(min_stds, spread.std)
    pair_stds = (
        replica_differences.std(axis=2, ddof=1) if runs > 1 else np.hypot(single_stds[first], single_stds[second])
    )
    replicas = replica_differences.mean(axis=2)
    replicas = np.sign(replicas) * (
        np.abs(replicas) > TIE_ERRORS * np.maximum(pair_stds, min_pair_stds) / math.sqrt(runs)
    )
    published_signs = np.array(
        [
            _compute_sign(first_number, second_number, spread)
            for first_number, second_number in combinations(published_numbers, 2)
        ]
    )
    untied_roots = np.sqrt(np.count_nonzero(published_signs) * np.count_nonzero(replicas, axis=1))
    replica_taus = (replicas @ published_signs)[untied_roots > 0] / untied_roots[untied_roots > 0]
    return float(replica_taus.mean()) if len(replica_taus) else None


def compute_contrast(method_number: Number, rival_number: Number, spread: Spread | None) -> Contrast:
    """How much higher one mean is than another, with an interval of 95%."""
    difference, error, df, is_paired = _compute_difference(method_number, rival_number, spread)
    if df is None:
        return Contrast(difference, None, None, is_paired)
    half_width = float(stdtrit(df, 0.975)) * error
    return Contrast(difference, difference - half_width, difference + half_width, is_paired)


def _choose_agreement(measured_number: Number) -> VerdictWord:
    words: dict[int, VerdictWord] = {1: "agrees (one seed)", 2: "agrees (two seeds)"}
    return words.get(measured_number.runs or 1, "agrees")


def _compute_variance(number: Number, spread: Spread | None) -> Spread | None:
    """The variance of a mean, with its degrees of freedom; None where nothing tells it."""
    runs = number.runs or 1
    run_spread = Spread(number.std, runs - 1) if number.std is not None and runs > 1 else spread
    if number.min_std and (run_spread is None or run_spread.std < number.min_std):
        run_spread = Spread(number.min_std, math.inf)
    return Spread(run_spread.std**2 / runs, run_spread.df) if run_spread else None


def _compute_difference(
    first: Number, second: Number, spread: Spread | None
) -> tuple[float, float, float | None, bool]:
    """A difference of means, its standard error and degrees of freedom (Welch's), and whether it is paired by seed.

    Where nothing tells how runs vary, the error is 0, and there are no degrees of freedom.
    """
    min_error = math.hypot(*(number.min_std / math.sqrt(number.runs or 1) for number in (first, second)))
    by_seed = first.subtract(second)
    if by_seed.std is not None and by_seed.runs:
        error = by_seed.std / math.sqrt(by_seed.runs)
        return by_seed.mean, max(error, min_error), by_seed.runs - 1 if error >= min_error else math.inf, True
    variances = [
        variance for variance in (_compute_variance(first, spread), _compute_variance(second, spread)) if variance
    ]
    total = sum(variance for variance, _ in variances)
    df = (
        total**2 / df_denominator
        if (df_denominator := sum(variance**2 / free for variance, free in variances))
        else math.inf
    )
    return first.mean - second.mean, math.sqrt(total), df if variances else None, False


def _compute_sign(first: Number, second: Number, spread: Spread | None) -> float:
    """The sign of a difference; 0 within two standard errors."""
    difference, error, _, _ = _compute_difference(first, second, spread)
    return float(np.sign(difference)) if abs(difference) > TIE_ERRORS * error else 0.0
