"""The search of section `tune`: ranks the draws of a rung, and describes the search below the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.layout import MergedRoundFiles, RunFiles
from fedpipe.planning import search, tpe
from fedpipe.planning.plan import Plan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.planning.rungs import (
    TUNED,
    TUNING,
    UNTUNED,
    Candidate,
    DrawPlanner,
    PlannedSearch,
    PlannedTuning,
    RankedDraw,
    Rung,
    RungSearch,
    encode_rung,
    select_continuing_draws,
)
from fedpipe.report import results
from fedpipe.report.table_parts import TextTable
from fedpipe.report.words import DASH, METRICS, format_metric_label, format_number, join_words
from fedpipe.settings.base import Metric
from fedpipe.settings.tune import Range

RELATIVE_STEP = 1e-6  #: from a bound of real numbers to a value beyond it


class Measurement(NamedTuple):
    """What a draw's run measured until the end of a rung."""

    score: float  #: over all validation samples, as recorded
    has_diverged: bool  #: whether a round had no finite update


class Winner(NamedTuple):
    """The winner of a search."""

    search: PlannedSearch
    values: dict[str, Any]  #: by key of `tune.over`. None if a key does not concern the method
    texts: dict[str, str]  #: these values, the number of draws and the validation score, by the head of a column
    has_diverged: bool
    has_lost_to_diverged: bool  #: whether it diverged, but a draw that did not diverge was not continued
    settings: tuple[Path, ...]  #: files of its runs with the study's seeds, and then of its draw's runs


def compute_rung_result(plan: Plan, rounds: int, draw_planners: Sequence[DrawPlanner] = ()) -> Rung:
    """Rank the draws of a rung, and select those that continue: the best third, or the winner.

    The score of a draw is the mean over its seeds in the last round of the rung. Draws that diverged rank last, and
    draws with equal scores rank by their number. With TPE, new draws enter the next rung. ``draw_planners`` plan
    those of each search. By default they are those of the stored result, without keys if their values differ.

    Raises
    ------
    ArtifactError
        The result of the rung before or a file of a run is missing or damaged, or a method has no such score.
    """
    tuning = _get_planned_tuning(plan)
    number, is_last = tuning.rungs.index(rounds), rounds == tuning.rungs[-1]
    stored_tuning, earlier_rungs = _get_planned_tuning(plan.add_search_results()), plan.read_rungs()[:number]
    tuning = tuning.replace_tpe_draws(earlier_rungs)
    if len(earlier_rungs) < number:
        raise ArtifactError(
            f"{plan.rung_files[number - 1]} is missing or of another search. If it exists, delete it. Then type "
            f"`{plan.run_command}`, which ranks that rung first."
        )
    found = []
    for index, planned in enumerate(tuning.searches):
        draws = tuning.list_rung_draws(planned, number, earlier_rungs[-1].searches[index].selected if number else ())
        files = {draw: [run.get_merged_files(rounds) for run in planned.list_run_files(draw)] for draw in draws}
        measurements = {draw: [measure_draw(one, planned, tuning.metric) for one in files[draw]] for draw in files}
        ranking = rank_draws(measurements, METRICS[tuning.metric].improvement_sign)
        selected = select_continuing_draws(planned.draws, [ranked.draw for ranked in ranking], is_last)
        keys = search.list_winner_keys(plan, planned, selected[0]) if is_last and selected else []
        found.append(
            RungSearch(
                algorithm=planned.algorithm, grid=planned.grid, ranking=ranking, selected=selected, keys=tuple(keys)
            )
        )
    rung = Rung(search=plan.search_digest, rounds=rounds, searches=tuple(found))

    def make_candidate(stored_search: PlannedSearch, draw: int, values: dict[str, Any]) -> Candidate:
        stored = stored_search.draws[draw]
        return stored if stored.values == values else replace(stored, values=values, keys=())

    default_planners = [partial(make_candidate, stored_search) for stored_search in stored_tuning.searches]
    return tpe.add_draws_of_next_rung(tuning, [*earlier_rungs, rung], draw_planners or default_planners)


