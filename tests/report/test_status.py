"""What `fedpipe status` reads off a study's files and Snakemake's logs."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from fedpipe.core.storage import files, layout
from fedpipe.engine import collect
from fedpipe.planning import planner
from fedpipe.planning.plan import PlannedProbe
from fedpipe.planning.planner import NewPlan
from fedpipe.report import status
from fedpipe.report.status import RunProgress
from tests import studies

LABELS = ("fedavg", "fedprox", "scaffold")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def made() -> NewPlan:
    """A study of three runs: done, begun, not begun."""
    made = studies.prepare(studies.settings(LABELS, 3))
    done, begun, _ = studies.open_runs(made)
    list(done.run_segment(3))
    collect.collect_rounds(done.files, 3, "all")
    list(begun.run_segment(2))
    for run in (done, begun):
        for number in run.files.list_complete_rounds():
            files.write_json(run.files.round(number).times, {"train": 1.0, "aggregate": 0.25, "evaluate": 0.75})
    return made


def shown(made: NewPlan, height: int | None = None) -> str:
    screen = Console(file=io.StringIO(), width=200)
    screen.print(status.render_progress(*status.load_progress(made), made.protocols[0], height))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def snakemake(made: NewPlan, *lines: str, number: int = 1, lock: bool = True) -> str:
    """A log of Snakemake that tells of FedProx's segment; where that logs."""
    key = made.runs[1].path
    log = f"results/logs/segment/fedprox-{key.name}-0003.log"
    text = "\n".join(lines).format(output=f"{key}/segments/0003.json", log=log)
    files.write_bytes(Path(f".snakemake/log/2026-01-01T0000{number:02}.snakemake.log"), f"{text}\n".encode())
    if lock:
        files.write_bytes(Path(".snakemake/locks/0.output.lock"), b"")
    return log


BEGUN = ("[Thu Jan  1 00:00:01 2026]", "rule segment:", "    input: a, b", "    output: {output}", "    log: {log}", "")
FAILED = (
    "[Thu Jan  1 00:00:09 2026]",
    "Error in rule segment:",
    "    message: SLURM-job '8' failed",
    "    output: {output}",
    "    log: {log}, slurm_logs/8.log (check log file(s) for error details)",
    "    shell:",
    "        fedpipe segment",
)


def states(made: NewPlan) -> dict[str, str]:
    labels = {made.title(label): label for label in made.algorithms}
    return {labels[run.name.split()[0]]: run.state for run in status.load_progress(made)[0]}


def test_rounds_accuracy_rate_and_time_left(made: NewPlan) -> None:
    done, begun, waiting = status.load_progress(made)[0]
    table = layout.read_merged_table(made.runs[0].files.merged_files(3).metrics).to_pandas()
    last = table[(table["round"] == 3) & (table["protocol"] == made.protocols[0])]
    assert done == RunProgress("FedAvg seed 0", "done", 3, 3, last["correct"].sum() / last["total"].sum(), 2.0)
    assert (begun.state, begun.rounds, begun.seconds, begun.seconds_left) == ("stopped", 2, 2.0, 2.0)
    assert waiting == RunProgress("SCAFFOLD seed 0", "waiting", 0, 3, None, None)
    assert status.summarize_progress([done, begun, waiting]) == (
        "3 runs (1 done, 1 waiting, 1 stopped), 5 of 9 rounds; about 8 s left"
    )


def test_models_right_after_training_are_measured_in_files_of_their_own() -> None:
    """And no dash stands there, which says that the method has no such model."""
    protocols = {"protocols": ["trained-on-local", "global-on-global"], "every": 2}
    made = studies.prepare(studies.settings(rounds=2, evaluation=protocols))
    (run,) = studies.open_runs(made)
    steps = run.run_segment(2)
    assert [next(steps), next(steps)] == [0, 1]
    assert status.load_progress(made)[0][0].accuracy is None, "nothing is measured yet"
    list(steps)
    rows = files.read_parquet(run.files.round(2).trained_accuracies).to_pylist()
    accuracy = sum(row["correct"] for row in rows) / sum(row["total"] for row in rows)
    assert status.load_progress(made)[0][0].accuracy == accuracy
    assert f"{100 * accuracy:.2f} %" in shown(made)


