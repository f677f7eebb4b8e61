"""The loop executor: one client at a time on each core of the job."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.passes import Measure, Pass, Train, Update
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import (
    FIRST,
    MEASURE_BATCH,
    ClientPass,
    ClientTask,
    Executor,
    GradientAndLoss,
    LossFunction,
    Outcome,
    Phase,
    Score,
    TestSet,
    activate_eval_mode,
    compute_client_logits,
    count_client_steps,
    count_predictions_by_class,
    get_passes,
    get_personal_passes,
    has_same_bits,
    make_client_start_state,
    make_client_upload,
    make_kept_client_state,
    measure_seconds_since,
    needs_noise_key,
    take_next_epochs_and_steps,
)
from fedpipe.engine.clients.federated_data import FederatedData, Integers
from fedpipe.engine.clients.metrics import compute_probability_metrics
from fedpipe.engine.clients.transforms import transform_images
from fedpipe.engine.torch_env.layout import optimize_layout, to_channels_last
from fedpipe.engine.torch_env.memory import retain_freed_memory
from fedpipe.engine.torch_env.trees import count_bytes, make_contiguous, move_state, unstack_client
from fedpipe.engine.user_errors import explain_user_errors
from fedpipe.settings.base import Metric

PERSONAL_CACHE_BYTES = 2**30  #: maximum size of the cache of personalized states


class PersonalizedState(NamedTuple):
    """A client's state after its personal passes, and the initial state."""

    round: int
    initial_state: State
    state: State
    epochs: dict[str, int]  #: epochs of each stream so far
    seconds: float
    clients: FederatedData  #: samples of the clients

    def is_reusable(self, client_run: ClientRun, state: State) -> bool:
        """Whether the passes would give the same result for this state, because all bits are equal."""
        is_same_task = self.round == client_run.round and self.clients is client_run.clients
        return is_same_task and has_same_bits(self.initial_state, state)


