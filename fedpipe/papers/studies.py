"""The runs of a paper's study at a preset: cells by row and column of a table, and why others are missing."""

from __future__ import annotations

import functools
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedpipe.core.storage import files, layout
from fedpipe.core.storage.layout import PAPERS, StudyFiles
from fedpipe.core.yaml_text import read_generated_yaml
from fedpipe.data import store
from fedpipe.planning.plan import Cell, Plan, PlannedRun
from fedpipe.report import results, status
from fedpipe.settings import base, loader, parser


class PaperStudy:
    """A study at a preset, as far as it has run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.runs = {(run.algorithm, run.key): run for run in plan.runs}
        self.finished_cells = tuple(cell for cell in results.sort_cells(plan) if cell.merged_files.marker.is_file())

    @classmethod
    def find_planned(cls, stem: str, name: str, preset: str) -> PaperStudy | None:
        """The study ``name`` (such as ``table1``) of a paper. None if it was never planned at this preset."""
        plan_path = StudyFiles.from_params(PAPERS / stem / f"{name}.yaml", preset).plan
        return cls(Plan.read(plan_path)) if plan_path.is_file() else None

    @cached_property
    def column_grid_names(self) -> list[str]:
        """The names of the grid whose values are a column of the paper's table, in the study's order."""
        raw, _ = parser.apply_preset(loader.read_params(self.plan.params), self.plan.preset)
        names = [name for name in raw["study"].get("grid", {}) if not name.startswith("algorithms.")]
        return [name for name in names if name not in self.plan.report.best_over]

    def get_column_name(self, cell: Cell) -> str:
        """The column of a cell: its values with a slash between, as in `published.csv`."""
        return "/".join(str(cell.grid[name]) for name in self.column_grid_names if name in cell.grid)

    def get_cells(self, method: str, column: str) -> list[Cell]:
        """The cells of a method in a column, finished or not."""
        return [cell for cell in self.plan.cells if (cell.algorithm, self.get_column_name(cell)) == (method, column)]

    def get_protocol(self, method: str) -> str:
        """The protocol of a method's accuracies."""
        return self.plan.method_protocols.get(method, self.plan.protocols[0])

    @cached_property
    def preset_changes(self) -> str:
        """What the preset sets, in words. Of a mapping, only the names."""
        if self.plan.preset == layout.FULL_PRESET:
            return ""
        change_texts = []
        for key, value in loader.read_params(self.plan.params)["presets"][self.plan.preset].items():
            names = value.get("name", ", ".join(value)) if isinstance(value, dict) else value
            change_texts.append(f"{key} {', '.join(map(str, names)) if isinstance(names, list) else names}")
        return "; ".join(change_texts)

    @cached_property
    def accuracies(self) -> pd.DataFrame:
        """Accuracies in [0, 1] of the finished runs by ``run``, ``protocol`` and ``round``, in the reported average."""
        cells = {_format_run_id(cell): cell for cell in self.finished_cells}
        frames = [results.compute_accuracies(self.load_metrics(cell)).assign(run=run) for run, cell in cells.items()]
        frame = pd.concat(frames)
        return frame[frame["average"] == self.plan.report.average]

    @cached_property
    def _reported_accuracies(self) -> dict[Any, float]:
        report = self.plan.report
        frame = results.compute_reported_accuracies(self.accuracies, report.round, report.last_k)
        return dict(100 * frame.set_index(["run", "protocol"])["accuracy"])

    def get_accuracy(self, cell: Cell) -> float | None:
        """The accuracy in percent that the study's table shows of a cell. None if the method has no such model."""
        return self._reported_accuracies.get((_format_run_id(cell), self.get_protocol(cell.algorithm)))

    def get_accuracy_for_choice(self, cell: Cell) -> float:
        """The accuracy by which the best value of a grid is chosen: on test or validation samples."""
        protocol = self.get_protocol(cell.algorithm)
        if self.plan.report.best_on == "validation":
            protocol = base.to_validation_protocol(protocol)
        return self._reported_accuracies.get((_format_run_id(cell), protocol), -math.inf)

    def load_curve(self, cell: Cell) -> pd.DataFrame:
        """A cell's accuracies by round, ``x``, as ``value`` in percent."""
        frame = self.accuracies
        is_selected = (frame["run"] == _format_run_id(cell)) & (frame["protocol"] == self.get_protocol(cell.algorithm))
        return pd.DataFrame({"x": frame["round"], "value": 100 * frame["accuracy"]})[is_selected]

    def load_metrics(self, cell: Cell) -> pd.DataFrame:
        """All measurements of a run, by round, client and protocol."""
        return _read_merged_frame(cell.merged_files.metrics)

    def load_rounds(self, cell: Cell) -> pd.DataFrame:
        """Participants, left-out updates and traffic of a run by round."""
        return _read_merged_frame(cell.merged_files.rounds)

    def is_diverged(self, cell: Cell) -> bool:
        """Whether in some round no participant's update was finite."""
        rounds = self.load_rounds(cell)
        return bool((rounds["left_out"] == rounds["participants"]).any())

    def count_test_samples(self, cell: Cell) -> int:
        """Number of test samples of the last round, each once. Clients have their own, or share the global ones."""
        protocol = self.get_protocol(cell.algorithm)
        frame = self.load_metrics(cell).query("protocol == @protocol")
        by_client = frame[frame["round"] == frame["round"].max()]["total"]
        return int(by_client.max() if protocol.endswith("-on-global") else by_client.sum())

    def read_settings(self, cell: Cell) -> dict[str, Any]:
        """All settings of a run, as its ``run.yaml`` contains them."""
        return _read_run_settings(cell.files.settings)

    def count_classes(self, cell: Cell) -> int:
        """Number of classes of a run's data."""
        return store.read_dataset_info(layout.get_dataset_path(self.runs[cell.algorithm, cell.key].dataset)).classes

    def is_generated(self, cell: Cell) -> bool:
        """Whether a run's data are noise of the same shape as the study's data set."""
        return bool(self.read_settings(cell)["dataset"]["name"] == "generated")

    def load_diagnostics(self, kind: str, cell: Cell) -> list[pd.DataFrame]:
        """The tables of a study's finished diagnostics of a run."""
        run = cell.algorithm, cell.key, cell.rounds
        diagnostics = [
            diagnostic
            for diagnostic in self.plan.diagnostics
            if (diagnostic.algorithm, diagnostic.run_key, diagnostic.rounds) == run
        ]
        return [
            files.table_to_frame(
                files.read_parquet(diagnostic.files.table, files.read_recorded_sha256(diagnostic.files.table))
            )
            for diagnostic in diagnostics
            if diagnostic.kind == kind and diagnostic.files.marker.is_file()
        ]

    def explain_missing_number(self, method: str, column: str) -> str:
        """Why there is no number of a method in a column."""
        cells = self.get_missing_cells(method, column)
        if not cells:
            has_cells = self.get_cells(method, column)
            return "the method has no such model" if has_cells else f"not part of preset {self.plan.preset}"
        runs = [self.runs[cell.algorithm, cell.key] for cell in cells]
        unavailable = [self._unavailable_runs.get(str(run.path), "") for run in runs]
        return next(filter(None, [*unavailable, *map(self._describe_failure, runs)]), "not run")

    def get_missing_cells(self, method: str, column: str) -> list[Cell]:
        """The cells of a method in a column that are not finished."""
        return [cell for cell in self.get_cells(method, column) if not cell.merged_files.marker.is_file()]

    @cached_property
    def _unavailable_runs(self) -> dict[str, str]:
        """Missing data of the runs that have none, by path."""
        path = self.plan.study_files.unavailable_runs
        return files.read_json(path) if path.is_file() else {}

    @cached_property
    def _failures(self) -> list[status.Failure]:
        return status.load_progress(self.plan)[1]

    def _describe_failure(self, run: PlannedRun) -> str:
        """The last line of the failed job of a run, or of its data or partition."""
        for failure in self._failures:
            if any(part in failure.log.name for part in (run.key, run.partition, run.dataset)):
                last = failure.lines[-1].strip() if failure.lines else "its log is empty"
                return f"{failure.rule} failed: {last[:160]}"
        return ""


def _format_run_id(cell: Cell) -> str:
    return f"{cell.algorithm}:{cell.key}:{cell.rounds}"


@functools.lru_cache(maxsize=2048)
def _read_merged_frame(path: Path) -> pd.DataFrame:
    return files.table_to_frame(layout.read_merged_table(path))


@functools.lru_cache(maxsize=2048)
def _read_run_settings(path: Path) -> dict[str, Any]:
    run_settings: dict[str, Any] = read_generated_yaml(path)
    return run_settings
