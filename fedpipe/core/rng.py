"""Every random number of an experiment: a function of (seed, purpose, round, client), never of what ran before.

Because each use opens its own stream, no generator's state has to be saved: a run that resumes, or that is cut into
other jobs, draws the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def entropy(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """128 bits that belong to this use alone."""
    text = f"{seed}/{purpose}/{round}/{client}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A NumPy generator for one purpose in one round at one client (0 where they do not matter)."""
    return np.random.Generator(np.random.PCG64(entropy(seed, purpose, round, client)))
