"""What is done to images where batches of them are gathered, on the device that trains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor

from fedpipe.layers import uniform

Channels = tuple[float, ...]


@checked(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Transforms:
    """Normalisation of all images, and random changes of those that are trained on.

    The random numbers belong to the batch (seed, stream, epoch, round, client), so they are the same in every executor.

    Parameters
    ----------
    mean, std
        Subtracted from and divided out of each channel's pixels, which lie in [0, 1]; one number for all channels or
        one for each.
    crop
        Pixels of zeros that are put around before a window of the image's own size is cut out at random.
    flip
        Mirror every second image, at random, left to right.
    rotation
        Turn by an angle drawn between minus and plus so many degrees; the nearest pixels, zeros outside.
    on_test
        Change test images too, as FedDW's code does (its accuracies are noisy for it).
    """

    mean: Channels = ()
    std: Annotated[Channels, Field()] = ()
    crop: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    on_test: bool = False

    @property
    def random(self) -> bool:
        """Whether anything is drawn."""
        return bool(self.crop or self.flip or self.rotation)

    def normalised(self, x: Tensor) -> Tensor:
        """Images of shape (..., c, h, w) with each channel centred and scaled."""
        if self.mean:
            x = x - x.new_tensor(self.mean).reshape(-1, 1, 1)
        if self.std:
            x = x / x.new_tensor(self.std).reshape(-1, 1, 1)
        return x

    def changed(self, x: Tensor, key: Tensor) -> Tensor:
        """Images of shape (B, c, h, w), each changed by numbers of its own; ``key`` is an int64 scalar."""
        if not self.random:
            return x
        draws = uniform(key, (4, len(x)))
        if self.crop:
            x = _shifted(x, self.crop, draws[0], draws[1])
        if self.flip:
            x = torch.where((draws[2] < 0.5).reshape(-1, 1, 1, 1), x.flip(-1), x)
        if self.rotation:
            x = _turned(x, (2 * draws[3] - 1) * math.radians(self.rotation))
        return x


PLAIN = Transforms()


def _shifted(x: Tensor, by: int, down: Tensor, right: Tensor) -> Tensor:
    """Windows of the images with ``by`` zeros around them, whose corners lie at random."""
    height, width = x.shape[-2:]
    around = F.pad(x, (by, by, by, by))
    rows = (down * (2 * by + 1)).long().unsqueeze(1) + torch.arange(height, device=x.device)
    columns = (right * (2 * by + 1)).long().unsqueeze(1) + torch.arange(width, device=x.device)
    tall = around.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, width + 2 * by))
    return tall.gather(3, columns[:, None, None, :].expand(-1, x.shape[1], height, -1))


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """Images turned around their centres by angles in radians, shape (B,)."""
    cosine, sine, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    ratio = x.shape[-2] / x.shape[-1]  # grid coordinates run from -1 to 1 on both axes, pixels do not
    rows = [torch.stack([cosine, -sine * ratio, zero], -1), torch.stack([sine / ratio, cosine, zero], -1)]
    grid = F.affine_grid(torch.stack(rows, -2).to(x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", align_corners=False)
