"""The progress that `fedpipe status` reads from a study's files and job records."""

import contextlib
import dataclasses
import io
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import files, layout
from fedpipe.planning import planner
from fedpipe.planning.plan import PlannedDiagnostic
from fedpipe.planning.planner import NewPlan
from fedpipe.report import status, status_table
from fedpipe.report.status import RunProgress
from tests import small_studies as studies

pytestmark = pytest.mark.usefixtures("in_empty_folder")

LABELS = ("fedavg", "fedprox", "scaffold")
TIMES = {"train": 1.0, "aggregate": 0.25, "evaluate": 0.75}


class StartedStudy(NamedTuple):
    folder: Path
    plan: NewPlan


@pytest.fixture(scope="module")
def started_study(tmp_path_factory: pytest.TempPathFactory) -> StartedStudy:
    """A study of three runs: done, begun, not begun."""
    folder = tmp_path_factory.mktemp("started")
    with contextlib.chdir(folder):
        plan = studies.prepare(studies.settings(LABELS, 3))
        done, begun, _ = studies.open_runs(plan)
        studies.finish_run(done, 3)
        list(begun.run_segment(2))
        for run in (done, begun):
            for number in run.files.list_complete_rounds():
                files.write_json(run.files.get_round_files(number).times, TIMES)
        merged_files = plan.runs[0].merged_files
        files.write_json(merged_files.times, files.read_json(merged_files.times) | {"rounds": [TIMES] * 3})
    return StartedStudy(folder, plan)


@pytest.fixture
def plan(started_study: StartedStudy) -> NewPlan:
    """The plan of a copy of the study in the current folder."""
    shutil.copytree(started_study.folder, Path(), dirs_exist_ok=True)
    return started_study.plan


def render_table(plan: NewPlan, height: int | None = None) -> str:
    screen = Console(file=io.StringIO(), width=200)
    screen.print(status_table.render_progress_table(plan, *status.load_progress_and_failures(plan), 200, height))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def write_segment_records(plan: NewPlan, *events: dict[str, Any], number: int = 1, lock: bool = True) -> str:
    """Write records of FedProx's segment by the Snakemake with this number. Return the path of the segment's log."""
    key = plan.runs[1].path
    log = f"results/logs/segment/fedprox-{key.name}-0003.log"
    job = {"job": 3, "rule": "segment", "output": [f"{key}/segments/0003.json"], "log": [log]}
    slurm_log = {"log": [log, "slurm_logs/8.log"]}
    records = [
        {"time": BEGIN + 100 * number + index} | job | (slurm_log if event["event"] == "job_error" else {}) | event
        for index, event in enumerate(events)
    ]
    write_records(*records, number=number)
    if lock:
        files.write_bytes(Path(".snakemake/locks/0.output.lock"), b"")
    return log


def write_records(*records: dict[str, Any], number: int = 1) -> Path:
    path = Path(f".snakemake/fedpipe/jobs/{number}-8.jsonl")
    files.write_bytes(path, "".join(f"{json.dumps(record)}\n" for record in records).encode())
    return path


BEGIN = 1.7e9 + 0.25  #: seconds since the epoch
BEGUN = {"event": "job_info"}
FAILED = {"event": "job_error", "error": "", "interrupted": False}
INTERRUPTED = FAILED | {"interrupted": True}


def read_failures(plan: NewPlan) -> list[status.Failure]:
    return status.load_progress_and_failures(plan)[1]


def write_log(log: Path, text: str, time: float) -> None:
    """Write the log of a job at this time."""
    files.write_bytes(log, text.encode())
    os.utime(log, (time, time))


def read_states(plan: NewPlan) -> dict[str, str]:
    labels = {plan.get_method_title(label): label for label in plan.algorithms}
    return {labels[run.name.split()[0]]: run.state for run in status.load_progress_and_failures(plan)[0]}


