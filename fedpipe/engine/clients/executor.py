"""What both executors share: the phases of a client's round, and what comes out of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fedpipe.algorithms.base import Algorithm, one_hot
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.passes import Pass, Train
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.clients.federated_data import Integers
from fedpipe.engine.clients.optimizers import build_optimizer
from fedpipe.settings.transforms import Transforms

#: train: everything up to the upload; receive: what is due before training; finetune: that, and a few epochs on top;
#: prototype: as receive, but classes are read off the nearest prototype; begin: nothing at all.
Phase = Literal["train", "receive", "finetune", "prototype", "begin"]
#: A client's own test samples, all of the server's, what it trains on, or what it keeps for validation.
Test = Literal["local", "global", "train", "validation"]

BUFFERS = "buffers"  #: part of a client's state: the running statistics that it keeps to itself
FIRST = "info/first"  #: of a client's kept state in memory: 1 until it has trained; no file contains it
TEACHER_BUFFERS = "buffers/began"  #: those with which it began, which its teachers keep
MEASURE_BATCH = 250  #: samples in one call where nothing is trained; a fixed number, since bits may depend on it


class Score(NamedTuple):
    """A model on a test set."""

    correct: int
    total: int
    loss: float  #: sum of the cross-entropies
    classes: tuple[tuple[int, ...], ...]  #: three counts by class: those told right, those there are, those told so

    @classmethod
    def from_counts(cls, classes: Tensor, loss: float) -> Score:
        """From :func:`count_by_class`, and the sum of the losses."""
        counts = classes.tolist()
        return cls(sum(counts[0]), sum(counts[1]), loss, tuple(map(tuple, counts)))


def count_by_class(logits: Tensor, batch: Batch) -> Tensor:
    """How many samples of a batch are told right, are, and are told to be of each class, shape (3, C)."""
    classes = logits.shape[-1]
    targets, predictions = (one_hot(labels, classes, logits.dtype) for labels in (batch.y, logits.argmax(-1)))
    return batch.sum(torch.stack([targets * predictions, targets, predictions], 1)).long()


class Outcome(NamedTuple):
    """One client's phase."""

    client: int
    bytes_down: int  #: bytes received
    bytes_up: int  #: bytes sent
    upload: State  #: empty unless trained
    keep: State  #: empty unless trained
    scores: dict[Test, Score]
    seconds: float = 0.0  #: of its passes, where it trained; a client of a stack has its share of them


class Executor(Protocol):
    """Runs a phase for some clients."""

    name: str  #: how artifacts record it: where it and the versions are equal, the bits are

    def run(
        self,
        phase: Phase,
        round: int,
        ids: Sequence[int],
        get_kept_state: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test] = (),
        participants: Sequence[int] | None = None,
        clients_to_cache: Collection[int] = (),
    ) -> Iterator[Outcome]:
        """Outcomes in the order of ``ids``.

        Parameters
        ----------
        phase
            Which passes run.
        round
            The round that begins, which seeds the order of samples.
        ids
            Clients.
        get_kept_state
            A client's kept state.
        send
            What some clients receive, as :meth:`~fedpipe.algorithms.base.Algorithm.send`.
        tests
            Test sets on which the resulting models are measured.
        participants
            Everyone who is at work in this phase, in any job; all clients by default.
        clients_to_cache
            Clients that are asked for again from the same states, in the same round: what `personalize` makes of them
            may be held until then.
        """

    def describe_stacks(self, participants: Sequence[int]) -> list[dict[str, Any]]:
        """Which of a round's participants are computed in one call, and at which widths; empty where none are."""

    def logits(self, model: Tensors, indices: Integers, round: int) -> Tensor:
        """Logits of the server's model after a round on many test samples, shape (n, C)."""


def seconds_since(start_time: float, device: torch.device) -> float:
    """Seconds since ``time.perf_counter`` said so, with what the device has still to compute."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_time


def get_personal_passes(algorithm: Algorithm) -> list[Pass]:
    """Those with which all phases but ``begin`` begin."""
    return contract.validate_passes(algorithm, "personalize", algorithm.personalize())


def get_passes(algorithm: Algorithm, phase: Phase, finetune_epochs: int) -> list[Pass]:
    """The passes of a phase, in order."""
    phase_passes = get_personal_passes(algorithm) if phase != "begin" else []
    if phase == "train":
        phase_passes += contract.validate_passes(algorithm, "local_passes", algorithm.local_passes())
    elif phase == "finetune":
        phase_passes += contract.validate_passes(algorithm, "finetune", algorithm.finetune(finetune_epochs))
    return phase_passes


def init_client(algorithm: Algorithm, server: State, fresh: Callable[[int], Tensors]) -> State:
    """What a client keeps before its first round: the algorithm's parts, and buffers of its own where it has them."""
    initial_state = contract.validate_state(algorithm, "init_client", algorithm.init_client(server, fresh))
    return initial_state | ({BUFFERS: algorithm.net.client_buffers} if algorithm.net.client_buffers else {})


