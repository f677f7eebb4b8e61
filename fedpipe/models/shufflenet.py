"""The ShuffleNet of FedDW."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import make_network_with_mapped_features, require_images

GROUPS = 2
FIRST_CHANNELS = 24  #: channels of the first convolution


class Unit(nn.Module):
    """Grouped 1x1 convolution, channel shuffle, 3x3 depthwise and grouped 1x1 convolution, with a shortcut.

    With stride 2 the shortcut is a 3x3 average pooling, whose channels are concatenated with the convolutions'.
    Otherwise the two are added. Source: Zhang et al., ShuffleNet (CVPR 2018), figure 2.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        branch_outputs = outputs - inputs if stride == 2 else outputs
        inner, groups = branch_outputs // 4, 1 if inputs == FIRST_CHANNELS else GROUPS
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, groups=groups, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.ChannelShuffle(groups),
            nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, branch_outputs, 1, groups=GROUPS, bias=False),
            nn.BatchNorm2d(branch_outputs),
        )
        self.pool = nn.AvgPool2d(3, stride=2, padding=1) if stride == 2 else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Shape (B, outputs, height / stride, width / stride) for x of shape (B, inputs, height, width)."""
        y: Tensor = self.convolutions(x)
        y = y + x if self.pool is None else torch.cat([y, self.pool(x)], 1)
        y = self.relu(y)
        return y


@dataclass(frozen=True, kw_only=True)
class ShuffleNet(Model):
    """ShuffleNet with 2 groups (200, 400, 800 channels), FedDW's mapping layers of 256 and 128, and BatchNorm.

    The first convolution is 1x1 with stride 1, for 32x32 images, and ReLU also follows each depthwise convolution, as
    in FedDW's code. torchvision has only ShuffleNet V2. It has 1,130,424 parameters for CIFAR-100. Source: Zhang et
    al., ShuffleNet (CVPR 2018), and FedDW, table II, and its code.

    Parameters
    ----------
    bias
        If true, the output layer has a bias.
    """

    bias: bool = True

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require images."""
        require_images(self, shape)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        extractor: list[nn.Module] = [
            nn.Conv2d(shape[0], FIRST_CHANNELS, 1, bias=False),
            nn.BatchNorm2d(FIRST_CHANNELS),
            nn.ReLU(),
        ]
        channels = FIRST_CHANNELS
        for outputs, units in ((200, 4), (400, 8), (800, 4)):
            extractor += [Unit(channels, outputs, 2), *(Unit(outputs, outputs, 1) for _ in range(1, units))]
            channels = outputs
        extractor += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return make_network_with_mapped_features(extractor, channels, num_classes, self.bias)
