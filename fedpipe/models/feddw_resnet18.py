"""The ResNet-18 of FedDW, for small images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import make_network_with_mapped_features, require_images


class Block(nn.Module):
    """Two 3x3 convolutions, the first with the stride, and a shortcut, a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Shape (B, outputs, height / stride, width / stride) for x of shape (B, inputs, height, width)."""
        y: Tensor = self.relu(self.shortcut(x) + self.convolutions(x))
        return y


@dataclass(frozen=True, kw_only=True)
class FedDWResNet18(Model):
    """ResNet-18 for 32x32 images with FedDW's mapping layers of 256 and 128 and BatchNorm.

    The first convolution is 3x3 with stride 1, without a pooling after it. All convolutions have biases, as in FedDW's
    code. It has 11,350,756 parameters for CIFAR-100. `resnet18` is the usual network. Source: FedDW, section V-A, and
    its code.

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
        extractor: list[nn.Module] = [nn.Conv2d(shape[0], 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
        channels = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            extractor += [Block(channels, outputs, stride), Block(outputs, outputs, 1)]
            channels = outputs
        extractor += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return make_network_with_mapped_features(extractor, channels, num_classes, self.bias)
