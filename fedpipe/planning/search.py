"""Plans the search of section `tune`: the draws of each method, their runs, and the runs of the winners.

A draw is a function of the first seed of `tune.seeds`, the ranges and the draw's number, so all methods try the same
values of common keys. More draws continue the same sequence. With TPE, later draws also depend on the ranking of the
method's earlier draws. The runs of draws are evaluated only by the protocol that ranks them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from fedpipe.core.components.component import ALGORITHM
from fedpipe.core.errors import ArtifactError, SettingsError, suggest_name
from fedpipe.core.storage.files import write_bytes
from fedpipe.core.storage.layout import RunFiles
from fedpipe.planning import grid
from fedpipe.planning.plan import Plan, is_default_cell
from fedpipe.planning.run_settings import RunSettings, dump_evaluation_settings
from fedpipe.planning.rungs import TUNING, PlannedSearch, Rung, RungSearch, select_continuing_draws
from fedpipe.settings.base import ValidationProtocol, convert_to_validation_protocol
from fedpipe.settings.methods import DATA_KEYS, METHOD_KEYS
from fedpipe.settings.params import Params
from fedpipe.settings.tune import TUNABLE_SECTIONS, Tune, count_draws_by_rung


def get_ranking_protocol(tune: Tune, params: Params, label: str) -> ValidationProtocol:
    """Get the protocol that ranks the draws of a method: its own on validation samples, or `tune.by`."""
    own_protocol = params.algorithms[label].options.protocol
    return convert_to_validation_protocol(own_protocol) if own_protocol else tune.by


def check_tune_section(study_params: Params, preset_changes: dict[str, Any], grid_keys: dict[str, list[str]]) -> None:
    """Require that the search fits its study."""
    tune, study = study_params.tune, study_params.study
    if tune is None:
        return
    if tune.sampler == "tpe" and importlib.util.find_spec("optuna") is None:
        raise SettingsError("tune.sampler: 'tpe' needs the library optuna. Run `pip install 'fedpipe[optuna]'`.")
    for key in tune.over:
        _check_tuned_key(key, study_params)
        other_keys = [
            *(("the preset sets", one) for one in preset_changes),
            *((f"'{name}' in study.grid sets", one) for name, keys in grid_keys.items() for one in keys),
            *(("tune.over also has", one) for one in tune.over if one != key),
            *(
                (f"algorithms.{label}.overrides sets", one)
                for label in study.algorithms
                for one in study_params.algorithms[label].options.overrides
            ),
        ]
        for reason, other_key in other_keys:
            if grid.has_overlap(key, other_key):
                raise SettingsError(f"tune.over: '{key}' can't be tuned, because {reason} '{other_key}'. Remove one.")
    for seed in tune.seeds:
        if seed in study.seeds:
            raise SettingsError(
                f"tune.seeds: {seed} is also in study.seeds, so that the winners would be measured on the seed that "
                f"selected them. Use another seed, such as {max(*study.seeds, *tune.seeds) + 1}."
            )
    if TUNING in study.grid:
        raise SettingsError(f"study.grid.{TUNING}: an axis can't have this name in a study with `tune`. Rename it.")
    if study_params.diagnostics:
        raise SettingsError(
            f"diagnostics: {min(study_params.diagnostics)} can't be used with `tune`, whose winners are known only "
            "after the search. Write the winning values into another study, and analyze that."
        )


def check_rungs(tune: Tune, params: Params, label: str) -> None:
    """Require that the rungs fit the rounds and the evaluation of a method's settings at a point of the grid."""
    rounds, every = params.federation.rounds, params.evaluation.every
    if tune.rungs[-1] > rounds:
        raise SettingsError(
            f"tune.rungs: {tune.rungs[-1]} is more than federation.rounds ({rounds}), with which the winners run. Use "
            f"at most {rounds}."
        )
    for rung in tune.rungs:
        if get_ranking_protocol(tune, params, label).startswith("finetuned"):
            params.federation.require_rate_of_finetuning(rung)
        if rung % every:
            raise SettingsError(
                f"tune.rungs: round {rung} is not evaluated, because evaluation.every is {every}. Use multiples of "
                f"{every}."
            )


