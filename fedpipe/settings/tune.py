"""The section `tune`: a search for the hyperparameters of every method, with the same budget for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from fedpipe.settings.base import Section, ValidationProtocol, convert_to_number, require_unique_values

CONTINUING_DIVISOR = 3  #: one of so many draws continues after a rung
SIGNIFICANT_DIGITS = 3  #: of drawn numbers, so that all machines draw the same ones
TUNABLE_SECTIONS = ("federation", "model", "transforms", "algorithms")
Bound = Annotated[int | float, BeforeValidator(convert_to_number)]
Scale = Literal["log", "linear", "choice"]
Sampler = Literal["sobol", "tpe"]


class Range(Section):
    """The values of a key: between two bounds, or from a list."""

    log: tuple[Bound, Bound] | None = Field(
        None, description="Bounds of values that are uniform on a logarithmic scale, such as `[0.001, 1]`."
    )
    linear: tuple[Bound, Bound] | None = Field(None, description="Bounds of values that are uniform.")
    choice: tuple[Any, ...] | None = Field(
        None, min_length=1, description="List of values, which are drawn with equal probabilities."
    )

    _require_unique_values = field_validator("choice")(lambda values: values and require_unique_values(values))

    @model_validator(mode="before")
    @classmethod
    def _require_mapping(cls, value: Any) -> Any:
        if isinstance(value, (Mapping, Range)):
            return value
        values = value if isinstance(value, list) else "[A, B]"
        raise ValueError(
            f"{value!r} can't be used. Use {{log: [LOW, HIGH]}} or {{linear: [LOW, HIGH]}} for a range, or {{choice: "
            f"{values}}} for a list of values."
        )

    @field_validator("log", "linear")
    @classmethod
    def _check_bounds(cls, bounds: tuple[float, float] | None, info: ValidationInfo) -> tuple[float, float] | None:
        if bounds and bounds[0] >= bounds[1]:
            raise ValueError(f"{list(bounds)} is not ascending. Write the smaller bound first.")
        if bounds and bounds[0] <= 0 and info.field_name == "log":
            raise ValueError(f"{list(bounds)} can't be used, because {bounds[0]} has no logarithm. Use more than 0.")
        return bounds

    @model_validator(mode="after")
    def _require_single_scale(self) -> Range:
        names = [name for name in get_args(Scale) if getattr(self, name) is not None]
        if len(names) != 1:
            found = " and ".join(names) or "nothing"
            raise ValueError(f"it sets {found}. Set one of log, linear and choice, such as {{log: [0.001, 1]}}.")
        return self

    @property
    def scale(self) -> Scale:
        """The scale that is set."""
        return cast(Scale, next(name for name in get_args(Scale) if getattr(self, name) is not None))

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of numbers."""
        return cast(tuple[float, float], self.log or self.linear)

    @property
    def has_integers(self) -> bool:
        """Whether its values are all integers between two bounds."""
        return self.choice is None and all(isinstance(bound, int) for bound in self.bounds)

    def interpolate_value(self, fraction: float) -> Any:
        """Get the value at a fraction in [0, 1) of the range."""
        if self.choice is not None:
            return self.choice[int(fraction * len(self.choice))]
        low, high = self.bounds
        margin = 0.5 if self.has_integers else 0.0  # each integer has the same room
        start, stop = low - margin, high + margin
        if self.log is not None:
            return self.round_to_digits(math.exp(math.log(start) + fraction * (math.log(stop) - math.log(start))))
        return self.round_to_digits(start + fraction * (stop - start))

    def round_to_digits(self, value: float) -> float:
        """Round a number: to an integer if both bounds are integers, and otherwise to three significant digits."""
        low, high = self.bounds
        rounded_value = round(value) if self.has_integers else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        return min(max(rounded_value, low), high)

    def find_near_bound(self, value: Any) -> tuple[float, int] | None:
        """Find the bound that a drawn value is near, and its side: -1 for the lower one, otherwise 1.

        A value is near a bound in the lowest or highest tenth of the scale. In a list of numbers, it is near one if it
        is the smallest or largest of them. None if it is near no bound, or if the list has other values.
        """
        numbers = self.bounds if self.choice is None else self.choice
        if len(numbers) == 1 or not all(type(number) in {int, float} for number in numbers):
            return None
        low, high = min(numbers), max(numbers)
        scale = math.log if self.log is not None else float
        fraction = (scale(value) - scale(low)) / (scale(high) - scale(low))
        margin = 0.1 if self.choice is None else 0.0
        if value == low or fraction < margin:
            return low, -1
        return (high, 1) if value == high or fraction > 1 - margin else None


