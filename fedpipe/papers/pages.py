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

from fedpipe import artifacts
from fedpipe.papers import cells, layouts, views
from fedpipe.papers.cells import Comparison, Measured
from fedpipe.papers.published import Place
from fedpipe.papers.svg import Drawn
from fedpipe.papers.verdicts import Scale

SCALES: dict[Scale, str] = {
    "paper": "Every setting is the paper's.",
    "reduced": "Shorter runs on less data, as the study files say: only the order of methods is judged.",
    "smoke": "A few rounds on a few samples: it shows that everything runs. Nothing is judged.",
}


@dataclass(frozen=True)
class About:
    """What made the pages: the commit, hours of all runs, what they ran on, and the day, where it is to be told."""

    commit: str
    hours: float
    made_by: tuple[str, ...] = ()
    date: str = ""


def write(
    folder: Path,
    scale: Scale,
    measured: Mapping[Place, Measured],
    figures: Mapping[tuple[str, str], Drawn | str],
    about: About,
    changed: Mapping[tuple[str, str], str] | None = None,
) -> Comparison:
    """Write `index.html`, a page a paper, `cells.csv`, and each figure in `figures` as SVG and CSV.

    Parameters
    ----------
    folder
        As `results/papers/smoke`.
    scale
        At which the studies ran.
    measured
        Cells by their places; what is not there was not run.
    figures
        By paper and heading, as ``("FedDW", "Figure 4")``: the figure, or why there is none.
    about
        What made them.
    changed
        By paper and study, what the scale changes in the study.
    """
    known = {(paper.paper, heading) for paper in layouts.papers().values() for heading in paper.figures}
    if unknown := sorted(figures.keys() - known):
        raise ValueError(f"figures: {unknown[0]} is no figure of a paper.")
    comparison = cells.compare(measured, scale)
    pages = {
        f"{paper.stem}.html": _render(
            "paper.html", views.paper(paper, comparison, figures, changed or {}), scale, about
        )
        for paper in layouts.papers().values()
    }
    pages["index.html"] = _render("index.html", views.index(comparison, figures), scale, about)
    for name, text in pages.items():
        artifacts.write_bytes(folder / name, text.encode())
    artifacts.write_bytes(folder / "cells.csv", cells.csv(comparison))
    (folder / "figures").mkdir(exist_ok=True)  # also where none is drawn
    for paper in layouts.papers().values():
        for heading in paper.figures:
            stem, found = folder / "figures" / views.file(paper, heading), figures.get((paper.paper, heading))
            svg, csv = (found.svg, found.csv) if isinstance(found, Drawn) else ("", "")
            for path, text in ((stem.with_suffix(".svg"), svg), (stem.with_suffix(".csv"), csv)):
                if text:
                    artifacts.write_bytes(path, text.encode())
                else:
                    path.unlink(missing_ok=True)
    return comparison


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals |= {"papers": layouts.papers(), "SIGNS": views.SIGNS}
    return made


def _render(name: str, told: Mapping[str, Any], scale: Scale, about: About) -> str:
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    template = _environment().get_template(name)
    return template.render(**told, scale=scale, scale_says=SCALES[scale], about=about, style=style)
