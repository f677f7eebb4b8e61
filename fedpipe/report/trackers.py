"""Trackers: callbacks that send the numbers of each round to TensorBoard, MLflow, Weights & Biases or DVCLive.

A run has one record in a tracker, whose name contains the run's key. The settings of trackers are their own environment
variables and files. Each tracker is imported when its first record is opened.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedpipe.core.callbacks import Callback, RunInfo
from fedpipe.core.storage import layout, packing
from fedpipe.core.storage.files import read_json, read_parquet, table_to_frame
from fedpipe.core.storage.layout import RunFiles
from fedpipe.core.storage.locks import lock_file
from fedpipe.core.yaml_text import flatten_mapping

PARTICIPANTS = "participants"  #: a number of every round, whose last step is the last round of a record
WANDB_FINISH_TIMEOUT = 60.0  #: seconds until W&B stops to upload at the end of a job, if the user has not set it
MLFLOW_LOCK = packing.PACK_LOCK.with_name("mlflow.lock")  #: lock for opening a record, which git and DVC ignore
RUN_TAG, GROUP_TAG = "fedpipe.run", "fedpipe.group"  #: tags of a run in MLflow


class Tracker(Callback):
    """Base class of trackers.

    A job continues the record of its run. It first adds the complete rounds that the record lacks, for example because
    an earlier job was killed or had no tracker.
    """

    def start_logging(self, run: RunInfo) -> int:
        """Open the record of a run, or create it. Return its last round, at most ``run.completed_rounds``."""
        raise NotImplementedError

    def log_round_metrics(self, round_number: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a round."""
        raise NotImplementedError

    def stop_logging(self, is_complete: bool) -> None:
        """Close the record. ``is_complete``: the job has run all of its rounds."""
        raise NotImplementedError

    @override
    def begin_run(self, run: RunInfo) -> None:
        self._last_round = self.start_logging(run)
        for round_number in range(self._last_round + 1, run.completed_rounds + 1):
            self.end_round(run, round_number, {})

    @override
    def end_round(self, run: RunInfo, round_number: int, accuracies: Mapping[str, float]) -> None:
        self.log_round_metrics(round_number, read_round_metrics(RunFiles(run.path), round_number))
        self._last_round = round_number

    @override
    def end_run(self, run: RunInfo) -> None:
        self.stop_logging(self._last_round >= run.last_round)


class TensorBoard(Tracker):
    """Writes event files, one folder per run below ``tensorboard``."""

    @override
    def start_logging(self, run: RunInfo) -> int:
        hparams = importlib.import_module("tensorboard.plugins.hparams.summary_v2")
        folder = Path("tensorboard", run.name)
        last_round = min(_read_last_logged_step(folder), run.completed_rounds)
        writer_class = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer_class(folder, purge_step=last_round + 1)
        if not last_round:
            settings = hparams.hparams_pb(flatten_settings(run.settings), trial_id=run.group)
            self._writer.file_writer.add_summary(settings, 0)
        return last_round

    @override
    def log_round_metrics(self, round_number: int, metrics: Mapping[str, float]) -> None:
        for name, number in metrics.items():
            self._writer.add_scalar(name, number, round_number)
        self._writer.flush()

    @override
    def stop_logging(self, is_complete: bool) -> None:
        self._writer.close()


def _read_last_logged_step(folder: Path) -> int:
    """Read the last round of the event files in a folder. 0 if there is none."""
    if not folder.is_dir():
        return 0
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder)).Reload()
    has_rounds = PARTICIPANTS in events.Tags()["scalars"]
    return int(events.Scalars(PARTICIPANTS)[-1].step) if has_rounds else 0


class MLflow(Tracker):
    """Logs to the server or database of ``MLFLOW_TRACKING_URI``."""

    @override
    def start_logging(self, run: RunInfo) -> int:
        self._mlflow = mlflow = importlib.import_module("mlflow")
        has_name = f"tags.`{RUN_TAG}` = '{run.name}'"
        with lock_file(MLFLOW_LOCK):  # parallel jobs would create the database or the experiment twice
            found_runs = mlflow.search_runs(filter_string=has_name, output_format="list", max_results=1)
            found_id = found_runs[0].info.run_id if found_runs else None
            history = mlflow.MlflowClient().get_metric_history(found_id, PARTICIPANTS) if found_id else []
            last_round = max((metric.step for metric in history), default=0)
            if last_round > run.completed_rounds:  # the run's files were deleted, so it is a new record
                found_id, last_round = None, 0
            mlflow.start_run(run_id=found_id, run_name=run.name, tags={RUN_TAG: run.name, GROUP_TAG: run.group})
        if found_id is None:
            mlflow.log_params(flatten_settings(run.settings))
        return last_round

    @override
    def log_round_metrics(self, round_number: int, metrics: Mapping[str, float]) -> None:
        valid_metrics = {re.sub(r"[^\w.\- /]", "_", name): number for name, number in metrics.items()}
        self._mlflow.log_metrics(valid_metrics, step=round_number)

    @override
    def stop_logging(self, is_complete: bool) -> None:
        self._mlflow.end_run("FINISHED" if is_complete else "KILLED")


