"""Packs, which contain the small files of a folder."""

import copy
import io
import os
import re
import secrets
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive, files, layout, packing
from fedpipe.core.storage.archive import PackError
from fedpipe.core.storage.layout import RoundFiles, RunFiles
from tests import small_studies as studies


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """Write two rounds of three files each. The second also has a tensor file."""
    run = RunFiles(tmp_path / "run")
    for number in (0, 1):
        round_files = run.get_round_files(number)
        files.write_json(round_files.marker, {"round": number})
        files.write_json(round_files.times, {"train": number})
        files.write_parquet(round_files.metrics, pa.table({"round": [number]}))
    files.write_bytes(run.get_round_files(1).server_state, b"tensors")
    return run


def list_small_files(run: RunFiles) -> list[Path]:
    rounds = map(run.get_round_files, (0, 1))
    return [path for round_files in rounds for path in (round_files.marker, round_files.metrics)]


def read_contents(folder: Path) -> dict[Path, bytes]:
    """Read all files of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pack_that_grows_while_it_is_opened_is_intact(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may replace the pack, while this one still has the old size in its cache (NFS)."""
    pack_path = archive.get_pack_path(run.rounds_folder)
    files.write_bytes(pack_path, archive.build_pack({"0000/round.json": b"{}"}))
    old_stat = pack_path.stat()
    files.write_bytes(pack_path, archive.build_pack({"0000/round.json": b"{}", "0001/metrics.parquet": bytes(9999)}))
    monkeypatch.setattr(Path, "stat", lambda path: old_stat)
    assert archive.list_pack_members(pack_path) == ["0000/round.json", "0001/metrics.parquet"]


def test_packed_files_are_read_by_original_paths(run: RunFiles) -> None:
    first_round, second_round = run.get_round_files(0), run.get_round_files(1)
    hashes = {path: files.compute_file_sha256(path) for path in list_small_files(run)}
    packing.pack_folder(run.rounds_folder)
    assert [*read_contents(run.path)] == [run.path / "rounds.zip", second_round.server_state]
    assert not first_round.path.exists(), "packing deletes empty folders"
    assert {path: files.compute_file_sha256(path) for path in list_small_files(run)} == hashes
    for path, sha256 in hashes.items():
        assert files.is_stored(path)
        assert files.is_intact(path, sha256)
        assert not files.is_intact(path, "0")
    assert files.read_json(second_round.marker, hashes[second_round.marker]) == {"round": 1}
    assert files.read_parquet(second_round.metrics, hashes[second_round.metrics]).to_pydict() == {"round": [1]}
    assert run.list_complete_rounds() == [0, 1]
    assert not files.is_stored(first_round.server_state)
    assert not files.is_intact(first_round.server_state, "0")
    assert files.format_display_path(second_round.metrics) == f"{run.path}/rounds.zip/0001/metrics.parquet"
    assert files.format_display_path(first_round.server_state) == str(first_round.server_state)
    with pytest.raises(ArtifactError, match=r"rounds/0002/round\.json is missing"):
        files.read_json(run.get_round_files(2).marker)
    with pytest.raises(ArtifactError, match=r"rounds\.zip is damaged: the SHA-256 of 0001/round\.json "):
        files.read_json(second_round.marker, "0" * 64)


def test_pack_bytes_depend_only_on_names_and_contents(run: RunFiles, tmp_path: Path) -> None:
    packing.pack_folder(run.rounds_folder)
    assert archive.build_pack({"b/2": b"two", "a/1": b"one"}) == archive.build_pack({"a/1": b"one", "b/2": b"two"})
    data = archive.get_pack_path(run.rounds_folder).read_bytes()
    packing.unpack_folder(run.rounds_folder)
    packing.pack_folder(run.rounds_folder)
    assert archive.get_pack_path(run.rounds_folder).read_bytes() == data
    with zipfile.ZipFile(archive.get_pack_path(run.rounds_folder)) as pack:
        assert pack.testzip() is None


