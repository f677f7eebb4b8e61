"""torchvision's VGG16, pre-trained on ImageNet, with the small classifier of FedDUAL."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch import nn
from torchvision.models import VGG16_Weights
from torchvision.models.vgg import cfgs, make_layers
from typing_extensions import override

from fedpipe.core.components import pinned_files
from fedpipe.core.components.pinned_files import PinnedFile
from fedpipe.core.errors import SettingsError
from fedpipe.models.base import Model, Network, read_tensors
from fedpipe.models.blocks import disable_inplace_relu, require_images

IMAGENET = "imagenet"  #: value of ``weights`` for torchvision's weights
WEIGHTS_URL = VGG16_Weights.IMAGENET1K_V1.url
BASE_PREFIX = "features."  #: the convolutional base in torchvision's state dict
BASE_LENGTH = 3  #: number of modules of the base: convolutions, average pool, flattening
IMAGENET_SHA256 = "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0"


@dataclass(frozen=True, kw_only=True)
class VGG16(Model):
    """torchvision's VGG16 with ImageNet weights, a layer of 64 and the output layer. Its convolutions are frozen.

    The convolutional base, a global average pool, 64 ReLU units and the output layer. With the frozen base (the
    default, as in FedDUAL's code) 33,482 parameters are trained for CIFAR-10 and 39,332 for CIFAR-100. Frozen
    parameters are part of the model's definition and are never sent. The base's features are computed once per data
    set and stored in ``results/features``, so you can't use augmentation. Source: Simonyan and Zisserman, VGG (ICLR
    2015), and FedDUAL with its code, which has the weights of Keras instead of torchvision's.

    Parameters
    ----------
    weights
        `imagenet`: torchvision's weights, which torchvision downloads once to its cache. null: random weights.
        Otherwise a file (from the folder of params.yaml) with either torchvision's state dict of VGG16, for the
        convolutional base only, or the complete state dict of this network, ``body.*`` and ``head.*``.
    sha256
        SHA-256 of that file, which is part of the run's key. `fedpipe download` fills it in. You need none for
        `imagenet`.
    frozen
        If true, the convolutional base keeps its weights. If false, all layers are trained.
    """

    weights: Annotated[str, Field(min_length=1)] | None = IMAGENET
    frozen: bool = True

    @property
    @override
    def pinned_file(self) -> PinnedFile | None:
        """None for torchvision's weights."""
        return None if self.weights == IMAGENET else super().pinned_file

    @property
    @override
    def has_missing_weights(self) -> bool:
        return self.weights == IMAGENET and not self.imagenet_weights_path.is_file()

    @override
    def get_hashed_parameters(self) -> dict[str, Any]:
        return super().get_hashed_parameters() | ({"sha256": self._weights_sha256} if self.weights == IMAGENET else {})

    @property
    @override
    def has_full_weights(self) -> bool:
        """False if the file contains only the convolutional base."""
        if self.pinned_file is None or not self.pinned_file.path.is_file():
            return False
        return not any(name.startswith(BASE_PREFIX) for name in read_tensors(self.weights_file()))

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require color images of at least 32x32 pixels."""
        require_images(self, shape, side=32, channels=3)
        if self.weights is None and self.frozen:
            raise SettingsError(
                "model.frozen: true can't be used with random weights, which would never be trained. Use false, "
                "or set model.weights to imagenet or a file."
            )
        if self.weights == IMAGENET and self.imagenet_weights_path.is_file():
            self._verify_imagenet_file()

    @property
    @override
    def has_frozen_base(self) -> bool:
        return self.frozen

    @override
    def split_frozen_base(self, network: Network) -> tuple[nn.Module, Network]:
        """Split off the convolutions with their pool."""
        body = cast(nn.Sequential, network.body)
        layers = list(body.children())
        placeholders = [nn.Identity() for _ in layers[:BASE_LENGTH]]
        return body[:BASE_LENGTH], Network(nn.Sequential(*placeholders, *layers[BASE_LENGTH:]), network.head)

    @property
    def imagenet_weights_path(self) -> Path:
        """Path of torchvision's weights in its cache."""
        return Path(torch.hub.get_dir(), "checkpoints", Path(WEIGHTS_URL).name)

    @override
    def weights_file(self) -> Path:
        """Path of the weights file. Downloads torchvision's weights if they are missing.

        Raises
        ------
        SettingsError
            The file is missing, can't be downloaded, or has another SHA-256.
        """
        if self.weights != IMAGENET:
            return super().weights_file()
        if not self.imagenet_weights_path.is_file():
            try:
                self.imagenet_weights_path.parent.mkdir(parents=True, exist_ok=True)
                torch.hub.download_url_to_file(
                    WEIGHTS_URL, str(self.imagenet_weights_path), hash_prefix=self._weights_sha256
                )
            except (OSError, RuntimeError) as error:
                raise SettingsError(
                    f"model.weights: imagenet can't be downloaded from {WEIGHTS_URL} ({error}). Put that file at "
                    f"{self.imagenet_weights_path}, or name a file that you have."
                ) from None
        self._verify_imagenet_file()
        return self.imagenet_weights_path

    @property
    def _weights_sha256(self) -> str:
        return self.sha256 or (IMAGENET_SHA256 if self.weights == IMAGENET else "")

    def _verify_imagenet_file(self) -> None:
        if (actual_sha256 := pinned_files.compute_content_sha256(self.imagenet_weights_path)) != self._weights_sha256:
            raise SettingsError(
                f"model.sha256: {self._weights_sha256} is declared, but {self.imagenet_weights_path} has the SHA-256 "
                f"{actual_sha256}. Delete that file if it is damaged, or declare this SHA-256."
            )

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        """Make the network, with the weights of the convolutional base if the file contains only those.

        Raises
        ------
        SettingsError
            The weights file is missing, has another SHA-256, or belongs to another network.
        """
        base = make_layers(cfgs["D"])
        disable_inplace_relu(base)
        if self.weights is None:
            for value in base.parameters():  # like torchvision's VGG, without its big classifier
                if value.dim() == 4:
                    nn.init.kaiming_normal_(value, mode="fan_out", nonlinearity="relu")
                else:
                    nn.init.zeros_(value)
        elif not self.has_full_weights:
            self._load_base_weights(base)
        base.requires_grad_(not self.frozen)
        body = nn.Sequential(base, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 64), nn.ReLU())
        return Network(body, nn.Linear(64, num_classes))

    @override
    def build_without_weights(self, shape: tuple[int, ...], num_classes: int) -> Network:
        with torch.device("meta"):
            return dataclasses.replace(self, weights=None).build(shape, num_classes)

    def _load_base_weights(self, base: nn.Module) -> None:
        tensors = read_tensors(self.weights_file())
        base_tensors = {
            name.removeprefix(BASE_PREFIX): value for name, value in tensors.items() if name.startswith(BASE_PREFIX)
        }
        expected_shapes = {name: value.shape for name, value in base.state_dict().items()}
        if {name: value.shape for name, value in base_tensors.items()} != expected_shapes:
            raise SettingsError(
                f"model.weights: {self.weights} contains another network. It must contain torchvision's VGG16."
            )
        base.load_state_dict(base_tensors)
