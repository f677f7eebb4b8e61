"""What looks on while a run goes: a callback of one's own, or DVCLive.

A callback sees and changes nothing: no number, no key and no file of a run depends on it. One that fails is told of and
left out; the run goes on. It is called in the process of a job, after each round is whole on the disk.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import read_parquet
from fedpipe.core.storage.layout import RunFiles
from fedpipe.core.yaml_text import read_generated_yaml

CALLBACKS_KEY = "execution.callbacks"
DVCLIVE = "dvclive"  #: the name of fedpipe's own


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run, as a callback is told of it."""

    algorithm: str  #: its label in the study
    seed: int
    key: str
    last_round: int  #: the last round of this job
    completed_rounds: int  #: rounds that were complete as this job began

    @property
    def name(self) -> str:
        """A name for people, and for a folder: ``fedavg-seed0-0123456789ab``."""
        return f"{self.algorithm}-seed{self.seed}-{self.key}"


class Callback:
    """A callback; what it does not need it leaves out. It is made anew, without arguments, for each job."""

    def begin(self, run: RunInfo) -> None:
        """A job begins, of a new run or of one that goes on after ``run.done`` rounds."""

    def round(self, run: RunInfo, number: int, accuracies: Mapping[str, float]) -> None:
        """A round is complete; ``accuracies`` in [0, 1] over all test samples by protocol, if it was evaluated."""

    def end(self, run: RunInfo) -> None:
        """The job ends, after its last round or earlier."""


class DVCLive(Callback):
    """Curves in DVC's tools and in VS Code, by DVCLive: a folder a run, below ``dvclive``."""

    def begin(self, run: RunInfo) -> None:
        """See :class:`Callback`."""
        live = importlib.import_module(DVCLIVE).Live
        folder = Path(DVCLIVE) / run.name
        self._live = live(
            dir=str(folder),
            resume=run.completed_rounds > 0,
            report=None,
            save_dvc_exp=False,
            dvcyaml=str(folder / "dvc.yaml"),
        )

    def round(self, run: RunInfo, number: int, accuracies: Mapping[str, float]) -> None:
        """See :class:`Callback`."""
        self._live.step = number
        for protocol, accuracy in accuracies.items():
            self._live.log_metric(protocol, accuracy)
        self._live.next_step()

    def end(self, run: RunInfo) -> None:
        """See :class:`Callback`."""
        self._live.end()


def find_callback(name: str) -> type[Callback]:
    """The callback ``dvclive``, or the class at a dotted path.

    Raises
    ------
    SettingsError
        There is none, or DVCLive is not installed.
    """
    if name == DVCLIVE:
        if importlib.util.find_spec(DVCLIVE) is None:
            raise SettingsError(
                f"{CALLBACKS_KEY}: dvclive is not installed; `pip install dvclive`, or remove it from the list."
            )
        return DVCLive
    module, _, member = name.rpartition(".")
    if not module:
        raise SettingsError(
            f"{CALLBACKS_KEY}: unknown callback '{name}'; it should be {DVCLIVE}, or a class's path, as own.Board."
        )
    try:
        candidate = getattr(importlib.import_module(module), member)
    except Exception as error:  # whatever a module of the user's own does as it is imported
        raise SettingsError(
            f"{CALLBACKS_KEY}: '{name}' can't be imported ({error}); it should be the path of a class, as own.Board."
        ) from error
    if not (isinstance(candidate, type) and issubclass(candidate, Callback)):
        raise SettingsError(
            f"{CALLBACKS_KEY}: '{name}' is not a callback; it should derive from fedpipe.core.callbacks.Callback."
        )
    return candidate


class CallbackList:
    """The callbacks of one job, from its begin to its end.

    Parameters
    ----------
    names
        What :func:`find_callback` finds.
    files
        The run.
    stop
        The job's last round.
    """

    def __init__(self, names: Sequence[str], files: RunFiles, stop: int) -> None:
        self._files, self._stop = files, stop
        self._run: RunInfo | None = None
        self._callbacks: list[Callback] = []
        for name in names:
            try:
                self._callbacks.append(find_callback(name)())
            except Exception as error:  # of its `__init__`, or of its module, which this machine can't import
                self._report_failure(name, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._run is not None:
            self._call_hook("end", self._run)

    def call_begin(self, completed_rounds: int) -> None:
        """The job begins after so many rounds."""
        if self._callbacks:
            label, key = self._files.path.parts[-2:]
            seed = read_generated_yaml(self._files.settings)["seed"]
            self._run = RunInfo(
                algorithm=label, seed=seed, key=key, last_round=self._stop, completed_rounds=completed_rounds
            )
            self._call_hook("begin", self._run)

    def call_round(self, number: int) -> None:
        """A round is complete."""
        if self._callbacks:
            self._call_hook("round", self._run, number, read_accuracies(self._files, number))

    def wrap_rounds(self, numbers: Iterator[int]) -> Iterator[int]:
        """The rounds of a segment as they are: first how many were complete, then each number as it is done."""
        completed_rounds = next(numbers)
        self.call_begin(completed_rounds)
        yield completed_rounds
        for number in numbers:
            self.call_round(number)
            yield number

    def _call_hook(self, hook: str, *arguments: Any) -> None:
        for callback in list(self._callbacks):
            try:
                getattr(callback, hook)(*arguments)
            except Exception as error:
                self._callbacks.remove(callback)
                self._report_failure(f"{type(callback).__qualname__}.{hook}", error)

    def _report_failure(self, callback_name: str, error: Exception) -> None:
        """Tell that a callback failed, without which the run goes on."""
        print(
            f"fedpipe: {CALLBACKS_KEY}: {callback_name} failed ({type(error).__name__}: {error}); {self._files.path} "
            "goes on without it.",
            file=sys.stderr,
        )


def read_accuracies(files: RunFiles, number: int) -> dict[str, float]:
    """By protocol, the share of all test samples that a round's models tell right; empty where it was not measured."""
    round_files = files.round(number)
    hashes = {
        **layout.read_round_digests(round_files, round_files.state_marker),
        **layout.read_round_digests(round_files, round_files.marker),
    }
    sums: dict[str, list[int]] = {}
    for path in (round_files.metrics, round_files.trained_accuracies):
        if path.name in hashes:
            table = read_parquet(path, hashes[path.name]).select(["protocol", "correct", "total"])
            for row in table.to_pylist():
                entry = sums.setdefault(row["protocol"], [0, 0])
                entry[0] += row["correct"]
                entry[1] += row["total"]
    return {protocol: correct / total for protocol, (correct, total) in sums.items() if total}
