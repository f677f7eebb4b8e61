"""How images and weights lie in memory, so that a CPU's kernels are fast.

Their values are the same; what kernels make of them differs by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.models.layers import is_large_kernel

PAGE = 1024  #: float32 numbers in 4 KiB
NARROW = 64  #: outputs below which a linear layer is faster by rows in any case


def optimize_layout(tree: Any) -> Any:
    """A state's weights as they are fast: small kernels channels-last, linear layers whose rows collide by columns."""
    return pytree.tree_map(_optimize_tensor_layout, tree)


def channels_last(value: Tensor) -> Tensor:
    """The same images or kernels in that layout; whatever is neither as it is."""
    if value.dim() != 4:
        return value
    if value.shape[1] == 1:  # both layouts are one here; only the strides tell PyTorch which is meant
        height, width = value.shape[2:]
        return value.contiguous().as_strided(value.shape, (height * width, 1, width, 1))
    return value.contiguous(memory_format=torch.channels_last)


def _optimize_tensor_layout(value: Tensor) -> Tensor:
    if value.dim() == 4:
        return value if is_large_kernel(value) else channels_last(value)
    return value.t().contiguous().t() if value.dim() == 2 and _has_colliding_rows(*value.shape) else value


def _has_colliding_rows(outputs: int, inputs: int) -> bool:
    """Whether the rows of a linear layer's weight lie whole pages apart, and its columns do not.

    A core's first cache keeps what lies whole pages apart in the same few places, and so the gradient of a layer from
    1,024 to 512, for a batch of 10, takes 2.5 times as long by rows as by columns. Tables of embeddings, which are read
    by rows, have more of them than columns.
    """
    return inputs % PAGE == 0 and NARROW <= outputs < inputs and outputs % PAGE != 0
