"""Accuracy against round: a panel a protocol and grid point, a line an algorithm."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedpipe.report import results
from fedpipe.report.curves import curves
from fedpipe.report.figures import style
from fedpipe.report.results import Plan

COLUMNS = {1: 1, 2: 2, 4: 2}  #: of panels, by number of protocols; 3 for all others


def draw(plan: Plan, stem: Path) -> None:
    """Draw mean curves, with a band of one standard deviation over seeds to each side."""
    style.save(figure(plan, curves(plan)), stem)


@style.figure
def figure(plan: Plan, frame: pd.DataFrame) -> Figure:
    """The figure of what `fedpipe.report.curves.curves` returned.

    What the grid varies for all algorithms makes panels; what it varies for one algorithm makes lines.
    """
    shared = [name for name in plan["grid"] if not name.startswith("algorithms.")]
    own = [name for name in plan["grid"] if name not in shared]
    each = zip(frame["algorithm"], _labels(frame, own), strict=True)
    names = [f"{algorithm} ({told})" if told else algorithm for algorithm, told in each]
    frame = frame.assign(point=_labels(frame, shared), line=names)
    lines = list(frame["line"].unique())
    protocols = [each for each in results.protocols(plan, frame) if each in set(frame["protocol"])]
    panels = list(itertools.product(frame["point"].unique(), protocols))
    columns = COLUMNS.get(len(protocols), 3)
    rows = max(1, -(-len(panels) // columns))
    made = Figure(figsize=(style.WIDTH + 0.4, max(3.3 * rows, 0.21 * len(lines)) + 0.4))
    axes = made.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for place, (ax, (point, protocol)) in enumerate(zip(axes.flat, panels, strict=False)):
        panel = frame[(frame["point"] == point) & (frame["protocol"] == protocol)]
        for index, name in enumerate(lines):
            _curve(ax, panel[panel["line"] == name], index, name)
        ax.set_title(f"{protocol}\n{point}" if point else protocol)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if place % columns == 0:
            ax.set_ylabel("test accuracy (%)")
        if place + columns >= len(panels):
            ax.set_xlabel("round")
            ax.tick_params(labelbottom=True)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    handles = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    legend = made.legend([handles[name] for name in lines], lines, loc="outside right upper", handlelength=3.4)
    if len(plan["seeds"]) > 1:
        legend.set_title(f"mean ± std, {len(plan['seeds'])} seeds")
    return made


def _curve(ax: Axes, part: pd.DataFrame, index: int, name: str) -> None:
    if part.empty:
        return
    look = style.line(index)
    every = max(1, len(part) // 6)
    rounds, mean, std = (part[column].to_numpy() for column in ("round", "mean", "std"))
    low, high = np.clip(mean - std, 0, 100), np.clip(mean + std, 0, 100)
    ax.fill_between(rounds, low, high, color=look["color"], alpha=0.1, linewidth=0)
    ax.plot(rounds, mean, label=name, markevery=(index % every, every), **look)


def _labels(frame: pd.DataFrame, names: list[str]) -> list[str]:
    return [results.label(dict(zip(names, point, strict=True))) for point in frame[names].to_numpy()]
