"""The 4-layer CNN of cwFedAvg."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import require_images


@dataclass(frozen=True, kw_only=True)
class CNN4(Model):
    """Two 5x5 convolutions (32, 64) with ReLU and 2x2 max-pooling, a layer of 512 and the output layer.

    ReLU follows the pooling, which gives the same function with a quarter of the work. It has 582,026 parameters for
    MNIST and 878,538 for CIFAR-10. PFLlib has it as FedAvgCNN. Source: Lee and Choi, cwFedAvg (ICCV 2025), the CNN of
    its experiments.
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
            nn.Conv2d(depth, 32, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * side[0] * side[1], 512),
            nn.ReLU(),
        )
        return Network(body, nn.Linear(512, num_classes))