def test_run_progress_has_rounds_accuracy_and_time_left(plan: NewPlan) -> None:
    done, begun, waiting = status.load_progress_and_failures(plan)[0]
    table = layout.read_merged_table(plan.runs[0].files.get_merged_files(3).metrics).to_pandas()
    last = table[(table["round"] == 3) & (table["protocol"] == plan.protocols[0])]
    assert done == RunProgress("FedAvg seed 0", "done", 3, 3, last["correct"].sum() / last["total"].sum(), 2.0)
    assert (begun.state, begun.rounds, begun.seconds, begun.seconds_left) == ("stopped", 2, 2.0, 2.0)
    assert waiting == RunProgress("SCAFFOLD seed 0", "waiting", 0, 3, None, None)
    assert status.summarize_progress([done, begun, waiting]) == [
        "3 runs (1 done, 1 waiting, 1 stopped), 5 of 9 rounds, about 8 s left"
    ]


def test_run_progress_has_accuracy_of_models_after_local_training() -> None:
    """The accuracy is empty before the first evaluation. A dash would mean that the method has no such model."""
    protocols = {"protocols": ["trained-on-local", "global-on-global"], "every": 2}
    plan = studies.prepare(studies.settings(rounds=2, evaluation=protocols))
    (run,) = studies.open_runs(plan)
    steps = run.run_segment(2)
    assert [next(steps), next(steps)] == [0, 1]
    assert status.load_progress_and_failures(plan)[0][0].accuracy is None, "nothing is measured yet"
    list(steps)
    rows = files.read_parquet(run.files.get_round_files(2).trained_accuracies).to_pylist()
    accuracy = sum(row["correct"] for row in rows) / sum(row["total"] for row in rows)
    assert status.load_progress_and_failures(plan)[0][0].accuracy == accuracy
    assert f"{100 * accuracy:.2f} %" in render_table(plan)


def test_seconds_of_run_are_mean_of_last_five_rounds() -> None:
    plan = studies.prepare(studies.settings(rounds=7, evaluation={"every": 7}))
    (run,) = studies.open_runs(plan)
    list(run.run_segment(7))
    times = [{"train": 2.0**number, "aggregate": 0.0, "evaluate": 0.0} for number in range(1, 8)]
    for number, round_times in enumerate(times, start=1):
        files.write_json(run.files.get_round_files(number).times, round_times)
    expected = (8 + 16 + 32 + 64 + 128) / 5
    assert status.load_progress_and_failures(plan)[0][0].seconds == expected
    studies.finish_run(run, 7)
    merged_times = plan.runs[0].merged_files.times
    files.write_json(merged_times, files.read_json(merged_times) | {"rounds": times})
    (progress,) = status.load_progress_and_failures(plan)[0]
    assert (progress.state, progress.seconds) == ("done", expected)
    files.write_json(merged_times, {})
    (progress,) = status.load_progress_and_failures(plan)[0]
    assert progress.damage.startswith(f"{merged_times} can't be read (its field rounds is missing")


@pytest.mark.parametrize(("every", "rounds", "expected"), [(3, 8, 1 + 9 / 3), (8, 8, 1 + 24 / 8), (2, 6, 1 + 6 / 2)])
def test_seconds_of_round_have_its_part_of_evaluation(every: int, rounds: int, expected: float) -> None:
    """Also if the last five rounds have no evaluation, or more than their part."""
    plan = studies.prepare(studies.settings(rounds=24, evaluation={"every": every}))
    (run,) = studies.open_runs(plan)
    list(run.run_segment(rounds))
    times = [
        {"train": 0.75, "aggregate": 0.25} | ({} if number % every else {"evaluate": 3.0 * every})
        for number in range(1, rounds + 1)
    ]
    for number, round_times in enumerate(times, start=1):
        files.write_json(run.files.get_round_files(number).times, round_times)
    (progress,) = status.load_progress_and_failures(plan)[0]
    assert (progress.seconds, progress.seconds_left) == (expected, expected * (24 - rounds))
    studies.finish_run(run, 24)
    merged_times = plan.runs[0].merged_files.times
    files.write_json(merged_times, files.read_json(merged_times) | {"rounds": times})
    (progress,) = status.load_progress_and_failures(plan)[0]
    assert (progress.state, progress.seconds) == ("done", expected)


