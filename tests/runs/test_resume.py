"""Kill it anywhere, type it again: the same bits, at most one round done twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive, files, packing
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine import collect
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies

ROUNDS = 4

#: Runs a segment and dies of SIGKILL in its n-th write, after half of the temporary file's bytes are on disk.
DYING = """
import os, signal, sys
from fedpipe.cli import app
write, count = os.fdopen, int(sys.argv[1])
class Half:
    def __init__(self, stream): self.stream = stream
    def __enter__(self): self.stream.__enter__(); return self
    def __exit__(self, *error): return self.stream.__exit__(*error)
    def write(self, data):
        self.stream.write(data[: len(data) // 2]); self.stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
def fdopen(*args):
    global count
    count -= 1
    return Half(write(*args)) if count == 0 else write(*args)
os.fdopen = fdopen
sys.argv = ["fedpipe", *sys.argv[2:]]
app.main()
"""


def segment(path: str, stop: int = ROUNDS) -> list[str]:
    return ["segment", path, "--stop", str(stop)]


def run_again(path: str, stop: int = ROUNDS) -> tuple[int, list[int]]:
    """The same command once more: rounds found complete, rounds done now."""
    done = subprocess.run(
        [sys.executable, "-m", "fedpipe", *segment(path, stop)], capture_output=True, text=True, check=True
    )
    found = re.search(r"(\d+) of \d+ rounds are complete", done.stdout)
    assert found
    return int(found[1]), [int(number) for number in re.findall(r"round (\d+) of", done.stdout)]


def continued(made: NewPlan, stop: int = ROUNDS) -> tuple[int, list[int]]:
    """The same within this process."""
    found, *done = studies.open_runs(made)[0].run_segment(stop)
    return found, done


def unfinished(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


@pytest.mark.parametrize(
    "write", [pytest.param(3, marks=pytest.mark.slow), 11, pytest.param(16, marks=pytest.mark.slow), 22]
)
def test_killed_in_the_middle_of_a_write(write: int) -> None:
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS))
    path = str(made.runs[0].path)
    list(studies.open_runs(made)[0].run_segment(ROUNDS))
    once = studies.bits(Path(path))
    studies.forget(Path(path))

    killed = subprocess.run([sys.executable, "-c", DYING, str(write), *segment(path)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert unfinished(Path(path)), "it should have died while a file was half written"
    whole = [folder for folder in sorted(Path(path, "rounds").iterdir()) if (folder / "round.json").exists()]
    found, done = continued(made)
    assert found == max(len(whole) - 1, 0)
    assert done == list(range(found + 1, ROUNDS + 1))
    assert studies.bits(Path(path)) == once
    assert not unfinished(Path(path)), "half-written files should be gone"


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(12))
def test_killed_at_any_moment(moment: int) -> None:
    """The moment is a line of output plus a fraction of a round, different in each case."""
    made = studies.prepare(studies.settings(("fedala",), ROUNDS, federation={"local_epochs": 3}))
    path = str(made.runs[0].path)
    list(studies.open_runs(made)[0].run_segment(ROUNDS))
    once = studies.bits(Path(path))
    studies.forget(Path(path))
    worker = subprocess.Popen(
        [sys.executable, "-u", "-m", "fedpipe", *segment(path)], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert worker.stdout
    for _ in range(1 + moment % ROUNDS):
        worker.stdout.readline()
    try:
        worker.wait(timeout=0.05 * (moment // ROUNDS))
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    complete = len(RunFiles(Path(path)).list_complete_rounds()) - 1
    found, done = run_again(path)
    assert found == max(complete, 0)
    assert done == list(range(found + 1, ROUNDS + 1))
    assert studies.bits(Path(path)) == once


def test_more_rounds_continue_a_shorter_run() -> None:
    made = studies.prepare(studies.settings(rounds=2))
    path = str(made.runs[0].path)
    assert continued(made, 2) == (0, [1, 2])
    longer = studies.prepare(studies.settings(rounds=4))
    assert str(longer.runs[0].path) == path
    assert run_again(path, 4) == (2, [3, 4])
    assert continued(longer, 4) == (4, [])
    assert continued(longer, 2) == (2, [])


@pytest.mark.parametrize(
    ("name", "harm", "rounds"),
    [
        ("rounds/0002/server.pt", "truncate", [3, 4]),
        ("rounds/0004/server.pt", "flip", [4]),
        ("rounds/0004/server.pt", "delete", [4]),
        ("rounds/0003/metrics.parquet", "flip", [3, 4]),
        ("rounds/0004/round.json", "truncate", [4]),
        ("rounds/0003/state.json", "delete", [3, 4]),
        ("rounds.zip", "delete", [1, 2, 3, 4]),
    ],
)
def test_damaged_files_are_found_and_made_again(name: str, harm: str, rounds: list[int]) -> None:
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS))
    path = str(made.runs[0].path)
    list(studies.open_runs(made)[0].run_segment(ROUNDS))
    once = studies.bits(Path(path))
    file = Path(path, name)
    if not file.exists():  # as before the segment's end
        packing.unpack_folder(Path(path, "rounds"))
    data = bytearray(file.read_bytes())
    match harm:
        case "truncate":
            file.write_bytes(data[: len(data) // 2])
        case "flip":
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "delete":
            file.unlink()
    if name == "rounds/0002/server.pt":  # an early state is not needed to go on, so it is not made again by itself
        with pytest.raises(ArtifactError, match=r"0002/server\.pt is damaged"):
            studies.open_runs(made)[0].load_server_state(2)
        return
    assert continued(made)[1] == rounds
    assert studies.bits(Path(path)) == once
    assert not list(Path(path, "rounds").rglob("*.json"))


def test_a_damaged_member_of_the_pack_costs_its_round_alone() -> None:
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS))
    path = made.runs[0].path
    list(studies.open_runs(made)[0].run_segment(ROUNDS))
    once, zipped, harmed = studies.bits(path), path / "rounds.zip", path / "rounds/0003/metrics.parquet"
    data, member = bytearray(zipped.read_bytes()), archive.read_member(harmed)
    data[data.index(member) + len(member) // 2] ^= 1
    zipped.write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"^{zipped} can't be read \(0003/metrics\.parquet: Bad CRC-32"):
        files.read_parquet(harmed)
    assert continued(made)[1] == [3, 4]
    assert studies.bits(path) == once


def test_collect_says_what_to_delete_where_a_round_is_damaged() -> None:
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS))
    path = str(made.runs[0].path)
    (run,) = studies.open_runs(made)
    list(run.run_segment(ROUNDS))
    packing.unpack_folder(run.files.rounds_folder)
    harmed = run.files.round(3).participants
    harmed.unlink()
    with pytest.raises(ArtifactError) as raised:
        collect.collect_rounds(run.files, ROUNDS, "all")
    said = str(raised.value)
    assert said.startswith(f"{harmed} is missing. Type `rm -r {path}/segments` and run again.")
    subprocess.run(said.split("`")[1].split(), check=True)
    assert continued(made) == (2, [3, 4])
    collect.collect_rounds(run.files, ROUNDS, "all")


def test_killed_while_it_packs() -> None:
    """In the pack's write, and after it, when some files are there twice and some are gone already."""
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS))
    path = made.runs[0].path
    (run,) = studies.open_runs(made)
    list(run.run_segment(ROUNDS))
    once = studies.bits(path)
    writes = 4 + ROUNDS * 9  # of round 0, and of the others
    studies.forget(path)
    killed = subprocess.run([sys.executable, "-c", DYING, str(writes), *segment(str(path))], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert next(file.name for file in unfinished(path)).startswith(".rounds.zip.")
    assert continued(made) == (ROUNDS, [])
    assert studies.bits(path) == once

    packed = (path / "rounds.zip").read_bytes()
    packing.unpack_folder(path / "rounds")
    (path / "rounds.zip").write_bytes(packed)
    (path / "rounds/0002/state.json").unlink()
    assert continued(made) == (ROUNDS, [])
    assert studies.bits(path) == once


def test_a_pickled_object_is_refused() -> None:
    import torch

    class Evil:
        def __reduce__(self):
            return (os.system, ("touch harm",))

    torch.save({"model": Evil()}, "evil.pt")
    with pytest.raises(ArtifactError, match=r"evil\.pt can't be read"):
        files.read_pt(Path("evil.pt"))
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    ("keep", "states"), [("all", {0, 1, 2, 3, 4}), ("last", {0, 3, 4}), (3, {0, 3, 4}), (2, {0, 2, 3, 4})]
)
def test_keep_models_prunes_states_and_nothing_else(keep: str | int, states: set[int]) -> None:
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS, artifacts={"keep_models": keep}))
    run = studies.open_runs(made)[0]
    list(run.run_segment(ROUNDS))
    kept = {number for number in range(ROUNDS + 1) if run.files.round(number).server_state.exists()}
    assert kept == states
    assert all(files.is_stored(run.files.round(number).metrics) for number in range(1, ROUNDS + 1))
    assert not [file for file in run.files.rounds_folder.rglob("*") if file.suffix != ".pt" and file.is_file()]
    longer = studies.prepare(studies.settings(("scaffold",), ROUNDS + 1, artifacts={"keep_models": keep}))
    assert continued(longer, ROUNDS + 1) == (ROUNDS, [ROUNDS + 1])


def test_a_study_whose_plan_can_not_be_read_may_want_all_states() -> None:
    made = studies.prepare(studies.settings(("scaffold",), ROUNDS, artifacts={"keep_models": "last"}))
    other = Path("results/studies/other/plan.json")
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    run = studies.open_runs(made)[0]
    list(run.run_segment(ROUNDS))
    assert all(run.files.round(number).server_state.exists() for number in range(ROUNDS + 1))