def test_time_left_counts_what_runs_at_once() -> None:
    runs = [RunProgress(str(number), "running", 5, 10, None, 2.0) for number in range(4)]
    assert status.estimate_time_left(runs) == 10
    assert (
        status.estimate_time_left([*runs, RunProgress("more", "waiting", 0, 10, None, None)]) == 20
    )  # its own rounds last longest
    assert status.estimate_time_left([RunProgress("one", "waiting", 0, 10, None, None)]) is None


def test_queued_running_failed_and_begun_again(made: NewPlan) -> None:
    log = Path(snakemake(made, *BEGUN))
    assert states(made)["fedprox"] == "queued"
    files.write_bytes(log, b"one\ntwo\n")
    assert states(made)["fedprox"] == "running"
    assert states(made)["scaffold"] == "waiting"
    os.utime(log, (0, 0))
    assert states(made)["fedprox"] == "queued", "the log is of an earlier attempt"

    snakemake(made, *BEGUN, *FAILED)
    assert states(made)["fedprox"] == "failed"
    (failure,) = status.load_progress(made)[1]
    assert (failure.rule, failure.log, failure.lines) == ("segment", log, ["one", "two"])
    snakemake(made, *BEGUN, *FAILED, *BEGUN)
    assert states(made)["fedprox"] == "queued", "it was begun again"
    assert not status.load_progress(made)[1]
    snakemake(made, *BEGUN, *FAILED, number=2)
    snakemake(made, *BEGUN, number=3)
    assert states(made)["fedprox"] == "queued", "another snakemake began it again"
    Path(".snakemake/locks/0.output.lock").unlink()
    assert states(made)["fedprox"] == "stopped"


def test_a_quiet_snakemake_tells_only_of_failed_commands(made: NewPlan) -> None:
    """`--quiet rules`, as in `make demo`, keeps what Snakemake says of errors in rules for itself, too."""
    log = Path(snakemake(made))
    assert states(made)["fedprox"] == "stopped"
    files.write_bytes(log, b"one\n")
    os.utime(log, (2e9, 2e9))
    assert states(made)["fedprox"] == "running"
    command = f"Command 'PATH='x':\"$PATH\"; exec fedpipe segment {made.runs[1].path} --stop 3 > {log} 2>&1' "
    said = [
        "RuleException:",
        'CalledProcessError in file "federate.smk", line 18:',
        command + "returned non-zero exit ",
    ]
    os.utime(log, (1e9, 1e9))
    snakemake(made, *said[:-1], said[-1] + "status 130.")
    assert states(made)["fedprox"] == "stopped"
    snakemake(made, CTRL_C, *said[:-1], said[-1] + "status 143.")
    assert states(made)["fedprox"] == "stopped"
    snakemake(made, *said[:-1], command + "died with <Signals.SIGKILL: 9>.")
    assert states(made)["fedprox"] == "failed"
    snakemake(made, *said[:-1], said[-1] + "status 2.")
    assert states(made)["fedprox"] == "failed"
    (failure,) = status.load_progress(made)[1]
    assert (failure.rule, failure.log, failure.lines) == ("segment", log, ["one"])
    os.utime(log, (2e9, 2e9))
    assert states(made)["fedprox"] == "running", "it was begun again"


CTRL_C = "Terminating processes on user request, this might take some time."
COMMAND = "Command 'exec fedpipe segment results/runs --stop 3 > {log} 2>&1' "


