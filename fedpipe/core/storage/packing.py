"""Packs rounds into one zip and unpacks them, with a lock between processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedpipe.core.storage import archive
from fedpipe.core.storage.files import fsync_files, read_bytes, reject_outside_links, remove_path, write_bytes
from fedpipe.core.storage.locks import lock_file

PACK_LOCK = Path(".snakemake/archive.lock")  #: lock for writing packs, which git and DVC ignore


def pack_folder(folder: Path) -> None:
    """Move the tables and manifests of a folder's subfolders into its pack. Tensors stay.

    They replace members with the same names. If another member is damaged, nothing is written or deleted. If the
    process is killed, each file exists once or twice. Other processes can write, read and pack the same folder.
    """
    pack_file = archive.get_pack_path(folder)
    with lock_file(PACK_LOCK):
        loose_files = {path: read_bytes(path) for path in sorted(folder.glob("*/*")) if archive.is_packable(path)}
        if loose_files:
            members = {archive.locate_pack_member(path)[1]: data for path, data in loose_files.items()}
            write_bytes(pack_file, archive.build_pack(archive.read_pack_members(pack_file, members) | members))
            fsync_files(pack_file)
        for path, data in loose_files.items():
            with suppress(FileNotFoundError):
                _delete_if_unchanged(path, data)
            with suppress(OSError):  # tensors remain there
                path.parent.rmdir()


def _delete_if_unchanged(path: Path, data: bytes) -> None:
    """Delete a file if these are its bytes. A file that is written at the same moment is kept."""
    reject_outside_links(path.parent)
    if path.read_bytes() != data:
        return
    renamed_path = path.with_name(f".{path.name}.packed.tmp")
    path.replace(renamed_path)
    if renamed_path.read_bytes() != data:  # written between these two lines
        with suppress(FileExistsError):  # or again since
            path.hardlink_to(renamed_path)
    renamed_path.unlink()


def unpack_folder(folder: Path) -> None:
    """Unpack all members with the time of the pack. Nothing is written if the pack is damaged."""
    pack_file = archive.get_pack_path(folder)
    if not pack_file.exists():
        return
    with lock_file(PACK_LOCK), suppress(FileNotFoundError):  # another process has unpacked it
        mtime_ns = pack_file.stat().st_mtime_ns
        members = archive.read_pack_members(pack_file)
        for name, data in members.items():
            path = folder / name
            if not path.exists():
                write_bytes(path, data)
                os.utime(path, ns=(mtime_ns, mtime_ns))
        fsync_files(*(folder / name for name in members))
        remove_path(pack_file)


def delete_temporary_files(folder: Path) -> None:
    """Delete half-written files that a killed process left below a folder."""
    for path in folder.rglob(".*.tmp"):
        remove_path(path)
