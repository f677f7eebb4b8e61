"""Rounds in one zip: packing, unpacking and the lock between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive
from fedpipe.core.storage.files import fsync_files, read_bytes, refuse_elsewhere, remove, write_bytes

PACK_LOCK = Path(".snakemake/archive.lock")  #: held while a pack is written; neither git nor DVC looks there


def pack_folder(folder: Path) -> None:
    """Join the tables and manifests of a folder's folders into its pack, and delete them; tensors stay.

    They take the place of members with their names. Killed at any moment, each is there once or twice; so it is while
    others write, read and pack the same folder.

    Raises
    ------
    ArchiveError
        A member is damaged whose place none takes; nothing is written, and nothing deleted.
    """
    with _lock_packs():
        loose_files = {path: read_bytes(path) for path in sorted(folder.glob("*/*")) if archive.is_packable(path)}
        if loose_files:
            members = {archive.locate_member(path)[1]: data for path, data in loose_files.items()}
            write_bytes(
                archive.pack_path(folder),
                archive.build_pack(archive.read_members(archive.pack_path(folder), members) | members),
            )
            fsync_files(archive.pack_path(folder))
        for path, data in loose_files.items():
            with suppress(FileNotFoundError):
                _delete_if_unchanged(path, data)
            with suppress(OSError):  # tensors lie there
                path.parent.rmdir()


def _delete_if_unchanged(path: Path, data: bytes) -> None:
    """Delete a file if these are its bytes; who writes it anew at this very moment finds it there afterwards."""
    refuse_elsewhere(path.parent)
    if path.read_bytes() != data:
        return
    renamed_path = path.with_name(f".{path.name}.packed.tmp")
    path.replace(renamed_path)
    if renamed_path.read_bytes() != data:  # written anew between those two lines
        with suppress(FileExistsError):  # or once more since
            path.hardlink_to(renamed_path)
    renamed_path.unlink()


def unpack_folder(folder: Path) -> None:
    """Make files of a pack's members again, as old as the pack was; nothing where the pack is damaged.

    Raises
    ------
    ArchiveError
        The pack is not what we wrote.
    """
    pack_file = archive.pack_path(folder)
    if not pack_file.exists():
        return
    with _lock_packs(), suppress(FileNotFoundError):  # another has just unpacked it
        mtime_ns = pack_file.stat().st_mtime_ns
        for name, data in archive.read_members(pack_file).items():
            path = folder / name
            if not path.exists():
                write_bytes(path, data)
                os.utime(path, ns=(mtime_ns, mtime_ns))
        fsync_files(*(folder / name for name in archive.list_members(pack_file)))
        remove(pack_file)


@contextmanager
def _lock_packs() -> Iterator[None]:
    """While no other process of this clone, on any node, writes a pack: two that read the same one would lose files."""
    from filelock import FileLock

    lock = FileLock(PACK_LOCK)
    try:
        PACK_LOCK.parent.mkdir(exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise ArtifactError(f"{PACK_LOCK} can't be locked ({error.strerror}); fix that and run again.") from error
    try:
        yield
    finally:
        lock.release()


def delete_temporary_files(folder: Path) -> None:
    """Delete half-written files that a killed process left below a folder."""
    for path in folder.rglob(".*.tmp"):
        remove(path)
