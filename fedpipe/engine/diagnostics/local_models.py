"""The models that a diagnostic looks at: of the server, and of clients as they receive, train and fine-tune them.

Nobody stores the models that clients train. They are made again by doing their round again from the state before it,
and only if the round then comes out as it is recorded. The executor is the run's own: it is given an algorithm that is
the run's in all but one thing, that its uploads bring the client's model along.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.passes import Gradient, Pass, Train
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.engine import replay
from fedpipe.engine.clients.executor import BUFFERS, ClientTask, Executor, Outcome, get_epochs_and_steps
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.run import Run
from fedpipe.models.base import FunctionalNetwork

MODEL, CLIENT_BUFFERS, TRACE, STEP = "diagnostic/model", "diagnostic/own", "diagnostic/trace", "diagnostic/step"
TraceFunction = Callable[[Tensors], Tensor]


class LocalModel(NamedTuple):
    """A client's model: what its `predict` gives to the network, and the statistics that it keeps to itself."""

    client: int
    model: Tensors
    buffers: Tensors | None
    trace: Tensor | None = None  #: what was looked at, before the first step and after each, shape (steps + 1, ...)


class _CapturedModelError(Exception):
    """Carries the model out of `predict`."""


class _ModelRecorder:
    """A network that tells which model it is called with, and computes nothing."""

    def __init__(self, net: FunctionalNetwork) -> None:
        self._net = net

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def __call__(self, model: Tensors, x: Any, **_: Any) -> Tensor:
        raise _CapturedModelError(model)

    features = __call__


def get_personal_model(algorithm: Algorithm, client: State) -> Tensors:
    """The model by which a client tells classes.

    Raises
    ------
    SettingsError
        Its `predict` calls no network.
    """
    recorder = algorithm.bind(_ModelRecorder(algorithm.net), algorithm.federation)  # type: ignore[arg-type]
    try:
        recorder.predict(client, torch.empty(0))
    except _CapturedModelError as error:
        model: Tensors = error.args[0]
        return model
    raise SettingsError(
        f"diagnostics: {type(algorithm).__qualname__}.predict calls no network, so that no model is known."
    )


def with_model_uploads(
    algorithm: Algorithm,
    finetune_epochs: int | None = None,
    trace_function: TraceFunction | None = None,
    steps: int = 0,
) -> Algorithm:
    """The same algorithm, whose uploads bring the client's model along.

    Parameters
    ----------
    algorithm
        Bound to its network.
    finetune_epochs
        In place of local training the model is fine-tuned for so many epochs.
    trace_function
        What to look at in the client's model, before the first step of training and after each.
    steps
        At most so many steps.
    """
    kind: Any = type(algorithm)

    class WithModelUploads(kind):  # type: ignore[misc]
        def start(self, kept: State, received: State, info: ClientInfo) -> State:
            state: State = super().start(kept, received, info)
            if trace_function is None:
                return state
            traced_value = trace_function(get_personal_model(self, state))
            trace = traced_value.new_full((steps + 1, *traced_value.shape), math.nan)
            return state | {TRACE: trace, STEP: torch.zeros_like(info.size).long()}

        def local_passes(self) -> Sequence[Pass]:
            passes: Sequence[Pass] = super().local_passes()
            if finetune_epochs is not None:
                passes = self.finetune(finetune_epochs) if finetune_epochs else ()
            return [self._watched(pass_) for pass_ in passes] if trace_function else passes

        def upload(self, client: State) -> State:
            model_parts = {MODEL: get_personal_model(self, client)} | (
                {CLIENT_BUFFERS: client[BUFFERS]} if BUFFERS in client else {}
            )
            trace_parts = {part: client[part] for part in (TRACE, STEP) if part in client}
            base_upload: State = (
                super().upload(client) if finetune_epochs is None else {}
            )  # which may need local training
            return base_upload | model_parts | trace_parts

        def keep(self, client: State) -> State:
            kept_state: State = super().keep(client) if finetune_epochs is None else {}
            return kept_state

        def traffic(self, state: State) -> State:
            if finetune_epochs is not None:
                return {}
            counted_state: State = super().traffic(
                {part: value for part, value in state.items() if not _is_diagnostic_part(part)}
            )
            return counted_state

        def _watched(self, pass_: Pass) -> Pass:
            if not isinstance(pass_, Train):
                return pass_
            inner = pass_.step or _descend

            def step(client: State, batch: Batch, gradient: Gradient) -> State:
                client = self._look(client) if trace_function else client
                return inner(client, batch, gradient) | {STEP: client[STEP] + 1}

            return dataclasses.replace(pass_, step=step)

        def _look(self, client: State) -> State:
            assert trace_function is not None
            is_current = torch.arange(steps + 1, device=client[STEP].device) == client[STEP]
            traced_value = trace_function(get_personal_model(self, client))
            is_current = is_current.reshape(-1, *(1,) * traced_value.dim())
            return client | {TRACE: torch.where(is_current, traced_value, client[TRACE])}

    WithModelUploads.__module__, WithModelUploads.__qualname__, WithModelUploads.__name__ = (
        kind.__module__,
        kind.__qualname__,
        kind.__name__,
    )
    uploading_algorithm = copy.copy(algorithm)
    object.__setattr__(uploading_algorithm, "__class__", WithModelUploads)
    return uploading_algorithm


