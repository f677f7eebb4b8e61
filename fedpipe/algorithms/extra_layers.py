"""Small networks of a method next to the model: linear layers with a layer normalization."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedpipe.core.noise import draw_uniform
from fedpipe.core.tensors import Tensors


def init_layer(key: Tensor, purpose: str, outputs: int, z: Tensor) -> Tensors:
    """Draw a linear layer from PyTorch's default distribution, with a layer normalization of its outputs.

    Parameters
    ----------
    key, purpose
        See :func:`fedpipe.core.noise.draw_uniform`.
    outputs
        Number of outputs.
    z
        An input, shape (..., d), for width and dtype.
    """
    d = z.shape[-1]
    linear = Tensors(weight=z.new_zeros(outputs, d), bias=z.new_zeros(outputs))
    linear = (2 * draw_uniform(key, purpose, linear) - 1) * d**-0.5
    return linear | Tensors(scale=z.new_ones(outputs), shift=z.new_zeros(outputs))


def apply_linear(layer: Tensors, z: Tensor) -> Tensor:
    """The layer's linear part, shape (B, outputs) for inputs of shape (B, d)."""
    return F.linear(z, layer["weight"], layer["bias"])


def apply_layer_norm(layer: Tensors, a: Tensor) -> Tensor:
    """The layer's normalization."""
    return F.layer_norm(a, layer["scale"].shape, layer["scale"], layer["shift"])
