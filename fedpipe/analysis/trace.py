"""Traces a table's cell back to the data file, with the hash of every artifact."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd

from fedpipe.core.errors import ArtifactError, SettingsError, suggest_name
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import layout
from fedpipe.core.storage.archive import RESTORE_ADVICE
from fedpipe.core.storage.files import (
    RESULTS,
    compute_file_sha256,
    find_file_or_pack,
    format_display_path,
    is_intact,
    is_stored,
    read_json,
    read_recorded_sha256,
)
from fedpipe.core.storage.layout import MergedRoundFiles, RunFiles
from fedpipe.data import store
from fedpipe.planning.plan import Plan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report import results, table_parts
from fedpipe.report.contents import require_current_tables
from fedpipe.report.data import StudyData
from fedpipe.report.words import METRICS
from fedpipe.settings.report import Report

GRID_SEPARATOR = re.compile(", (?=[^,=]+=)")  #: between the values of a grid point, such as `, mu=`
TABLES = ("results.md", "results.csv")  #: tables whose cells can be traced


def collect_cell_provenance(table: Path, cell: str) -> dict[str, Any]:
    """Trace a cell, such as ``ALGORITHM.POINT.PROTOCOL``, to everything that it was computed from.

    The result contains the number, how it was reported, the settings that all runs have in common, and for each run its
    other settings, the artifacts with their checked SHA-256, the partition, the data set, the versions that made it,
    and the commit that first recorded it. The table must be the one of the plan's runs.
    """
    if table.parent.name != "tables" or table.name not in TABLES:
        raise SettingsError(
            f"'{table}' has no cells that can be traced. Use {' or '.join(TABLES)} of a study, such as "
            f"results/tables/{TABLES[0]}."
        )
    if RESULTS.resolve() not in table.resolve().parents:
        raise SettingsError(f"'{table}' is not in the results of this folder. Change to the folder of its study.")
    plan = Plan.read(table.parent.parent / "plan.json")
    data, report = StudyData(plan), plan.report
    plan.require_finished_search()
    require_current_tables(data, *TABLES)
    table_cells = _collect_rows_by_cell_name(data)
    cell = _find_table_cell_name(cell, table_cells)
    if cell not in table_cells:
        similar_names = [name for name in table_cells if name.partition(".")[0] == cell.partition(".")[0]]
        raise SettingsError(
            f"'{cell}' is not a cell of {table}. {suggest_name(cell, similar_names or list(table_cells))}"
        )
    row = table_cells[cell]
    row_cells = [
        row_cell
        for row_cell in results.sort_cells(plan)
        if row.items() >= {"algorithm": row_cell.algorithm, **results.format_grid_point(plan, row_cell)}.items()
    ]
    frame = data.scores
    frame = frame[(frame[plan.row_key_columns] == [row[name] for name in plan.row_key_columns]).all(axis=1)]
    frame = frame[(frame["protocol"] == row["protocol"]) & (frame["average"] == report.average)]
    frame, metric = frame[frame["metric"] == row["metric"]], METRICS[row["metric"]]
    seeds = results.compute_reported_scores(frame, report.round, report.last_k)
    if not len(seeds):
        raise SettingsError(f"'{cell}' has no value in {table}, because the method has no such model.")
    num_seeds = seeds["score"].count()  # a score such as AUC may not be defined for all seeds
    scores = dict(zip(seeds["key"], metric.factor * seeds["score"], strict=True))
    runs = [
        {"seed": row_cell.seed, metric.name_with_unit: round(float(scores[row_cell.key]), 4)}
        | collect_run_provenance(
            row_cell.files, row_cell.merged_files, _get_reported_rounds(frame[frame["key"] == row_cell.key], report)
        )
        for row_cell in row_cells
    ]
    return {
        "cell": cell,
        metric.name_with_unit: round(float((metric.factor * seeds["score"]).mean()), 4),
        "reported": f"{table_parts.ROUND_PHRASES[report.round].format(last_k=report.last_k)}, "
        f"{table_parts.AVERAGE_PHRASES[report.average]}, mean over {num_seeds} seed{'s' if num_seeds > 1 else ''}",
        "table": {str(table): compute_file_sha256(table)},
        "settings": _extract_common_settings(runs),
        "runs": runs,
    }


def collect_run_provenance(files: RunFiles, merged_files: MergedRoundFiles, rounds: list[int]) -> dict[str, Any]:
    """Trace a run: key, settings, artifacts of some rounds, partition, data set, versions and commit."""
    settings = RunSettings.read(files.settings)
    assignment_path = layout.get_assignment_path(compute_json_digest(settings.partition_settings))
    dataset_path = store.get_stored_dataset_path(settings.dataset)
    return {
        "run": str(files.path),
        "settings": {name: section for name, section in vars(settings).items() if section != {}},
        "artifacts": {str(path): compute_file_sha256(path) for path in (files.settings, merged_files.metrics)}
        | {path: sha256 for number in rounds for path, sha256 in _collect_round_hashes(files, number).items()},
        "made by": read_json(merged_files.times, merged_files.read_recorded_sha256(merged_files.times))["made_by"],
        "partition": {str(assignment_path): _read_verified_hash(assignment_path)},
        "data": {str(dataset_path): _read_verified_hash(dataset_path), "samples": settings.dataset["sha256"]},
        "first recorded in": describe_first_commit_of_run(files),
    }


def describe_first_commit_of_run(files: RunFiles) -> str:
    """Find the first commit whose ``results/keys`` contain a run. In a shallow clone it may be older."""
    label, key = files.path.parts[-2:]
    form = "--format=%h %as %s%x00%D"
    command = ["git", "log", "--all", "--reverse", form, f"-S{key}", "--", f"results/keys/{label}.json"]
    try:
        completed_process = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        return f"unknown: git can't be run ({error.strerror})"
    except subprocess.CalledProcessError as error:  # perhaps git does not trust the folder's owner
        if "not a git repository" in error.stderr:
            return "unknown, because this folder is not in a git repository"
        return f"unknown: {error.stderr.partition(chr(10))[0]}"
    commit, _, ref_names = completed_process.stdout.partition("\n")[0].partition("\0")
    shallow_note = ", or earlier, because this clone is shallow" if ref_names.split(", ")[0] == "grafted" else ""
    return f"{commit}{shallow_note}" or "no commit, because results/keys in git do not contain this run"


def _extract_common_settings(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Get the sections of settings that all runs have in common, and remove them and the seed from the runs."""
    common = {
        name: section
        for name, section in runs[0]["settings"].items()
        if name != "seed" and all(run["settings"][name] == section for run in runs)
    }
    for run in runs:
        rest = {name: section for name, section in run["settings"].items() if name not in common and name != "seed"}
        run["settings"] = rest
        if not rest:
            del run["settings"]
    return common


