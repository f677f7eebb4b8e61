"""The runs of a paper's study at a preset: cells by row and column of a table, and why others are missing."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import pandas as pd

from fedpipe.core.components import code_digest
from fedpipe.core.storage import files, layout
from fedpipe.core.storage.layout import PAPERS, StudyFiles
from fedpipe.papers import stored_runs
from fedpipe.papers.runs import LocalRun, read_run_settings
from fedpipe.papers.stored_runs import FinishedRun, RunStore, StoredRun
from fedpipe.planning.plan import Cell, Plan, PlannedRun
from fedpipe.report import results, status
from fedpipe.settings import base, loader, parser

HERE = "computed here"  #: origin of a run of this machine


class PaperStudy:
    """A study at a preset, as far as its runs are on this machine or stored in the repository."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        cells, run_store = results.sort_cells(plan), RunStore.read(plan.params)
        self.local_cells = tuple(cell for cell in cells if cell.merged_files.marker.is_file())
        #: The run of this machine, then the stored runs with the same settings.
        self._finished_runs: dict[str, list[FinishedRun]] = {
            _format_run_id(cell): [self.get_local_run(cell)] for cell in self.local_cells
        }
        if run_store.runs:
            for run_id, cell in {_format_run_id(cell): cell for cell in cells}.items():
                self._finished_runs.setdefault(run_id, []).extend(self._find_stored_runs(run_store, cell))
        self.finished_cells = tuple(cell for cell in cells if self._finished_runs.get(_format_run_id(cell)))

    @classmethod
    def find_planned_study(cls, stem: str, name: str, preset: str) -> PaperStudy | None:
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
        return self.plan.get_method_protocol(method)

    @cached_property
    def preset_description(self) -> str:
        """What the preset sets, in words. Of a mapping, only the names. Hashes of files are omitted."""
        if self.plan.preset == layout.FULL_PRESET:
            return ""
        change_texts = []
        for key, value in loader.read_params(self.plan.params)["presets"][self.plan.preset].items():
            names = value.get("name", ", ".join(value)) if isinstance(value, dict) else value
            if not key.endswith("sha256"):
                change_texts.append(f"{key} {', '.join(map(str, names)) if isinstance(names, list) else names}")
        return "; ".join(change_texts)

    def get_run(self, cell: Cell) -> FinishedRun:
        """The run of a finished cell: of this machine if it is here, or else a stored run."""
        return self._finished_runs[_format_run_id(cell)][0]

    def get_local_run(self, cell: Cell) -> LocalRun:
        """The run of a cell on this machine."""
        return LocalRun(cell, self.plan.get_run(cell), self.plan.report.average)

    def describe_origin(self, cell: Cell) -> str:
        """Where a finished cell comes from, and stored runs with the same settings but other numbers."""
        run, *others = self._finished_runs[_format_run_id(cell)]
        origin = HERE if isinstance(run, LocalRun) else run.describe_origin(self._get_current_digests(cell))
        notes = [
            f"differs by up to {100 * difference:.2f} points from the stored run of commit {other.commit}, {other.date}"
            for other in others
            if isinstance(other, StoredRun)
            and (difference := stored_runs.compute_largest_accuracy_difference(run, other))
        ]
        return "; ".join([origin, *notes])

    def _find_stored_runs(self, run_store: RunStore, cell: Cell) -> list[StoredRun]:
        """The stored runs with a cell's settings: those of today's code first, then the newest."""
        current_digests = self._get_current_digests(cell)
        settings = stored_runs.compute_settings_digest(self.read_settings(cell))
        runs = run_store.find_runs(settings, cell.rounds, self.plan.report.average)
        return sorted(runs, key=lambda run: bool(run.list_code_and_sample_changes(current_digests)))

    def _get_current_digests(self, cell: Cell) -> dict[str, str]:
        return stored_runs.get_code_and_sample_digests(
            self.read_settings(cell), code_digest.compute_shared_code_digest()
        )

    @cached_property
    def accuracies(self) -> pd.DataFrame:
        """Accuracies in [0, 1] of the finished runs by ``run``, ``protocol`` and ``round``, in the reported average."""
        cells = {_format_run_id(cell): cell for cell in self.finished_cells}
        return pd.concat([self.get_run(cell).accuracies_by_round.assign(run=run) for run, cell in cells.items()])

    @cached_property
    def _reported_accuracies_by_run(self) -> dict[Any, float]:
        report = self.plan.report
        scores = self.accuracies.rename(columns={"accuracy": "score"}).assign(metric="accuracy")
        frame = results.compute_reported_scores(scores, report.round, report.last_k)
        return dict(100 * frame.set_index(["run", "protocol"])["score"])

    def get_accuracy(self, cell: Cell) -> float | None:
        """The accuracy in percent that the study's table shows of a cell. None if the method has no such model."""
        return self._reported_accuracies_by_run.get((_format_run_id(cell), self.get_protocol(cell.algorithm)))

    def get_selection_accuracy(self, cell: Cell) -> float:
        """The accuracy by which the best value of a grid is chosen: on test or validation samples."""
        protocol = self.get_protocol(cell.algorithm)
        if self.plan.report.best_on == "validation":
            protocol = base.convert_to_validation_protocol(protocol)
        return self._reported_accuracies_by_run.get((_format_run_id(cell), protocol), -math.inf)

    def get_accuracy_curve(self, cell: Cell) -> pd.DataFrame:
        """A cell's accuracies by round, ``x``, as ``value`` in percent."""
        frame = self.accuracies
        is_selected = (frame["run"] == _format_run_id(cell)) & (frame["protocol"] == self.get_protocol(cell.algorithm))
        return pd.DataFrame({"x": frame["round"], "value": 100 * frame["accuracy"]})[is_selected]

    def read_settings(self, cell: Cell) -> dict[str, Any]:
        """All settings of a planned run, as its ``run.yaml`` contains them."""
        return read_run_settings(cell.files.settings)

    def load_diagnostics(self, kind: str, cell: Cell) -> list[pd.DataFrame]:
        """The tables of a study's finished diagnostics of a run."""
        wanted = kind, cell.algorithm, cell.key, cell.rounds
        tables = [
            diagnostic.files.table
            for diagnostic in self.plan.diagnostics
            if (diagnostic.kind, diagnostic.algorithm, diagnostic.run_key, diagnostic.rounds) == wanted
            and diagnostic.files.marker.is_file()
        ]
        return [files.table_to_frame(files.read_parquet(path, files.read_recorded_sha256(path))) for path in tables]

    def explain_missing_number(self, method: str, column: str) -> str:
        """Why there is no number of a method in a column."""
        cells = self.get_missing_cells(method, column)
        if not cells:
            all_cells = self.get_cells(method, column)
            if not all_cells:
                return f"not part of preset {self.plan.preset}"
            is_local = all(cell in self.local_cells for cell in all_cells)
            return "the method has no such model" if is_local else "only its accuracies are stored"
        runs = [self.plan.get_run(cell) for cell in cells]
        unavailable = [self._unavailable_runs.get(str(run.path), "") for run in runs]
        return next(filter(None, [*unavailable, *map(self._describe_failure, runs)]), "not run")

    def get_missing_cells(self, method: str, column: str) -> list[Cell]:
        """The cells of a method in a column that are not finished."""
        return [cell for cell in self.get_cells(method, column) if cell not in self.finished_cells]

    @cached_property
    def _unavailable_runs(self) -> dict[str, str]:
        """Missing data of the runs that have none, by path."""
        path = self.plan.study_files.unavailable_runs
        return files.read_json(path) if path.is_file() else {}

    @cached_property
    def _failed_jobs(self) -> list[status.Failure]:
        return status.load_progress_and_failures(self.plan)[1]

    def _describe_failure(self, run: PlannedRun) -> str:
        """The last line of the failed job of a run, or of its data or partition."""
        for failure in self._failed_jobs:
            if any(part in failure.log.name for part in (run.key, run.partition, run.dataset)):
                return f"{failure.rule} failed: {failure.lines[-1].strip()[:160]}"
        return ""


def _format_run_id(cell: Cell) -> str:
    return f"{cell.algorithm}:{cell.key}:{cell.rounds}"
