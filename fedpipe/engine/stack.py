"""The stack executor: many clients in one call, their tensors along a leading axis that stays on the device.

A pass is planned on the host, sent to the device in one transfer, and then runs without reading or copying anything
from the host; only a pass with a condition (`when`) asks for it before each epoch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm, Batch, Measure, Pass, State, Train, Update
from fedpipe.engine import contract, schedule
from fedpipe.engine.capture import Library, Record, Step
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
from fedpipe.engine.schedule import Feed, Leg, Row
from fedpipe.engine.transforms import changed
from fedpipe.engine.trees import contiguous, move, size_in_bytes, stack, unstack
from fedpipe.errors import SettingsError
from fedpipe.tensors import Tensors

Flags = Tensor  #: one truth value a client, shape (width,)
NOTHING: Integers = np.empty(0, np.int64)  #: the samples of a row that another job trains
Terms = Callable[[State, Row], dict[str, Tensor]]  #: of a stack, on the samples of a step


class Stack:
    """Trains up to ``width`` clients at a time, in stacks that follow from the round's participants alone.

    The first rows are the largest clients. As the others end, the stack is cut to the next width of its ladder; those
    that end in between stand still. Samples that pad a batch have no weight. A client's bits never depend on its mates:
    where a job trains some of the participants, the others' rows are empty.

    Parameters
    ----------
    algorithm
        Bound to its network.
    clients
        Their samples.
    width
        Clients in a stack at most; device memory grows with it, not with the number of clients.
    finetune_epochs
        Epochs of the phase ``finetune``.
    record
        How steps are recorded, to be replayed; None: each is run from here.
    rests
        Where outcomes lie; by default on the device that trains.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        width: int,
        finetune_epochs: int = 1,
        record: Record | None = None,
        rests: torch.device | None = None,
    ) -> None:
        self.name = f"stack of {width}"
        torch.set_num_threads(1)  # on a CPU: sums over several threads are in another order
        self._algorithm, self._clients, self._width = algorithm, clients, width
        self._finetune_epochs, self._record, self._library = finetune_epochs, record, record and Library(record)
        self._at_work, self._rests = algorithm, rests or clients.device

    def stacks(self, among: Sequence[int]) -> list[dict[str, Any]]:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        federation = self._algorithm.federation
        batch = self._clients.batch(federation.batch_size)
        return schedule.recorded(self._clients.sizes, among, self._width, batch, federation.local_steps)

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
        self._begin(round)
        found: dict[int, Outcome] = {}
        wanted, everyone = set(ids), range(len(self._clients)) if among is None else among
        for mates in schedule.stacks(self._clients.sizes, everyone, self._width):
            members = [client for client in mates if client in wanted]
            if members:
                with torch.no_grad(), contract.told(self._algorithm), _memory_told(self._width):
                    outcomes = self._stack(phase, round, mates, members, kept, send, tests)
                found |= {outcome.client: outcome for outcome in outcomes}
        return (found.pop(client) for client in ids)

    def _begin(self, round: int) -> None:
        """Have the round's learning rate; recorded steps, which hold the rate that they were made with, begin anew."""
        before, self._at_work = self._at_work.federation, self._algorithm.in_round(round)
        if self._record is not None and self._at_work.federation != before:
            self._library = Library(self._record)

    def _stack(
        self,
        phase: Phase,
        round: int,
        mates: list[int],
        members: list[int],
        kept: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test],
    ) -> list[Outcome]:
        algorithm, device = self._at_work, self._clients.device
        rungs = schedule.ladder(self._width)
        work = Work(algorithm, self._clients, round, mates, members, rungs, self._library)
        common, own = contract.sent(algorithm, send(work.rows))
        axes = dict.fromkeys(common) | dict.fromkeys(own, 0)
        resident = stack([kept(client) for client in work.rows], device)
        facts, start = self._clients.facts(work.rows, round), functools.partial(start_client, algorithm)
        state: State = vmap(start, in_dims=(0, axes, 0))(resident, move(common | own, device), facts)
        begin = time.perf_counter()
        for number, pass_ in enumerate(passes(algorithm, phase, self._finetune_epochs)):
            state = work.run(pass_, state, f"pass {number} of the phase '{phase}'")
        seconds = seconds_since(begin, device) / len(members)
        scores = {test: work.scores(state, phase, test) for test in tests}
        uploads, kept_on = {}, {}
        if phase == "train":
            sent, stays = (vmap(functools.partial(part, algorithm))(state) for part in (upload, keep))
            stop = mates.index(members[-1]) + 1
            uploads, kept_on = (move(contiguous(_cut(part, stop)), self._rests) for part in (sent, stays))
        outcomes = []
        for number, client in enumerate(members):
            row, mine = mates.index(client), {test: rows[number] for test, rows in scores.items()}
            down = size_in_bytes(algorithm.traffic(common | unstack(own, row)))
            sent = unstack(uploads, row)
            up = size_in_bytes(algorithm.traffic(sent)) if sent else 0
            outcomes.append(Outcome(client, down, up, sent, unstack(kept_on, row), mine, seconds))
        return outcomes

    def logits(self, model: Tensors, indices: Integers, round: int) -> Tensor:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        model = model.map(lambda value: value.to(self._clients.device))
        size = MEASURE_BATCH if self._algorithm.net.by_batch else logits_batch(self._clients, self._width)
        parts = np.array_split(indices, max(1, -(-len(indices) // size)))
        with torch.no_grad():
            batches = (self._clients.tested(rows, round, number) for number, rows in enumerate(parts))
            return torch.cat([self._algorithm.net(model, x) for x in batches])


class Work:
    """The passes of one stack in one round.

    Parameters
    ----------
    algorithm, clients, round
        What is done, on whose samples, and when.
    mates
        All participants that belong to the stack, the largest first.
    members
        Those that this job trains, in the same order.
    rungs
        The widths that there are.
    library
        Where recorded steps are kept, if any are.

    Attributes
    ----------
    rows
        The client of each row, which is its place among the mates, whoever of them this job trains: kernels may round
        otherwise in another row. Rows without a member hold the last one's tensors, which nobody reads.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        round: int,
        mates: list[int],
        members: list[int],
        rungs: tuple[int, ...],
        library: Library | None = None,
    ) -> None:
        self._algorithm, self._clients, self._round, self._library = algorithm, clients, round, library
        self._mates, self._members, self._rungs = mates, members, rungs
        width = min(rung for rung in rungs if rung >= len(mates))
        self._of_rows = [client if client in members else None for client in mates]
        self._places = [mates.index(client) for client in members]
        self.rows = [members[-1] if client is None else client for client in self._of_rows]
        self.rows += members[-1:] * (width - len(mates))
        self._epochs: dict[str, int] = {}

    def run(self, pass_: Pass, state: State, name: str = "pass") -> State:
        """The stack's state after a pass, which has the same name in every round."""
        match pass_:
            case Train():
                return self._train(pass_, state, name)
            case Measure():
                return self._measure(pass_, state)
            case Update():
                return vmap(pass_.then)(state)

    def _by_row(self, of: Callable[[int], Any], nothing: Any) -> list[Any]:
        """What each row's client has; ``nothing`` where another job trains it."""
        return [nothing if client is None else of(client) for client in self._of_rows]

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self, training: Train, state: State, name: str) -> State:
        begin = self._epochs.get(training.stream, 0)
        count, steps = span(self._algorithm, training)
        self._epochs[training.stream] = begin + count
        epochs = range(begin, begin + count)
        state = vmap(functools.partial(with_optimizer_state, self._algorithm, training))(state)
        step, legs, active = self.step(training, state), self._legs(training), None
        for part in [[epoch] for epoch in epochs] if training.when is not None else [list(epochs)][:count]:
            if training.when is not None:
                going = vmap(training.when)(state)
                active = going if active is None else active & going
                if not bool(active[self._places].any()):
                    break
            feed = self.feed(training, part) if steps is None else self.feed_of_steps(training, part, steps)
            for begin in range(0, len(feed.samples), legs[-1].stop):
                for leg in legs:
                    plan = feed.leg(begin + leg.first, begin + leg.stop, leg.width)
                    state = self._leg(step, state, plan, active, name)
                if training.after is not None:
                    state = _advance(training.after, state, active)
        return state

    def step(self, training: Train, state: State) -> Step:
        """A pass's step for a stack, of whatever width its state has."""
        algorithm, clients = self._algorithm, self._clients
        names = trained_names(algorithm, training, state)

        def one(client: State, *batch: Tensor) -> State:
            gradient = _Gradient(algorithm, training, names, Batch(*batch))
            if training.step is not None:
                client = training.step(client, gradient.batch, gradient)
            else:
                client = gradient.descend(client, gradient(client)[0])
            return with_batch_stats(training, client, gradient.recorded) if gradient.recorded else client

        return lambda state, row: _advance(one, state, row.live, *_batch(clients, row))

    def feed(self, training: Train, epochs: Sequence[int]) -> Feed:
        """The plan of some epochs, on the device."""
        clients, legs, size = self._clients, self._legs(training), self._size(training)
        noise = noisy(self._algorithm, training, clients.transforms)
        plans = []
        for epoch in epochs:
            order = functools.partial(clients.order, round=self._round, stream=training.stream, epoch=epoch)
            orders = self._by_row(functools.partial(order, share=training.share), NOTHING)
            key = functools.partial(clients.key, round=self._round, stream=training.stream, epoch=epoch)
            keys = self._by_row(key, 0) if noise else None
            plans.append(schedule.table(orders, keys, size, legs[-1].stop, len(self.rows)))
        return Feed.sent(np.concatenate(plans), noise, clients.dtype, clients.device)

    def feed_of_steps(self, training: Train, epochs: Sequence[int], steps: int) -> Feed:
        """The plan of so many steps of each client, whose epochs follow one another as they end."""
        clients, size = self._clients, self._size(training)
        noise = noisy(self._algorithm, training, clients.transforms)
        columns = []
        for client in self._of_rows:
            if client is None:
                columns.append(schedule.table([], [] if noise else None, size, steps, 1))
                continue
            length, column = self._steps(training, client), []
            for epoch in epochs[: -(-steps // length)]:
                where = self._round, training.stream, epoch
                order = clients.order(client, *where, training.share)
                keys = [clients.key(client, *where)] if noise else None
                column.append(schedule.table([order], keys, size, length, 1))
            columns.append(np.concatenate(column)[:steps])
        others = len(self.rows) - len(self._of_rows)
        columns.append(schedule.table([], [] if noise else None, size, steps, others))
        return Feed.sent(np.concatenate(columns, axis=1), noise, clients.dtype, clients.device)

    def _size(self, training: Train) -> int:
        return self._clients.batch(self._algorithm.federation.batch_size) * training.batches

    def _legs(self, training: Train) -> list[Leg]:
        fixed = span(self._algorithm, training)[1]
        return schedule.legs([fixed or self._steps(training, client) for client in self._mates], self._rungs)

    def _steps(self, training: Train, client: int) -> int:
        """Steps of a client in an epoch."""
        drawn = self._clients.drawn(client, training.share)
        return schedule.steps(drawn, self._size(training), training.steps)

    def _leg(self, step: Step, state: State, plan: Feed, active: Flags | None, name: str) -> State:
        """The stack after the steps of a leg; with a condition, of the clients that are active."""
        width = plan.samples.shape[1]
        before, part = _cut(state, width), None
        if self._library is not None and active is None:
            part = self._library.run(name, step, before, plan, plan.masked)
        if part is None:
            part = before
            for number in range(len(plan.samples)):
                row = plan.row(number)
                if active is not None:
                    row = row._replace(live=active[:width] if row.live is None else active[:width] & row.live)
                part = step(part, row)
        return state | {
            name: _joined(value, state[name]) if name in state else value
            for name, value in part.items()
            if value is not before.get(name)
        }

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _measure(self, measuring: Measure, state: State) -> State:
        def follow(client: State, sums: dict[str, Tensor]) -> State:
            with eval_mode(self._algorithm, client):
                return measuring.then(client, sums)

        samples = self._clients.train if measuring.on == "train" else self._clients.validation
        noise = self._by_row(lambda client: self._clients.key(client, self._round, "measure", 0), 0)
        sums = self._sums(self.terms(measuring), state, samples, noise if measuring.changed else None)
        return vmap(follow)(state, sums)

    def terms(self, measuring: Measure) -> Terms:
        """A pass's sums over the samples of a step."""

        def measure(client: State, *batch: Tensor) -> dict[str, Tensor]:
            with eval_mode(self._algorithm, client, mask=batch[2]):
                return measuring.sums(client, Batch(*batch))

        return lambda state, row: vmap(measure)(state, *_batch(self._clients, row))

    def scores(self, state: State, phase: Phase, test: Test) -> list[Score]:
        """Every member on a test set."""
        clients = self._clients
        samples = [clients.measured(client, test) for client in range(len(clients))]
        noise = self._by_row(lambda client: clients.measuring_key(client, self._round, test), None)
        keys = [key or 0 for key in noise] if any(key is not None for key in noise) else None  # of all, or of none

        def score(client: State, *samples: Tensor) -> dict[str, Tensor]:
            batch = Batch(*samples)
            with eval_mode(self._algorithm, client, batch.mask):
                logits = readout(self._algorithm, phase)(client, batch.x)
            losses = F.cross_entropy(logits, batch.y, reduction="none")
            losses = torch.where(samples[2] > 0, losses, 0)  # infinity times a mask of 0 would be NaN
            return {"classes": class_counts(logits, batch), "loss": batch.sum(losses).double()}

        sums = self._sums(lambda state, row: vmap(score)(state, *_batch(clients, row)), state, samples, keys)
        classes, loss = sums["classes"].cpu(), sums["loss"].tolist()
        return [Score.of(classes[row], loss[row]) for row in self._places]

    def _sums(
        self, terms: Terms, state: State, samples: Sequence[Integers], keys: list[int] | None
    ) -> dict[str, Tensor]:
        """Sums over each client's samples of what ``terms`` gives for some of them, with each one's noise."""
        legs, feed = self.reading(samples, keys)
        sums: dict[str, Tensor] = {}
        for leg in legs:
            part, plan = _cut(state, leg.width), feed.leg(leg.first, leg.stop, leg.width)
            for number in range(len(plan.samples)):
                sums = {
                    name: _joined(sums[name][: leg.width] + term, sums[name]) if sums else term
                    for name, term in terms(part, plan.row(number)).items()
                }
        return sums

    def reading(self, samples: Sequence[Integers], keys: list[int] | None) -> tuple[list[Leg], Feed]:
        """How sets of samples are read; every client is met at least once, with nothing where it has no samples."""
        counts = [schedule.steps(len(samples[client]), MEASURE_BATCH) for client in self._mates]
        legs, orders = schedule.legs(counts, self._rungs), self._by_row(lambda client: samples[client], NOTHING)
        plan = schedule.table(orders, keys, MEASURE_BATCH, legs[-1].stop, len(self.rows))
        return legs, Feed.sent(plan, keys is not None, self._clients.dtype, self._clients.device)


@contextmanager
def _memory_told(width: int) -> Iterator[None]:
    """Where a GPU's memory is too small, say which setting asks for less of it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ", 1)[0]
        raise SettingsError(
            f"execution.stack: the GPU's memory is too small for {width} clients in one call ({reason}); it should be "
            f"less, as {width // 2}, with which results are equal within rounding."
        ) from error


def logits_batch(clients: Clients, width: int) -> int:
    """Samples on which the server's model is measured in one call: on a GPU as many as those of a stack's models.

    Small calls make it wait. Where the noise of test samples goes by batches, these are of one size everywhere.
    """
    on_gpu = clients.device.type == "cuda" and not clients.transforms.on_test
    return MEASURE_BATCH * width if on_gpu else MEASURE_BATCH


def _batch(clients: Clients, row: Row) -> tuple[Tensor, ...]:
    """The samples of a step: inputs, classes, masks, and the key where there is noise."""
    x, y = clients.gather(row.samples)
    if row.key is None:
        return x, y, row.mask
    return vmap(functools.partial(changed, clients.transforms))(x, row.key), y, row.mask, row.key


def _cut(state: State, width: int) -> State:
    """The first rows; the same tensors where these are all."""
    mapped: State = pytree.tree_map(lambda value: value if len(value) == width else value[:width], state)
    return mapped


def _joined(part: Any, whole: Any) -> Any:
    """The first rows as they are in ``part``, the others as they are in ``whole``."""
    return pytree.tree_map(
        lambda first, rows: first if len(first) == len(rows) else torch.cat([first, rows[len(first) :]]), part, whole
    )


class _Gradient:
    """Gradient of a pass's loss for one client of a stack; see :class:`~fedpipe.algorithms.base.Gradient`."""

    def __init__(self, algorithm: Algorithm, training: Train, names: tuple[str, ...], batch: Batch) -> None:
        self._algorithm, self._training, self._names, self.batch = algorithm, training, names, batch
        self.recorded: dict[str, Tensor] = {}

    def __call__(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        batch, group = batch or self.batch, client[self._training.group]

        def value(parameters: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
            with train_mode(self._algorithm, self._training, client, batch) as statistics:
                loss = self._training.loss(client | {self._training.group: group | parameters}, batch)
            contract.loss(self._algorithm, self._training, loss)
            return loss, statistics

        found, (loss, self.recorded) = grad_and_value(value, has_aux=True)(group.only(self._names))
        return gradient_of(self._training, client, found), loss

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
