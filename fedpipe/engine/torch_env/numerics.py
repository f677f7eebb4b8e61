"""PyTorch's settings for a run: the same bits for the same seed, in the precision of the settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cuda, cudnn


def configure_torch() -> None:
    """Require deterministic kernels and full float32 precision.

    By default PyTorch computes float32 convolutions and recurrent layers on a GPU in TF32, whose 10 bits change the
    third digit of results. Use `federation.precision` to lower a run's precision.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")  # like use_deterministic_algorithms, which also imports a compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # unused
    cudnn.allow_tf32 = cuda.matmul.allow_tf32 = False


@contextmanager
def preserve_torch_flags() -> Iterator[None]:
    """Restore PyTorch's flags after the block, in a user's process."""
    mode, threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    tf32_flags = cudnn.allow_tf32, cuda.matmul.allow_tf32
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.set_num_threads(threads)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        cudnn.allow_tf32, cuda.matmul.allow_tf32 = tf32_flags
