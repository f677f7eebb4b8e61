"""Uploads of some participants of a round, and the file that passes them between the jobs of a round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedpipe.algorithms.batch import State
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import files
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.executor import Outcome, Score, Test
from fedpipe.engine.torch_env.trees import move_state, stack_states, unstack_client


@dataclass
class Block:
    """Some participants of a round, in the order of their ids."""

    run: str  #: key of the run
    round: int
    made_by: dict[str, Any]  #: executor, device, versions
    ids: list[int] = field(default_factory=list)
    uploads: list[State] = field(default_factory=list)
    kept_states: list[State] = field(default_factory=list)
    bytes_down: list[int] = field(default_factory=list)  #: bytes received by each
    bytes_up: list[int] = field(default_factory=list)  #: bytes sent by each
    scores: list[dict[Test, Score]] = field(default_factory=list)  #: scores after training
    client_seconds: list[float] = field(default_factory=list)  #: seconds of each client
    seconds: float = 0.0  #: seconds of the block, including tests
    stacks: list[dict[str, Any]] = field(default_factory=list)  #: stacks of the round, if clients train in one call

    def add_outcome(self, outcome: Outcome) -> None:
        """Add a participant."""
        self.ids.append(outcome.client)
        self.uploads.append(outcome.upload)
        self.kept_states.append(outcome.kept_state)
        self.bytes_down.append(outcome.bytes_down)
        self.bytes_up.append(outcome.bytes_up)
        self.scores.append(outcome.scores)
        self.client_seconds.append(outcome.seconds)

    @classmethod
    def from_blocks(cls, blocks: Sequence[Block], device: torch.device) -> Block:
        """Merge all blocks of a round, on the device."""
        stacks = next((block.stacks for block in blocks if block.stacks), [])
        merged_block = cls(
            blocks[0].run, blocks[0].round, {}, seconds=sum(block.seconds for block in blocks), stacks=stacks
        )
        for block in blocks:
            for part in ("ids", "uploads", "kept_states", "bytes_down", "bytes_up", "scores", "client_seconds"):
                getattr(merged_block, part).extend(getattr(block, part))
        merged_block.uploads, merged_block.kept_states = (
            [move_state(state, device) for state in part] for part in (merged_block.uploads, merged_block.kept_states)
        )
        return merged_block

    def to_tensors(self) -> dict[str, Any]:
        """Convert to tensors for a file."""
        return {
            "run": _encode_json(self.run),
            "round": torch.tensor(self.round),
            "made_by": _encode_json(self.made_by),
            "stacks": _encode_json(self.stacks),
            "ids": torch.tensor(self.ids),
            "uploads": stack_states(self.uploads),
            "kept": stack_states(self.kept_states),
            "bytes": torch.tensor([self.bytes_down, self.bytes_up]),
            "scores": _encode_json(self.scores),
            "spent": torch.tensor(self.client_seconds, dtype=torch.float64),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }

    @classmethod
    def from_tensors(cls, tree: dict[str, Any]) -> Block:
        """Convert from the tensors of a file."""
        ids, (bytes_down, bytes_up) = tree["ids"].tolist(), tree["bytes"].tolist()
        uploads, kept_states = restore_state(tree["uploads"]), restore_state(tree["kept"])
        return cls(
            run=_decode_json(tree["run"]),
            round=int(tree["round"]),
            made_by=_decode_json(tree["made_by"]),
            stacks=_decode_json(tree["stacks"]),
            ids=ids,
            uploads=[unstack_client(uploads, row) for row in range(len(ids))],
            kept_states=[unstack_client(kept_states, row) for row in range(len(ids))],
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            scores=[
                {test: _restore_score(*values) for test, values in scores.items()}
                for scores in _decode_json(tree["scores"])
            ],
            client_seconds=tree["spent"].tolist(),
            seconds=float(tree["seconds"]),
        )

    @classmethod
    def read(cls, path: Path) -> Block:
        """Read a block from its file.

        Raises
        ------
        ArtifactError
            The file is missing or damaged, or is not a block.
        """
        tree = files.read_pt(path)
        try:
            return cls.from_tensors(tree)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ArtifactError(f"{path} is not a block of clients. Delete it and run again.") from error


def restore_state(tree: dict[str, Any]) -> State:
    """Convert the inner dicts of a state from a file to :class:`~fedpipe.core.tensors.Tensors`."""
    return {part: Tensors(value) if isinstance(value, dict) else value for part, value in tree.items()}


def _restore_score(
    correct: int, total: int, loss: float, classes: list[list[int]], auc: float | None, bins: list[list[float]]
) -> Score:
    return Score(correct, total, loss, tuple(map(tuple, classes)), auc, tuple(map(tuple, bins)))


def _encode_json(value: Any) -> torch.Tensor:
    """Encode a value as JSON bytes in a tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode_json(json_bytes: torch.Tensor) -> Any:
    return json.loads(bytes(json_bytes.tolist()))