@pytest.mark.parametrize("name", ["marker", "metrics", "times"])
@pytest.mark.parametrize("content", [b"", b"{}"])
def test_status_shows_other_runs_next_to_damaged_run(
    plan: NewPlan, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    path: Path = getattr(plan.runs[0].merged_files, name)
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"^{path} "):
        status_table.show_progress(lambda: plan)
    table = capsys.readouterr().out
    assert "3 runs (1 waiting, 1 stopped, 1 damaged), 2 of 9 rounds" in table
    assert "2/3" in table


@pytest.mark.parametrize("rounds", [[3, 4], None, {}, "fast"])
def test_complete_run_with_damaged_times_is_damaged(plan: NewPlan, rounds: Any) -> None:
    path = plan.runs[0].merged_files.times
    path.write_text(json.dumps({"rounds": rounds}))
    progress = status.load_progress_and_failures(plan)[0][0]
    assert progress.state == "damaged"
    assert f"{path} can't be read (its field rounds is missing or damaged)" in progress.damage


def test_complete_run_without_its_rounds_is_damaged(plan: NewPlan) -> None:
    """Snakemake has nothing to do for this run. So it does not wait, as long as the manifest of its segment exists."""
    run = plan.runs[0]
    Path(f"{run.files.rounds_folder}.zip").unlink()
    progress = status.load_progress_and_failures(plan)[0][0]
    assert progress.state == "damaged"
    assert f"{run.files.get_round_files(1).marker} is missing. Delete {run.path}/segments, and run" in progress.damage
    shutil.rmtree(run.path / "segments")
    assert status.load_progress_and_failures(plan)[0][0].state == "waiting"


def test_watched_status_ends_if_other_runs_are_damaged(plan: NewPlan) -> None:
    progress, failures = status.load_progress_and_failures(plan)
    done, begun, _ = progress
    damaged = dataclasses.replace(begun, state="damaged", damage="b is damaged")
    assert not failures
    assert not status.has_runs_to_do(plan, [done, damaged])
    assert status.has_runs_to_do(plan, [done, begun])
    with pytest.raises(ArtifactError, match=r"^b is damaged$"):
        status.require_intact_runs([done, damaged, damaged])
    status.require_intact_runs([done, begun])


def test_time_left_depends_on_number_of_parallel_runs() -> None:
    runs = [RunProgress(str(number), "running", 5, 10, None, 2.0) for number in range(4)]
    assert status.estimate_seconds_left(runs) == 10
    waiting = RunProgress("more", "waiting", 0, 10, None, None)
    assert status.estimate_seconds_left([*runs, waiting]) == 20, "the waiting run takes longest"
    assert status.estimate_seconds_left([RunProgress("one", "waiting", 0, 10, None, None)]) is None


def test_run_state_follows_job_records_and_log(plan: NewPlan) -> None:
    log = Path(write_segment_records(plan, BEGUN))
    assert read_states(plan)["fedprox"] == "queued"
    files.write_bytes(log, b"one\ntwo\n")
    assert read_states(plan)["fedprox"] == "running"
    assert read_states(plan)["scaffold"] == "waiting"
    os.utime(log, (0, 0))
    assert read_states(plan)["fedprox"] == "queued", "the log is from an earlier attempt"

    write_segment_records(plan, BEGUN, FAILED)
    assert read_states(plan)["fedprox"] == "failed"
    (failure,) = read_failures(plan)
    assert (failure.rule, failure.log, failure.lines) == ("segment", log, ["one", "two"])
    write_segment_records(plan, BEGUN, FAILED, BEGUN)
    assert read_states(plan)["fedprox"] == "queued", "the job was begun again"
    assert not read_failures(plan)
    write_segment_records(plan, BEGUN, FAILED, number=2)
    write_segment_records(plan, BEGUN, number=3)
    assert read_states(plan)["fedprox"] == "queued", "another Snakemake began the job again"
    Path(".snakemake/locks/0.output.lock").unlink()
    assert read_states(plan)["fedprox"] == "stopped"


