"""From a table's cell back to the data file: every artifact on the way, with its hash."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd

from fedpipe import artifacts
from fedpipe.artifacts import RESTORE, RESULTS, JoinedFiles, RunFiles
from fedpipe.data import store
from fedpipe.errors import ArtifactError, SettingsError, nearest
from fedpipe.plan import Settings, digest
from fedpipe.planned import Cell, Plan, Reported
from fedpipe.report import results, tables
from fedpipe.stages.report import check


def trace(table: Path, cell: str) -> dict[str, Any]:
    """What a cell was made of.

    Parameters
    ----------
    table
        ``results.md`` or ``results.csv`` of a study.
    cell
        ``ALGORITHM.PROTOCOL``, or ``ALGORITHM.POINT.PROTOCOL`` with a grid.

    Returns
    -------
    dict
        The number; how it was reported; and for each run the settings, the artifacts with their SHA-256 (checked now),
        the partition, the data set, what made it, and the commit that first recorded it.

    Raises
    ------
    SettingsError
        There is no such cell.
    ArtifactError
        The table is not the one that the plan's runs make, or an artifact is missing or damaged.
    """
    if table.parent.name != "tables":
        raise SettingsError(f"'{table}' is not a study's table; it should be as results/tables/results.md.")
    if RESULTS.resolve() not in table.resolve().parents:
        raise SettingsError(f"'{table}' is not a table of this folder's studies; go to the folder that it is of.")
    plan = Plan.read(table.parent.parent / "plan.json")
    check(plan, "results.md", "results.csv")
    report = plan.report
    found = _cells(plan)
    if cell not in found:
        near = [name for name in found if name.partition(".")[0] == cell.partition(".")[0]]
        raise SettingsError(f"'{cell}' is not a cell of {table}; {nearest(cell, near or list(found))}")
    row = found[cell]
    cells = tuple(run for run in results.cells(plan) if run.algorithm == row["algorithm"] and _at(plan, run, row))
    frame = results.load(dataclasses.replace(plan, cells=cells))
    frame = frame[(frame["protocol"] == row["protocol"]) & (frame["average"] == report.average)]
    seeds = results.reported(frame, report.round, report.last_k)
    if not len(seeds):
        raise SettingsError(f"'{cell}' is a dash in {table}: the method has no such model.")
    accuracy = dict(zip(seeds["key"], seeds["accuracy"], strict=True))
    return {
        "cell": cell,
        "accuracy (%)": round(float(100 * seeds["accuracy"].mean()), 4),
        "reported": f"{_reported(plan)}, {tables.AVERAGED[report.average]}, mean over {_seeds(len(seeds))}",
        "table": {str(table): artifacts.sha256_of(table)},
        "runs": [
            {"seed": run.seed, "accuracy (%)": round(100 * float(accuracy[run.key]), 4)}
            | run_of(run.files, run.joined, _rounds(frame[frame["key"] == run.key], report))
            for run in cells
        ],
    }


def run_of(files: RunFiles, joined: JoinedFiles, rounds: list[int]) -> dict[str, Any]:
    """A run: its key, settings, artifacts of some rounds, partition, data set, makers and commit."""
    settings = Settings.read(files.settings)
    dealt = artifacts.assignment_file(digest(settings.partition_settings))
    data = store.place(settings.dataset)
    return {
        "run": str(files.path),
        "settings": {name: getattr(settings, name) for name in settings.__dataclass_fields__},
        "artifacts": {str(path): artifacts.sha256_of(path) for path in (files.settings, joined.metrics)}
        | {path: sha256 for number in rounds for path, sha256 in _round(files, number).items()},
        "made by": artifacts.read_json(joined.times, joined.sha256(joined.times))["made_by"],
        "partition": {str(dealt): _checked(dealt)},
        "data": {str(data): _checked(data), "samples": settings.dataset["sha256"]},
        "first recorded in": recorded(files),
    }


def recorded(files: RunFiles) -> str:
    """The first commit whose ``results/keys`` name a run; where a shallow clone's history begins, it may be older."""
    label, key = files.path.parts[-2:]
    form = "--format=%h %as %s%x00%D"
    command = ["git", "log", "--all", "--reverse", form, f"-S{key}", "--", f"results/keys/{label}.json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        return f"unknown: git can't be run ({error.strerror})"
    except subprocess.CalledProcessError as error:  # no clone, or one of another user whom git does not trust
        return f"unknown: {error.stderr.partition(chr(10))[0]}"
    commit, _, marks = done.stdout.partition("\n")[0].partition("\0")
    earlier = ", or before: this clone is shallow" if marks.split(", ")[0] == "grafted" else ""
    return f"{commit}{earlier}" or "no commit's results/keys"


def _reported(plan: Plan) -> str:
    return tables.REPORTED[plan.report.round].format(last_k=plan.report.last_k)


def _seeds(count: int) -> str:
    return f"{count} seeds" if count > 1 else "1 seed"


def _cells(plan: Plan) -> dict[str, dict[Any, Any]]:
    """Rows of the table by the name of their cell; only what the table for people shows."""
    frame = tables.table(plan)  # and not results.csv, which was compared with it: a CSV file has other text
    shown = frame[(frame["round"] == plan.report.round) & (frame["average"] == plan.report.average)]
    cells = {}
    for row in shown.to_dict("records"):
        point = results.label({name: row[name] for name in plan.grid})
        cells[".".join(part for part in (row["algorithm"], point, row["protocol"]) if part)] = row
    return cells


def _at(plan: Plan, cell: Cell, row: dict[Any, Any]) -> bool:
    return all(row[name] == value for name, value in results.point(plan, cell).items())


def _rounds(frame: pd.DataFrame, report: Reported) -> list[int]:
    """The rounds that a run's number is of."""
    if report.round == "best":
        frame = frame[frame["accuracy"] == frame["accuracy"].max()].head(1)
    count = report.last_k if report.round == "mean-last" else 1
    return [int(number) for number in frame["round"].tail(count)]


def _round(files: RunFiles, number: int) -> dict[str, str]:
    """A round's files with their recorded SHA-256, checked; of a state that was pruned, only that."""
    folder = files.round(number)
    hashes = artifacts.hashes(folder, folder.marker)
    found = {artifacts.place(folder.marker): artifacts.sha256_of(folder.marker)}
    for name, sha256 in sorted(hashes.items()):
        path = folder.path / name
        pruned = path in (folder.server, folder.clients) and not path.exists()
        absent = sha256 + " (pruned: artifacts.keep_models)"
        found[artifacts.place(path)] = absent if pruned else _checked(path, sha256, files.path)
    return found


def _checked(path: Path, sha256: str | None = None, whole: Path | None = None) -> str:
    """The recorded hash of a file that has it; ``whole`` is what it is a part of, and would be made again with."""
    sha256 = sha256 or artifacts.manifest(path)
    if not artifacts.exists(path):
        raise ArtifactError(f"{path} is missing; {f'delete {whole}, then ' if whole else ''}{RESTORE}.")
    if not artifacts.intact(path, sha256):
        delete = f"delete {whole or path}, then {RESTORE}"
        raise ArtifactError(f"{artifacts.holder(path)} is damaged: its SHA-256 is not {sha256[:12]}…; {delete}.")
    return sha256
