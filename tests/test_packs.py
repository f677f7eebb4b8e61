"""A folder's small files as one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fedpipe import artifacts, packs
from fedpipe.artifacts import RunFiles
from fedpipe.errors import ArtifactError
from tests import studies


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """Two rounds of three files each, one of them with a tensor file."""
    files = RunFiles(tmp_path / "run")
    for number in (0, 1):
        artifacts.write_json(files.round(number).marker, {"round": number})
        artifacts.write_json(files.round(number).times, {"train": number})
        artifacts.write_parquet(files.round(number).metrics, pa.table({"round": [number]}))
    artifacts.write_bytes(files.round(1).server, b"tensors")
    return files


def every(run: RunFiles) -> list[Path]:
    return [path for number in (0, 1) for path in (run.round(number).marker, run.round(number).metrics)]


def test_packed_files_are_read_where_they_were(run: RunFiles) -> None:
    hashes = {path: artifacts.sha256_of(path) for path in every(run)}
    artifacts.pack(run.history)
    assert [path for path in run.path.rglob("*") if path.is_file()] == [run.path / "rounds.zip", run.round(1).server]
    assert not run.round(0).path.exists(), "an empty folder is gone"
    assert {path: artifacts.sha256_of(path) for path in every(run)} == hashes
    for path, sha256 in hashes.items():
        assert artifacts.exists(path)
        assert artifacts.intact(path, sha256)
        assert not artifacts.intact(path, "0")
    assert artifacts.read_json(run.round(1).marker, hashes[run.round(1).marker]) == {"round": 1}
    assert artifacts.read_parquet(run.round(1).metrics, hashes[run.round(1).metrics]).to_pydict() == {"round": [1]}
    assert run.complete() == [0, 1]
    assert not artifacts.exists(run.round(0).server)
    assert not artifacts.intact(run.round(0).server, "0")
    assert artifacts.place(run.round(1).metrics) == f"{run.path}/rounds.zip/0001/metrics.parquet"
    assert artifacts.place(run.round(0).server) == str(run.round(0).server)
    with pytest.raises(ArtifactError, match=r"rounds/0002/round\.json is missing"):
        artifacts.read_json(run.round(2).marker)
    with pytest.raises(ArtifactError, match=r"rounds\.zip/0001/round\.json is damaged: .* should be 000"):
        artifacts.read_json(run.round(1).marker, "0" * 64)


def test_bytes_depend_on_names_and_contents_alone(run: RunFiles, tmp_path: Path) -> None:
    artifacts.pack(run.history)
    assert packs.join({"b/2": b"two", "a/1": b"one"}) == packs.join({"a/1": b"one", "b/2": b"two"})
    once = packs.of(run.history).read_bytes()
    artifacts.unpack(run.history)
    artifacts.pack(run.history)
    assert packs.of(run.history).read_bytes() == once
    with zipfile.ZipFile(packs.of(run.history)) as archive:
        assert archive.testzip() is None


def test_unpacked_files_are_as_old_as_the_pack(run: RunFiles) -> None:
    """So that Snakemake finds none newer than another."""
    before = {path: path.read_bytes() for path in every(run)}
    artifacts.pack(run.history)
    made = packs.of(run.history).stat().st_mtime_ns
    artifacts.unpack(run.history)
    artifacts.unpack(run.history)
    assert {path: path.read_bytes() for path in every(run)} == before
    assert {path.stat().st_mtime_ns for path in every(run)} == {made}
    assert not packs.of(run.history).exists()


def test_files_that_lie_there_are_newer_than_the_pack(run: RunFiles) -> None:
    artifacts.pack(run.history)
    artifacts.write_json(run.round(1).times, {"train": 7})
    artifacts.write_json(run.round(2).marker, {"round": 2})
    assert artifacts.read_json(run.round(1).times) == {"train": 7}
    assert run.complete() == [0, 1, 2]
    artifacts.pack(run.history)
    assert artifacts.read_json(run.round(1).times) == {"train": 7}
    assert artifacts.read_json(run.round(0).times) == {"train": 0}
    assert run.complete() == [0, 1, 2]


@pytest.mark.parametrize("name", ["sweep", "pack"])
def test_a_write_survives_another_process_that_begins_with_the_run(
    run: RunFiles, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the write, or just before it, when the folder is there but empty."""
    step, real = ("fsync", os.fsync) if name == "sweep" else ("mkstemp", tempfile.mkstemp)
    module = os if name == "sweep" else tempfile
    run.round(2).path.mkdir()

    def disturbed(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(module, step, real)
        if name == "sweep":
            artifacts.sweep(run.path)
        else:
            run.round(2).path.rmdir()
        return real(*args, **more)

    monkeypatch.setattr(module, step, disturbed)
    artifacts.write_json(run.round(2).marker, {"round": 2})
    assert artifacts.read_json(run.round(2).marker) == {"round": 2}
    assert not list(run.path.rglob("*.tmp"))


def test_a_damaged_pack_is_named_and_its_whole_members_stay(run: RunFiles) -> None:
    artifacts.pack(run.history)
    archive, member = packs.of(run.history), packs.read(run.round(1).metrics)
    data = bytearray(archive.read_bytes())
    data[data.index(member) + 10] ^= 1
    archive.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"rounds\.zip/0001/metrics\.parquet can't be read \(Bad CRC-32"):
        artifacts.read_parquet(run.round(1).metrics)
    assert not artifacts.intact(run.round(1).metrics, "0")
    assert artifacts.read_parquet(run.round(0).metrics).to_pydict() == {"round": [0]}
    artifacts.write_json(run.round(2).marker, {"round": 2})
    artifacts.pack(run.history)
    assert not artifacts.exists(run.round(1).metrics)
    assert run.complete() == [0, 1, 2]

    archive.write_bytes(archive.read_bytes()[:-30])
    assert run.complete() == []
    with pytest.raises(ArtifactError, match=r"rounds\.zip/0001/round\.json can't be read \(File is not a zip file"):
        artifacts.read_json(run.round(1).marker)