def check_integer_ranges(tune: Tune, label: str, params: Params) -> None:
    """Require that a parameter that is a real number has no range of integers. ``params`` are those of a draw."""
    for key, one in tune.select_ranges(label).items():
        if one.has_integers and isinstance(_get_parsed_value(params, label, key), float):
            low, high = one.bounds
            raise SettingsError(
                f"tune.over.{key}.{one.scale}: [{low}, {high}] has only integers, because both bounds are integers. "
                f"But {key} is a real number. Use [{float(low)}, {float(high)}], or list the integers in choice."
            )


def list_warnings_about_equal_draws(tune: Tune, planned: PlannedSearch) -> list[str]:
    """List a warning if so many draws of a method are equal that the last rung compares nothing."""
    first_batch = planned.candidates[: tune.new_draw_counts[0]]
    count = len({candidate.keys for candidate in first_batch})
    if not first_batch or count_draws_by_rung((count, *tune.new_draw_counts[1:]))[-1] > 1:
        return []
    plural, other_advice = ("s", ", or fewer rungs") if count > 1 else ("", "")
    return [
        f"tune.over: {planned.algorithm} has {count} different draw{plural} of {len(first_batch)}, so only one reaches "
        f"round {tune.rungs[-1]}. Use ranges with more values{other_advice}."
    ]


def make_draw_run_settings(params: Params, label: str, seed: int, protocol: ValidationProtocol) -> RunSettings:
    """Make the settings of a draw's run, which measures only the protocol and metric that rank the draws."""
    evaluation = params.evaluation
    measured = evaluation.model_copy(update={"protocols": (protocol,), "metrics": evaluation.metrics[:1]})
    return dataclasses.replace(
        RunSettings.from_params(params, label, seed), evaluation=dump_evaluation_settings(measured)
    )


def list_winner_settings(
    plan: Plan, search: PlannedSearch, draw: int, get_settings: Callable[[RunFiles], RunSettings]
) -> list[RunSettings]:
    """List the settings of a winner's runs, one for each of the study's seeds.

    ``get_settings`` gets those of a planned run.
    """
    draw_settings = get_settings(search.list_run_files(draw)[0])
    default_cells = (cell for cell in plan.plan_without_tuning.cells if is_default_cell(search, cell))
    defaults = (get_settings(cell.files) for cell in default_cells)  # with the seed and evaluation of the study
    return [
        dataclasses.replace(draw_settings, seed=default.seed, evaluation=default.evaluation) for default in defaults
    ]


def list_winner_keys(plan: Plan, search: PlannedSearch, draw: int) -> list[str]:
    """List the keys of a winner's runs, one for each of the study's seeds, from the stored settings of its draw."""
    return [settings.key for settings in list_winner_settings(plan, search, draw, _read_settings_of_run)]


def write_winner_settings(plan: Plan) -> None:
    """Write the settings of the winners' runs, if the winners are known. Their jobs read them.

    Raises an ArtifactError if the keys in the result of the last rung are not those of the winners.
    """
    plan, rungs = plan.add_search_results(), plan.read_rungs()
    if plan.tuning is None or len(rungs) < len(plan.tuning.rungs):
        return
    for search, result in zip(plan.tuning.searches, rungs[-1].searches, strict=True):
        for draw in result.selected:
            winners = list_winner_settings(plan, search, draw, _read_settings_of_run)
            if result.keys != tuple(settings.key for settings in winners):
                raise ArtifactError(
                    f"{plan.rung_files[-1]} is damaged: the runs of {search.algorithm}'s winner have other keys. "
                    "Delete it and run again."
                )
            for settings in winners:
                files, text = RunFiles.from_key(search.algorithm, settings.key), settings.to_yaml()
                if not files.settings.is_file() or files.settings.read_text() != text:
                    write_bytes(files.settings, text.encode())


