"""The format of a study's ``plan.json``: runs, cells of tables, and settings of jobs and reports.

Commands and the Snakefile read the study from there. Every job parses the Snakefile, so this module imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import not_
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    computed_field,
    with_config,
)

from fedpipe.core.errors import ArtifactError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage.files import read_json, read_verified_bytes, write_json
from fedpipe.core.storage.layout import PARAMS, DiagnosticFiles, MergedRoundFiles, RunFiles, StudyFiles, format_command
from fedpipe.planning.partition_names import build_partition_report_labels, name_partitions
from fedpipe.planning.rungs import (
    TUNED,
    TUNING,
    UNTUNED,
    PlannedSearch,
    PlannedTuning,
    Rung,
    RungSearch,
    format_draw_label,
    read_rungs,
)
from fedpipe.settings.base import NEW_CLIENTS_PREFIX, DatasetName, Key, Label, Metric, convert_to_new_clients_protocol
from fedpipe.settings.execution import Artifacts, Execution
from fedpipe.settings.report import Report

#: Fields of a plan that no table or figure contains.
UNREPORTED_FIELDS = {"shared", "files", "execution", "artifacts", "diagnostics"}
DiagnosticKind = Annotated[str, Field(pattern=r"^[a-z][a-z-]*$")]


@dataclass(frozen=True, kw_only=True)
class _FirstRounds:
    """The first ``rounds`` rounds of a run."""

    algorithm: Label  #: its label in the study
    seed: int
    key: Key  #: key of the run
    rounds: int

    @cached_property
    def files(self) -> RunFiles:
        """The run's files."""
        return RunFiles.from_key(self.algorithm, self.key)

    @property
    def merged_files(self) -> MergedRoundFiles:
        """The merged files of these rounds."""
        return self.files.get_merged_files(self.rounds)


@dataclass(frozen=True, kw_only=True)
class PlannedRun(_FirstRounds):
    """A run of the study. It is in the plan once, also if several cells report it."""

    partition: Key  #: the key of its partition
    dataset: DatasetName  #: its stored data set, such as ``digits-0123456789ab``
    participants: int  #: clients in a round, m

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def path(self) -> Path:
        """Folder of the run."""
        return self.files.path


@dataclass(frozen=True, kw_only=True)
class Cell(_FirstRounds):
    """A cell of tables and figures: some rounds of a run, at a point of the grid."""

    grid: dict[str, Any]  #: grid values that concern the algorithm
    own: dict[str, Any] = field(default_factory=dict)  #: settings of this method only, by key (`overrides`)


@dataclass(frozen=True, kw_only=True)
class PlannedDiagnostic:
    """A diagnostic of the states after a round of a run."""

    name: Label  #: name of its entry in `diagnostics`
    kind: DiagnosticKind
    algorithm: Label  #: the label and
    run_key: Key  #: the key of the run
    rounds: int  #: rounds of the run in this study
    round: int
    key: Key  #: hash of its settings, the run's key and the diagnostic's code

    @property
    def run_files(self) -> RunFiles:
        """The run's files."""
        return RunFiles.from_key(self.algorithm, self.run_key)

    @property
    def files(self) -> DiagnosticFiles:
        """Files of the diagnostic."""
        return DiagnosticFiles.from_key(self.algorithm, self.run_key, self.round, self.kind, self.key)

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def path(self) -> Path:
        """Path of its table."""
        return self.files.table


