"""Makes the plan of a study: runs, keys and the files of jobs.

A run's key is a hash of the canonical JSON of everything that can change its bits, including the code of its algorithm,
model, partition scheme and data set. The number of rounds is not part of it, so that a longer run continues a shorter
one. Also `execution`, `artifacts`, `report` and the shared code are not part of it (see `fedpipe.engine.replay`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedpipe.core.components import pinned_files
from fedpipe.core.components.code_digest import (
    PACKAGE_FOLDER,
    compute_code_digest,
    compute_shared_code_digest,
    hash_package_files,
)
from fedpipe.core.components.component import Component
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import layout, packing
from fedpipe.core.storage.files import compute_file_sha256, remove_path, write_bytes, write_json
from fedpipe.core.storage.layout import FULL_PRESET, PARAMS
from fedpipe.core.yaml_text import format_yaml
from fedpipe.data import store
from fedpipe.planning import completion, diagnostics, grid, partition, search
from fedpipe.planning.new_clients import check_new_clients, check_reported_clients, list_reported_protocols
from fedpipe.planning.plan import Cell, Plan, PlannedRun, add_run
from fedpipe.planning.rank_test import check_rank_test, list_warnings_about_several_baselines
from fedpipe.planning.run_settings import RunSettings
from fedpipe.planning.rungs import TUNED, TUNING, UNTUNED, Candidate, DrawPlanner, PlannedSearch, PlannedTuning, Rung
from fedpipe.settings import loader, methods, parser
from fedpipe.settings.base import ValidationProtocol, convert_to_new_clients_protocol
from fedpipe.settings.dataset import format_download_command
from fedpipe.settings.params import Params
from fedpipe.settings.tune import Tune

#: Mark in sources.json of a study with user modules, which is always replanned: a new module could shadow an old one,
#: and hashes of files can't detect that.
CUSTOM_MODULES_MARK = "custom modules"
PINNABLE_SECTIONS = {"dataset", "partition", "model"}  #: sections with user files


@dataclass(frozen=True, kw_only=True)
class NewPlan(Plan):
    """A new plan, with the files that are written next to it."""

    run_settings: dict[str, RunSettings]  #: settings of each run by key
    file_texts: dict[str, str]  #: files of jobs by path: ``run.yaml``, ``partition.yaml``, data sets' settings
    sample_counts: dict[str, tuple[int, int]]  #: estimated training samples and all samples, by partition
    unavailable_runs: dict[str, str]  #: missing data by path of runs that need a network
    #: Source files of the plan, each with its SHA-256 or stat fingerprint.
    source_hashes: dict[str, str] = field(default_factory=dict)
    draw_planners: tuple[DrawPlanner, ...] = ()  #: one for each search

    @override
    def read_rungs(self) -> tuple[Rung, ...]:
        """Read the results of the complete rungs.

        Stop at the first rung whose TPE draws have other keys now. Keys change, for example, if you edit a model that
        only these draws use.
        """

        def has_current_keys(rung: Rung) -> bool:
            draws = (new for result in rung.searches for new in result.new_draws)
            return all(key in self.run_settings for new in draws for key in new.keys)

        return tuple(itertools.takewhile(has_current_keys, super().read_rungs()))


def make_plan(path: Path = PARAMS, preset: str = FULL_PRESET, settings: dict[str, Any] | None = None) -> NewPlan:
    """Make the plan of the study in ``path`` with a preset. Nothing is written.

    ``settings`` is the content of the file, if it does not exist yet.

    Raises
    ------
    SettingsError
        One message for each mistake in the settings.
    """
    sys.path.insert(0, str(Path.cwd()))  # for custom algorithms next to params.yaml
    download_command = format_download_command(path)
    source_hashes = _hash_sources(path)  # before the files are read, so that an edit meanwhile makes the plan stale
    study_settings = loader.read_params(path) if settings is None else settings
    raw, preset_changes = parser.apply_preset(study_settings, preset, download_command)
    # `fedpipe download` can't write a SHA-256 into a preset.
    has_preset_files = any(key.partition(".")[0] in PINNABLE_SECTIONS for key in preset_changes)
    declare_command = None if has_preset_files else download_command
    with grid.add_location_to_errors([f"with preset {preset}"] if preset != FULL_PRESET else []):
        study_params = parser.parse_params(raw, declare_command, obtain_command=download_command)
        draft = _PlanDraft(study_params, grid.collect_grid_keys(study_params, preset_changes))
        search.check_tune_section(study_params, preset_changes, draft.grid_keys)
        for point in grid.iterate_grid_points(study_params):
            groups = [*grid.build_grid_point_params(raw, study_params, point, preset_changes, download_command)]
            draft.add_grid_point(point, groups)
            resolve_draw = partial(grid.build_draw_params, raw, point, preset_changes, download_command)
            draft.add_searches(point, {label: params for params, labels, _ in groups for label in labels}, resolve_draw)
        has_new_clients = any("held_out" in settings.federation for settings in draft.run_settings.values())
        check_reported_clients(study_params, has_new_clients)
        draft.warnings += draft.list_warnings_about_settings_without_effect()
        draft.warnings += partition.collect_partition_warnings(draft.partitions, draft.file_texts)
        plan = draft.build_plan(path, preset)
        check_rank_test(plan)
    rungs = Plan.read_rungs(plan)
    for rung in rungs:
        for plan_draw, result in zip(plan.draw_planners, rung.searches, strict=True):
            for new in result.new_draws:
                plan_draw(new.draw, new.values)  # extends the dicts that the plan shares with the draft
    # With the models of these draws.
    return dataclasses.replace(
        plan, source_hashes=_list_component_file_hashes(draft.components) | draft.fingerprints | source_hashes
    )


@dataclass
class _PlanDraft:
    """Collects the points of a study's grid. Most fields are those of `NewPlan`."""

    study_params: Params
    grid_keys: dict[str, list[str]]  #: keys that each name of the grid sets
    runs: dict[tuple[str, str], PlannedRun] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    partitions: dict[str, dict[str, Any]] = field(default_factory=dict)
    held_out: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)  #: draws of new clients by partition
    unused_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    repositories: dict[str, str] = field(default_factory=dict)
    run_settings: dict[str, RunSettings] = field(default_factory=dict)
    file_texts: dict[str, str] = field(default_factory=dict)
    sample_counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    components: list[Component] = field(default_factory=list)
    params: list[Params] = field(default_factory=list)  #: settings of each point and group of methods
    warnings: list[str] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    unavailable_runs: dict[str, str] = field(default_factory=dict)
    searches: dict[str, PlannedSearch] = field(default_factory=dict)  #: searches of section `tune`
    draw_planners: dict[str, DrawPlanner] = field(default_factory=dict)  #: of these searches

    def add_grid_point(self, point: grid.GridPoint, groups: list[tuple[Params, list[str], dict[str, Any]]]) -> None:
        """Add the cells of a point, and new runs.

        ``groups`` has the different settings at the point, each with the methods that have them, and their overrides.
        """
        from fedpipe.planning import hook_names, study_facts  # here, because `fedpipe status` imports no torch

        algorithms, seeds = self.study_params.study.algorithms, self.study_params.study.seeds
        params_by_label = {label: params for params, labels, _ in groups for label in labels}
        overrides = {label: own for _, labels, own in groups for label in labels}
        for params, labels, _ in groups:
            self.params.append(params)
            self.warnings += [*params.warnings, *study_facts.list_model_warnings(params)]
            self.fingerprints |= {
                str(pin.path): pinned_files.compute_stat_fingerprint(pin.path) for pin in params.pinned_files.values()
            }
            self.components += [params.partition, params.model, params.dataset.effective_dataset]
            data = params.dataset.dataset_path.stem
            self.file_texts[str(store.get_dataset_settings_path(data))] = format_yaml(params.dataset.origin)
            check_new_clients(params, labels)
        for label in algorithms:
            params = params_by_label[label]
            self.components.append(algorithm := params.algorithms[label].algorithm)
            study_facts.reject_passes_of_frozen_body(algorithm, label, params)
            study_facts.require_learning_rate_of_each_round(algorithm, label, params)
            study_facts.require_learning_rate_of_personal_passes(
                algorithm, label, params, params.evaluation.protocols, [params.federation.rounds]
            )
            facts = study_facts.build_study_facts(algorithm, params)
            naming_mistakes = hook_names.find_naming_mistakes(algorithm)
            self.warnings += [f"algorithms.{label}: {mistake}" for mistake in naming_mistakes]
            self.warnings += algorithm.warnings(facts, f"algorithms.{label}")
            self.warnings += study_facts.list_missing_accuracy_warnings(algorithm, label, params)
        settings = {
            label: RunSettings.from_params(params, label, seeds[0]) for label, params in params_by_label.items()
        }
        for label, seed in itertools.product(algorithms, seeds):
            params = params_by_label[label]
            run = self._add_run(label, params, dataclasses.replace(settings[label], seed=seed))
            grid_values = self._select_grid_values(point, label, params)
            grid_values |= {TUNING: UNTUNED} if self.study_params.tune else {}
            cell = Cell(
                algorithm=label, seed=seed, key=run.key, rounds=run.rounds, grid=grid_values, own=overrides[label]
            )
            study_facts.require_models_of_diagnostics(params.algorithms[label].algorithm, params, cell)
            self.cells[compute_json_digest([label, seed, grid_values])] = cell

    def list_warnings_about_settings_without_effect(self) -> Iterator[str]:
        """Warn about settings that are disabled at all points, and names of the grid whose values change no run."""
        first, *others = (params.warnings_about_disabled_settings for params in self.params)
        yield from (warning for warning in first if all(warning in warnings for warnings in others))
        for name in self.study_params.study.grid:
            runs_by_rest: dict[str, list[tuple[str, int]]] = {}
            for cell in self.cells.values():
                if name in cell.grid:
                    rest = {other: value for other, value in cell.grid.items() if other != name}
                    runs = runs_by_rest.setdefault(compute_json_digest([cell.algorithm, cell.seed, rest]), [])
                    runs.append((cell.key, cell.rounds))
            has_several_values = any(len(runs) > 1 for runs in runs_by_rest.values())
            if has_several_values and all(len({*runs}) == 1 for runs in runs_by_rest.values()):
                yield f"study.grid: '{name}' has no effect, because all of its values give the same runs. Remove it."
        yield from list_warnings_about_several_baselines(self.study_params.report, [*self.cells.values()])

    def add_searches(
        self,
        point: grid.GridPoint,
        params_by_label: dict[str, Params],
        resolve_draw: Callable[[str, dict[str, Any]], Params],
    ) -> None:
        """Add the draws of section `tune` at a point. ``resolve_draw`` resolves the settings of a method's draw."""
        from fedpipe.planning import study_facts  # here, because `fedpipe status` imports no torch

        tune = self.study_params.tune
        if tune is None:
            return
        values_by_label = tune.draw_values([*params_by_label])
        for label, params in params_by_label.items():
            with grid.add_location_to_errors(point.locations):
                search.check_rungs(tune, params, label)
            grid_values = self._select_grid_values(point, label, params)
            name = compute_json_digest([label, grid_values])
            if name in self.searches:
                continue
            protocol = search.get_ranking_protocol(tune, params, label)
            algorithm = params.algorithms[label].algorithm
            study_facts.require_model_of_tune_protocol(algorithm, label, params, protocol)
            study_facts.require_learning_rate_of_personal_passes(algorithm, label, params, [protocol], tune.rungs)
            resolve = partial(resolve_draw, label)
            plan_draw = self.draw_planners[name] = partial(self._plan_draw, tune, label, params, protocol, resolve)
            candidates = tuple(
                plan_draw(draw, values, is_assumed=draw >= tune.new_draw_counts[0])
                for draw, values in enumerate(values_by_label[label])
            )
            if candidates and tune.sampler == "tpe":
                for values in tune.list_extreme_values(label):
                    resolve(values)
            first_keys = candidates[0].keys if candidates else ()
            self.searches[name] = PlannedSearch(
                algorithm=label,
                grid=grid_values,
                protocol=protocol,
                dataset=params.dataset.dataset_path.stem,
                partitions=tuple(compute_json_digest(self.run_settings[key].partition_settings) for key in first_keys),
                candidates=candidates,
            )
            self.warnings += search.list_warnings_about_equal_draws(tune, self.searches[name])

    def _plan_draw(
        self,
        tune: Tune,
        label: str,
        params: Params,
        protocol: ValidationProtocol,
        resolve: Callable[[dict[str, Any]], Params],
        draw: int,
        values: dict[str, Any],
        is_assumed: bool = False,
    ) -> Candidate:
        """Plan a draw of a method.

        A forecast assumes the draws of later batches. TPE may replace them, so they get no files.
        """
        draw_params, keys = resolve(values), []
        search.check_integer_ranges(tune, label, draw_params)
        self.components += [draw_params.model] if type(draw_params.model) is not type(params.model) else []
        for seed in tune.seeds:
            settings = search.make_draw_run_settings(draw_params, label, seed, protocol)
            self._add_run_settings(label, draw_params, settings, is_assumed)
            self._add_partition(draw_params, settings, is_reported=False)
            keys.append(settings.key)
        participants = draw_params.federation.participants
        return Candidate(draw=draw, values=values, participants=participants, keys=tuple(keys))

    def build_plan(self, path: Path, preset: str) -> NewPlan:
        """Build the plan of all points that were added."""
        params = self.study_params
        planned_diagnostics = diagnostics.plan_diagnostics(params, self.cells.values())
        self.file_texts |= {
            str(diagnostic.files.settings): diagnostics.format_diagnostic_settings(params, diagnostic)
            for diagnostic in planned_diagnostics
        }
        labels = params.study.algorithms
        tuning_axis = {TUNING: [TUNED, UNTUNED]} if params.tune else {}
        method_protocols = {label: params.algorithms[label].options.protocol for label in labels}
        if params.report.clients == "new":
            method_protocols = {
                label: convert_to_new_clients_protocol(protocol)
                for label, protocol in method_protocols.items()
                if protocol
            }
        titles = {label: methods.get_method_title(label, params.algorithms[label]) for label in labels}
        return NewPlan(
            params=layout.normalize_study_path(path),
            preset=preset,
            algorithms=labels,
            seeds=params.study.seeds,
            grid={name: list(values) for name, values in params.study.grid.items()} | tuning_axis,
            protocols=tuple(list_reported_protocols(params.evaluation.protocols, params.report.clients)),
            metrics=params.evaluation.metrics,
            method_protocols={label: protocol for label, protocol in method_protocols.items() if protocol},
            partitions=self.partitions,
            runs=tuple(self.runs.values()),
            cells=tuple(self.cells.values()),
            warnings=tuple(dict.fromkeys(self.warnings)),
            files=tuple(sorted(self.file_texts)),
            shared=compute_shared_code_digest(),
            execution=params.execution,
            artifacts=params.artifacts,
            report=params.report,
            diagnostics=planned_diagnostics,
            titles={label: title for label, title in titles.items() if title != label},
            tuning=self._build_planned_tuning(),
            held_out={key: ids for key, (ids, *other_ids) in self.held_out.items() if ids and not other_ids},
            unused_keys=self.unused_keys,
            repositories=self.repositories,
            held_out_notes=_merge_notes_of_runs(params.federation.held_out_note for params in self.params),
            drift_notes=_merge_notes_of_runs(map(_describe_drift, self.params)),
            run_settings=self.run_settings,
            file_texts=self.file_texts,
            sample_counts=self.sample_counts,
            unavailable_runs=self.unavailable_runs,
            draw_planners=tuple(self.draw_planners.values()),
        )

    def _build_planned_tuning(self) -> PlannedTuning | None:
        """Get the draws of section `tune`. None without that section."""
        tune = self.study_params.tune
        if tune is None:
            return None
        return PlannedTuning(
            over=tune.model_dump(mode="json", include={"over"}, exclude_none=True)["over"],
            draws=tune.draws,
            rungs=tune.rungs,
            seeds=tune.seeds,
            metric=self.study_params.evaluation.metrics[0],
            searches=tuple(self.searches.values()),
            sampler=tune.sampler,
        )

    def _select_grid_values(self, point: grid.GridPoint, label: str, params: Params) -> dict[str, Any]:
        """Select the grid values of a point that concern a method."""
        effective_keys = {
            name: [key for key in set_keys if key not in params.ignored_parameters]
            for name, set_keys in self.grid_keys.items()
        }
        return {
            name: value
            for name, value in point.values.items()
            if grid.has_effect_on_algorithm(effective_keys[name], label)
        }

    def _add_run(self, label: str, params: Params, settings: RunSettings) -> PlannedRun:
        """Add a run, or extend it if a shorter one is planned."""
        run = PlannedRun(
            algorithm=label,
            seed=settings.seed,
            key=settings.key,
            rounds=params.federation.rounds,
            partition=self._add_partition(params, settings),
            dataset=params.dataset.dataset_path.stem,
            participants=params.federation.participants,
        )
        self.held_out.setdefault(run.partition, set()).add(params.federation.draw_held_out_clients(run.seed))
        self._add_run_settings(label, params, settings)
        add_run(self.runs, (label, run.key), run)
        return run

    def _add_run_settings(self, label: str, params: Params, settings: RunSettings, is_assumed: bool = False) -> None:
        """Add the settings of a run, and what it lacks. The run of an assumed draw gets no file."""
        self.run_settings[settings.key] = settings
        if is_assumed:
            return
        files = layout.RunFiles.from_key(label, settings.key)
        if str(files.settings) not in self.file_texts:
            self.file_texts[str(files.settings)] = settings.to_yaml()
        if missing_data := _describe_missing_data(params):
            self.unavailable_runs[str(files.path)] = missing_data

    def _add_partition(self, params: Params, settings: RunSettings, is_reported: bool = True) -> str:
        """Add the partition of a run, which many runs share. Return its key. Partitions of draws are not in tables."""
        key = compute_json_digest(settings.partition_settings)
        if is_reported:
            self.partitions.setdefault(key, settings.partition_settings)
            self.unused_keys |= {key: params.dataset.unused_keys} if params.dataset.unused_keys else {}
            self.repositories |= {key: params.dataset.repository} if params.dataset.repository else {}
        if key not in self.sample_counts:
            self.sample_counts[key] = _estimate_train_and_total_samples(params)
            origin = {"origin": params.partition.path_parameters} if params.partition.path_parameters else {}
            self.file_texts[str(partition.get_partition_settings_path(key))] = format_yaml(
                settings.partition_settings | origin
            )
        return key


