"""The papers' tables and figures as web pages: one per paper, and an index.

A page contains its style, runs no script and requests nothing except its figures in the folder next to it. All text is
escaped. Figures are images, in which a browser runs no script either.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import jinja2
import numpy as np

from fedpipe.core.storage import files
from fedpipe.papers import comparison, layouts, published
from fedpipe.papers.comparison import ComparedCell, MeasuredCell, PaperComparison, Preset
from fedpipe.papers.figures import SvgFigure
from fedpipe.papers.layouts import MethodKind, Paper
from fedpipe.papers.published import CellId
from fedpipe.papers.studies import HERE
from fedpipe.report import web_pages
from fedpipe.report.contrasts import Contrast, RunMean
from fedpipe.report.words import DASH

KINDS = get_args(MethodKind)
SIGNS = {comparison.AGREES: "✓", comparison.DIFFERS: "✗"}
#: A figure, or the reason why it is missing, by paper and heading.
Figures = Mapping[tuple[str, str], SvgFigure | str]


@dataclass(frozen=True)
class BuildInfo:
    """The commit that made the pages, and its date."""

    commit: str
    date: str = ""


class TableSummary(NamedTuple):
    """Numbers of cells, columns and orders of some tables."""

    counts: Counter[str]  #: number of cells by verdict, of ``all``, and of those that are ``measured``
    taus: list[str]  #: mean tau of global methods, and of personalized methods
    winners: str  #: number of columns in which the published best method is confirmed


class ClaimSummary(NamedTuple):
    """A paper's main claim."""

    table: str
    statement: str
    published: str  #: in how many columns the paper finds it, and by how much
    measured: str  #: the same of our runs
    reproduced: str


def write_pages(
    folder: Path,
    preset: Preset,
    measured_cells: Mapping[CellId, MeasuredCell],
    figures: Figures,
    commit_info: BuildInfo,
    preset_descriptions: Mapping[tuple[str, str], str] | None = None,
) -> PaperComparison:
    """Write `index.html`, a page per paper, `cells.csv`, and each figure in `figures` as SVG and CSV.

    ``preset_descriptions`` describe, by paper and study, what the preset changes in the study.
    """
    paper_comparison = comparison.compare_with_published_cells(measured_cells, preset)
    context = {
        "comparison": paper_comparison,
        "figures": figures,
        "drawn": Counter(paper for (paper, _), figure in figures.items() if isinstance(figure, SvgFigure)),
        "about": commit_info,
        "changes": preset_descriptions or {},
    }
    templates = _build_template_environment()
    page = templates.get_template("paper.html")
    (folder / "figures").mkdir(parents=True, exist_ok=True)  # the rule's output, also if none is drawn
    for paper in layouts.load_papers().values():
        files.write_bytes(folder / f"{paper.stem}.html", page.render(context, paper=paper).encode())
        for heading, suffix in itertools.product(paper.figures, ("svg", "csv")):
            path, figure = folder / get_figure_path(paper, heading, suffix), figures.get((paper.paper, heading))
            if isinstance(figure, SvgFigure):
                files.write_bytes(path, getattr(figure, suffix).encode())
            else:
                path.unlink(missing_ok=True)
    index = templates.get_template("index.html").render(context, paper=None)
    files.write_bytes(folder / "index.html", index.encode())
    files.write_bytes(folder / "cells.csv", comparison.encode_comparison_csv(paper_comparison))
    return paper_comparison


def get_figure_path(paper: Paper, heading: str, suffix: str) -> str:
    """The path of a figure's file in the folder of the pages."""
    return f"figures/{paper.stem}-{make_url_slug(heading)}.{suffix}"


def make_url_slug(heading: str) -> str:
    """A heading as the name of a file or link."""
    return heading.lower().replace(" ", "-")


def _build_template_environment() -> jinja2.Environment:
    return web_pages.build_template_environment(
        Path(__file__).parent,
        "page.css",
        *(summarize_main_claim, comparison.compute_claim_checks, get_compared_cells, summarize_tables),
        *(format_contrast, format_run_mean, get_cell_anchor, get_figure_path, make_url_slug),
        papers=layouts.load_papers(),
        DASH=DASH,
        HERE=HERE,
        SIGNS=SIGNS,
        STATUSES=published.STATUS_MEANINGS,
        UNPUBLISHED=comparison.UNPUBLISHED,
    )