def build_rung_files(plan: Plan) -> dict[Path, bytes]:
    """Build the results of all rungs of a complete search from the runs of the draws, by path. Empty without `tune`."""
    rungs = plan.tuning.rungs if plan.tuning else ()
    return {
        plan.study_files.get_rung_result_path(rounds): encode_rung(compute_rung_result(plan, rounds))
        for rounds in rungs
    }


def measure_draw(files: MergedRoundFiles, planned: PlannedSearch, metric: Metric) -> Measurement:
    """Measure a draw's run in its last merged round."""
    metrics = results.read_merged_frame(files.metrics)
    scores = results.compute_scores(metrics[metrics["round"] == files.round_count], [metric])
    scores = scores[(scores["average"] == "sample") & (scores["protocol"] == planned.protocol)]
    if scores.empty:
        label = planned.algorithm
        raise ArtifactError(
            f"tune.by: {planned.protocol} has no value for {label}, which has no such model. Set "
            f"algorithms.{label}.protocol to a model that it has, such as personal-on-local."
        )
    traffic = results.read_merged_frame(files.rounds)
    return Measurement(float(scores["score"].iloc[0]), bool((traffic["left_out"] == traffic["participants"]).any()))


def rank_draws(measurements: Mapping[int, Sequence[Measurement]], improvement_sign: int) -> tuple[RankedDraw, ...]:
    """Rank draws, best first, by the means of their measurements over seeds.

    ``improvement_sign`` is -1 if lower is better.

    Examples
    --------
    >>> scores = {0: [Measurement(0.5, False)], 1: [Measurement(0.9, True)], 2: [Measurement(0.5, False)]}
    >>> [ranked.draw for ranked in rank_draws(scores, 1)]
    [0, 2, 1]
    """
    ranking = []
    for draw, by_seed in measurements.items():
        score = math.fsum(measurement.score for measurement in by_seed) / len(by_seed)
        has_diverged = not math.isfinite(score) or any(measurement.has_diverged for measurement in by_seed)
        ranking.append(RankedDraw(draw=draw, score=score if math.isfinite(score) else None, diverged=has_diverged))

    def get_sort_key(ranked: RankedDraw) -> tuple[bool, float, int]:
        score = math.inf if ranked.score is None else -improvement_sign * ranked.score
        return ranked.diverged, score, ranked.draw

    return tuple(sorted(ranking, key=get_sort_key))


def build_draws_frame(plan: Plan) -> pd.DataFrame:
    """Build the table of all draws in all complete rungs. Empty without `tune`.

    The columns are ``algorithm``, one per name of the study's grid, ``draw``, one per key of `tune.over` (None if it
    does not concern the method), ``rounds`` of the rung, ``rank``, ``score`` (mean over seeds), ``diverged`` and
    ``selected``.
    """
    rows = []
    for rung in plan.read_rungs():
        for planned, result in zip(_get_planned_tuning(plan).searches, rung.searches, strict=True):
            for rank, ranked in enumerate(result.ranking, start=1):
                rows.append(
                    {
                        "algorithm": planned.algorithm,
                        **_format_search_grid_point(plan, planned),
                        "draw": ranked.draw,
                        **_get_draw_values(plan, planned, ranked.draw),
                        "rounds": rung.rounds,
                        "rank": rank,
                        "score": math.nan if ranked.score is None else ranked.score,
                        "diverged": ranked.diverged,
                        "selected": ranked.draw in result.selected,
                    }
                )
    return pd.DataFrame(rows)


