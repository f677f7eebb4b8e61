"""The LeNet of FedDUAL."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import require_images


@dataclass(frozen=True, kw_only=True)
class LeNet(Model):
    """LeNet as in FedDUAL's code: two 5x5 convolutions, layers of 120 and 84 with tanh, and the output layer.

    Both convolutions have 6 channels, and the poolings average. The layer of 120 maps the channels of each pixel before
    they are flattened. It is a 1x1 convolution, like a dense layer on the last axis in TensorFlow. The network has
    164,116 parameters for Fashion-MNIST. Source: FedDUAL, its LeNet, and its code.
    """

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require images of at least 16x16 pixels."""
        require_images(self, shape, side=16)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        depth, height, width = shape
        side = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        body = nn.Sequential(
            nn.Conv2d(depth, 6, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 6, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 120, 1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(120 * side[0] * side[1], 84),
            nn.Tanh(),
        )
        return Network(body, nn.Linear(84, num_classes))
