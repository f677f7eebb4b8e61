"""The five-layer CNN of PFPS-LWC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import require_images

PositiveIntPair = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]


@dataclass(frozen=True, kw_only=True)
class CNN5(Model):
    """Two 5x5 convolutions with ReLU and 2x2 max-pooling, two hidden layers and the output layer.

    The paper only describes a "five-layer CNN" with four layers in the extractor and one in the classifier. This
    reading has two convolutions and three linear layers with the widths of LeNet-5 (6, 16, 120, 84), which are usual
    for CIFAR-10 in personalized federated learning: 62,006 parameters. All widths are settings, because the paper does
    not specify them. FedBN, one of its baselines, needs ``batch_norm``, which adds layers at the positions of FedBN's
    own network. Source: PFPS-LWC, its experimental setup.

    Parameters
    ----------
    channels
        Channels of the two convolutions.
    hidden
        Widths of the two hidden layers. The second is the feature width d.
    batch_norm
        If true, batch normalization follows each convolution and hidden layer, before pooling and ReLU. With
        ``convolutions`` it follows only the convolutions, as in the LeNet-5 of FL-bench.
    """

    channels: PositiveIntPair = (6, 16)
    hidden: PositiveIntPair = (120, 84)
    batch_norm: bool | Literal["convolutions"] = False

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require images of at least 16x16 pixels."""
        require_images(self, shape, side=16)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        (first, second), (depth, height, width) = self.channels, shape
        side = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        body = nn.Sequential(
            nn.Conv2d(depth, first, 5),
            *self._make_convolution_norm_layers(first),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(first, second, 5),
            *self._make_convolution_norm_layers(second),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(second * side[0] * side[1], self.hidden[0]),
            *self._make_hidden_norm_layers(self.hidden[0]),
            nn.ReLU(),
            nn.Linear(self.hidden[0], self.hidden[1]),
            *self._make_hidden_norm_layers(self.hidden[1]),
            nn.ReLU(),
        )
        return Network(body, nn.Linear(self.hidden[1], num_classes))

    def _make_convolution_norm_layers(self, channels: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(channels)] if self.batch_norm else []

    def _make_hidden_norm_layers(self, width: int) -> list[nn.Module]:
        return [nn.BatchNorm1d(width)] if self.batch_norm is True else []
