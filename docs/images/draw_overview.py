"""Draws docs/images/overview.svg: params.yaml, the cached runs with one changed method in color, table and curves.

    make demo                                       # the shipped study
    $EDITOR params.yaml                             # algorithms.feddw: {mu: 10.0}
    fedpipe run                                     # computes three runs
    python docs/images/draw_overview.py             # draws the edited study

The numbers are those of results/tables/results.csv and results/plots/curves.csv. The colors follow the reader's light
or dark mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import fedpipe

IMAGE = Path(__file__).with_name("overview.svg")
CHANGED, SHIPPED_MU = "feddw", 1.0  #: the method whose mu changes in the picture, and its mu in the shipped study
CURVES = {"fedavg": "gray", "feddw": "changed", "scaffold": "green", "fedala": "orange"}
STYLE = """
  svg { --ink: #1f2328; --soft: #656d76; --line: #c4cad1; --card: #f6f8fa; --changed: #0072b2; --tint: #d8ebf8;
        --cached: #dfe3e8; --gray: #8c959f; --green: #008f6b; --orange: #c77700; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9198a1; --line: #444c56; --card: #161b22; --changed: #56b4e9; --tint: #12384f;
          --cached: #30363d; --gray: #7d8590; --green: #2fbf8f; --orange: #e69f00; } }
  text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
  .code { font: 11.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; }
  .title { font-weight: 600; font-size: 13px; } .soft { fill: var(--soft); } .right { text-anchor: end; }
  .middle { text-anchor: middle; } .bold { font-weight: 600; } .new { fill: var(--changed); font-weight: 600; }
  .card { fill: var(--card); stroke: var(--line); } .box { fill: var(--cached); stroke: none; }
  .run { fill: var(--changed); stroke: none; } .tint { fill: var(--tint); }
  .edge { fill: none; stroke: var(--line); stroke-width: 1.3; } .hot { stroke: var(--changed); stroke-width: 1.6; }
  .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
"""


def _write_text(x: float, y: float, text: str, classes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{classes}" xml:space="preserve">{escape(text)}</text>'


def _draw_box(x: float, y: float, width: float, height: float, classes: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{classes}"/>'


def _draw_edge(x1: float, y1: float, x2: float, y2: float, classes: str = "edge") -> str:
    middle = (x1 + x2) / 2
    return f'<path d="M{x1:g},{y1:g} C{middle:g},{y1:g} {middle:g},{y2:g} {x2:g},{y2:g}" class="{classes}"/>'


def draw_params(study: dict[str, Any]) -> Iterator[str]:
    """The study at the left, with the edited line in color."""
    mu = study["algorithms"][CHANGED]["mu"]
    lines = [
        *("dataset:", f"  name: {study['dataset']['name']}"),
        *("partition:", f"  scheme: {study['partition']['scheme']}", f"  alpha: {study['partition']['alpha']}"),
        *("federation:", f"  clients: {study['federation']['clients']}", f"  rounds: {study['federation']['rounds']}"),
        *("algorithms:", "  fedavg: {}", "  scaffold: {}", f"  feddw: {{mu: {SHIPPED_MU} → {mu}}}", "  …"),
        *("study:", f"  seeds: {study['study']['seeds']}"),
    ]
    yield _write_text(24, 34, "params.yaml", "title")
    yield _draw_box(16, 46, 196, 264, "card")
    for index, line in enumerate(lines):
        y = 67 + 16.3 * index
        if CHANGED in line:
            yield _draw_box(20, y - 12.5, 188, 17, "tint")
        yield _write_text(28, y, line, "code new" if CHANGED in line else "code")


def draw_runs(titles: dict[str, str], seeds: list[int]) -> Iterator[str]:
    """The DAG in the middle: data, a partition per seed, a run per method and seed. Changed runs are in color."""
    count = len(titles) * len(seeds)
    yield _write_text(244, 34, f"{count} runs: {len(seeds)} to compute, {count - len(seeds)} from the cache", "title")
    yield _draw_box(244, 160, 62, 34, "box")
    yield _write_text(275, 181, "data", "middle")
    for column, seed in enumerate(seeds):
        x = 452 + 62 * column
        yield _write_text(x + 24, 62, f"seed {seed}", "middle soft")
    for row, label in enumerate(titles):
        y = 72 + 26 * row
        is_changed = label == CHANGED
        yield _draw_edge(306, 177, 356, y + 9, "edge hot" if is_changed else "edge")
        yield _write_text(362, y + 13.5, titles[label], "new" if is_changed else "")
        for column in range(len(seeds)):
            yield _draw_box(452 + 62 * column, y, 48, 18, "run" if is_changed else "box")
    yield _write_text(244, 331, "Each run has a key, a hash of its settings and code. Nothing is overwritten.", "soft")


def draw_table(results: pd.DataFrame, titles: dict[str, str]) -> Iterator[str]:
    """Local test accuracy of each method at the right, with the standard deviation over seeds."""
    yield _write_text(676, 34, "Table", "title")
    yield _write_text(676, 62, "test accuracy (%)", "soft")
    rows = results.query(
        "protocol == 'personal-on-local' and metric == 'accuracy' and average == 'sample' and round == 'last'"
    ).set_index("algorithm")
    best = rows["mean"].idxmax()
    for row, label in enumerate(titles):
        y = 85.5 + 26 * row
        style = "new" if label == CHANGED else "bold" if label == best else ""
        yield _write_text(676, y, titles[label], style)
        yield _write_text(826, y, f"{rows.at[label, 'mean']:.1f} ± {rows.at[label, 'std']:.1f}", f"right {style}")


def draw_curves(curves: pd.DataFrame, titles: dict[str, str]) -> Iterator[str]:
    """Accuracy after each round of four methods."""
    left, top, width, height, low = 872, 72, 196, 210, 40
    yield _write_text(left - 6, 34, "Figures", "title")
    yield _write_text(left - 6, 62, "test accuracy (%) by round", "soft")
    rounds = int(curves["round"].max())
    for value in (40, 60, 80, 100):
        y = top + height * (100 - value) / (100 - low)
        yield f'<path d="M{left},{y:g} H{left + width}" class="edge"/>'
        yield _write_text(left - 6, y + 4, str(value), "right soft")
    for number in (1, rounds // 2, rounds):
        yield _write_text(left + width * (number - 1) / (rounds - 1), top + height + 18, str(number), "middle soft")
    for label, color in CURVES.items():
        line = curves[(curves["algorithm"] == label) & (curves["protocol"] == "personal-on-local")].sort_values("round")
        points = " ".join(
            f"{left + width * (number - 1) / (rounds - 1):.1f},{top + height * (100 - mean) / (100 - low):.1f}"
            for number, mean in zip(line["round"], line["mean"], strict=True)
            if mean >= low
        )
        yield f'<polyline points="{points}" class="curve" style="stroke: var(--{color})"/>'
    for index, (label, color) in enumerate(CURVES.items()):
        x, y = left + 96, top + 122 + 17 * index
        yield f'<path d="M{x},{y - 4} h16" class="curve" style="stroke: var(--{color})"/>'
        yield _write_text(x + 22, y, titles[label])


def draw_overview(study: dict[str, Any], titles: dict[str, str], results: pd.DataFrame, curves: pd.DataFrame) -> str:
    """Return the picture as SVG, 1084 x 346 pixels. ``titles`` has the name of each method in tables."""
    seeds = study["study"]["seeds"]
    parts = [
        *draw_params(study),
        *draw_runs(titles, seeds),
        *draw_table(results, titles),
        *draw_curves(curves, titles),
    ]
    title = (
        f"A study of {len(titles)} methods and {len(seeds)} seeds: an edit of FedDW's mu recomputes {len(seeds)} runs"
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1084 346" role="img" aria-labelledby="title">'
        f'\n<title id="title">{escape(title)}</title>\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    plan = fedpipe.load("params.yaml").plan
    IMAGE.write_text(
        draw_overview(
            yaml.safe_load(Path("params.yaml").read_text()),
            {label: plan.get_method_title(label) for label in plan.algorithms},
            pd.read_csv("results/tables/results.csv"),
            pd.read_csv("results/plots/curves.csv"),
        )
    )
