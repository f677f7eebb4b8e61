"""A batch of a client's samples, and information about the client."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Named parts, each a tensor or :class:`~fedpipe.core.tensors.Tensors`, of the same shapes in every round.
State = dict[str, Any]


class Batch(NamedTuple):
    """Samples of one client."""

    x: Tensor  #: inputs, shape ``(B, *shape)``
    y: Tensor  #: classes, shape (B,)
    mask: Tensor | None = None  #: 1 for samples and 0 for padding, shape (B,). None: no padding
    noise_key: Tensor | None = None  #: key of the random noise for these samples, an int64 scalar

    def split(self, parts: int) -> list[Batch]:
        """Split into ``parts`` batches: part i has the samples i, i + parts and so on. Empty parts equal the first."""
        first = self._take_strided_samples(parts, 0)
        return [first] + [self._take_strided_samples(parts, index)._choose_nonempty(first) for index in range(1, parts)]

    def _take_strided_samples(self, step: int, offset: int) -> Batch:
        mask = None if self.mask is None else self.mask[offset::step]
        return Batch(self.x[offset::step], self.y[offset::step], mask, self.noise_key)

    def _choose_nonempty(self, fallback: Batch) -> Batch:
        """Itself, or ``fallback`` if it has no samples."""
        if self.mask is None or fallback.mask is None:
            return self if len(self.y) else fallback
        is_nonempty = self.mask.sum() > 0
        x, y = torch.where(is_nonempty, self.x, fallback.x), torch.where(is_nonempty, self.y, fallback.y)
        return Batch(x, y, torch.where(is_nonempty, self.mask, fallback.mask), self.noise_key)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the samples (first axis) of ``values``, shape (B, ...)."""
        if self.mask is None:
            return values.sum(0)
        return (values * self.mask.reshape(-1, *(1,) * (values.dim() - 1))).sum(0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the samples of ``values``, shape (B,)."""
        return values.mean() if self.mask is None else self.sum(values) / self.mask.sum().clamp(min=1)

    def variance(self, values: Tensor) -> Tensor:
        """Unbiased variance over the samples of ``values``, shape (B, ...). It is 0 for one sample."""
        if self.mask is None:
            return values.var(0, correction=min(len(values) - 1, 1))
        n = self.size()
        mean = self.sum(values) / n.clamp(min=1)
        return self.sum((values - mean).square()) / (n - 1).clamp(min=1)

    def class_sums(self, values: Tensor, num_classes: int) -> Tensor:
        """Sum of ``values``, shape (B, d), over the samples of each class: shape (C, d)."""
        labels = one_hot(self.y, num_classes, values.dtype)
        return (labels if self.mask is None else labels * self.mask.unsqueeze(-1)).T @ values

    def size(self) -> Tensor:
        """Number of samples, a scalar."""
        return self.y.new_full((), len(self.y)) if self.mask is None else self.mask.sum()

    def make_pair_mask(self, dtype: torch.dtype) -> Tensor:
        """1 where i < j are samples and 0 elsewhere, shape (B, B)."""
        is_sample = self.y.new_ones(len(self.y), dtype=dtype) if self.mask is None else self.mask.to(dtype)
        return (is_sample.unsqueeze(1) * is_sample).triu(1)


class ClientInfo(NamedTuple):
    """Information about a client, in floating-point tensors except the key."""

    size: Tensor  #: number of samples n_k, a scalar
    class_counts: Tensor  #: number of samples of each class n_kc, shape (C,)
    round: Tensor  #: number of the round, from 1, a scalar
    is_first: Tensor  #: 1 until the client has trained in a round, then 0, a scalar
    noise_key: Tensor  #: key of the client's random numbers in this round, an int64 scalar


def one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Rows of the identity, shape (B, C)."""
    return (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).to(dtype)
