"""The papers' tables and figures as web pages: one a paper, and an index.

A page holds all it shows: its style, and its figures as inline SVG. It runs no script and asks for nothing. The figures
and their numbers lie beside the pages as files, too. Everything that is not markup of the templates is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from fedpipe.core.storage import files
from fedpipe.papers import cells, layouts, views
from fedpipe.papers.cells import MeasuredCell, PaperComparison
from fedpipe.papers.published import CellId
from fedpipe.papers.svg import SvgFigure
from fedpipe.papers.verdicts import Scale

SCALE_DESCRIPTIONS: dict[Scale, str] = {
    "paper": "Every setting is the paper's.",
    "reduced": "Shorter runs on less data, as the study files say: only the order of methods is judged.",
    "smoke": "A few rounds on a few samples: it shows that everything runs. Nothing is judged.",
}


@dataclass(frozen=True)
class BuildInfo:
    """What made the pages: the commit, hours of all runs, what they ran on, and the day, where it is to be told."""

    commit: str
    hours: float
    made_by: tuple[str, ...] = ()
    date: str = ""


def write_pages(
    folder: Path,
    scale: Scale,
    measured_cells: Mapping[CellId, MeasuredCell],
    figures: Mapping[tuple[str, str], SvgFigure | str],
    about: BuildInfo,
    scale_changes: Mapping[tuple[str, str], str] | None = None,
) -> PaperComparison:
    """Write `index.html`, a page a paper, `cells.csv`, and each figure in `figures` as SVG and CSV.

    Parameters
    ----------
    folder
        As `results/papers/smoke`.
    scale
        At which the studies ran.
    measured_cells
        Cells by their places; what is not there was not run.
    figures
        By paper and heading, as ``("FedDW", "Figure 4")``: the figure, or why there is none.
    about
        What made them.
    scale_changes
        By paper and study, what the scale changes in the study.
    """
    known_figures = {(paper.paper, heading) for paper in layouts.load_papers().values() for heading in paper.figures}
    if unknown_figures := sorted(figures.keys() - known_figures):
        raise ValueError(f"figures: {unknown_figures[0]} is no figure of a paper.")
    comparison = cells.compare_cells(measured_cells, scale)
    pages = {
        f"{paper.stem}.html": _render_page(
            "paper.html", views.build_paper_context(paper, comparison, figures, scale_changes or {}), scale, about
        )
        for paper in layouts.load_papers().values()
    }
    pages["index.html"] = _render_page("index.html", views.build_index_context(comparison, figures), scale, about)
    for name, text in pages.items():
        files.write_bytes(folder / name, text.encode())
    files.write_bytes(folder / "cells.csv", cells.encode_comparison_csv(comparison))
    (folder / "figures").mkdir(exist_ok=True)  # also where none is drawn
    for paper in layouts.load_papers().values():
        for heading in paper.figures:
            stem, drawn_figure = (
                folder / "figures" / views.get_figure_stem(paper, heading),
                figures.get((paper.paper, heading)),
            )
            svg, csv = (drawn_figure.svg, drawn_figure.csv) if isinstance(drawn_figure, SvgFigure) else ("", "")
            for path, text in ((stem.with_suffix(".svg"), svg), (stem.with_suffix(".csv"), csv)):
                if text:
                    files.write_bytes(path, text.encode())
                else:
                    path.unlink(missing_ok=True)
    return comparison


@cache
def _build_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"papers": layouts.load_papers(), "SIGNS": views.SIGNS}
    return environment


def _render_page(name: str, context: Mapping[str, Any], scale: Scale, about: BuildInfo) -> str:
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    template = _build_environment().get_template(name)
    return template.render(**context, scale=scale, scale_says=SCALE_DESCRIPTIONS[scale], about=about, style=style)
