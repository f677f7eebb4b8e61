"""A small convolutional network for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import require_images


@dataclass(frozen=True, kw_only=True)
class CNN(Model):
    """Two 3x3 convolutions with ReLU and 2x2 max-pooling, then one hidden layer, for 8x8 digits.

    Parameters
    ----------
    channels
        Channels of the two convolutions.
    hidden
        Width of the hidden layer, which is the feature width d.
    batch_norm
        If true, batch normalization follows each convolution.
    bias
        If true, the output layer has a bias. Compare FedDW with a network without it.
    """

    channels: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (16, 32)
    hidden: Annotated[int, Field(ge=1)] = 64
    batch_norm: bool = False
    bias: bool = True

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require images of at least 4x4 pixels, for two poolings."""
        require_images(self, shape, side=4)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        (first, second), (depth, height, width) = self.channels, shape
        body = nn.Sequential(
            *self._make_block(depth, first),
            *self._make_block(first, second),
            nn.Flatten(),
            nn.Linear(second * (height // 4) * (width // 4), self.hidden),
            nn.ReLU(),
        )
        return Network(body, nn.Linear(self.hidden, num_classes, bias=self.bias))

    def _make_block(self, depth: int, channels: int) -> list[nn.Module]:
        norm_layers = [nn.BatchNorm2d(channels)] if self.batch_norm else []
        return [nn.Conv2d(depth, channels, 3, padding=1), *norm_layers, nn.MaxPool2d(2), nn.ReLU()]
