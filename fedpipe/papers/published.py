"""The published numbers of the four papers, from `published.csv`, which has one row per number.

``row`` is the method. ``column`` contains the values of the study's axes, with a slash between them, such as
``practical/MNIST``. Numbers in running text are in the table ``text``. `layouts` arranges the numbers as tables.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import pandas as pd

STATUS_MEANINGS = {  #: of each status, for readers
    "target": "a value to reproduce",
    "failed": "failed in the paper: it crashed or did not converge",
    "absent": "our copy of the paper lacks the table's numbers",
    "suspect": "contradicted by the table itself, so it is not compared",
    "formula": "follows from the tensor shapes, and is compared exactly",
    "setting": "a setting, not a result",
    "derived": "a difference of other numbers, recomputed from our numbers",
    "claim": "a count, or a value that the text names as the best",
}


class CellId(NamedTuple):
    """The position of a number in the papers."""

    paper: str
    table: str
    row: str
    column: str
    metric: str


@dataclass(frozen=True)
class PublishedNumber:
    """A published number. ``text`` is its text in the paper. ``mean``, ``std`` and ``runs`` may be missing."""

    cell_id: CellId
    text: str
    mean: float | None
    std: float | None
    runs: int | None
    status: str
    notes: str


@functools.cache
def load_published_numbers() -> dict[CellId, PublishedNumber]:
    """All published numbers by their positions, in the order of the papers."""
    with resources.files(__package__).joinpath("published.csv").open(encoding="utf-8") as file:
        frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    numbers = map(_parse_published_number, frame.to_dict("records"))
    return {number.cell_id: number for number in numbers}


def _parse_published_number(row: dict[Any, Any]) -> PublishedNumber:
    cell_id = CellId(*(row[name] for name in CellId._fields))
    mean, std = (float(row[name]) if row[name] else None for name in ("mean", "std"))
    runs = int(row["runs"]) if row["runs"] else None
    return PublishedNumber(cell_id, _format_published_value(row), mean, std, runs, row["status"], row["notes"])


def _format_published_value(row: dict[Any, Any]) -> str:
    """Format the text in the paper: a number, a formula of sizes, or ``failed``."""
    if row["metric"] == "communication_cost":
        formula: str = row["notes"].removeprefix("formula ").partition(" ")[0]
        return formula.replace("*Sigma", "Σ")
    return "failed" if row["status"] == "failed" else " ± ".join(filter(None, (row["mean"], row["std"])))