def test_run_state_without_job_records_follows_lock_and_log(plan: NewPlan) -> None:
    """For example, Snakemake runs with `--workflow-profile none`, or you run a stage by hand."""
    assert read_states(plan)["fedprox"] == "stopped"
    files.write_bytes(Path(".snakemake/locks/0.output.lock"), b"")
    assert read_states(plan)["fedprox"] == "stopped"
    write_log(Path(f"results/logs/segment/fedprox-{plan.runs[1].path.name}-0003.log"), "one\n", 2e9)
    assert read_states(plan)["fedprox"] == "running"
    assert not read_failures(plan)


def test_begun_run_waits_while_snakemake_runs_its_study(plan: NewPlan) -> None:
    """Snakemake has begun with the study's third run. The second run, of an earlier Snakemake, follows."""
    other = plan.runs[2].path
    write_segment_records(plan, BEGUN, INTERRUPTED)
    lock = Path(".snakemake/locks/0.output.lock")
    os.utime(lock, (BEGIN + 200, BEGIN + 200))
    job = {"time": BEGIN + 201, "job": 4, "rule": "segment", "log": ["2.log"]}
    for path, state in ((Path("results/runs/other/0123456789ab"), "stopped"), (other, "waiting")):
        write_records(BEGUN | job | {"output": [f"{path}/segments/0003.json"]}, number=2)
        assert read_states(plan)["fedprox"] == state, path
    assert read_states(plan)["scaffold"] == "queued"
    write_segment_records(plan, BEGUN, INTERRUPTED, number=3, lock=False)
    assert read_states(plan)["fedprox"] == "stopped", "this Snakemake began and stopped it"
    lock.unlink()
    write_records(number=3)
    assert read_states(plan)["fedprox"] == "stopped", "no Snakemake runs"


def test_run_interrupted_by_ctrl_c_is_stopped(plan: NewPlan) -> None:
    write_log(Path(write_segment_records(plan, BEGUN, INTERRUPTED)), "one\n", 0)
    assert read_states(plan)["fedprox"] == "stopped"
    assert not read_failures(plan)
    write_segment_records(plan, BEGUN, INTERRUPTED, BEGUN, FAILED)
    assert read_states(plan)["fedprox"] == "failed", "the later job failed without an interrupt"
    write_segment_records(plan, BEGUN, INTERRUPTED)
    write_segment_records(plan, BEGUN, FAILED, number=2)
    assert read_states(plan)["fedprox"] == "failed", "another Snakemake began the job again"
    assert len(read_failures(plan)) == 1


def test_run_state_separates_records_of_parallel_snakemakes(plan: NewPlan) -> None:
    """The last record of a job counts. Each Snakemake has its own job numbers."""
    other = {"job": 3, "rule": "table", "output": ["results/tables/results.md"], "log": ["results/logs/table.log"]}
    segment = {"job": 5, "rule": "segment", "output": [f"{plan.runs[1].path}/segments/0003.json"], "log": ["one.log"]}
    write_segment_records(plan, BEGUN | {"time": BEGIN + 20}, number=1)
    events = (BEGUN | other, FAILED | other, BEGUN | segment, FAILED | segment)
    write_records(*(event | {"time": BEGIN + time} for time, event in enumerate(events, 1)), number=2)
    failures = {(failure.rule, str(failure.log)) for failure in read_failures(plan)}
    assert failures == {("table", "results/logs/table.log"), ("segment", "one.log")}
    assert read_states(plan)["fedprox"] == "failed"
    log = Path(write_segment_records(plan, BEGUN, number=1))
    write_records(FAILED | {"job": 9, "time": BEGIN, "rule": "segment", "output": ["a"], "log": [str(log)]}, number=2)
    assert read_states(plan)["fedprox"] == "queued", "the file of Snakemake 2 sorts last, but its record is older"


