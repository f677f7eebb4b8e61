"""What some participants of a round send, and how it travels through a file between the jobs of a round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedpipe import artifacts
from fedpipe.algorithms.base import State
from fedpipe.engine.executor import Outcome, Score, Test
from fedpipe.engine.trees import move, stack, unstack
from fedpipe.errors import ArtifactError
from fedpipe.tensors import Tensors


@dataclass
class Block:
    """Some participants of a round, in the order of their ids."""

    run: str  #: the key of the run
    round: int
    made_by: dict[str, Any]  #: executor, device, versions
    ids: list[int] = field(default_factory=list)
    uploads: list[State] = field(default_factory=list)
    kept: list[State] = field(default_factory=list)
    down: list[int] = field(default_factory=list)  #: bytes received by each
    up: list[int] = field(default_factory=list)  #: bytes sent by each
    scores: list[dict[Test, Score]] = field(default_factory=list)  #: right after training
    spent: list[float] = field(default_factory=list)  #: seconds of each one's own work
    seconds: float = 0.0  #: of all of it, with tests and whatever lies between
    stacks: list[dict[str, Any]] = field(default_factory=list)  #: of the whole round, where clients train in one call

    def add(self, outcome: Outcome) -> None:
        """One more participant."""
        self.ids.append(outcome.client)
        self.uploads.append(outcome.upload)
        self.kept.append(outcome.keep)
        self.down.append(outcome.down)
        self.up.append(outcome.up)
        self.scores.append(outcome.scores)
        self.spent.append(outcome.seconds)

    @classmethod
    def joined(cls, blocks: Sequence[Block], device: torch.device) -> Block:
        """All participants of a round, of all its blocks, on the device; the blocks alone know who made which."""
        stacks = next((block.stacks for block in blocks if block.stacks), [])
        whole = cls(blocks[0].run, blocks[0].round, {}, seconds=sum(block.seconds for block in blocks), stacks=stacks)
        for block in blocks:
            for part in ("ids", "uploads", "kept", "down", "up", "scores", "spent"):
                getattr(whole, part).extend(getattr(block, part))
        whole.uploads, whole.kept = ([move(state, device) for state in part] for part in (whole.uploads, whole.kept))
        return whole

    def tree(self) -> dict[str, Any]:
        """As tensors, for a file."""
        return {
            "run": _written(self.run),
            "round": torch.tensor(self.round),
            "made_by": _written(self.made_by),
            "stacks": _written(self.stacks),
            "ids": torch.tensor(self.ids),
            "uploads": stack(self.uploads),
            "kept": stack(self.kept),
            "bytes": torch.tensor([self.down, self.up]),
            "scores": {
                test: torch.tensor([_numbers(scores[test]) for scores in self.scores], dtype=torch.float64)
                for test in self.scores[0]
            },
            "spent": torch.tensor(self.spent, dtype=torch.float64),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Block:
        """From a file's tensors."""
        ids, (down, up) = tree["ids"].tolist(), tree["bytes"].tolist()
        uploads, kept = named(tree["uploads"]), named(tree["kept"])

        def scores(row: int) -> dict[Test, Score]:
            return {test: _score(values[row]) for test, values in tree["scores"].items()}

        return cls(
            run=_read(tree["run"]),
            round=int(tree["round"]),
            made_by=_read(tree["made_by"]),
            stacks=_read(tree["stacks"]),
            ids=ids,
            uploads=[unstack(uploads, row) for row in range(len(ids))],
            kept=[unstack(kept, row) for row in range(len(ids))],
            down=down,
            up=up,
            scores=[scores(row) for row in range(len(ids))],
            spent=tree["spent"].tolist(),
            seconds=float(tree["seconds"]),
        )

    @classmethod
    def read(cls, path: Path) -> Block:
        """From a file.

        Raises
        ------
        ArtifactError
            The file is missing or damaged, or is no block.
        """
        tree = artifacts.read_pt(path)
        try:
            return cls.of(tree)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ArtifactError(f"{path} is no block of clients; delete it and run again.") from error


def named(tree: dict[str, Any]) -> State:
    """A state as it comes from a file: its inner dicts become :class:`~fedpipe.tensors.Tensors` again."""
    return {part: Tensors(value) if isinstance(value, dict) else value for part, value in tree.items()}


def _numbers(score: Score) -> list[float]:
    return [score.loss, *(count for counts in score.classes for count in counts)]


def _score(numbers: torch.Tensor) -> Score:
    return Score.of(numbers[1:].long().reshape(3, -1), float(numbers[0]))


def _written(value: Any) -> torch.Tensor:
    """As JSON, in bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _read(written: torch.Tensor) -> Any:
    return json.loads(bytes(written.tolist()))
