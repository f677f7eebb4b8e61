"""What both executors share: the phases of a client's round, and what comes out of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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

Statistics = dict[str, Tensor]  #: running statistics that a call of the network records, by name
LossFunction = Callable[[Tensors], tuple[Tensor, Statistics]]  #: of the trained parameters
GradientAndLoss = tuple[Tensors, tuple[Tensor, Statistics]]

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


@dataclass(frozen=True)
class ClientTask:
    """A phase of a round, for some clients.

    Parameters
    ----------
    phase
        Which passes run.
    round
        The round that begins, which seeds the order of samples.
    ids
        The clients of this job.
    get_kept_state
        A client's kept state.
    send
        What some clients receive, as :meth:`~fedpipe.algorithms.base.Algorithm.send`.
    tests
        Test sets on which the resulting models are measured.
    participants
        The clients of all jobs in this phase; all clients by default.
    ids_to_cache
        Clients that train next from the same states, in the same round. The loop keeps what `personalize` makes of
        them until then.
    """

    phase: Phase
    round: int
    ids: Sequence[int]
    get_kept_state: Callable[[int], State]
    send: Callable[[Sequence[int]], tuple[State, State]]
    tests: Sequence[Test] = ()
    participants: Sequence[int] | None = None
    ids_to_cache: Collection[int] = ()


class Executor(Protocol):
    """Runs a phase for some clients."""

    name: str  #: how artifacts record it: where it and the versions are equal, the bits are

    def run(self, task: ClientTask) -> Iterator[Outcome]:
        """Outcomes in the order of the task's ``ids``."""

    def describe_stacks(self, participants: Sequence[int]) -> list[dict[str, Any]]:
        """Which of a round's participants are computed in one call, and at which widths; empty where none are."""

    def logits(self, model: Tensors, indices: Integers, round: int) -> Tensor:
        """Logits of the server's model after a round on many test samples, shape (n, C)."""