def _collect_rows_by_cell_name(data: StudyData) -> dict[str, dict[Any, Any]]:
    """Rows of the pivoted table by the name of their cell."""
    report, frame = data.plan.report, data.score_table  # results.csv was compared with it, but has other text
    shown_rows = frame[(frame["round"] == report.round) & (frame["average"] == report.average)]
    cells = {}
    for row in shown_rows.to_dict("records"):
        point = results.describe_grid_point({name: row[name] for name in data.plan.grid})
        prefix, suffix = _get_cell_affixes(row)
        cells[f"{prefix}.{point}{suffix}" if point else f"{prefix}{suffix}"] = row
    return cells


def _get_cell_affixes(row: dict[Any, Any]) -> tuple[str, str]:
    """Get the texts before and after the grid point in a cell's name."""
    return row["algorithm"], f".{row['protocol']}" + ("" if row["metric"] == "accuracy" else f".{row['metric']}")


def _find_table_cell_name(cell: str, table_cells: dict[str, dict[Any, Any]]) -> str:
    """Find the table's name of a cell, if its grid values are in another order than in the table."""
    if cell in table_cells:
        return cell
    for name, row in table_cells.items():
        prefix, suffix = _get_cell_affixes(row)
        if cell.startswith(f"{prefix}.") and cell.endswith(suffix):
            cell_values, row_values = (
                GRID_SEPARATOR.split(text[len(prefix) + 1 : -len(suffix)]) for text in (cell, name)
            )
            if sorted(cell_values) == sorted(row_values):
                return name
    return cell


def _get_reported_rounds(frame: pd.DataFrame, report: Report) -> list[int]:
    """Rounds whose accuracies a run's number combines."""
    if report.round == "best":
        signs = frame["metric"].map(lambda metric: METRICS[metric].improvement_sign)
        frame = frame[signs * frame["score"] == (signs * frame["score"]).max()].head(1)
    count = report.last_k if report.round == "mean-last" else 1
    return [int(number) for number in frame["round"].tail(count)]


def _collect_round_hashes(files: RunFiles, round_number: int) -> dict[str, str]:
    """Files of a round with their checked SHA-256. A pruned state has only the recorded one."""
    folder = files.get_round_files(round_number)
    if not is_stored(folder.marker):
        raise _make_missing_file_error(folder.marker, files.path)
    hashes = layout.read_round_hashes(folder, folder.marker)
    hashes_by_path = {format_display_path(folder.marker): compute_file_sha256(folder.marker)}
    for name, sha256 in sorted(hashes.items()):
        path = folder.path / name
        is_pruned = path in (folder.server_state, folder.client_states) and not path.exists()
        pruned_text = sha256 + " (pruned: artifacts.keep_models)"
        hashes_by_path[format_display_path(path)] = (
            pruned_text if is_pruned else _read_verified_hash(path, sha256, files.path)
        )
    return hashes_by_path


def _read_verified_hash(path: Path, sha256: str | None = None, run_folder: Path | None = None) -> str:
    """Compare a file with its recorded hash, and return the hash. If it is damaged, delete ``run_folder``."""
    sha256 = sha256 or read_recorded_sha256(path)
    if not is_stored(path):
        raise _make_missing_file_error(path, run_folder)
    if not is_intact(path, sha256):
        raise ArtifactError(
            f"{find_file_or_pack(path)} is damaged (its SHA-256 is not {sha256[:12]}…). Delete "
            f"{run_folder or path}. Then {RESTORE_ADVICE}."
        )
    return sha256


def _make_missing_file_error(path: Path, run_folder: Path | None) -> ArtifactError:
    """Make the error about a missing file. Snakemake does not notice that a file of a round is missing."""
    return ArtifactError(f"{path} is missing. {f'Delete {run_folder}. Then ' if run_folder else ''}{RESTORE_ADVICE}.")
