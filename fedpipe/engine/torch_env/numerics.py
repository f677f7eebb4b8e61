"""What a run asks of PyTorch in its process: the same bits for the same seed, in the precision that settings say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cuda, cudnn


def configure_torch() -> None:
    """Deterministic kernels, an error where there is none, and float32 that is float32.

    On a GPU, PyTorch computes convolutions and recurrent layers of float32 in TF32 unless told otherwise, whose 10 bits
    make results differ in the third digit. What may lower a run's precision is `federation.precision`.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms, which imports a compiler too
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    cudnn.allow_tf32 = cuda.matmul.allow_tf32 = False


@contextmanager
def preserve_torch_flags() -> Iterator[None]:
    """What runs that are opened within set is undone, in a process that is the user's own."""
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
