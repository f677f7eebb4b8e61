"""The style of figures, and how they are saved.

Lines differ by color, dash and marker, so that you can distinguish them in gray print and with color blindness. The
first seven colors are those of Okabe and Ito, Color Universal Design, 2008, without their yellow, which is too light
for lines on white.
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
PAGE_WIDTH = 7.0  #: width of a page in inches
MAX_NAMED_CLASSES = 10  #: maximum number of classes with names instead of numbers
COLOR_MAP = "Blues"  #: one hue from light to dark, which is ordered in gray print too

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
    "font.family": "DejaVu Sans",  # ships with matplotlib, so it is the same on every machine
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.title_fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,  # searchable text
    "svg.fonttype": "none",
    "svg.hashsalt": "fedpipe",  # ids in the SVG are random without it
    "text.parse_math": False,  # a dollar sign is plain text
    "xtick.color": "#444444",
    "xtick.labelcolor": "#222222",
    "xtick.labelsize": 8.5,
    "ytick.color": "#444444",
    "ytick.labelcolor": "#222222",
    "ytick.labelsize": 8.5,
}
FONT = b"'DejaVu Sans'"  #: font name in an SVG
#: Formats with canvas and metadata, because default metadata differ each time.
FILE_FORMATS: dict[str, tuple[type[FigureCanvasBase], dict[str, Any]]] = {
    "svg": (FigureCanvasSVG, {"Date": None, "Creator": None}),
    "pdf": (FigureCanvasPdf, {"CreationDate": None, "Creator": None, "Producer": None}),
    "png": (FigureCanvasAgg, {"Software": None}),
}
_P = ParamSpec("_P")


def apply_style(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Decorate a function that makes a figure, so that it uses this style."""

    def draw_with_style(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with mpl.style.context(["default", RC_PARAMS]):
            return draw(*args, **kwargs)

    draw_with_style.__doc__ = draw.__doc__
    return draw_with_style


def get_line_style(index: int) -> dict[str, Any]:
    """Get color, dash and marker of the line with this index. The first 220 are distinct."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }


def add_notes(figure: Figure, sentences: Sequence[str]) -> Figure:
    """Add notes below a figure."""
    if sentences:
        width = round(16 * figure.get_figwidth())  # characters per line
        text = "\n".join(textwrap.fill(sentence, width) for sentence in sentences)
        figure.supxlabel(text, x=0.01, ha="left", fontsize=7)
    return figure


def get_text_color(shade: float) -> str:
    """Get the text color on a cell with this shade in [0, 1]."""
    return "white" if shade > 0.55 else "#222222"


def label_classes(axis: Axis, names: Sequence[str], max_letters: int) -> None:
    """Label an axis with class names, or with numbers if there are many.

    On the horizontal axis long names are rotated. ``max_letters`` is the number of letters that fit.
    """
    size = len(names)
    if size <= MAX_NAMED_CLASSES and [*names] != [*map(str, range(size))]:
        is_rotated = isinstance(axis, XAxis) and size * max(map(len, names)) > max_letters
        axis.set_ticks(range(size), names, fontsize=7.5, rotation=90 if is_rotated else 0)


def save_figure(figure: Figure, stem: Path) -> None:
    """Write a figure as SVG, PDF and PNG (150 dpi), without date and program in the metadata."""
    with mpl.style.context(["default", RC_PARAMS]):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is final
        for file_format, (canvas, metadata) in FILE_FORMATS.items():
            buffer = io.BytesIO()
            figure.set_dpi(150)
            getattr(canvas(figure), f"print_{file_format}")(buffer, metadata=metadata)  # savefig would draw it twice
            data = buffer.getvalue()
            if file_format == "svg":  # the viewer may lack the font
                data = data.replace(FONT, FONT + b", Verdana, sans-serif")
            files.write_bytes(stem.with_name(f"{stem.name}.{file_format}"), data)
