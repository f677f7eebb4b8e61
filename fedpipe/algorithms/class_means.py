"""Means over clients of their measurements by class: one row per class, weighted by a count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compute_class_means(rows: Sequence[Tensor], counts: Sequence[Tensor], default: Tensor) -> Tensor:
    """The weighted mean over clients of each class's row, shape (C, d).

    Parameters
    ----------
    rows
        What each client measured, shape (C, d).
    counts
        Weights of each client's rows, shape (C,).
    default
        The rows of the classes that have no weight, shape (C, d).
    """
    return divide_by_class_count(*sum_class_rows(rows, counts), default)


def sum_class_rows(rows: Sequence[Tensor], counts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The weighted sum of the clients' rows, shape (C, d), and the sum of the weights, shape (C,)."""
    weighted_rows = (client_rows * count.unsqueeze(-1) for client_rows, count in zip(rows, counts, strict=True))
    return sum(weighted_rows, torch.zeros_like(rows[0])), sum(counts, torch.zeros_like(counts[0]))


def divide_by_class_count(sums: Tensor, counts: Tensor, default: Tensor) -> Tensor:
    """The sums of each class, shape (C, ...), divided by its count, or ``default`` if the count is 0."""
    counts = counts.reshape(-1, *(1,) * (sums.dim() - 1))
    return torch.where(counts > 0, sums / torch.where(counts > 0, counts, 1), default)
