"""The bidirectional LSTM of FedDW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import require_tokens

WIDTH = 128  #: width of the embedding, of each direction and of the next layers


class Extractor(nn.Module):
    """Embedding, BiLSTM, a layer with ReLU at each step, their mean over the steps, and the mapping layer."""

    def __init__(self, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Embedding(vocabulary, WIDTH), nn.Dropout(dropout))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.steps = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
        self.mapping = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Features of shape (B, 128) for token ids of shape (B, length)."""
        outputs, _ = self.lstm(self.embedding(x))
        features: Tensor = self.mapping(self.steps(outputs).mean(1))
        return features


@dataclass(frozen=True, kw_only=True)
class BiLSTM(Model):
    """A one-layer bidirectional LSTM over token ids with FedDW's mapping layers, for IMDB. Clients train one by one.

    Embedding of 128, BiLSTM of 128 each way, a layer of 128 with ReLU at each step, the mean over all steps (padding
    included), a mapping layer of 128 and the output layer. 1,593,858 parameters for IMDB. Source: FedDW, section
    V-A, and its code.

    Parameters
    ----------
    vocabulary
        Number of token ids.
    dropout
        Fraction of the embedding's and the LSTM's outputs that dropout sets to zero.
    bias
        Whether the output layer has a bias.
    """

    is_stackable: ClassVar[bool] = False  # LSTM has no batching rule under vmap

    vocabulary: Annotated[int, Field(ge=1)] = 10_000
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    bias: bool = True

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require sequences of token ids."""
        require_tokens(self, shape)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        return Network(Extractor(self.vocabulary, self.dropout), nn.Linear(WIDTH, num_classes, bias=self.bias))
