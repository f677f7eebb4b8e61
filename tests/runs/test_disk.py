"""A full disk, a read-only folder, damaged files: found, named, made again or refused, and nothing else is touched."""

from __future__ import annotations

import contextlib
import json
import os
import pickle as pickles
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive, layout, packing
from fedpipe.core.storage.files import read_json, sha256_of, write_json
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine.blocks import Block
from fedpipe.engine.run import open_run
from fedpipe.settings.execution import Execution
from tests import small_studies as studies

ROUNDS = 3
#: A mount that nobody else sees; whoever is not root needs a name space of their own for it.
PRIVATE = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
MAY_MOUNT = (
    shutil.which("unshare") is not None
    and not subprocess.run([*PRIVATE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode
)
needs_mount = pytest.mark.skipif(not MAY_MOUNT, reason="needs mounts, which this machine does not permit")

#: Runs a segment in vain, on a disk that is full or read-only; then mends that, and runs it again.
MENDED = """
import json, subprocess, sys
from pathlib import Path
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine.run import Run
from fedpipe.core.errors import ArtifactError
from tests import small_studies as studies
path, mount, mend = sys.argv[1:]
def files():
    return {str(each): each.stat().st_mtime_ns for each in Path(path).rglob("*") if each.is_file()}
subprocess.run(mount, shell=True, check=True)
before = files()
try:
    list(Run(RunFiles(Path(path))).run_segment(3))
    said = "nothing"
except ArtifactError as error:
    said = str(error)
after, done = files(), studies.rounds(Path(path))
subprocess.run(mend, shell=True, check=True)
list(Run(RunFiles(Path(path))).run_segment(3))
kept = done.items() <= studies.rounds(Path(path)).items()
print(json.dumps({"said": said, "before": before, "after": after, "kept": kept, "bits": studies.bits(Path(path))}))
"""


def mended(path: str, mount: str, mend: str) -> dict:
    done = subprocess.run(
        [*PRIVATE, sys.executable, "-c", MENDED, path, mount, mend],
        env=os.environ | {"PYTHONPATH": str(studies.ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout)
    return found


def prepared() -> tuple[str, dict[str, str]]:
    """A run yet to begin, and the bits with which it ends."""
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS))
    path = str(made.runs[0].path)
    list(studies.open_runs(made)[0].run_segment(ROUNDS))
    once = studies.bits(Path(path))
    studies.forget(Path(path))
    return path, once


@needs_mount
def test_a_full_disk_is_named_and_once_there_is_room_it_goes_on() -> None:
    path, once = prepared()
    keep, small = f"cp {path}/run.yaml keep.yaml", f"mount -t tmpfs -o size=200k none {path}"
    found = mended(path, f"{keep} && {small} && cp keep.yaml {path}/run.yaml", f"mount -o remount,size=50m {path}")
    assert found["said"].startswith(f"{path}/rounds/000")
    assert "can't be written (No space left on device)" in found["said"]
    whole = [name for name in found["after"] if name.endswith("round.json")]
    assert 0 < len(whole) <= ROUNDS, "it should have filled in the middle"
    assert not [name for name in found["after"] if name.endswith(".tmp")]
    assert found["kept"]
    assert found["bits"] == once


@needs_mount
def test_a_read_only_folder_is_named_and_untouched() -> None:
    path, once = prepared()
    read_only = "mount --bind results results && mount -o remount,bind,ro results"
    found = mended(path, read_only, "mount -o remount,bind,rw results")
    assert found["said"].startswith(f"{path}/rounds/0000/server.pt can't be written (Read-only file system)")
    assert found["before"] == found["after"]
    assert found["bits"] == once


def test_no_round_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    run = studies.open_runs(studies.prepare(studies.settings(("scaffold",), ROUNDS)))[0]
    settled: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda stream: settled.append(Path(f"/proc/self/fd/{stream}").readlink()))
    list(run.run_segment(ROUNDS))
    assert settled == [archive.pack_path(run.files.rounds_folder).resolve()], (
        "only what takes the place of deleted files"
    )


def test_a_power_failure_at_any_deletion_costs_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves files whose bytes never came to the disk; nothing but fsync brings them there, at worst."""
    made = studies.prepare(studies.settings(("scaffold",), 6, artifacts={"keep_models": "last"}))
    run, folder = studies.open_runs(made)[0], Path(made.runs[0].path)
    settled: set[tuple[int, int]] = set()
    failures: list[tuple[int, Path]] = []

    def settle(stream: int) -> None:
        settled.add((os.fstat(stream).st_ino, os.fstat(stream).st_mtime_ns))

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".pt" and path.exists():
            left = Path(f"left-{len(failures)}")
            shutil.copytree(folder, left)
            for name in (file.relative_to(folder) for file in folder.rglob("*") if file.is_file()):
                stat = (folder / name).stat()
                if name.name != "run.yaml" and (stat.st_ino, stat.st_mtime_ns) not in settled:
                    (left / name).write_bytes(b"")
            failures.append((max(run.files.list_complete_rounds()), left))
        unlink(path, missing_ok)

    unlink = Path.unlink
    with monkeypatch.context() as watched:
        watched.setattr(os, "fsync", settle)
        watched.setattr(Path, "unlink", fail)
        list(run.run_segment(6))
    once = studies.bits(folder)
    assert len(failures) >= 4
    for number, left in failures:
        shutil.rmtree(folder)
        left.rename(folder)
        found, *_ = studies.open_runs(made)[0].run_segment(6)
        assert found >= number - 1
        assert studies.bits(folder) == once


class Harmful:
    def __reduce__(self):
        return (os.system, ("touch harm",))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def pickle(path: Path) -> None:
    torch.save({"model": Harmful()}, path)


def rest(*but: Path) -> dict[Path, tuple[int, int]]:
    """Every other file, with what changes when it is written."""
    stats = {path: path.stat() for path in Path("results").rglob("*") if path.is_file() and path not in but}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("data", truncate),
        ("data", pickle),
        ("assignment", flip),
        ("server", truncate),
        ("server", pickle),
        ("clients", flip),
        ("metrics", flip),
    ],
)
def test_a_damaged_file_is_named_or_made_again_and_nothing_else_is_touched(
    name: str, harm: Callable[[Path], None]
) -> None:
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS))
    run = studies.open_runs(made)[0]
    list(run.run_segment(ROUNDS))
    packing.unpack_folder(run.files.rounds_folder)
    last = run.files.round(ROUNDS)
    shared = {
        "data": layout.dataset_file(made.runs[0].dataset),
        "assignment": layout.assignment_file(made.runs[0].partition),
    }
    path = (
        shared.get(name) or {"server": last.server_state, "clients": last.client_states, "metrics": last.metrics}[name]
    )
    once, rounds = path.read_bytes(), set(last.path.iterdir()) | set((run.files.path / "segments").iterdir())
    packed = {member for member in run.files.rounds_folder.glob("*/*") if archive.is_packable(member)}
    harm(path)
    if name in shared:  # another rule made it, for other runs as well
        before = rest()
        with pytest.raises(ArtifactError, match=rf"^{path} is damaged"):
            studies.open_runs(made)
        assert rest() == before
    else:  # the segment's own: only its round is done again
        before = rest(*rounds, *packed)
        assert list(studies.open_runs(made)[0].run_segment(ROUNDS)) == [ROUNDS - 1, ROUNDS]
        assert rest(*rounds, archive.pack_path(run.files.rounds_folder)) == before
        packing.unpack_folder(run.files.rounds_folder)
        assert path.read_bytes() == once
    assert not Path("harm").exists()


def pickled(value: Any, path: Path) -> None:
    path.write_bytes(pickles.dumps(value))


def old(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("name", ["data", "server", "clients", "block"])
@pytest.mark.parametrize("write", [torch.save, old, pickled])
@pytest.mark.parametrize(
    "value", [{"model": Harmful()}, Harmful(), [torch.zeros(1)], torch.zeros(1), {"model": "a"}, {1: torch.zeros(1)}]
)
def test_what_is_no_tensor_is_refused_even_if_its_hash_is_vouched_for(
    name: str, write: Callable[[Any, Path], None], value: Any, vouched: Path
) -> None:
    """In each place of a run whose files come from elsewhere: nothing of it is executed."""
    (settings,) = vouched.glob("results/runs/*/*/run.yaml")
    files = RunFiles(settings.parent)
    last, (data,) = files.round(2), vouched.glob("results/data/*.pt")
    path = {
        "data": data,
        "server": last.server_state,
        "clients": last.client_states,
        "block": files.round(3).block_uploads(0),
    }[name]
    path.parent.mkdir(exist_ok=True)
    write(value, path)
    if name != "block":
        record = data.with_suffix(".json") if name == "data" else last.state_marker
        held = read_json(record)
        (held if name == "data" else held["sha256"])[path.name] = sha256_of(path)
        write_json(record, held)

    def read() -> None:
        run = open_run(files.path, Execution())
        run.load_server_state(2)
        run.load_kept_state(run.checkpoint.read_state_json(2)["participants"][0], 2)
        Block.read(files.round(3).block_uploads(0))

    with pytest.raises(ArtifactError, match=rf"^{path} can't be read \(") as error:
        read()
    assert "\n" not in str(error.value)
    assert not Path("harm").exists()


@pytest.fixture(scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        (run,) = studies.open_runs(studies.prepare(studies.settings(("scaffold",), 2)))
        list(run.run_segment(2))
        packing.unpack_folder(run.files.rounds_folder)
    return folder


@pytest.fixture
def vouched(_trained: Path, in_empty_folder: Path) -> Path:
    """A copy of a run of two rounds, in the current folder."""
    shutil.copytree(_trained, in_empty_folder, dirs_exist_ok=True)
    return Path()