def _is_diagnostic_part(part: str) -> bool:
    return part.startswith("diagnostic/")


def _descend(client: State, batch: Batch, gradient: Gradient) -> State:
    return gradient.descend(client, gradient(client))


class _CollectingExecutor:
    """An executor whose outcomes are those of the run's own; what they bring along is left in ``found``."""

    def __init__(self, executor: Executor, trace_function: TraceFunction | None) -> None:
        self._executor, self._trace_function, self.name = executor, trace_function, executor.name
        self.local_models: list[LocalModel] = []

    def run(self, task: ClientTask) -> Iterator[Outcome]:
        """See :class:`~fedpipe.engine.clients.executor.Executor`."""
        for outcome in self._executor.run(task):
            if task.phase != "train":
                yield outcome
                continue
            diagnostic_parts = {part: value for part, value in outcome.upload.items() if _is_diagnostic_part(part)}
            trace = None
            if self._trace_function is not None:
                steps = int(diagnostic_parts[STEP])
                trace = diagnostic_parts[TRACE].clone()
                trace[steps] = self._trace_function(diagnostic_parts[MODEL])
                trace = trace[: steps + 1]
            self.local_models.append(
                LocalModel(outcome.client, diagnostic_parts[MODEL], diagnostic_parts.get(CLIENT_BUFFERS), trace)
            )
            upload = {part: value for part, value in outcome.upload.items() if part not in diagnostic_parts}
            yield outcome._replace(upload=upload)

    def describe_stacks(self, participants: Sequence[int]) -> list[dict[str, Any]]:
        """See :class:`~fedpipe.engine.clients.executor.Executor`."""
        return self._executor.describe_stacks(participants)

    def logits(self, model: Tensors, indices: Any, round: int) -> Tensor:
        """See :class:`~fedpipe.engine.clients.executor.Executor`."""
        return self._executor.logits(model, indices, round)


def replay_local_models(run: Run, number: int, trace_function: TraceFunction | None = None) -> list[LocalModel]:
    """The models of a round's participants right after their training in it.

    Raises
    ------
    ArtifactError
        A state from before the round is gone, or the round, done again, is not as it is recorded.
    """
    steps = count_max_steps(run.algorithm, run.clients, run.participants(number)) if trace_function else 0
    executor = _CollectingExecutor(
        run.make_executor(with_model_uploads(run.algorithm, trace_function=trace_function, steps=steps)), trace_function
    )
    comparison = replay.replay_round(run, number, executor)
    if comparison is None:
        raise make_pruned_state_error(run, number)
    if not comparison.is_reproduced(run.federation.compute_dtype):
        raise ArtifactError(
            f"{run.files.path}: round {number} can't be looked into, since done again now "
            f"{comparison.describe_difference()}; restore "
            f"fedpipe as it was, or type `rm -r {run.files.path}` to have the run made anew."
        )
    return executor.local_models


def compute_personal_models(run: Run, number: int, finetune_epochs: int = 0) -> Iterator[LocalModel]:
    """All clients' personal models after a round, as the next one begins; fine-tuned, where epochs are asked for."""
    executor = _CollectingExecutor(run.make_executor(with_model_uploads(run.algorithm, finetune_epochs)), None)
    for _ in executor.run(run.make_task("train", number + 1, range(len(run.clients)))):
        yield executor.local_models.pop()


def get_global_model(run: Run, number: int) -> Tensors:
    """The server's global model after a round.

    Raises
    ------
    SettingsError
        The method has none.
    """
    has_server_statistics = not run.algorithm.net.client_buffers
    model = run.algorithm.global_model(run.load_server_state(number)) if has_server_statistics else None
    if model is None:
        name = run.settings.algorithm["name"]
        raise SettingsError(
            f"diagnostics: {name} has no global model to look at; its run should be left out (algorithms)."
        )
    return model


def get_head_weight(run: Run, model: Tensors) -> Tensor:
    """The weight of a model's last layer, shape (C, d).

    Raises
    ------
    SettingsError
        The network has no such layer.
    """
    if "head.weight" not in model:
        kind = run.settings.algorithm["name"]
        raise SettingsError(f"diagnostics: the models of {kind} have no head.weight, whose rows could be looked at.")
    return model["head.weight"]


def count_max_steps(algorithm: Algorithm, clients: FederatedData, ids: Sequence[int]) -> int:
    """No client takes more steps of training in a round."""
    federation, max_steps = algorithm.federation, 0
    for pass_ in algorithm.local_passes():
        if isinstance(pass_, Train):
            epochs, steps = get_epochs_and_steps(algorithm, pass_)
            if steps is not None:
                max_steps += steps
                continue
            batches = math.ceil(
                max(clients.sizes[list(ids)]) / (clients.resolve_batch_size(federation.batch_size) * pass_.batches)
            )
            max_steps += epochs * (batches if pass_.steps is None else min(batches, pass_.steps))
    return max_steps


def make_pruned_state_error(run: Run, number: int) -> ArtifactError:
    """What to say where the states around a round were pruned before a diagnostic of it was declared."""
    return ArtifactError(
        f"{run.files.path}: the states of round {number} or of the one before it are gone, which artifacts.keep_models "
        f"pruned before this diagnostic was declared; type `rm -r {run.files.path}` and run again, which keeps them."
    )