class WandB(Tracker):
    """Logs to Weights & Biases, or to its offline files with ``WANDB_MODE=offline``.

    An offline file can't be continued. If several have the ID of one run, `wandb sync` keeps the last. So each job
    replaces the record by a complete one.
    """

    @override
    def start_logging(self, run: RunInfo) -> int:
        wandb = importlib.import_module("wandb")
        user_settings = wandb.setup().settings
        if user_settings.mode == "online" and not wandb.login(prompt=False):
            raise PermissionError("there is no API key. Type `wandb login`, or set WANDB_MODE to offline")
        self._run = wandb.init(
            id=run.name,
            name=run.name,
            group=run.group,
            config={"algorithm": run.algorithm, "key": run.key, **flatten_settings(run.settings)},
            settings=wandb.Settings(finish_timeout=user_settings.finish_timeout or WANDB_FINISH_TIMEOUT),
        )
        return 0

    @override
    def log_round_metrics(self, round_number: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=round_number)

    @override
    def stop_logging(self, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


class DVCLive(Tracker):
    """Logs with DVCLive, one folder per run below ``dvclive``, for curves in DVC and VS Code."""

    @override
    def start_logging(self, run: RunInfo) -> int:
        folder = Path("dvclive", run.name)
        self._live = importlib.import_module("dvclive").Live(
            dir=str(folder),
            resume=run.completed_rounds > 0,
            report=None,
            save_dvc_exp=False,
            dvcyaml=str(folder / "dvc.yaml"),
        )
        recorded_rounds = int(self._live.step) - 1  # `resume` continues after the last recorded step
        return min(max(recorded_rounds, 0), run.completed_rounds)

    @override
    def log_round_metrics(self, round_number: int, metrics: Mapping[str, float]) -> None:
        self._live.step = round_number
        for name, number in metrics.items():
            self._live.log_metric(name, number)
        self._live.next_step()

    @override
    def stop_logging(self, is_complete: bool) -> None:
        self._live.end()


#: By name in `execution.callbacks`.
TRACKER_CLASSES: dict[str, type[Tracker]] = {
    tracker_class.__name__.lower(): tracker_class for tracker_class in (DVCLive, MLflow, TensorBoard, WandB)
}


def flatten_settings(settings: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Flatten the settings of a run to dotted keys. Lists and null become their JSON text."""
    return {
        name: value if isinstance(value, (str, int, float)) else json.dumps(value, default=str)
        for name, value in flatten_mapping(settings).items()
    }


def read_round_metrics(files: RunFiles, round_number: int) -> dict[str, float]:
    """Read the metrics of a complete round by name: scores, participants and traffic.

    ``METRIC/PROTOCOL`` is a score over all test samples, such as ``accuracy/global-on-global`` in [0, 1], unless the
    round was not evaluated. The other names are columns of :attr:`fedpipe.report.data.StudyData.round_summaries`, with
    ``participants`` last. Undefined scores are omitted.
    """
    import pandas as pd

    from fedpipe.report import results
    from fedpipe.report.words import METRICS

    round_files = files.get_round_files(round_number)
    hashes = layout.read_round_hashes(round_files, round_files.complete_states_marker)
    hashes |= layout.read_round_hashes(round_files, round_files.marker)
    paths = [path for path in (round_files.metrics, round_files.trained_accuracies) if path.name in hashes]
    tables = [table_to_frame(read_parquet(path, hashes[path.name])) for path in paths]
    rows = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame({"total": []})
    named_scores: dict[str, float] = {}
    if (rows["total"] > 0).any():
        scores = results.compute_scores(rows, METRICS)
        scores = scores[(scores["average"] == "sample") & scores["score"].notna()]
        columns = scores[["metric", "protocol", "score"]].to_numpy()
        named_scores = {f"{metric}/{protocol}": float(score) for metric, protocol, score in columns}
    summary = layout.summarize_round(round_files, read_json(round_files.complete_states_marker))
    others = {name: float(number) for name, number in summary.items() if name != PARTICIPANTS}
    others = {name: number for name, number in others.items() if not math.isnan(number)}
    return {**named_scores, **others, PARTICIPANTS: summary[PARTICIPANTS]}
