"""Repeats a round from the previous states, and compares it with the recorded one.

The code that all runs share (executors, optimizers, random streams, layers, base classes, evaluation) is in no key, so
that you can refactor it and keep all results. Before a run resumes with other shared code, the current code repeats its
last round and must give the same result.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive
from fedpipe.core.storage.files import is_same_table, read_json, read_parquet, write_json
from fedpipe.core.storage.layout import RoundFiles, RunFiles
from fedpipe.engine.clients.executor import Executor
from fedpipe.engine.rounds import Rounds

#: Relative difference that other devices and executors may have after a round, because of rounding.
ROUNDING = {"float32": 1e-3, "float64": 1e-9, "bfloat16": 0.05}
ENVIRONMENT_KEYS = ("executor", "device", "torch", "numpy")  #: if these are equal, so are the bits


@dataclass(frozen=True)
class Comparison:
    """A recorded round and the same round repeated."""

    round: int
    made_by: list[dict[str, Any]]  #: recorded environments of the round
    replayed_by: dict[str, Any]  #: environment of this process
    compared_files: list[str]
    differing_files: list[str]  #: compared files with different bits
    distance: float  #: norm of the difference of all states over the norm of the round's change

    @property
    def has_same_environment(self) -> bool:
        """Whether executor, device, CPU and libraries are equal, so that the same code gives equal bits."""
        return all(
            environment.get(name) == self.replayed_by[name] for environment in self.made_by for name in ENVIRONMENT_KEYS
        )

    def is_reproduced(self, compute_dtype: str) -> bool:
        """Whether the round is reproduced: equal bits in the same environment, or equal up to rounding in another."""
        return not self.differing_files or (not self.has_same_environment and self.distance <= ROUNDING[compute_dtype])

    def describe_difference(self) -> str:
        """Describe the difference and its size."""
        if not self.differing_files:
            return f"all bits agree ({', '.join(self.compared_files)})"
        return f"bits differ in {', '.join(self.differing_files)} (states by {self.distance:.2g} of the round's change)"


def replay_round(run: Rounds, round_number: int, executor: Executor | None = None) -> Comparison | None:
    """Repeat a complete round with the code and device of this process. None if a previous state is missing.

    Nothing is written into the run. The executor is the run's by default.
    """
    files = run.files
    with tempfile.TemporaryDirectory(prefix="fedpipe-redo-") as folder:
        copy = run.open_in_other_folder(copy_run_before_round(files, round_number, Path(folder) / files.path.name))
        copy.executor = executor or run.executor
        if round_number == 0:
            copy.write_initial_round()
        elif copy.checkpoint.find_last_resumable_round(round_number - 1) < round_number - 1:
            return None
        else:
            copy.run_round(round_number)
        round_files = [compared_run.files.get_round_files(round_number) for compared_run in (run, copy)]
        old, new = (read_json(item.marker)["sha256"] for item in round_files)
        compared_files = sorted(name for name in old | new if not name.endswith(".json"))
        differing_files = [
            name
            for name in compared_files
            if old.get(name) != new.get(name) and not _has_same_table(name, round_files, (old, new))
        ]
        distance = _compute_state_distance(run, copy, round_number) if differing_files else 0.0
        if not distance:  # equal tensors: bytes of older files also depend on the memory layout
            differing_files = [name for name in differing_files if not name.endswith(".pt")]
        return Comparison(
            round_number,
            run.checkpoint.read_state_json(round_number)["made_by"],
            run.get_environment(),
            compared_files,
            differing_files,
            distance,
        )


def _has_same_table(name: str, round_files: Sequence[RoundFiles], hashes: Sequence[Mapping[str, str]]) -> bool:
    """Whether a file is a table with equal content in two rounds. Other versions of Arrow write other bytes."""
    if not name.endswith(".parquet") or not all(name in round_hashes for round_hashes in hashes):
        return False
    tables = (read_parquet(files.path / name, sha256[name]) for files, sha256 in zip(round_files, hashes, strict=True))
    return is_same_table(*tables)


def require_reproducible_round(run: Rounds, round_number: int) -> None:
    """Before a run resumes with other shared code, require that this code reproduces the round.

    The result is recorded in the run's folder, so that this is done once.

    Raises
    ------
    ArtifactError
        The code does not reproduce it, or a required state is missing.
    """
    made_by, environment = run.checkpoint.read_state_json(round_number)["made_by"], run.get_environment()
    record = run.files.get_replay_record_path(round_number, environment["shared"])
    if all(entry.get("shared") == environment["shared"] for entry in made_by) or record.is_file():
        return
    comparison = replay_round(run, round_number)
    if comparison is None or not comparison.is_reproduced(run.federation.compute_dtype):
        problem = "can't be repeated, because the states before it are missing"
        if comparison is not None:
            problem = f"has another result when it is repeated: {comparison.describe_difference()}"
        raise ArtifactError(
            f"{run.files.path} can't be resumed. The code that all runs share has changed since round {round_number}, "
            f"and that round {problem}. {format_restore_advice(run.files)}"
        )
    agreement = {"agrees": "within rounding" if comparison.differing_files else "bits", "distance": comparison.distance}
    write_json(record, {"round": round_number, "made_by": made_by, "now": environment, **agreement})


def format_restore_advice(files: RunFiles) -> str:
    """Advice about a run whose last round the current code does not reproduce."""
    return f"Restore the version of fedpipe that computed it, or type `rm -r {files.path}` to recompute the run."


def copy_run_before_round(files: RunFiles, round_number: int, folder: Path) -> RunFiles:
    """Copy a run's folder as it was before a round: its settings and the previous rounds."""
    copy = RunFiles(folder)
    copy.rounds_folder.mkdir(parents=True)
    copy.settings.write_bytes(files.settings.read_bytes())
    pack_members = archive.read_pack_members(archive.get_pack_path(files.rounds_folder))
    earlier_members = {name: data for name, data in pack_members.items() if int(Path(name).parent.name) < round_number}
    archive.get_pack_path(copy.rounds_folder).write_bytes(archive.build_pack(earlier_members))
    for earlier_round in range(round_number):
        if files.get_round_files(earlier_round).path.is_dir():
            copy.get_round_files(earlier_round).path.symlink_to(
                files.get_round_files(earlier_round).path.resolve(), target_is_directory=True
            )
    return copy