def test_run_state_ignores_damaged_job_records(plan: NewPlan) -> None:
    """For example, Snakemake was killed during a write, or the disk is full."""
    write_segment_records(plan, BEGUN, FAILED)
    path = Path(".snakemake/fedpipe/jobs/1-8.jsonl")
    whole = path.read_bytes()
    for damage in (b'{"event": "job_inf', b"\xff\x00", b"[1]\n3\nnull", b'{"event": "job_error", "time": "x"}'):
        files.write_bytes(path, damage + b"\n" + whole + damage)
        assert read_states(plan)["fedprox"] == "failed"
    later = json.loads(whole.splitlines()[0]) | {"time": BEGIN + 200}
    assert later["event"] == "job_info"
    states = {"time": "failed", "output": "failed", "log": "failed", "rule": "queued", "job": "queued"}
    for field, state in states.items():
        for value in (None, 7.5):
            if (field, value) != ("time", 7.5):  # the time of an older record
                write_records(later | {field: value}, number=2)
                assert read_states(plan)["fedprox"] == state, (field, value)
    write_records(later, number=2)
    assert read_states(plan)["fedprox"] == "queued", "the record is not damaged"
    write_records(number=2)
    files.write_bytes(path, whole[:-20])
    assert read_states(plan)["fedprox"] == "queued", "the record of the failure is incomplete"


def test_run_ended_by_sigterm_after_round_is_stopped(plan: NewPlan) -> None:
    path = plan.runs[1].path
    log = Path(write_segment_records(plan, BEGUN, FAILED))
    end = f"{path}: stopped by SIGTERM after round 2. Type the same command to resume."
    moment = BEGIN + 100.5  # between the start and the end of the job
    write_log(log, f"one\n{end}\n", moment)
    assert read_states(plan)["fedprox"] == "stopped"
    assert not read_failures(plan)
    write_log(log, f"one\n{end}\nTraceback\n", moment)
    assert read_states(plan)["fedprox"] == "failed", "the job was begun again after SIGTERM"
    write_segment_records(plan, BEGUN, FAILED, BEGUN)
    write_log(log, f"one\n{end}\n", 0)
    assert read_states(plan)["fedprox"] == "queued"
    write_segment_records(plan, BEGUN, FAILED, BEGUN, FAILED)
    os.utime(log, (moment, moment))
    assert read_states(plan)["fedprox"] == "failed", "the later job failed before it wrote to the log"


def test_status_shows_failed_jobs_of_all_rules(plan: NewPlan) -> None:
    """Some of the jobs belong to no run."""
    run = plan.runs[0]
    diagnostic = PlannedDiagnostic(
        name="norms", kind="head-norms", algorithm="fedavg", run_key=run.key, rounds=3, round=3, key="0" * 12
    )
    plan = dataclasses.replace(plan, diagnostics=(diagnostic,))
    layout.get_dataset_path(run.dataset).unlink()
    layout.get_assignment_path(run.partition).unlink()
    outputs: dict[str, list[Any]] = {
        "diagnostic": [diagnostic.files.table, diagnostic.files.marker],
        "download": [layout.get_dataset_path(run.dataset)],
        "partition": [layout.get_assignment_path(run.partition)],
        "table": ["results/tables/results.md"],
        "curves": ["results/figures/curves.svg"],
        "partition_figure": ["results/figures/partition-iid.svg"],
    }
    for rule in outputs:
        files.write_bytes(Path(f"results/logs/{rule}.log"), f"{rule} failed\n".encode())
    job = FAILED | {"time": BEGIN, "job": 1}
    write_records(
        *(
            job | {"rule": rule, "output": [*map(str, paths)], "log": [f"results/logs/{rule}.log"]}
            for rule, paths in outputs.items()
        )
    )
    lines_by_rule = {failure.rule: failure.lines for failure in read_failures(plan)}
    assert lines_by_rule == {rule: [f"{rule} failed"] for rule in outputs}
    other = dataclasses.replace(plan, params=Path("studies/other.yaml"), diagnostics=())
    rules = {failure.rule for failure in read_failures(other)}
    assert rules == {"download", "partition"}, "both studies need these files"
    files.write_bytes(diagnostic.files.table, b"")
    assert "diagnostic" in {failure.rule for failure in read_failures(plan)}
    files.write_bytes(diagnostic.files.marker, b"")
    assert "diagnostic" not in {failure.rule for failure in read_failures(plan)}, "the diagnostic ended"