class LoopExecutor(Executor):
    """Trains one client at a time on each thread, which has its own module. Results do not depend on ``threads``.

    ``storage_device`` is the device of outcomes, by default the training device.
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
        retain_freed_memory()
        self._clients, self._finetune_epochs = clients, finetune_epochs
        self._storage_device = storage_device or clients.device
        self._idle_workers = [
            algorithm.bind(algorithm.net.copy_for_thread(), algorithm.federation) for _ in range(threads)
        ]
        self._personal_cache: dict[int, PersonalizedState] = {}
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    @override
    def run(self, task: ClientTask) -> Iterator[Outcome]:
        if task.phase != "begin":
            personal_states = self._personal_cache.items()
            self._personal_cache = {client: state for client, state in personal_states if state.round == task.round}
        # The largest clients begin first, so that no core waits long. Outcomes have the order of ids.
        by_size = sorted(task.ids, key=lambda client: -int(self._clients.sizes[client]))
        futures = {client: self._pool.submit(self._run_client, task, client) for client in by_size}
        return (futures.pop(client).result() for client in task.ids)

    def _run_client(self, task: ClientTask, client: int) -> Outcome:
        worker = self._idle_workers.pop()
        algorithm = worker.bind_round(task.round, self._clients.seed)
        try:
            with torch.no_grad(), explain_user_errors(algorithm):
                return self._run_client_phase(algorithm, task, client)
        finally:
            self._idle_workers.append(worker)

    def _run_client_phase(self, algorithm: Algorithm, task: ClientTask, client: int) -> Outcome:
        clients, device = task.select_round_samples(self._clients), self._clients.device
        common, client_parts = contract.validate_download(algorithm, task.send([client]))
        received_state = move_state(common | unstack_client(client_parts, 0), device)
        kept_state = task.get_kept_state(client)
        info = clients.get_client_info(client, task.round, kept_state[FIRST])
        state = optimize_layout(
            make_client_start_state(algorithm, move_state(kept_state, device), received_state, info)
        )
        client_run, start_time = ClientRun(algorithm, clients, task.round, client), time.perf_counter()
        passes, earlier_seconds = get_passes(algorithm, task.phase, self._finetune_epochs), 0.0
        if personal_passes := get_personal_passes(algorithm, task.phase):
            state, earlier_seconds = self._run_personal_passes(
                client_run, personal_passes, state, client in task.ids_to_cache
            )
        for pass_ in passes[len(personal_passes) :]:
            state = client_run.run_pass(pass_, state)
        seconds = earlier_seconds + measure_seconds_since(start_time, device)
        scores = {test: self._score_test_set(client_run, task, state, test) for test in task.tests}
        down = count_bytes(algorithm.traffic(received_state))
        if task.phase != "train":
            return Outcome(client, down, 0, {}, {}, scores)
        upload, next_kept_state = (
            move_state(make_contiguous(make_state(algorithm, state)), self._storage_device)
            for make_state in (make_client_upload, make_kept_client_state)
        )
        up = count_bytes(algorithm.traffic(upload))
        return Outcome(client, down, up, upload, next_kept_state, scores, seconds)

    def _run_personal_passes(
        self, client_run: ClientRun, passes: Sequence[Pass], initial_state: State, needs_cache: bool
    ) -> tuple[State, float]:
        """Run the personal passes. Return the state, and their seconds if an earlier phase ran them."""
        client, round = client_run.client, client_run.round
        personalized_state, earlier_seconds = self._personal_cache.pop(client, None), 0.0
        if personalized_state is not None and personalized_state.is_reusable(client_run, initial_state):
            client_run.epochs, earlier_seconds = personalized_state.epochs.copy(), personalized_state.seconds
        else:
            start_time, state = time.perf_counter(), initial_state
            for pass_ in passes:
                state = optimize_layout(client_run.run_pass(pass_, state))
            seconds = measure_seconds_since(start_time, self._clients.device)
            personalized_state = PersonalizedState(
                round, initial_state, state, client_run.epochs.copy(), seconds, client_run.clients
            )
        size = count_bytes([personalized_state.initial_state, personalized_state.state])
        if needs_cache and (len(self._personal_cache) + 1) * size <= PERSONAL_CACHE_BYTES:
            self._personal_cache[client] = personalized_state
        return personalized_state.state, earlier_seconds

    def _score_test_set(self, client_run: ClientRun, task: ClientTask, state: State, test: TestSet) -> Score:
        return client_run.score(task.phase, state, test, task.metrics)

    @override
    def compute_logits(self, model: Tensors, indices: Integers, round_number: int) -> Tensor:
        def compute_chunk(chunk_number: int, chunk: Integers) -> Tensor:
            worker = self._idle_workers.pop()
            try:
                with torch.no_grad():
                    return worker.net(
                        weights,
                        to_channels_last(self._clients.gather_server_test_inputs(chunk, round_number, chunk_number)),
                    )
            finally:
                self._idle_workers.append(worker)

        weights = optimize_layout(model.map(lambda value: value.to(self._clients.device)))
        chunks = np.array_split(indices, max(1, math.ceil(len(indices) / MEASURE_BATCH)))
        return torch.cat(list(self._pool.map(compute_chunk, range(len(chunks)), chunks)))


class ClientRun:
    """The passes of one client in a round, with a bound algorithm of this thread."""

    def __init__(self, algorithm: Algorithm, clients: FederatedData, round_number: int, client: int) -> None:
        self.algorithm, self.clients, self.round, self.client = algorithm, clients, round_number, client
        self.epochs: dict[str, int] = {}  #: epochs of each stream so far
        self._local_steps = count_client_steps(algorithm, clients, client, round_number)

    def run_pass(self, pass_: Pass, state: State) -> State:
        """Run a pass and return the client's state."""
        match pass_:
            case Train():
                return self._run_train_pass(pass_, state)
            case Measure():
                return self._run_measure_pass(pass_, state)
            case Update():
                return contract.call_pass_function(self.algorithm, pass_.then, state)

    def _run_train_pass(self, training: Train, state: State) -> State:
        clients, client = self.clients, self.client
        epochs, steps = take_next_epochs_and_steps(self.algorithm, training, self.epochs, self._local_steps)
        client_pass = ClientPass(self.algorithm, training, state, _compute_gradient_and_loss, can_overwrite=True)
        state = client_pass.add_optimizer_state(state)
        size = clients.resolve_batch_size(self.algorithm.federation.batch_size) * training.batches
        has_noise = needs_noise_key(self.algorithm, training, clients.transforms)
        for epoch in epochs:
            if not bool(client_pass.needs_another_epoch(state)):
                break
            random_context = self.round, training.stream, epoch
            order = clients.shuffle_indices(client, *random_context, training.share)
            key = clients.get_noise_key(client, *random_context) if has_noise else None
            for batch in itertools.islice(self._make_batches(order, size, key), training.steps):
                if steps is not None:
                    if not steps:
                        return state
                    steps -= 1
                state = client_pass.take_step(state, batch)
            state = client_pass.finish_epoch(state)
        return state

    def list_step_samples(self, training: Train) -> list[Integers]:
        """List the samples of each step of a pass, if all its epochs run."""
        epochs, max_steps = take_next_epochs_and_steps(self.algorithm, training, self.epochs, self._local_steps)
        size = self.clients.resolve_batch_size(self.algorithm.federation.batch_size) * training.batches
        steps = []
        for epoch in epochs:
            order = self.clients.shuffle_indices(self.client, self.round, training.stream, epoch, training.share)
            steps += [order[first : first + size] for first in range(0, len(order), size)][: training.steps]
        return steps[:max_steps]

    def _run_measure_pass(self, measuring: Measure, state: State) -> State:
        clients, client, sums = self.clients, self.client, dict[str, Tensor]()
        indices = (clients.train if measuring.on == "train" else clients.validation_or_train)[client]
        key = clients.get_noise_key(client, self.round, "measure", 0) if measuring.is_augmented else None
        with activate_eval_mode(self.algorithm, state):
            for batch in self._make_batches(indices, MEASURE_BATCH, key):
                terms = contract.compute_measure_pass_sums(self.algorithm, measuring, state, batch)
                sums = {name: sums[name] + term if sums else term for name, term in terms.items()}
            return contract.call_pass_function(self.algorithm, measuring.then, state, sums)

    def score(self, phase: Phase, state: State, test: TestSet, metrics: Sequence[Metric] = ()) -> Score:
        """Score the client's model on a test set."""
        clients, loss = self.clients, 0.0
        indices = clients.get_evaluation_indices(self.client, test)
        key = clients.get_evaluation_noise_key(self.client, self.round, test)
        classes = torch.zeros(3, clients.classes, dtype=torch.long, device=clients.device)
        all_logits = [torch.empty(0, clients.classes, device=clients.device)]
        with activate_eval_mode(self.algorithm, state):
            for batch in self._make_batches(indices, MEASURE_BATCH, key):
                logits = compute_client_logits(self.algorithm, phase, state, batch.x, clients.classes)
                classes = classes + count_predictions_by_class(logits, batch)
                loss += float(F.cross_entropy(logits, batch.y, reduction="sum"))
                all_logits += [logits] if metrics else []
        labels = clients.get_labels(indices)
        return Score.from_counts(classes, loss, **compute_probability_metrics(metrics, torch.cat(all_logits), labels))

    def _make_batches(self, indices: Integers, size: int, key: int | None = None) -> Iterator[Batch]:
        """Make batches in the order of ``indices``. With a noise key they are transformed."""
        x, y = self.clients.gather_samples(indices)
        for number, first in enumerate(range(0, len(indices), size)):
            inputs, noise = x[first : first + size], None
            if key is not None:
                noise = torch.tensor(key + number, device=x.device)
                inputs = transform_images(self.clients.transforms, inputs, noise)
            yield Batch(to_channels_last(inputs), y[first : first + size], None, noise)


def _compute_gradient_and_loss(compute_loss: LossFunction, parameters: Tensors) -> GradientAndLoss:
    """Compute gradient, loss and statistics (:class:`~fedpipe.engine.clients.executor.ClientPass`)."""
    leaves = parameters.map(lambda value: value.detach().requires_grad_())
    with torch.enable_grad():
        loss, statistics = compute_loss(leaves)
    # Each gradient needs its own memory, because steps write there. PyTorch may give two leaves views of one gradient.
    torch.autograd.backward(loss, inputs=list(leaves.values()))
    gradient, seen_storages = Tensors(), set[int]()
    for name, leaf in leaves.items():
        leaf_gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        memory = leaf_gradient.untyped_storage().data_ptr()
        gradient[name] = leaf_gradient.clone() if memory in seen_storages else leaf_gradient
        seen_storages.add(memory)
    return gradient, (loss.detach(), statistics)