def _describe_drift(params: Params) -> str:
    """Describe the concept drift of a run's clients. Empty if there is none."""
    drift = params.federation.drift
    return drift.describe(params.federation.clients, params.dataset.class_names) if drift else ""


def _merge_notes_of_runs(notes: Iterable[str]) -> tuple[str, ...]:
    """List the different sentences of all runs. They name the runs if only some have them."""
    sentences = list(dict.fromkeys(notes))
    if len(sentences) == 1:
        return tuple(filter(None, sentences))
    return tuple(f"In some runs, {sentence[0].lower()}{sentence[1:]}" for sentence in sentences if sentence)


def list_presets(path: Path) -> list[str]:
    """List all presets of a study, beginning with the full study."""
    return [FULL_PRESET, *parser.parse_params(loader.read_params(path), format_download_command(path)).presets]


def write_job_files(plan: NewPlan) -> None:
    """Write the files of jobs that are missing or differ."""
    for name, text in plan.file_texts.items():
        if not Path(name).is_file() or Path(name).read_text() != text:
            write_bytes(Path(name), text.encode())


def write_plan(plan: NewPlan) -> None:
    """Write a study's plan, and missing files of jobs: ``run.yaml``, ``partition.yaml``.

    Hashes of source files are in ``sources.json``, so that an edit that changes no key leaves ``plan.json`` (tracked by
    DVC) unchanged. ``sources.json`` also has the hash of ``plan.json``, because DVC may check out another one.

    Raises
    ------
    SettingsError
        The path of the study is invalid. Nothing is written.
    """
    sources = plan.study_files.source_hashes
    write_job_files(plan)
    for rung in Plan.read_rungs(plan)[len(plan.read_rungs()) :]:
        remove_path(plan.study_files.get_rung_result_path(rung.rounds))
    if plan.execution.clients_per_job:  # rules of single rounds need the files that a segment has packed
        for run in plan.add_search_results(has_draws=True).runs:
            packing.unpack_folder(run.files.rounds_folder)
    completion.update_completion_mark(plan)
    plan_sha256 = plan.write()
    search.write_winner_settings(plan)
    has_custom_code = any(
        name.endswith(".py") and PACKAGE_FOLDER not in Path(name).resolve().parents for name in plan.source_hashes
    )
    marks = {str(plan.study_files.plan): plan_sha256} | ({CUSTOM_MODULES_MARK: ""} if has_custom_code else {})
    write_json(sources, plan.source_hashes | marks)
    write_json(plan.study_files.unavailable_runs, plan.unavailable_runs)


