"""A round done again from what was before it, and how it compares with what is recorded.

The code that all runs share (executors, optimizers, streams, layers, base classes, evaluation) is in no key, so that it
can be refactored without throwing results away. Before a run goes on by other shared code than made its last round,
that round is done again by the code that lies here and has to come out the same.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive
from fedpipe.core.storage.files import read_json, write_json
from fedpipe.core.storage.layout import RunFiles

if TYPE_CHECKING:
    from fedpipe.engine.clients.executor import Executor
    from fedpipe.engine.run import Run

#: Of what a round changes, the share by which other devices and executors may differ: rounding, amplified by a round.
ROUNDING = {"float32": 1e-3, "float64": 1e-9, "bfloat16": 0.05}
ENVIRONMENT_KEYS = ("executor", "device", "torch", "numpy")  #: where these are equal, the bits are


@dataclass(frozen=True)
class Comparison:
    """A round beside the same round done again.

    Parameters
    ----------
    round
        Its number.
    made_by, now
        What made it, and what did it again.
    names
        The files compared.
    differ
        Those whose bits differ.
    distance
        Norm of the difference of all states over the norm of what the round changed in them.
    """

    round: int
    made_by: list[dict[str, Any]]
    replayed_by: dict[str, Any]
    compared_files: list[str]
    differing_files: list[str]
    distance: float

    @property
    def is_same_environment(self) -> bool:
        """Whether executor, device, CPU and libraries are the same, so that equal code gives equal bits."""
        return all(
            environment.get(name) == self.replayed_by[name] for environment in self.made_by for name in ENVIRONMENT_KEYS
        )

    def is_reproduced(self, arithmetic: str) -> bool:
        """Whether the round came out the same: in its bits, or elsewhere than it was made within rounding."""
        return not self.differing_files or (not self.is_same_environment and self.distance <= ROUNDING[arithmetic])

    def describe_difference(self) -> str:
        """What differs, and by how much."""
        if not self.differing_files:
            return f"all bits agree ({', '.join(self.compared_files)})"
        return (
            f"bits differ in {', '.join(self.differing_files)} (states by {self.distance:.2g} of what the round "
            "changed)"
        )


def replay_round(run: Run, number: int, executor: Executor | None = None) -> Comparison | None:
    """Do a complete round again, by the code and device of this process; writes nothing into the run.

    Parameters
    ----------
    run, number
        The run and the round.
    executor
        By default the run's own; diagnostics look into it.

    Returns
    -------
    Comparison or None
        None where a state from before the round is gone.
    """
    files = run.files
    with tempfile.TemporaryDirectory(prefix="fedpipe-redo-") as folder:
        copy = run.with_files(copy_run_before(files, number, Path(folder) / files.path.name))
        copy.executor = executor or run.executor
        if number == 0:
            copy.initialize()
        elif copy.checkpoint.find_last_complete_round(number - 1) < number - 1:
            return None
        else:
            copy.run_round(number)
        old, new = (read_json(compared_run.files.round(number).marker)["sha256"] for compared_run in (run, copy))
        compared_files = sorted(name for name in old | new if not name.endswith(".json"))
        differing_files = [name for name in compared_files if old.get(name) != new.get(name)]
        distance = _distance(run, copy, number) if differing_files else 0.0
        if not distance:  # equal tensors: bytes of older files also tell how they lay in memory
            differing_files = [name for name in differing_files if not name.endswith(".pt")]
        return Comparison(
            number,
            run.checkpoint.read_state_json(number)["made_by"],
            run.get_environment(),
            compared_files,
            differing_files,
            distance,
        )


def require_reproducible_round(run: Run, number: int) -> None:
    """Before a run goes on after a round by other shared code than made it, see that this code makes it the same.

    What came of it is recorded in the run's folder, so that this is done once.

    Raises
    ------
    ArtifactError
        It does not, or a state is gone that is needed to tell.
    """
    made_by, environment = run.checkpoint.read_state_json(number)["made_by"], run.get_environment()
    record = run.files.replay_record(number, environment["shared"])
    if all(entry.get("shared") == environment["shared"] for entry in made_by) or record.is_file():
        return
    comparison = replay_round(run, number)
    missing_state_message = "that round can't be done again, since a state from before it is gone"
    replay_message = (
        missing_state_message if comparison is None else f"done again now {comparison.describe_difference()}"
    )
    if comparison is None or not comparison.is_reproduced(run.federation.compute_dtype):
        raise ArtifactError(
            f"{run.files.path} can't go on: the code that all runs share has changed since round {number}, and "
            f"{replay_message}; "
            f"restore fedpipe as it was, or type `rm -r {run.files.path}` to have the "
            f"run made anew."
        )
    agreement = {"agrees": "within rounding" if comparison.differing_files else "bits", "distance": comparison.distance}
    write_json(record, {"round": number, "made_by": made_by, "now": environment, **agreement})


def copy_run_before(files: RunFiles, number: int, folder: Path) -> RunFiles:
    """A run's folder as it was before a round: its settings, and what the rounds so far left."""
    copy = RunFiles(folder)
    copy.rounds_folder.mkdir(parents=True)
    copy.settings.write_bytes(files.settings.read_bytes())
    pack_members = archive.read_members(archive.pack_path(files.rounds_folder))
    earlier_members = {name: data for name, data in pack_members.items() if int(Path(name).parent.name) < number}
    archive.pack_path(copy.rounds_folder).write_bytes(archive.build_pack(earlier_members))
    for earlier_round in range(number):
        if files.round(earlier_round).path.is_dir():
            copy.round(earlier_round).path.symlink_to(
                files.round(earlier_round).path.resolve(), target_is_directory=True
            )
    return copy


def _distance(run: Run, copy: Run, number: int) -> float:
    """See :class:`Comparison`; infinite where states are of other names or shapes."""
    old, new = _states(run, number, number), _states(copy, number, number)
    previous_states = _states(run, number, number - 1) if number else {}  # all of the initial state is made in round 0
    if {name: value.shape for name, value in old.items()} != {name: value.shape for name, value in new.items()}:
        return math.inf
    gap = sum(_squared_distance(new[name], value) for name, value in old.items())
    change = sum(
        _squared_distance(previous_states.get(name, torch.zeros_like(value)), value) for name, value in old.items()
    )
    if not gap:
        return 0.0
    return math.sqrt(gap / change) if change and math.isfinite(gap) else math.inf


def _states(run: Run, number: int, state_round: int) -> dict[str, torch.Tensor]:
    """All tensors after round ``state_round`` by name: the server's, and what a round's participants keep."""
    tensors = dict(_leaves(run.load_server_state(state_round), "server/"))
    for client in run.checkpoint.read_state_json(number)["participants"]:
        tensors |= _leaves(run.checkpoint.load_kept_state(client, state_round), f"{client}/")
    return tensors


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _squared_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Sum of the squared differences of two tensors; where both are infinite or NaN alike, they do not differ."""
    one, other = one.double(), other.double()
    equal_mask = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(equal_mask, torch.zeros_like(one), one - other).square().sum())