def list_winners(plan: Plan) -> list[Winner]:
    """List the winner of each method at each point of the study's grid. Empty until the search is complete."""
    rungs = plan.read_rungs()
    if plan.tuning is None or len(rungs) < len(plan.tuning.rungs):
        return []
    winners, metric, heads = [], METRICS[plan.tuning.metric], _shorten_keys(plan)
    for index, (planned, result) in enumerate(zip(plan.tuning.searches, rungs[-1].searches, strict=True)):
        ranked = result.ranking[0] if result.ranking else None
        values = _get_draw_values(plan, planned, ranked.draw) if ranked else dict.fromkeys(plan.tuning.over)
        texts = {heads[key]: DASH if value is None else str(value) for key, value in values.items()}
        score = None if ranked is None or ranked.score is None else format_number(metric.factor * ranked.score)
        texts |= {"draws": _format_draw_count(planned), f"validation {metric.name_with_unit}": score or DASH}
        has_diverged = ranked is not None and ranked.diverged
        last_results = {
            planned.draws[one.draw].keys: one.diverged for rung in rungs for one in rung.searches[index].ranking
        }
        has_lost = has_diverged and not all(last_results.values())
        runs = [RunFiles.from_key(planned.algorithm, key) for key in result.keys]
        runs += planned.list_run_files(ranked.draw) if ranked else []
        settings = tuple(files.settings for files in runs)
        winners.append(Winner(planned, values, texts, has_diverged, has_lost, settings))
    return winners


def _shorten_keys(plan: Plan) -> dict[str, str]:
    """Shorten the names of the grid and the searched keys, which are heads of one table."""
    return results.shorten_dotted_keys([*plan.grid, *_get_planned_tuning(plan).over])


def build_search_section(plan: Plan) -> list[str | TextTable]:
    """Build the sentences about the search, and the table of the winning values. Empty without `tune`."""
    if plan.tuning is None:
        return []
    rows, near_bounds, heads = [], [], _shorten_keys(plan)
    failed, failed_later = list[str](), list[str]()
    for winner in list_winners(plan):
        title, point = plan.get_method_title(winner.search.algorithm), _format_search_grid_point(plan, winner.search)
        name = results.describe_configuration(title, point)
        if winner.has_diverged:
            (failed_later if winner.has_lost_to_diverged else failed).append(name)
        else:
            near_bounds += [f"{heads[key]} of {name}" for key in list_keys_near_bound(plan.tuning, winner)]
        point_texts = {heads[name]: value or DASH for name, value in point.items()}
        rows.append({"algorithm": title, **point_texts, **winner.texts})
    if not rows:
        return ["The search of `tune` is not complete, so the table has no rows with the best draws yet."]
    warnings = [f"Warning: all draws of {join_words(failed)} diverged, so the winner is arbitrary."] if failed else []
    if failed_later:
        warnings.append(
            f"Warning: all draws of {join_words(failed_later)} that reached round {plan.tuning.rungs[-1]} diverged, so "
            "the winner is arbitrary. Draws that did not diverge were not continued. Use a longer first rung, or a "
            "narrower range."
        )
    bound_note = (
        [f"Some winners are near a bound of their range: {join_words(near_bounds)}. Try a wider range."]
        if near_bounds
        else []
    )
    return [describe_hyperparameter_search(plan), TextTable(pd.DataFrame(rows), len(plan.grid)), *warnings, *bound_note]


def list_keys_near_bound(tuning: PlannedTuning, winner: Winner) -> list[str]:
    """List the keys whose winning value is near a bound of the range, unless the parameter has no value beyond it."""
    keys = []
    for key, value in winner.values.items():
        near_bound = None if value is None else Range.model_validate(tuning.over[key]).find_near_bound(value)
        if near_bound is None:
            continue
        (bound, side), (section, _, name) = near_bound, key.partition(".")
        if section == "algorithms":
            section, name = "algorithm", name.partition(".")[2]
        path = next(filter(Path.is_file, winner.settings), winner.settings[0])  # the runs have the same components
        settings = RunSettings.read_unchecked(path)
        steps = (1, RELATIVE_STEP * (abs(bound) or 1))  # of integers and real numbers
        keys += [key] if any(settings.is_valid_value(section, name, bound + side * step) for step in steps) else []
    return keys


