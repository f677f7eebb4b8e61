"""The convolutional networks of FedDW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import make_network_with_mapped_features, require_images


@dataclass(frozen=True, kw_only=True)
class FedDWCNN(Model):
    """Two 5x5 convolutions with ReLU and 2x2 max-pooling, mapping layers of 256 and 128 and the output layer.

    The defaults are the network for CIFAR-10, with 139,714 parameters. The one for MNIST, with 121,642, has
    ``channels: [10, 20]`` and ``dropout: 0.5``. Source: FedDW, section V-A, and its code (which pools on MNIST too,
    unlike the paper's text).

    Parameters
    ----------
    channels
        Channels of the two convolutions.
    dropout
        Fraction of the second convolution's outputs that dropout sets to zero.
    bias
        If true, the output layer has a bias.
    """

    channels: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (6, 16)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    bias: bool = True

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require images of at least 16x16 pixels."""
        require_images(self, shape, side=16)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        (first, second), (depth, height, width) = self.channels, shape
        side = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        extractor: list[nn.Module] = [
            nn.Conv2d(depth, first, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(first, second, 5),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        ]
        return make_network_with_mapped_features(extractor, second * side[0] * side[1], num_classes, self.bias)
