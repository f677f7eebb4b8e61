"""Code of both executors: the phases of a client's round and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm, one_hot
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.passes import Gradient, Pass, Train
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.clients.federated_data import FederatedData, Integers
from fedpipe.engine.clients.metrics import Bins
from fedpipe.engine.clients.optimizers import build_optimizer
from fedpipe.models.layers import BufferRecord
from fedpipe.settings.base import Metric
from fedpipe.settings.transforms import Transforms

#: train: all passes and the upload. receive: only personalization. finetune: personalization and some epochs.
#: prototype: like receive, but classified by the nearest prototype. begin: no pass.
Phase = Literal["train", "receive", "finetune", "prototype", "begin"]
#: The client's test samples, the global test set, the client's training samples, or its validation samples.
TestSet = Literal["local", "global", "train", "validation"]

Statistics = dict[str, dict[str, Tensor]]  #: new running statistics by part of the client's state and name
LossFunction = Callable[[Tensors], tuple[Tensor, Statistics]]  #: loss and statistics of the trained parameters
GradientAndLoss = tuple[Tensors, tuple[Tensor, Statistics]]

BUFFERS = "buffers"  #: part of a client's state: its own running statistics
FIRST = "info/first"  #: part of a kept state in memory: 1 until the client has trained. No file contains it
TEACHER_BUFFERS = "buffers/began"  #: running statistics at the start of the round, for teachers
MEASURE_BATCH = 250  #: samples per call in evaluation, fixed because bits may depend on it


class Score(NamedTuple):
    """The score of a model on a test set."""

    correct: int
    total: int
    loss: float  #: sum of the cross-entropies
    classes: tuple[tuple[int, ...], ...]  #: three counts by class: correctly classified, present, predicted
    auc: float | None = None  #: area under the ROC curve. None if it is not measured, or undefined
    bins: Bins = ()  #: sums of the calibration error. Empty if it is not measured

    @classmethod
    def from_counts(cls, classes: Tensor, loss: float, **metrics: Any) -> Score:
        """Make a score from :func:`count_predictions_by_class`, the sum of the losses, and further metrics."""
        counts = classes.tolist()
        return cls(sum(counts[0]), sum(counts[1]), loss, tuple(map(tuple, counts)), **metrics)


def count_predictions_by_class(logits: Tensor, batch: Batch) -> Tensor:
    """Count the samples of a batch that are correctly classified, present and predicted by class, shape (3, C)."""
    classes = logits.shape[-1]
    targets, predictions = (one_hot(labels, classes, logits.dtype) for labels in (batch.y, logits.argmax(-1)))
    return batch.sum(torch.stack([targets * predictions, targets, predictions], 1)).long()


class Outcome(NamedTuple):
    """The result of a client's phase."""

    client: int
    bytes_down: int  #: bytes received
    bytes_up: int  #: bytes sent
    upload: State  #: empty unless trained
    kept_state: State  #: empty unless trained
    scores: dict[TestSet, Score]
    seconds: float = 0.0  #: seconds of its passes. In a stack, an equal part of its seconds


@dataclass(frozen=True)
class ClientTask:
    """A phase of a round, for some clients."""

    phase: Phase
    round: int  #: number of the round, which seeds the order of samples
    ids: Sequence[int]  #: clients of this job
    get_kept_state: Callable[[int], State]  #: loads a client's kept state
    #: Gives the downloads of some clients (:meth:`~fedpipe.algorithms.base.Algorithm.send`).
    send: Callable[[Sequence[int]], tuple[State, State]]
    tests: Sequence[TestSet] = ()  #: test sets of the resulting models
    participants: Sequence[int] | None = None  #: clients of all jobs in this phase. By default all clients
    #: Participants of the next round, which begins with these states. The loop caches their personalized states.
    ids_to_cache: Collection[int] = ()
    metrics: Sequence[Metric] = ()  #: metrics of the tests in addition to accuracy and loss
    samples_round: int | None = None  #: round whose samples the clients have. By default the round of the task

    def select_round_samples(self, clients: FederatedData) -> FederatedData:
        """Select the clients with the samples of the task."""
        return clients.select_round_samples(self.round if self.samples_round is None else self.samples_round)


