"""Algorithms for tests of faults: FedAvg whose rounds last, and fail, as the test wants; their bits are FedAvg's."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from fedpipe.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Slow(FedAvg):
    """Rounds of ROUND_SECONDS (environment) that need no core; another ``copy`` is another run."""

    copy: int = 0

    def combine(self, server, uploads):
        time.sleep(float(os.environ.get("ROUND_SECONDS", "0")))
        return super().combine(server, uploads)


@dataclass(frozen=True, kw_only=True)
class Once(Slow):
    """Fails in its next round if there is a file ``fail-once``, and takes that away."""

    def combine(self, server, uploads):
        fault = Path("fail-once")
        if fault.exists():
            fault.unlink()
            raise RuntimeError("a fault of the test")
        return super().combine(server, uploads)
