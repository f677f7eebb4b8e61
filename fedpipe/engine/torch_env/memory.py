"""Keeps freed memory in the process, so that the next training step can reuse it.

By default the C library returns large blocks to the system, which fills each page with zeros before it gives it back.
With small batches that costs as much as a convolution.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

#: Options of glibc's mallopt: never trim, how much to extend the heap (or to keep of a thread's empty region), and the
#: size above which blocks are mapped.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = (-1, 2**31 - 1), (-2, 2**26), (-3, 2**30)


def retain_freed_memory() -> None:
    """Let malloc keep freed memory in all threads. No effect without glibc."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option in (TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD):
            mallopt(*option)
