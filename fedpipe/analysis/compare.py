"""Compares the result tables of several commits or experiments, and their settings."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedpipe.core.errors import ArtifactError, SettingsError, UserError, format_error
from fedpipe.core.storage.layout import FULL_PRESET, PARAMS, StudyFiles
from fedpipe.core.yaml_text import flatten_mapping, read_generated_yaml
from fedpipe.planning import planner
from fedpipe.planning.plan import Cell, Plan
from fedpipe.report import results, table_notes, table_parts
from fedpipe.report.data import StudyData
from fedpipe.report.statistics import PAIRED_EXPLANATION, compute_paired_difference
from fedpipe.report.words import DASH, METRICS, explain_metrics, format_mean, format_metric_label, join_words
from fedpipe.settings.base import Metric

WORKSPACE = "workspace"  #: DVC's name for the current files
NOT_COMPARED = {"origin", "code"}  #: settings that are paths of files and digests of code

Row = tuple[str, str]  #: of the table: algorithm, and grid point in words


class Revision(NamedTuple):
    """A study of a commit, an experiment or this folder."""

    name: str
    plan: Plan
    scores: dict[tuple[Row, str, Metric], pd.Series[float]]  #: by row, protocol and metric: in its unit, by seed
    runs: dict[Row, set[tuple[str, int]]]  #: its runs by their keys, each with its number of rounds
    settings: dict[Row, dict[str, Any]]  #: by dotted name


def compare_revisions(names: Sequence[str], has_only_changes: bool = False) -> tuple[str, list[str]]:
    """Compare revisions. Return the text, and a warning for each revision whose params.yaml gives another table.

    ``names`` are commits, tags, branches or experiments, beginning with the baseline. A single one, by default HEAD, is
    compared with the workspace. ``has_only_changes`` omits the rows whose runs are the same in all revisions.

    Raises a SettingsError if a revision does not exist or contains no results, and an ArtifactError if some of its
    files are not in this folder, in DVC's cache or in its remote.
    """
    names = [*(names or ["HEAD"]), *([WORKSPACE] if len(names) < 2 else [])]
    if repeated_names := [name for name in names if names.count(name) > 1]:
        raise SettingsError(f"'{repeated_names[0]}' is named twice. Name each revision once.")
    baseline: Plan | None = None
    revisions: list[Revision] = []
    warnings: list[str] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if name != WORKSPACE:
                _fetch_revision(name, Path(folder))
            with contextlib.chdir(Path() if name == WORKSPACE else folder):
                revisions.append(_read_revision(name, baseline))
            if name != WORKSPACE and _is_plan_outdated(revisions[-1].plan, Path(folder)):
                warnings.append(
                    f"the params.yaml of '{name}' does not match its recorded table. Check out '{name}', type "
                    "`dvc repro`, and commit."
                )
        baseline = revisions[0].plan
    return f"{_render_table(revisions, has_only_changes)}\n\n{_render_setting_differences(revisions)}", warnings


# -- reading revisions -------------------------------------------------------------------------------------------------


def _read_revision(name: str, baseline: Plan | None) -> Revision:
    """The revision whose files are in the current folder, with the metrics and the section `report` of the baseline."""
    plan = _read_revision_plan(name)
    plan.require_finished_search()
    metrics, report = (baseline or plan).metrics, (baseline or plan).report
    plan_of_scores = dataclasses.replace(plan, metrics=metrics, report=report)
    reported_scores = results.compute_reported_scores(StudyData(plan_of_scores).scores, report.round, report.last_k)
    frame = results.select_rows_without_extra_models(plan_of_scores, reported_scores)
    frame = frame[frame["metric"].isin(metrics) & (frame["average"] == report.average)]
    cells_by_row: dict[Row, list[Cell]] = {}
    for cell in results.sort_cells(plan):
        row = cell.algorithm, results.describe_grid_point(results.format_grid_point(plan, cell))
        cells_by_row.setdefault(row, []).append(cell)
    scores: dict[tuple[Row, str, Metric], dict[int, float]] = {}
    for line in frame.to_dict("records"):
        row_key = str(line["algorithm"]), results.describe_grid_point({name: line[name] for name in plan.grid})
        by_seed = scores.setdefault((row_key, line["protocol"], line["metric"]), {})
        by_seed[line["seed"]] = METRICS[line["metric"]].factor * line["score"]
    return Revision(
        name,
        plan,
        {cell: pd.Series(by_seed) for cell, by_seed in scores.items()},
        {row: {(cell.key, cell.rounds) for cell in cells} for row, cells in cells_by_row.items()},
        {row: _read_settings_without_seed(cells[0]) for row, cells in cells_by_row.items()},
    )


def _read_revision_plan(name: str) -> Plan:
    """Read the plan in the current folder, as that of a revision."""
    if name == WORKSPACE:
        return Plan.read_study(PARAMS, FULL_PRESET)
    plan_path = StudyFiles.from_params(PARAMS).plan
    try:
        return Plan.read(plan_path)
    except ArtifactError:
        raise ArtifactError(
            f"{name}: its {plan_path} was written by another version of fedpipe. Name another revision."
        ) from None


def _read_settings_without_seed(cell: Cell) -> dict[str, Any]:
    """Read the settings of a cell's run without its seed."""
    run_settings = read_generated_yaml(cell.files.settings)
    return {name: value for name, value in flatten_mapping(run_settings).items() if name != "seed"} | {
        "federation.rounds": cell.rounds
    }


