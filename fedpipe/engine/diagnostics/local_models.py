"""The models that diagnostics read: the server's, and the clients' received, trained and fine-tuned ones.

Clients' trained models are not stored. They are recomputed by repeating their round from the previous state, and used
only if the round gives the recorded result. The run's executor repeats it with the run's algorithm, whose uploads also
contain the client's model.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.passes import Gradient, Pass, Train
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract, replay
from fedpipe.engine.clients.executor import BUFFERS, BatchGradient, ClientTask, Executor, Outcome
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.loop import ClientRun
from fedpipe.engine.run import Run
from fedpipe.engine.server.server import call_server_hooks
from fedpipe.models.base import FunctionalNetwork
from fedpipe.planning.hook_names import get_algorithm_name

MODEL, CLIENT_BUFFERS, TRACE, STEP = "diagnostic/model", "diagnostic/own", "diagnostic/trace", "diagnostic/step"
HEAD_ADVICE = "Use a model and methods with a linear head."
TraceFunction = Callable[[Tensors], Tensor]


class LocalModel(NamedTuple):
    """A client's model: the tensors that `predict` gives to the network, and the client's own statistics."""

    client: int
    model: Tensors
    buffers: Tensors | None
    trace: Tensor | None = None  #: traced values before the first step and after each, shape (steps + 1, ...)


class _CapturedModelError(Exception):
    """Returns the model from `predict`."""


class _ModelRecorder:
    """Network that records the model of its call and computes nothing."""

    def __init__(self, net: FunctionalNetwork) -> None:
        self._net = net

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def __call__(self, model: Tensors, x: Any, **_: Any) -> Tensor:
        raise _CapturedModelError(model)

    def features(self, *_: Any, **__: Any) -> Tensor:
        raise _CapturedModelError(None)


def get_personal_model(algorithm: Algorithm, client: State) -> Tensors:
    """Get the model with which a client classifies.

    Raises
    ------
    SettingsError
        Other parts of the client's state take part in `predict`, or it does not call the network.
    """
    recorder = algorithm.bind(_ModelRecorder(algorithm.net), algorithm.federation)  # type: ignore[arg-type]
    try:
        recorder.predict(client, torch.empty(0))
    except _CapturedModelError as error:
        model: Tensors | None = error.args[0]
        if model is not None:
            return model
    raise SettingsError(
        f"diagnostics: {get_algorithm_name(algorithm)}.predict does not return self.net(model, x), so a client's model "
        "is unknown. List only other methods in `algorithms`."
    )


def add_model_to_uploads(
    algorithm: Algorithm,
    finetune_epochs: int | None = None,
    trace_function: TraceFunction | None = None,
    steps: int = 0,
) -> Algorithm:
    """Extend an algorithm so that its uploads contain the client's model.

    With ``finetune_epochs`` the client is fine-tuned, instead of local training. ``trace_function`` is a function of
    the client's model that is traced before the first of at most ``steps`` steps and after each.
    """
    kind: Any = type(algorithm)

    class WithModelUploads(kind):  # type: ignore[misc]
        @override
        def start(self, state: State, download: State, info: ClientInfo) -> State:
            client: State = super().start(state, download, info)
            if trace_function is None:
                return client
            traced_value = trace_function(get_personal_model(self, client))
            trace = traced_value.new_full((steps + 1, *traced_value.shape), math.nan)
            return client | {TRACE: trace, STEP: torch.zeros_like(info.size).long()}

        @override
        def local_passes(self) -> Sequence[Pass]:
            passes: Sequence[Pass] = super().local_passes()
            if finetune_epochs is not None:
                passes = self.finetune_passes(finetune_epochs) if finetune_epochs else ()
            return [self._record_trace_in_pass(pass_) for pass_ in passes] if trace_function else passes

        @override
        def upload(self, client: State) -> State:
            model_parts = {MODEL: get_personal_model(self, client)}
            model_parts |= {CLIENT_BUFFERS: client[BUFFERS]} if BUFFERS in client else {}
            trace_parts = {part: client[part] for part in (TRACE, STEP) if part in client}
            # Without local training, the parts of an upload may be missing.
            base_upload: State = super().upload(client) if finetune_epochs is None else {}
            return base_upload | model_parts | trace_parts

        @override
        def keep(self, client: State) -> State:
            return super().keep(client) if finetune_epochs is None else {}

        @override
        def traffic(self, state: State) -> State:
            if finetune_epochs is not None:
                return {}
            return super().traffic({part: value for part, value in state.items() if not _is_diagnostic_part(part)})

        def _record_trace_in_pass(self, pass_: Pass) -> Pass:
            if not isinstance(pass_, Train):
                return pass_
            inner = pass_.step or _take_optimizer_step

            def step(client: State, batch: Batch, gradient: Gradient) -> State:
                client = self._record_trace(client) if trace_function else client
                return inner(client, batch, gradient) | {STEP: client[STEP] + 1}

            return dataclasses.replace(pass_, step=step)

        def _record_trace(self, client: State) -> State:
            assert trace_function is not None
            is_current = torch.arange(steps + 1, device=client[STEP].device) == client[STEP]
            traced_value = trace_function(get_personal_model(self, client))
            is_current = is_current.reshape(-1, *(1,) * traced_value.dim())
            return client | {TRACE: torch.where(is_current, traced_value, client[TRACE])}

    WithModelUploads.__module__, WithModelUploads.__qualname__ = kind.__module__, kind.__qualname__
    WithModelUploads.__name__ = kind.__name__
    uploading_algorithm = copy.copy(algorithm)
    object.__setattr__(uploading_algorithm, "__class__", WithModelUploads)
    return uploading_algorithm


def _is_diagnostic_part(part: str) -> bool:
    return part.startswith("diagnostic/")


def _take_optimizer_step(client: State, batch: Batch, gradient: Gradient) -> State:
    """Take the step of a pass without a custom one. `Gradient.descend` would round clipped gradients in another way."""
    assert isinstance(gradient, BatchGradient)
    return gradient.take_optimizer_step(client)


class _CollectingExecutor(Executor):
    """Executor with the run's outcomes, which collects the models in their uploads."""

    def __init__(self, executor: Executor, trace_function: TraceFunction | None) -> None:
        self._executor, self._trace_function, self.name = executor, trace_function, executor.name
        self.local_models: list[LocalModel] = []

    @override
    def run(self, task: ClientTask) -> Iterator[Outcome]:
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

    @override
    def compute_logits(self, model: Tensors, indices: Any, round_number: int) -> Tensor:
        return self._executor.compute_logits(model, indices, round_number)


