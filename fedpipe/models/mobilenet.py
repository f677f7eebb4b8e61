"""The MobileNetV2 of FedDW."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import make_network_with_mapped_features, require_images

STAGES = ((1, 8, 1, 1), (6, 12, 2, 1), (6, 16, 3, 2), (6, 32, 4, 2), (6, 48, 3, 1), (6, 80, 3, 2), (6, 160, 1, 1))
"""Expansion, output channels, number of blocks and stride of the first one."""


class Block(nn.Module):
    """Expanding 1x1, 3x3 depthwise (with the stride) and 1x1 convolution, with a shortcut if the stride is 1."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = expansion * inputs
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module | None = None
        if stride == 1:
            change = [nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
            self.shortcut = nn.Sequential(*(change if inputs != outputs else []))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (B, outputs, height / stride, width / stride) for x of shape (B, inputs, height, width)."""
        y: Tensor = self.convolutions(x)
        return y if self.shortcut is None else y + self.shortcut(x)


@dataclass(frozen=True, kw_only=True)
class MobileNet(Model):
    """MobileNetV2 with halved channels, FedDW's mapping layers of 256 and 128, and BatchNorm.

    It differs from torchvision's with ``width_mult=0.5``. The first convolution has 32 channels. It and the second
    stage have stride 1, for 32x32 images. All channels are halved exactly, including the last 1,280. Shortcuts have a
    convolution if the channels change. ReLU has no upper limit. It has 807,660 parameters for CIFAR-100. Source:
    Sandler et al., MobileNetV2 (CVPR 2018), and FedDW, table II, and its code.

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
        channels, last = 32, 640
        extractor: list[nn.Module] = [nn.Conv2d(shape[0], channels, 3, padding=1, bias=False)]
        extractor += [nn.BatchNorm2d(channels), nn.ReLU()]
        for expansion, outputs, blocks, stride in STAGES:
            for index in range(blocks):
                extractor.append(Block(channels, outputs, expansion, 1 if index else stride))
                channels = outputs
        extractor += [nn.Conv2d(channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU()]
        extractor += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return make_network_with_mapped_features(extractor, last, num_classes, self.bias)