def start_client(algorithm: Algorithm, kept_state: State, received_state: State, info: ClientInfo) -> State:
    """One client's tensors as it begins."""
    buffers = {BUFFERS: kept_state[BUFFERS], TEACHER_BUFFERS: kept_state[BUFFERS]} if BUFFERS in kept_state else {}
    kept_parts = {part: value for part, value in kept_state.items() if part != FIRST}
    return contract.validate_state(algorithm, "start", algorithm.start(kept_parts, received_state, info)) | buffers


def make_kept_state(algorithm: Algorithm, state: State) -> State:
    """What stays at one client."""
    kept_state = contract.validate_state(algorithm, "keep", algorithm.keep(state))
    return kept_state | {part: state[part] for part in (BUFFERS,) if part in state}


def make_upload(algorithm: Algorithm, state: State) -> State:
    """What one client sends."""
    return contract.validate_state(algorithm, "upload", algorithm.upload(state))


def eval_mode(
    algorithm: Algorithm, state: State, mask: Tensor | None = None, autocast: bool = False
) -> AbstractContextManager[Any]:
    """Calls of the network within are in evaluation mode, for this client."""
    return algorithm.net.mode.activate(False, mask, None, state.get(BUFFERS), state.get(TEACHER_BUFFERS), autocast)


def train_mode(
    algorithm: Algorithm, training: Train, state: State, batch: Batch
) -> AbstractContextManager[dict[str, Tensor]]:
    """Calls of the network within are in the pass's mode, for this client; gives the statistics that they record."""
    autocast = algorithm.net.is_bfloat16
    if training.eval_mode:
        return eval_mode(algorithm, state, batch.mask, autocast)
    return algorithm.net.mode.activate(
        True, batch.mask, batch.key, state.get(BUFFERS), state.get(TEACHER_BUFFERS), autocast
    )


def needs_noise_key(algorithm: Algorithm, training: Train, transforms: Transforms) -> bool:
    """Whether a pass's batches need a key, for dropout or for changes of images."""
    return not training.eval_mode and (algorithm.net.has_dropout or transforms.is_random)


def get_logits_function(algorithm: Algorithm, phase: Phase) -> Callable[[State, Tensor], Tensor]:
    """How a phase's models tell classes."""
    return algorithm.prototype_logits if phase == "prototype" else algorithm.predict


def get_epochs_and_steps(algorithm: Algorithm, training: Train) -> tuple[int, int | None]:
    """How many epochs a pass goes through at most, and its steps where the federation fixes them."""
    federation = algorithm.federation
    epochs = federation.local_epochs if training.epochs is None else training.epochs
    if epochs is not None:
        return epochs, None
    steps = cast(int, federation.local_steps)
    return steps, steps  # an epoch has one at least


def get_trained_names(algorithm: Algorithm, training: Train, state: State) -> tuple[str, ...]:
    """The names of the parameters that a pass trains, all of which its pull has a target for."""
    buffer_names = set(algorithm.net.buffer_names)
    names = tuple(name for name in training.only or state[training.group] if name not in buffer_names)
    contract.validate_pull(algorithm, training, names, state)
    return names


def add_pull_and_clip(training: Train, client: State, gradient: Tensors, inplace: bool = False) -> Tensors:
    """What a pass makes of the gradient of one client's loss; one that is ``inplace`` is changed in place."""
    if training.pull is not None and training.pull.strength:
        theta, target = client[training.group], client[training.pull.to]
        out_tensors = gradient if inplace else {}
        terms = (
            (name, torch.add(g, theta[name] - target[name], alpha=training.pull.strength, out=out_tensors.get(name)))
            for name, g in gradient.items()
        )
        gradient = Tensors(terms)
    return gradient.clipped(training.clip, inplace)


def with_optimizer_state(algorithm: Algorithm, training: Train, state: State) -> State:
    """One client's tensors with the slots of a pass's optimizer."""
    if _get_optimizer_part(training) in state:
        return state
    parameters = state[training.group].only(get_trained_names(algorithm, training, state))
    return state | {_get_optimizer_part(training): build_optimizer(algorithm.federation).init(parameters)}


def descend(
    algorithm: Algorithm, training: Train, client: State, gradient: Tensors, can_overwrite_gradient: bool = False
) -> State:
    """One client after a step of the federation's optimizer on what a pass trains.

    A gradient that is ``can_overwrite_gradient``, which has memory of its own and nobody reads again, may give it to
    what comes out.
    """
    group, slots_part, limit = client[training.group], _get_optimizer_part(training), algorithm.federation.clip_norm
    rule = build_optimizer(algorithm.federation)
    gradient = gradient.clipped(limit, can_overwrite_gradient)
    parameters, new_slots = rule.update(group.only(gradient), gradient, client[slots_part], can_overwrite_gradient)
    return client | {training.group: group | parameters, slots_part: new_slots}


def with_batch_stats(training: Train, client: State, statistics: dict[str, Tensor]) -> State:
    """One client with the running statistics that a step recorded, in its buffers or in the model that it trains."""
    part = BUFFERS if BUFFERS in client else training.group
    known_statistics = {name: value for name, value in statistics.items() if name in client[part]}
    return client | {part: client[part] | known_statistics}


def _get_optimizer_part(training: Train) -> str:
    """The part of a client's state that holds the optimizer of a pass's stream."""
    return f"optimizer/{training.stream}"
