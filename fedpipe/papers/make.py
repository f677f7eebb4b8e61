"""The papers' pages from what lies in `results`: `results/papers/SCALE`, made again from runs at any time."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import cast, get_args

from fedpipe import artifacts
from fedpipe.artifacts import PAPERS, RESULTS, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError, nearest
from fedpipe.papers import drawing, layouts, measured, pages
from fedpipe.papers.cells import Comparison, Measured
from fedpipe.papers.pages import About
from fedpipe.papers.published import Place
from fedpipe.papers.ran import Study
from fedpipe.papers.svg import Drawn
from fedpipe.papers.verdicts import Scale
from fedpipe.planned import Plan
from fedpipe.report import results
from fedpipe.stages.report import held, overtaken


def place(scale: str) -> Path:
    """Where the pages of a scale lie."""
    return RESULTS / "papers" / scale


def write(scale: str, said: str | None = None) -> Comparison:
    """Write the pages, ``cells.csv`` and the figures, of all runs of a scale that are done.

    A snakemake tells by a hash which plans it began with (``said``), so that it makes no pages of others.

    Raises
    ------
    SettingsError
        The papers' studies have no such scale.
    ArtifactError
        A study was edited since it was planned: the page would tell other settings than its runs had. Or the studies
        were planned anew meanwhile.
    """
    if scale not in get_args(Scale):
        raise SettingsError(f"--scale: '{scale}' is no scale of the papers; {nearest(scale, list(get_args(Scale)))}")
    found: dict[Place, Measured] = {}
    figures: dict[tuple[str, str], Drawn | str] = {}
    planned: dict[tuple[str, str], Study] = {}
    for paper in layouts.papers().values():
        wanted = {table.study for table in paper.tables.values()} | {text.study for text in paper.text}
        wanted |= {part.study for figure in paper.figures.values() for part in figure.parts}
        there = {name: study for name in sorted(filter(None, wanted)) if (study := Study.find(paper.stem, name, scale))}
        for study in there.values():
            if overtaken(study.plan):
                raise ArtifactError(
                    f"{study.plan.params} has changed since it was planned; `make papers SCALE={scale}` runs what is "
                    f"new, and `fedpipe plan --params {PAPERS} --scale {scale}` lets the pages do without it."
                )
        planned |= {(paper.paper, name): study for name, study in there.items()}
        studies = there.get
        found |= measured.of(paper, studies)
        figures |= drawing.drawn(paper, studies)
    changed = {(paper, name): told for (paper, name), study in planned.items() if (told := study.changes)}
    plans = (Plan.read(StudyFiles.of(path, scale).plan) for path in artifacts.studies(PAPERS))
    if said is not None and held(plans) != said:
        raise ArtifactError(
            f"The plans of {PAPERS} are others than this snakemake began with, since a study was edited meanwhile; "
            f"type `make papers SCALE={scale}` again."
        )
    return pages.write(place(scale), cast(Scale, scale), found, figures, _about(list(planned.values())), changed)


def _about(studies: list[Study]) -> About:
    """The commit, the hours of all runs, each once in its full length, what they ran on, and the day of the commit."""
    done = sorted(((study, cell) for study in studies for cell in study.done), key=lambda entry: entry[1].rounds)
    runs = {cell.files.path: (study, cell) for study, cell in done}  # of each, the last is the longest
    hours = sum(study.hours(cell) for study, cell in runs.values())
    makers: dict[str, None] = {}
    for _, cell in runs.values():
        for maker in results.seconds(cell)["made_by"]:
            told = {name: value for name, value in maker.items() if name not in {"code", "shared"}}
            makers[", ".join(f"{name} {value}" for name, value in told.items())] = None
    return About(_git("describe", "--always", "--dirty"), hours, tuple(makers), _day())


def _day() -> str:
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or _git("show", "-s", "--format=%ct", "HEAD")
    return datetime.fromtimestamp(int(seconds), UTC).date().isoformat() if seconds.isdigit() else ""


def _git(*words: str) -> str:
    """What git says; nothing, where this is no clone."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
