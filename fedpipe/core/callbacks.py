"""Callbacks that monitor a run: a user's class or DVCLive.

A callback only reads. It changes no number, key or file of a run. If a callback fails, the job prints a warning,
removes the callback and continues. Callbacks run in the job's process, after all files of a round are written.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import read_parquet
from fedpipe.core.storage.layout import RunFiles
from fedpipe.core.yaml_text import read_generated_yaml

CALLBACKS_KEY = "execution.callbacks"
DVCLIVE = "dvclive"  #: name of the built-in callback
#: Former names of methods. A class that still has one would silently log nothing.
FORMER_METHODS = {"begin": "begin_run", "round": "end_round", "end": "end_run"}


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that a callback monitors."""

    algorithm: str  #: label in params.yaml
    seed: int
    key: str
    last_round: int  #: the last round of this job
    completed_rounds: int  #: complete rounds when this job began

    @property
    def name(self) -> str:
        """Name for display and for folders, such as ``fedavg-seed0-0123456789ab``."""
        return f"{self.algorithm}-seed{self.seed}-{self.key}"


class Callback:
    """Base class of callbacks. Override the methods that you need. Each job creates a new object without arguments."""

    def begin_run(self, run: RunInfo) -> None:
        """The job begins a new run, or resumes one after ``run.completed_rounds`` rounds."""

    def end_round(self, run: RunInfo, round_number: int, accuracies: Mapping[str, float]) -> None:
        """A round is complete. ``accuracies`` in [0, 1] by protocol, over all test samples. It may be empty."""

    def end_run(self, run: RunInfo) -> None:
        """The job ends, after its last round or before."""


class DVCLive(Callback):
    """Logs accuracies with DVCLive, one folder per run below ``dvclive``, for curves in DVC and VS Code."""

    @override
    def begin_run(self, run: RunInfo) -> None:
        live = importlib.import_module(DVCLIVE).Live
        folder = Path(DVCLIVE) / run.name
        self._live = live(
            dir=str(folder),
            resume=run.completed_rounds > 0,
            report=None,
            save_dvc_exp=False,
            dvcyaml=str(folder / "dvc.yaml"),
        )

    @override
    def end_round(self, run: RunInfo, round_number: int, accuracies: Mapping[str, float]) -> None:
        self._live.step = round_number
        for protocol, accuracy in accuracies.items():
            self._live.log_metric(protocol, accuracy)
        self._live.next_step()

    @override
    def end_run(self, run: RunInfo) -> None:
        self._live.end()


def find_callback(name: str) -> type[Callback]:
    """Find the callback ``dvclive`` or the class at a dotted path.

    Raises
    ------
    SettingsError
        There is no such class, or DVCLive is not installed.
    """
    if name == DVCLIVE:
        if importlib.util.find_spec(DVCLIVE) is None:
            raise SettingsError(
                f"{CALLBACKS_KEY}: dvclive is not installed. Type `pip install dvclive`, or remove it from the list."
            )
        return DVCLive
    module, _, member = name.rpartition(".")
    if not module:
        raise SettingsError(
            f"{CALLBACKS_KEY}: unknown callback '{name}'. Use {DVCLIVE}, or the path of a class, such as own.Board."
        )
    try:
        candidate = getattr(importlib.import_module(module), member)
    except Exception as error:  # a user's module may raise anything
        raise SettingsError(
            f"{CALLBACKS_KEY}: '{name}' can't be imported ({error}). Use the path of a class, such as own.Board."
        ) from error
    if not (isinstance(candidate, type) and issubclass(candidate, Callback)):
        raise SettingsError(
            f"{CALLBACKS_KEY}: '{name}' is not a callback. It must derive from fedpipe.core.callbacks.Callback."
        )
    for former_name, method_name in FORMER_METHODS.items():
        if hasattr(candidate, former_name):
            raise SettingsError(
                f"{CALLBACKS_KEY}: '{name}' has a method '{former_name}'. Rename it to '{method_name}'."
            )
    return candidate


class CallbackList:
    """The callbacks of one job.

    Parameters
    ----------
    names
        Names for :func:`find_callback`.
    files
        Files of the run.
    stop
        Last round of the job.
    """

    def __init__(self, names: Sequence[str], files: RunFiles, stop: int) -> None:
        self._files, self._stop = files, stop
        self._run: RunInfo | None = None
        self._callbacks: list[Callback] = []
        for name in names:
            try:
                self._callbacks.append(find_callback(name)())
            except Exception as error:  # from the import or from `__init__`
                self._report_failure(name, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._run is not None:
            self._call_hook("end_run", self._run)

    def call_begin(self, completed_rounds: int) -> None:
        """Begin the job after this number of complete rounds."""
        if self._callbacks:
            label, key = self._files.path.parts[-2:]
            seed = read_generated_yaml(self._files.settings)["seed"]
            self._run = RunInfo(
                algorithm=label, seed=seed, key=key, last_round=self._stop, completed_rounds=completed_rounds
            )
            self._call_hook("begin_run", self._run)

    def call_round(self, round_number: int) -> None:
        """Report a complete round to all callbacks."""
        if self._callbacks:
            self._call_hook("end_round", self._run, round_number, read_accuracies(self._files, round_number))

    def wrap_rounds(self, numbers: Iterator[int]) -> Iterator[int]:
        """Pass on the numbers of a segment (complete rounds first, then each new round) and call the callbacks."""
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
        """Print a warning about a failed callback, which is removed."""
        print(
            f"fedpipe: {CALLBACKS_KEY}: {callback_name} failed ({type(error).__name__}: {error}). "
            f"{self._files.path} continues without it.",
            file=sys.stderr,
        )


def read_accuracies(files: RunFiles, round_number: int) -> dict[str, float]:
    """Accuracy of a round by protocol over all test samples. Empty if the round was not evaluated."""
    round_files = files.round(round_number)
    hashes = {
        **layout.read_round_digests(round_files, round_files.complete_states_marker),
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