class Executor(Protocol):
    """Runs a phase for some clients."""

    name: str  #: recorded name. With the same name, device and versions the bits are equal

    def run(self, task: ClientTask) -> Iterator[Outcome]:
        """Run a task. Yield outcomes in the order of its ``ids``."""

    def compute_logits(self, model: Tensors, indices: Integers, round_number: int) -> Tensor:
        """Compute logits of the server's model after a round on many test samples, shape (n, C)."""


def has_same_bits(one: State, other: State) -> bool:
    """Whether two states have the same bits."""
    if one.keys() != other.keys():
        return False
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(one_leaf, other_leaf) for one_leaf, other_leaf in pairs)


def measure_seconds_since(start_time: float, device: torch.device) -> float:
    """Seconds since ``start_time`` (``time.perf_counter``), after the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_time


def get_personal_passes(algorithm: Algorithm, phase: Phase) -> list[Pass]:
    """Get the passes of personalization, with which a phase begins."""
    return (
        contract.validate_passes(algorithm, "personal_passes", algorithm.personal_passes()) if phase != "begin" else []
    )


def get_passes(algorithm: Algorithm, phase: Phase, finetune_epochs: int) -> list[Pass]:
    """Get the passes of a phase, in order."""
    phase_passes = get_personal_passes(algorithm, phase)
    if phase == "train":
        phase_passes += contract.validate_passes(algorithm, "local_passes", algorithm.local_passes())
    elif phase == "finetune":
        phase_passes += contract.validate_passes(
            algorithm, "finetune_passes", algorithm.finetune_passes(finetune_epochs)
        )
    return phase_passes


def make_initial_client_state(algorithm: Algorithm, server: State, initial_model: Callable[[int], Tensors]) -> State:
    """Make a client's initial kept state: the algorithm's parts, and the client's buffers if it has its own."""
    initial_state = contract.validate_state(algorithm, "init_client", algorithm.init_client(server, initial_model))
    contract.reject_reserved_part_names(algorithm, "init_client", initial_state)
    return initial_state | ({BUFFERS: algorithm.net.client_buffers} if algorithm.net.client_buffers else {})


def make_client_start_state(algorithm: Algorithm, kept_state: State, received_state: State, info: ClientInfo) -> State:
    """Make a client's state at the start of a phase."""
    buffers = {BUFFERS: kept_state[BUFFERS], TEACHER_BUFFERS: kept_state[BUFFERS]} if BUFFERS in kept_state else {}
    kept_parts = {part: value for part, value in kept_state.items() if part != FIRST}
    client = contract.validate_state(algorithm, "start", algorithm.start(kept_parts, received_state, info))
    contract.reject_reserved_part_names(algorithm, "start", [part for part in client if part not in kept_parts])
    return client | buffers


def make_kept_client_state(algorithm: Algorithm, state: State) -> State:
    """Make the state that a client keeps."""
    kept_state = contract.validate_state(algorithm, "keep", algorithm.keep(state))
    return kept_state | {part: state[part] for part in (BUFFERS,) if part in state}


def make_client_upload(algorithm: Algorithm, state: State) -> State:
    """Make the upload of a client."""
    return contract.validate_state(algorithm, "upload", algorithm.upload(state))


def activate_eval_mode(
    algorithm: Algorithm, state: State, mask: Tensor | None = None, autocast: bool = False
) -> AbstractContextManager[Any]:
    """Set evaluation mode for calls of the network, with this client's buffers."""
    return algorithm.net.mode.activate(False, mask, None, state.get(BUFFERS), state.get(TEACHER_BUFFERS), autocast)


def needs_noise_key(algorithm: Algorithm, training: Train, transforms: Transforms) -> bool:
    """Whether a pass's batches need a noise key, for dropout, augmentation or the algorithm's steps."""
    is_random = algorithm.needs_step_noise or algorithm.net.has_dropout or transforms.is_random
    return is_random and not training.eval_mode


def compute_client_logits(algorithm: Algorithm, phase: Phase, state: State, x: Tensor, classes: int) -> Tensor:
    """Compute a client's logits in a phase."""
    hook = "prototype_logits" if phase == "prototype" else "predict"
    return contract.validate_logits(algorithm, hook, getattr(algorithm, hook)(state, x), (len(x), classes))


