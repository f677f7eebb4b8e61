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

from fedpipe.algorithms.base import Algorithm, Batch, Measure, Pass, State, Train, Update
from fedpipe.engine import contract
from fedpipe.engine.clients import Clients, Integers
from fedpipe.engine.executor import (
    MEASURE_BATCH,
    Outcome,
    Phase,
    Score,
    Test,
    class_counts,
    descend,
    eval_mode,
    gradient_of,
    keep,
    noisy,
    passes,
    personal_passes,
    readout,
    seconds_since,
    span,
    start_client,
    train_mode,
    trained_names,
    upload,
    with_batch_stats,
    with_optimizer_state,
)
from fedpipe.engine.layout import channels_last, fast
from fedpipe.engine.memory import keep_pages
from fedpipe.engine.transforms import changed
from fedpipe.engine.trees import contiguous, move, size_in_bytes, unstack
from fedpipe.tensors import Tensors

HELD_BYTES = 2**30  #: of personal models that are held until their clients train


class Personal(NamedTuple):
    """A client after its personal passes, and what they began with."""

    round: int
    began: State
    state: State
    epochs: dict[str, int]  #: how far each stream has come
    seconds: float

    def follows(self, round: int, state: State) -> bool:
        """Whether they would make the same of this state, since it is the same bit for bit."""
        return self.round == round and _same(self.began, state)


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
    rests
        Where outcomes lie; by default on the device that trains.
    """

    name = "loop"

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        threads: int = 1,
        finetune_epochs: int = 1,
        rests: torch.device | None = None,
    ) -> None:
        torch.set_num_threads(1)
        keep_pages()
        self._clients, self._finetune_epochs, self._rests = clients, finetune_epochs, rests or clients.device
        self._idle = [algorithm.bind(algorithm.net.replica(), algorithm.federation) for _ in range(threads)]
        self._held: dict[int, Personal] = {}
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def run(
        self,
        phase: Phase,
        round: int,
        ids: Sequence[int],
        kept: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test] = (),
        among: Sequence[int] | None = None,
        again: Collection[int] = (),
    ) -> Iterator[Outcome]:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        wanted = set(again)
        if phase != "begin":
            self._held = {client: held for client, held in self._held.items() if held.round == round}

        def one(client: int) -> Outcome:
            idle = self._idle.pop()
            algorithm = idle.in_round(round)
            try:
                with torch.no_grad(), contract.told(algorithm):
                    common, own = contract.sent(algorithm, send([client]))
                    received = move(common | unstack(own, 0), self._clients.device)
                    hold = client in wanted
                    return self._client(algorithm, phase, round, client, kept(client), received, tests, hold)
            finally:
                self._idle.append(idle)

        # The largest clients begin first, so that no core waits long for the last; outcomes keep the order of ids.
        begun = {client: self._pool.submit(one, client) for client in sorted(ids, key=self._size)}
        return (begun.pop(client).result() for client in ids)

    def stacks(self, among: Sequence[int]) -> list[dict[str, Any]]:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        return []

    def _size(self, client: int) -> int:
        return -int(self._clients.sizes[client])

    def _client(
        self,
        algorithm: Algorithm,
        phase: Phase,
        round: int,
        client: int,
        kept: State,
        received: State,
        tests: Sequence[Test],
        hold: bool,
    ) -> Outcome:
        clients = self._clients
        state = fast(start_client(algorithm, move(kept, clients.device), received, clients.facts(client, round)))
        begin, before = time.perf_counter(), 0.0
        due, epochs = passes(algorithm, phase, self._finetune_epochs), dict[str, int]()
        if personal := personal_passes(algorithm) if phase != "begin" else []:
            state, epochs, before = self._personal(algorithm, personal, state, round, client, hold)
        for pass_ in due[len(personal) :]:
            state = self._pass(algorithm, pass_, state, round, client, epochs)
        seconds = before + seconds_since(begin, clients.device)
        scores = {test: self._score(algorithm, phase, state, round, client, test) for test in tests}
        down = size_in_bytes(algorithm.traffic(received))
        if phase != "train":
            return Outcome(client, down, 0, {}, {}, scores)
        sent, stays = (move(contiguous(part(algorithm, state)), self._rests) for part in (upload, keep))
        return Outcome(client, down, size_in_bytes(algorithm.traffic(sent)), sent, stays, scores, seconds)

    def _personal(
        self, algorithm: Algorithm, personal: list[Pass], began: State, round: int, client: int, hold: bool
    ) -> tuple[State, dict[str, int], float]:
        """The client's state after its personal passes, made once for all that begins with them.

        With it, the epochs of each stream so far, and the seconds that the passes took if they were made before.
        """
        held, before = self._held.pop(client, None), 0.0
        if held is not None and held.follows(round, began):
            before = held.seconds
        else:
            begin, state, epochs = time.perf_counter(), began, dict[str, int]()
            for pass_ in personal:
                state = fast(self._pass(algorithm, pass_, state, round, client, epochs))
            held = Personal(round, began, state, epochs, seconds_since(begin, self._clients.device))
        if hold and (len(self._held) + 1) * size_in_bytes([held.began, held.state]) <= HELD_BYTES:
            self._held[client] = held
        return held.state, held.epochs.copy(), before

    def _pass(
        self, algorithm: Algorithm, pass_: Pass, state: State, round: int, client: int, epochs: dict[str, int]
    ) -> State:
        match pass_:
            case Train():
                first = epochs.get(pass_.stream, 0)
                count, steps = span(algorithm, pass_)
                epochs[pass_.stream] = first + count
                return self._train(algorithm, pass_, state, round, client, range(first, first + count), steps)
            case Measure():
                sums: dict[str, Tensor] = {}
                indices = (self._clients.train if pass_.on == "train" else self._clients.validation)[client]
                key = self._clients.key(client, round, "measure", 0) if pass_.changed else None
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
        names, state = trained_names(algorithm, training, state), with_optimizer_state(algorithm, training, state)
        size = self._clients.batch(algorithm.federation.batch_size) * training.batches
        for epoch in epochs:
            if training.when is not None and not bool(training.when(state)):
                break
            order = self._clients.order(client, round, training.stream, epoch, training.share)
            key = None
            if noisy(algorithm, training, self._clients.transforms):
                key = self._clients.key(client, round, training.stream, epoch)
            for batch in itertools.islice(self._batches(order, size, key), training.steps):
                if steps is not None:
                    if not steps:
                        return state
                    steps -= 1
                gradient = _Gradient(algorithm, training, names, batch)
                if training.step is not None:
                    state = training.step(state, batch, gradient)
                else:
                    state = descend(algorithm, training, state, gradient(state)[0], donated=True)
                if gradient.recorded:
                    state = with_batch_stats(training, state, gradient.recorded)
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
                inputs = changed(self._clients.transforms, inputs, noise)
            yield Batch(channels_last(inputs), y[first : first + size], None, noise)

    def _score(self, algorithm: Algorithm, phase: Phase, state: State, round: int, client: int, test: Test) -> Score:
        indices, key = self._clients.measured(client, test), self._clients.measuring_key(client, round, test)
        classes, loss = torch.zeros(3, self._clients.classes, dtype=torch.long, device=self._clients.device), 0.0
        with eval_mode(algorithm, state):
            for batch in self._batches(indices, MEASURE_BATCH, key):
                logits = readout(algorithm, phase)(state, batch.x)
                classes = classes + class_counts(logits, batch)
                loss += float(F.cross_entropy(logits, batch.y, reduction="sum"))
        return Score.of(classes, loss)

    def logits(self, model: Tensors, indices: Integers, round: int) -> Tensor:
        """See :class:`~fedpipe.engine.executor.Executor`; the samples are spread over the threads."""

        def part(number: int, rows: Integers) -> Tensor:
            algorithm = self._idle.pop()
            try:
                with torch.no_grad():
                    return algorithm.net(weights, channels_last(self._clients.tested(rows, round, number)))
            finally:
                self._idle.append(algorithm)

        weights = fast(model.map(lambda value: value.to(self._clients.device)))
        parts = np.array_split(indices, max(1, math.ceil(len(indices) / MEASURE_BATCH)))
        return torch.cat(list(self._pool.map(part, range(len(parts)), parts)))


class _Gradient:
    """Gradient of a pass's loss on one batch; see :class:`~fedpipe.algorithms.base.Gradient`."""

    def __init__(self, algorithm: Algorithm, training: Train, names: tuple[str, ...], batch: Batch) -> None:
        self._algorithm, self._training, self._names, self._batch = algorithm, training, names, batch
        self.recorded: dict[str, Tensor] = {}

    def __call__(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        batch, group = batch or self._batch, client[self._training.group]
        leaves = Tensors((name, group[name].detach().requires_grad_()) for name in self._names)
        with torch.enable_grad(), train_mode(self._algorithm, self._training, client, batch) as self.recorded:
            value = self._training.loss(client | {self._training.group: group | leaves}, batch)
        contract.loss(self._algorithm, self._training, value)
        # Laid out as the leaves are, and each in memory of its own, since steps write there: PyTorch may give
        # views of one gradient to two of them.
        torch.autograd.backward(value, inputs=list(leaves.values()))
        gradient, taken = Tensors(), set[int]()
        for name, leaf in leaves.items():
            found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            memory = found.untyped_storage().data_ptr()
            gradient[name] = found.clone() if memory in taken else found
            taken.add(memory)
        return gradient_of(self._training, client, gradient, donated=True), value.detach()

    def descend(self, client: State, gradient: Tensors) -> State:
        return descend(self._algorithm, self._training, client, gradient)


def _same(one: State, other: State) -> bool:
    """Whether two states hold the same bits."""
    if one.keys() != other.keys():
        return False
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)
