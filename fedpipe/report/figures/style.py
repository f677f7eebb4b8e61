"""The style of figures, and how they are saved.

Lines differ by color, dash and marker, so that you can distinguish them in gray print and with color blindness. The
first seven colors are those of Okabe and Ito, Color Universal Design, 2008, without their yellow, which is too light
for lines on white.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.style
from matplotlib.axis import Axis, XAxis
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedpipe.core.storage import files
from fedpipe.settings.report import FigureWidth

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F", "#882255", "#332288")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
MAX_NAMED_CLASSES = 10  #: maximum number of classes with names instead of numbers
MAX_NAME_LENGTH = 20  #: maximum number of letters of a class or client
COLOR_MAP = "Blues"  #: one hue from light to dark, which is ordered in gray print too


class Page(NamedTuple):
    """Size of a page: width and maximum height of a figure in inches, and font size in points."""

    width: float
    max_height: float
    font_size: float

    @property
    def em_in_inches(self) -> float:
        """The font size in inches, by which panels and texts are sized."""
        return self.font_size / 72

    @property
    def characters_per_line(self) -> int:
        """The number of characters of a line that is as wide as the page."""
        return int(1.7 * self.width / self.em_in_inches)

    @property
    def rc_params(self) -> dict[str, Any]:
        """Settings of matplotlib for this page."""
        small = max(MIN_FONT_SIZE, self.font_size - 1)
        return BASE_RC_PARAMS | {
            "axes.labelsize": self.font_size,
            "axes.linewidth": self.em_in_inches * 6,
            "axes.titlesize": self.font_size,
            "figure.titlesize": self.font_size,
            "font.size": self.font_size,
            "grid.linewidth": self.em_in_inches * 5,
            "legend.fontsize": small,
            "legend.title_fontsize": small,
            "lines.linewidth": self.em_in_inches * 11,
            "lines.markersize": self.em_in_inches * 32,
            "xtick.labelsize": small,
            "ytick.labelsize": small,
        }

    def get_panel_width_in_em(self, columns: int) -> float:
        """Get the width of a panel in em if there are this many columns."""
        return self.width / self.em_in_inches / columns

    def compute_panel_layout(self, count: int, columns: int, height: float, top: float = 0.0) -> tuple[int, int, float]:
        """Arrange panels in rows of equal length that fit the page: rows, columns, and the figure's height in inches.

        There are at most this number of columns, and more if the rows would be less than half as high as they should
        be. ``height`` is that of a row in em, which is lower if the rows don't fit the page, and ``top`` that of texts
        outside the panels.
        """
        count = max(1, count)
        max_rows = max(1, int((self.max_height / self.em_in_inches - top) / (height / 2)))
        rows = min(-(-count // columns), max_rows)
        columns = -(-count // rows)
        return -(-count // columns), columns, min((rows * height + top) * self.em_in_inches, self.max_height)


MIN_FONT_SIZE = 6.0  #: points, for legible print
#: Pages by `report.figure_width`. The templates' text is 9 in high, and the caption needs room.
PAGES: dict[FigureWidth, Page] = {
    "neurips": Page(5.5, 8.4, 8),
    "icml": Page(6.75, 8.4, 8),
    "column": Page(3.25, 8.4, 7),
    "slides": Page(10.0, 5.6, 14),
}
BASE_RC_PARAMS: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # ships with matplotlib, so it is the same on every machine
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "pdf.fonttype": 42,  # searchable text
    "svg.fonttype": "none",
    "svg.hashsalt": "fedpipe",  # ids in the SVG are random without it
    "text.parse_math": False,  # a dollar sign is plain text
    "xtick.color": "#444444",
    "xtick.labelcolor": "#222222",
    "ytick.color": "#444444",
    "ytick.labelcolor": "#222222",
}
FONT = b"'DejaVu Sans'"  #: font name in an SVG
#: Formats with canvas and metadata, because default metadata differ each time.
FILE_FORMATS: dict[str, tuple[type[FigureCanvasBase], dict[str, Any]]] = {
    "svg": (FigureCanvasSVG, {"Date": None, "Creator": None}),
    "pdf": (FigureCanvasPdf, {"CreationDate": None, "Creator": None, "Producer": None}),
    "png": (FigureCanvasAgg, {"Software": None}),
}


def use_matplotlib_style(page: Page) -> AbstractContextManager[None]:
    """Use the style of figures on this page. Use it when you make a figure and when you save it."""
    return mpl.style.context(["default", page.rc_params])


def get_line_style(index: int) -> dict[str, Any]:
    """Get color, dash and marker of the line with this index. The first 220 are distinct."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
    }


