"""Records finished runs of planned studies in the repository, see `fedpipe.papers.stored_runs`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fedpipe.core.components import code_digest
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.layout import StudyFiles
from fedpipe.papers import commits, stored_runs
from fedpipe.papers.runs import LocalRun
from fedpipe.papers.stored_runs import AccuracyCurve, RunStore, StoredRun
from fedpipe.planning import freshness
from fedpipe.planning.plan import Cell, Plan
from fedpipe.report import results

ENVIRONMENT_FIELDS = ("fedpipe", "python", "torch", "numpy", "device", "executor")


class RecordedStudy(NamedTuple):
    """What was recorded of a study, in words. Nothing if the plan is not current."""

    message: str
    is_current: bool = True


def record_runs_of_studies(paths: list[Path], preset: str) -> Iterator[RecordedStudy]:
    """Record the finished runs of all studies that are planned at a preset.

    Stored runs stay as they are, also if they are not on this machine. Studies without finished runs are omitted.

    Raises a SettingsError if no study has a finished run, and an ArtifactError if a store or a file of a run is
    damaged.
    """
    commit, is_empty = commits.read_code_commit(), True
    for path in paths:
        files = StudyFiles.from_params(path, preset)
        if files.plan.is_file() and (recorded := record_runs_of_study(Plan.read(files.plan), commit)):
            is_empty = False
            yield recorded
    if is_empty:
        names = paths[0] if len(paths) == 1 else f"{len(paths)} studies"
        raise SettingsError(
            f"--preset: there is no finished run of {names} at preset {preset}. Type `fedpipe run` with the study and "
            "preset."
        )


def record_runs_of_study(plan: Plan, commit: str) -> RecordedStudy | None:
    """Record the finished runs of a study. ``commit`` is the commit of today's code. None without finished runs."""
    cells: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in results.sort_cells(plan):
        if cell.merged_files.marker.is_file():
            cells.setdefault((cell.algorithm, cell.key, cell.rounds), []).append(cell)
    if not cells:
        return None
    if freshness.compare_plan_with_files(plan).state == "stale":
        command = shlex.join(["fedpipe", "plan", "--params", str(plan.params), "--preset", plan.preset])
        return RecordedStudy(
            f"{plan.params}: skipped, because it has changed since it was planned. Type `{command}`.", False
        )
    run_store = RunStore.read(plan.params)
    added = sum(run_store.add_run(make_stored_run(plan, run_cells, commit)) for run_cells in cells.values())
    if added:
        run_store.write()
    return RecordedStudy(
        f"{stored_runs.get_stored_runs_path(plan.params)}: {added} added, {len(run_store.runs)} stored"
    )


def make_stored_run(plan: Plan, cells: list[Cell], commit: str) -> StoredRun:
    """Describe a finished run of this machine as a stored run. ``cells`` are all cells that report it.

    The commit is that of today's code. It ends with ``-other`` if the run was computed by other shared code, which the
    column ``shared_code`` names.
    """
    cell = cells[0]
    planned_run = plan.get_run(cell)
    run = LocalRun(cell, planned_run, plan.report.average)
    environment = results.join_environments(run.times["made_by"])
    is_current = environment["shared"] == code_digest.compute_shared_code_digest()
    seconds = pd.DataFrame(run.times["rounds"])[list(results.TIMED_PHASES)].sum(axis=1)
    points = (results.describe_grid_point(results.format_grid_point(plan, each)) for each in cells)
    finished = datetime.fromtimestamp(cell.merged_files.marker.stat().st_mtime, UTC)
    return StoredRun(
        preset=plan.preset,
        point="; ".join(dict.fromkeys(points)),
        algorithm=cell.algorithm,
        seed=cell.seed,
        rounds=cell.rounds,
        key=cell.key,
        settings=stored_runs.compute_settings_digest(run.settings),
        **stored_runs.get_code_and_sample_digests(run.settings, environment["shared"]),
        commit=commit if is_current or not commit else f"{commit}-other",
        date=f"{finished:%Y-%m-%d %H:%M}",
        **{name: environment[name] for name in ENVIRONMENT_FIELDS},
        is_generated=run.is_generated,
        is_diverged=run.is_diverged,
        classes=run.classes,
        round_seconds=float(f"{seconds.mean():.4g}"),
        epoch_seconds=float(f"{run.epoch_seconds:.4g}"),
        bytes_down=run.last_round_traffic.down,
        bytes_up=run.last_round_traffic.up,
        curves=tuple(
            AccuracyCurve.from_accuracies(str(protocol), run.average, run.count_test_samples(str(protocol)), rows)
            for protocol, rows in run.accuracies_by_round.groupby("protocol")
        ),
    )
