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
from fedpipe.engine.clients.executor import Outcome, Score
from fedpipe.engine.torch_env.trees import move_state, stack_states, unstack_client


@dataclass
class Block:
    """Some participants of a round, in the order of their ids."""

    run: str  #: key of the run
    round: int
    made_by: dict[str, Any]  #: executor, device, versions
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0  #: seconds of the block, including tests

    @property
    def ids(self) -> list[int]:
        """The participants."""
        return [outcome.client for outcome in self.outcomes]

    @property
    def uploads(self) -> list[State]:
        """What the participants upload."""
        return [outcome.upload for outcome in self.outcomes]

    @property
    def kept_states(self) -> list[State]:
        """What the participants keep."""
        return [outcome.kept_state for outcome in self.outcomes]

    @classmethod
    def from_blocks(cls, blocks: Sequence[Block], device: torch.device) -> Block:
        """Merge all blocks of a round, on the device."""

        def move_outcome_to_device(outcome: Outcome) -> Outcome:
            upload, kept_state = (move_state(state, device) for state in (outcome.upload, outcome.kept_state))
            return outcome._replace(upload=upload, kept_state=kept_state)

        return cls(
            blocks[0].run,
            blocks[0].round,
            {},
            [move_outcome_to_device(outcome) for block in blocks for outcome in block.outcomes],
            sum(block.seconds for block in blocks),
        )

    def to_tensors(self) -> dict[str, Any]:
        """Convert to tensors for a file."""
        return {
            "run": _encode_json_tensor(self.run),
            "round": torch.tensor(self.round),
            "made_by": _encode_json_tensor(self.made_by),
            "ids": torch.tensor(self.ids),
            "uploads": stack_states(self.uploads),
            "kept": stack_states(self.kept_states),
            "bytes": torch.tensor([(outcome.bytes_down, outcome.bytes_up) for outcome in self.outcomes]).T.contiguous(),
            "scores": _encode_json_tensor([outcome.scores for outcome in self.outcomes]),
            "spent": torch.tensor([outcome.seconds for outcome in self.outcomes], dtype=torch.float64),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }

    @classmethod
    def from_tensors(cls, tree: dict[str, Any]) -> Block:
        """Convert from the tensors of a file."""
        uploads, kept_states = convert_tree_to_state(tree["uploads"]), convert_tree_to_state(tree["kept"])
        columns = (
            tree["ids"].tolist(),
            *tree["bytes"].tolist(),
            _decode_json_tensor(tree["scores"]),
            tree["spent"].tolist(),
        )
        outcomes = [
            Outcome(
                client,
                bytes_down,
                bytes_up,
                unstack_client(uploads, row),
                unstack_client(kept_states, row),
                {test: _convert_lists_to_score(*values) for test, values in scores.items()},
                seconds,
            )
            for row, (client, bytes_down, bytes_up, scores, seconds) in enumerate(zip(*columns, strict=True))
        ]
        return cls(
            run=_decode_json_tensor(tree["run"]),
            round=int(tree["round"]),
            made_by=_decode_json_tensor(tree["made_by"]),
            outcomes=outcomes,
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


def convert_tree_to_state(tree: dict[str, Any]) -> State:
    """Convert the inner dicts of a state from a file to :class:`~fedpipe.core.tensors.Tensors`."""
    return {part: Tensors(value) if isinstance(value, dict) else value for part, value in tree.items()}


def _convert_lists_to_score(
    correct: int, total: int, loss: float, classes: list[list[int]], auc: float | None, bins: list[list[float]]
) -> Score:
    return Score(correct, total, loss, tuple(map(tuple, classes)), auc, tuple(map(tuple, bins)))


def _encode_json_tensor(value: Any) -> torch.Tensor:
    """Encode a value as JSON bytes in a tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode_json_tensor(json_bytes: torch.Tensor) -> Any:
    return json.loads(bytes(json_bytes.tolist()))
