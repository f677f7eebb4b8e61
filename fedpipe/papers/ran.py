"""What of a paper's study has been run at a scale: cells by row and column of a table, and why others are missing."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pandas as pd
import yaml

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import files, layout
from fedpipe.core.storage.layout import PAPERS, StudyFiles
from fedpipe.data import store
from fedpipe.planning import planner
from fedpipe.planning.plan import Cell, Plan, PlannedProbe, PlannedRun
from fedpipe.report import forecast, results, status
from fedpipe.report.data import StudyData
from fedpipe.settings import base, loader, parser

_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_QUOTED_LETTERS = 160  #: letters of a failed job's last line that a reason quotes
GENERATED_DATASET = "generated"  #: the name of the data set that stands in for one that is not here
OMITTED_SETTINGS = {"code", "sha256", "origin", "seed"}  #: parts of settings that a reader of a cell has no use for


class PaperStudy:
    """A study at a scale, as far as it has been run.

    Parameters
    ----------
    plan
        Its plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.runs = {(run.algorithm, run.key): run for run in plan.runs}
        self.finished_cells = tuple(cell for cell in results.sort_cells(plan) if cell.merged_files.marker.is_file())

    @classmethod
    def find(cls, stem: str, name: str, scale: str) -> PaperStudy | None:
        """The study of a paper (``stem``), as ``table1``; None where it was never planned at this scale."""
        plan_path = StudyFiles.from_params(PAPERS / stem / f"{name}.yaml", scale).plan
        return cls(Plan.read(plan_path)) if plan_path.is_file() else None

    # -- places ------------------------------------------------------------------------------------------------------

    @cached_property
    def column_axes(self) -> list[str]:
        """The names of the grid of which a column of the paper's table has a value each, in the study's order."""
        raw, _ = parser.apply_scale(loader.read_params(self.plan.params), self.plan.scale)
        names = [name for name in raw["study"].get("grid", {}) if not name.startswith("algorithms.")]
        return [name for name in names if name not in self.plan.report.best_over]

    def get_column(self, cell: Cell) -> str:
        """The column of a cell: its values, with a slash between, as `published` has them."""
        return "/".join(_format_value(cell.grid[name]) for name in self.column_axes if name in cell.grid)

    def get_cells(self, method: str, column: str) -> list[Cell]:
        """The cells of a method in a column, whether they have been run or not."""
        return [cell for cell in self.plan.cells if (cell.algorithm, self.get_column(cell)) == (method, column)]

    def get_protocol(self, method: str) -> str:
        """The protocol by which a method is shown."""
        return self.plan.shown.get(method, self.plan.protocols[0])

    @cached_property
    def scale_changes(self) -> str:
        """What its scale sets, in words; of a mapping only the names."""
        if self.plan.scale == layout.FULL_SCALE:
            return ""
        change_texts = []
        for key, value in loader.read_params(self.plan.params)["scales"][self.plan.scale].items():
            names = value.get("name", ", ".join(value)) if isinstance(value, dict) else value
            value_text = ", ".join(map(str, names)) if isinstance(names, list) else names
            change_texts.append(f"{key} {value_text}")
        return "; ".join(change_texts)

    # -- numbers -----------------------------------------------------------------------------------------------------

    @cached_property
    def accuracies(self) -> pd.DataFrame:
        """Accuracies of the finished runs, in the reported average; see `fedpipe.report.data.StudyData.accuracies`."""
        frame = StudyData(self._finished_plan).accuracies
        return frame[frame["average"] == self.plan.report.average]

    @cached_property
    def reported_accuracies(self) -> dict[tuple[str, str, str], float]:
        """In percent, by method, run's key with its number of rounds, and protocol: what stands in the table."""
        report = self.plan.report
        by_point = {
            (cell.algorithm, cell.seed, *results.format_point(self.plan, cell).values()): cell
            for cell in self.finished_cells
        }
        frame = results.compute_reported_accuracies(self.accuracies, report.round, report.last_k)
        accuracies_by_run = {}
        for row in frame.to_dict("records"):
            cell = by_point[row["algorithm"], row["seed"], *(row[name] for name in self.plan.grid)]
            accuracies_by_run[cell.algorithm, _format_run_id(cell), str(row["protocol"])] = 100 * float(row["accuracy"])
        return accuracies_by_run

    @cached_property
    def diverged_keys(self) -> set[str]:
        """The keys of runs in which some round had no finite update."""
        frame = StudyData(self._finished_plan).left_out_updates
        return set(frame[frame["diverged"] > 0]["key"])

    def get_accuracy(self, cell: Cell) -> float | None:
        """What stands in the table for a cell, by its method's protocol; None where the method has no such model."""
        return self.reported_accuracies.get((cell.algorithm, _format_run_id(cell), self.get_protocol(cell.algorithm)))

    def get_selection_accuracy(self, cell: Cell) -> float:
        """By what the best value of a grid is chosen: a cell's accuracy on test or validation samples."""
        protocol = self.get_protocol(cell.algorithm)
        selection_protocol = (
            base.to_validation_protocol(protocol) if self.plan.report.best_on == "validation" else protocol
        )
        return self.reported_accuracies.get((cell.algorithm, _format_run_id(cell), selection_protocol), -math.inf)

    def load_metrics(self, cell: Cell) -> pd.DataFrame:
        """All that was measured of a run, by round, client and protocol."""
        return _read_merged_frame(cell.merged_files.metrics)

    def load_traffic(self, cell: Cell) -> pd.Series[float]:
        """Bytes that a participant receives and sends in the last round, when nobody is new any more."""
        return cast(
            "pd.Series[float]", _read_merged_frame(cell.merged_files.rounds)[["bytes_down", "bytes_up"]].iloc[-1]
        )

    def count_test_samples(self, cell: Cell) -> int:
        """Number of test samples of the last round's accuracy, each once: clients have their own, or all the same."""
        frame, protocol = self.load_metrics(cell), self.get_protocol(cell.algorithm)
        frame = frame[frame["protocol"] == protocol]
        by_client = frame[frame["round"] == frame["round"].max()]["total"]
        return int(by_client.max() if protocol.endswith("-on-global") else by_client.sum())

    def load_seconds(self, cell: Cell) -> pd.DataFrame:
        """Seconds by round."""
        return pd.DataFrame(results.read_times(cell)["rounds"])

    def compute_hours(self, cell: Cell) -> float:
        """Hours that a run took."""
        return float(self.load_seconds(cell)[list(results.TIMED_PHASES)].sum().sum()) / 3600

    def read_settings(self, cell: Cell) -> dict[str, Any]:
        """All settings of a run, as its ``run.yaml`` holds them."""
        return _read_run_settings(cell.files.settings)

    def count_classes(self, cell: Cell) -> int:
        """Number of classes of a run's data."""
        return store.read_dataset_info(layout.dataset_file(self.runs[cell.algorithm, cell.key].dataset)).classes

    def is_generated(self, cell: Cell) -> bool:
        """Whether a run's data are noise in the shape of those that the study names."""
        return bool(self.read_settings(cell)["dataset"]["name"] == GENERATED_DATASET)

    def get_differing_settings(self, cell: Cell) -> dict[str, Any]:
        """Settings of a run that not all runs of the study have, with its data set and model."""
        always_listed = {"dataset.name", "dataset.subset", "model.name"}
        selected_settings = {
            name: value
            for name, value in _flatten_settings(self.read_settings(cell)).items()
            if name in always_listed | self._varied_settings
        }
        return selected_settings | {"federation.rounds": cell.rounds}

    @cached_property
    def _varied_settings(self) -> set[str]:
        """The settings in which the runs that are done differ."""
        settings_by_run: list[set[Any]] = [
            set(_flatten_settings(self.read_settings(cell)).items()) for cell in self.finished_cells
        ]
        return (
            {name for name, _ in set.union(*settings_by_run) - set.intersection(*settings_by_run)}
            if settings_by_run
            else set()
        )

    def load_probes(self, name: str, cell: Cell) -> list[tuple[PlannedProbe, pd.DataFrame]]:
        """What a probe of the study found in a run, where it is there."""
        probe_tables = []
        for probe in self.plan.probes:
            is_selected = (probe.algorithm, probe.run_key, probe.rounds) == (cell.algorithm, cell.key, cell.rounds)
            if probe.kind == name and is_selected and probe.files.marker.is_file():
                table = files.read_parquet(probe.files.table, files.read_recorded_sha256(probe.files.table))
                probe_tables.append((probe, files.table_to_frame(table)))
        return probe_tables

    # -- what is missing ---------------------------------------------------------------------------------------------

    def explain_missing(self, method: str, column: str) -> str:
        """Why there is no number of a method in a column."""
        cells = self.get_cells(method, column)
        if not cells:
            return f"not part of scale {self.plan.scale}"
        runs = [self.runs[cell.algorithm, cell.key] for cell in cells]
        unavailable_reasons = [
            self.unavailable_runs[str(run.path)] for run in runs if str(run.path) in self.unavailable_runs
        ]
        if unavailable_reasons:
            return unavailable_reasons[0]
        missing_runs = [run for cell, run in zip(cells, runs, strict=True) if not cell.merged_files.marker.is_file()]
        if not missing_runs:
            return "no such model"
        return next(filter(None, map(self._describe_failure, missing_runs)), "not run")

    def get_missing_cells(self, method: str, column: str) -> list[Cell]:
        """The cells of a method in a column that have not been run."""
        return [cell for cell in self.get_cells(method, column) if not cell.merged_files.marker.is_file()]

    def estimate_hours(self, cells: Sequence[Cell]) -> float:
        """About the hours that cells would take on this machine; NaN where none can tell."""
        return sum(cell.rounds * self._hours_per_round.get(cell.key, math.nan) for cell in cells)

    @cached_property
    def _hours_per_round(self) -> dict[str, float]:
        return forecast.estimate_hours_per_round(planner.make_plan(self.plan.params, self.plan.scale))

    @cached_property
    def unavailable_runs(self) -> dict[str, str]:
        """By path, runs that nothing here can make, with what is missing."""
        unavailable_path = self.plan.study_files.unavailable_runs
        return files.read_json(unavailable_path) if unavailable_path.is_file() else {}

    @cached_property
    def _failures(self) -> list[status.Failure]:
        return status.load_progress(self.plan)[1]

    def _describe_failure(self, run: PlannedRun) -> str:
        """What the job said that failed, of a run or of what it is made of."""
        for failure in self._failures:
            if any(name_part in failure.log.name for name_part in (run.key, run.partition, run.dataset)):
                last = failure.lines[-1].strip() if failure.lines else "its log is empty"
                return f"{failure.rule} failed: {last[:MAX_QUOTED_LETTERS]}"
        return ""

    @cached_property
    def _finished_plan(self) -> Plan:
        runs = tuple(run for run in self.plan.runs if any(run.has_cell(cell) for cell in self.finished_cells))
        return dataclasses.replace(self.plan, cells=self.finished_cells, runs=runs)


def _format_run_id(cell: Cell) -> str:
    return f"{cell.key}:{cell.rounds}"


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else f"{value}"


@functools.lru_cache(maxsize=2048)
def _read_merged_frame(path: Path) -> pd.DataFrame:
    return files.table_to_frame(layout.read_merged_table(path))


@functools.lru_cache(maxsize=2048)
def _read_run_settings(path: Path) -> dict[str, Any]:
    try:
        run_settings: dict[str, Any] = yaml.load(path.read_text(), Loader=_YAML_LOADER)
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing; run `fedpipe plan` to write it again.") from None
    return run_settings


def _flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted names."""
    flat_settings: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name not in OMITTED_SETTINGS:
            flat_settings |= _flatten_settings(value, f"{prefix}{name}.")
        elif name not in OMITTED_SETTINGS:
            flat_settings[f"{prefix}{name}"] = value if isinstance(value, str | int | float) else str(value)
    return flat_settings
