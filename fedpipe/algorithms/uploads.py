"""Uploads of a round's participants, as the server reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedpipe.algorithms.batch import State


class Uploads(Sequence[tuple[int, float, State]]):
    """Uploads of a round: (client, weight, upload) in client order. The weights sum to 1."""

    def __init__(self, ids: Sequence[int], weights: Sequence[float], uploads: Sequence[State]) -> None:
        total = sum(weights)
        self.ids, self.weights = tuple(ids), tuple(weight / total for weight in weights)
        self.states = uploads  #: upload of each client
        #: Clients and weights of each part's last mean, and (None) of the last `with_weights`. Uploads would be a cycle
        #: of references, and their memory would not be freed at the end of the round.
        self._weights_by_part: dict[str | None, tuple[tuple[int, ...], tuple[float, ...]]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        """The entry of one client by its position, uploads of several by a slice, or one part of all by its name."""
        if isinstance(index, str):
            return [upload[index] for upload in self.states]
        if isinstance(index, slice):
            return self._derive_uploads(self.ids[index], self.weights[index], self.states[index])
        return self.ids[index], self.weights[index], self.states[index]

    def __iter__(self) -> Iterator[tuple[int, float, State]]:
        return zip(self.ids, self.weights, self.states, strict=True)

    def with_equal_weights(self) -> Uploads:
        """The same uploads with equal weights, for methods that define uniform averages."""
        return self.with_weights([1.0] * len(self))

    def with_weights(self, weights: Sequence[float]) -> Uploads:
        """The same uploads with other weights, one per client, which are divided by their sum.

        BatchNorm's running statistics get these weights, too, except in parts that you average later with other
        weights.
        """
        uploads = self._derive_uploads(self.ids, weights, self.states)
        self._weights_by_part[None] = uploads.ids, uploads.weights
        return uploads

    def _derive_uploads(self, ids: Sequence[int], weights: Sequence[float], states: Sequence[State]) -> Uploads:
        uploads = Uploads(ids, weights, states)
        uploads._weights_by_part = self._weights_by_part
        return uploads

    def get_uploads_with_part_weights(self, part: str) -> Uploads:
        """The uploads with the weights that the method used for a part."""
        weights_by_part, rows = self._weights_by_part, {client: row for row, client in enumerate(self.ids)}
        ids, weights = weights_by_part.get(part, weights_by_part.get(None, (self.ids, self.weights)))
        uploads = self._derive_uploads(ids, weights, [self.states[rows[client]] for client in ids])
        uploads.weights = weights  # a second division by their sum would change the last digits
        return uploads

    def mark(self, flags: Tensor) -> Tensor:
        """The flags of all clients, shape (N,), with 1 for the clients of these uploads."""
        return flags.index_fill(0, torch.tensor(self.ids), 1)

    def mean(self, part: str, names: Iterable[str] | None = None) -> Any:
        """Weighted mean of one part of the uploads, or of its tensors ``names``, summed in client order.

        BatchNorm's running statistics of the part get the weights of its last mean. If the layers of a part have
        different weights, average the ones with BatchNorm last.
        """
        self._weights_by_part[part] = self.ids, self.weights
        total = None
        for _, weight, upload in self:
            term = (upload[part] if names is None else upload[part].only(names)) * weight
            total = term if total is None else total + term
        return total
