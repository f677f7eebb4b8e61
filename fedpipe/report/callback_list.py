"""The callbacks of a job.

They run in the job's process, after all files of a round are written. If a callback fails, the job prints a warning,
removes the callback and continues.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

from fedpipe.core.callbacks import (
    CALLBACKS_KEY,
    Callback,
    RunInfo,
    check_callback,
    find_callback,
    read_round_accuracies,
)
from fedpipe.core.storage.layout import RunFiles
from fedpipe.core.yaml_text import read_generated_yaml
from fedpipe.report.trackers import TRACKER_CLASSES


class CallbackList:
    """The callbacks of one job, by the names of trackers and paths of classes. ``stop`` is its last round."""

    def __init__(self, names: Sequence[str], files: RunFiles, stop: int) -> None:
        self._files, self._stop = files, stop
        self._run: RunInfo | None = None
        self._callbacks: list[Callback] = []
        for name in names:
            try:
                if name in TRACKER_CLASSES:
                    check_callback(name)  # that its package is installed
                self._callbacks.append((TRACKER_CLASSES.get(name) or find_callback(name))())
            except (Exception, SystemExit) as error:  # from the import or from `__init__`
                self._report_failure(name, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._run is not None:
            self._call_hook_of_each_callback("end_run", self._run)

    def call_begin_run_hooks(self, completed_rounds: int) -> None:
        """Begin the job after this number of complete rounds."""
        if self._callbacks:
            self._run = RunInfo(
                path=self._files.path,
                settings=read_generated_yaml(self._files.settings),
                last_round=self._stop,
                completed_rounds=completed_rounds,
            )
            self._call_hook_of_each_callback("begin_run", self._run)

    def call_end_round_hooks(self, round_number: int) -> None:
        """Report a complete round to all callbacks."""
        if self._callbacks:
            self._call_hook_of_each_callback(
                "end_round", self._run, round_number, read_round_accuracies(self._files, round_number)
            )

    def iterate_rounds_with_hooks(self, round_numbers: Iterator[int]) -> Iterator[int]:
        """Pass on the rounds of a segment (complete rounds first, then each new round) and call the callbacks."""
        completed_rounds = next(round_numbers)
        self.call_begin_run_hooks(completed_rounds)
        yield completed_rounds
        for number in round_numbers:
            self.call_end_round_hooks(number)
            yield number

    def _call_hook_of_each_callback(self, hook: str, *arguments: Any) -> None:
        for callback in list(self._callbacks):
            try:
                getattr(callback, hook)(*copy.deepcopy(arguments))  # none can change what others get
            except (Exception, SystemExit) as error:
                self._callbacks.remove(callback)
                self._report_failure(f"{type(callback).__qualname__}.{hook}", error)

    def _report_failure(self, callback_name: str, error: BaseException) -> None:
        """Print a warning about a failed callback, which is removed."""
        print(
            f"fedpipe: {CALLBACKS_KEY}: {callback_name} failed ({type(error).__name__}: {error}). "
            f"{self._files.path} continues without it.",
            file=sys.stderr,
        )
