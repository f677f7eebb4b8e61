"""Independent and identically distributed clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from fedpipe.data.partitions.base import Integers, Scheme


@dataclass(frozen=True, kw_only=True)
class IID(Scheme):
    """Samples are shuffled and cut into parts whose sizes differ by at most one."""

    @override
    def assign(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        return rng.permutation(np.arange(len(labels)) % num_clients)
