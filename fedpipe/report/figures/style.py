"""How figures look, and how they are saved.

Lines differ by color, dash and marker at once, so that they can be told apart in grey print and by color-blind
readers. The first seven colors are those of Okabe and Ito, Color Universal Design, 2008, without their yellow,
which is too light for lines on white.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
import matplotlib.style
from matplotlib.axis import Axis, XAxis
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedpipe.core.storage import files

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F", "#882255", "#332288")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
PAGE_WIDTH = 7.0  #: of a page, in inches
MAX_NAMED_CLASSES = 10  #: classes up to which they have names in place of numbers
COLOR_MAP = "Blues"  #: a color map of one hue, light to dark, which grey print keeps in order

RC_PARAMS: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 10.5,
    "font.family": "DejaVu Sans",  # ships with matplotlib, so that every machine draws the same
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.title_fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,  # text that can be marked and searched, as in the SVG
    "svg.fonttype": "none",
    "svg.hashsalt": "fedpipe",  # ids in the SVG are random without it
    "text.parse_math": False,  # a dollar sign in a name is one
    "xtick.color": "#444444",
    "xtick.labelcolor": "#222222",
    "xtick.labelsize": 8.5,
    "ytick.color": "#444444",
    "ytick.labelcolor": "#222222",
    "ytick.labelsize": 8.5,
}
FONT = b"'DejaVu Sans'"  #: as it stands in an SVG
#: What is saved: by what, and with which metadata, since its own would differ from one time to the next.
FILE_FORMATS: dict[str, tuple[type[FigureCanvasBase], dict[str, Any]]] = {
    "svg": (FigureCanvasSVG, {"Date": None, "Creator": None}),
    "pdf": (FigureCanvasPdf, {"CreationDate": None, "Creator": None, "Producer": None}),
    "png": (FigureCanvasAgg, {"Software": None}),
}
_P = ParamSpec("_P")


def apply_style(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Decorate a function that makes a figure: it draws in the house's style."""

    def draw_with_style(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with mpl.style.context(["default", RC_PARAMS]):
            return draw(*args, **kwargs)

    draw_with_style.__doc__ = draw.__doc__
    return draw_with_style


def get_line_style(index: int) -> dict[str, Any]:
    """Color, dash and marker of the line with this index; those of the first 220 differ pairwise."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }


def note(made: Figure, sentences: Sequence[str]) -> Figure:
    """The figure with sentences below it, small."""
    if sentences:
        width = round(16 * made.get_figwidth())  # letters in a line
        text = "\n".join(textwrap.fill(sentence, width) for sentence in sentences)
        made.supxlabel(text, x=0.01, ha="left", fontsize=7)
    return made


def get_text_color(shade: float) -> str:
    """Color of a number on a cell of the color map with this shade in [0, 1]."""
    return "white" if shade > 0.55 else "#222222"


def label_classes(axis: Axis, names: Sequence[str], max_letters: int) -> None:
    """Have the names of few classes at an axis, and numbers of many.

    Along the horizontal axis names are turned where they are long; ``max_letters`` is how many letters it has room for.
    """
    size = len(names)
    if size <= MAX_NAMED_CLASSES and [*names] != [*map(str, range(size))]:
        is_rotated = isinstance(axis, XAxis) and size * max(map(len, names)) > max_letters
        axis.set_ticks(range(size), names, fontsize=7.5, rotation=90 if is_rotated else 0)


def save_figure(figure: Figure, stem: Path) -> None:
    """Write a figure as SVG, PDF and PNG (150 dpi); the bytes hold no date and no program's name."""
    with mpl.style.context(["default", RC_PARAMS]):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it is laid out, once for all
        for file_format, (canvas, metadata) in FILE_FORMATS.items():
            buffer = io.BytesIO()
            figure.set_dpi(150)
            getattr(canvas(figure), f"print_{file_format}")(buffer, metadata=metadata)  # savefig would draw it twice
            data = buffer.getvalue()
            if file_format == "svg":  # whoever looks at it may lack the font that it was laid out with
                data = data.replace(FONT, FONT + b", Verdana, sans-serif")
            files.write_bytes(stem.with_name(f"{stem.name}.{file_format}"), data)
