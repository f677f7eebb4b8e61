"""The models that a probe looks at: of the server, and of clients as they receive, train and fine-tune them.

Nobody stores the models that clients train. They are made again by doing their round again from the state before it,
and only if the round then comes out as it is recorded. The executor is the run's own: it is given an algorithm that is
the run's in all but one thing, that its uploads bring the client's model along.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpipe.algorithms.base import Algorithm, Batch, ClientInfo, Gradient, Pass, State, Train
from fedpipe.engine import redo
from fedpipe.engine.clients import Clients
from fedpipe.engine.executor import BUFFERS, Executor, Outcome, Phase, Test, span
from fedpipe.engine.run import Run
from fedpipe.engine.server import send
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.models.base import Net
from fedpipe.tensors import Tensors

MODEL, OWN, TRACE, STEP = "probe/model", "probe/own", "probe/trace", "probe/step"
Look = Callable[[Tensors], Tensor]


class Local(NamedTuple):
    """A client's model: what its `predict` gives to the network, and the statistics that it keeps to itself."""

    client: int
    model: Tensors
    buffers: Tensors | None
    trace: Tensor | None = None  #: what was looked at, before the first step and after each, shape (steps + 1, ...)


class _ToldError(Exception):
    """Carries the model out of `predict`."""


class _Asked:
    """A network that tells which model it is called with, and computes nothing."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def __call__(self, model: Tensors, x: Any, **_: Any) -> Tensor:
        raise _ToldError(model)

    features = __call__


def personal(algorithm: Algorithm, client: State) -> Tensors:
    """The model by which a client tells classes.

    Raises
    ------
    SettingsError
        Its `predict` calls no network.
    """
    asked = algorithm.bind(_Asked(algorithm.net), algorithm.federation)  # type: ignore[arg-type]
    try:
        asked.predict(client, torch.empty(0))
    except _ToldError as told:
        model: Tensors = told.args[0]
        return model
    raise SettingsError(f"probes: {type(algorithm).__qualname__}.predict calls no network, so that no model is known.")


def watching(
    algorithm: Algorithm, finetune_epochs: int | None = None, look: Look | None = None, steps: int = 0
) -> Algorithm:
    """The same algorithm, whose uploads bring the client's model along.

    Parameters
    ----------
    algorithm
        Bound to its network.
    finetune_epochs
        In place of local training the model is fine-tuned for so many epochs.
    look
        What to look at in the client's model, before the first step of training and after each.
    steps
        At most so many steps.
    """
    kind: Any = type(algorithm)

    class Watching(kind):  # type: ignore[misc]
        def start(self, kept: State, received: State, info: ClientInfo) -> State:
            state: State = super().start(kept, received, info)
            if look is None:
                return state
            seen = look(personal(self, state))
            trace = seen.new_full((steps + 1, *seen.shape), math.nan)
            return state | {TRACE: trace, STEP: torch.zeros_like(info.size).long()}

        def local_passes(self) -> Sequence[Pass]:
            found: Sequence[Pass] = super().local_passes()
            if finetune_epochs is not None:
                found = self.finetune(finetune_epochs) if finetune_epochs else ()
            return [self._watched(listed) for listed in found] if look else found

        def upload(self, client: State) -> State:
            more = {MODEL: personal(self, client)} | ({OWN: client[BUFFERS]} if BUFFERS in client else {})
            traced = {part: client[part] for part in (TRACE, STEP) if part in client}
            sent: State = super().upload(client) if finetune_epochs is None else {}  # which may need local training
            return sent | more | traced

        def keep(self, client: State) -> State:
            kept: State = super().keep(client) if finetune_epochs is None else {}
            return kept

        def traffic(self, state: State) -> State:
            if finetune_epochs is not None:
                return {}
            travels: State = super().traffic({part: value for part, value in state.items() if not _is_brought(part)})
            return travels

        def _watched(self, listed: Pass) -> Pass:
            if not isinstance(listed, Train):
                return listed
            inner = listed.step or _descend

            def step(client: State, batch: Batch, gradient: Gradient) -> State:
                client = self._look(client) if look else client
                return inner(client, batch, gradient) | {STEP: client[STEP] + 1}

            return dataclasses.replace(listed, step=step)

        def _look(self, client: State) -> State:
            assert look is not None
            here = torch.arange(steps + 1, device=client[STEP].device) == client[STEP]
            seen = look(personal(self, client))
            here = here.reshape(-1, *(1,) * seen.dim())
            return client | {TRACE: torch.where(here, seen, client[TRACE])}

    Watching.__module__, Watching.__qualname__, Watching.__name__ = kind.__module__, kind.__qualname__, kind.__name__
    watched = copy.copy(algorithm)
    object.__setattr__(watched, "__class__", Watching)
    return watched


def _is_brought(part: str) -> bool:
    return part.startswith("probe/")


def _descend(client: State, batch: Batch, gradient: Gradient) -> State:
    return gradient.descend(client, gradient(client)[0])


class _Watched:
    """An executor whose outcomes are those of the run's own; what they bring along is left in ``found``."""

    def __init__(self, executor: Executor, look: Look | None) -> None:
        self._executor, self._look, self.name = executor, look, executor.name
        self.found: list[Local] = []

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
        for outcome in self._executor.run(phase, round, ids, kept, send, tests, among, again):
            if phase != "train":
                yield outcome
                continue
            brought = {part: value for part, value in outcome.upload.items() if _is_brought(part)}
            trace = None
            if self._look is not None:
                steps = int(brought[STEP])
                trace = brought[TRACE].clone()
                trace[steps] = self._look(brought[MODEL])
                trace = trace[: steps + 1]
            self.found.append(Local(outcome.client, brought[MODEL], brought.get(OWN), trace))
            sent = {part: value for part, value in outcome.upload.items() if part not in brought}
            yield outcome._replace(upload=sent)

    def stacks(self, among: Sequence[int]) -> list[dict[str, Any]]:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        return self._executor.stacks(among)

    def logits(self, model: Tensors, indices: Any, round: int) -> Tensor:
        """See :class:`~fedpipe.engine.executor.Executor`."""
        return self._executor.logits(model, indices, round)


