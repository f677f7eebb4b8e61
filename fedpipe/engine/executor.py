"""What both executors share: the stages of a client's round, and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm, Pass, State
from fedpipe.engine.clients import Integers
from fedpipe.tensors import Tensors

#: train: everything up to the upload; receive: what is due before training; finetune: that, and a few epochs on top.
Stage = Literal["train", "receive", "finetune"]
Test = Literal["local", "global"]

MEASURE_BATCH = 250  #: samples in one call where nothing is trained; a fixed number, since bits may depend on it


class Score(NamedTuple):
    """A model on a test set."""

    correct: int
    total: int
    loss: float  #: sum of the cross-entropies


class Outcome(NamedTuple):
    """One client's stage."""

    client: int
    down: int  #: bytes received
    upload: State  #: empty unless trained
    keep: State  #: empty unless trained
    scores: dict[Test, Score]


class Executor(Protocol):
    """Runs a stage for some clients."""

    name: str  #: how artifacts record it: where it and the versions are equal, the bits are

    def run(
        self,
        stage: Stage,
        round: int,
        ids: Sequence[int],
        kept: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test] = (),
    ) -> Iterator[Outcome]:
        """Outcomes in the order of ``ids``.

        Parameters
        ----------
        stage
            Which passes run.
        round
            The round that begins, which seeds the order of samples.
        ids
            Clients.
        kept
            A client's kept state.
        send
            What some clients receive, as :meth:`~fedpipe.algorithms.base.Algorithm.send`.
        tests
            Test sets on which the resulting models are measured.
        """

    def logits(self, model: Tensors, indices: Integers) -> Tensor:
        """Logits of one model on many samples, shape (n, C)."""


def passes(algorithm: Algorithm, stage: Stage, finetune_epochs: int) -> list[Pass]:
    """The passes of a stage, in order."""
    listed = list(algorithm.prepare())
    if stage == "train":
        listed += algorithm.work()
    elif stage == "finetune":
        listed += algorithm.finetune(finetune_epochs)
    return listed


def slots_of(stream: str) -> str:
    """Name of the part of a client's state that holds a stream's optimiser."""
    return f"optimiser/{stream}"


def canonical(state: State) -> State:
    """The same values on the host, contiguous: what is computed from them never depends on how they were laid out."""
    mapped: State = pytree.tree_map(lambda value: value.detach().cpu().contiguous(), state)
    return mapped


def move(state: State, device: torch.device) -> State:
    """The state on another device."""
    mapped: State = pytree.tree_map(lambda value: value.to(device), state)
    return mapped


def stack(states: Sequence[State]) -> State:
    """States of several clients along a new first axis."""
    mapped: State = pytree.tree_map(lambda *values: torch.stack(values), *states) if states else {}
    return mapped


def unstack(state: State, index: int) -> State:
    """One client's part of a stack."""
    mapped: State = pytree.tree_map(lambda value: value[index], state)
    return mapped


def size_in_bytes(state: Any) -> int:
    """Bytes of all tensors, by dtype."""
    leaves: list[Tensor] = pytree.tree_leaves(state)
    return sum(value.numel() * value.element_size() for value in leaves)
