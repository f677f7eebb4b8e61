"""torchvision's VGG16, pre-trained on ImageNet, with the small classifier of FedDUAL."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torchvision.models import VGG16_Weights
from torchvision.models.vgg import cfgs, make_layers

from fedpipe.artifacts import sha256_of
from fedpipe.errors import SettingsError
from fedpipe.models._parts import need_images, out_of_place
from fedpipe.models.base import Model, Network

IMAGENET = VGG16_Weights.IMAGENET1K_V1.url
IMAGENET_SHA256 = "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0"


@dataclass(frozen=True, kw_only=True)
class VGG16(Model):
    """torchvision's VGG16 with ImageNet weights, a layer of 64 and the output layer; its convolutions are frozen.

    The convolutional base, a global average pool, 64 ReLU units and the output layer. With the frozen base, the
    default as in FedDUAL's code, 33,482 parameters train for CIFAR-10 and 39,332 for CIFAR-100; frozen ones are part
    of the model's definition and are never sent. Source: Simonyan and Zisserman, VGG (ICLR 2015); FedDUAL and its code.

    Parameters
    ----------
    weights
        `imagenet`: torchvision's, which it downloads once to its own cache; otherwise a file that holds torchvision's
        state dict of VGG16 (a path from the project's root); null: random weights.
    sha256
        SHA-256 of the weights, which makes them part of the run's key; the default is that of torchvision's.
    frozen
        Whether the convolutional base keeps its weights; if not, all layers train.
    """

    weights: Annotated[str, Field(min_length=1)] | None = "imagenet"
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = IMAGENET_SHA256
    frozen: bool = True

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Colour images of at least 32x32 pixels are needed; weights from a file are those that ``sha256`` says.

        A file that is not there is no error yet: a study that has run is read where its weights are not.
        """
        need_images(self, shape, side=32, channels=3)
        if self.weights is None and self.frozen:
            raise SettingsError(
                "model.frozen: true can't be used with random weights, which would never train; it should be false, or "
                "model.weights imagenet or a file."
            )
        if self.weights is not None and self.file.is_file():
            self._verify()

    @property
    def file(self) -> Path:
        """Where the weights lie."""
        if self.weights == "imagenet":
            return Path(torch.hub.get_dir(), "checkpoints", Path(IMAGENET).name)
        return Path(str(self.weights))

    def fetch(self) -> None:
        """Download torchvision's weights if they are wanted and not in its cache yet, and check the file.

        Raises
        ------
        SettingsError
            The file is missing, can't be downloaded, or is not the one that ``sha256`` says.
        """
        if self.weights is None:
            return
        if self.weights == "imagenet" and not self.file.is_file():
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                torch.hub.download_url_to_file(IMAGENET, str(self.file), hash_prefix=self.sha256)
            except (OSError, RuntimeError) as error:
                raise SettingsError(
                    f"model.weights: imagenet can't be downloaded from {IMAGENET} ({error}); put that file at "
                    f"{self.file}, or name one that you have."
                ) from None
        if not self.file.is_file():
            raise SettingsError(
                f"model.weights: {self.weights} is missing; it should be a file that holds torchvision's VGG16."
            )
        self._verify()

    def _verify(self) -> None:
        if (found := _digest(self.file, self.file.stat().st_mtime_ns)) != self.sha256:
            raise SettingsError(
                f"model.sha256: {self.sha256} is not that of {self.file}, which is {found}; it should be, unless that "
                f"file is damaged or another one is meant."
            )

    def build(self, shape: tuple[int, ...], classes: int) -> Network:
        """See :class:`~fedpipe.models.base.Model`.

        Raises
        ------
        SettingsError
            The file of the weights is missing, is not the one that ``sha256`` says, or holds something else.
        """
        base = make_layers(cfgs["D"])
        out_of_place(base)
        if self.weights is None:
            for value in base.parameters():  # as torchvision's VGG does, whose big classifier need not be made
                if value.dim() == 4:
                    nn.init.kaiming_normal_(value, mode="fan_out", nonlinearity="relu")
                else:
                    nn.init.zeros_(value)
        else:
            self.fetch()
            base.load_state_dict(_convolutions(self.file, self.sha256))
        base.requires_grad_(not self.frozen)
        body = nn.Sequential(base, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 64), nn.ReLU())
        return Network(body, nn.Linear(64, classes))

    def outline(self, shape: tuple[int, ...], classes: int) -> Network:
        """See :class:`~fedpipe.models.base.Model`."""
        with torch.device("meta"):
            return dataclasses.replace(self, weights=None).build(shape, classes)


@functools.cache
def _digest(path: Path, changed: int) -> str:
    """The SHA-256 of a file, computed once as long as it does not change."""
    return sha256_of(path)


@functools.lru_cache(maxsize=1)
def _convolutions(path: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of the convolutional base in a file that was checked, read once a process."""
    try:
        tensors = torch.load(path, weights_only=True, map_location="cpu")
        base = {name: value for name, value in tensors.items() if name.startswith("features.")}
        found = {name.removeprefix("features."): value.clone() for name, value in base.items()}
    except Exception as error:  # the file is the user's own: anything may be in it
        reason = str(error).split("\n", 1)[0]
        raise SettingsError(f"model.weights: {path} can't be read ({reason}); it should be a state dict.") from None
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in make_layers(cfgs["D"]).state_dict().items()}
    if {name: value.shape for name, value in found.items()} != wanted:
        raise SettingsError(f"model.weights: {path} holds another network; it should hold torchvision's VGG16.")
    return found