@pytest.mark.parametrize(
    "said",
    [
        (COMMAND + "returned non-zero exit status 130.",),
        (COMMAND + "died with <Signals.SIGINT: 2>.",),
        (CTRL_C, COMMAND + "returned non-zero exit status 143."),
    ],
    ids=["before snakemake says so", "before Python was up", "by snakemake"],
)
def test_what_ctrl_c_ended_is_stopped(said: tuple[str, ...], made: NewPlan) -> None:
    log = Path(snakemake(made, *BEGUN, *said, *FAILED))
    files.write_bytes(log, b"one\n")
    os.utime(log, (0, 0))
    assert states(made)["fedprox"] == "stopped"
    assert not status.load_progress(made)[1]
    snakemake(made, *BEGUN, *said, *FAILED, *BEGUN, *FAILED, CTRL_C)
    assert states(made)["fedprox"] == ("stopped" if CTRL_C in said else "failed"), "the next one failed by itself"
    snakemake(made, *BEGUN, *FAILED, number=2)
    assert states(made)["fedprox"] == "failed", "another snakemake began it again"
    assert len(status.load_progress(made)[1]) == 1


@pytest.mark.parametrize("quiet", [True, False])
def test_a_segment_that_sigterm_ended_after_a_round_is_stopped(quiet: bool, made: NewPlan) -> None:
    path = made.runs[1].path
    log = Path(snakemake(made))
    end = f"{path}: stopped by SIGTERM after round 2; the same command goes on from there"
    command = f"Command 'exec fedpipe segment {path} --stop 3 > {log} 2>&1' returned non-zero exit status 143."
    files.write_bytes(log, f"one\n{end}\n".encode())
    moment = datetime(2026, 1, 1, 0, 0, 8).timestamp()  # before the end that snakemake tells of
    os.utime(log, (moment, moment))
    snakemake(made, *([command] if quiet else [*BEGUN, *FAILED]))
    assert states(made)["fedprox"] == "stopped"
    assert not status.load_progress(made)[1]
    files.write_bytes(log, f"one\n{end}\nTraceback\n".encode())
    os.utime(log, (moment, moment))
    assert states(made)["fedprox"] == "failed", "it was begun again since"
    if not quiet:
        files.write_bytes(log, f"one\n{end}\n".encode())
        snakemake(made, *BEGUN, *FAILED, *BEGUN)
        os.utime(log, (0, 0))
        assert states(made)["fedprox"] == "queued"
        snakemake(made, *BEGUN, *FAILED, "[Thu Jan  1 00:00:10 2026]", *BEGUN[1:], *FAILED)
        os.utime(log, (moment, moment))
        assert states(made)["fedprox"] == "failed", "the next one died before its log"


def test_failed_jobs_of_all_kinds_are_told(made: NewPlan) -> None:
    """Also where they are of no run: by a quiet Snakemake, and by one that tells of rules and outputs."""
    run = made.runs[0]
    probe = PlannedProbe(
        name="norms", kind="head-norms", algorithm="fedavg", run_key=run.key, rounds=3, round=3, key="0" * 12
    )
    made = dataclasses.replace(made, probes=(probe,))
    layout.dataset_file(run.dataset).unlink()
    layout.assignment_file(run.partition).unlink()
    commands = {
        "results/logs/probe/one.log": f"probe {probe.files.settings} --threads 1",
        "results/logs/download/one.log": f"download {run.dataset}",
        "results/logs/partition/one.log": f"partition {run.partition}",
        "results/logs/table.log": "table --params params.yaml --scale paper",
        "results/logs/curves.log": "figure curves --params params.yaml --scale paper",
        "results/logs/partition-figure/iid.log": f"figure partition {run.partition} --params params.yaml",
    }
    for log, command in commands.items():
        files.write_bytes(Path(log), f"{command} failed\n".encode())
        os.utime(log, (1e9, 1e9))
    said = "Command 'PATH='x':\"$PATH\"; fedpipe {} > {} 2>&1' returned non-zero exit status 2."
    snakemake(made, *(said.format(command, log) for log, command in commands.items()))
    assert {str(failure.log): failure.lines for failure in status.load_progress(made)[1]} == {
        log: [f"{command} failed"] for log, command in commands.items()
    }
    other = dataclasses.replace(made, params=Path("studies/other.yaml"), probes=())
    assert {failure.rule for failure in status.load_progress(other)[1]} == {"download", "partition"}, "what both need"

    log = "results/logs/probe/one.log"
    snakemake(made, "Error in rule probe:", f"    output: {probe.files.table}, {probe.files.marker}", f"    log: {log}")
    (failure,) = status.load_progress(made)[1]
    assert (failure.rule, str(failure.log)) == ("probe", log)
    files.write_bytes(probe.files.table, b"")
    files.write_bytes(probe.files.marker, b"")
    assert not status.load_progress(made)[1], "it was made since"