def replay_local_models(run: Run, round_number: int, trace_function: TraceFunction | None = None) -> list[LocalModel]:
    """Recompute the models of a round's participants after training.

    Raises
    ------
    ArtifactError
        A previous state is missing, or the repeated round differs from the recorded one.
    """
    steps = (
        count_max_steps(run.algorithm, run.clients, run.select_participants(round_number), round_number)
        if trace_function
        else 0
    )
    executor = _CollectingExecutor(
        run.make_executor(add_model_to_uploads(run.algorithm, trace_function=trace_function, steps=steps)),
        trace_function,
    )
    comparison = replay.replay_round(run, round_number, executor)
    if comparison is None:
        raise make_pruned_state_error(run, round_number)
    if not comparison.is_reproduced(run.federation.compute_dtype):
        raise ArtifactError(
            f"{run.files.path}: round {round_number} has another result when it is repeated: "
            f"{comparison.describe_difference()}. {replay.format_restore_advice(run.files)}"
        )
    return executor.local_models


def compute_personal_models(run: Run, round_number: int, finetune_epochs: int = 0) -> Iterator[LocalModel]:
    """Compute all clients' personal models at the start of the next round, optionally fine-tuned."""
    executor = _CollectingExecutor(run.make_executor(add_model_to_uploads(run.algorithm, finetune_epochs)), None)
    for _ in executor.run(run.make_task("train", round_number + 1, run.clients.ids, samples_round=round_number)):
        yield executor.local_models.pop()


def find_global_model(run: Run, round_number: int) -> Tensors | None:
    """Find the server's global model after a round, if the method has one."""
    if run.algorithm.net.client_buffers:  # a server's model needs running statistics
        return None
    server = run.load_server_state(round_number)
    with call_server_hooks(run.algorithm, server):
        return contract.compute_global_model(run.algorithm, server)


def get_global_model(run: Run, round_number: int) -> Tensors:
    """Get the server's global model after a round.

    Raises
    ------
    SettingsError
        The method has no global model.
    """
    model = find_global_model(run, round_number)
    if model is None:
        name = run.settings.algorithm["name"]
        raise SettingsError(f"diagnostics: {name} has no global model. List only other methods in `algorithms`.")
    return model


def get_head_weight(run: Run, model: Tensors) -> Tensor:
    """Get the weight of a model's last layer, shape (C, d).

    Raises
    ------
    SettingsError
        The network has no such layer.
    """
    if "head.weight" not in model:
        kind = run.settings.algorithm["name"]
        raise SettingsError(f"diagnostics: the models of {kind} have no head.weight. {HEAD_ADVICE}")
    return model["head.weight"]


def count_max_steps(algorithm: Algorithm, clients: FederatedData, ids: Sequence[int], round_number: int) -> int:
    """Maximum number of training steps of these clients in a round."""

    def count_steps(client: int) -> int:
        client_run = ClientRun(algorithm, clients, round_number, client)
        trainings = [pass_ for pass_ in algorithm.local_passes() if isinstance(pass_, Train)]
        return sum(len(client_run.list_step_samples(training)) for training in trainings)

    return max(map(count_steps, ids))


def make_pruned_state_error(run: Run, round_number: int) -> ArtifactError:
    """Make the error about states that were pruned before the diagnostic was declared."""
    return ArtifactError(
        f"{run.files.path}: states of round {round_number} or of the round before it are missing. "
        "artifacts.keep_models deleted them before you declared this diagnostic. "
        f"Type `rm -r {run.files.path}` and run again to keep them."
    )
