"""The finished runs of this machine. Tables need the same of them as of `fedpipe.papers.stored_runs.StoredRun`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedpipe.core.storage import layout
from fedpipe.core.yaml_text import read_generated_yaml
from fedpipe.data import store
from fedpipe.planning.plan import Cell, PlannedRun
from fedpipe.report import results


class Traffic(NamedTuple):
    """Mean bytes of a participant in the last round."""

    down: float
    up: float


@dataclass(frozen=True)
class LocalRun:
    """A finished run on this machine, with its first ``cell.rounds`` rounds."""

    cell: Cell
    planned_run: PlannedRun
    average: str  #: average over clients that the study reports

    @property
    def key(self) -> str:
        """Key of the run, which contains the code that computed it."""
        return self.cell.key

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the run."""
        return read_run_settings(self.cell.files.settings)

    @property
    def metrics(self) -> pd.DataFrame:
        """All measurements, by round, client and protocol."""
        return read_merged_frame(self.cell.merged_files.metrics)

    @property
    def round_summaries(self) -> pd.DataFrame:
        """Participants, left-out updates and traffic by round."""
        return read_merged_frame(self.cell.merged_files.rounds)

    @cached_property
    def accuracies_by_round(self) -> pd.DataFrame:
        """Accuracies in [0, 1] by ``protocol`` and ``round`` in the reported average."""
        frame = results.compute_accuracies(self.metrics)
        return frame[frame["average"] == self.average].drop(columns="average")

    @property
    def classes(self) -> int:
        """Number of classes of its data."""
        return store.read_dataset_info(layout.get_dataset_path(self.planned_run.dataset)).classes

    @property
    def is_generated(self) -> bool:
        """Whether its data are noise of the same shape as the study's data set."""
        return bool(self.settings["dataset"]["name"] == "generated")

    @property
    def is_diverged(self) -> bool:
        """Whether in some round no participant's update was finite."""
        return bool((self.round_summaries["left_out"] == self.round_summaries["participants"]).any())

    @property
    def epoch_seconds(self) -> float:
        """Mean seconds of a client's local epoch."""
        return float(pd.DataFrame(self.times["rounds"])[results.EPOCH_COLUMN].mean())

    @cached_property
    def times(self) -> dict[str, Any]:
        """Seconds of each round (``rounds``), and the environments (``made_by``)."""
        return results.read_run_times(self.cell)

    @property
    def last_round_traffic(self) -> Traffic:
        """Traffic of the last round."""
        last = self.round_summaries.iloc[-1]
        return Traffic(float(last["bytes_down"]), float(last["bytes_up"]))

    def count_test_samples(self, protocol: str) -> int:
        """Number of test samples of the last round, each once. Clients have their own, or share the global ones."""
        rows = self.metrics[self.metrics["protocol"] == protocol]
        by_client = rows[rows["round"] == rows["round"].max()]["total"]
        return int(by_client.max() if protocol.endswith("-on-global") else by_client.sum())


#: Reads a merged table of a run once, because many cells of the papers need it.
read_merged_frame = functools.lru_cache(maxsize=2048)(results.read_merged_frame)


@functools.lru_cache(maxsize=2048)
def read_run_settings(path: Path) -> dict[str, Any]:
    """Read a ``run.yaml``."""
    return read_generated_yaml(path)