def assume_search_results(
    plan: Plan, settings_by_key: dict[str, RunSettings]
) -> tuple[tuple[Rung, ...], dict[str, RunSettings]]:
    """Complete the results of the rungs, for a forecast: the draws with the fewest complete rounds continue.

    So the remaining work is an upper bound. Draws that TPE has not made yet are assumed to be those of the Sobol
    sequence. Returns the results, and the settings of the winners' runs by key.
    """
    if plan.tuning is None:
        return (), {}
    rungs, winners = list(plan.read_rungs()), dict[str, RunSettings]()
    tuning = plan.tuning.replace_tpe_draws(rungs)

    def list_winner_runs(search: PlannedSearch, draw: int) -> list[RunSettings]:
        return list_winner_settings(plan, search, draw, lambda files: settings_by_key[files.path.name])

    def count_complete_rounds(search: PlannedSearch, is_winner: bool, draw: int) -> int:
        keys = (settings.key for settings in list_winner_runs(search, draw)) if is_winner else search.draws[draw].keys
        return sum(len(RunFiles.from_key(search.algorithm, key).list_complete_rounds()) for key in keys)

    for number in range(len(rungs), len(tuning.rungs)):
        results, rounds = [], tuning.rungs[number]
        is_last = rounds == tuning.rungs[-1]
        for index, search in enumerate(tuning.searches):
            selected = rungs[-1].searches[index].selected if rungs else ()
            count = functools.partial(count_complete_rounds, search, is_last)
            draws = sorted(tuning.list_rung_draws(search, number, selected), key=count)
            kept = select_continuing_draws(search.draws, draws, is_last)
            results.append(RungSearch(algorithm=search.algorithm, grid=search.grid, ranking=(), selected=kept, keys=()))
        rungs.append(Rung(search=plan.search_digest, rounds=rounds, searches=tuple(results)))
    last_results = []
    for search, result in zip(tuning.searches, rungs[-1].searches, strict=True):
        runs = [settings for draw in result.selected for settings in list_winner_runs(search, draw)]
        winners |= {settings.key: settings for settings in runs}
        last_results.append(dataclasses.replace(result, keys=tuple(settings.key for settings in runs)))
    return (*rungs[:-1], dataclasses.replace(rungs[-1], searches=tuple(last_results))), winners


def describe_largest_search_size(plan: Plan) -> str:
    """Describe the largest number of runs and rounds of the search. It is smaller if equal values are drawn."""
    tuning = plan.tuning
    if tuning is None:
        return ""
    counts = count_draws_by_rung(tuning.new_draw_counts)
    steps = zip(counts, tuning.new_draw_counts, tuning.rungs, (0, *tuning.rungs[:-1]), strict=True)
    rounds = sum(count * (rung - previous) + new_draws * previous for count, new_draws, rung, previous in steps)
    searches = sum(bool(planned.candidates) for planned in tuning.searches)
    seeds = len(tuning.seeds)
    later_runs = tuning.count_later_runs(len(plan.read_rungs()), len(plan.seeds))
    return (
        f"tune: at most {searches * tuning.draws * seeds:,} runs with {searches * rounds * seeds:,} rounds for the "
        f"draws. Runs of the winners: {searches * len(plan.seeds):,}"
        f"{f'. At most {later_runs:,} later runs are planned after the rungs' if later_runs else ''}"
    )


def _read_settings_of_run(files: RunFiles) -> RunSettings:
    return RunSettings.read(files.settings)


def _get_parsed_value(params: Params, label: str, key: str) -> Any:
    """Get the value of a tuned key in the settings of a method. None if it has no such key."""
    section, *names = key.split(".")
    value: Any = getattr(params, section)
    if section == "algorithms":
        value, names = params.algorithms[label].algorithm, names[1:]
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value


def _check_tuned_key(key: str, study_params: Params) -> None:
    """Require that a key exists, can differ between methods, and concerns a method of the study."""
    grid.reject_unknown_key("tune.over", key, study_params)
    section, _, name = key.partition(".")
    if section not in TUNABLE_SECTIONS or ".".join(key.split(".")[:2]) in DATA_KEYS:
        raise SettingsError(
            f"tune.over: '{key}' can't be tuned, because the methods are compared on the same data. Use a key of "
            "algorithms, federation (except clients, held_out and drift), model or transforms."
        )
    if key == "federation.rounds":
        raise SettingsError("tune.over: 'federation.rounds' can't be tuned. Set the rounds of draws in tune.rungs.")
    if not name or (section == "algorithms" and "." not in name):
        raise SettingsError(f"tune.over: '{key}' can't be tuned as a whole. Use a single key, such as {key}.NAME.")
    if section != "algorithms":
        return
    label, _, parameter = name.partition(".")
    if label not in study_params.study.algorithms:
        raise SettingsError(
            f"tune.over: '{key}' has no effect, because '{label}' is not in study.algorithms. "
            f"{suggest_name(label, study_params.study.algorithms)}"
        )
    if parameter.partition(".")[0] in (*METHOD_KEYS, ALGORITHM.selector):
        raise SettingsError(f"tune.over: '{key}' can't be tuned. Use a parameter of the algorithm.")
