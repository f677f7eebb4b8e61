"""The stack executor: many clients in one call, their tensors along a leading axis that stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm, Batch, Gradient, Measure, Pass, State, Train, Update
from fedpipe.engine.clients import Clients, Integers
from fedpipe.engine.executor import (
    MEASURE_BATCH,
    Outcome,
    Score,
    Stage,
    Test,
    canonical,
    move,
    passes,
    size_in_bytes,
    slots_of,
    stack,
    unstack,
)
from fedpipe.engine.optimisers import optimiser
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
        Epochs of the stage ``finetune``.
    """

    def __init__(self, algorithm: Algorithm, clients: Clients, width: int, finetune_epochs: int = 1) -> None:
        self.name = f"stack of {width}"
        torch.set_num_threads(1)  # on a CPU: sums over several threads are in another order
        self._algorithm, self._clients, self._width = algorithm, clients, width
        self._finetune_epochs = finetune_epochs

    def run(
        self,
        stage: Stage,
        round: int,
        ids: Sequence[int],
        kept: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test] = (),
    ) -> Iterator[Outcome]:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        for first in range(0, len(ids), self._width):
            members = list(ids[first : first + self._width])
            padded = members + members[-1:] * (self._width - len(members))
            with torch.no_grad():
                yield from self._stack(stage, round, members, padded, kept, send, tests)

    def _stack(
        self,
        stage: Stage,
        round: int,
        members: list[int],
        padded: list[int],
        kept: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test],
    ) -> Iterator[Outcome]:
        algorithm, device = self._algorithm, self._clients.device
        common, own = send(padded)
        received = move(common | own, device)
        axes = dict.fromkeys(common) | dict.fromkeys(own, 0)
        resident = move(stack([kept(client) for client in padded]), device)
        facts = self._clients.facts(padded, round)
        state: State = vmap(algorithm.start, in_dims=(0, axes, 0))(resident, received, facts)
        work = _Work(algorithm, self._clients, round, padded, len(members))
        for each in passes(algorithm, stage, self._finetune_epochs):
            state = work.run(each, state)
        scores = {test: work.scores(state, test) for test in tests}
        down = size_in_bytes(common) + size_in_bytes(own) // len(padded)
        upload, keep = {}, {}
        if stage == "train":
            upload, keep = canonical(vmap(algorithm.upload)(state)), canonical(vmap(algorithm.keep)(state))
        for row, client in enumerate(members):
            mine = {test: rows[row] for test, rows in scores.items()}
            yield Outcome(client, down, unstack(upload, row), unstack(keep, row), mine)

    def logits(self, model: Tensors, indices: Integers) -> Tensor:
        """Logits of one model on many samples, shape (n, C)."""
        model = model.map(lambda value: value.to(self._clients.device))
        parts = np.array_split(indices, max(1, -(-len(indices) // MEASURE_BATCH)))
        with torch.no_grad():
            return torch.cat([self._algorithm.net(model, self._clients.gather(rows)[0]) for rows in parts])


class _Work:
    """The passes of one stack in one round."""

    def __init__(self, algorithm: Algorithm, clients: Clients, round: int, padded: list[int], members: int) -> None:
        self._algorithm, self._clients, self._round, self._ids = algorithm, clients, round, padded
        self._present = np.arange(len(padded)) < members
        self._epochs: dict[str, int] = {}

    def run(self, each: Pass, state: State) -> State:
        """The stack's state after a pass."""
        match each:
            case Train():
                return self._train(each, state)
            case Measure():
                return self._measure(each, state)
            case Update():
                return vmap(each.then)(state)

    def _train(self, each: Train, state: State) -> State:
        federation = self._algorithm.federation
        first = self._epochs.get(each.stream, 0)
        count = federation.local_epochs if each.epochs is None else each.epochs
        self._epochs[each.stream] = first + count
        rule, slots = optimiser(federation), slots_of(each.stream)
        names = each.only or tuple(state[each.group])
        if each.step is None and slots not in state:
            state = state | {slots: vmap(rule.init)(state[each.group].only(names))}

        def step(client: State, x: Tensor, y: Tensor, mask: Tensor) -> State:
            batch = Batch(x, y, mask)
            gradient = _gradient(each, names, batch)
            if each.step is not None:
                return each.step(client, batch, gradient)
            parameters, moved = rule.update(client[each.group].only(names), gradient(client)[0], client[slots])
            return client | {each.group: client[each.group] | parameters, slots: moved}

        active = torch.as_tensor(self._present, device=self._clients.device)
        for epoch in range(first, first + count):
            if each.when is not None:
                active = active & vmap(each.when)(state)
                if not bool(active.any()):
                    break
            orders = [self._clients.order(i, self._round, each.stream, epoch, each.share) for i in self._ids]
            sizes = np.array([len(order) for order in orders]) * self._present
            for begin, (x, y, mask) in self._batches(orders, federation.batch_size):
                here = sizes > begin
                everyone = each.when is None and bool(here.all())
                live = None if everyone else active & torch.as_tensor(here, device=active.device)
                state = _advance(step, state, live, x, y, mask)
            if each.after is not None:
                state = _advance(each.after, state, active)
        return state

    def _measure(self, each: Measure, state: State) -> State:
        totals: dict[str, Tensor] = {}
        orders = [self._clients.train[client] for client in self._ids]
        for _, (x, y, mask) in self._batches(orders, MEASURE_BATCH):
            terms = vmap(lambda client, *batch: each.each(client, Batch(*batch)))(state, x, y, mask)
            totals = {name: totals[name] + term if totals else term for name, term in terms.items()}
        return vmap(each.then)(state, totals)

    def scores(self, state: State, test: Test) -> list[Score]:
        """Every client of the stack on its own or on the global test set."""
        if test == "local":
            orders = [self._clients.test[client] for client in self._ids]
        else:
            orders = [self._clients.global_test] * len(self._ids)
        right = torch.zeros(len(orders), dtype=torch.int64, device=self._clients.device)
        loss = torch.zeros(len(orders), dtype=torch.float64, device=self._clients.device)

        def score(client: State, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            batch, logits = Batch(x, y, mask), self._algorithm.predict(client, x)
            return batch.sum((logits.argmax(-1) == y).to(mask.dtype)), batch.sum(
                F.cross_entropy(logits, y, reduction="none")
            )

        for _, batch in self._batches(orders, MEASURE_BATCH):
            hits, losses = vmap(score)(state, *batch)
            right += hits.long()
            loss += losses
        return [
            Score(int(hit), len(order), float(value))
            for hit, order, value in zip(right.tolist(), orders, loss.tolist(), strict=True)
        ]

    def _batches(self, orders: list[Integers], size: int) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor]]]:
        """Batches of all clients at once, each of ``size`` samples, padded; and where in the order they begin."""
        longest = max(len(order) for order in orders)
        width = -(-longest // size) * size
        rows = np.zeros((len(orders), width), np.int64)
        mask = np.zeros((len(orders), width), bool)
        for row, order in enumerate(orders):
            rows[row, : len(order)], mask[row, : len(order)] = order, True
        index = torch.as_tensor(rows, device=self._clients.device)
        weight = torch.as_tensor(mask, device=self._clients.device).to(self._clients.dtype)
        for begin in range(0, longest, size):
            x, y = self._clients.gather(index[:, begin : begin + size])
            yield begin, (x, y, weight[:, begin : begin + size])


def _gradient(each: Train, names: tuple[str, ...], batch: Batch) -> Gradient:
    def gradient(client: State) -> tuple[Tensors, Tensor]:
        group = client[each.group]

        def value(parameters: Tensors) -> Tensor:
            return each.loss(client | {each.group: group | parameters}, batch)

        found: tuple[Tensors, Tensor] = grad_and_value(value)(group.only(names))
        return found

    return gradient


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
