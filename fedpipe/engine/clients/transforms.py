"""Normalization and augmentation of images in batches, on the training device.

The random numbers are a function of (seed, stream, epoch, round, client), so they are the same in every executor.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedpipe.core.noise import generate_uniform
from fedpipe.settings.transforms import Transforms


class Normalization:
    """Centers and scales each channel of images."""

    def __init__(self, settings: Transforms, dtype: torch.dtype, device: torch.device | str) -> None:
        def to_channel_tensor(values: tuple[float, ...]) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device).reshape(-1, 1, 1) if values else None

        self._mean, self._std = to_channel_tensor(settings.mean), to_channel_tensor(settings.std)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize images of shape (..., c, h, w) in place, and return them."""
        if self._mean is not None:
            x.sub_(self._mean)
        return x if self._std is None else x.div_(self._std)


def transform_images(settings: Transforms, x: Tensor, key: Tensor) -> Tensor:
    """Transform images of shape (B, c, h, w), each with its own random numbers. ``key`` is an int64 scalar."""
    if not settings.is_random:
        return x
    draws = generate_uniform(key, (len(x), 4)).T  # by sample, so that padding does not change the numbers
    color = _compute_black(settings, x.dtype) if settings.fill == "black" else (0.0,)
    if settings.crop or settings.flip:
        is_flipped = draws[2] < 0.5 if settings.flip else None
        x = _crop_and_flip_images(x, settings.crop, draws[0], draws[1], is_flipped, color)
    if settings.rotation:
        x = _rotate_images(x, (2 * draws[3] - 1) * math.radians(settings.rotation), color)
    return x


def _compute_black(settings: Transforms, dtype: torch.dtype) -> tuple[float, ...]:
    """Compute the color black after :class:`Normalization`: one number, or one per channel."""
    number = "float64" if dtype == torch.float64 else "float32"
    mean, std = np.array(settings.mean or (0,), number), np.array(settings.std or (1,), number)
    return tuple(((0 - mean) / std).tolist())


def _crop_and_flip_images(
    x: Tensor,
    padding: int,
    vertical_offset: Tensor,
    horizontal_offset: Tensor,
    is_flipped: Tensor | None,
    color: tuple[float, ...],
) -> Tensor:
    """Pad the images with a color, crop random windows, and flip some of them."""
    height, width = x.shape[-2:]
    columns = torch.arange(width, device=x.device).unsqueeze(0)
    if is_flipped is not None:
        columns = torch.where(is_flipped.unsqueeze(1), columns.flip(1), columns)
    columns = columns + (horizontal_offset * (2 * padding + 1)).long().unsqueeze(1)
    rows = torch.arange(height, device=x.device) + (vertical_offset * (2 * padding + 1)).long().unsqueeze(1)
    pixels = (rows.unsqueeze(2) * (width + 2 * padding) + columns.unsqueeze(1)).flatten(1)
    padded_images = F.pad(x, (padding, padding, padding, padding))
    if padding and any(color):
        image = torch.zeros(height, width, dtype=x.dtype, device=x.device)
        frames = [F.pad(image, (padding, padding, padding, padding), value=number) for number in color]
        padded_images = padded_images + torch.stack(frames)
    return padded_images.flatten(2).gather(2, pixels.unsqueeze(1).expand(-1, x.shape[1], -1)).reshape(x.shape)


def _rotate_images(x: Tensor, angle: Tensor, color: tuple[float, ...]) -> Tensor:
    """Rotate images around their centers by angles in radians, shape (B,). Pixels outside have a color."""
    height, width = x.shape[-2:]
    vertical_coordinates = (torch.arange(height, device=x.device) - (height - 1) / 2).reshape(1, -1, 1)
    horizontal_coordinates = (torch.arange(width, device=x.device) - (width - 1) / 2).reshape(1, 1, -1)
    cosine, sine = angle.cos().reshape(-1, 1, 1), angle.sin().reshape(-1, 1, 1)
    rows = cosine * vertical_coordinates + sine * horizontal_coordinates  # source of each pixel
    columns = cosine * horizontal_coordinates - sine * vertical_coordinates
    grid = torch.stack([columns * 2 / width, rows * 2 / height], -1).to(x.dtype)
    rotated_images = F.grid_sample(x, grid, mode="nearest", align_corners=False)
    if not any(color):
        return rotated_images
    is_outside = 1 - F.grid_sample(torch.ones_like(x[:, :1]), grid, mode="nearest", align_corners=False)
    return rotated_images + torch.cat([is_outside * number for number in color], dim=1)
