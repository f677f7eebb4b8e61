"""Random numbers as a function of a key, for code that runs for one client or for a stack of clients.

A key is an int64 scalar. The engine derives it from seed, purpose, round and client (`fedpipe.core.rng`), so the
numbers are the same in the loop and in a stack, for any division into jobs, and after a resume.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedpipe.core.errors import HookError
from fedpipe.core.tensors import Tensors

CHUNK = 2**14  #: random numbers per chunk
TensorOrTensors = TypeVar("TensorOrTensors", Tensor, Tensors)


def draw_uniform(key: Tensor, purpose: str, like: TensorOrTensors) -> TensorOrTensors:
    """Draw uniform numbers in [0, 1) with the names, shapes, dtype and device of ``like``.

    Parameters
    ----------
    key
        Key, an int64 scalar: `ClientInfo.noise_key`, `Batch.noise_key` or `Algorithm.server_noise_key`.
    purpose
        Name of the use. Numbers of different purposes are independent.
    like
        Tensor or named tensors.

    Returns
    -------
    TensorOrTensors
        Multiples of 2**-24.
    """
    if isinstance(like, Tensors):
        return Tensors((name, draw_uniform(key, f"{purpose}/{name}", value)) for name, value in like.items())
    return generate_uniform(_derive_key(key, purpose, like.device), like.shape).to(like.dtype)


def draw_normal(key: Tensor, purpose: str, like: TensorOrTensors) -> TensorOrTensors:
    """Draw standard normal numbers with the names, shapes, dtype and device of ``like``.

    The parameters are those of :func:`draw_uniform`. Source: Box and Muller, A note on the generation of random normal
    deviates, 1958.
    """
    if isinstance(like, Tensors):
        return Tensors((name, draw_normal(key, f"{purpose}/{name}", value)) for name, value in like.items())
    radius, angle = (
        generate_uniform(_derive_key(key, f"{purpose}/{part}", like.device), like.shape).double()
        for part in ("radius", "angle")
    )
    return ((-2 * (1 - radius).log()).sqrt() * (2 * math.pi * angle).cos()).to(like.dtype)


def _derive_key(key: Tensor | None, purpose: str, device: torch.device) -> Tensor:
    """Derive the key of a purpose on a device."""
    if key is None:
        raise HookError(
            "The key of draw_normal and draw_uniform is None. batch.noise_key exists only in Train passes without "
            "`eval_mode`, if the class has `needs_step_noise: ClassVar[bool] = True`."
        )
    digest = hashlib.sha256(purpose.encode()).digest()
    return mix_bits(key.to(device)) + int.from_bytes(digest[:8], "little", signed=True)


def generate_uniform(key: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Uniform numbers in [0, 1), float32, as a function of the key: the same on every device and in every stack.

    Each is 24 bits of SplitMix64 (Steele et al., 2014) at its index in the tensor.
    """
    z = (torch.arange(1, math.prod(shape) + 1, device=key.device) + mix_bits(key)) * _GOLDEN
    return ((mix_bits(z) >> 40) & 0xFFFFFF).to(torch.float32).reshape(shape) / 2**24


def generate_uniform_in_chunks(key: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The same numbers for one client on the CPU, in chunks that fit into a cache, which is several times as fast."""
    values = np.empty(math.prod(shape), np.float32)
    offset = int(mix_bits(key))
    z, scratch = np.empty((2, CHUNK), np.uint64)
    for first in range(0, len(values), CHUNK):
        chunk = values[first : first + CHUNK]
        z, scratch = z[: len(chunk)], scratch[: len(chunk)]
        np.add(_ONE_TO_CHUNK[: len(chunk)], np.uint64((offset + first) % 2**64), out=z)
        z *= np.uint64(_GOLDEN % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z ^= np.right_shift(z, np.uint64(shift), out=scratch)
            if factor > 1:
                z *= np.uint64(factor)
        z >>= np.uint64(40)
        chunk[:] = z
    values /= np.float32(2**24)
    return torch.from_numpy(values.reshape(shape))


def _to_signed_int64(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


_GOLDEN = _to_signed_int64(0x9E3779B97F4A7C15)
_ONE_TO_CHUNK = np.arange(1, CHUNK + 1, dtype=np.uint64)


def mix_bits(z: Tensor) -> Tensor:
    """Finalizer of SplitMix64 on 64-bit integers with wraparound."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _to_signed_int64(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _to_signed_int64(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))
