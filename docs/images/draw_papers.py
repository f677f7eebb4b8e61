"""Draws the papers' figures of docs/papers/reduced from their numbers, and puts them into the pages there.

python docs/images/draw_papers.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from fedpipe.papers import figures, layouts, pages

FOLDER = Path(__file__).parents[1] / "papers" / "reduced"


def draw_figures() -> None:
    """Write each SVG next to its CSV, and replace the image in the page."""
    for paper in layouts.load_papers().values():
        page = FOLDER / f"{paper.stem}.html"
        text = page.read_text(encoding="utf-8")
        for heading, figure in paper.figures.items():
            path = FOLDER / pages.get_figure_path(paper, heading, "csv")
            if path.is_file():
                svg = figures.render_figure(paper, figure, pd.read_csv(path))
                path.with_suffix(".svg").write_text(svg, encoding="utf-8")
                text = replace_image(text, heading, svg)
        page.write_text(text, encoding="utf-8")


def replace_image(page: str, heading: str, svg: str) -> str:
    """Replace the image of a figure in a page."""
    image = rf'(aria-label="{re.escape(heading)}"><img [^>]*src=")[^"]*'
    page, count = re.subn(image, lambda match: match[1] + pages.make_svg_data_uri(svg), page)
    if count != 1:
        raise SystemExit(f"{count} images of {heading} instead of one.")
    return page


if __name__ == "__main__":
    draw_figures()