def test_status_shows_end_of_log_of_failed_job(plan: NewPlan) -> None:
    log = Path(write_segment_records(plan, BEGUN, FAILED))
    assert "its log is empty: the job was killed" in render_table(plan)
    write_segment_records(plan, BEGUN, FAILED | {"error": "It asks for more time than its partition allows."})
    assert "its log is empty: It asks for more time than its partition allows." in render_table(plan)
    files.write_bytes(Path("slurm_logs/8.log"), b"slurmstepd: out of memory\n")
    text = "\n".join(f"line {number}" for number in range(9))
    assert "  slurmstepd: out of memory\n" in render_table(plan)
    files.write_bytes(log, f"{text}\n".encode())
    assert f"segment failed: {log}\n" in render_table(plan)
    assert "  line 4\n" in render_table(plan)
    assert "line 3" not in render_table(plan)


def test_status_ignores_failed_job_of_another_study(plan: NewPlan) -> None:
    write_segment_records(plan, FAILED | {"output": ["results/runs/other/0123456789ab/segments/0003.json"]})
    assert not read_failures(plan)


def test_status_ignores_failed_segment_after_edit_of_rounds(plan: NewPlan) -> None:
    """The failed job would have computed five rounds. Now the study has three."""
    for number, run in enumerate(plan.runs[:2]):
        log = f"results/logs/segment/{run.algorithm}-{run.key}-0005.log"
        earlier = FAILED | {"output": [f"{run.path}/segments/0005.json"], "log": [log]}
        write_segment_records(plan, earlier, number=number)
    assert read_states(plan) == {"fedavg": "done", "fedprox": "failed", "scaffold": "waiting"}
    assert [failure.run for failure in read_failures(plan)] == ["FedProx seed 0"], "FedAvg is complete"
    write_segment_records(plan, BEGUN, number=2)
    assert read_states(plan)["fedprox"] == "queued"
    assert not read_failures(plan)


@pytest.mark.parametrize("is_split_later", [True, False])
def test_status_ignores_failed_job_after_run_is_split_otherwise(plan: NewPlan, is_split_later: bool) -> None:
    """After a time limit the error advises `execution: {rounds_per_job: 1, clients_per_job: 1}`, or the reverse."""
    run = plan.runs[1].files
    segment = {"output": [str(run.get_segment_manifest_path(3))], "log": ["segment.log"]}
    block = {"output": [str(run.get_round_files(3).get_block_uploads_path(0))], "log": ["train.log"], "rule": "train"}
    first, last = (segment, block) if is_split_later else (block, segment)
    write_segment_records(plan, BEGUN | first, FAILED | first)
    assert read_states(plan)["fedprox"] == "failed"
    write_segment_records(plan, BEGUN | last, number=2)
    assert read_states(plan)["fedprox"] == "queued"
    assert not read_failures(plan)


def test_finished_job_with_temporary_output_is_not_running(plan: NewPlan) -> None:
    files_of_round = plan.runs[1].files.get_round_files(3)
    block = {"output": [str(files_of_round.get_block_uploads_path(0))], "log": ["train.log"], "rule": "train"}
    aggregation = {"output": [str(files_of_round.complete_states_marker)], "log": ["b.log"], "rule": "aggregate"}
    write_segment_records(plan, BEGUN | block, {"event": "job_finished"}, BEGUN | aggregation | {"job": 4})
    files.write_bytes(Path("train.log"), b"done")
    assert read_states(plan)["fedprox"] == "queued", "Snakemake has deleted the uploads"


def test_run_of_killed_snakemake_is_stopped(plan: NewPlan) -> None:
    log = Path(write_segment_records(plan, BEGUN))
    files.write_bytes(log, b"one\n")
    ended_process = subprocess.Popen([sys.executable, "-c", ""])
    ended_process.wait()
    folder = Path(".snakemake/fedpipe/jobs")
    for process, machine, state in (
        (ended_process.pid, platform.node(), "stopped"),
        (ended_process.pid, "another", "running"),
        (os.getpid(), platform.node(), "running"),
    ):
        (record,) = folder.iterdir()
        record = record.rename(folder / f"1-{process}-{machine}.jsonl")
        record.touch()
        assert read_states(plan)["fedprox"] == state
    record = record.rename(folder / f"1-{ended_process.pid}-{platform.node()}.jsonl")
    os.utime(record, (1, 1))
    assert read_states(plan)["fedprox"] == "running", "the lock is of a later Snakemake"


