"""What `fedpipe status` reads in a study's files and the records of its jobs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedpipe.core.storage import files, layout
from fedpipe.engine import collect
from fedpipe.planning import planner
from fedpipe.planning.plan import PlannedDiagnostic
from fedpipe.planning.planner import NewPlan
from fedpipe.report import status, status_table
from fedpipe.report.status import RunProgress
from tests import small_studies as studies

LABELS = ("fedavg", "fedprox", "scaffold")
TIMES = {"train": 1.0, "aggregate": 0.25, "evaluate": 0.75}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan() -> NewPlan:
    """A study of three runs: done, begun, not begun."""
    plan = studies.prepare(studies.settings(LABELS, 3))
    done, begun, _ = studies.open_runs(plan)
    list(done.run_segment(3))
    collect.collect_rounds(done.files, 3, "all")
    list(begun.run_segment(2))
    for run in (done, begun):
        for number in run.files.list_complete_rounds():
            files.write_json(run.files.get_round_files(number).times, TIMES)
    merged_files = plan.runs[0].merged_files
    files.write_json(merged_files.times, files.read_json(merged_files.times) | {"rounds": [TIMES] * 3})
    return plan


def render(plan: NewPlan, height: int | None = None) -> str:
    screen = Console(file=io.StringIO(), width=200)
    screen.print(status_table.render_progress_table(plan, *status.load_run_progress(plan), 200, height))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def snakemake(plan: NewPlan, *events: dict[str, Any], number: int = 1, lock: bool = True) -> str:
    """Records of FedProx's segment by the snakemake of that number; the segment's log."""
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


def states(plan: NewPlan) -> dict[str, str]:
    labels = {plan.get_method_title(label): label for label in plan.algorithms}
    return {labels[run.name.split()[0]]: run.state for run in status.load_run_progress(plan)[0]}


def test_rounds_accuracy_rate_and_time_left(plan: NewPlan) -> None:
    done, begun, waiting = status.load_run_progress(plan)[0]
    table = layout.read_merged_table(plan.runs[0].files.get_merged_files(3).metrics).to_pandas()
    last = table[(table["round"] == 3) & (table["protocol"] == plan.protocols[0])]
    assert done == RunProgress("FedAvg seed 0", "done", 3, 3, last["correct"].sum() / last["total"].sum(), 2.0)
    assert (begun.state, begun.rounds, begun.seconds, begun.seconds_left) == ("stopped", 2, 2.0, 2.0)
    assert waiting == RunProgress("SCAFFOLD seed 0", "waiting", 0, 3, None, None)
    assert status.summarize_progress([done, begun, waiting]) == [
        "3 runs (1 done, 1 waiting, 1 stopped), 5 of 9 rounds, about 8 s left"
    ]


def test_models_right_after_training_are_measured_in_files_of_their_own() -> None:
    """The accuracy is empty before the first evaluation. A dash would mean that the method has no such model."""
    protocols = {"protocols": ["trained-on-local", "global-on-global"], "every": 2}
    plan = studies.prepare(studies.settings(rounds=2, evaluation=protocols))
    (run,) = studies.open_runs(plan)
    steps = run.run_segment(2)
    assert [next(steps), next(steps)] == [0, 1]
    assert status.load_run_progress(plan)[0][0].accuracy is None, "nothing is measured yet"
    list(steps)
    rows = files.read_parquet(run.files.get_round_files(2).trained_accuracies).to_pylist()
    accuracy = sum(row["correct"] for row in rows) / sum(row["total"] for row in rows)
    assert status.load_run_progress(plan)[0][0].accuracy == accuracy
    assert f"{100 * accuracy:.2f} %" in render(plan)


def test_time_left_counts_what_runs_at_once() -> None:
    runs = [RunProgress(str(number), "running", 5, 10, None, 2.0) for number in range(4)]
    assert status.estimate_time_left(runs) == 10
    assert (
        status.estimate_time_left([*runs, RunProgress("more", "waiting", 0, 10, None, None)]) == 20
    )  # its own rounds last longest
    assert status.estimate_time_left([RunProgress("one", "waiting", 0, 10, None, None)]) is None


def test_queued_running_failed_and_begun_again(plan: NewPlan) -> None:
    log = Path(snakemake(plan, BEGUN))
    assert states(plan)["fedprox"] == "queued"
    files.write_bytes(log, b"one\ntwo\n")
    assert states(plan)["fedprox"] == "running"
    assert states(plan)["scaffold"] == "waiting"
    os.utime(log, (0, 0))
    assert states(plan)["fedprox"] == "queued", "the log is of an earlier attempt"

    snakemake(plan, BEGUN, FAILED)
    assert states(plan)["fedprox"] == "failed"
    (failure,) = status.load_run_progress(plan)[1]
    assert (failure.rule, failure.log, failure.lines) == ("segment", log, ["one", "two"])
    snakemake(plan, BEGUN, FAILED, BEGUN)
    assert states(plan)["fedprox"] == "queued", "it was begun again"
    assert not status.load_run_progress(plan)[1]
    snakemake(plan, BEGUN, FAILED, number=2)
    snakemake(plan, BEGUN, number=3)
    assert states(plan)["fedprox"] == "queued", "another snakemake began it again"
    Path(".snakemake/locks/0.output.lock").unlink()
    assert states(plan)["fedprox"] == "stopped"


def test_a_snakemake_without_records_counts_by_its_files(plan: NewPlan) -> None:
    """For example with `--workflow-profile none`, or a stage that you type by hand."""
    assert states(plan)["fedprox"] == "stopped"
    files.write_bytes(Path(".snakemake/locks/0.output.lock"), b"")
    assert states(plan)["fedprox"] == "stopped"
    log = Path(f"results/logs/segment/fedprox-{plan.runs[1].path.name}-0003.log")
    files.write_bytes(log, b"one\n")
    os.utime(log, (2e9, 2e9))
    assert states(plan)["fedprox"] == "running"
    assert not status.load_run_progress(plan)[1]


def test_what_ctrl_c_ended_is_stopped(plan: NewPlan) -> None:
    log = Path(snakemake(plan, BEGUN, INTERRUPTED))
    files.write_bytes(log, b"one\n")
    os.utime(log, (0, 0))
    assert states(plan)["fedprox"] == "stopped"
    assert not status.load_run_progress(plan)[1]
    snakemake(plan, BEGUN, INTERRUPTED, BEGUN, FAILED)
    assert states(plan)["fedprox"] == "failed", "the next one failed by itself"
    snakemake(plan, BEGUN, INTERRUPTED)
    snakemake(plan, BEGUN, FAILED, number=2)
    assert states(plan)["fedprox"] == "failed", "another snakemake began it again"
    assert len(status.load_run_progress(plan)[1]) == 1


def test_snakemakes_at_once_do_not_mix(plan: NewPlan) -> None:
    """The last record of a job counts. Each Snakemake has its own job numbers."""
    other = {"job": 3, "rule": "table", "output": ["results/tables/results.md"], "log": ["results/logs/table.log"]}
    snakemake(plan, BEGUN | {"time": BEGIN + 20}, number=1)
    write_records(
        BEGUN | other | {"time": BEGIN + 1},
        FAILED | other | {"time": BEGIN + 2},
        *(
            {"job": 5, "rule": "segment", "output": [f"{plan.runs[1].path}/segments/0003.json"], "log": ["one.log"]}
            | event
            for event in (BEGUN | {"time": BEGIN + 3}, FAILED | {"time": BEGIN + 4})
        ),
        number=2,
    )
    assert {(failure.rule, str(failure.log)) for failure in status.load_run_progress(plan)[1]} == {
        ("table", "results/logs/table.log"),
        ("segment", "one.log"),
    }
    assert states(plan)["fedprox"] == "failed"
    log = Path(snakemake(plan, BEGUN, number=1))
    write_records(FAILED | {"job": 9, "time": BEGIN, "rule": "segment", "output": ["a"], "log": [str(log)]}, number=2)
    assert states(plan)["fedprox"] == "queued", "a later snakemake's name sorts last, and its record is older"


def test_damaged_records_are_skipped(plan: NewPlan) -> None:
    """As by a snakemake that was killed while it wrote, or a full disk."""
    snakemake(plan, BEGUN, FAILED)
    path = Path(".snakemake/fedpipe/jobs/1-8.jsonl")
    whole = path.read_bytes()
    for damage in (b'{"event": "job_inf', b"\xff\x00", b"[1]\n3\nnull", b'{"event": "job_error", "time": "x"}'):
        files.write_bytes(path, damage + b"\n" + whole + damage)
        assert states(plan)["fedprox"] == "failed"
    for field in ("time", "rule", "output", "log", "job"):
        records = [json.loads(line) for line in whole.splitlines()]
        for value in (None, 7.5):
            write_records(*(record | {field: value} for record in records), number=2)
            assert states(plan)["fedprox"] == "failed", (field, value)
    write_records(number=2)
    files.write_bytes(path, whole[:-20])
    assert states(plan)["fedprox"] == "queued", "the failure is half written"


def test_a_segment_that_sigterm_ended_after_a_round_is_stopped(plan: NewPlan) -> None:
    path = plan.runs[1].path
    log = Path(snakemake(plan, BEGUN, FAILED))
    end = f"{path}: stopped by SIGTERM after round 2. Type the same command to resume."
    files.write_bytes(log, f"one\n{end}\n".encode())
    moment = BEGIN + 100.5  # between its begin and its end
    os.utime(log, (moment, moment))
    assert states(plan)["fedprox"] == "stopped"
    assert not status.load_run_progress(plan)[1]
    files.write_bytes(log, f"one\n{end}\nTraceback\n".encode())
    os.utime(log, (moment, moment))
    assert states(plan)["fedprox"] == "failed", "it was begun again since"
    files.write_bytes(log, f"one\n{end}\n".encode())
    snakemake(plan, BEGUN, FAILED, BEGUN)
    os.utime(log, (0, 0))
    assert states(plan)["fedprox"] == "queued"
    snakemake(plan, BEGUN, FAILED, BEGUN, FAILED)
    os.utime(log, (moment, moment))
    assert states(plan)["fedprox"] == "failed", "the next one died before its log"


def test_failed_jobs_of_all_kinds_are_told(plan: NewPlan) -> None:
    """Also jobs that belong to no run."""
    run = plan.runs[0]
    diagnostic = PlannedDiagnostic(
        name="norms", kind="head-norms", algorithm="fedavg", run_key=run.key, rounds=3, round=3, key="0" * 12
    )
    plan = dataclasses.replace(plan, diagnostics=(diagnostic,))
    layout.get_dataset_path(run.dataset).unlink()
    layout.get_assignment_path(run.partition).unlink()
    outputs = {
        "diagnostic": [diagnostic.files.table, diagnostic.files.marker],
        "download": [layout.get_dataset_path(run.dataset)],
        "partition": [layout.get_assignment_path(run.partition)],
        "table": ["results/tables/results.md"],
        "curves": ["results/figures/curves.svg"],
        "partition_figure": ["results/figures/partition-iid.svg"],
    }
    for rule in outputs:
        files.write_bytes(Path(f"results/logs/{rule}.log"), f"{rule} failed\n".encode())
    write_records(
        *(
            FAILED
            | {"time": BEGIN, "job": 1, "rule": rule, "output": [str(path) for path in paths]}  # type: ignore[attr-defined]
            | {"log": [f"results/logs/{rule}.log"]}
            for rule, paths in outputs.items()
        )
    )
    assert {failure.rule: failure.lines for failure in status.load_run_progress(plan)[1]} == {
        rule: [f"{rule} failed"] for rule in outputs
    }
    other = dataclasses.replace(plan, params=Path("studies/other.yaml"), diagnostics=())
    assert {failure.rule for failure in status.load_run_progress(other)[1]} == {"download", "partition"}, (
        "what both need"
    )
    files.write_bytes(diagnostic.files.table, b"")
    assert "diagnostic" in {failure.rule for failure in status.load_run_progress(plan)[1]}
    files.write_bytes(diagnostic.files.marker, b"")
    assert "diagnostic" not in {failure.rule for failure in status.load_run_progress(plan)[1]}, "it is finished now"


def test_a_failed_job_is_shown_with_the_end_of_its_log(plan: NewPlan) -> None:
    log = Path(snakemake(plan, BEGUN, FAILED))
    assert "its log is empty: the job was killed" in render(plan)
    snakemake(plan, BEGUN, FAILED | {"error": "It asks for more time than its partition allows."})
    assert "its log is empty: It asks for more time than its partition allows." in render(plan)
    files.write_bytes(Path("slurm_logs/8.log"), b"slurmstepd: out of memory\n")
    text = "\n".join(f"line {number}" for number in range(9))
    assert "  slurmstepd: out of memory\n" in render(plan)
    files.write_bytes(log, f"{text}\n".encode())
    assert f"segment failed: {log}\n" in render(plan)
    assert "  line 4\n" in render(plan)
    assert "line 3" not in render(plan)


def test_a_failed_job_of_another_study_is_not_ours(plan: NewPlan) -> None:
    snakemake(plan, FAILED | {"output": ["results/runs/other/0123456789ab/segments/0003.json"]})
    assert not status.load_run_progress(plan)[1]


def test_runs_at_work_come_first_and_what_has_no_room_is_counted(plan: NewPlan) -> None:
    log = Path(snakemake(plan, BEGUN))
    files.write_bytes(log, b"")
    rows = [line.split()[0] for line in render(plan).splitlines()[3:]]
    assert rows == ["FedProx", "SCAFFOLD", "FedAvg"]
    small = render(plan, height=7)
    assert "FedProx" in small
    assert "SCAFFOLD" not in small
    assert "… and 2 more" in small


def test_it_ends_when_all_is_done_and_imports_no_torch(plan: NewPlan) -> None:
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
    """Otherwise a personal accuracy would be next to a global one."""
    plan = studies.prepare(studies.settings(("fedavg", "local", "fedprox"), 1))
    for run in studies.open_runs(plan)[:2]:
        list(run.run_segment(1))
    _, metric, *lines = render(plan).splitlines()
    assert metric.strip() == "accuracy: Global test accuracy (global model)"
    head, *rows = [line.split() for line in lines]
    assert head == ["run", "rounds", "accuracy", "s/round", "time", "left", "state"]
    table = files.read_parquet(plan.runs[0].files.get_round_files(1).metrics).to_pandas()
    rows_of_protocol = table[table["protocol"] == "global-on-global"]
    accuracy = f"{100 * rows_of_protocol['correct'].sum() / rows_of_protocol['total'].sum():.2f}"
    assert {row[0]: accuracy in row for row in rows} == {"FedAvg": True, "Local": False, "FedProx": False}
    assert {row[0]: "–" in row for row in rows} == {"FedAvg": False, "Local": True, "FedProx": False}


LONG_NAMES = {
    "algorithms": {
        "fedavg": {},
        "feddw": {},
        "sharpness_aware_minimization": {
            "algorithm": "fedprox",
            "title": "Sharpness-aware minimization at each client",
        },
        "sharpness_aware_averaging": {"algorithm": "fedprox", "title": "Sharpness-aware averaging at each client"},
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
def test_each_run_has_one_line_at_80_columns(params: str) -> None:
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


def test_columns_become_narrower_at_heads_then_at_the_longest_texts() -> None:
    rows = [["run", "learning_rate", "seed"], ["FedAvg with momentum", "0.05", "0"], ["FedDW", "0.1", "1"]]
    assert status_table.shorten_columns_to_width(rows, 41) == rows
    assert status_table.shorten_columns_to_width(rows, 35) == [["run", "lea…ate", "seed"], *rows[1:]]
    narrow = status_table.shorten_columns_to_width(rows, 24)
    assert narrow == [["run", "le…te", "seed"], ["FedAv…entum", "0.05", "0"], ["FedDW", "0.1", "1"]]


def test_the_summary_takes_two_lines_if_it_is_wide() -> None:
    runs = [RunProgress("one", "running", 5, 10, None, 2.0)]
    assert status.summarize_progress(runs, 80) == ["1 run (1 running), 5 of 10 rounds, about 10 s left"]
    assert status.summarize_progress(runs, 30) == ["1 run (1 running)", "5 of 10 rounds, about 10 s left"]


def test_curves_contain_all_evaluated_rounds_of_complete_and_other_runs(plan: NewPlan) -> None:
    done, begun, waiting = status.load_run_progress(plan, has_curves=True)[0]
    assert (sorted(done.curves), sorted(begun.curves), waiting.curves) == ([1, 2, 3], [1, 2], {})
    for planned, run in zip(plan.runs, (done, begun), strict=False):
        for number in run.curves:
            rows = files.read_parquet(planned.files.get_round_files(number).metrics).to_pylist()
            for protocol in plan.protocols:
                counts = [(row["correct"], row["total"]) for row in rows if row["protocol"] == protocol]
                correct, total = map(sum, zip(*counts, strict=True))
                assert run.curves[number][protocol] == correct / total
    assert [run.accuracy for run in status.load_run_progress(plan)[0]] == [done.accuracy, begun.accuracy, None]


def test_logs_of_failed_jobs_take_at_most_half_of_a_watched_screen(plan: NewPlan) -> None:
    """Wrapped lines count, so that the display fits. Without a height, all are printed."""
    runs, _ = status.load_run_progress(plan)
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
