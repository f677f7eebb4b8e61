"""A multilayer perceptron."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import nn
from typing_extensions import override

from fedpipe.models.base import Model, Network


@dataclass(frozen=True, kw_only=True)
class MLP(Model):
    """Fully connected layers with ReLU. The features are the last hidden layer's output.

    Parameters
    ----------
    hidden
        Widths of the hidden layers.
    biases
        If true, all layers have biases.
    """

    hidden: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (64,)
    biases: bool = True

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        widths = (math.prod(shape), *self.hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs, bias=self.biases), nn.ReLU()]
        return Network(nn.Sequential(*layers), nn.Linear(widths[-1], num_classes, bias=self.biases))