def test_progress_table_sorts_active_runs_first_and_counts_hidden_runs(plan: NewPlan) -> None:
    log = Path(write_segment_records(plan, BEGUN))
    files.write_bytes(log, b"")
    rows = [line.split()[0] for line in render_table(plan).splitlines()[3:]]
    assert rows == ["FedProx", "SCAFFOLD", "FedAvg"]
    small = render_table(plan, height=6)
    assert "FedProx" in small
    assert "SCAFFOLD" not in small
    assert "… and 2 more" in small


def test_watched_status_ends_when_runs_are_done_without_torch(plan: NewPlan) -> None:
    studies.write(studies.settings(LABELS[:1], 3), Path())
    planner.write_plan(planner.make_plan())
    program = (
        "import sys; sys.argv = ['fedpipe', 'status', '--watch']\nfrom fedpipe.cli import app\n"
        "try: app.main()\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "1 run (1 done), 3 of 3 rounds\n" in done.stdout
    assert "AssertionError" not in done.stderr


def test_progress_table_shows_dash_for_method_without_first_protocol() -> None:
    """Otherwise a personal accuracy would be next to a global one."""
    plan = studies.prepare(studies.settings(("fedavg", "local", "fedprox"), 1))
    for run in studies.open_runs(plan)[:2]:
        list(run.run_segment(1))
    _, metric, *lines = render_table(plan).splitlines()
    assert metric.strip() == "accuracy: Global test accuracy (global model)"
    head, *rows = [line.split() for line in lines]
    assert head == ["run", "rounds", "accuracy", "s/round", "time", "left", "state"]
    table = files.read_parquet(plan.runs[0].files.get_round_files(1).metrics).to_pandas()
    rows_of_protocol = table[table["protocol"] == "global-on-global"]
    accuracy = f"{100 * rows_of_protocol['correct'].sum() / rows_of_protocol['total'].sum():.2f}"
    assert {row[0]: accuracy in row for row in rows} == {"FedAvg": True, "Local": False, "FedProx": False}
    assert {row[0]: "–" in row for row in rows} == {"FedAvg": False, "Local": True, "FedProx": False}


def test_progress_table_shows_protocol_of_each_method() -> None:
    """As the table of results: Local has no global model, and its own protocol."""
    study = studies.settings(("fedavg", "local"), 1, algorithms={"local": {"protocol": "personal-on-local"}})
    plan = studies.prepare(study)
    for run in studies.open_runs(plan):
        list(run.run_segment(1))
    _, metric, *_ = render_table(plan).splitlines()
    assert metric.split(". ") == [
        "accuracy: Global test accuracy (global model)",
        "Local: Local test accuracy (personalized)",
    ]
    runs, protocols = status.load_progress_and_failures(plan)[0], ("global-on-global", "personal-on-local")
    for run, progress, protocol in zip(plan.runs, runs, protocols, strict=True):
        table = files.read_parquet(run.files.get_round_files(1).metrics).to_pandas()
        sums = table[table["protocol"] == protocol][["correct", "total"]].sum()
        assert progress.accuracy == sums["correct"] / sums["total"]


LONG_NAMES = {
    "algorithms": {
        "fedavg": {},
        "feddw": {},
        "sharpness_aware_minimization": {"algorithm": "fedprox", "title": "Sharpness-aware minimization at a client"},
        "sharpness_aware_averaging": {"algorithm": "fedprox", "title": "Sharpness-aware averaging at a client"},
    },
    "study": {
        "algorithms": ["fedavg", "feddw", "sharpness_aware_minimization", "sharpness_aware_averaging"],
        "seeds": [0, 1],
        "grid": {
            "federation.learning_rate": [0.05, 0.1],
            "partition.minimum": [10, 12],
            "algorithms.feddw.mu": [0.1, 1.0],
        },
    },
}


@pytest.mark.parametrize("params", ["shipped", "long names"])
def test_progress_table_has_one_line_per_run_at_80_columns(params: str) -> None:
    """The study of README, and a grid of long names. Rows stay distinct."""
    if params == "shipped":
        shutil.copy(studies.ROOT / "params.yaml", "params.yaml")
    else:
        studies.write(studies.settings(rounds=1000) | LONG_NAMES, Path())
    plan = planner.make_plan()
    planner.write_plan(plan)
    environment = os.environ | {"COLUMNS": "80"}
    command = [sys.executable, "-m", "fedpipe", "status"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    summary, metric, head, *rows = lines
    assert summary.startswith(f"{len(plan.runs)} runs ({len(plan.runs)} waiting)")
    assert metric.startswith("accuracy: ")
    assert head.split()[0] == "run"
    assert len(rows) == len(set(rows)) == len(plan.runs) == (27 if params == "shipped" else 40)
    assert all(row.split()[-1] == "waiting" and f"0/{plan.runs[0].rounds}" in row for row in rows)
    assert "0.05" in done.stdout or params == "shipped", "values stay complete"


def test_shorten_columns_cuts_headers_then_longest_texts() -> None:
    rows = [["run", "learning_rate", "seed"], ["FedAvg with momentum", "0.05", "0"], ["FedDW", "0.1", "1"]]
    assert status_table.shorten_columns_to_width(rows, 41) == rows
    assert status_table.shorten_columns_to_width(rows, 35) == [["run", "lea…ate", "seed"], *rows[1:]]
    narrow = status_table.shorten_columns_to_width(rows, 24)
    assert narrow == [["run", "le…te", "seed"], ["FedAv…entum", "0.05", "0"], ["FedDW", "0.1", "1"]]


def test_progress_summary_has_two_lines_if_too_wide() -> None:
    runs = [RunProgress("one", "running", 5, 10, None, 2.0)]
    assert status.summarize_progress(runs, 80) == ["1 run (1 running), 5 of 10 rounds, about 10 s left"]
    assert status.summarize_progress(runs, 30) == ["1 run (1 running)", "5 of 10 rounds, about 10 s left"]


def test_progress_curves_contain_all_evaluated_rounds(plan: NewPlan) -> None:
    done, begun, waiting = status.load_progress_and_failures(plan, has_curves=True)[0]
    assert (sorted(done.curves), sorted(begun.curves), waiting.curves) == ([1, 2, 3], [1, 2], {})
    for planned, run in zip(plan.runs, (done, begun), strict=False):
        for number in run.curves:
            rows = files.read_parquet(planned.files.get_round_files(number).metrics).to_pylist()
            for protocol in plan.protocols:
                counts = [(row["correct"], row["total"]) for row in rows if row["protocol"] == protocol]
                correct, total = map(sum, zip(*counts, strict=True))
                assert run.curves[number][protocol] == correct / total
    assert [run.accuracy for run in status.load_progress_and_failures(plan)[0]] == [done.accuracy, begun.accuracy, None]


def test_failed_job_logs_fill_at_most_half_of_watched_screen(plan: NewPlan) -> None:
    """Wrapped lines count, so the display fits. Without a height, all logs are printed."""
    runs, _ = status.load_progress_and_failures(plan)
    failures = [status.Failure("", "segment", Path(f"{number}.log"), ["x" * 150] * 3) for number in range(4)]
    screen = Console(file=io.StringIO(), width=80)
    assert isinstance(screen.file, io.StringIO)
    screen.print(status_table.render_progress_table(plan, runs, failures, 80, 24))
    lines = screen.file.getvalue().splitlines()
    assert len(lines) <= 24
    assert "segment failed: 0.log" in lines
    assert lines[-1] == "failed jobs not shown: 3"
    screen.print(status_table.render_progress_table(plan, runs, failures, 80))
    assert "segment failed: 3.log" in screen.file.getvalue()
