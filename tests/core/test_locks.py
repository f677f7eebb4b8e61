"""Locks between processes."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import locks
from tests.errors import rejects


def test_waiting_process_prints_name_of_lock_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder/archive.lock"
    path.parent.mkdir()
    other_lock = FileLock(path)
    other_lock.acquire()

    class ReleasingStream(io.StringIO):
        """The other process releases its lock after the message."""

        def write(self, text: str) -> int:
            other_lock.release()
            return super().write(text)

    stream = ReleasingStream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(locks, "PATIENCE", 0.01)
    with locks.lock_file(path):
        assert f"waiting for {path}," in stream.getvalue()
        with pytest.raises(Timeout):
            other_lock.acquire(timeout=0)
    other_lock.acquire(timeout=0)
    other_lock.release()


def test_lock_in_unusable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    path = tmp_path / "folder/archive.lock"
    with rejects(f"{path} can't be locked", ArtifactError), locks.lock_file(path):
        pass