def _estimate_train_and_total_samples(params: Params) -> tuple[int, int]:
    """Estimate the number of training samples, and of all samples."""
    data = params.dataset
    size = data.subset or data.dataset_info.size
    if params.partition.has_fixed_splits:
        return size, size
    if data.split == "official":
        return data.num_partitioned_samples, size
    return round(size * (1 - data.test_fraction)), size


def _describe_missing_data(params: Params) -> str:
    """Describe data that need a network. Empty if all are available."""
    data = params.dataset
    if data.effective_dataset is data.configured_dataset and not data.is_available_offline:
        return "data not here"
    return "weights not here" if params.model.has_missing_weights else ""


def _hash_sources(path: Path) -> dict[str, str]:
    """Hash the study's file and fedpipe's own files. The Snakefile plans again if one has changed."""
    study_hashes = {path.resolve(): compute_file_sha256(path)} if path.is_file() else {}
    return _make_paths_relative(study_hashes | hash_package_files())


def _list_component_file_hashes(components: list[Component]) -> dict[str, str]:
    """List the SHA-256 of the components' files at the time when their code was read."""
    digests = (compute_code_digest(*component.list_hashed_code()) for component in components)
    hashes = {file: sha256 for digest in digests for file, sha256 in digest.files.items()}
    return _make_paths_relative({file.resolve(): sha256 for file, sha256 in hashes.items()})


def _make_paths_relative(values: dict[Path, str]) -> dict[str, str]:
    """Make the resolved paths of files in this folder relative."""
    prefix = os.path.join(Path.cwd().resolve(), "")  # noqa: PTH118  # with a slash at its end
    return {str(file).removeprefix(prefix): value for file, value in values.items()}