class Tune(Section):
    """A search for the hyperparameters of every method, with the same number of draws and rounds for each.

    The winners run with the study's seeds. The table shows them next to the settings of this file. Without this
    section nothing is tuned.
    """

    over: dict[str, Range] = Field(
        min_length=1,
        description="Ranges by key, such as `federation.learning_rate: {log: [0.001, 1]}`, `{linear: [0.0, 1.0]}` or "
        "`{choice: [8, 16]}`. A key in `algorithms.LABEL` is for this method. All methods try the same values of other "
        "keys. Numbers are integers if both bounds are, as in `federation.local_epochs: {linear: [1, 5]}`.",
    )
    draws: int = Field(ge=2, le=10_000, description="Draws of each method.")
    rungs: tuple[Annotated[int, Field(ge=1, le=9999, strict=True)], ...] = Field(
        min_length=1,
        description="Numbers of rounds, such as `[20, 60, 180]`. After each, the best third of the different draws "
        "(rounded up) continues. After the last, the best one wins.",
    )
    by: ValidationProtocol = Field(
        description="Protocol on the clients' validation samples that ranks the draws, in the study's first metric "
        "over all of these samples. A method with its own `protocol` is ranked by that model."
    )
    seeds: tuple[int, ...] = Field(
        min_length=1, description="Seeds of the draws' runs, none of study.seeds. The score is the mean over them."
    )
    sampler: Sampler = Field(
        "sobol",
        description="How values are drawn. With `sobol` all draws are values of a scrambled Sobol sequence. With `tpe` "
        "only those of the first rung are, and after each rung except the last, Optuna's TPE draws new values from "
        "the ranking (`pip install 'fedpipe[optuna]'`).",
    )

    _require_unique_seeds = field_validator("seeds")(require_unique_values)

    @field_validator("over", mode="before")
    @classmethod
    def _reject_nested_keys(cls, over: Any) -> Any:
        """Reject sections, which a preset or ``-S`` adds for a key such as `tune.over.federation.learning_rate`."""
        for section in TUNABLE_SECTIONS:
            keys = over.get(section) if isinstance(over, Mapping) else None
            if isinstance(keys, Mapping) and keys.keys() - Range.model_fields.keys():
                raise ValueError(
                    f"'{section}' is not a single key, such as '{section}.NAME'. A preset and -S can only replace "
                    "tune.over as a whole, such as `tune.over={federation.learning_rate: {log: [0.001, 1]}}`."
                )
        return over

    @field_validator("rungs")
    @classmethod
    def _check_rungs(cls, rungs: tuple[int, ...]) -> tuple[int, ...]:
        for earlier, later in itertools.pairwise(rungs):
            if earlier >= later:
                raise ValueError(f"{later} follows {earlier}. Use ascending numbers of rounds, such as [20, 60, 180].")
        return rungs

    @model_validator(mode="after")
    def _require_enough_draws_and_rungs(self) -> Tune:
        if self.sampler == "tpe" and len(self.rungs) == 1:
            raise ValueError(
                f"sampler tpe can't be used with rungs {[*self.rungs]}, because new values are drawn after each rung "
                "except the last. Use at least two rungs, or sampler sobol."
            )
        if self.new_draw_counts[0] < 2:
            raise ValueError(
                f"{self.draws} draws can't be used with sampler tpe and {len(self.rungs)} rungs, because fewer than "
                "two are new in the first rung. Use more draws, or fewer rungs."
            )
        if count_draws_by_rung(self.new_draw_counts)[-1] < 2:
            needed = CONTINUING_DIVISOR ** (len(self.rungs) - 1) + 1
            raise ValueError(
                f"{self.draws} draws can't be used with {len(self.rungs)} rungs, because only one draw reaches round "
                f"{self.rungs[-1]}. Use at least {needed} draws, or fewer rungs."
            )
        return self

    @property
    def new_draw_counts(self) -> tuple[int, ...]:
        """Number of new draws of each method in each rung."""
        return count_new_draws_by_rung(self.draws, self.rungs, self.sampler)

    def select_ranges(self, label: str) -> dict[str, Range]:
        """Select the ranges that a method draws from. Those of all methods are the first, sorted by key."""
        common_keys = [key for key in sorted(self.over) if not key.startswith("algorithms.")]
        own_keys = [key for key in sorted(self.over) if key.startswith(f"algorithms.{label}.")]
        return {key: self.over[key] for key in (*common_keys, *own_keys)}

    def list_extreme_values(self, label: str) -> Iterator[dict[str, Any]]:
        """List values at both bounds of all ranges of a method, and between them, so that each choice is in one."""
        ranges = self.select_ranges(label)
        steps = max(len(one.choice or ()) for one in ranges.values()) or 1
        for fraction in (*(step / steps for step in range(steps)), math.nextafter(1, 0)):
            yield {key: one.interpolate_value(fraction) for key, one in ranges.items()}

    def draw_values(self, labels: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Draw values by a scrambled Sobol sequence that all methods share, so that they try the same common values.

        Returns the values of each draw by key, by label. Fewer draws are the first of these. Empty without ranges.
        """
        from scipy.stats import qmc  # imported here, because `fedpipe status` imports no NumPy

        from fedpipe.core import rng

        ranges = {label: self.select_ranges(label) for label in labels}
        dimensions = max(map(len, ranges.values()))
        sobol = qmc.Sobol(dimensions, rng=rng.make_generator(self.seeds[0], "tune"))
        points = sobol.random_base2(math.ceil(math.log2(self.draws)))[: self.draws].tolist()
        return {
            label: [
                {key: one.interpolate_value(fraction) for (key, one), fraction in zip(own.items(), point, strict=False)}
                for point in points
            ]
            if own
            else []
            for label, own in ranges.items()
        }


def count_new_draws_by_rung(draws: int, rungs: Sequence[int], sampler: Sampler) -> tuple[int, ...]:
    """Count the draws of a method that are new in each rung.

    New draws train from round 0 until the end of the rung. With TPE, the new draws of each rung train about the same
    number of rounds.

    Examples
    --------
    >>> count_new_draws_by_rung(27, [10, 20, 40], "sobol")
    (27, 0, 0)
    >>> count_new_draws_by_rung(27, [10, 20, 40], "tpe")
    (17, 7, 3)
    """
    if sampler == "sobol":
        return draws, *(0 for _ in rungs[1:])
    scale = sum(Fraction(1, rounds) for rounds in rungs)
    later_sizes = [max(1, int(draws / (rounds * scale))) for rounds in rungs[1:]]
    return draws - sum(later_sizes), *later_sizes


def count_draws_by_rung(new_draw_counts: Sequence[int]) -> tuple[int, ...]:
    """Count the draws of a method in each rung, if all are different: those that continue, and new ones.

    Examples
    --------
    >>> count_draws_by_rung((27, 0, 0))
    (27, 9, 3)
    >>> count_draws_by_rung((17, 7, 3))
    (17, 13, 8)
    """
    return tuple(
        itertools.accumulate(new_draw_counts, lambda count, new_draws: count_continuing_draws(count) + new_draws)
    )


def count_continuing_draws(draws: int) -> int:
    """Count the draws that continue after a rung: a third, rounded up, so at least one.

    Examples
    --------
    >>> [count_continuing_draws(draws) for draws in (27, 10, 4, 3, 2, 1)]
    [9, 4, 2, 1, 1, 1]
    """
    return -(-draws // CONTINUING_DIVISOR)
