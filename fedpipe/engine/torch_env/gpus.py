"""Selects a GPU that no other job uses, as long as there is one."""

from __future__ import annotations

import fcntl
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_gpu_locks: list[TextIO] = []  # locks of this process, which end with it


def get_visible_gpu_ids(count: int) -> list[str]:
    """Indices or UUIDs on this machine of the GPUs that PyTorch sees. A job may see only some of them."""
    visible_ids = [gpu.strip() for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return (
        visible_ids[:count]
        if len(visible_ids) >= count and all(visible_ids)
        else [str(index) for index in range(count)]
    )


def acquire_gpu(gpus: Sequence[str]) -> int:
    """Acquire a GPU for this job and return its index. If there are more jobs than GPUs, they share them evenly.

    Jobs of one user coordinate by locks in the folder of temporary files.
    """
    folder = Path(tempfile.gettempdir()) / f"fedpipe-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for slot in itertools.count():
        for index, name in enumerate(gpus):
            lock = (folder / f"gpu-{name}-{slot}").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            _gpu_locks.append(lock)
            return index
    raise AssertionError("not reached")
