"""Locks between processes, also on different nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedpipe.core.errors import ArtifactError

PATIENCE = 60.0  #: seconds after which a waiting process names the lock


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Lock a file, and wait for the process that has locked it. The file and its folder are created.

    Raises an ArtifactError if the file can't be created or locked.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            print(
                f"fedpipe: waiting for {path}, which another process has locked. If no other process of fedpipe runs, "
                "press Ctrl+C, delete this lock and run again.",
                file=sys.stderr,
            )
            lock.acquire()
    except OSError as error:
        raise ArtifactError(f"{path} can't be locked ({error.strerror}). Fix this and run again.") from error
    try:
        yield
    finally:
        lock.release()
