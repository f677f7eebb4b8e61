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
        self.effective_uploads = self  #: uploads with the weights that the method uses: these, or those of `uniform`

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        """The entry of one client by its position, or one part of all uploads by its name."""
        if isinstance(index, str):
            return [upload[index] for upload in self.states]
        return self.ids[index], self.weights[index], self.states[index]

    def __iter__(self) -> Iterator[tuple[int, float, State]]:
        return zip(self.ids, self.weights, self.states, strict=True)

    def with_equal_weights(self) -> Uploads:
        """The same uploads with equal weights, for methods that define uniform averages."""
        self.effective_uploads = Uploads(self.ids, [1.0] * len(self), self.states)
        return self.effective_uploads

    def mark(self, flags: Tensor) -> Tensor:
        """The flags of all clients, shape (N,), with 1 for the clients of these uploads."""
        return flags.index_fill(0, torch.tensor(self.ids), 1)

    def mean(self, part: str, names: Iterable[str] | None = None) -> Any:
        """Weighted mean of one part of the uploads, or of its tensors ``names``, summed in client order."""
        total = None
        for _, weight, upload in self:
            term = (upload[part] if names is None else upload[part].only(names)) * weight
            total = term if total is None else total + term
        return total
