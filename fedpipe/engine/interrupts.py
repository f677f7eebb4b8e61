"""What SIGTERM means for a segment: Slurm sends it before the time limit, to preempt and to cancel, then SIGKILL."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 128 + signal.SIGTERM  #: exit status of a command that SIGTERM ended


@contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM interrupts nothing; the value tells whether it came, to be asked where one may stop."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)
