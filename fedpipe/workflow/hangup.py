"""Ends Snakemake gracefully if its terminal is closed."""

from __future__ import annotations

import os
import signal
import stat
from types import FrameType

OUTPUT_STREAMS = (1, 2)


def install_hangup_handler() -> None:
    """End Snakemake like after SIGTERM, if its terminal is closed or its connection is lost.

    By default, SIGHUP kills Snakemake, and its lock remains. After SIGTERM it starts no more jobs, waits for those that
    run, and deletes its lock. nohup still has its effect.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _end_without_terminal)


def _end_without_terminal(number: int, frame: FrameType | None) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in OUTPUT_STREAMS:
        if not stat.S_ISREG(os.fstat(stream).st_mode):  # writing to a closed terminal is an error
            os.dup2(null, stream)
    signal.raise_signal(signal.SIGTERM)