def _compute_state_distance(run: Rounds, copy: Rounds, round_number: int) -> float:
    """Compute the distance of :class:`Comparison`. Infinite if names or shapes differ."""
    old, new = (_collect_state_tensors(rounds, round_number, round_number) for rounds in (run, copy))
    # Round 0 makes the complete initial state.
    previous_states = _collect_state_tensors(run, round_number, round_number - 1) if round_number else {}
    if {name: value.shape for name, value in old.items()} != {name: value.shape for name, value in new.items()}:
        return math.inf
    gap = sum(_compute_squared_distance(new[name], value) for name, value in old.items())
    change = sum(
        _compute_squared_distance(previous_states.get(name, torch.zeros_like(value)), value)
        for name, value in old.items()
    )
    if not gap:
        return 0.0
    return math.sqrt(gap / change) if change and math.isfinite(gap) else math.inf


def _collect_state_tensors(run: Rounds, participants_round: int, state_round: int) -> dict[str, torch.Tensor]:
    """Get all tensors after round ``state_round`` by name: the server's and the participants' kept states."""
    tensors = dict(_iterate_tensors(run.load_server_state(state_round), "server/"))
    for client in run.checkpoint.read_state_json(participants_round)["participants"]:
        tensors |= _iterate_tensors(run.checkpoint.load_kept_state(client, state_round), f"{client}/")
    return tensors


def _iterate_tensors(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _iterate_tensors(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _compute_squared_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Sum of the squared differences of two tensors. Equal infinities and NaNs do not differ."""
    one, other = one.double(), other.double()
    equal_mask = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(equal_mask, torch.zeros_like(one), one - other).square().sum())
