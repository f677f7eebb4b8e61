"""The search of section `tune` in a study's plan, and the results of its rungs.

The draws of the Sobol sequence are known when the study is planned. After each rung it is known which of them continue.
The result of a rung is a file next to the study's tables. This file also contains the draws that TPE adds to the next
rung.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import not_
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, with_config

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.files import encode_json, read_verified_bytes
from fedpipe.core.storage.layout import RunFiles
from fedpipe.settings.base import DatasetName, Key, Label, Metric, ValidationProtocol
from fedpipe.settings.tune import Sampler, count_continuing_draws, count_new_draws_by_rung

TUNING = "tuning"  #: name of the grid that distinguishes a method's tuned and default settings
TUNED, UNTUNED = "tuned", "default"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A draw of a method."""

    draw: int  #: its number, from 0
    values: dict[str, Any]  #: drawn values by key
    participants: int  #: clients in a round, m
    keys: tuple[Key, ...]  #: key of its run with each seed of `tune.seeds`


DrawPlanner = Callable[[int, dict[str, Any]], Candidate]  #: plans a draw of a search from its number and values


@dataclass(frozen=True, kw_only=True)
class PlannedSearch:
    """The draws of a method at a point of the study's grid."""

    algorithm: Label
    grid: dict[str, Any]  #: grid values that concern the algorithm
    protocol: ValidationProtocol  #: protocol that ranks the draws
    dataset: DatasetName
    partitions: tuple[Key, ...]  #: partition of each seed of `tune.seeds`
    #: Draws of the Sobol sequence. Empty if no key of `tune.over` concerns the method. With TPE, those after the first
    #: rung are assumed in forecasts, until TPE's draws replace them.
    candidates: tuple[Candidate, ...]
    new_draws: Annotated[tuple[Candidate, ...], Field(exclude_if=not_)] = ()  #: those of TPE, after complete rungs

    @cached_property
    def draws(self) -> tuple[Candidate, ...]:
        """All draws by number."""
        return tuple({candidate.draw: candidate for candidate in (*self.candidates, *self.new_draws)}.values())

    @property
    def num_different_draws(self) -> int:
        """Number of draws that differ in their values, so that they have different runs."""
        return len({candidate.keys for candidate in self.draws})

    def list_run_files(self, draw: int) -> list[RunFiles]:
        """List the files of a draw's runs, one for each seed of `tune.seeds`."""
        return [RunFiles.from_key(self.algorithm, key) for key in self.draws[draw].keys]


@dataclass(frozen=True, kw_only=True)
class PlannedTuning:
    """The section `tune` of a study, and its draws."""

    over: dict[str, dict[str, list[Any]]]  #: range by key, as in the study's file
    draws: int
    rungs: tuple[int, ...]
    seeds: tuple[int, ...]
    metric: Metric
    searches: tuple[PlannedSearch, ...]
    sampler: Annotated[Sampler, Field(exclude_if=lambda sampler: sampler == "sobol")] = "sobol"

    @property
    def new_draw_counts(self) -> tuple[int, ...]:
        """Number of new draws of each method in each rung."""
        return count_new_draws_by_rung(self.draws, self.rungs, self.sampler)

    def get_new_draw_numbers(self, number: int) -> range:
        """Get the numbers of the draws that are new in a rung, by its index. Empty after the last rung."""
        return range(sum(self.new_draw_counts[:number]), sum(self.new_draw_counts[: number + 1]))

    def list_rung_draws(self, search: PlannedSearch, number: int, selected: Sequence[int]) -> list[int]:
        """List the draws of a search in a rung, by its index: those that continue, and new ones."""
        return [*selected, *self.get_new_draw_numbers(number)] if search.candidates else []

    def count_later_runs(self, complete_rungs: int, num_seeds: int) -> int:
        """Count the runs that the incomplete rungs add at most: draws of TPE, and winners with the study's seeds."""
        if complete_rungs == len(self.rungs):
            return 0
        new_draws = sum(self.new_draw_counts[complete_rungs + 1 :])
        return sum(bool(search.candidates) for search in self.searches) * (new_draws * len(self.seeds) + num_seeds)

    def replace_tpe_draws(self, rungs: Sequence[Rung]) -> PlannedTuning:
        """Replace the draws of TPE by those in the results of these rungs."""
        draws = [
            [new for rung in rungs for new in rung.searches[index].new_draws] for index in range(len(self.searches))
        ]
        searches = zip(self.searches, draws, strict=True)
        return replace(self, searches=tuple(replace(search, new_draws=tuple(new)) for search, new in searches))


