"""The papers' pages in `results/papers/PRESET`, from all runs of a preset that are finished."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import cast, get_args

from fedpipe.core.errors import ArtifactError, SettingsError, suggest_name
from fedpipe.core.storage.files import RESULTS
from fedpipe.core.storage.layout import PAPERS, StudyFiles, list_studies_without_readings
from fedpipe.papers import commits, figures, layouts, measurements, pages
from fedpipe.papers.comparison import MeasuredCell, PaperComparison, Preset
from fedpipe.papers.figures import SvgFigure
from fedpipe.papers.layouts import Paper
from fedpipe.papers.pages import BuildInfo
from fedpipe.papers.published import CellId
from fedpipe.papers.studies import PaperStudy
from fedpipe.planning.plan import Plan
from fedpipe.report.contents import compute_plans_fingerprint, get_staleness_warning


def get_pages_folder(preset: str) -> Path:
    """The folder of a preset's pages."""
    return RESULTS / "papers" / preset


def write_paper_pages(preset: str, plans_fingerprint: str | None = None) -> PaperComparison:
    """Write the pages, ``cells.csv`` and the figures.

    It rejects studies that were edited after they were planned, because the pages would show other settings than the
    runs had, and other plans than those with which a snakemake began (``plans_fingerprint``).
    """
    if preset not in get_args(Preset):
        raise SettingsError(
            f"--preset: '{preset}' is not a preset of the papers. {suggest_name(preset, list(get_args(Preset)))}"
        )
    measured_cells: dict[CellId, MeasuredCell] = {}
    drawings: dict[tuple[str, str], SvgFigure | str] = {}
    studies: dict[tuple[str, str], PaperStudy] = {}
    for paper in layouts.load_papers().values():
        paper_studies = _load_studies(paper, preset)
        studies |= {(paper.paper, name): study for name, study in paper_studies.items()}
        measured_cells |= measurements.measure_paper_cells(paper, paper_studies.get)
        drawings |= figures.plot_figures(paper, paper_studies.get)
    plans = (Plan.read(StudyFiles.from_params(path, preset).plan) for path in list_studies_without_readings(PAPERS))
    if plans_fingerprint is not None and compute_plans_fingerprint(plans) != plans_fingerprint:
        raise ArtifactError(
            f"{PAPERS}: the plans have changed since this Snakemake began, because a study was edited. Type "
            f"`make papers PRESET={preset}` again."
        )
    descriptions = {key: study.preset_description for key, study in studies.items()}
    return pages.write_pages(
        get_pages_folder(preset), cast(Preset, preset), measured_cells, drawings, read_commit_info(), descriptions
    )


def _load_studies(paper: Paper, preset: str) -> dict[str, PaperStudy]:
    """The planned studies of a paper by their names."""
    selections = [selection for figure in paper.figures.values() for selection in figure.run_selections]
    names = {
        entry.study for entries in (paper.tables.values(), paper.text, selections) for entry in entries if entry.study
    }
    candidates = {name: PaperStudy.find_planned_study(paper.stem, name, preset) for name in sorted(names)}
    studies = {name: study for name, study in candidates.items() if study}
    for study in studies.values():
        if get_staleness_warning(study.plan):
            raise ArtifactError(
                f"{study.plan.params} has changed since it was planned. Type `make papers PRESET={preset}` to run it, "
                f"or `fedpipe plan --params {PAPERS} --preset {preset}` to make the pages without the new runs."
            )
    return studies


def read_commit_info() -> BuildInfo:
    """The commit and its day."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or commits.run_git("show", "-s", "--format=%ct", "HEAD")
    date = datetime.fromtimestamp(int(seconds), UTC).date().isoformat() if seconds.isdigit() else ""
    return BuildInfo(commits.run_git("describe", "--always", "--dirty"), date)