def summarize_tables(paper: Paper, tables: list[str], paper_comparison: PaperComparison) -> TableSummary:
    """Numbers of cells by verdict, mean taus, and confirmed winners. Of several tables, without repeated cells."""
    cells = [
        cell
        for name in tables
        for cell in get_compared_cells(paper, name, paper_comparison).values()
        if len(tables) == 1 or not paper.find_original_cell(cell.cell_id)
    ]
    counts = Counter(cell.verdict_text for cell in cells)
    counts |= Counter({"all": len(cells), "measured": sum(cell.measurement.number is not None for cell in cells)})
    columns = {(paper.paper, cell.cell_id.table, cell.cell_id.column) for cell in cells}
    orders = {key: order for key, order in paper_comparison.orders.items() if key[:3] in columns}
    taus = [[order.tau for key, order in orders.items() if key[3] == kind and order.tau is not None] for kind in KINDS]
    # without an order of all methods, a column has methods of one kind
    winners = {key[:3]: orders[key] for key in sorted(orders, reverse=True)}
    confirmed = f"{sum(order.is_winner_confirmed for order in winners.values())} of {len(winners)}" if winners else DASH
    mean_taus = [f"{np.mean(values):.2f}".replace("-", "−") if values else DASH for values in taus]
    return TableSummary(counts, mean_taus, confirmed)


def summarize_main_claim(paper: Paper, paper_comparison: PaperComparison) -> ClaimSummary:
    """A paper's main claim: in how many columns the paper and we find it, by how much, and whether it is reproduced."""
    table, claim = paper.main_claim
    checks = comparison.compute_claim_checks(paper, table, claim, paper_comparison)
    published_contrasts = [check.published_contrast for check in checks if check.published_contrast]
    measured_contrasts = [check.measured_contrast for check in checks if check.measured_contrast]
    signs = [contrast.sign for contrast in measured_contrasts]
    words = {"+": "yes", "−": "no", "?": "undecided (the 95% intervals contain 0)", "": "not compared"}
    reproduced = f"in {signs.count('+')} of {len(signs)} columns"
    reproduced = reproduced if len(set(signs)) > 1 else words[signs[0] if signs else ""]
    texts = _summarize_contrasts(published_contrasts), _summarize_contrasts(measured_contrasts)
    return ClaimSummary(table, claim.statement, *texts, reproduced)


def _summarize_contrasts(contrasts: list[Contrast]) -> str:
    """In how many columns a method is ahead, and by how much."""
    if not contrasts:
        return "not compared"
    differences = [contrast.difference for contrast in contrasts]
    ahead = sum(difference > 0 for difference in differences)
    mean = f"{np.mean(differences):+.1f}".replace("-", "−")
    return f"ahead in {ahead} of {len(contrasts)} columns, {mean} points on average"


def get_compared_cells(paper: Paper, table: str, paper_comparison: PaperComparison) -> dict[CellId, ComparedCell]:
    """The cells of a table, or the numbers in running text."""
    return {cell_id: paper_comparison.cells[cell_id] for cell_id in comparison.list_table_cell_ids(paper, table)}


def format_run_mean(number: RunMean, decimals: int | None = None) -> str:
    """A mean with its standard deviation."""
    if not math.isfinite(number.mean):
        return "not finite"
    mean = f"{number.mean:.6g}" if decimals is None else f"{number.mean:.{decimals}f}"
    std = "" if number.std is None else f"{number.std:.3g}" if decimals is None else f"{number.std:.{decimals}f}"
    return (f"{mean} ± {std}" if std else mean).replace("-", "−")


def format_contrast(contrast: Contrast | None) -> str:
    """A difference with its interval."""
    if contrast is None:
        return DASH
    low, high = contrast.low, contrast.high
    interval = "" if low is None or high is None else f" [{low:+.2f}, {high:+.2f}]"
    return f"{contrast.difference:+.2f}{interval}".replace("-", "−")


def get_cell_anchor(cell_id: CellId) -> str:
    """The name of a cell for links."""
    return f"cell-{hashlib.sha256(repr(tuple(cell_id)).encode()).hexdigest()[:10]}"
