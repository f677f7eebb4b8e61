"""The critical-difference diagram: mean ranks of the methods, with a bar over methods that don't differ.

Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 2006, figure 1.
"""

from __future__ import annotations

import textwrap

from matplotlib.figure import Figure

from fedpipe.core.errors import ArtifactError
from fedpipe.planning.rank_test import MIN_COLUMNS, MIN_METHODS
from fedpipe.report.data import StudyData
from fedpipe.report.figures import style
from fedpipe.report.ranks import RankComparison, build_ranked_table, describe_rank_comparison

MAX_LABELED_RANKS = 15  #: number of ranks up to which each has a label
ROW_HEIGHT = 1.9  #: height of a method's name of one line in em
TITLE_FRACTION = 0.25  #: maximum width of a line of a method's name, as a fraction of the page's width


def write_ranks_figure(data: StudyData) -> None:
    """Draw the diagram of a study.

    Raises
    ------
    ArtifactError
        Too few methods have a number in each column.
    """
    table = build_ranked_table(data)
    comparison = table.compare_methods(data.plan)
    if comparison is None:
        columns = len(next(iter(table.scores.values()), []))
        raise ArtifactError(
            f"report.rank_test: {data.plan.report.rank_test} needs at least {MIN_METHODS} methods and {MIN_COLUMNS} "
            f"columns, but the table without missing numbers has size {len(table.scores)} x {columns}. Use another "
            "protocol, or remove report.rank_test."
        )
    titles = [table.titles[name] for name in comparison.names]
    sentences = [
        *describe_rank_comparison(data.plan, comparison, table.omitted_methods),
        "A bar connects methods that do not differ significantly.",
    ]
    page, path_stem = style.PAGES[data.plan.report.figure_width], data.plan.study_files.figures_folder / "ranks"
    style.save_figure(build_ranks_figure(page, comparison, titles, sentences), path_stem, page)


def build_ranks_figure(page: style.Page, comparison: RankComparison, titles: list[str], sentences: list[str]) -> Figure:
    """Build the diagram. The better half of the methods is named at the left, from the best down."""
    with style.use_matplotlib_style(page):
        return style.add_notes(_build_critical_difference_diagram(page, comparison, titles), sentences)


def _build_critical_difference_diagram(page: style.Page, comparison: RankComparison, titles: list[str]) -> Figure:
    titles = [textwrap.fill(title, int(TITLE_FRACTION * page.characters_per_line)) for title in titles]
    k, bars = len(titles), comparison.indistinguishable_groups
    left_count = (k + 1) // 2
    first_row = 1.0 + 0.7 * len(bars)  # rows below the axis of ranks
    row_height = max(1.0, 0.7 * max(1 + title.count("\n") for title in titles))
    rows = first_row + row_height * left_count
    height = min(page.max_height, ROW_HEIGHT * (rows + 6) * page.em_in_inches)
    figure = Figure(figsize=(page.width, height))
    ax = figure.subplots()
    margin = 0.55 * (k - 1)
    ax.set(xlim=(1 - margin, k + margin), ylim=(rows, -2.5))
    ax.set_axis_off()
    dark = style.BASE_RC_PARAMS["axes.edgecolor"]
    ax.plot([1, k], [0, 0], color=dark, linewidth=1, marker="")
    for rank in range(1, k + 1, 1 if k <= MAX_LABELED_RANKS else 5):
        ax.plot([rank, rank], [0, -0.3], color=dark, linewidth=1)
        ax.text(rank, -0.45, str(rank), ha="center", va="bottom")
    if comparison.critical_difference is not None and comparison.is_significant:
        end = 1 + comparison.critical_difference
        ax.plot([1, end], [-1.9, -1.9], color="black", linewidth=1.5, marker="|", markersize=6)
        ax.text(end + 0.02 * k, -1.9, f"critical difference {comparison.critical_difference:.2f}", va="center")
    for number, group in enumerate(bars):
        ends = [comparison.mean_ranks[group[0]], comparison.mean_ranks[group[-1]]]
        y, overhang = 0.6 + 0.7 * number, 0.012 * (k - 1)
        ax.plot([ends[0] - overhang, ends[1] + overhang], [y, y], color="black", linewidth=3.5, solid_capstyle="butt")
    for index, (title, rank) in enumerate(zip(titles, comparison.mean_ranks, strict=True)):
        is_left = index < left_count
        y = first_row + row_height * ((index if is_left else k - 1 - index) + 0.5)
        x, side, gap = (1, "right", -0.02 * k) if is_left else (k, "left", 0.02 * k)
        ax.plot([rank, rank, x + gap / 2], [0, y, y], color=style.COLORS[index % len(style.COLORS)], linewidth=1)
        text = f"{title}  {rank:.2f}" if is_left else f"{rank:.2f}  {title}"
        ax.text(x + gap, y, text, ha=side, va="center", multialignment=side)
    return figure
