"""Draws the papers' figures of docs/papers/reduced from their numbers.

python docs/images/draw_papers.py
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fedpipe.papers import figures, layouts, pages

FOLDER = Path(__file__).parents[1] / "papers" / "reduced"


def draw_figures() -> None:
    """Write each SVG next to its CSV."""
    for paper in layouts.load_papers().values():
        for heading, figure in paper.figures.items():
            path = FOLDER / pages.get_figure_path(paper, heading, "csv")
            if path.is_file():
                svg = figures.render_figure(paper, figure, pd.read_csv(path))
                path.with_suffix(".svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    draw_figures()