def test_unpacked_files_have_modification_time_of_pack(run: RunFiles) -> None:
    """If unpacked files were newer than the pack, Snakemake would recompute what depends on them."""
    contents = {path: path.read_bytes() for path in list_small_files(run)}
    packing.pack_folder(run.rounds_folder)
    mtime_ns = archive.get_pack_path(run.rounds_folder).stat().st_mtime_ns
    packing.unpack_folder(run.rounds_folder)
    packing.unpack_folder(run.rounds_folder)
    assert {path: path.read_bytes() for path in list_small_files(run)} == contents
    assert {path.stat().st_mtime_ns for path in list_small_files(run)} == {mtime_ns}
    assert not archive.get_pack_path(run.rounds_folder).exists()


def test_loose_files_override_packed_files(run: RunFiles) -> None:
    packing.pack_folder(run.rounds_folder)
    files.write_json(run.get_round_files(1).times, {"train": 7})
    files.write_json(run.get_round_files(2).marker, {"round": 2})
    assert files.read_json(run.get_round_files(1).times) == {"train": 7}
    assert run.list_complete_rounds() == [0, 1, 2]
    packing.pack_folder(run.rounds_folder)
    assert files.read_json(run.get_round_files(1).times) == {"train": 7}
    assert files.read_json(run.get_round_files(0).times) == {"train": 0}
    assert run.list_complete_rounds() == [0, 1, 2]