def seconds_since(start_time: float, device: torch.device) -> float:
    """Seconds since ``time.perf_counter`` said so, with what the device has still to compute."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_time


def get_personal_passes(algorithm: Algorithm, phase: Phase) -> list[Pass]:
    """The passes that make the personal model, with which a phase begins."""
    return contract.validate_passes(algorithm, "personalize", algorithm.personalize()) if phase != "begin" else []


def get_passes(algorithm: Algorithm, phase: Phase, finetune_epochs: int) -> list[Pass]:
    """The passes of a phase, in order."""
    phase_passes = get_personal_passes(algorithm, phase)
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


def advance_epochs(algorithm: Algorithm, training: Train, epochs: dict[str, int]) -> tuple[range, int | None]:
    """The next epochs of a pass, and its fixed steps; ``epochs`` counts those of each stream in the phase."""
    count, steps = get_epochs_and_steps(algorithm, training)
    first = epochs.get(training.stream, 0)
    epochs[training.stream] = first + count
    return range(first, first + count), steps


class ClientPass:
    """A Train pass of one client: its gradient, its steps and its optimizer.

    A stack maps these methods over its clients.

    Parameters
    ----------
    algorithm
        Bound to its network and to the round.
    training
        The pass.
    client
        A client that begins the pass. It has the tensors that are trained, and the pull's targets for all of them.
    differentiate
        Computes the gradient of a loss at these parameters, its value and its statistics.
    can_overwrite
        Whether each gradient has memory of its own, which a step may overwrite.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        training: Train,
        client: State,
        differentiate: Callable[[LossFunction, Tensors], GradientAndLoss],
        can_overwrite: bool = False,
    ) -> None:
        self._algorithm, self._training = algorithm, training
        self._differentiate, self._can_overwrite = differentiate, can_overwrite
        self._optimizer, self._optimizer_part = build_optimizer(algorithm.federation), f"optimizer/{training.stream}"
        buffer_names = set(algorithm.net.buffer_names)
        self._names = tuple(name for name in training.only or client[training.group] if name not in buffer_names)
        contract.validate_pull(algorithm, training, self._names, client)

    def with_optimizer_state(self, client: State) -> State:
        """The client with the state of the optimizer, which passes of one stream share."""
        if self._optimizer_part in client:
            return client
        return client | {self._optimizer_part: self._optimizer.init(client[self._training.group].only(self._names))}

    def step(self, client: State, batch: Batch) -> State:
        """The client after a step on a batch, with the running statistics that the network recorded."""
        gradient = _BatchGradient(self, batch)
        if self._training.step is not None:
            client = contract.update_client(self._algorithm, self._training.step, client, batch, gradient)
        else:
            client = self.descend(client, gradient(client), self._can_overwrite)
        part = BUFFERS if BUFFERS in client else self._training.group
        statistics = {name: value for name, value in gradient.statistics.items() if name in client[part]}
        return client | {part: client[part] | statistics} if gradient.statistics else client

    def is_due(self, client: State) -> Tensor:
        """Whether the client's next epoch is due; True for a pass without a condition."""
        if self._training.when is None:
            return torch.tensor(True)
        return contract.compute_condition(self._algorithm, self._training.when, client)

    def finish_epoch(self, client: State) -> State:
        """The client after the pass's change at the end of an epoch."""
        after = self._training.after
        return client if after is None else contract.update_client(self._algorithm, after, client)

    def compute_gradient(self, client: State, batch: Batch) -> GradientAndLoss:
        """The clipped gradient of loss and pull, the loss, and the running statistics."""
        training, group = self._training, client[self._training.group]

        def compute_loss(parameters: Tensors) -> tuple[Tensor, Statistics]:
            with self._activate_mode(client, batch) as statistics:
                loss = training.loss(client | {training.group: group | parameters}, batch)
            contract.validate_loss(self._algorithm, training, loss)
            return loss, statistics

        gradient, results = self._differentiate(compute_loss, group.only(self._names))
        if training.pull is not None and training.pull.strength:
            target, out_tensors = client[training.pull.to], gradient if self._can_overwrite else {}
            alpha = training.pull.strength
            gradient = Tensors(
                (name, torch.add(g, group[name] - target[name], alpha=alpha, out=out_tensors.get(name)))
                for name, g in gradient.items()
            )
        return gradient.clipped(training.clip, self._can_overwrite), results

    def descend(self, client: State, gradient: Tensors, can_overwrite: bool = False) -> State:
        """The client after a step of the federation's optimizer; the step may overwrite the gradient."""
        group, part = client[self._training.group], self._optimizer_part
        gradient = gradient.clipped(self._algorithm.federation.clip_norm, can_overwrite)
        parameters, slots = self._optimizer.update(group.only(gradient), gradient, client[part], can_overwrite)
        return client | {self._training.group: group | parameters, part: slots}

    def _activate_mode(self, client: State, batch: Batch) -> AbstractContextManager[Statistics]:
        """Calls of the network within are in the pass's mode; gives the statistics that they record."""
        net = self._algorithm.net
        if self._training.eval_mode:
            return eval_mode(self._algorithm, client, batch.mask, net.is_bfloat16)
        own_buffers = client.get(BUFFERS), client.get(TEACHER_BUFFERS)
        return net.mode.activate(True, batch.mask, batch.key, *own_buffers, net.is_bfloat16)


class _BatchGradient:
    """The gradient that a custom step calls; see :class:`~fedpipe.algorithms.passes.Gradient`."""

    def __init__(self, client_pass: ClientPass, batch: Batch) -> None:
        self._pass, self._batch = client_pass, batch
        self.statistics: Statistics = {}  #: of the last call

    def __call__(self, client: State, batch: Batch | None = None) -> Tensors:
        return self.with_value(client, batch)[0]

    def with_value(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        gradient, (loss, self.statistics) = self._pass.compute_gradient(client, batch or self._batch)
        return gradient, loss

    def descend(self, client: State, gradient: Tensors) -> State:
        return self._pass.descend(client, gradient)
