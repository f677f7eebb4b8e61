"""The papers' pages from what lies in `results`: `results/papers/SCALE`, made again from runs at any time."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import cast, get_args

from fedpipe.core.errors import ArtifactError, SettingsError, suggest_name
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import RESULTS
from fedpipe.core.storage.layout import PAPERS, StudyFiles
from fedpipe.papers import drawing, layouts, measured, pages
from fedpipe.papers.cells import MeasuredCell, PaperComparison
from fedpipe.papers.pages import BuildInfo
from fedpipe.papers.published import CellId
from fedpipe.papers.ran import PaperStudy
from fedpipe.papers.svg import SvgFigure
from fedpipe.papers.verdicts import Scale
from fedpipe.planning.plan import Plan
from fedpipe.report import results
from fedpipe.report.contents import compute_plans_fingerprint, get_staleness_warning


def get_pages_folder(scale: str) -> Path:
    """Where the pages of a scale lie."""
    return RESULTS / "papers" / scale


def write_papers(scale: str, plans_fingerprint: str | None = None) -> PaperComparison:
    """Write the pages, ``cells.csv`` and the figures, of all runs of a scale that are done.

    A snakemake tells by a hash which plans it began with (``plans_fingerprint``), so that it makes no pages of others.

    Raises
    ------
    SettingsError
        The papers' studies have no such scale.
    ArtifactError
        A study was edited since it was planned: the page would tell other settings than its runs had. Or the studies
        were planned anew meanwhile.
    """
    if scale not in get_args(Scale):
        raise SettingsError(
            f"--scale: '{scale}' is no scale of the papers; {suggest_name(scale, list(get_args(Scale)))}"
        )
    measured_cells: dict[CellId, MeasuredCell] = {}
    figures: dict[tuple[str, str], SvgFigure | str] = {}
    planned_studies: dict[tuple[str, str], PaperStudy] = {}
    for paper in layouts.load_papers().values():
        study_names = {table.study for table in paper.tables.values()} | {text.study for text in paper.text}
        study_names |= {selection.study for figure in paper.figures.values() for selection in figure.run_selections}
        paper_studies = {
            name: study
            for name in sorted(filter(None, study_names))
            if (study := PaperStudy.find(paper.stem, name, scale))
        }
        for study in paper_studies.values():
            if get_staleness_warning(study.plan):
                raise ArtifactError(
                    f"{study.plan.params} has changed since it was planned; `make papers SCALE={scale}` runs what is "
                    f"new, and `fedpipe plan --params {PAPERS} --scale {scale}` lets the pages do without it."
                )
        planned_studies |= {(paper.paper, name): study for name, study in paper_studies.items()}
        find_study = paper_studies.get
        measured_cells |= measured.measure_cells(paper, find_study)
        figures |= drawing.draw_figures(paper, find_study)
    scale_changes = {
        (paper, name): changes_text
        for (paper, name), study in planned_studies.items()
        if (changes_text := study.scale_changes)
    }
    plans = (Plan.read(StudyFiles.from_params(path, scale).plan) for path in layout.list_studies(PAPERS))
    if plans_fingerprint is not None and compute_plans_fingerprint(plans) != plans_fingerprint:
        raise ArtifactError(
            f"The plans of {PAPERS} are others than this snakemake began with, since a study was edited meanwhile; "
            f"type `make papers SCALE={scale}` again."
        )
    return pages.write_pages(
        get_pages_folder(scale),
        cast(Scale, scale),
        measured_cells,
        figures,
        _describe_build(list(planned_studies.values())),
        scale_changes,
    )


def _describe_build(studies: list[PaperStudy]) -> BuildInfo:
    """The commit, the hours of all runs, each once in its full length, what they ran on, and the day of the commit."""
    finished_cells = sorted(
        ((study, cell) for study in studies for cell in study.finished_cells), key=lambda entry: entry[1].rounds
    )
    longest_runs = {
        cell.files.path: (study, cell) for study, cell in finished_cells
    }  # of each, the last is the longest
    hours = sum(study.compute_hours(cell) for study, cell in longest_runs.values())
    makers: dict[str, None] = {}
    for _, cell in longest_runs.values():
        for maker in results.read_times(cell)["made_by"]:
            environment = {name: value for name, value in maker.items() if name not in {"code", "shared"}}
            makers[", ".join(f"{name} {value}" for name, value in environment.items())] = None
    return BuildInfo(_run_git("describe", "--always", "--dirty"), hours, tuple(makers), _get_commit_date())


def _get_commit_date() -> str:
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or _run_git("show", "-s", "--format=%ct", "HEAD")
    return datetime.fromtimestamp(int(seconds), UTC).date().isoformat() if seconds.isdigit() else ""


def _run_git(*words: str) -> str:
    """What git says; nothing, where this is no clone."""
    try:
        completed_process = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return completed_process.stdout.strip() if completed_process.returncode == 0 else ""
