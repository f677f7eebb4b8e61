"""The numbers that the four papers print, as they print them: `published.csv`, a row a number.

A number's place has the names that the studies have: ``row`` is the method, ``column`` the names of the values of the
study's axes, joined by a slash, as ``practical/MNIST``. Numbers that stand in running text have the table ``text``.
`layouts` says how the places lie in print.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal, NamedTuple, TypeAlias, cast

Status: TypeAlias = Literal["target", "failed", "absent", "suspect", "formula", "setting", "derived", "claim"]
STATUS_MEANINGS: dict[Status, str] = {  #: what each status means, for readers
    "target": "a number to be met",
    "failed": "marked as failed in print: it crashed, or did not converge",
    "absent": "the text that we have lacks the table's body",
    "suspect": "printed, but contradicted by the table itself: no target",
    "formula": "follows from shapes alone, and is compared exactly",
    "setting": "a setting, not a result",
    "derived": "a difference of other numbers, which is made again from them",
    "claim": "a value that the text names as the best, or a count",
}


class CellId(NamedTuple):
    """Where a number stands."""

    paper: str
    table: str
    row: str
    column: str
    metric: str


@dataclass(frozen=True)
class PublishedNumber:
    """A number as printed, ``printed`` to the letter; ``mean``, ``std`` and ``runs`` are None where print has none."""

    cell_id: CellId
    printed_text: str
    mean: float | None
    std: float | None
    runs: int | None
    status: Status
    notes: str


@functools.cache
def load_published() -> dict[CellId, PublishedNumber]:
    """All printed numbers by their places, in the order of the papers."""
    text = resources.files(__package__).joinpath("published.csv").read_text(encoding="utf-8")
    numbers_by_id: dict[CellId, PublishedNumber] = {}
    for row in csv.DictReader(text.splitlines()):
        cell_id = CellId(*(row[name] for name in CellId._fields))
        if cell_id in numbers_by_id:
            raise ValueError(f"published.csv: {cell_id} stands there twice.")
        status = cast(Status, row["status"])
        if status not in STATUS_MEANINGS:
            raise ValueError(
                f"published.csv: {cell_id} has the status {status!r}; it should be one of {', '.join(STATUS_MEANINGS)}."
            )
        numbers_by_id[cell_id] = PublishedNumber(
            cell_id,
            _format_printed(row),
            float(row["mean"]) if row["mean"] else None,
            float(row["std"]) if row["std"] else None,
            int(row["runs"]) if row["runs"] else None,
            status,
            row["notes"],
        )
    return numbers_by_id


def _format_printed(row: Mapping[str, str]) -> str:
    """What print has: a number, a formula of sizes, or that the method failed."""
    if row["metric"] == "communication_cost":
        return row["notes"].removeprefix("formula ").partition(" ")[0].replace("*Sigma", "Σ")
    return "failed" if row["status"] == "failed" else " ± ".join(filter(None, (row["mean"], row["std"])))