@pytest.mark.parametrize("name", ["sweep", "pack"])
def test_write_survives_cleanup_by_other_process(run: RunFiles, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cleanup happens during the write, or just before it, when the folder exists but is empty."""
    module, step = (Path, "replace") if name == "sweep" else (secrets, "token_hex")
    original = getattr(module, step)
    run.get_round_files(2).path.mkdir()

    def disturb_write(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(module, step, original)
        if name == "sweep":
            packing.delete_temporary_files(run.path)
        else:
            run.get_round_files(2).path.rmdir()
        return original(*args, **kwargs)

    monkeypatch.setattr(module, step, disturb_write)
    files.write_json(run.get_round_files(2).marker, {"round": 2})
    assert files.read_json(run.get_round_files(2).marker) == {"round": 2}
    assert not list(run.path.rglob("*.tmp"))


def test_damaged_pack_member_raises_until_rewritten(run: RunFiles) -> None:
    packing.pack_folder(run.rounds_folder)
    pack, member = archive.get_pack_path(run.rounds_folder), archive.read_pack_member(run.get_round_files(1).metrics)
    data = bytearray(pack.read_bytes())
    data[data.index(member) + 10] ^= 1
    pack.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"rounds\.zip can't be read \(0001/metrics\.parquet: Bad CRC-32"):
        files.read_parquet(run.get_round_files(1).metrics)
    assert not files.is_intact(run.get_round_files(1).metrics, "0")
    assert files.read_parquet(run.get_round_files(0).metrics).to_pydict() == {"round": [0]}
    files.write_json(run.get_round_files(2).marker, {"round": 2})
    for step in (packing.pack_folder, packing.unpack_folder):
        with pytest.raises(PackError, match=r"rounds\.zip is damaged \(Bad CRC-32 for file '0001/metrics\.parquet'\)"):
            step(run.rounds_folder)
        assert pack.read_bytes() == data
        assert run.get_round_files(2).marker.exists(), "a failed step keeps the loose file"
    files.write_parquet(run.get_round_files(1).metrics, pa.table({"round": [1]}))
    packing.pack_folder(run.rounds_folder)
    assert files.read_parquet(run.get_round_files(1).metrics).to_pydict() == {"round": [1]}
    assert run.list_complete_rounds() == [0, 1, 2]


WORD = b"word" * 100


def build_archive(
    *members: tuple[str, bytes], compress: int = zipfile.ZIP_STORED, attributes: int = 0o600 << 16
) -> bytes:
    """Build a ZIP archive whose members have arbitrary names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zip_file, warnings.catch_warnings(action="ignore"):
        for name, data in members:
            member = zipfile.ZipInfo(name, archive.MEMBER_TIMESTAMP)
            member.external_attr, member.compress_type = attributes, compress
            zip_file.writestr(member, data)
    return buffer.getvalue()


def build_overlapping_archive() -> bytes:
    """Build an archive whose members share their bytes, so that their total size is many times the file's size."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zip_file:
        zip_file.writestr(zipfile.ZipInfo("0001/round.json", archive.MEMBER_TIMESTAMP), WORD * 100)
        (member,) = zip_file.filelist
        for number in range(2, 1000):
            other = copy.copy(member)
            other.filename = other.orig_filename = f"{number:04d}/round.json"
            zip_file.filelist.append(other)
    return buffer.getvalue()


HOSTILE = {
    "upwards": lambda: build_archive(("../../PWNED", WORD)),
    "upwards from a round": lambda: build_archive(("0001/../../../round.json", WORD)),
    "absolute": lambda: build_archive((f"{tempfile.gettempdir()}/PWNED/round.json", WORD)),
    "backslashes": lambda: build_archive(("..\\..\\PWNED", WORD)),
    "another name": lambda: build_archive(("0001/PWNED.json", WORD)),
    "a tensor file": lambda: build_archive(("0001/server.pt", WORD)),
    "another case": lambda: build_archive(("0001/ROUND.JSON", WORD)),
    "other digits": lambda: build_archive(("٠٠٠١/round.json", WORD)),
    "a new line": lambda: build_archive(("0001/round.json\n", WORD)),
    "a zero byte": lambda: build_archive(("0001/round.json", WORD)).replace(b"0001/round.json", b"0001/round.\0son"),
    "a folder": lambda: build_archive(("0001/", b"")),
    "twice": lambda: build_archive(("0001/round.json", b"{}"), ("0001/round.json", WORD)),
    "compressed": lambda: build_archive(("0001/round.json", bytes(10**6)), compress=zipfile.ZIP_DEFLATED),
    "compressed otherwise": lambda: build_archive(("0001/round.json", bytes(10**6)), compress=zipfile.ZIP_LZMA),
    "the same bytes many times": build_overlapping_archive,
    "encrypted": lambda: build_archive(("0001/round.json", WORD)).replace(
        b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"
    ),
    "cut": lambda: build_archive(("0001/round.json", WORD))[:-30],
    "empty": lambda: b"",
    "no archive": lambda: WORD,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pack_is_rejected(run: RunFiles, kind: str, tmp_path: Path) -> None:
    """Every operation raises an error and writes nothing."""
    archive.get_pack_path(run.rounds_folder).write_bytes(HOSTILE[kind]())
    contents = read_contents(tmp_path)
    for step in (
        lambda: packing.unpack_folder(run.rounds_folder),
        lambda: packing.pack_folder(run.rounds_folder),
        lambda: files.read_json(run.get_round_files(5).marker),
        lambda: files.is_stored(run.get_round_files(5).marker),
        lambda: files.is_intact(run.get_round_files(5).marker, "0"),
        run.list_complete_rounds,
    ):
        with pytest.raises(PackError, match=r"run/rounds\.zip is damaged .+Delete it and .*run/segments"):
            step()
    assert read_contents(tmp_path) == contents
    assert not Path(tempfile.gettempdir(), "PWNED").exists()


def test_symlink_in_pack_becomes_regular_file(run: RunFiles) -> None:
    archive.get_pack_path(run.rounds_folder).write_bytes(
        build_archive(("0005/round.json", b"/etc/passwd"), attributes=0o120777 << 16)
    )
    packing.unpack_folder(run.rounds_folder)
    assert not run.get_round_files(5).marker.is_symlink()
    assert run.get_round_files(5).marker.read_bytes() == b"/etc/passwd"


def test_pack_that_is_a_folder_is_rejected(run: RunFiles) -> None:
    archive.get_pack_path(run.rounds_folder).mkdir()
    with pytest.raises(PackError, match=r"rounds\.zip is damaged \(.*Is a directory"):
        run.list_complete_rounds()


def test_pack_contains_all_round_files_except_tensors(run: RunFiles) -> None:
    names = {name for name, entry in vars(RoundFiles).items() if isinstance(entry, layout.FolderEntry)}
    paths = [getattr(run.get_round_files(3), name) for name in names]
    assert {path.name for path in paths if not archive.is_packable(path)} == set(files.TENSOR_FILES)
    note = run.get_round_files(1).path / "note.json"
    note.write_text("{}")
    packing.pack_folder(run.rounds_folder)
    assert note.read_text() == "{}", "packing keeps a user's file"
    assert run.list_complete_rounds() == [0, 1]


@pytest.mark.parametrize(
    "name", ["../../../secret.json", "/etc/passwd", "other.pt", "0001/round.json", "../../x/0001/round.json", ""]
)
def test_round_record_rejects_files_of_other_folders(run: RunFiles, name: str) -> None:
    round_files = run.get_round_files(1)
    files.write_json(round_files.marker, {"sha256": {"server.pt": "0", name: "0"}})
    with pytest.raises(ArtifactError, match=rf"0001/round\.json can't be read \('{re.escape(name)}' is not a file"):
        layout.read_round_hashes(round_files, round_files.marker)
    for record in ([], {}, {"sha256": []}, {"sha256": {"server.pt": 1}}):
        files.write_json(round_files.marker, record)
        with pytest.raises(ArtifactError, match=r"0001/round\.json can't be read \((the SHA-256|'server\.pt')"):
            layout.read_round_hashes(round_files, round_files.marker)


def test_record_without_checksum_of_file_is_rejected(tmp_path: Path) -> None:
    for record in ({}, [], {"other.parquet": "0"}):
        files.write_json(tmp_path / "joined.json", record)
        with pytest.raises(ArtifactError, match=r"joined\.json does not record the SHA-256 of metrics\.parquet"):
            files.read_recorded_sha256(tmp_path / "metrics.parquet", "joined.json")


WRITER = """
import sys
import tempfile
from pathlib import Path
from fedpipe.core.storage import files, packing
from fedpipe.core.storage.layout import RunFiles

run, first = RunFiles(Path("run")), int(sys.argv[1])
for number in range(first, 60, 2):
    files.write_json(run.get_round_files(number).times, {"train": 0})
    files.write_json(run.get_round_files(number).marker, {"round": number})
    files.write_json(run.get_round_files(number).times, {"train": number})
    packing.pack_folder(run.rounds_folder)
    assert files.read_json(run.get_round_files(number).times) == {"train": number}
"""


def test_two_processes_pack_one_run_without_losing_files(in_empty_folder: Path) -> None:
    """For example, two studies with different numbers of rounds share a run."""
    commands = [[sys.executable, "-c", WRITER, str(first)] for first in (0, 1)]
    processes = [subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(studies.ROOT)}) for command in commands]
    assert [process.wait() for process in processes] == [0, 0]
    run = RunFiles(Path("run"))
    assert run.list_complete_rounds() == list(range(60))
    assert [files.read_json(run.get_round_files(number).times) for number in range(60)] == [
        {"train": n} for n in range(60)
    ]
    packing.pack_folder(run.rounds_folder)
    assert not list(run.rounds_folder.glob("*/*.json"))
    assert len(archive.list_pack_members(archive.get_pack_path(run.rounds_folder))) == 120


def test_file_rewritten_during_packing_stays_loose(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    path, original = run.get_round_files(1).times, archive.build_pack

    def rewrite_and_build(members: Any) -> bytes:
        if path.exists():
            path.write_bytes(files.encode_json({"train": 7}))
        return original(members)

    monkeypatch.setattr(archive, "build_pack", rewrite_and_build)
    packing.pack_folder(run.rounds_folder)
    assert path.exists()
    assert files.read_json(path) == {"train": 7}
    monkeypatch.undo()
    packing.pack_folder(run.rounds_folder)
    assert files.read_json(path) == {"train": 7}
    assert not path.exists()
