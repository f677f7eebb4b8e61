"""Algorithms for tests of faults: FedAvg whose rounds last, and fail, as the test wants; their bits are FedAvg's."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpipe.algorithms.fedavg import FedAvg

ROUND_SECONDS = 2


@dataclass(frozen=True, kw_only=True)
class Slow(FedAvg):
    """Rounds that last and need no core, until there is a file ``hurry``; another ``copy`` is another run."""

    copy: int = 0

    def aggregate(self, server, uploads):
        over = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < over and not Path("hurry").exists():
            time.sleep(0.1)
        return super().aggregate(server, uploads)


@dataclass(frozen=True, kw_only=True)
class Endless(FedAvg):
    """A round that takes longer than any job may."""

    copy: int = 0

    def aggregate(self, server, uploads):
        while not Path("hurry").exists():
            time.sleep(0.1)
        return super().aggregate(server, uploads)


@dataclass(frozen=True, kw_only=True)
class Hungry(Slow):
    """Wants 1.5 GB more than others, for as long as its rounds last."""

    def aggregate(self, server, uploads):
        eaten = np.ones(200_000_000)
        combined = super().aggregate(server, uploads)
        del eaten
        return combined


@dataclass(frozen=True, kw_only=True)
class Once(Slow):
    """Fails at the end of its round if there is a file ``fail-once``, and takes that away."""

    def aggregate(self, server, uploads):
        combined, fault = super().aggregate(server, uploads), Path("fail-once")
        if fault.exists():
            fault.unlink()
            raise RuntimeError("a fault of the test")
        return combined
