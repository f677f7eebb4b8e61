"""After a kill at any point, the same command repeats at most one round and gives equal bits."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive, files, packing
from fedpipe.engine import collect
from fedpipe.engine.run import Run
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies
from tests.runs.conftest import SCAFFOLD_ROUNDS

Scaffold = tuple[NewPlan, Run]
ROUNDS = SCAFFOLD_ROUNDS

#: Runs a segment. SIGKILL ends it in its n-th write, after half of the temporary file's bytes are on disk.
DYING = """
import os, signal, sys
from pathlib import Path
from fedpipe.cli import app
open_file, count = Path.open, int(sys.argv[1])
class Half:
    def __init__(self, stream): self.stream = stream
    def __enter__(self): self.stream.__enter__(); return self
    def __exit__(self, *error): return self.stream.__exit__(*error)
    def write(self, data):
        self.stream.write(data[: len(data) // 2]); self.stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
def open_new_file(path, mode="r", *args, **kwargs):
    global count
    stream = open_file(path, mode, *args, **kwargs)
    count -= mode == "xb"
    return Half(stream) if mode == "xb" and count == 0 else stream
Path.open = open_new_file
sys.argv = ["fedpipe", *sys.argv[2:]]
app.main()
"""


def resume_segment(plan: NewPlan, stop: int = ROUNDS) -> tuple[int, list[int]]:
    """Run a segment in this process. Return the number of complete rounds, and the new rounds."""
    complete_count, *rounds = studies.open_runs(plan)[0].run_segment(stop)
    return complete_count, rounds


@pytest.mark.parametrize(
    "write_number", [pytest.param(3, marks=pytest.mark.slow), 11, pytest.param(16, marks=pytest.mark.slow), 22]
)
def test_run_resumes_after_kill_during_write(write_number: int, scaffold: Scaffold) -> None:
    plan, run = scaffold
    path = run.files.path
    expected = studies.hash_results(path)
    studies.delete_rounds(path)

    killed_process = subprocess.run(
        [sys.executable, "-c", DYING, str(write_number), *studies.make_segment_command(path, ROUNDS)],
        capture_output=True,
    )
    assert killed_process.returncode == -signal.SIGKILL
    assert studies.list_temporary_files(path), "the kill should interrupt a write"
    complete_folders = [folder for folder in sorted((path / "rounds").iterdir()) if (folder / "round.json").exists()]
    complete_count, rounds = resume_segment(plan)
    assert complete_count == max(len(complete_folders) - 1, 0)
    assert rounds == list(range(complete_count + 1, ROUNDS + 1))
    assert studies.hash_results(path) == expected
    assert not studies.list_temporary_files(path), "temporary files should be deleted"


def test_longer_plan_continues_shorter_run() -> None:
    plan = studies.prepare(studies.settings(rounds=2))
    path = plan.runs[0].path
    assert resume_segment(plan, 2) == (0, [1, 2])
    longer_plan = studies.prepare(studies.settings(rounds=4))
    assert longer_plan.runs[0].path == path
    assert studies.rerun_segment(path, 4) == (2, [3, 4])
    assert resume_segment(longer_plan, 4) == (4, [])
    assert resume_segment(longer_plan, 2) == (2, [])


def damage_file(file: Path, damage: str) -> None:
    data = bytearray(file.read_bytes())
    match damage:
        case "truncate":
            file.write_bytes(data[: len(data) // 2])
        case "flip":
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "delete":
            file.unlink()


@pytest.mark.parametrize(
    ("name", "damage", "rounds"),
    [
        ("rounds/0004/server.pt", "flip", [4]),
        ("rounds/0004/server.pt", "delete", [4]),
        ("rounds/0003/metrics.parquet", "flip", [3, 4]),
        ("rounds/0004/round.json", "truncate", [4]),
        ("rounds/0003/state.json", "delete", [3, 4]),
        ("rounds.zip", "delete", [1, 2, 3, 4]),
    ],
)
def test_resumed_run_recomputes_damaged_files(name: str, damage: str, rounds: list[int], scaffold: Scaffold) -> None:
    plan, run = scaffold
    path = run.files.path
    expected, file = studies.hash_results(path), path / name
    if not file.exists():  # the segment has packed its rounds
        packing.unpack_folder(path / "rounds")
    damage_file(file, damage)
    assert resume_segment(plan)[1] == rounds
    assert studies.hash_results(path) == expected
    assert not list((path / "rounds").rglob("*.json"))


def test_resumed_run_does_not_recompute_damaged_early_state(scaffold: Scaffold) -> None:
    """Resuming needs only the last state. The damaged one is an error if you load it."""
    plan, run = scaffold
    path = run.files.path
    packing.unpack_folder(path / "rounds")
    damage_file(path / "rounds/0002/server.pt", "truncate")
    assert resume_segment(plan)[1] == []
    with pytest.raises(ArtifactError, match=rf"0002/server\.pt is damaged: .* Delete {path} and run again\."):
        studies.open_runs(plan)[0].load_server_state(2)


def test_error_about_lost_rounds_shows_how_to_repair_them(scaffold: Scaffold) -> None:
    """Snakemake has nothing to do while the manifest of the segment exists."""
    plan, run = scaffold
    Path(f"{run.files.rounds_folder}.zip").unlink()
    with pytest.raises(ArtifactError) as error:
        collect.merge_rounds(run.files, ROUNDS)
    advice = f"is missing. Delete {run.files.path}/segments, and run its study (`fedpipe run`)."
    assert str(error.value).endswith(advice)
    shutil.rmtree(run.files.path / "segments")
    assert resume_segment(plan)[1] == [1, 2, 3, 4]


def test_resumed_run_recomputes_damaged_member_of_pack(scaffold: Scaffold) -> None:
    plan, run = scaffold
    path = run.files.path
    expected, pack, damaged_file = studies.hash_results(path), path / "rounds.zip", path / "rounds/0003/metrics.parquet"
    data, member = bytearray(pack.read_bytes()), archive.read_pack_member(damaged_file)
    data[data.index(member) + len(member) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"^{pack} can't be read \(0003/metrics\.parquet: Bad CRC-32"):
        files.read_parquet(damaged_file)
    assert resume_segment(plan)[1] == [3, 4]
    assert studies.hash_results(path) == expected


def test_collect_error_shows_how_to_repair_damaged_round(scaffold: Scaffold) -> None:
    plan, run = scaffold
    packing.unpack_folder(run.files.rounds_folder)
    damaged_file = run.files.get_round_files(3).participants
    damaged_file.unlink()
    with pytest.raises(ArtifactError) as error:
        collect.collect_rounds(run.files, ROUNDS, "all")
    message = str(error.value)
    assert message.startswith(f"{damaged_file} is missing. Type `rm -r {run.files.path}/segments` and run again.")
    subprocess.run(message.split("`")[1].split(), check=True)
    assert resume_segment(plan) == (2, [3, 4])
    collect.collect_rounds(run.files, ROUNDS, "all")


@pytest.mark.slow
def test_run_resumes_after_kill_during_packing(scaffold: Scaffold) -> None:
    """The kill interrupts the write of the pack, or the deletion of files that are in the pack."""
    plan, run = scaffold
    path = run.files.path
    expected = studies.hash_results(path)
    writes = 4 + ROUNDS * 9  # writes of round 0 and of the other rounds
    studies.delete_rounds(path)
    killed_process = subprocess.run(
        [sys.executable, "-c", DYING, str(writes), *studies.make_segment_command(path, ROUNDS)], capture_output=True
    )
    assert killed_process.returncode == -signal.SIGKILL
    assert next(file.name for file in studies.list_temporary_files(path)).startswith(".rounds.zip.")
    assert resume_segment(plan) == (ROUNDS, [])
    assert studies.hash_results(path) == expected

    packed = (path / "rounds.zip").read_bytes()
    packing.unpack_folder(path / "rounds")
    (path / "rounds.zip").write_bytes(packed)
    (path / "rounds/0002/state.json").unlink()
    assert resume_segment(plan) == (ROUNDS, [])
    assert studies.hash_results(path) == expected


@pytest.mark.parametrize(
    ("keep", "states"), [("all", {0, 1, 2, 3, 4}), ("last", {0, 3, 4}), (3, {0, 3, 4}), (2, {0, 2, 3, 4})]
)
def test_keep_models_prunes_only_states(keep: str | int, states: set[int]) -> None:
    plan = studies.prepare(studies.settings(("scaffold",), ROUNDS, artifacts={"keep_models": keep}))
    run = studies.open_runs(plan)[0]
    list(run.run_segment(ROUNDS))
    retained_rounds = {
        number for number in range(ROUNDS + 1) if run.files.get_round_files(number).server_state.exists()
    }
    assert retained_rounds == states
    assert all(files.is_stored(run.files.get_round_files(number).metrics) for number in range(1, ROUNDS + 1))
    assert not [file for file in run.files.rounds_folder.rglob("*") if file.suffix != ".pt" and file.is_file()]
    longer_plan = studies.prepare(studies.settings(("scaffold",), ROUNDS + 1, artifacts={"keep_models": keep}))
    assert resume_segment(longer_plan, ROUNDS + 1) == (ROUNDS, [ROUNDS + 1])


def test_invalid_plan_of_other_study_prevents_pruning() -> None:
    plan = studies.prepare(studies.settings(("scaffold",), ROUNDS, artifacts={"keep_models": "last"}))
    other_plan = Path("results/studies/other/plan.json")
    other_plan.parent.mkdir(parents=True)
    other_plan.write_text("{}")
    run = studies.open_runs(plan)[0]
    list(run.run_segment(ROUNDS))
    assert all(run.files.get_round_files(number).server_state.exists() for number in range(ROUNDS + 1))