def choose_round_ticks(rounds: Iterable[float], max_ticks: int) -> list[float]:
    """Choose ticks among the measured rounds: the multiples of a round number, or equal steps down from the last.

    Examples
    --------
    >>> choose_round_ticks(range(1, 41), 5), choose_round_ticks([3, 6, 9], 5), choose_round_ticks(range(7, 100, 10), 4)
    ([10, 20, 30, 40], [3, 6, 9], [7, 37, 67, 97])
    """
    values = sorted(set(rounds))
    if len(values) <= max_ticks:
        return values
    for step in (factor * 10**power for power in range(7) for factor in (1, 2, 5)):
        multiples = [value for value in values if value % step == 0]
        if 2 <= len(multiples) <= max_ticks:
            return multiples
    step = -(-len(values) // max_ticks)
    return values[::-step][::-1]


def get_legend_handles(figure: Figure) -> dict[str, Any]:
    """Get a line or band of the figure for each label."""
    return {label: handle for ax in figure.axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}


def add_legend(figure: Figure, page: Page, entries: Sequence[tuple[str, Any]]) -> None:
    """Add a legend of texts and their lines above the panels, with rows of equal length."""
    width = int(1.1 * page.characters_per_line)
    texts = [textwrap.fill(text, width - 9) for text, _ in entries]
    if texts:
        characters = max(map(len, texts)) + 9  # with the line and the gaps
        rows = -(-len(texts) // max(1, width // characters))
        columns = -(-len(texts) // rows)
        handles = [handle for _, handle in entries]
        figure.legend(handles, texts, loc="outside upper left", ncols=columns, handlelength=3)


def add_notes(figure: Figure, sentences: Sequence[str]) -> Figure:
    """Add notes below a figure."""
    if sentences := [*filter(None, sentences)]:
        size = get_small_font_size()
        width = round(122 * figure.get_figwidth() / size)  # characters per line
        text = "\n".join(textwrap.fill(sentence, width) for sentence in sentences)
        figure.supxlabel(text, x=0.01, ha="left", fontsize=size)
    return figure


def get_small_font_size() -> float:
    """Get the font size of notes, legends and ticks in points."""
    return float(mpl.rcParams["legend.fontsize"])


def label_axis_with_names(
    axis: Axis, names: Sequence[str], max_letters: int, max_names: int = MAX_NAMED_CLASSES
) -> None:
    """Label an axis with names of classes or clients, or with numbers if there are more than ``max_names``.

    Names have at most `MAX_NAME_LENGTH` letters. On the horizontal axis long names are rotated. ``max_letters`` is the
    number of letters that fit.
    """
    names = [name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…" for name in names]
    size = len(names)
    if size <= max_names and [*names] != [*map(str, range(size))]:
        is_rotated = isinstance(axis, XAxis) and size * max(map(len, names)) > max_letters
        axis.set_ticks(range(size), names, rotation=90 if is_rotated else 0)


def save_figure(figure: Figure, stem: Path, page: Page) -> None:
    """Write a figure as SVG, PDF and PNG (150 dpi), without date and program in the metadata."""
    with use_matplotlib_style(page):
        if layout_engine := figure.get_layout_engine():
            if figure.axes:  # a figure with only a note has nothing to lay out
                layout_engine.execute(figure)
            figure.set_layout_engine("none")  # the layout is final
        for file_format, (canvas, metadata) in FILE_FORMATS.items():
            buffer = io.BytesIO()
            figure.set_dpi(150)
            getattr(canvas(figure), f"print_{file_format}")(buffer, metadata=metadata)  # savefig would draw it twice
            data = buffer.getvalue()
            if file_format == "svg":  # the viewer may lack the font
                data = data.replace(FONT, FONT + b", Verdana, sans-serif")
            files.write_bytes(stem.with_name(f"{stem.name}.{file_format}"), data)
