"""The FastText of cwFedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import require_tokens


class Mean(nn.Module):
    """Mean over the steps of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape (B, d) for x of shape (B, length, d)."""
        return x.mean(1)


@dataclass(frozen=True, kw_only=True)
class FastText(Model):
    """The mean of the tokens' embeddings, a hidden layer without activation and the output layer, for AG News.

    Token 0 is padding. Its embedding is always zero, but it counts in the mean. The network has 3,157,508 parameters
    for AG News. Source: Lee and Choi, cwFedAvg (ICCV 2025), its FastText, and its code.

    Parameters
    ----------
    vocabulary
        Number of token ids, including padding.
    hidden
        Width of the embedding and of the hidden layer, which is the feature width d.
    """

    vocabulary: Annotated[int, Field(ge=1)] = 98_635
    hidden: Annotated[int, Field(ge=1)] = 32

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require sequences of token ids."""
        require_tokens(self, shape)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        body = nn.Sequential(
            nn.Embedding(self.vocabulary, self.hidden, padding_idx=0), Mean(), nn.Linear(self.hidden, self.hidden)
        )
        return Network(body, nn.Linear(self.hidden, num_classes))
