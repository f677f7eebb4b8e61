"""Callbacks that monitor a run: a user's class, or a tracker of :mod:`fedpipe.report.trackers`.

A callback only reads. It changes no number, key or file of a run.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from fedpipe.core import overrides
from fedpipe.core.errors import SettingsError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import read_parquet
from fedpipe.core.storage.layout import RunFiles
from fedpipe.core.user_code import import_user_object

CALLBACKS_KEY = "execution.callbacks"
TRACKERS = ("dvclive", "mlflow", "tensorboard", "wandb")  #: also names of their packages and of fedpipe's extras
METHODS = ("begin_run", "end_round", "end_run")  #: methods of a callback


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that a callback monitors."""

    path: Path  #: folder with the run's files
    settings: Mapping[str, Any] = field(repr=False)  #: content of its ``run.yaml``
    last_round: int  #: the last round of this job
    completed_rounds: int  #: complete rounds when this job began

    @property
    def algorithm(self) -> str:
        """Label in params.yaml."""
        return self.path.parts[-2]

    @property
    def key(self) -> str:
        """Key of the run."""
        return self.path.name

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.settings["seed"])

    @property
    def name(self) -> str:
        """Name for display and for folders, such as ``fedavg-seed0-0123456789ab``."""
        return f"{self.algorithm}-seed{self.seed}-{self.key}"

    @property
    def group(self) -> str:
        """Name that is the same for all seeds of a configuration, such as ``fedavg-ba9876543210``."""
        shared = {name: value for name, value in self.settings.items() if name not in {"seed", "origin"}}
        return f"{self.algorithm}-{compute_json_digest(shared)}"


class Callback:
    """Base class of callbacks. Override the methods that you need. Each job creates a new object without arguments."""

    def begin_run(self, run: RunInfo) -> None:
        """The job begins a new run, or resumes one after ``run.completed_rounds`` rounds."""

    def end_round(self, run: RunInfo, round_number: int, accuracies: Mapping[str, float]) -> None:
        """A round is complete. ``accuracies`` in [0, 1] by protocol, over all test samples. It may be empty."""

    def end_run(self, run: RunInfo) -> None:
        """The job ends, after its last round or before."""


def check_callback(name: str) -> None:
    """Check before any job starts that a callback is an installed tracker, or a class whose methods can be called."""
    if name not in TRACKERS:
        find_callback(name)
        return
    if not is_tracker_installed(name):
        raise SettingsError(
            f"{CALLBACKS_KEY}: '{name}' can't be used, because its package is not installed. Type `pip install "
            f"'fedpipe[{name}]'`, or remove it from the list."
        )


def is_tracker_installed(tracker: str) -> bool:
    """Whether a tracker's package is installed."""
    spec = importlib.util.find_spec(tracker)
    return spec is not None and spec.origin is not None  # without origin, it is a folder in which the tracker writes


def find_callback(name: str) -> type[Callback]:
    """Find the class at a dotted path. Raises an error if fedpipe can't create it or call one of its methods."""
    if "." not in name:
        raise SettingsError(
            f"{CALLBACKS_KEY}: unknown callback '{name}'. Use {', '.join(TRACKERS)}, or the path of a class, such as "
            "own.Board."
        )
    candidate = import_user_object(CALLBACKS_KEY, name, _is_callback, "Use the path of a class, such as own.Board.")
    if not _is_callback(candidate):
        raise SettingsError(
            f"{CALLBACKS_KEY}: '{name}' is not a callback. It must derive from fedpipe.core.callbacks.Callback."
        )
    if all(getattr(candidate, method) is getattr(Callback, method) for method in METHODS):
        raise SettingsError(
            f"{CALLBACKS_KEY}: '{name}' does nothing, because it defines none of {', '.join(METHODS)}. Rename a method "
            "to one of them."
        )
    callback: type[Callback] = candidate
    if mistake := next(_find_mistakes(name, callback), None):
        raise SettingsError(f"{CALLBACKS_KEY}: {mistake}")
    return callback


def _find_mistakes(name: str, callback: type[Callback]) -> Iterator[str]:
    """Messages about arguments and names of a callback's methods. ``name`` is its path."""
    if isinstance(callback.__init__, FunctionType):
        try:
            inspect.signature(callback.__init__).bind(None)
        except TypeError as error:
            yield f"{name}.__init__ must work without arguments ({error}). Give each argument a default."
    used_names = overrides.find_names_in_methods(callback.__mro__)
    for base in callback.__mro__[: callback.__mro__.index(Callback)]:
        for method, value in vars(base).items():
            if method in METHODS:
                yield from overrides.find_override_mistakes(name, method, value, Callback)
                continue
            is_public_method = isinstance(value, FunctionType) and not method.startswith("_")
            is_unused = is_public_method and issubclass(base, Callback) and method not in used_names
            if is_unused and (similar_name := overrides.find_similar_name(method, METHODS)):
                yield f"{name}.{method} is never used, because no hook has that name. Did you mean '{similar_name}'?"


def _is_callback(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Callback)


def read_round_accuracies(files: RunFiles, round_number: int) -> dict[str, float]:
    """Accuracy of a round by protocol over all test samples. Empty if the round was not evaluated."""
    round_files = files.get_round_files(round_number)
    hashes = {
        **layout.read_round_hashes(round_files, round_files.complete_states_marker),
        **layout.read_round_hashes(round_files, round_files.marker),
    }
    correct, total = Counter[str](), Counter[str]()
    for path in (round_files.metrics, round_files.trained_accuracies):
        if path.name in hashes:
            for row in read_parquet(path, hashes[path.name], ["protocol", "correct", "total"]).to_pylist():
                correct[row["protocol"]] += row["correct"]
                total[row["protocol"]] += row["total"]
    return {protocol: correct[protocol] / count for protocol, count in total.items() if count}
