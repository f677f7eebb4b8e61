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
Word: TypeAlias = Literal["agrees", "agrees (one seed)", "agrees (two seeds)", "near", "differs"]

CAP = 4.3  #: of t: its quantile at two degrees of freedom
NEAR = 3  #: bands within which a value is near
POINT = 1.0  #: the floor of a band, in points of accuracy
HIGH = 95.0  #: percent above which the floor is halved
EXACT = 1e-3  #: share by which a formula's value may be off: print has four digits
RESOLVED = 2  #: standard errors by which two methods must differ
DRAWS = 2000  #: of the replicas that a ceiling is the mean of
NO_STD = 1.0  #: points; what they are taken to vary where neither side has a standard deviation


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
    least: float = 0.0

    @classmethod
    def of(cls, values: Mapping[int, float]) -> Number:
        """The number that these values by seed make."""
        found = list(values.values())
        std = float(np.std(found, ddof=1)) if len(found) > 1 else None
        return cls(float(np.mean(found)), std, len(found), values)

    def minus(self, other: Number, factor: float = 1.0) -> Number:
        """The difference, times a factor: by seed where both have run the same seeds, else of the means alone."""
        if self.values and self.values.keys() == other.values.keys():
            return Number.of({seed: factor * (value - other.values[seed]) for seed, value in self.values.items()})
        return Number(factor * (self.mean - other.mean), None, min(self.runs or 1, other.runs or 1))


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

    word: Word
    difference: float | None = None
    band: Band | None = None


class Order(NamedTuple):
    """How a column's order of methods compares with print's.

    ``tau`` is Kendall's tau-b, where pairs within two standard errors are ties; None where all are. Where neither side
    has a standard deviation, runs are taken to vary by one point. ``ceiling`` is what a perfect replica with as many
    runs on as many test samples reaches on average. Of ``resolved`` pairs, which print tells apart, ``concordant`` have
    print's sign. ``best`` is print's best method (of equal ones that which is best here), ``ours`` the best measured
    one, and ``holds`` whether the two are within one standard error of each other here.
    """

    methods: int
    tau: float | None
    ceiling: float | None
    resolved: int
    concordant: int
    best: str
    ours: str
    holds: bool


class Contrast(NamedTuple):
    """A difference of two methods with its interval of 95%, by seed where both have run the same two seeds or more.

    ``low`` and ``high`` are None where nothing tells how runs vary.
    """

    difference: float
    low: float | None
    high: float | None
    paired: bool

    @property
    def sign(self) -> str:
        """``+`` or ``−`` where the interval leaves no doubt, else ``?``."""
        if self.low is None or self.high is None:
            return "?"
        return "+" if self.low > 0 else "−" if self.high < 0 else "?"


def pooled(numbers: Iterable[Number]) -> Spread | None:
    """The standard deviation of all numbers that have one, by their degrees of freedom."""
    known = [(number.std, (number.runs or 1) - 1) for number in numbers if number.std is not None]
    df = sum(free for _, free in known)
    return Spread(math.sqrt(sum(free * std**2 for std, free in known) / df), df) if df else None


def sampling(mean: float, tests: int) -> float:
    """The standard error of an accuracy in percent that is due to so many test samples."""
    return math.sqrt(mean * (100 - mean) / tests)


def value(published: Number, measured: Number, spread: Spread | None, tests: int) -> Verdict:
    """Whether a measured mean agrees with a printed one.

    Parameters
    ----------
    published, measured
        In percent. A number without runs is taken for one run.
    spread
        What runs vary by where a standard deviation is missing: the column's, pooled.
    tests
        Number of samples that the accuracy is of.
    """
    found = band(published, measured, spread, tests)
    difference = measured.mean - published.mean
    if abs(difference) <= found.width:
        return Verdict(_agrees(measured), difference, found)
    return Verdict("near" if abs(difference) <= NEAR * found.width else "differs", difference, found)


def band(published: Number, measured: Number, spread: Spread | None, tests: int) -> Band:
    """How far a measured mean may be from a printed one."""
    _, error, df, _ = _difference(measured, published, spread)
    t = min(float(stdtrit(df, 0.975)), CAP) if df else 0.0
    lowest = max(POINT, 2 * sampling(published.mean, tests))
    lowest = lowest / 2 if published.mean > HIGH else lowest
    return Band(max(t * error, lowest), error, t, lowest)


def failed(measured: Number, diverged: int, classes: int) -> Verdict:
    """Whether a method fails here that fails in print: some run diverged, or it stays at twice chance or below."""
    return Verdict(_agrees(measured) if diverged or measured.mean <= 200 / classes else "differs")


def exactly(published: float, measured: float) -> Verdict:
    """Whether a formula's value is that of print, to its digits."""
    same = abs(measured - published) <= EXACT * abs(published)
    return Verdict("agrees" if same else "differs", measured - published)


