"""torchvision's ResNet-18."""

from __future__ import annotations

from dataclasses import dataclass

import torchvision
from torch import nn
from typing_extensions import override

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import disable_inplace_relu, require_images


@dataclass(frozen=True, kw_only=True)
class ResNet18(Model):
    """torchvision's ResNet-18 with random weights and BatchNorm.

    Use it for images of 64x64 pixels or more, because it begins with a 7x7 convolution and a pooling, both with stride
    2. For smaller images, use `feddw_resnet18`. It is the network of `torchvision` with ``architecture: resnet18``,
    which also has published weights. It has 11,279,112 parameters for Tiny ImageNet. Source: He et al.,
    Deep residual learning (CVPR 2016), and Lee and Choi, cwFedAvg (ICCV 2025), its ResNet-18.
    """

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require color images."""
        require_images(self, shape, channels=3)

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        body = torchvision.models.resnet18(num_classes=num_classes)
        head, body.fc = body.fc, nn.Identity()
        disable_inplace_relu(body)
        return Network(body, head)
