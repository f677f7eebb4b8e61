"""SIGTERM: a segment ends after the round that it is in, and goes on from there; a bar or lines tell of its rounds."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from fedpipe.engine import interrupts
from fedpipe.report import progress
from tests import small_studies as studies
from tests.runs.test_resume import run_again, segment, unfinished

ROUNDS = 4


def test_sigterm_ends_a_segment_after_its_round_and_leaves_nothing_half() -> None:
    made = studies.prepare(studies.settings(("fedala",), ROUNDS, federation={"local_epochs": 3}))
    path = str(made.runs[0].path)
    list(studies.open_runs(made)[0].run_segment(ROUNDS))
    once = studies.bits(Path(path))
    studies.forget(Path(path))
    command = [sys.executable, "-m", "fedpipe", *segment(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stopped:
        assert stopped.stdout
        while "rounds are complete" not in stopped.stdout.readline():
            pass
        stopped.send_signal(signal.SIGTERM)
        said = stopped.stdout.read()
    assert stopped.returncode == 143
    told = re.search(rf"{path}: stopped by SIGTERM after round (\d)\b.*\n$", said)
    assert told, said
    stop = int(told[1])  # a busy machine may deliver the signal a round late
    assert stop < ROUNDS
    assert not unfinished(Path(path))
    assert not Path(path, "segments").exists()
    assert run_again(path) == (stop, list(range(stop + 1, ROUNDS + 1)))
    assert studies.bits(Path(path)) == once


def test_sigterm_in_the_last_round_ends_like_any_other() -> None:
    """There is nothing to go on with: the manifest is written."""
    made = studies.prepare(studies.settings(rounds=1))
    path = str(made.runs[0].path)
    command = [sys.executable, "-m", "fedpipe", *segment(path, 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout
        while "rounds are complete" not in running.stdout.readline():
            pass
        running.send_signal(signal.SIGTERM)
        running.stdout.read()
    assert running.returncode == 0
    assert Path(path, "segments/0001.json").exists()


def test_a_block_that_sigterm_kills_leaves_nothing() -> None:
    made = studies.prepare(studies.settings(execution={"rounds_per_job": 1, "clients_per_job": 5}))
    run = studies.open_runs(made)[0]
    run.initialize()
    before = sorted(run.files.path.rglob("*"))
    block = ["train", str(made.runs[0].path), "--round", "1", "--block", "0", "--size", "5"]
    code = f"import os, signal, sys; sys.argv = ['fedpipe', *{block}]\nfrom fedpipe.core.storage import files\n"
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}files.write_pt = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
            "from fedpipe.cli import app\napp.main()",
        ]
    )
    assert killed.returncode == -signal.SIGTERM
    assert sorted(run.files.path.rglob("*")) == before


def test_sigterm_is_deferred_and_then_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.defer_sigterm(lambda: "told") as asked_to_stop:
        assert not asked_to_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked_to_stop()
    assert signal.getsignal(signal.SIGTERM) is before


def rounds() -> Iterator[int]:
    yield from (2, 3, 4)


def test_a_log_has_a_line_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track_rounds(Path("run"), 4, rounds(), Console(file=io.StringIO()))) == [3, 4]
    assert capsys.readouterr().out == "run: 2 of 4 rounds are complete\nrun: round 3 of 4\nrun: round 4 of 4\n"


def test_a_terminal_has_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    assert list(progress.track_rounds(Path("run"), 4, rounds(), Console(file=screen, force_terminal=True))) == [3, 4]
    assert "4/4" in screen.getvalue()
    assert "\x1b[" in screen.getvalue()
    assert capsys.readouterr().out == ""