def trained(run: Run, number: int, look: Look | None = None) -> list[Local]:
    """The models of a round's participants right after their training in it.

    Raises
    ------
    ArtifactError
        A state from before the round is gone, or the round, done again, is not as it is recorded.
    """
    steps = most_steps(run.algorithm, run.clients, run.participants(number)) if look else 0
    watched = _Watched(run.executor_of(watching(run.algorithm, look=look, steps=steps)), look)
    done = redo.again(run, number, watched)
    if done is None:
        raise gone(run, number)
    if not done.agrees(run.federation.dtype):
        raise ArtifactError(
            f"{run.files.path}: round {number} can't be looked into, since done again now {done.told()}; restore "
            f"fedpipe as it was, or type `rm -r {run.files.path}` to have the run made anew."
        )
    return watched.found


def received(run: Run, number: int, finetune_epochs: int = 0) -> Iterator[Local]:
    """All clients' personal models after a round, as the next one begins; fine-tuned, where epochs are asked for."""
    watched = _Watched(run.executor_of(watching(run.algorithm, finetune_epochs)), None)
    kept, sends = functools.partial(run.kept, number=number), functools.partial(send, run.algorithm, run.server(number))
    for _ in watched.run("train", number + 1, range(len(run.clients)), kept, sends):
        yield watched.found.pop()


def deployed(run: Run, number: int) -> Tensors:
    """The server's global model after a round.

    Raises
    ------
    SettingsError
        The method has none.
    """
    complete = not run.algorithm.net.own
    model = run.algorithm.global_model(run.server(number)) if complete else None
    if model is None:
        name = run.settings.algorithm["name"]
        raise SettingsError(f"probes: {name} has no global model to look at; its run should be left out (algorithms).")
    return model


def most_steps(algorithm: Algorithm, clients: Clients, ids: Sequence[int]) -> int:
    """No client takes more steps of training in a round."""
    federation, most = algorithm.federation, 0
    for listed in algorithm.local_passes():
        if isinstance(listed, Train):
            epochs, steps = span(algorithm, listed)
            if steps is not None:
                most += steps
                continue
            batches = math.ceil(max(clients.sizes[list(ids)]) / (clients.batch(federation.batch_size) * listed.batches))
            most += epochs * (batches if listed.steps is None else min(batches, listed.steps))
    return most


def gone(run: Run, number: int) -> ArtifactError:
    """What to say where the states around a round were pruned before a probe of it was declared."""
    return ArtifactError(
        f"{run.files.path}: the states of round {number} or of the one before it are gone, which artifacts.keep_models "
        f"pruned before this probe was declared; type `rm -r {run.files.path}` and run again, which keeps them."
    )
