"""Memory layouts of images and weights for fast CPU kernels.

Values are the same, but results of kernels differ by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.models.layers import has_many_kernel_weights

PAGE = 1024  #: float32 numbers in 4 KiB
NARROW = 64  #: number of outputs below which rows are always faster


def optimize_layout(tree: Any) -> Any:
    """Optimize a state's layout: small kernels channels-last, linear layers with colliding rows by columns."""
    return pytree.tree_map(_optimize_tensor_layout, tree)


def to_channels_last(value: Tensor) -> Tensor:
    """Convert images or kernels to channels-last. Other tensors stay as they are."""
    if value.dim() != 4:
        return value
    if value.shape[1] == 1:  # both layouts are equal, but the strides select the kernel
        height, width = value.shape[2:]
        return value.contiguous().as_strided(value.shape, (height * width, 1, width, 1))
    return value.contiguous(memory_format=torch.channels_last)


def _optimize_tensor_layout(value: Tensor) -> Tensor:
    if value.dim() == 4:
        return value if has_many_kernel_weights(value) else to_channels_last(value)
    return value.t().contiguous().t() if value.dim() == 2 and _has_rows_colliding_in_cache(*value.shape) else value


def _has_rows_colliding_in_cache(row_count: int, column_count: int) -> bool:
    """Whether the rows of a linear layer's weight are a multiple of a page apart, and its columns are not.

    Addresses that are a multiple of a page apart share the same few lines of the first cache. So the gradient of a
    layer from 1,024 to 512, for a batch of 10, takes 2.5 times as long by rows as by columns. Embedding tables, which
    are read by rows, have more rows than columns.
    """
    return column_count % PAGE == 0 and NARROW <= row_count < column_count and row_count % PAGE != 0
