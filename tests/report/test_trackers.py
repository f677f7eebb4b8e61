"""Trackers record the settings and numbers of each run and continue its record. If they fail, the run continues.

The real packages write without a network: TensorBoard's event files, MLflow's SQLite database, and W&B's offline files.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from fedpipe.core import callbacks
from fedpipe.core.storage.files import read_parquet
from fedpipe.core.yaml_text import read_generated_yaml
from fedpipe.planning import planner
from fedpipe.planning.planner import NewPlan
from fedpipe.report import results, trackers
from tests import small_studies as studies
from tests.small_studies import run_command

NO_MLFLOW_SERVER = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
TOOLS = ("tensorboard", "mlflow", "wandb")
ROUNDS = 4
CUSTOM_MODULE = """
import os, signal
from pathlib import Path
from fedpipe.core.callbacks import Callback

class Saboteur(Callback):
    def end_round(self, run, round_number, accuracies):
        for children in Path("/proc/self/task").glob("*/children") if round_number == 2 else ():
            for child in children.read_text().split():
                if b"wandb-core" in Path("/proc", child, "cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)
"""
History = dict[str, dict[int, float]]  #: value by name and round


class Record(NamedTuple):
    """A run in a tracker."""

    group: str
    settings: dict[str, Any]
    history: History


def run_job(folder: Path, path: Path, stop: int, *names: str, **variables: str) -> str:
    """Run a job in its own process with the command of the Snakefile's rule. Return its output."""
    options = [f"--stop={stop}", f"--callbacks={' '.join(names)}"]
    command = [sys.executable, "-m", "fedpipe", "segment", str(path), *options]
    environment = os.environ | {"HOME": str(folder), "PYTHONPATH": str(studies.ROOT), "WANDB_MODE": "offline"}
    job = subprocess.run(
        command, cwd=folder, env=environment | variables, capture_output=True, text=True, start_new_session=True
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout + job.stderr


def read_scores(plan: NewPlan, index: int) -> History:
    """Return the scores of a run over all test samples, as in the tables, and its columns by round."""
    merged_files = plan.runs[index].merged_files
    scores = results.compute_scores(read_parquet(merged_files.metrics).to_pandas(), plan.metrics)
    scores = scores[scores["average"] == "sample"]
    columns = read_parquet(merged_files.rounds).to_pandas().set_index("round")
    history: History = {name: columns[name].astype(float).to_dict() for name in columns}
    for (metric, protocol), rows in scores.groupby(["metric", "protocol"]):
        history[f"{metric}/{protocol}"] = rows.set_index("round")["score"].to_dict()
    return history


def read_tensorboard(folder: Path) -> dict[str, Record]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    records = {}
    for path in (folder / "tensorboard").iterdir():
        events = reader.EventAccumulator(str(path)).Reload()
        content = plugin.HParamsPluginData.FromString(
            events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        )
        start = content.session_start_info
        settings = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
        history = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
        records[path.name] = Record(start.group_name, settings, history)
    return records


def read_mlflow(folder: Path) -> dict[str, Record]:
    mlflow = pytest.importorskip("mlflow")
    client, records = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db"), {}
    for run in client.search_runs(["0"]):
        history: History = {}
        for name in run.data.metrics:
            steps = [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
            assert len(steps) == len(set(steps)), "each round is logged once"
            history[name] = {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        assert run.info.run_name not in records
        records[run.info.run_name] = Record(run.data.tags["fedpipe.group"], run.data.params, history)
    return records


def read_wandb_file(path: Path) -> Iterator[Any]:
    """Yield the entries of an offline file: a log of protocol buffers in blocks of 32 KiB, as in LevelDB."""
    entry_class = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    data, position, entry = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (1 << 15) - position % (1 << 15) < 7:
            position += (1 << 15) - position % (1 << 15)
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        entry += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield entry_class.FromString(entry)
            entry = b""


def read_wandb(folder: Path) -> dict[str, Record]:
    """Return the records of the last file of each run, which `wandb sync` uploads last."""
    records = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        entries, history = list(read_wandb_file(path)), {}
        (run,) = [entry.run for entry in entries if entry.WhichOneof("record_type") == "run"]
        for entry in entries:
            if entry.WhichOneof("record_type") == "history":
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in entry.history.item
                }
                for name in items.keys() - {"_step", "_runtime", "_timestamp"}:
                    history.setdefault(name, {})[items["_step"]] = items[name]
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert run.run_id == run.display_name
        records[run.run_id] = Record(run.run_group, settings, history)
    return records


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, NewPlan]]:
    """Two seeds. The first stops after round 1, computes round 2 without a tracker, and resumes with all trackers."""
    folder = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sections: dict[str, Any] = {"study": {"seeds": [0, 1]}, "evaluation": {"metrics": ["accuracy", "nll"]}}
        plan = studies.prepare(studies.settings(("fedavg",), ROUNDS, **sections))
        installed = [name for name in TOOLS if callbacks.is_tracker_installed(name)]
        first, second = plan.runs
        for stop, names in ((1, installed), (2, []), (ROUNDS, installed)):
            assert "continues without it" not in run_job(folder, first.path, stop, *names)
        assert "continues without it" not in run_job(folder, second.path, ROUNDS, *installed)
        for run in plan.runs:
            run_command("collect", str(run.path), "--rounds", str(ROUNDS))
        yield folder, plan


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_tracker_record_has_all_rounds_with_metric_names_of_tables(study: tuple[Path, NewPlan], tool: str) -> None:
    pytest.importorskip(tool)
    folder, plan = study
    records = READERS[tool](folder)
    assert len(records) == 2
    for index, run in enumerate(plan.runs):
        record, expected = records[f"fedavg-seed{run.seed}-{run.key}"], read_scores(plan, index)
        assert {"accuracy/global-on-global", "nll/global-on-global", "bytes_up"} <= record.history.keys()
        assert {name: list(values) for name, values in record.history.items()} == {
            name: list(values) for name, values in expected.items()
        }
        for name, values in expected.items():
            assert record.history[name] == pytest.approx(values, rel=1e-6), name
    assert len({record.group for record in records.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_tracker_record_has_settings_of_run(study: tuple[Path, NewPlan], tool: str) -> None:
    pytest.importorskip(tool)
    folder, plan = study
    (_, second), records = plan.runs, READERS[tool](folder)
    settings = records[f"fedavg-seed1-{second.key}"].settings
    assert float(settings["seed"]) == 1
    assert float(settings["federation.learning_rate"]) == 0.1
    assert settings["algorithm.name"] == "fedavg"
    assert settings["model.hidden"] == "[16]"
    assert {*trackers.flatten_settings(read_generated_yaml(second.files.settings))} <= settings.keys()


@pytest.mark.slow
def test_parallel_jobs_create_mlflow_database_and_experiment_once(in_empty_folder: Path) -> None:
    """MLflow creates both without a lock, so all but one of the first jobs would go on without a record."""
    mlflow = pytest.importorskip("mlflow")
    plan = studies.prepare(studies.settings(("fedavg", "fedprox"), 1, study={"seeds": [0, 1]}))
    with ThreadPoolExecutor(4) as pool:
        outputs = pool.map(
            lambda run: run_job(in_empty_folder, run.path, 1, "mlflow", MLFLOW_EXPERIMENT_NAME="new"), plan.runs
        )
        assert "continues without it" not in "".join(outputs)
    client = mlflow.MlflowClient(f"sqlite:///{in_empty_folder}/mlflow.db")
    experiment = client.get_experiment_by_name("new")
    assert len(client.search_runs([experiment.experiment_id])) == 4


@pytest.mark.slow
def test_tracker_record_of_recomputed_run_has_only_new_rounds(
    study: tuple[Path, NewPlan], in_empty_folder: Path
) -> None:
    """The key of the run does not change, so the record could keep old numbers."""
    pytest.importorskip("tensorboard")
    plan = studies.prepare(studies.settings(("fedavg",), 2))
    (run,) = plan.runs
    run_job(in_empty_folder, run.path, 2, "tensorboard")
    studies.delete_rounds(run.path)
    run_job(in_empty_folder, run.path, 1, "tensorboard")
    ((_, record),) = read_tensorboard(in_empty_folder).items()
    assert all(list(values) == [1] for values in record.history.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "variables"),
    [
        pytest.param(["own.Saboteur", "wandb"], {}, id="W&B's process is killed"),
        pytest.param(["wandb"], {"WANDB_MODE": "online"}, id="W&B has no API key"),
        pytest.param(["mlflow"], NO_MLFLOW_SERVER, id="no MLflow server"),
    ],
)
def test_run_survives_failing_tracker(in_empty_folder: Path, names: list[str], variables: dict[str, str]) -> None:
    pytest.importorskip(names[-1])
    (in_empty_folder / "own.py").write_text(CUSTOM_MODULE)
    plan = studies.prepare(studies.settings(("fedavg",), ROUNDS))
    (run,) = plan.runs
    output = run_job(in_empty_folder, run.path, ROUNDS, *names, **variables)
    assert output.count("continues without it") == 1
    assert run.files.list_complete_rounds() == list(range(ROUNDS + 1))
    assert run.files.get_segment_manifest_path(ROUNDS).is_file()


@pytest.mark.usefixtures("in_empty_folder")
def test_run_group_contains_all_seeds_of_configuration() -> None:
    study = {"seeds": [0, 1], "grid": {"partition.alpha": [0.3, 1.0]}}
    studies.write(studies.settings(("fedavg", "fedprox"), 2, study=study), Path())
    planner.write_plan(plan := planner.make_plan())
    groups: dict[str, set[int]] = {}
    for run in plan.runs:
        settings = read_generated_yaml(run.files.settings)
        info = callbacks.RunInfo(path=run.path, settings=settings, last_round=2, completed_rounds=0)
        groups.setdefault(info.group, set()).add(run.seed)
    assert len(groups) == 4
    assert all(seeds == {0, 1} for seeds in groups.values())


def test_every_tracker_has_class_and_extra() -> None:
    import tomllib

    extras = tomllib.loads((studies.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    other_extras = {"dev", "flwr-datasets", "huggingface", "optuna", "timm"}
    assert {*callbacks.TRACKERS} == {*trackers.TRACKER_CLASSES} == {*extras} - other_extras
    ignored = (studies.ROOT / ".gitignore").read_text().splitlines()
    assert {"/dvclive/", "/mlflow.db", "/mlruns/", "/tensorboard/", "/wandb/"} <= {*ignored}


@pytest.mark.usefixtures("in_empty_folder")
def test_tracker_omits_undefined_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"metric": "auc", "protocol": ["a-on-b", "c-on-b"], "average": "sample", "score": [0.5, float("nan")]}
    monkeypatch.setattr(results, "compute_scores", lambda frame, names: pd.DataFrame(columns))
    plan = studies.prepare(studies.settings(("fedavg",), 1))
    (run,) = studies.open_runs(plan)
    list(run.run_segment(1))
    numbers = trackers.read_round_metrics(run.files, 1)
    assert "auc/a-on-b" in numbers
    assert "auc/c-on-b" not in numbers
    assert list(numbers)[-1] == "participants"