def test_a_record_that_does_not_name_the_file_is_named(tmp_path: Path) -> None:
    for record in ({}, [], {"other.parquet": "0"}):
        artifacts.write_json(tmp_path / "joined.json", record)
        with pytest.raises(ArtifactError, match=r"joined\.json does not tell the SHA-256 of metrics\.parquet"):
            artifacts.manifest(tmp_path / "metrics.parquet", "joined.json")


WRITER = """
import sys
from pathlib import Path
from fedpipe import artifacts
from fedpipe.artifacts import RunFiles

run, first = RunFiles(Path("run")), int(sys.argv[1])
for number in range(first, 60, 2):
    artifacts.write_json(run.round(number).times, {"train": 0})
    artifacts.write_json(run.round(number).marker, {"round": number})
    artifacts.write_json(run.round(number).times, {"train": number})
    artifacts.pack(run.history)
    assert artifacts.read_json(run.round(number).times) == {"train": number}
"""


def test_segments_of_two_studies_pack_one_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, as of studies of two lengths: what one packs, the other does not lose."""
    monkeypatch.chdir(tmp_path)
    commands = [[sys.executable, "-c", WRITER, str(first)] for first in (0, 1)]
    working = [subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(studies.ROOT)}) for command in commands]
    assert [each.wait() for each in working] == [0, 0]
    run = RunFiles(Path("run"))
    assert run.complete() == list(range(60))
    assert [artifacts.read_json(run.round(number).times) for number in range(60)] == [{"train": n} for n in range(60)]
    artifacts.pack(run.history)
    assert not list(run.history.glob("*/*.json"))
    assert len(packs.names(packs.of(run.history))) == 120


def test_a_file_written_anew_while_it_is_packed_stays(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = run.round(1).times, packs.join

    def join(files: Any) -> bytes:
        if path.exists():
            path.write_bytes(artifacts.json_bytes({"train": 7}))
        return real(files)

    monkeypatch.setattr(packs, "join", join)
    artifacts.pack(run.history)
    assert path.exists()
    assert artifacts.read_json(path) == {"train": 7}
    monkeypatch.undo()
    artifacts.pack(run.history)
    assert artifacts.read_json(path) == {"train": 7}
    assert not path.exists()
