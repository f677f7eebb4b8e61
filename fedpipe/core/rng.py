"""Random numbers as a function of (seed, purpose, round, client).

Each use has its own stream, so that no generator state is saved. A run draws the same numbers after a resume and for
any division into jobs.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive_entropy(seed: int, purpose: str, round_number: int = 0, client: int = 0) -> int:
    """128 bits of seed material for this use."""
    text = f"{seed}/{purpose}/{round_number}/{client}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def make_generator(seed: int, purpose: str, round_number: int = 0, client: int = 0) -> np.random.Generator:
    """NumPy generator for one purpose, round and client (0 if they do not apply)."""
    return np.random.Generator(np.random.PCG64(derive_entropy(seed, purpose, round_number, client)))
