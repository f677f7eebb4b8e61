"""What SIGTERM means for a segment: Slurm sends it before the time limit, to preempt and to cancel, then SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGTERM_EXIT_STATUS = 128 + signal.SIGTERM  #: exit status of a command that SIGTERM ended


@contextmanager
def defer_sigterm(make_message: Callable[[], str]) -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM interrupts nothing; the value tells whether it came, to be asked where one may stop.

    What there is to ``make_message`` of it is printed at once, since SIGKILL may come before one can stop.
    """
    signals: list[int] = []

    def record_signal(number: int, frame: FrameType | None) -> None:
        if not signals:
            os.write(1, f"{make_message()}\n".encode())  # not print: it may have interrupted one
        signals.append(number)

    previous_handler = signal.signal(signal.SIGTERM, record_signal)
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