def describe_hyperparameter_search(plan: Plan) -> str:
    """Describe how the methods were tuned, so that a reader sees that each had the same budget."""
    tuning = _get_planned_tuning(plan)
    protocols = dict.fromkeys(planned.protocol for planned in tuning.searches)
    measures = join_words([format_metric_label(protocol, tuning.metric) for protocol in protocols])
    *earlier, last = map(str, tuning.rungs)
    plural = "s" if len(earlier) > 1 else ""
    earlier_rounds = f"the best third continued after round{plural} {join_words(earlier)}, and " if earlier else ""
    equal_note = _describe_repeated_draws(plan, tuning)
    ranges = ", ".join(
        f"{key} {scale} {list(values)}" for key, bounds in tuning.over.items() for scale, values in bounds.items()
    )
    untuned = dict.fromkeys(
        plan.get_method_title(planned.algorithm) for planned in tuning.searches if not planned.candidates
    )
    untuned_note = f" No range concerns {join_words([*untuned])}, whose rows are equal." if untuned else ""
    batches = [
        f"{len(tuning.get_new_draw_numbers(number))} after round {rounds}"
        for number, rounds in enumerate(tuning.rungs[:-1], 1)
    ]
    sampler_note = (
        f"Optuna's TPE drew {join_words(batches)} from the ranking until then, and the others are of a Sobol sequence. "
        if tuning.sampler == "tpe"
        else ""
    )
    seeds = f"seed{'s' if len(tuning.seeds) > 1 else ''} {join_words([*map(str, tuning.seeds)])}"
    return (
        f"Rows with tuning `{UNTUNED}` use the settings of the study's file, and rows with `{TUNED}` the best of "
        f"{tuning.draws} draws. Every method with a range had {tuning.draws} draws: {earlier_rounds}the best draw "
        f"after round {last} won. {equal_note}{sampler_note}Draws were ranked by {measures}, over all "
        f"validation samples, with {seeds}. {_describe_test_samples(plan, tuning)} Ranges: {ranges}.{untuned_note}"
    )


def _format_draw_count(search: PlannedSearch) -> str:
    """Format the number of draws of a method, and how many are different if some are equal."""
    count, different = len(search.candidates), search.num_different_draws
    return f"{count}" if count == different else f"{count} ({different} different)"


def _describe_repeated_draws(plan: Plan, tuning: PlannedTuning) -> str:
    """Describe which methods have equal draws. Empty if all draws are different."""
    counts: dict[str, list[int]] = {}
    for planned in tuning.searches:
        if planned.num_different_draws < len(planned.candidates):
            counts.setdefault(plan.get_method_title(planned.algorithm), []).append(planned.num_different_draws)
    texts = [
        f"{title} had {' to '.join(map(str, sorted({min(found), max(found)})))}" for title, found in counts.items()
    ]
    return f"Draws with equal values count as one, so {join_words(texts)} different draws. " if texts else ""


def _describe_test_samples(plan: Plan, tuning: PlannedTuning) -> str:
    """Describe whether samples of the draws' runs can be test samples of the study."""
    draws_partitions = {key for planned in tuning.searches for key in planned.partitions}
    has_other_test_samples = any(
        settings["dataset"].get("split") == "pooled" for settings in plan.partitions.values()
    ) and not draws_partitions <= {*plan.partitions}
    if not has_other_test_samples:
        return "They used no test samples."
    return (
        "They were not evaluated on test samples. But with split `pooled` each seed has other test samples, so their "
        "training and validation samples can be test samples of the study."
    )


def _get_planned_tuning(plan: Plan) -> PlannedTuning:
    if plan.tuning is None:
        raise ArtifactError(f"{plan.params}: the study has no section `tune`. Type `fedpipe plan`, and run again.")
    return plan.tuning


def _format_search_grid_point(plan: Plan, planned: PlannedSearch) -> dict[str, str]:
    """Format the grid values of a search as text by name."""
    return {name: value for name, value in results.format_grid_point(plan, planned).items() if name != TUNING}


def _get_draw_values(plan: Plan, planned: PlannedSearch, draw: int) -> dict[str, Any]:
    """Get the values of a draw by key of `tune.over`. None if a key does not concern the method."""
    values = planned.draws[draw].values
    return {key: values.get(key) for key in _get_planned_tuning(plan).over}
