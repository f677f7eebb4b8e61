"""After SIGTERM a segment ends with its round and can be resumed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedpipe.engine import interrupts
from tests import small_studies as studies
from tests.pipeline.conftest import RunningCommand, read_until

ROUNDS = 4


def interrupt_segment(path: Path, stop: int) -> tuple[int, str]:
    """Send SIGTERM to a segment that has begun. Return the status and the rest of the output."""
    command = [sys.executable, "-m", "fedpipe", *studies.make_segment_command(path, stop)]
    with RunningCommand(command, stdout=subprocess.PIPE, text=True) as process:
        read_until("rounds are complete", process)
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
    return process.returncode, output


def test_sigterm_ends_segment_after_its_round() -> None:
    plan = studies.prepare(studies.settings(("fedala",), ROUNDS, federation={"local_epochs": 3}))
    path = plan.runs[0].path
    list(studies.open_runs(plan)[0].run_segment(ROUNDS))
    expected = studies.hash_results(path)
    studies.delete_rounds(path)
    status, output = interrupt_segment(path, ROUNDS)
    assert status == 143
    match = re.search(rf"{path}: stopped by SIGTERM after round (\d)", output)
    assert match, output
    stop = int(match[1])  # a busy machine may deliver the signal a round late
    assert stop < ROUNDS
    assert not studies.list_temporary_files(path)
    assert not (path / "segments").exists()
    assert studies.rerun_segment(path, ROUNDS) == (stop, list(range(stop + 1, ROUNDS + 1)))
    assert studies.hash_results(path) == expected


def test_sigterm_in_last_round_completes_segment() -> None:
    """No round is left, so the manifest is written."""
    plan = studies.prepare(studies.settings(rounds=1))
    path = plan.runs[0].path
    assert interrupt_segment(path, 1)[0] == 0
    assert (path / "segments/0001.json").exists()


def test_block_killed_by_sigterm_leaves_no_block() -> None:
    """It leaves a half-written file, which the next job deletes."""
    plan = studies.prepare(studies.settings(execution={"rounds_per_job": 1, "clients_per_job": 5}))
    run = studies.open_runs(plan)[0]
    run.write_initial_round()
    initial = sorted(run.files.path.rglob("*"))
    block = ["train", str(plan.runs[0].path), "--round", "1", "--block", "0", "--size", "5"]
    program = (  # _replace_file calls Path.replace after the write
        "import os, signal, sys\nfrom pathlib import Path\nfrom fedpipe.cli import app\n"
        f"sys.argv, Path.replace = ['fedpipe', *{block}], lambda *_: os.kill(os.getpid(), signal.SIGTERM)\napp.main()"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGTERM
    new_files = [path for path in run.files.path.rglob("*") if path.is_file() and path not in initial]
    assert [re.sub(r"\.\w+\.tmp$", "", path.name) for path in new_files] == [".block-0000.pt"]
    assert new_files == studies.list_temporary_files(run.files.path)
    list(run.run_segment(1))
    assert not studies.list_temporary_files(run.files.path)


def test_defer_sigterm_restores_handler() -> None:
    initial = signal.getsignal(signal.SIGTERM)
    with interrupts.defer_sigterm(lambda: "stopped") as asked_to_stop:
        assert not asked_to_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked_to_stop()
    assert signal.getsignal(signal.SIGTERM) is initial


@pytest.mark.parametrize("keep_models", ["last", "all"])
def test_job_continues_after_rounds_that_other_job_completes_meanwhile(
    keep_models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old copy of a job may still run. It completes two rounds while the new one checks the states of its start."""
    plan = studies.prepare(studies.settings(rounds=6) | {"artifacts": {"keep_models": keep_models}})
    old, new = (studies.open_runs(plan)[0] for _ in range(2))
    old_rounds = old.run_segment(6)
    assert [next(old_rounds) for _ in range(3)] == [0, 1, 2]
    has_usable_states = new.checkpoint._has_usable_states

    def complete_two_rounds(*arguments: Any) -> bool:
        if new.files.list_complete_rounds() == [0, 1, 2]:
            assert [next(old_rounds) for _ in range(2)] == [3, 4]
        return has_usable_states(*arguments)

    monkeypatch.setattr(new.checkpoint, "_has_usable_states", complete_two_rounds)
    new_rounds = new.run_segment(6)
    next(new_rounds)
    times = studies.read_round_times(new.files.path)
    assert list(times) == [1, 2, 3, 4]
    list(new_rounds)
    assert times.items() <= studies.read_round_times(new.files.path).items()