def test_a_failed_job_is_shown_with_the_end_of_its_log(made: NewPlan) -> None:
    log = Path(snakemake(made, *BEGUN, *FAILED))
    assert "its log is empty: it was killed, or did not start" in shown(made)
    files.write_bytes(Path("slurm_logs/8.log"), b"slurmstepd: out of memory\n")
    text = "\n".join(f"line {number}" for number in range(9))
    assert "  slurmstepd: out of memory\n" in shown(made)
    files.write_bytes(log, f"{text}\n".encode())
    assert f"segment failed: {log}\n" in shown(made)
    assert "  line 4\n" in shown(made)
    assert "line 3" not in shown(made)


def test_a_failed_job_of_another_study_is_not_ours(made: NewPlan) -> None:
    lines = [line.replace("{output}", "results/runs/other/0123456789ab/segments/0003.json") for line in FAILED]
    snakemake(made, *lines)
    assert not status.load_progress(made)[1]


def test_runs_at_work_come_first_and_what_has_no_room_is_counted(made: NewPlan) -> None:
    log = Path(snakemake(made, *BEGUN))
    files.write_bytes(log, b"")
    rows = [line.split()[0] for line in shown(made).splitlines()[3:]]
    assert rows == ["FedProx", "SCAFFOLD", "FedAvg"]
    small = shown(made, height=7)
    assert "FedProx" in small
    assert "SCAFFOLD" not in small
    assert "… and 2 more" in small


def test_it_ends_when_all_is_done_and_imports_no_torch(made: NewPlan) -> None:
    studies.write(studies.settings(LABELS[:1], 3), Path())
    planner.write_plan(planner.make_plan())
    program = (
        "import sys; sys.argv = ['fedpipe', 'status', '--watch']\nfrom fedpipe.cli import app\n"
        "try: app.main()\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "1 run (1 done), 3 of 3 rounds\n" in done.stdout
    assert "AssertionError" not in done.stderr


def test_one_named_protocol_for_all_runs_and_a_dash_for_methods_without_it() -> None:
    """Else a personal accuracy stands beside a global one, and turns their order around."""
    made = studies.prepare(studies.settings(("fedavg", "local", "fedprox"), 1))
    for run in studies.open_runs(made)[:2]:
        list(run.run_segment(1))
    _, metric, *lines = shown(made).splitlines()
    assert metric.strip() == "accuracy: Global test accuracy (global model)"
    head, *rows = [line.split() for line in lines]
    assert head == ["run", "rounds", "accuracy", "s/round", "left", "state"]
    table = files.read_parquet(made.runs[0].files.round(1).metrics).to_pandas()
    mine = table[table["protocol"] == "global-on-global"]
    accuracy = f"{100 * mine['correct'].sum() / mine['total'].sum():.2f}"
    assert {row[0]: accuracy in row for row in rows} == {"FedAvg": True, "Local": False, "FedProx": False}
    assert {row[0]: "–" in row for row in rows} == {"FedAvg": False, "Local": True, "FedProx": False}
