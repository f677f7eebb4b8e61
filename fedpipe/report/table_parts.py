"""Parts of tables: phrases, HTML escapes, and a table as text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any, NamedTuple

import pandas as pd

from fedpipe.planning.plan import Plan

ROUND_PHRASES = {
    "last": "in the last evaluated round",
    "best": "in each run's best round, selected on the test samples",
    "mean-last": "as the mean of the last {last_k} evaluated rounds",
}
AVERAGE_PHRASES = {"sample": "over all test samples", "client": "as the mean of the clients' values"}


def escape_html(text: Any) -> str:
    """Escape HTML's special characters for Markdown."""
    return escape(str(text), quote=False)


def _escape_markdown_cell(text: Any) -> str:
    """Escape HTML's special characters, and the character that would begin the next cell."""
    return escape_html(text).replace("|", r"\|")


class TextTable(NamedTuple):
    """A table of text cells, whose first columns are left-aligned."""

    frame: pd.DataFrame
    left_aligned_columns: int

    def to_markdown(self) -> str:
        """Render as Markdown."""
        sides = ["left" if column < self.left_aligned_columns else "right" for column in range(self.frame.shape[1])]
        escaped_frame = self.frame.map(_escape_markdown_cell).rename(columns=_escape_markdown_cell)
        return str(escaped_frame.to_markdown(index=False, disable_numparse=True, colalign=sides))

    def to_html(self) -> str:
        """Render as HTML."""
        rows = [self._render_html_row("td", row) for row in self.frame.itertuples(index=False)]
        return "\n".join(["<table>", self._render_html_row("th", self.frame.columns), *rows, "</table>"])

    def _render_html_row(self, tag: str, cells: Iterable[Any]) -> str:
        number_tag = f'{tag} class="number"'
        tags = [tag if column < self.left_aligned_columns else number_tag for column in range(self.frame.shape[1])]
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}" for tag, cell in zip(tags, cells, strict=True))


def get_partition_settings_by_key(plan: Plan) -> dict[str, Any]:
    """Get the settings of all partitions for descriptions by key, in the order of the runs."""
    return {run.partition: plan.get_partition_settings_to_describe(run.partition) for run in plan.runs}