def count_client_steps(algorithm: Algorithm, clients: FederatedData, client: int, round_number: int) -> int | None:
    """Count the steps of a client in a round. None: the algorithm does not count them."""
    if not contract.has_local_steps_hook(algorithm):
        return None
    noise_key = torch.tensor(clients.get_client_noise_key(client, round_number))
    return contract.count_local_steps(algorithm, len(clients.train[client]), round_number, noise_key)


def get_epochs_and_steps(algorithm: Algorithm, training: Train, local_steps: int | None) -> tuple[int, int | None]:
    """Get the maximum number of epochs of a pass, and its steps if the federation or the algorithm fixes them.

    ``local_steps`` is the number that the algorithm counted for this client.
    """
    federation = algorithm.federation
    if training.epochs is None and local_steps is not None:
        return local_steps, local_steps  # an epoch has at least one step, so these epochs are always enough
    epochs = federation.local_epochs if training.epochs is None else training.epochs
    if epochs is not None:
        return epochs, None
    steps = cast(int, federation.local_steps)
    return steps, steps


def take_next_epochs_and_steps(
    algorithm: Algorithm, training: Train, epochs: dict[str, int], local_steps: int | None
) -> tuple[range, int | None]:
    """Get the next epochs of a pass and its fixed steps.

    ``epochs`` contains the number of earlier epochs of each stream in the phase, and is updated.
    """
    count, steps = get_epochs_and_steps(algorithm, training, local_steps)
    first = epochs.get(training.stream, 0)
    epochs[training.stream] = first + count
    return range(first, first + count), steps