def order(published: Mapping[str, Number], measured: Mapping[str, Number]) -> Order | None:
    """How the order of the methods that both have compares; None for fewer than two."""
    names = [name for name in published if name in measured]
    if len(names) < 2:
        return None
    spread = pooled([*published.values(), *measured.values()]) or Spread(NO_STD, 1)
    pairs = list(combinations(names, 2))
    theirs = [_sign(published[one], published[two], spread) for one, two in pairs]
    ours = [_sign(measured[one], measured[two], spread) for one, two in pairs]
    signs = [np.sign(measured[one].mean - measured[two].mean) for one, two in pairs]
    best = max(names, key=lambda name: (published[name].mean, measured[name].mean))
    first = max(names, key=lambda name: measured[name].mean)
    behind, error, _, _ = _difference(measured[first], measured[best], spread)
    return Order(
        methods=len(names),
        tau=tau_b(theirs, ours),
        ceiling=ceiling([published[name] for name in names], [measured[name] for name in names], spread),
        resolved=sum(sign != 0 for sign in theirs),
        concordant=sum(sign != 0 and sign == other for sign, other in zip(theirs, signs, strict=True)),
        best=best,
        ours=first,
        holds=behind <= error,
    )


def tau_b(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders, each given as the signs of the same pairs, 0 for a tie; None if all are ties."""
    untied = math.sqrt(sum(sign != 0 for sign in one) * sum(sign != 0 for sign in two))
    return float(sum(np.sign(a) * np.sign(b) for a, b in zip(one, two, strict=True)) / untied) if untied else None


def ceiling(published: Sequence[Number], measured: Sequence[Number], spread: Spread | None) -> float | None:
    """Tau-b that replicas of what is printed reach on average: the same means, but known by what ours are known by.

    Parameters
    ----------
    published, measured
        A column's numbers, of the same methods. A replica has as many runs as the measured ones, by seed, which vary as
        print's do, but no less than ours do ``least``.
    spread
        What runs vary by where print has no standard deviation; one point where nothing tells.
    """
    spread = spread or Spread(NO_STD, 1)
    runs = min(number.runs or 1 for number in measured)
    least = np.array([number.least for number in measured])
    means = np.array([number.mean for number in published])
    stds = np.maximum([spread.std if number.std is None else number.std for number in published], least)
    values = np.random.default_rng(0).normal(means[:, None], stds[:, None], (DRAWS, len(means), runs))
    first, second = np.triu_indices(len(means), 1)
    by_seed = values[:, first] - values[:, second]
    lowest, alone = np.hypot(least[first], least[second]), np.maximum(least, spread.std)
    varied = by_seed.std(axis=2, ddof=1) if runs > 1 else np.hypot(alone[first], alone[second])
    replicas = by_seed.mean(axis=2)
    replicas = np.sign(replicas) * (np.abs(replicas) > RESOLVED * np.maximum(varied, lowest) / math.sqrt(runs))
    theirs = np.array([_sign(one, two, spread) for one, two in combinations(published, 2)])
    untied = np.sqrt(np.count_nonzero(theirs) * np.count_nonzero(replicas, axis=1))
    found = (replicas @ theirs)[untied > 0] / untied[untied > 0]
    return float(found.mean()) if len(found) else None


def contrast(own: Number, other: Number, spread: Spread | None) -> Contrast:
    """How much higher one mean is than another, with an interval of 95%."""
    difference, error, df, paired = _difference(own, other, spread)
    if df is None:
        return Contrast(difference, None, None, paired)
    reach = float(stdtrit(df, 0.975)) * error
    return Contrast(difference, difference - reach, difference + reach, paired)


def _agrees(measured: Number) -> Word:
    words: dict[int, Word] = {1: "agrees (one seed)", 2: "agrees (two seeds)"}
    return words.get(measured.runs or 1, "agrees")


def _variance(number: Number, spread: Spread | None) -> Spread | None:
    """The variance of a mean, with its degrees of freedom; None where nothing tells it."""
    runs = number.runs or 1
    known = Spread(number.std, runs - 1) if number.std is not None and runs > 1 else spread
    if number.least and (known is None or known.std < number.least):
        known = Spread(number.least, math.inf)
    return Spread(known.std**2 / runs, known.df) if known else None


def _difference(one: Number, two: Number, spread: Spread | None) -> tuple[float, float, float | None, bool]:
    """A difference of means, its standard error and degrees of freedom (Welch's), and whether it is paired by seed.

    Where nothing tells how runs vary, the error is 0, and there are no degrees of freedom.
    """
    lowest = math.hypot(*(number.least / math.sqrt(number.runs or 1) for number in (one, two)))
    by_seed = one.minus(two)
    if by_seed.std is not None and by_seed.runs:
        error = by_seed.std / math.sqrt(by_seed.runs)
        return by_seed.mean, max(error, lowest), by_seed.runs - 1 if error >= lowest else math.inf, True
    found = [variance for variance in (_variance(one, spread), _variance(two, spread)) if variance]
    total = sum(variance for variance, _ in found)
    df = total**2 / parts if (parts := sum(variance**2 / free for variance, free in found)) else math.inf
    return one.mean - two.mean, math.sqrt(total), df if found else None, False


def _sign(one: Number, two: Number, spread: Spread | None) -> float:
    """The sign of a difference; 0 within two standard errors."""
    difference, error, _, _ = _difference(one, two, spread)
    return float(np.sign(difference)) if abs(difference) > RESOLVED * error else 0.0
