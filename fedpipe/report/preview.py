"""A partition in plain text: how many training samples of each class each client has."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpipe.data.heterogeneity import Overall
from fedpipe.data.partitions.base import Integers
from fedpipe.report import tables

SHADES = " .:-=+*#%@"  #: from no sample of a class to as many as any client has
WIDE = 20  #: classes, whose numbers fit into a line


def text(key: str, settings: dict[str, Any], counts: Integers) -> str:
    """One line a client, and the three numbers of heterogeneity.

    Of many classes each is one character, darker for more samples.

    Parameters
    ----------
    key
        The partition's key.
    settings
        As ``partition.yaml`` holds them.
    counts
        Training samples of each client and class, shape (N, C).
    """
    head = f"{tables.dealing(settings)}: {key}"
    lines = _numbers(counts) if counts.shape[1] <= WIDE else _shades(counts)
    return "\n".join([head, "", *lines, "", str(Overall.of(counts)), ""])


def _numbers(counts: Integers) -> list[str]:
    whole = np.vstack([counts, counts.sum(axis=0)])
    rows = [
        ["client", *map(str, range(counts.shape[1])), "samples"],
        *(
            [name, *(str(count) if count else "·" for count in row), str(row.sum())]
            for name, row in zip([*map(str, range(len(counts))), "all"], whole, strict=True)
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _shades(counts: Integers) -> list[str]:
    level = -(-counts * (len(SHADES) - 1) // counts.max())  # rounded up: any sample at all is seen
    return [
        f"{'client':>6} |{f'classes 0 to {counts.shape[1] - 1}':<{counts.shape[1]}}| samples",
        *(
            f"{client:>6} |{''.join(SHADES[shade] for shade in row)}| {size:>7}"
            for client, (row, size) in enumerate(zip(level, counts.sum(axis=1), strict=True))
        ),
    ]