class ClientPass:
    """A Train pass of one client: its gradient, its steps and its optimizer.

    A stack maps these methods over its clients. ``client`` is the state of a client at the start of the pass.
    ``differentiate`` computes gradient, value and statistics of a loss. With ``can_overwrite`` each gradient has its
    own memory, which a step may overwrite.
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
        self._compute_gradient_and_loss, self.can_overwrite = differentiate, can_overwrite
        self._optimizer, self._optimizer_part = build_optimizer(algorithm.federation), f"optimizer/{training.stream}"
        buffer_names = set(algorithm.net.buffer_names)
        names = training.get_trained_part_tensors(client) if training.only is None else training.only
        self._names = tuple(name for name in names if name.rpartition("/")[2] not in buffer_names)
        contract.validate_trained_names(algorithm, training, self._names, client)
        contract.validate_pull_target(algorithm, training, self._names, client)

    def add_optimizer_state(self, client: State) -> State:
        """Add the state of the optimizer, which the passes of a stream share."""
        if self._optimizer_part in client:
            return client
        return client | {
            self._optimizer_part: self._optimizer.init_slots(
                self._training.get_trained_part_tensors(client).only(self._names)
            )
        }

    def take_step(self, client: State, batch: Batch) -> State:
        """Take a step on a batch, and update the running statistics."""
        gradient = BatchGradient(self, client, batch)
        if self._training.step is not None:
            client = contract.call_pass_function(self._algorithm, self._training.step, client, batch, gradient)
        else:
            client = gradient.take_optimizer_step(client)
        return client | {part: client[part] | values for part, values in gradient.statistics.items() if values}

    def needs_another_epoch(self, client: State) -> Tensor:
        """Whether the client trains another epoch. Always true for a pass without a condition."""
        if self._training.when is None:
            return torch.tensor(True)
        return contract.compute_pass_condition(self._algorithm, self._training.when, client)

    def finish_epoch(self, client: State) -> State:
        """Apply the pass's `after` at the end of an epoch."""
        after = self._training.after
        return client if after is None else contract.call_pass_function(self._algorithm, after, client)

    def compute_gradient(self, client: State, batch: Batch) -> GradientAndLoss:
        """Compute the clipped gradient of loss and pull, the loss, and the running statistics."""
        training, group = self._training, self._training.get_trained_part_tensors(client)

        def compute_loss(parameters: Tensors) -> tuple[Tensor, Statistics]:
            trained_client = self._make_buffers_distinct(training.replace_trained_tensors(client, parameters))
            with self._activate_network_mode(client, batch) as records:
                loss = training.loss(trained_client, batch)
            contract.validate_loss(self._algorithm, training, loss)
            return loss, self._group_statistics_by_part(trained_client, records)

        gradient, results = self._compute_gradient_and_loss(compute_loss, group.only(self._names))
        if training.pull is not None and training.pull.strength:
            target, out_tensors = client[training.pull.to], gradient if self.can_overwrite else {}
            alpha = training.pull.strength
            gradient = Tensors(
                (name, torch.add(g, group[name] - target[name], alpha=alpha, out=out_tensors.get(name)))
                for name, g in gradient.items()
            )
        return gradient.clipped(training.clip, self.can_overwrite), results

    def apply_gradient(self, client: State, gradient: Tensors, can_overwrite: bool = False) -> State:
        """Take a step of the federation's optimizer, which may overwrite the gradient."""
        group, part = self._training.get_trained_part_tensors(client), self._optimizer_part
        gradient = gradient.clipped(self._algorithm.federation.clip_norm, can_overwrite)
        parameters, slots = self._optimizer.update_parameters(
            group.only(gradient), gradient, client[part], can_overwrite
        )
        return self._training.replace_trained_tensors(client, parameters) | {part: slots}

    def has_same_buffer_objects(self, client: State, other: State) -> bool:
        """Whether the trained parts of two states have the same objects as running statistics.

        If a step updates statistics, its result has new objects.
        """
        names, parts = self._algorithm.net.buffer_names, self._training.trained_parts
        return all(client[part].get(name) is other[part].get(name) for part in parts for name in names)

    def _make_buffers_distinct(self, client: State) -> State:
        """Give each trained part its own tensor objects for the running statistics, by which their part is found.

        Parts may begin as one model. The memory is shared.
        """
        buffers = {part: self._algorithm.net.buffers(client[part]) for part in self._training.trained_parts}
        return client | {
            part: client[part] | value.map(lambda buffer: buffer.view_as(buffer))
            for part, value in buffers.items()
            if value
        }

    def _group_statistics_by_part(self, client: State, records: Sequence[BufferRecord]) -> Statistics:
        """Group running statistics by the part whose model was called.

        Statistics that belong to no part, such as those of a mixture of models, go to the first part.
        """
        parts = (BUFFERS,) if BUFFERS in client else self._training.trained_parts
        owners = {id(value): part for part in parts for value in client[part].values()}
        statistics: Statistics = {part: {} for part in parts}
        for name, old, new in sorted(records, key=lambda record: id(record.old) in owners):
            part = owners.get(id(old), parts[0])
            if name in client[part]:
                statistics[part][name] = new
        return statistics

    def _activate_network_mode(self, client: State, batch: Batch) -> AbstractContextManager[list[BufferRecord]]:
        """Set the pass's mode for calls of the network. Gives the statistics that they record."""
        net = self._algorithm.net
        if self._training.eval_mode:
            return activate_eval_mode(self._algorithm, client, batch.mask, net.is_bfloat16)
        own_buffers = client.get(BUFFERS), client.get(TEACHER_BUFFERS)
        return net.mode.activate(True, batch.mask, batch.noise_key, *own_buffers, net.is_bfloat16)


class BatchGradient(Gradient):
    """The gradient function of a step."""

    def __init__(self, client_pass: ClientPass, client: State, batch: Batch) -> None:
        self._pass, self._client, self._batch = client_pass, client, batch
        self.statistics: Statistics = {}  #: of the last call with the client's statistics, or of the first call

    @override
    def __call__(self, client: State, batch: Batch | None = None) -> Tensors:
        return self.with_value(client, batch)[0]

    @override
    def with_value(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        gradient, (loss, statistics) = self._pass.compute_gradient(client, batch or self._batch)
        if not self.statistics or self._pass.has_same_buffer_objects(client, self._client):
            self.statistics = statistics
        return gradient, loss

    @override
    def descend(self, client: State, gradient: Tensors) -> State:
        return self._pass.apply_gradient(client, gradient)

    def take_optimizer_step(self, client: State) -> State:
        """Take the step of a pass without a custom one."""
        return self._pass.apply_gradient(client, self(client), self._pass.can_overwrite)
