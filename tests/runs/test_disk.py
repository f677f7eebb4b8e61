"""A full disk, a read-only folder and damaged files are reported. No other file changes."""

import itertools
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
from fedpipe.core.storage.files import compute_file_sha256, read_json, write_json
from fedpipe.engine.blocks import Block
from fedpipe.engine.run import Run
from fedpipe.planning.planner import NewPlan
from fedpipe.settings.execution import Execution
from tests import small_studies as studies
from tests.runs.conftest import SCAFFOLD_ROUNDS

Scaffold = tuple[NewPlan, Run]
ROUNDS = SCAFFOLD_ROUNDS
#: A private mount. Without root it needs a new user namespace.
PRIVATE = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
MAY_MOUNT = (
    shutil.which("unshare") is not None
    and not subprocess.run([*PRIVATE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode
)
needs_mount = pytest.mark.skipif(not MAY_MOUNT, reason="needs mounts, which this machine does not permit")

#: Runs a segment on a full or read-only disk, repairs the disk, and runs it again.
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
    list(Run(RunFiles(Path(path))).run_segment(4))
    message = "nothing"
except ArtifactError as error:
    message = str(error)
after, rounds = files(), studies.read_round_times(Path(path))
subprocess.run(mend, shell=True, check=True)
list(Run(RunFiles(Path(path))).run_segment(4))
has_kept_rounds = rounds.items() <= studies.read_round_times(Path(path)).items()
result = {"message": message, "before": before, "after": after, "has_kept_rounds": has_kept_rounds}
print(json.dumps(result | {"bits": studies.hash_results(Path(path))}))
"""


def run_on_broken_disk(path: str, mount: str, mend: str) -> dict:
    process = subprocess.run(
        [*PRIVATE, sys.executable, "-c", MENDED, path, mount, mend],
        env=os.environ | {"PYTHONPATH": str(studies.ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    result: dict = json.loads(process.stdout)
    return result


@pytest.fixture
def empty_run(scaffold: Scaffold) -> tuple[str, dict[str, str]]:
    """The path of a run without rounds, and the bits of all its rounds."""
    _, run = scaffold
    expected = studies.hash_results(run.files.path)
    studies.delete_rounds(run.files.path)
    return str(run.files.path), expected


@pytest.mark.slow
@needs_mount
def test_run_reports_full_disk_and_resumes(empty_run: tuple[str, dict[str, str]]) -> None:
    path, expected = empty_run
    keep, small = f"cp {path}/run.yaml keep.yaml", f"mount -t tmpfs -o size=200k none {path}"
    result = run_on_broken_disk(
        path, f"{keep} && {small} && cp keep.yaml {path}/run.yaml", f"mount -o remount,size=50m {path}"
    )
    assert result["message"].startswith(f"{path}/rounds/000")
    assert "can't be written (No space left on device)" in result["message"]
    complete_rounds = [name for name in result["after"] if name.endswith("round.json")]
    assert 0 < len(complete_rounds) <= ROUNDS, "the disk should fill during the run"
    assert not [name for name in result["after"] if name.endswith(".tmp")]
    assert result["has_kept_rounds"]
    assert result["bits"] == expected


@needs_mount
def test_run_reports_read_only_folder_and_changes_no_file(empty_run: tuple[str, dict[str, str]]) -> None:
    path, expected = empty_run
    read_only = "mount --bind results results && mount -o remount,bind,ro results"
    result = run_on_broken_disk(path, read_only, "mount -o remount,bind,rw results")
    assert result["message"].startswith(f"{path}/rounds/0000/server.pt can't be written (Read-only file system)")
    assert result["before"] == result["after"]
    assert result["bits"] == expected


def test_run_syncs_only_pack_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    run = studies.open_runs(studies.prepare(studies.settings(("scaffold",), ROUNDS)))[0]
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda stream: synced.append(Path(f"/proc/self/fd/{stream}").readlink()))
    list(run.run_segment(ROUNDS))
    assert synced == [archive.get_pack_path(run.files.rounds_folder).resolve()], "only the pack replaces deleted files"


def test_power_failure_at_any_deletion_repeats_at_most_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """At worst, the disk contains only the bytes of synced files."""
    plan = studies.prepare(studies.settings(("scaffold",), 6, artifacts={"keep_models": "last"}))
    run, folder = studies.open_runs(plan)[0], Path(plan.runs[0].path)
    synced: set[tuple[int, int]] = set()
    failures: list[tuple[int, Path]] = []

    def record_fsync(stream: int) -> None:
        synced.add((os.fstat(stream).st_ino, os.fstat(stream).st_mtime_ns))

    def record_failure(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".pt" and path.exists():
            copied_folder = Path(f"left-{len(failures)}")
            shutil.copytree(folder, copied_folder)
            for name in (file.relative_to(folder) for file in folder.rglob("*") if file.is_file()):
                stat = (folder / name).stat()
                if name.name != "run.yaml" and (stat.st_ino, stat.st_mtime_ns) not in synced:
                    (copied_folder / name).write_bytes(b"")
            failures.append((max(run.files.list_complete_rounds()), copied_folder))
        unlink(path, missing_ok)

    unlink = Path.unlink
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", record_fsync)
        patch.setattr(Path, "unlink", record_failure)
        list(run.run_segment(6))
    expected = studies.hash_results(folder)
    assert len(failures) >= 4
    for number, copied_folder in failures:
        shutil.rmtree(folder)
        copied_folder.rename(folder)
        result, *_ = studies.open_runs(plan)[0].run_segment(6)
        assert result >= number - 1
        assert studies.hash_results(folder) == expected


class Harmful:
    def __reduce__(self):
        return (os.system, ("touch harm",))


def truncate_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def write_pickle(path: Path) -> None:
    torch.save({"model": Harmful()}, path)


def stat_other_files(*excluded: Path) -> dict[Path, tuple[int, int]]:
    """Return the inodes and modification times of all other files."""
    stats = {path: path.stat() for path in Path("results").rglob("*") if path.is_file() and path not in excluded}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("data", truncate_file),
        ("data", write_pickle),
        ("assignment", flip_bit),
        ("server", truncate_file),
        ("server", write_pickle),
        ("clients", flip_bit),
        ("metrics", flip_bit),
    ],
)
def test_damaged_file_is_reported_or_recomputed_without_other_changes(
    name: str, damage: Callable[[Path], None], scaffold: Scaffold
) -> None:
    plan, run = scaffold
    packing.unpack_folder(run.files.rounds_folder)
    last_round = run.files.get_round_files(ROUNDS)
    shared = {
        "data": layout.get_dataset_path(plan.runs[0].dataset),
        "assignment": layout.get_assignment_path(plan.runs[0].partition),
    }
    path = (
        shared.get(name)
        or {"server": last_round.server_state, "clients": last_round.client_states, "metrics": last_round.metrics}[name]
    )
    expected, rounds = path.read_bytes(), set(last_round.path.iterdir()) | set((run.files.path / "segments").iterdir())
    packed = {member for member in run.files.rounds_folder.glob("*/*") if archive.is_packable(member)}
    damage(path)
    if name in shared:  # another rule writes it, and other runs use it
        stats_before = stat_other_files()
        with pytest.raises(ArtifactError, match=rf"^{path} is damaged"):
            studies.open_runs(plan)
        assert stat_other_files() == stats_before
    else:  # the segment writes it, so only its round is recomputed
        stats_before = stat_other_files(*rounds, *packed)
        assert list(studies.open_runs(plan)[0].run_segment(ROUNDS)) == [ROUNDS - 1, ROUNDS]
        assert stat_other_files(*rounds, archive.get_pack_path(run.files.rounds_folder)) == stats_before
        packing.unpack_folder(run.files.rounds_folder)
        assert path.read_bytes() == expected
    assert not Path("harm").exists()


def write_plain_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickles.dumps(value))


def write_legacy_file(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


WRITERS = (torch.save, write_legacy_file, write_plain_pickle)
INVALID = ({"model": Harmful()}, Harmful(), [torch.zeros(1)], torch.zeros(1), {"model": "a"}, {1: torch.zeros(1)})


@pytest.mark.parametrize(
    ("name", "write", "value"),
    [
        *itertools.product(["server"], WRITERS, INVALID),
        *itertools.product(["data", "clients", "block"], [torch.save], INVALID[:1]),
    ],
)
def test_files_without_valid_tensors_are_rejected_despite_matching_sha256(
    name: str, write: Callable[[Any, Path], None], value: Any, scaffold: Scaffold
) -> None:
    """Code in files from elsewhere is not executed."""
    files = scaffold[1].files
    packing.unpack_folder(files.rounds_folder)
    last_round, (data,) = files.get_round_files(ROUNDS), Path().glob("results/data/*.pt")
    path = {
        "data": data,
        "server": last_round.server_state,
        "clients": last_round.client_states,
        "block": files.get_round_files(ROUNDS + 1).get_block_uploads_path(0),
    }[name]
    path.parent.mkdir(exist_ok=True)
    write(value, path)
    if name != "block":
        record = data.with_suffix(".json") if name == "data" else last_round.complete_states_marker
        manifest = read_json(record)
        (manifest if name == "data" else manifest["sha256"])[path.name] = compute_file_sha256(path)
        write_json(record, manifest)

    def read_states() -> None:
        run = Run(files, Execution())
        run.load_server_state(ROUNDS)
        run.load_kept_state(run.checkpoint.read_state_json(ROUNDS)["participants"][0], ROUNDS)
        Block.read(files.get_round_files(ROUNDS + 1).get_block_uploads_path(0))

    with pytest.raises(ArtifactError, match=rf"^{path} can't be read \(") as error:
        read_states()
    assert "\n" not in str(error.value)
    assert not Path("harm").exists()