def _is_plan_outdated(plan: Plan, folder: Path) -> bool:
    """Whether the params.yaml of a revision describes another table than its plan, apart from code.

    The revision's files are in ``folder``. Code, and the files that its params.yaml names, are the current ones.
    """
    plan = plan.plan_without_tuning
    try:
        new_plan = planner.make_plan(folder / PARAMS)
    except UserError:  # a file or a component may be missing in the current folder
        return False
    recorded_settings = {cell.key: read_generated_yaml(folder / cell.files.settings) for cell in plan.cells}
    return _encode_comparable_settings(
        new_plan, {key: vars(settings) for key, settings in new_plan.run_settings.items()}
    ) != _encode_comparable_settings(plan, recorded_settings)


def _encode_comparable_settings(plan: Plan, settings: dict[str, dict[str, Any]]) -> str:
    """Encode a plan's settings as canonical JSON, without digests, keys and warnings, which depend on code."""
    derived_fields = {"params", "runs", "cells", "partitions", "warnings"}
    fields = {name: value for name, value in plan.select_reported_fields().items() if name not in derived_fields}
    fields |= {"tuning": fields["tuning"] | {"searches": None}} if plan.tuning else {}
    comparable_settings = {
        key: {name: value for name, value in flatten_mapping(section).items() if not NOT_COMPARED & {*name.split(".")}}
        for key, section in settings.items()
    }
    cells = [
        json.dumps([cell.algorithm, cell.rounds, cell.grid, comparable_settings[cell.key]], sort_keys=True)
        for cell in plan.cells
    ]
    return json.dumps([fields, sorted(cells)], sort_keys=True)


def _fetch_revision(name: str, folder: Path) -> None:
    """Copy the plan of a revision, its params.yaml, and the files that its table is computed from into a folder."""
    from dvc.config import Config
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError
    from pygit2 import GitError

    try:
        # A relative address in a commit's .dvc/config would begin at "/", so use the remotes of this folder.
        # `DVCFileSystem(".", rev=name)` finds no project in a folder of a larger repository.
        with Repo(".", config=Config.from_cwd()) as repo, repo.switch(name):
            _copy_revision(repo.dvcfs, name, folder)
    except SCMError:
        raise SettingsError(
            f"'{name}' is not a commit or experiment. Type `git log` or `dvc exp list` to list their names."
        ) from None
    except (DvcException, GitError, OSError) as error:
        raise SettingsError(f"'{name}' can't be read: {format_error(error)}") from None


def _copy_revision(dvc_files: Any, name: str, folder: Path) -> None:
    """Copy the files of a revision. Its plan lists the results of rungs, which select the winners among its cells."""
    copy = partial(_copy_file_of_revision, dvc_files, name, folder)
    copy(StudyFiles.from_params(PARAMS).plan)
    copy(PARAMS)
    with contextlib.chdir(folder):
        rung_files = _read_revision_plan(name).rung_files
    for path in rung_files:
        copy(path)
    with contextlib.chdir(folder):
        cells = _read_revision_plan(name).cells
    cell_files = dict.fromkeys(
        path for cell in cells for path in (cell.merged_files.marker, cell.merged_files.metrics, cell.files.settings)
    )
    for path in cell_files:
        copy(path)


def _copy_file_of_revision(dvc_files: Any, name: str, folder: Path, path: Path) -> None:
    """Copy a file of a revision from this folder if it is the same, otherwise from DVC's cache or remote."""
    from dvc_data.index import DataIndexDirError

    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    problem = f"{path} of '{name}' is not in this folder, in DVC's cache or in its remote"
    advice = "Try `dvc fetch --all-commits`."
    unrecorded = f"'{name}' does not contain {path}. Check out '{name}', type `dvc repro`, and commit."
    try:
        info = dvc_files.info(str(path))
    except FileNotFoundError:
        raise SettingsError(unrecorded) from None
    except DataIndexDirError as error:  # the list of its folder's files is missing
        note = ""
        if isinstance(reason := error.__cause__, Exception) and not isinstance(reason, FileNotFoundError):
            note = f" ({format_error(reason)})"
        raise ArtifactError(f"{problem}{note}. {advice}") from None
    if path.is_file() and hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() == info.get("md5"):
        (folder / path).write_bytes(path.read_bytes())
        return
    try:
        dvc_files.get_file(str(path), str(folder / path))
    except FileNotFoundError:
        if not info.get("md5"):  # dvc.yaml declares it, and dvc.lock of the revision does not record it
            raise SettingsError(unrecorded) from None
        raise ArtifactError(f"{problem}. {advice}") from None


# -- rendering ---------------------------------------------------------------------------------------------------------


