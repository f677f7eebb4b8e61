"""What SIGTERM means for a segment: Slurm sends it before the time limit, to preempt and to cancel, then SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 128 + signal.SIGTERM  #: exit status of a command that SIGTERM ended


@contextmanager
def deferred(say: Callable[[], str]) -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM interrupts nothing; the value tells whether it came, to be asked where one may stop.

    What there is to ``say`` of it is printed at once, since SIGKILL may come before one can stop.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not came:
            os.write(1, f"{say()}\n".encode())  # not print: it may have interrupted one
        came.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)
