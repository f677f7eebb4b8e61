"""FedAvg with slow or failing rounds, for tests of faults. Its bits are those of FedAvg."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpipe.algorithms.fedavg import FedAvg

ROUND_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class Slow(FedAvg):
    """Rounds that sleep for five seconds until a file ``hurry`` exists. Another ``copy`` is another run."""

    copy: int = 0

    def aggregate(self, server, uploads):
        over = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < over and not Path("hurry").exists():
            time.sleep(0.1)
        return super().aggregate(server, uploads)


@dataclass(frozen=True, kw_only=True)
class Endless(FedAvg):
    """A round that takes longer than the time limit of any job."""

    copy: int = 0

    def aggregate(self, server, uploads):
        while not Path("hurry").exists():
            time.sleep(0.1)
        return super().aggregate(server, uploads)


@dataclass(frozen=True, kw_only=True)
class Hungry(Slow):
    """Rounds that use 1.6 GB more memory than others, until a file ``hurry`` exists."""

    def aggregate(self, server, uploads):
        eaten = None if Path("hurry").exists() else np.ones(200_000_000)
        combined = super().aggregate(server, uploads)
        del eaten
        return combined


@dataclass(frozen=True, kw_only=True)
class Once(Slow):
    """A round that fails at its end if a file ``fail-once`` exists. It deletes this file."""

    def aggregate(self, server, uploads):
        combined, fault = super().aggregate(server, uploads), Path("fail-once")
        if fault.exists():
            fault.unlink()
            raise RuntimeError("a fault of the test")
        return combined
