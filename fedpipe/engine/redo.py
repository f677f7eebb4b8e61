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

from fedpipe import archive, artifacts
from fedpipe.artifacts import RunFiles
from fedpipe.errors import ArtifactError

if TYPE_CHECKING:
    from fedpipe.engine.executor import Executor
    from fedpipe.engine.run import Run

#: Of what a round changes, the share by which other devices and executors may differ: rounding, amplified by a round.
ROUNDING = {"float32": 1e-3, "float64": 1e-9, "bfloat16": 0.05}
PLACE = ("executor", "device", "torch", "numpy")  #: where these are equal, the bits are


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
    now: dict[str, Any]
    names: list[str]
    differ: list[str]
    distance: float

    @property
    def same_place(self) -> bool:
        """Whether executor, device, CPU and libraries are the same, so that equal code gives equal bits."""
        return all(made.get(name) == self.now[name] for made in self.made_by for name in PLACE)

    def agrees(self, arithmetic: str) -> bool:
        """Whether the round came out the same: in its bits, or elsewhere than it was made within rounding."""
        return not self.differ or (not self.same_place and self.distance <= ROUNDING[arithmetic])

    def told(self) -> str:
        """What differs, and by how much."""
        if not self.differ:
            return f"all bits agree ({', '.join(self.names)})"
        return f"bits differ in {', '.join(self.differ)} (states by {self.distance:.2g} of what the round changed)"


def again(run: Run, number: int, executor: Executor | None = None) -> Comparison | None:
    """Do a complete round again, by the code and device of this process; writes nothing into the run.

    Parameters
    ----------
    run, number
        The run and the round.
    executor
        By default the run's own; probes look into it.

    Returns
    -------
    Comparison or None
        None where a state from before the round is gone.
    """
    files = run.files
    with tempfile.TemporaryDirectory(prefix="fedpipe-redo-") as folder:
        copy = run.at(before(files, number, Path(folder) / files.path.name))
        copy.executor = executor or run.executor
        if number == 0:
            copy.initialize()
        elif copy.checkpoint.complete(number - 1) < number - 1:
            return None
        else:
            copy.round(number)
        old, new = (artifacts.read_json(done.files.round(number).marker)["sha256"] for done in (run, copy))
        names = sorted(name for name in old | new if not name.endswith(".json"))
        differ = [name for name in names if old.get(name) != new.get(name)]
        distance = _distance(run, copy, number) if differ else 0.0
        if not distance:  # equal tensors: bytes of older files also tell how they lay in memory
            differ = [name for name in differ if not name.endswith(".pt")]
        return Comparison(number, run.checkpoint.sealed(number)["made_by"], run.made_by(), names, differ, distance)


def check(run: Run, number: int) -> None:
    """Before a run goes on after a round by other shared code than made it, see that this code makes it the same.

    What came of it is recorded in the run's folder, so that this is done once.

    Raises
    ------
    ArtifactError
        It does not, or a state is gone that is needed to tell.
    """
    made_by, now = run.checkpoint.sealed(number)["made_by"], run.made_by()
    record = run.files.continued(number, now["shared"])
    if all(made.get("shared") == now["shared"] for made in made_by) or record.is_file():
        return
    found = again(run, number)
    gone = "that round can't be done again, since a state from before it is gone"
    told = gone if found is None else f"done again now {found.told()}"
    if found is None or not found.agrees(run.federation.arithmetic):
        raise ArtifactError(
            f"{run.files.path} can't go on: the code that all runs share has changed since round {number}, and {told}; "
            f"restore fedpipe as it was, or type `rm -r {run.files.path}` to have the "
            f"run made anew."
        )
    agreed = {"agrees": "within rounding" if found.differ else "bits", "distance": found.distance}
    artifacts.write_json(record, {"round": number, "made_by": made_by, "now": now, **agreed})


def before(files: RunFiles, number: int, folder: Path) -> RunFiles:
    """A run's folder as it was before a round: its settings, and what the rounds so far left."""
    copy = RunFiles(folder)
    copy.history.mkdir(parents=True)
    copy.settings.write_bytes(files.settings.read_bytes())
    packed = archive.contents(archive.of(files.history))
    before = {name: data for name, data in packed.items() if int(Path(name).parent.name) < number}
    archive.of(copy.history).write_bytes(archive.join(before))
    for earlier in range(number):
        if files.round(earlier).path.is_dir():
            copy.round(earlier).path.symlink_to(files.round(earlier).path.resolve(), target_is_directory=True)
    return copy


def _distance(run: Run, copy: Run, number: int) -> float:
    """See :class:`Comparison`; infinite where states are of other names or shapes."""
    old, new = _states(run, number, number), _states(copy, number, number)
    before = _states(run, number, number - 1) if number else {}  # all of the initial state is made in round 0
    if {name: value.shape for name, value in old.items()} != {name: value.shape for name, value in new.items()}:
        return math.inf
    gap = sum(_square(new[name], value) for name, value in old.items())
    change = sum(_square(before.get(name, torch.zeros_like(value)), value) for name, value in old.items())
    if not gap:
        return 0.0
    return math.sqrt(gap / change) if change and math.isfinite(gap) else math.inf


def _states(run: Run, number: int, at: int) -> dict[str, torch.Tensor]:
    """All tensors after round ``at``, by name: the server's, and those that the participants of a round keep."""
    found = dict(_leaves(run.server(at), "server/"))
    for client in run.checkpoint.sealed(number)["participants"]:
        found |= _leaves(run.kept(client, at), f"{client}/")
    return found


def _leaves(tree: dict[str, Any], place: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{place}{name}/")
        else:
            yield f"{place}{name}", value


def _square(one: torch.Tensor, other: torch.Tensor) -> float:
    """Sum of the squared differences of two tensors; where both are infinite or NaN alike, they do not differ."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(same, torch.zeros_like(one), one - other).square().sum())
