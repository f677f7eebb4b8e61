"""Forecasts of a study from earlier runs with the same model and data."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.storage import files, layout
from fedpipe.core.storage.layout import MergedRoundFiles, RunFiles
from fedpipe.planning import planner
from fedpipe.report import forecast
from tests import small_studies as studies


def write_times(joined: MergedRoundFiles, train: float) -> None:
    """Replace the times of two rounds: some seconds of training per round, and 2 s for the rest."""
    times = files.read_json(joined.times)
    times["rounds"] = [{"round": number, "train": train, "aggregate": 0.5, "evaluate": 1.5} for number in (1, 2)]
    marker = files.read_json(joined.marker)
    files.write_json(joined.marker, marker | {joined.times.name: files.write_json(joined.times, times)})


@pytest.fixture
def measured_run(in_empty_folder: Path) -> dict[str, float]:
    """Two rounds of FedAvg with known times: 3 s of training per round, and 2 s for the rest."""
    (run,) = studies.open_runs(studies.prepare(studies.settings(rounds=2)))
    studies.finish_run(run, 2)
    joined = run.files.get_merged_files(2)
    write_times(joined, 3.0)
    last = run.files.get_round_files(2)
    return {
        "server": last.server_state.stat().st_size,
        "sent": sum(layout.read_merged_table(joined.rounds).to_pylist()[0][n] for n in ("bytes_down", "bytes_up")),
    }


def compute_forecast(cores: int = 1, **sections: object) -> forecast.Forecast:
    studies.write(studies.settings(**sections), Path())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr(forecast, "count_available_cores", lambda: cores)
        return forecast.forecast_remaining_work(planner.make_plan())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no CPU affinity")
def test_forecast_counts_cores_that_process_may_use() -> None:
    """As in a container or a Slurm allocation. Snakemake's `cores: all` counts the same."""
    code = (
        "import os, sys\nfrom fedpipe.report.forecast import count_available_cores\n"
        "os.sched_setaffinity(0, {int(sys.argv[1])})\nprint(count_available_cores())"
    )
    command = [sys.executable, "-c", code, str(min(os.sched_getaffinity(0)))]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=studies.ROOT).stdout == "1\n"


def test_forecast_scales_measured_runs_of_same_kind(measured_run: dict[str, float]) -> None:
    longer = compute_forecast(
        rounds=10, federation={"local_epochs": 4}, study={"seeds": [1, 2]}, artifacts={"keep_models": "last"}
    )
    assert (longer.runs, longer.known_runs) == (2, 2)
    assert longer.seconds == pytest.approx(2 * 10 * (4 * 3.0 + 2.0), rel=0.02)
    assert longer.stored_bytes == 2 * 3 * measured_run["server"], "round 0 and the last two"
    assert longer.traffic_bytes == 2 * 10 * 5 * measured_run["sent"]
    assert "on this machine with one run at a time, store" in str(longer)
    parallel = compute_forecast(2, rounds=10, study={"seeds": [1, 2]})
    assert parallel.seconds == pytest.approx(10 * 5.0, rel=0.02)
    assert "on this machine with 2 runs at the same time, store" in str(parallel)
    assert "one run at a time" in str(compute_forecast(2, rounds=10)), "there is only one run"
    assert compute_forecast(rounds=4).seconds == pytest.approx(2 * 5.0, rel=0.02), "two rounds are complete"
    assert compute_forecast(rounds=4).stored_bytes == 2 * measured_run["server"]
    assert compute_forecast(rounds=4, artifacts={"keep_models": "last"}).stored_bytes == 0, "states are replaced"
    assert compute_forecast(rounds=2).runs == 0


def test_forecast_averages_three_newest_runs(measured_run: dict[str, float]) -> None:
    (folder,) = Path("results/runs/fedavg").iterdir()
    for age, train in enumerate((1.0, 2.0, 6.0, 50.0)):
        joined = RunFiles(folder.with_name(f"{age:012}")).get_merged_files(2)
        shutil.copytree(folder, joined.path.parent.parent)
        write_times(joined, train)
        os.utime(joined.marker, (1e9 - age, 1e9 - age))
    shutil.rmtree(folder)
    assert compute_forecast(rounds=10).seconds == pytest.approx(10 * (3.0 + 2.0), rel=0.02)


def test_forecast_ignores_damaged_run(measured_run: dict[str, float]) -> None:
    (marker,) = Path("results/runs/fedavg").glob("*/joined/*/joined.json")
    marker.with_name("times.json").write_text("{}")
    result = compute_forecast(rounds=10)
    assert (result.runs, result.known_runs) == (1, 0)


def test_forecast_omits_algorithms_and_models_without_runs(measured_run: dict[str, float]) -> None:
    other = compute_forecast(labels=("fedavg", "fedprox"), rounds=3)
    assert (other.runs, other.known_runs) == (2, 1)
    assert "1 of 2 remaining runs" in str(other)
    assert "other 1 have no such earlier runs" in str(other)
    assert compute_forecast(model={"name": "cnn", "hidden": 16}).known_runs == 0


