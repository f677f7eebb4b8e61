"""The LSTM of LEAF for Shakespeare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import require_tokens


class Extractor(nn.Module):
    """Embedding and LSTM layers. The features are the last layer's output at the last token that is not padding (0)."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Features of shape (B, hidden) for token ids of shape (B, length)."""
        outputs, _ = self.lstm(self.embedding(x))
        last = (x != 0).sum(1).sub(1).clamp(min=0)
        features: Tensor = outputs[torch.arange(len(x), device=x.device), last]
        return features


@dataclass(frozen=True, kw_only=True)
class LSTM(Model):
    """Two LSTM layers over token ids, for the next character of Shakespeare. Clients train one by one.

    Embedding of 8, two layers of 256, and the output layer at the last token that is not padding. 820,000 parameters
    for 90 token ids and 80 classes. Source: S. Caldas et al., LEAF: A Benchmark for Federated Settings,
    arXiv:1812.01097, 2018, and its code (stacked_lstm.py). PyTorch's LSTM has two biases for each of LEAF's.

    Parameters
    ----------
    vocabulary
        Number of token ids, including padding.
    embedding
        Width of the embedding.
    hidden
        Width of each LSTM layer, which is the feature width d.
    layers
        Number of LSTM layers.
    """

    is_stackable: ClassVar[bool] = False  # LSTM has no batching rule under vmap

    vocabulary: Annotated[int, Field(ge=1)] = 90
    embedding: Annotated[int, Field(ge=1)] = 8
    hidden: Annotated[int, Field(ge=1)] = 256
    layers: Annotated[int, Field(ge=1)] = 2

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require sequences of token ids."""
        require_tokens(self, shape)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        body = Extractor(self.vocabulary, self.embedding, self.hidden, self.layers)
        return Network(body, nn.Linear(self.hidden, num_classes))
