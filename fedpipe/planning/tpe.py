"""Draws values by Optuna's tree-structured Parzen estimator (TPE), for each method after a rung.

Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011. The estimator gets all earlier draws of the
method at once, in memory, so the draws are a function of their ranking, the first seed of `tune.seeds` and the rung. It
reads only the order of the draws, because scores after different rounds can't be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedpipe.core import rng
from fedpipe.planning.rungs import DrawPlanner, PlannedSearch, PlannedTuning, RankedDraw, Rung, RungSearch
from fedpipe.settings.tune import Range

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def add_draws_of_next_rung(tuning: PlannedTuning, rungs: Sequence[Rung], draw_planners: Sequence[DrawPlanner]) -> Rung:
    """Add the draws that enter the next rung to the last of these complete rungs. There are none without TPE."""
    tuning, rung, numbers = tuning.replace_tpe_draws(rungs), rungs[-1], tuning.get_new_draw_numbers(len(rungs))
    seed = rng.derive_entropy(tuning.seeds[0], "tune", rung.rounds) % 2**32
    results = []
    for index, (search, plan_draw) in enumerate(zip(tuning.searches, draw_planners, strict=True)):
        if numbers and search.candidates:
            ranges = {key: Range.model_validate(tuning.over[key]) for key in sorted(search.draws[0].values)}
            ranking = rank_all_draws(search, [one.searches[index] for one in rungs])
            values_by_draw = {draw: search.draws[draw].values for draw in ranking}
            new_values = draw_tpe_values(ranges, values_by_draw, len(numbers), seed)
            new_draws = tuple(plan_draw(draw, values) for draw, values in zip(numbers, new_values, strict=True))
            results.append(replace(rung.searches[index], new_draws=new_draws))
        else:
            results.append(rung.searches[index])
    return replace(rung, searches=tuple(results))


def rank_all_draws(search: PlannedSearch, results: Sequence[RungSearch]) -> list[int]:
    """Rank the different draws of all rungs, best first.

    Draws of a later rung rank before the others, and within a rung as there. Draws that diverged rank last.
    """
    ranked_draws: dict[tuple[str, ...], RankedDraw] = {}
    for ranked in (ranked for result in reversed(results) for ranked in result.ranking):
        ranked_draws.setdefault(search.draws[ranked.draw].keys, ranked)
    return [ranked.draw for ranked in sorted(ranked_draws.values(), key=lambda ranked: ranked.diverged)]


def draw_tpe_values(
    ranges: Mapping[str, Range], values_by_draw: Mapping[int, Mapping[str, Any]], count: int, seed: int
) -> list[dict[str, Any]]:
    """Draw values by TPE. Optuna keeps the new draws apart, because their scores are not known.

    ``values_by_draw`` has the values of the earlier draws by number, best first. ``seed`` has 32 bits.
    """
    import optuna  # an extra, which planning has checked

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _make_distribution(one) for key, one in ranges.items()}
    # Optuna minimizes the value, here the position in the ranking. The Sobol sequence replaces its random first trials.
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=1))
    positions = {draw: position for position, draw in enumerate(values_by_draw)}
    for draw in sorted(positions):  # TPE weights recent trials more
        params = {
            key: value if (choice := ranges[key].choice) is None else choice.index(value)
            for key, value in values_by_draw[draw].items()
        }
        trial = optuna.create_trial(params=params, distributions=distributions, value=positions[draw])
        study.add_trial(trial)
    return [
        {
            key: one.round_to_digits(params[key]) if one.choice is None else one.choice[params[key]]
            for key, one in ranges.items()
        }
        for params in (study.ask(distributions).params for _ in range(count))
    ]


def _make_distribution(one: Range) -> BaseDistribution:
    """Make Optuna's distribution of a range. A choice is drawn by its index."""
    from optuna import distributions

    if one.choice is not None:
        return distributions.CategoricalDistribution(range(len(one.choice)))
    (low, high), is_log = one.bounds, one.log is not None
    if one.has_integers:
        return distributions.IntDistribution(int(low), int(high), log=is_log)
    return distributions.FloatDistribution(low, high, log=is_log)
