"""The loop executor: client by client, clients in parallel over the cores that the job was granted."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.passes import Measure, Pass, Train, Update
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import (
    FIRST,
    MEASURE_BATCH,
    Outcome,
    Phase,
    Score,
    Test,
    add_pull_and_clip,
    count_by_class,
    descend,
    eval_mode,
    get_epochs_and_steps,
    get_logits_function,
    get_passes,
    get_personal_passes,
    get_trained_names,
    make_kept_state,
    make_upload,
    needs_noise_key,
    seconds_since,
    start_client,
    train_mode,
    with_batch_stats,
    with_optimizer_state,
)
from fedpipe.engine.clients.federated_data import FederatedData, Integers
from fedpipe.engine.clients.transforms import transform_images
from fedpipe.engine.torch_env.layout import channels_last, optimize_layout
from fedpipe.engine.torch_env.memory import keep_pages
from fedpipe.engine.torch_env.trees import make_contiguous, move_state, size_in_bytes, unstack_client

PERSONAL_CACHE_BYTES = 2**30  #: of personal models that are held until their clients train


class PersonalizedState(NamedTuple):
    """A client after its personal passes, and what they began with."""

    round: int
    initial_state: State
    state: State
    epochs: dict[str, int]  #: how far each stream has come
    seconds: float

    def is_valid_for(self, round: int, state: State) -> bool:
        """Whether they would make the same of this state, since it is the same bit for bit."""
        return self.round == round and _has_same_bits(self.initial_state, state)


class Loop:
    """Trains clients one at a time, each on one thread with a module of its own.

    Parameters
    ----------
    algorithm
        Bound to its network.
    clients
        Their samples.
    threads
        Clients that are worked on at once; no number depends on it.
    finetune_epochs
        Epochs of the phase ``finetune``.
    storage_device
        Where outcomes lie; by default on the device that trains.
    """

    name = "loop"

    def __init__(
        self,
        algorithm: Algorithm,
        clients: FederatedData,
        threads: int = 1,
        finetune_epochs: int = 1,
        storage_device: torch.device | None = None,
    ) -> None:
        torch.set_num_threads(1)
        keep_pages()
        self._clients, self._finetune_epochs, self._storage_device = (
            clients,
            finetune_epochs,
            storage_device or clients.device,
        )
        self._idle_workers = [
            algorithm.bind(algorithm.net.copy_for_thread(), algorithm.federation) for _ in range(threads)
        ]
        self._personal_cache: dict[int, PersonalizedState] = {}
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

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
        """See :class:`~fedpipe.engine.clients.executor.Executor`."""
        ids_to_cache = set(clients_to_cache)
        if phase != "begin":
            self._personal_cache = {
                client: cached_state
                for client, cached_state in self._personal_cache.items()
                if cached_state.round == round
            }

        def run_client(client: int) -> Outcome:
            worker = self._idle_workers.pop()
            algorithm = worker.bind_round(round)
            try:
                with torch.no_grad(), contract.explain_user_errors(algorithm):
                    common, client_parts = contract.validate_download(algorithm, send([client]))
                    received_state = move_state(common | unstack_client(client_parts, 0), self._clients.device)
                    needs_cache = client in ids_to_cache
                    return self._run_client(
                        algorithm, phase, round, client, get_kept_state(client), received_state, tests, needs_cache
                    )
            finally:
                self._idle_workers.append(worker)

        # The largest clients begin first, so that no core waits long for the last; outcomes keep the order of ids.
        futures = {client: self._pool.submit(run_client, client) for client in sorted(ids, key=self._get_sort_key)}
        return (futures.pop(client).result() for client in ids)

    def describe_stacks(self, participants: Sequence[int]) -> list[dict[str, Any]]:
        """See :class:`~fedpipe.engine.clients.executor.Executor`."""
        return []

    def _get_sort_key(self, client: int) -> int:
        return -int(self._clients.sizes[client])

    def _run_client(
        self,
        algorithm: Algorithm,
        phase: Phase,
        round: int,
        client: int,
        kept_state: State,
        received_state: State,
        tests: Sequence[Test],
        needs_cache: bool,
    ) -> Outcome:
        clients = self._clients
        state = optimize_layout(
            start_client(
                algorithm,
                move_state(kept_state, clients.device),
                received_state,
                clients.get_client_info(client, round, kept_state[FIRST]),
            )
        )
        start_time, earlier_seconds = time.perf_counter(), 0.0
        phase_passes, epochs = get_passes(algorithm, phase, self._finetune_epochs), dict[str, int]()
        if personalize_passes := get_personal_passes(algorithm) if phase != "begin" else []:
            state, epochs, earlier_seconds = self._personalize_client(
                algorithm, personalize_passes, state, round, client, needs_cache
            )
        for pass_ in phase_passes[len(personalize_passes) :]:
            state = self._run_pass(algorithm, pass_, state, round, client, epochs)
        seconds = earlier_seconds + seconds_since(start_time, clients.device)
        scores = {test: self._score(algorithm, phase, state, round, client, test) for test in tests}
        down = size_in_bytes(algorithm.traffic(received_state))
        if phase != "train":
            return Outcome(client, down, 0, {}, {}, scores)
        client_upload, next_kept_state = (
            move_state(make_contiguous(make_state(algorithm, state)), self._storage_device)
            for make_state in (make_upload, make_kept_state)
        )
        return Outcome(
            client,
            down,
            size_in_bytes(algorithm.traffic(client_upload)),
            client_upload,
            next_kept_state,
            scores,
            seconds,
        )

    def _personalize_client(
        self,
        algorithm: Algorithm,
        personalize_passes: list[Pass],
        initial_state: State,
        round: int,
        client: int,
        needs_cache: bool,
    ) -> tuple[State, dict[str, int], float]:
        """The client's state after its personal passes, made once for all that begins with them.

        With it, the epochs of each stream so far, and the seconds that the passes took if they were made before.
        """
        personalized_state, earlier_seconds = self._personal_cache.pop(client, None), 0.0
        if personalized_state is not None and personalized_state.is_valid_for(round, initial_state):
            earlier_seconds = personalized_state.seconds
        else:
            start_time, state, epochs = time.perf_counter(), initial_state, dict[str, int]()
            for pass_ in personalize_passes:
                state = optimize_layout(self._run_pass(algorithm, pass_, state, round, client, epochs))
            personalized_state = PersonalizedState(
                round, initial_state, state, epochs, seconds_since(start_time, self._clients.device)
            )
        if (
            needs_cache
            and (len(self._personal_cache) + 1)
            * size_in_bytes([personalized_state.initial_state, personalized_state.state])
            <= PERSONAL_CACHE_BYTES
        ):
            self._personal_cache[client] = personalized_state
        return personalized_state.state, personalized_state.epochs.copy(), earlier_seconds

    def _run_pass(
        self, algorithm: Algorithm, pass_: Pass, state: State, round: int, client: int, epochs: dict[str, int]
    ) -> State:
        match pass_:
            case Train():
                first = epochs.get(pass_.stream, 0)
                count, steps = get_epochs_and_steps(algorithm, pass_)
                epochs[pass_.stream] = first + count
                return self._train(algorithm, pass_, state, round, client, range(first, first + count), steps)
            case Measure():
                sums: dict[str, Tensor] = {}
                indices = (self._clients.train if pass_.on == "train" else self._clients.validation_or_train)[client]
                key = self._clients.get_noise_key(client, round, "measure", 0) if pass_.is_augmented else None
                with eval_mode(algorithm, state):
                    for batch in self._batches(indices, MEASURE_BATCH, key):
                        terms = pass_.sums(state, batch)
                        sums = {name: sums[name] + term if sums else term for name, term in terms.items()}
                    return pass_.then(state, sums)
            case Update():
                return pass_.then(state)

    def _train(
        self,
        algorithm: Algorithm,
        training: Train,
        state: State,
        round: int,
        client: int,
        epochs: range,
        steps: int | None,
    ) -> State:
        names, state = get_trained_names(algorithm, training, state), with_optimizer_state(algorithm, training, state)
        size = self._clients.resolve_batch_size(algorithm.federation.batch_size) * training.batches
        for epoch in epochs:
            if training.when is not None and not bool(training.when(state)):
                break
            order = self._clients.shuffle_indices(client, round, training.stream, epoch, training.share)
            key = None
            if needs_noise_key(algorithm, training, self._clients.transforms):
                key = self._clients.get_noise_key(client, round, training.stream, epoch)
            for batch in itertools.islice(self._batches(order, size, key), training.steps):
                if steps is not None:
                    if not steps:
                        return state
                    steps -= 1
                gradient = _Gradient(algorithm, training, names, batch)
                if training.step is not None:
                    state = training.step(state, batch, gradient)
                else:
                    state = descend(algorithm, training, state, gradient(state), can_overwrite_gradient=True)
                if gradient.batch_stats:
                    state = with_batch_stats(training, state, gradient.batch_stats)
            if training.after is not None:
                state = training.after(state)
        return state

    def _batches(self, indices: Integers, size: int, key: int | None = None) -> Iterator[Batch]:
        """Batches in the order of ``indices``; with a key, which seeds their noise, they are transformed."""
        x, y = self._clients.gather(indices)
        for number, first in enumerate(range(0, len(indices), size)):
            inputs, noise = x[first : first + size], None
            if key is not None:
                noise = torch.tensor(key + number, device=x.device)
                inputs = transform_images(self._clients.transforms, inputs, noise)
            yield Batch(channels_last(inputs), y[first : first + size], None, noise)

    def _score(self, algorithm: Algorithm, phase: Phase, state: State, round: int, client: int, test: Test) -> Score:
        indices, key = (
            self._clients.get_evaluation_indices(client, test),
            self._clients.get_evaluation_noise_key(client, round, test),
        )
        classes, loss = torch.zeros(3, self._clients.classes, dtype=torch.long, device=self._clients.device), 0.0
        with eval_mode(algorithm, state):
            for batch in self._batches(indices, MEASURE_BATCH, key):
                logits = get_logits_function(algorithm, phase)(state, batch.x)
                classes = classes + count_by_class(logits, batch)
                loss += float(F.cross_entropy(logits, batch.y, reduction="sum"))
        return Score.from_counts(classes, loss)

    def logits(self, model: Tensors, indices: Integers, round: int) -> Tensor:
        """See :class:`~fedpipe.engine.clients.executor.Executor`; the samples are spread over the threads."""

        def compute_chunk(chunk_number: int, chunk: Integers) -> Tensor:
            worker = self._idle_workers.pop()
            try:
                with torch.no_grad():
                    return worker.net(
                        weights, channels_last(self._clients.gather_test_batch(chunk, round, chunk_number))
                    )
            finally:
                self._idle_workers.append(worker)

        weights = optimize_layout(model.map(lambda value: value.to(self._clients.device)))
        chunks = np.array_split(indices, max(1, math.ceil(len(indices) / MEASURE_BATCH)))
        return torch.cat(list(self._pool.map(compute_chunk, range(len(chunks)), chunks)))


class _Gradient:
    """Gradient of a pass's loss on one batch; see :class:`~fedpipe.algorithms.passes.Gradient`."""

    def __init__(self, algorithm: Algorithm, training: Train, names: tuple[str, ...], batch: Batch) -> None:
        self._algorithm, self._training, self._names, self._batch = algorithm, training, names, batch
        self.batch_stats: dict[str, Tensor] = {}

    def __call__(self, client: State, batch: Batch | None = None) -> Tensors:
        return self.with_value(client, batch)[0]

    def with_value(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        batch, group = batch or self._batch, client[self._training.group]
        leaves = Tensors((name, group[name].detach().requires_grad_()) for name in self._names)
        with torch.enable_grad(), train_mode(self._algorithm, self._training, client, batch) as self.batch_stats:
            value = self._training.loss(client | {self._training.group: group | leaves}, batch)
        contract.validate_loss(self._algorithm, self._training, value)
        # Laid out as the leaves are, and each in memory of its own, since steps write there: PyTorch may give
        # views of one gradient to two of them.
        torch.autograd.backward(value, inputs=list(leaves.values()))
        gradient, seen_storages = Tensors(), set[int]()
        for name, leaf in leaves.items():
            leaf_gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            memory = leaf_gradient.untyped_storage().data_ptr()
            gradient[name] = leaf_gradient.clone() if memory in seen_storages else leaf_gradient
            seen_storages.add(memory)
        return add_pull_and_clip(self._training, client, gradient, inplace=True), value.detach()

    def descend(self, client: State, gradient: Tensors) -> State:
        return descend(self._algorithm, self._training, client, gradient)


def _has_same_bits(one: State, other: State) -> bool:
    """Whether two states hold the same bits."""
    if one.keys() != other.keys():
        return False
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(one_leaf, other_leaf) for one_leaf, other_leaf in pairs)