@dataclass(frozen=True, kw_only=True)
class RankedDraw:
    """A draw in the ranking of a rung."""

    draw: int
    score: float | None  #: mean over seeds, as recorded. None if it is not a number
    diverged: bool  #: whether a run had a round without a finite update, or its score is not a number


@dataclass(frozen=True, kw_only=True)
class RungSearch:
    """The result of a rung for one method at a point of the grid."""

    algorithm: Label
    grid: dict[str, Any]
    ranking: tuple[RankedDraw, ...]  #: the draws of the rung, best first
    selected: tuple[int, ...]  #: the draws that continue, or the winner
    keys: tuple[Key, ...]  #: keys of the winner's runs with the study's seeds, after the last rung
    new_draws: Annotated[tuple[Candidate, ...], Field(exclude_if=not_)] = ()  #: draws of TPE that enter the next rung


@with_config(ConfigDict(strict=True))
@dataclass(frozen=True, kw_only=True)
class Rung:
    """The result of a rung."""

    search: Key  #: hash of the search that it belongs to
    rounds: int
    searches: tuple[RungSearch, ...]  #: in the order of the plan


def select_continuing_draws(candidates: Sequence[Candidate], ranking: Sequence[int], is_last: bool) -> tuple[int, ...]:
    """Select the draws that continue after a rung: the best third, or after the last rung the winner.

    Draws with the same values have the same runs, so that they count as one. ``ranking`` has the numbers of the rung's
    draws, best first.
    """
    best_draws: dict[tuple[Key, ...], int] = {}
    for draw in ranking:
        best_draws.setdefault(candidates[draw].keys, draw)
    return tuple(best_draws.values())[: 1 if is_last else count_continuing_draws(len(best_draws))]


def format_draw_label(draw: int) -> str:
    """Format the number of a draw as a grid value."""
    return f"draw {draw}"


def read_rungs(tuning: PlannedTuning, search: str, num_seeds: int, get_path: Callable[[int], Path]) -> tuple[Rung, ...]:
    """Read the results of the complete rungs, until the first that is missing or belongs to another search.

    ``search`` is the hash of the search. ``get_path`` gets the file of a rung from its number of rounds.
    """
    rungs: list[Rung] = []
    draws = [tuning.list_rung_draws(planned, 0, ()) for planned in tuning.searches]
    for number, rounds in enumerate(tuning.rungs, start=1):
        try:
            rung = _get_rung_type_adapter().validate_json(read_verified_bytes(get_path(rounds), None))
        except (ArtifactError, ValueError):  # missing, damaged, or from another version of fedpipe
            break
        num_keys, new_numbers = num_seeds if number == len(tuning.rungs) else 0, tuning.get_new_draw_numbers(number)
        is_valid = (rung.search, rung.rounds, len(rung.searches)) == (search, rounds, len(draws)) and all(
            (result.algorithm, result.grid) == (planned.algorithm, planned.grid)
            and sorted(ranked.draw for ranked in result.ranking) == sorted(entrants)
            and {*result.selected} <= {*entrants}
            and bool(result.selected) == bool(entrants)
            and len(result.keys) == (num_keys if entrants else 0)
            and [new.draw for new in result.new_draws] == ([*new_numbers] if entrants else [])
            and all(len(new.keys) == len(tuning.seeds) for new in result.new_draws)
            for result, planned, entrants in zip(rung.searches, tuning.searches, draws, strict=True)
        )
        if not is_valid:
            break
        rungs.append(rung)
        results = zip(tuning.searches, rung.searches, strict=True)
        draws = [tuning.list_rung_draws(planned, number, result.selected) for planned, result in results]
    return tuple(rungs)


def encode_rung(rung: Rung) -> bytes:
    """Encode the result of a rung as JSON."""
    return encode_json(_get_rung_type_adapter().dump_python(rung, mode="json"))


@cache
def _get_rung_type_adapter() -> TypeAdapter[Rung]:
    return TypeAdapter(Rung)
