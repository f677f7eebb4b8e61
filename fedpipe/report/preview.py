"""A partition as plain text: training samples by client and class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpipe.data.heterogeneity import HeterogeneitySummary
from fedpipe.data.partitions.base import Integers
from fedpipe.report import table_notes

SHADES = " .:-=+*#%@"  #: from no sample to the maximum
MAX_CLASS_COLUMNS = 20  #: maximum number of classes whose numbers fit into a line
LINE_WIDTH = 120  #: maximum line length with class names


def render_partition_preview(
    key: str,
    settings: dict[str, Any],
    counts: Integers,
    clients: Sequence[str],
    class_names: Sequence[str],
    held_out: Sequence[int] = (),
    unused_keys: Sequence[str] = (),
) -> str:
    """Render one line per client and the three measures of heterogeneity.

    Classes have numbers instead of their names if the names do not fit into a line. With many classes each is one
    character, darker for more samples. ``settings`` are those of ``partition.yaml``. ``counts`` (N, C) are the training
    samples of each client and class. Clients in ``held_out`` have an asterisk. ``unused_keys`` of the data set have no
    effect.
    """
    clients = [f"{name}*" if client in held_out else name for client, name in enumerate(clients)]
    description = table_notes.describe_partition(settings, unused_keys)
    head = f"{table_notes.append_partition_seed(settings, description)}: {key}"
    if (count := counts.shape[1]) > MAX_CLASS_COLUMNS:
        lines = _render_count_heatmap(counts, clients)
    else:
        lines = _render_count_table(counts, class_names, clients)
        if len(lines[0]) > LINE_WIDTH:
            lines = _render_count_table(counts, [*map(str, range(count))], clients)
    note = "Training samples of each client and class."
    note += " An asterisk marks held-out clients, which never train." if held_out else ""
    return "\n".join([head, "", *lines, "", note, str(HeterogeneitySummary.from_counts(counts)), ""])


def _render_count_table(counts: Integers, names: Sequence[str], clients: Sequence[str]) -> list[str]:
    counts_with_total = np.vstack([counts, counts.sum(axis=0)])
    rows = [
        ["client", *names, "samples"],
        *(
            [name, *(str(count) if count else "·" for count in row), str(row.sum())]
            for name, row in zip([*clients, "all"], counts_with_total, strict=True)
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _render_count_heatmap(counts: Integers, clients: Sequence[str]) -> list[str]:
    width = max(6, *map(len, clients))
    level = -(-counts * (len(SHADES) - 1) // counts.max())  # rounded up, so that any sample is visible
    return [
        f"{'client':>{width}} |{f'classes 0 to {counts.shape[1] - 1}':<{counts.shape[1]}}| samples",
        *(
            f"{client:>{width}} |{''.join(SHADES[shade] for shade in row)}| {size:>7}"
            for client, row, size in zip(clients, level, counts.sum(axis=1), strict=True)
        ),
    ]