def _check_run_path(raw: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Require that a path is the one of its run or diagnostic."""
    planned = handler(raw)
    if raw.get("path") != str(planned.path):
        raise ValueError("the path is not that of the run")
    return planned


@with_config(ConfigDict(strict=True))  # a number is not a text, and a Boolean is not a number
@dataclass(frozen=True, kw_only=True)
class Plan:
    """A study's plan."""

    params: Path  #: the study's file
    preset: Label  #: preset of the study
    algorithms: tuple[Label, ...]  #: labels, in the order of the study
    seeds: tuple[int, ...]
    grid: dict[str, list[Any]]  #: values by name
    protocols: Annotated[tuple[str, ...], Field(min_length=1)]
    method_protocols: dict[str, str]  #: protocol by label, if it is not the study's first
    partitions: dict[Key, dict[str, Any]]  #: settings of each partition by key
    runs: tuple[Annotated[PlannedRun, WrapValidator(_check_run_path)], ...]
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...]
    files: tuple[str, ...]  #: files that are written with the plan
    shared: Key  #: digest of the shared code
    execution: Execution
    artifacts: Artifacts
    report: Report
    diagnostics: tuple[Annotated[PlannedDiagnostic, WrapValidator(_check_run_path)], ...] = ()
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = ("accuracy",)  #: metrics of tables and curves
    titles: dict[str, str] = field(default_factory=dict)  #: names of methods in tables and figures by label
    #: New clients of the partitions whose runs all have the same ones, by key. Partitions without new ones are omitted.
    held_out: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    unused_keys: dict[Key, tuple[str, ...]] = field(default_factory=dict)  #: keys of `dataset` without effect
    #: Repository and revision of the data of partitions by key.
    repositories: Annotated[dict[Key, str], Field(exclude_if=not_)] = field(default_factory=dict)
    held_out_notes: tuple[str, ...] = ()  #: sentences about clients that are held out, for captions
    drift_notes: tuple[str, ...] = ()  #: sentences about concept drifts, for captions
    tuning: Annotated[PlannedTuning | None, Field(exclude_if=not_)] = None  #: the draws of section `tune`

    @property
    def keep_models(self) -> str | int:
        """Rounds whose states are kept: `artifacts.keep_models`."""
        return self.artifacts.keep_models

    def get_method_protocol(self, label: str, protocol: str | None = None) -> str:
        """Get the protocol with which a method is in the column of a protocol, by default the study's first.

        A method's own protocol is in the first column, and for new clients in the column next to it.
        """
        first_protocol = self.protocols[0]
        own_protocol = self.method_protocols.get(label, first_protocol)
        if protocol is None or protocol == first_protocol:
            return own_protocol
        own_new_protocol = convert_to_new_clients_protocol(own_protocol)
        is_next = protocol == convert_to_new_clients_protocol(first_protocol) and own_new_protocol in self.protocols
        return own_new_protocol if is_next else protocol

    def get_method_title(self, label: str) -> str:
        """Get the name of a method in tables and figures."""
        return self.titles.get(label, label)

    @cached_property
    def runs_by_key(self) -> dict[tuple[str, str], PlannedRun]:
        """Runs by label and key."""
        return {(run.algorithm, run.key): run for run in self.runs}

    def get_run(self, cell: Cell) -> PlannedRun:
        """Get the run that a cell reports."""
        return self.runs_by_key[cell.algorithm, cell.key]

    @property
    def run_command(self) -> str:
        """The command that runs the study."""
        return format_command("run", self.params, self.preset)

    @property
    def study_files(self) -> StudyFiles:
        """Files of the study."""
        return StudyFiles.from_params(self.params, self.preset)

    @property
    def run_descriptions(self) -> list[str]:
        """One line per run: method, seed, points of the grid, key."""
        points: dict[tuple[str, str], list[str]] = {}
        plan = self.add_search_results(has_draws=True)
        for cell in plan.cells:
            values = cell.own if cell.files.path in plan.search_run_paths else {}
            point = ", ".join(f"{name}={value}" for name, value in (cell.grid | values).items())
            points.setdefault((cell.algorithm, cell.key), []).append(point)
        lines = []
        for run in plan.runs:
            point = "; ".join(dict.fromkeys(points[run.algorithm, run.key]))
            lines.append("  ".join(filter(None, [f"{run.algorithm:<16} seed {run.seed}", point, run.key])))
        return lines

    @cached_property
    def partition_names(self) -> dict[str, str]:
        """Names of partitions in files by key, such as ``dirichlet-0.2-seed0``."""
        return name_partitions(self.partitions)

    def get_partition_settings_to_describe(self, key: str) -> dict[str, Any]:
        """Settings of a partition for descriptions, in which the data set's name has the repository and revision."""
        settings, repository = self.partitions[key], self.repositories.get(key, "")
        name = f"{settings['dataset']['name']} {repository}".rstrip()
        return settings | {"dataset": settings["dataset"] | {"name": name}}

    def build_partition_report_labels(self, key: str) -> dict[str, str]:
        """Build the labels of a partition in Snakemake's report: data set, scheme and parameters, clients, seed."""
        return build_partition_report_labels(self.get_partition_settings_to_describe(key))

    @property
    def row_key_columns(self) -> list[str]:
        """Columns that identify a row of the table: the algorithm and the names of the grid."""
        return ["algorithm", *self.grid]

    @cached_property
    def column_grid_names(self) -> list[str]:
        """Names of the grid that all methods have, except `report.best_over`. Their values are columns of the table."""
        methods = {name: {cell.algorithm for cell in self.cells if name in cell.grid} for name in self.grid}
        return [
            name
            for name in self.grid
            if methods[name] == {cell.algorithm for cell in self.cells}
            and not name.startswith("algorithms.")
            and name not in self.report.best_over
        ]

    @property
    def metrics_by_figure(self) -> dict[str, Metric]:
        """Metrics of the figures of curves by the figure's name. The study's first metric has `curves`."""
        first, *others = self.metrics
        return {"curves": first} | {f"curves_{metric}": metric for metric in others}

    @property
    def figure_labels(self) -> dict[str, str]:
        """Labels of the figures by name. Further figures show partitions."""
        further_curves = {name: f"learning curves ({metric})" for name, metric in self.metrics_by_figure.items()}
        rank_figure = {"ranks": "critical differences of mean ranks"} if self.report.rank_test else {}
        return further_curves | {"curves": "learning curves", "matrices": "SL and CR matrices"} | rank_figure

    @property
    def figure_files(self) -> list[Path]:
        """All figures, in each format."""
        return self.study_files.list_figure_files(self.figure_labels, self.partition_names.values())

    @cached_property
    def merged_files(self) -> tuple[MergedRoundFiles, ...]:
        """Merged files of its tables, each once."""
        return tuple(dict.fromkeys(cell.merged_files for cell in self.cells))

    @cached_property
    def round_counts_by_run(self) -> dict[Path, tuple[int, ...]]:
        """Numbers of rounds by run that cells report, ascending."""
        counts: dict[Path, set[int]] = {}
        for cell in self.cells:
            counts.setdefault(cell.files.path, set()).add(cell.rounds)
        return {path: tuple(sorted(lengths)) for path, lengths in counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """Convert to the content of ``plan.json``, which does not depend on the results of `tune`."""
        return _get_plan_type_adapter().dump_python(self.plan_without_tuning, mode="json")

    def select_reported_fields(self) -> dict[str, Any]:
        """Get the fields that tables and figures contain. They are rebuilt if these change."""
        return {name: value for name, value in self.to_dict().items() if name not in UNREPORTED_FIELDS}

    @property
    def report_fingerprint(self) -> str:
        """Hash of the fields that tables and figures contain."""
        return compute_json_digest(self.select_reported_fields())

    # -- section `tune` ------------------------------------------------------------------------------------------------

    @cached_property
    def plan_without_tuning(self) -> Plan:
        """The plan without the draws and winners of `tune`."""
        if self.tuning is None:
            return self
        cells = tuple(cell for cell in self.cells if cell.grid[TUNING] == UNTUNED)
        keys = {(cell.algorithm, cell.key) for cell in cells}
        runs = tuple(run for run in self.runs if (run.algorithm, run.key) in keys)
        return replace(self, cells=cells, runs=runs, tuning=self.tuning.replace_tpe_draws(()))

    @cached_property
    def search_digest(self) -> str:
        """Hash of the search, which its results contain."""
        tuning = self.to_dict().get("tuning")
        cells = [[cell.key, cell.rounds] for cell in self.plan_without_tuning.cells]
        return compute_json_digest([tuning, self.seeds, cells])

    @property
    def rung_files(self) -> list[Path]:
        """Files with the results of the rungs. Empty without `tune`."""
        return [self.study_files.get_rung_result_path(rounds) for rounds in self.tuning.rungs] if self.tuning else []

    @property
    def is_searching(self) -> bool:
        """Whether the winners of `tune` are not known yet."""
        return self.tuning is not None and not any(cell.grid[TUNING] == TUNED for cell in self.cells)

    @cached_property
    def search_run_paths(self) -> frozenset[Path]:
        """Folders of the runs of all draws."""
        searches = self.tuning.searches if self.tuning else ()
        draws = ((search, candidate.draw) for search in searches for candidate in search.draws)
        return frozenset(files.path for search, draw in draws for files in search.list_run_files(draw))

    def require_finished_search(self) -> None:
        """Raise an ArtifactError if the winners of `tune` are not known yet."""
        if self.is_searching:
            raise ArtifactError(
                f"{self.rung_files[-1]} is missing or outdated, because the search of `tune` is not complete. Type "
                f"`{self.run_command}` to continue it."
            )

    def read_rungs(self) -> tuple[Rung, ...]:
        """Read the results of the complete rungs of `tune`."""
        if self.tuning is None:
            return ()
        return read_rungs(self.tuning, self.search_digest, len(self.seeds), self.study_files.get_rung_result_path)

    def add_search_results(self, has_draws: bool = False, rungs: tuple[Rung, ...] | None = None) -> Self:
        """Add the winners of `tune`, if they are known. Optionally add its draws, with the rounds that they need.

        ``rungs`` are the results of the complete rungs. By default they are read. A cell of a draw is not part of the
        table. Without `tune` the plan stays as it is.
        """
        if self.tuning is None:
            return self
        rungs = self.read_rungs() if rungs is None else rungs
        is_complete, tuning = len(rungs) == len(self.tuning.rungs), self.tuning.replace_tpe_draws(rungs)
        cells: dict[tuple[Any, ...], Cell] = {}
        untuned_plan = self.plan_without_tuning
        runs = dict(untuned_plan.runs_by_key)
        for index, search in enumerate(tuning.searches):
            defaults = [
                (cell, runs[cell.algorithm, cell.key]) for cell in untuned_plan.cells if is_default_cell(search, cell)
            ]
            results = [rung.searches[index] for rung in rungs]
            winners = list(self._list_winning_runs(search, defaults, results[-1])) if is_complete else []
            draws = list(self._list_draw_runs(tuning, search, results)) if has_draws else []
            for cell, run in (*winners, *defaults, *draws):
                cells[cell.algorithm, cell.seed, str(cell.grid), cell.rounds] = cell
                add_run(runs, (run.algorithm, run.key), run)
        return replace(self, cells=tuple(cells.values()), runs=tuple(runs.values()), tuning=tuning)

    def _list_winning_runs(
        self, search: PlannedSearch, defaults: list[tuple[Cell, PlannedRun]], result: RungSearch
    ) -> Iterator[tuple[Cell, PlannedRun]]:
        """List the cells of a method's winner and their runs: those of the default settings with the drawn values.

        If nothing is tuned, they are the default settings.
        """
        for position, (cell, run) in enumerate(defaults):
            if result.selected:
                participants = search.draws[result.selected[0]].participants
                run = replace(run, key=result.keys[position], rounds=cell.rounds, participants=participants)
            yield replace(cell, key=run.key, grid=search.grid | {TUNING: TUNED}), run

    def _list_draw_runs(
        self, tuning: PlannedTuning, search: PlannedSearch, results: list[RungSearch]
    ) -> Iterator[tuple[Cell, PlannedRun]]:
        """List the cells of a method's draws and their runs: one for each rung that a draw has reached."""
        for number, rounds in enumerate(tuning.rungs[: len(results) + 1]):
            draws = tuning.list_rung_draws(search, number, results[number - 1].selected if number else ())
            for draw, (position, seed) in itertools.product(draws, enumerate(tuning.seeds)):
                candidate = search.draws[draw]
                run = PlannedRun(
                    algorithm=search.algorithm,
                    seed=seed,
                    key=candidate.keys[position],
                    rounds=rounds,
                    partition=search.partitions[position],
                    dataset=search.dataset,
                    participants=candidate.participants,
                )
                grid = search.grid | {TUNING: format_draw_label(draw)}
                values = candidate.values
                cell = Cell(algorithm=run.algorithm, seed=seed, key=run.key, rounds=rounds, grid=grid, own=values)
                yield cell, run

    def write(self) -> str:
        """Write ``plan.json``. Return its SHA-256."""
        return write_json(self.study_files.plan, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a ``plan.json``. All names are checked, so that no path leads out of the folder.

        Raises
        ------
        ArtifactError
            It is missing, damaged, or belongs to another study.
        """
        data = read_verified_bytes(path, None)
        try:
            plan = _get_plan_type_adapter().validate_json(data)
            is_valid = plan._is_consistent() and plan.study_files.plan.resolve() == path.resolve()
        except ValueError:  # from pydantic, or an invalid path of a study
            read_json(path)  # raises another error if the file is not JSON
            is_valid = False
        if not is_valid:
            raise ArtifactError(
                f"{path} is not the plan of the study that its path belongs to. Delete it and run again."
            )
        return plan.add_search_results()

    @classmethod
    def read_study(cls, params: Path, preset: str) -> Plan:
        """Read the plan of a study. The error about a missing plan has the command that makes it."""
        path = StudyFiles.from_params(params, preset).plan
        if not path.is_file():
            is_recorded = path == StudyFiles.from_params(PARAMS).plan and Path("dvc.lock").is_file()
            advice = "`dvc pull` to get the recorded results, or " if is_recorded else ""
            raise ArtifactError(f"{path} is missing. Type {advice}`{format_command('run', params, preset)}` first.")
        return cls.read(path)

    def _is_consistent(self) -> bool:
        """Whether the parts of the plan refer to each other consistently."""
        run_keys = self.runs_by_key.keys()
        searches = self.tuning.searches if self.tuning else ()
        return (
            run_keys >= {(cell.algorithm, cell.key) for cell in self.cells}
            and run_keys >= {(diagnostic.algorithm, diagnostic.run_key) for diagnostic in self.diagnostics}
            and {run.algorithm for run in self.runs} == set(self.algorithms)
            and {run.partition for run in self.runs} == set(self.partitions)
            and all(run.rounds == max(self.round_counts_by_run.get(run.path, (0,))) for run in self.runs)
            and all(cell.grid.keys() <= self.grid.keys() for cell in self.cells)
            and self.method_protocols.keys() | self.titles.keys() | {*filter(None, [self.report.baseline])}
            <= {*self.algorithms}
            and set(self.report.figure_algorithms) <= set(self.algorithms)
            and {*self.method_protocols.values()} <= {*self.protocols}
            and {*self.report.figure_protocols} <= {name.removeprefix(NEW_CLIENTS_PREFIX) for name in self.protocols}
            and set(self.report.best_over) <= self.grid.keys()
            and all(sum(is_default_cell(one, cell) for one in searches) == 1 for cell in self.cells if self.tuning)
        )


def is_default_cell(search: PlannedSearch, cell: Cell) -> bool:
    """Whether a cell has the default settings of a search's method, at the search's point of the grid."""
    return (cell.algorithm, cell.grid) == (search.algorithm, search.grid | {TUNING: UNTUNED})


def add_run(runs: dict[Any, PlannedRun], name: Any, run: PlannedRun) -> None:
    """Add a run, or extend it if it is planned with fewer rounds."""
    if name not in runs or run.rounds > runs[name].rounds:
        runs[name] = run


@cache
def _get_plan_type_adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)
