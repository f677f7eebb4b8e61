"""Memory that a process has once had stays with it: a step of training takes again what the last one gave back.

By default the C library returns large blocks to the system, which hands them out again page by page, each filled with
zeros first: with small batches that costs as much as a convolution.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

#: Options of glibc's mallopt: to return nothing, to take that much more whenever more is needed (in a thread's memory,
#: to keep a region that is empty), and to take all blocks but larger ones from what is kept.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = (-1, 2**31 - 1), (-2, 2**26), (-3, 2**30)


def keep_pages() -> None:
    """Let malloc keep what it has, in all threads; where it is not glibc's, it stays as it is."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option in (TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD):
            mallopt(*option)
