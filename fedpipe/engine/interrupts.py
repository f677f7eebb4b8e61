"""Handles SIGTERM in a segment. Slurm sends it at the time limit, to preempt and to cancel, before SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM  #: exit status of a command that SIGTERM ended


@contextmanager
def defer_sigterm(make_message: Callable[[], str]) -> Iterator[Callable[[], bool]]:
    """Defer SIGTERM within the block. The value is true once it came, and you check it when you can stop.

    ``make_message`` is printed at once, because SIGKILL may come before you can stop.
    """
    signals: list[int] = []

    def record_signal(number: int, frame: FrameType | None) -> None:
        if not signals:
            os.write(1, f"{make_message()}\n".encode())  # not print, which the signal may have interrupted
        signals.append(number)

    previous_handler = signal.signal(signal.SIGTERM, record_signal)
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
