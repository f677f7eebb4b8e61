"""torchvision's ResNet-18."""

from __future__ import annotations

from dataclasses import dataclass

import torchvision
from torch import nn

from fedpipe.models.base import Model, Network
from fedpipe.models.blocks import disable_inplace_relu, require_images


@dataclass(frozen=True, kw_only=True)
class ResNet18(Model):
    """torchvision's ResNet-18, with random weights; has BatchNorm.

    For images of 64x64 and more, since it begins with a 7x7 convolution and a pooling, both with stride 2; smaller
    ones are taken too (`feddw_resnet18` is made for them). 11,279,112 parameters for Tiny ImageNet. Source: He et al.,
    Deep residual learning (CVPR 2016); Lee and Choi, cwFedAvg (ICCV 2025), its ResNet-18.
    """

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Color images are needed."""
        require_images(self, shape, channels=3)

    def build(self, shape: tuple[int, ...], classes: int) -> Network:
        """See :class:`~fedpipe.models.base.Model`."""
        body = torchvision.models.resnet18(num_classes=classes)
        head, body.fc = body.fc, nn.Identity()
        disable_inplace_relu(body)
        return Network(body, head)