def test_forecast_compares_parameters_that_change_bytes_and_time(in_empty_folder: Path) -> None:
    """An MLP of 2,000 units is no MLP of 16 units. A file of other samples is another data set."""
    study = {"labels": ("fedprox", "fedper"), "model": {"name": "mlp", "hidden": [16]}}
    for run in studies.open_runs(studies.prepare(studies.settings(rounds=1, **study))):
        studies.finish_run(run, 1)

    def count_known_runs(**sections: object) -> int:
        return compute_forecast(**{"rounds": 3, **study, **sections}).known_runs

    assert count_known_runs(algorithms={"fedprox": {"mu": 3.0}}, dataset={"subset": 500}) == 2
    assert count_known_runs(partition={"alpha": 0.9}, federation={"learning_rate": 0.3}) == 2
    assert count_known_runs(algorithms={"fedper": {"layers": 2}}) == 1, "another layer is not sent"
    assert count_known_runs(model={"name": "mlp", "hidden": [2000]}) == 0
    assert count_known_runs(dataset={"name": "generated", "like": "mnist"}) == 0
    assert count_known_runs(federation={"batch_size": "full"}) == 0
    assert count_known_runs(federation={"dtype": "float64"}) == 0, "states have twice the bytes"
    assert count_known_runs(federation={"server": {"optimizer": "momentum"}}) == 0, "the server's state has momentum"
    assert count_known_runs(federation={"clip_norm": 1.0}) == 0
    assert count_known_runs(transforms={"flip": True}) == 0
    assert count_known_runs(evaluation={"protocols": ["finetuned-on-local"]}) == 0
    assert count_known_runs(evaluation={"every": 3}) == 2


def test_forecast_counts_evaluated_rounds(measured_run: dict[str, float]) -> None:
    """3.5 s of each round are training and aggregation, and 1.5 s of each evaluated round are evaluation."""
    assert compute_forecast(rounds=12, evaluation={"every": 4}).seconds == pytest.approx(12 * 3.5 + 3 * 1.5, rel=0.02)
    assert compute_forecast(rounds=12, evaluation={"every": 12}).seconds == pytest.approx(12 * 3.5 + 1.5, rel=0.02)


@pytest.mark.parametrize("keep_models", ["all", "last", 3])
def test_forecast_counts_stored_states(keep_models: str | int, in_empty_folder: Path) -> None:
    """Those of SCAFFOLD's clients, of whom two train in a round. The last state of each client stays."""
    study = {"labels": ("scaffold",), "federation": {"participation": 0.4}, "artifacts": {"keep_models": keep_models}}
    (run,) = studies.open_runs(studies.prepare(studies.settings(rounds=8, **study)))
    studies.finish_run(run, 8)

    def count_stored_bytes() -> int:
        return sum(path.stat().st_size for path in run.files.rounds_folder.glob("*/*.pt"))

    stored_bytes, one_file = count_stored_bytes(), run.files.get_round_files(8).client_states.stat().st_size
    tolerance = 0 if keep_models == "all" else 2 * one_file  # the seed decides when a client trains
    other = compute_forecast(**{"rounds": 8, **study}, study={"seeds": [1]})
    assert other.stored_bytes == pytest.approx(stored_bytes, rel=1e-9, abs=tolerance)
    longer = compute_forecast(**{"rounds": 16, **study})
    studies.finish_run(studies.open_runs(studies.prepare(studies.settings(rounds=16, **study)))[0], 16)
    assert longer.stored_bytes == pytest.approx(count_stored_bytes() - stored_bytes, rel=1e-9, abs=tolerance)


def test_forecast_of_partly_complete_search_is_upper_bound(in_empty_folder: Path) -> None:
    """The draws that continue may be among those that are complete."""
    over = {"federation.learning_rate": {"log": [0.01, 1.0]}}
    tune = {"over": over, "draws": 4, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [7]}
    evaluation = {"protocols": ["personal-on-validation"]}  # as that of the draws, so that the runs are of one kind
    settings = studies.settings(rounds=2, tune=tune, evaluation=evaluation, dataset={"validation_fraction": 0.2})
    plan = studies.prepare(settings)
    assert not forecast.forecast_remaining_work(plan).is_upper_bound
    studies.finish_study(plan)
    assert "5 of 5 remaining runs would take at most about" in str(forecast.forecast_remaining_work(plan))


def test_forecast_of_folder_counts_each_run_once(measured_run: dict[str, float]) -> None:
    """A run in several studies counts with its maximum number of rounds. Runs without available data are omitted."""
    for name, labels, rounds in (("short", ("fedavg",), 4), ("long", ("fedavg", "fedprox"), 10)):
        Path("studies", name).mkdir(parents=True)
        studies.write(studies.settings(labels, rounds), Path("studies", name))
    far = studies.settings(rounds=1000) | {"dataset": {"name": "tiny_imagenet"}, "model": {"name": "resnet18"}}
    Path("studies/far").mkdir()
    studies.write(far, Path("studies/far"))
    done = CliRunner().invoke(app.app, ["plan", "--params", "studies"])
    assert done.exit_code == 0, done.output
    assert "fedpipe: 3 studies: 2 runs to compute, 18 rounds in total. Skipped runs" in done.stderr
    assert "fedpipe: 1 of 2 remaining runs would take about 40 s on this machine" in done.stderr
    studies.write(studies.settings(rounds=1), Path("studies/short"))
    shorter = CliRunner().invoke(app.app, ["plan", "--params", "studies/short"])
    assert "would take about 0 s on this machine" in shorter.stderr, "two rounds are complete"
    assert "send 0 B" in shorter.stderr
