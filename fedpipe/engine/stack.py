"""The stack executor: many clients in one call, their tensors along a leading axis that stays on the device."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap
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
    descend,
    eval_mode,
    keep,
    noisy,
    passes,
    readout,
    seconds_since,
    start_client,
    train_mode,
    trained_names,
    upload,
    with_batch_stats,
    with_optimizer_state,
)
from fedpipe.engine.transforms import changed
from fedpipe.engine.trees import move, size_in_bytes, stack, to_host, unstack
from fedpipe.tensors import Tensors

Flags = Tensor  #: one truth value a client, shape (width,)


class Stack:
    """Trains ``width`` clients at a time; a short stack is padded, so that a client's bits never depend on its mates.

    Clients with fewer batches stand still while the others go on; samples that pad a batch have no weight.

    Parameters
    ----------
    algorithm
        Bound to its network.
    clients
        Their samples.
    width
        Clients in a stack; device memory grows with it, not with the number of clients.
    finetune_epochs
        Epochs of the phase ``finetune``.
    """

    def __init__(self, algorithm: Algorithm, clients: Clients, width: int, finetune_epochs: int = 1) -> None:
        self.name = f"stack of {width}"
        torch.set_num_threads(1)  # on a CPU: sums over several threads are in another order
        self._algorithm, self._clients, self._width = algorithm, clients, width
        self._finetune_epochs = finetune_epochs

    def run(
        self,
        phase: Phase,
        round: int,
        ids: Sequence[int],
        kept: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test] = (),
        again: Collection[int] = (),
    ) -> Iterator[Outcome]:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        for first in range(0, len(ids), self._width):
            members = list(ids[first : first + self._width])
            padded = members + members[-1:] * (self._width - len(members))
            with torch.no_grad(), contract.told(self._algorithm):
                outcomes = self._stack(phase, round, members, padded, kept, send, tests)
            yield from outcomes

    def _stack(
        self,
        phase: Phase,
        round: int,
        members: list[int],
        padded: list[int],
        kept: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test],
    ) -> list[Outcome]:
        algorithm, device = self._algorithm, self._clients.device
        common, own = contract.sent(algorithm, send(padded))
        received = move(common | own, device)
        axes = dict.fromkeys(common) | dict.fromkeys(own, 0)
        resident = move(stack([kept(client) for client in padded]), device)
        facts = self._clients.facts(padded, round)
        state: State = vmap(functools.partial(start_client, algorithm), in_dims=(0, axes, 0))(resident, received, facts)
        work = _Work(algorithm, self._clients, round, padded, len(members))
        begin = time.perf_counter()
        for pass_ in passes(algorithm, phase, self._finetune_epochs):
            state = work.run(pass_, state)
        seconds = seconds_since(begin, device) / len(members)
        scores = {test: work.scores(state, phase, test) for test in tests}
        uploads, kept_on = {}, {}
        if phase == "train":
            uploads = to_host(vmap(functools.partial(upload, algorithm))(state))
            kept_on = to_host(vmap(functools.partial(keep, algorithm))(state))
        outcomes = []
        for row, client in enumerate(members):
            mine = {test: rows[row] for test, rows in scores.items()}
            down = size_in_bytes(algorithm.traffic(common | unstack(own, row)))
            sent = unstack(uploads, row)
            up = size_in_bytes(algorithm.traffic(sent)) if sent else 0
            outcomes.append(Outcome(client, down, up, sent, unstack(kept_on, row), mine, seconds))
        return outcomes

    def logits(self, model: Tensors, indices: Integers, round: int) -> Tensor:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        model = model.map(lambda value: value.to(self._clients.device))
        parts = np.array_split(indices, max(1, -(-len(indices) // MEASURE_BATCH)))
        with torch.no_grad():
            batches = (self._clients.tested(rows, round, number) for number, rows in enumerate(parts))
            return torch.cat([self._algorithm.net(model, x) for x in batches])


class _Work:
    """The passes of one stack in one round."""

    def __init__(self, algorithm: Algorithm, clients: Clients, round: int, padded: list[int], members: int) -> None:
        self._algorithm, self._clients, self._round, self._ids = algorithm, clients, round, padded
        self._present = np.arange(len(padded)) < members
        self._epochs: dict[str, int] = {}

    def run(self, pass_: Pass, state: State) -> State:
        """The stack's state after a pass."""
        match pass_:
            case Train():
                return self._train(pass_, state)
            case Measure():
                return self._measure(pass_, state)
            case Update():
                return vmap(pass_.then)(state)

    def _train(self, training: Train, state: State) -> State:
        algorithm, federation = self._algorithm, self._algorithm.federation
        first = self._epochs.get(training.stream, 0)
        count = federation.local_epochs if training.epochs is None else training.epochs
        self._epochs[training.stream] = first + count
        names = trained_names(algorithm, training, state)
        size = self._clients.batch(federation.batch_size) * training.batches
        state = vmap(functools.partial(with_optimizer_state, algorithm, training))(state)

        def step(client: State, *batch: Tensor) -> State:
            gradient = _Gradient(algorithm, training, names, Batch(*batch))
            if training.step is not None:
                client = training.step(client, gradient.batch, gradient)
            else:
                client = gradient.descend(client, gradient(client)[0])
            return with_batch_stats(training, client, gradient.recorded) if gradient.recorded else client

        active = torch.as_tensor(self._present, device=self._clients.device)
        for epoch in range(first, first + count):
            if training.when is not None:
                active = active & vmap(training.when)(state)
                if not bool(active.any()):
                    break
            orders = [self._clients.order(i, self._round, training.stream, epoch, training.share) for i in self._ids]
            keys = None
            if noisy(algorithm, training, self._clients.transforms):
                keys = [self._clients.key(i, self._round, training.stream, epoch) for i in self._ids]
            sizes = np.array([len(order) for order in orders]) * self._present
            for start, batch in itertools.islice(self._batches(orders, size, keys), training.steps):
                here = sizes > start
                everyone = training.when is None and bool(here.all())
                live = None if everyone else active & torch.as_tensor(here, device=active.device)
                state = _advance(step, state, live, *batch)
            if training.after is not None:
                state = _advance(training.after, state, active)
        return state

    def _measure(self, measuring: Measure, state: State) -> State:
        totals: dict[str, Tensor] = {}
        samples = self._clients.train if measuring.on == "train" else self._clients.validation

        def measure(client: State, *batch: Tensor) -> dict[str, Tensor]:
            with eval_mode(self._algorithm, client, mask=batch[2]):
                return measuring.sums(client, Batch(*batch))

        def follow(client: State, sums: dict[str, Tensor]) -> State:
            with eval_mode(self._algorithm, client):
                return measuring.then(client, sums)

        orders = [samples[client] for client in self._ids]
        keys = [self._clients.key(i, self._round, "measure", 0) for i in self._ids] if measuring.changed else None
        for _, batch in self._batches(orders, MEASURE_BATCH, keys):
            terms = vmap(measure)(state, *batch)
            totals = {name: totals[name] + term if totals else term for name, term in terms.items()}
        return vmap(follow)(state, totals)

    def scores(self, state: State, phase: Phase, test: Test) -> list[Score]:
        """Every client of the stack on a test set."""
        orders = [self._clients.measured(client, test) for client in self._ids]
        right = torch.zeros(len(orders), dtype=torch.int64, device=self._clients.device)
        loss = torch.zeros(len(orders), dtype=torch.float64, device=self._clients.device)
        noise = [self._clients.measuring_key(client, self._round, test) for client in self._ids]
        keys = [key for key in noise if key is not None] or None  # of all of them, or of none

        def score(client: State, *samples: Tensor) -> tuple[Tensor, Tensor]:
            batch = Batch(*samples)
            with eval_mode(self._algorithm, client, batch.mask):
                logits = readout(self._algorithm, phase)(client, batch.x)
            hits, losses = (logits.argmax(-1) == batch.y), F.cross_entropy(logits, batch.y, reduction="none")
            losses = torch.where(samples[2] > 0, losses, 0)  # infinity times a mask of 0 would be NaN
            return batch.sum(hits.to(logits.dtype)), batch.sum(losses)

        for _, batch in self._batches(orders, MEASURE_BATCH, keys):
            hits, losses = vmap(score)(state, *batch)
            right += hits.long()
            loss += losses
        return [
            Score(int(hit), len(order), float(value))
            for hit, order, value in zip(right.tolist(), orders, loss.tolist(), strict=True)
        ]

    def _batches(
        self, orders: list[Integers], size: int, keys: list[int] | None = None
    ) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Batches of all clients at once, each of ``size`` samples, padded; and where in the order they begin.

        With keys, which seed each client's noise, they are transformed.
        """
        longest = max(len(order) for order in orders)
        width = -(-longest // size) * size
        rows = np.zeros((len(orders), width), np.int64)
        there = np.zeros((len(orders), width), bool)
        for row, order in enumerate(orders):
            rows[row, : len(order)], there[row, : len(order)] = order, True
        device, change = self._clients.device, functools.partial(changed, self._clients.transforms)
        index = torch.as_tensor(rows, device=device)
        weight = torch.as_tensor(there, device=device).to(self._clients.dtype)
        for number, start in enumerate(range(0, longest, size)):
            x, y = self._clients.gather(index[:, start : start + size])
            mask = weight[:, start : start + size]
            if keys is None:
                yield start, (x, y, mask)
            else:
                noise = torch.tensor([key + number for key in keys], device=device)
                yield start, (vmap(change)(x, noise), y, mask, noise)


class _Gradient:
    """Gradient of a pass's loss for one client of a stack; see :class:`~fedpipe.algorithms.base.Gradient`."""

    def __init__(self, algorithm: Algorithm, training: Train, names: tuple[str, ...], batch: Batch) -> None:
        self._algorithm, self._training, self._names, self.batch = algorithm, training, names, batch
        self.recorded: dict[str, Tensor] = {}

    def __call__(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        batch, group = batch or self.batch, client[self._training.group]

        def value(parameters: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
            with train_mode(self._algorithm, self._training, client, batch) as statistics:
                return self._training.loss(client | {self._training.group: group | parameters}, batch), statistics

        found, (loss, self.recorded) = grad_and_value(value, has_aux=True)(group.only(self._names))
        return found, loss

    def descend(self, client: State, gradient: Tensors) -> State:
        return descend(self._algorithm, self._training, client, gradient)


def _advance(step: Callable[..., State], state: State, live: Flags | None, *batch: Tensor) -> State:
    """The stack after a step of the clients that are live; None means all of them."""

    def changes(client: State, *args: Tensor) -> dict[str, Any]:
        return {part: value for part, value in step(client, *args).items() if value is not client.get(part)}

    changed: State = vmap(changes)(state, *batch)
    if live is not None:

        def choose(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(live.reshape(-1, *(1,) * (new.dim() - 1)), new, old)

        changed = {part: pytree.tree_map(choose, value, state[part]) for part, value in changed.items()}
    return state | changed