def _render_table(revisions: Sequence[Revision], has_only_changes: bool = False) -> str:
    base, *other_revisions = revisions
    rows = list(dict.fromkeys(row for revision in revisions for row in revision.settings))
    rows = [
        row for algorithm in dict.fromkeys(algorithm for algorithm, _ in rows) for row in rows if row[0] == algorithm
    ]
    protocols = dict.fromkeys(name for revision in revisions for name in revision.plan.protocols)
    titles = _get_algorithm_titles(revisions)
    lines = []
    if has_only_changes:
        rows = [row for row in rows if any(revision.runs.get(row) != base.runs.get(row) for revision in revisions)]
        if not rows:
            return "All revisions have the same runs."
    for row in rows:
        for protocol, metric in itertools.product(protocols, base.plan.metrics):
            row_scores = [revision.scores.get((row, protocol, metric)) for revision in revisions]
            if all(scores is None for scores in row_scores):
                continue
            line = {"algorithm": titles[row[0]], "point": row[1], "metric": format_metric_label(protocol, metric)}
            line |= {
                revision.name: _format_mean(scores) for revision, scores in zip(revisions, row_scores, strict=True)
            }
            for revision, scores in zip(other_revisions, row_scores[1:], strict=True):
                has_same_runs = row in base.runs and base.runs[row] == revision.runs.get(row)
                line[f"{revision.name} − {base.name}"] = (
                    "same runs" if has_same_runs else _format_difference(row_scores[0], scores)
                )
            lines.append(line)
    if not lines:
        methods = ", ".join(dict.fromkeys(titles[algorithm] for algorithm, _ in rows))
        return f"No revision has an accuracy of {methods} by {', '.join(protocols)}."
    frame = pd.DataFrame(lines)
    if not frame["point"].any():
        frame = frame.drop(columns="point")
    sides = ["left" if name in ("algorithm", "point", "metric") else "right" for name in frame.columns]
    report, metrics = base.plan.report, base.plan.metrics
    caption = (
        f"Test {join_words([METRICS[metric].name_with_unit for metric in metrics])} "
        f"{table_parts.ROUND_PHRASES[report.round].format(last_k=report.last_k)}, "
        f"{table_parts.AVERAGE_PHRASES[report.average]}. Values are mean ± standard deviation over seeds."
        f"{''.join(f' {sentence}' for sentence in table_notes.explain_metric_values(base.plan))}\n"
        f"Differences are {PAIRED_EXPLANATION}\n{explain_metrics(protocols, metrics)}"
    )
    return f"{caption}\n\n{frame.to_markdown(index=False, disable_numparse=True, colalign=sides)}"


def _get_algorithm_titles(revisions: Sequence[Revision]) -> dict[str, str]:
    """Display name of each algorithm, from the first revision that contains it."""
    plans = [revision.plan for revision in reversed(revisions)]
    return {label: plan.get_method_title(label) for plan in plans for label in plan.algorithms}


def _format_mean(scores: pd.Series[float] | None) -> str:
    return DASH if scores is None or scores.isna().all() else format_mean(scores.mean(), scores.std())


def _format_difference(baseline_scores: pd.Series[float] | None, other_scores: pd.Series[float] | None) -> str:
    if baseline_scores is None or other_scores is None:
        return DASH
    paired_difference = compute_paired_difference(baseline_scores, other_scores)
    if paired_difference is None:
        return DASH
    seeds, text = paired_difference.seeds, paired_difference.formatted_difference
    has_other_seeds = 1 < seeds < max(len(baseline_scores), len(other_scores))
    return f"{text.rstrip()} ({seeds} common seeds)" if has_other_seeds else text


def _render_setting_differences(revisions: Sequence[Revision]) -> str:
    """The settings that differ between runs of the same row, and the studies' seeds and grids."""
    titles = _get_algorithm_titles(revisions)
    rows = [row for row in revisions[0].settings if all(row in revision.settings for revision in revisions)]
    names = dict.fromkeys(name for revision in revisions for row in rows for name in revision.settings[row])
    lines: list[list[str]] = []
    for name in names:
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            values = tuple(str(revision.settings[row].get(name, DASH)) for revision in revisions)
            if len(set(values)) > 1:
                groups.setdefault(values, []).append(row)
        for values, affected_rows in groups.items():
            rows_text = (
                "all"
                if len(affected_rows) == len(rows)
                else ", ".join(" ".join(filter(None, (titles[label], point))) for label, point in affected_rows)
            )
            lines.append([name, rows_text, *values])
    study_settings = {
        "study.seeds": [", ".join(map(str, revision.plan.seeds)) for revision in revisions],
        "study.grid": [
            ", ".join(f"{name}: [{', '.join(map(str, values))}]" for name, values in revision.plan.grid.items()) or DASH
            for revision in revisions
        ],
    }
    lines += [[name, "all", *values] for name, values in study_settings.items() if len(set(values)) > 1]
    if not lines and not rows:
        return "No method is in all revisions."
    if not lines:
        return "The methods that all revisions contain have the same settings."
    head = ["setting that differs", "methods", *(revision.name for revision in revisions)]
    return pd.DataFrame(lines, columns=head).to_markdown(index=False, disable_numparse=True)
