"""Accuracy against round: a panel a protocol, a line an algorithm; of many algorithms, a panel each."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import MaxNLocator

from fedpipe.planned import Plan
from fedpipe.report import results
from fedpipe.report.curves import shown
from fedpipe.report.figures import style

COLUMNS = {1: 1, 2: 2, 4: 2}  #: of panels, by number of protocols; 3 for all others
LABELED = 6  #: from so many lines on they have labels at their ends: a legend's order says nothing of theirs
CROWD = len(style.COLORS)  #: more lines than these can't be told apart in one panel
REFERENCE = "fedavg"  #: what the panels of many algorithms compare with, in grey; where there is none, the first line
GREY = {"color": "#A8A8A8", "linewidth": 1.0}


def draw(plan: Plan, stem: Path) -> None:
    """Draw mean curves, with a band of one standard deviation over seeds to each side."""
    style.save(figure(plan, shown(plan)), stem)


@style.figure
def figure(plan: Plan, frame: pd.DataFrame) -> Figure:
    """The figure of what `fedpipe.report.curves.shown` returned.

    What the grid varies for all algorithms makes panels; what it varies for one algorithm makes lines; what is searched
    for the best makes neither. Lines are told apart by their methods' labels, and are called by the titles. Few lines
    have a legend, more of them labels at their ends. Where they are too many for one panel, each has its own, whose
    lines are the protocols.
    """
    varied = [name for name in plan.grid if name not in plan.report.best_over]
    own = [
        name for name in varied if name.startswith("algorithms.") or not all(name in cell.grid for cell in plan.cells)
    ]
    shared = [name for name in varied if name not in own]
    pairs = list(zip(frame["algorithm"], _points(frame, own), strict=True))
    names = [results.line(label, point) for label, point in pairs]
    lines = dict(zip(names, (results.line(plan.title(label), point) for label, point in pairs), strict=True))
    sentences = results.own_settings(plan)
    frame = frame.assign(point=[results.label(point) for point in _points(frame, shared)], line=names)
    protocols = [name for name in results.protocols(plan, frame) if name in set(frame["protocol"])]
    if len(lines) > CROWD:
        return style.note(_apart(plan, frame, lines, protocols), sentences)
    panels = list(itertools.product(frame["point"].unique(), protocols))
    labeled = len(lines) >= LABELED
    columns = COLUMNS.get(len(protocols), 2 if labeled else 3)
    rows = max(1, -(-len(panels) // columns))
    told = [textwrap.fill(title, 40 // columns, break_long_words=False) for title in lines.values()]
    height = 0.14 * sum(text.count("\n") + 1 for text in told) + 0.8 if labeled else 0.0
    made = Figure(figsize=(style.WIDTH + 0.4, rows * max(3.3, height) + 0.4))
    axes = made.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax, (point, protocol) in zip(axes.flat, panels, strict=False):
        panel = frame[(frame["point"] == point) & (frame["protocol"] == protocol)]
        for index, name in enumerate(lines):
            part = panel[panel["line"] == name]
            every = max(1, len(part) // 6)
            _curve(ax, part, name, markevery=(index % every, every), **style.line(index))
        ax.set_title(_title(protocol, point, 66 // columns))
        coinciding = _coinciding(panel)
        if labeled:
            _label_ends(ax, coinciding, lines, 40 // columns)
            continue
        for place, same in enumerate(coinciding):
            text = textwrap.fill(" = ".join(lines[name] for name in same), 34)
            ax.text(0.99, 0.02 + 0.09 * place, text, transform=ax.transAxes, ha="right", va="bottom", fontsize=7)
    _label(axes, len(panels), protocols)
    if labeled:
        made.suptitle(_seeds(plan), x=0.01, ha="left", fontsize=8)
        style.note(made, sentences)
        _spread_labels(made)
        return made
    handles = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    shown = [handles[name] for name in lines]
    legend = made.legend(shown, [*lines.values()], loc="outside right upper", handlelength=3.4)
    legend.set_title(_seeds(plan))
    return style.note(made, sentences)


def _label_ends(ax: Axes, coinciding: list[list[str]], lines: dict[str, str], width: int) -> None:
    """A label to the right of each line that can be seen, and a thin line to it; those beneath are named, too."""
    beneath = {name for same in coinciding for name in same[:-1]}
    titles = lines | {same[-1]: " = ".join(lines[name] for name in same) for same in coinciding}
    for line in ax.get_lines():
        if (name := str(line.get_label())) not in beneath:
            ax.annotate(
                textwrap.fill(titles[name], width, break_long_words=False),
                xy=np.column_stack(line.get_data())[-1],
                xytext=(1.08, 0.5),  # _spread_labels finds the height
                textcoords="axes fraction",
                va="center",
                color=line.get_color(),
                fontsize=8,
                arrowprops={
                    "arrowstyle": "-",
                    "color": line.get_color(),
                    "linewidth": 0.6,
                    "relpos": (0, 0.5),
                    "shrinkA": 1,
                    "shrinkB": 0,
                },
            )


def _spread_labels(made: Figure) -> None:
    """Move the labels of lines to the heights of their lines' ends, or as near as there is room in their order."""
    made.draw_without_rendering()  # lays all out, so that it is known how high axes and labels are
    for ax in made.axes:
        labels = [text for text in ax.texts if isinstance(text, Annotation)]
        ends = [ax.transAxes.inverted().transform(ax.transData.transform(label.xy))[1] for label in labels]
        heights = [1.1 * Text.get_window_extent(label).height / ax.bbox.height for label in labels]
        for label, height in zip(labels, spread(ends, heights), strict=True):
            label.xyann = (label.xyann[0], height)


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Where labels of these heights stand in [0, 1] without touching each other, in the order of where they want to be.

    The sum of their squared distances from there is least: labels that would overlap move by their mean.
    """
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], -index))  # at one height, the first is on top
    tops = list(itertools.accumulate(heights[index] for index in order))
    above = {index: top - heights[index] / 2 for index, top in zip(order, tops, strict=True)}  # where all stand close
    together: list[list[float]] = []  # by how much labels want to be above there; those in a list move as one
    for index in order:
        moved = [wanted[index] - above[index]]
        while together and fmean(together[-1]) > fmean(moved):
            moved = together.pop() + moved
        together.append(moved)
    moves = [fmean(moved) for moved in together for _ in moved]
    room = 1 - sum(heights)
    placed = {index: above[index] + min(max(move, 0), room) for index, move in zip(order, moves, strict=True)}
    return [placed[index] for index in range(len(wanted))]


def _apart(plan: Plan, frame: pd.DataFrame, lines: dict[str, str], protocols: list[str]) -> Figure:
    """A small panel for each line and grid point, with the reference's curves of the same protocols in grey."""
    panels = list(itertools.product(frame["point"].unique(), lines))
    reference = REFERENCE if REFERENCE in lines else next(iter(lines))
    in_grey = f"{lines[reference]}: the same in grey"
    rows = -(-len(panels) // (columns := 5))
    made = Figure(figsize=(style.WIDTH + 0.8, 1.35 * rows + 0.8))
    axes = made.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    marker = "" if frame["round"].nunique() > 1 else "o"  # one round makes no line
    for ax, (point, name) in zip(axes.flat, panels, strict=False):
        there = frame[frame["point"] == point]
        panel, other = (there[there["line"] == line] for line in (name, reference))
        for index, protocol in enumerate(protocols):
            own, grey = (rows[rows["protocol"] == protocol] for rows in (panel, other))
            look = style.line(index) | {"marker": marker}
            if name != reference and len(own):
                ax.plot(grey["round"], grey["mean"], **look | GREY | {"label": in_grey})
            _curve(ax, own, protocol, **look)
        alike = name != reference and any({name, reference} <= {*same} for same in _coinciding(_whole(there)))
        title = f"{lines[name]} = {lines[reference]}" if alike else lines[name]
        ax.set_title(_title(title, point, 20), fontsize=8.5, pad=3)
        ax.tick_params(labelsize=7)
    _label(axes, len(panels), protocols, fontsize=7.5)
    handles = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = sorted(handles, key=[*protocols, in_grey].index)
    legend = made.legend([handles[name] for name in order], order, loc="outside upper left", ncols=3, handlelength=2.6)
    legend.set_title(_seeds(plan))
    return made


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with each protocol's values among the rounds of a line, which are compared as one."""
    return frame.sort_values(["protocol", "round"]).assign(
        round=lambda rows: rows.groupby("protocol").ngroup() * 10**5 + rows["round"]
    )


def _title(name: str, point: str, width: int) -> str:
    """A panel's title in lines that fit above it."""
    return "\n".join(textwrap.fill(part, width) for part in (name, point) if part)


def _coinciding(panel: pd.DataFrame) -> list[list[str]]:
    """The lines of a panel of which only the last can be seen, since they are equal in every round."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, part in panel.groupby("line", sort=False):
        values = part[["round", "mean", "std"]].fillna(0).to_numpy().round(9)
        groups.setdefault(tuple(values.ravel()), []).append(str(name))
    return [names for names in groups.values() if len(names) > 1]


def _label(axes: npt.NDArray[Any], panels: int, protocols: list[str], **font: float) -> None:
    """Label the outer axes of so many panels and hide the places that are left over."""
    tested = all(name.endswith(("-on-global", "-on-local")) for name in protocols)
    columns = axes.shape[1]
    for place, ax in enumerate(axes.flat):
        bins = 7 if columns < 5 else 3  # labels of 4 digits have room
        ax.xaxis.set_major_locator(MaxNLocator(bins, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        if place >= panels:
            ax.set_axis_off()
        elif place + columns >= panels:
            ax.set_xlabel("round", **font)
            ax.tick_params(labelbottom=True)
        if place < panels and place % columns == 0:
            ax.set_ylabel("test accuracy (%)" if tested else "accuracy (%)", **font)


def _curve(ax: Axes, part: pd.DataFrame, name: str, **look: Any) -> None:
    if part.empty:
        return
    rounds, mean, std = (part[column].to_numpy() for column in ("round", "mean", "std"))
    low, high = np.clip(mean - std, 0, 100), np.clip(mean + std, 0, 100)
    ax.fill_between(rounds, low, high, color=look["color"], alpha=0.1, linewidth=0)
    ax.plot(rounds, mean, label=name, **look)


def _seeds(plan: Plan) -> str:
    """What a curve and its band are, where there are several seeds."""
    seeds = len(plan.seeds)
    return f"mean ± std, {seeds} seeds" if seeds > 1 else ""


def _points(frame: pd.DataFrame, names: list[str]) -> list[dict[str, str]]:
    return [dict(zip(names, point, strict=True)) for point in frame[names].to_numpy()]
