"""Loads models of a run as torch modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.passes import Train
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.layout import RunFiles
from fedpipe.core.tensors import Tensors
from fedpipe.data import store
from fedpipe.engine import contract
from fedpipe.engine.clients import drift
from fedpipe.engine.clients.executor import ClientTask, Score, TestSet, activate_eval_mode, get_passes
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.load import get_data_paths, load_federated_data
from fedpipe.engine.clients.loop import ClientRun, LoopExecutor
from fedpipe.engine.run import Run
from fedpipe.engine.torch_env import numerics
from fedpipe.models.base import BATCH_COUNTER, FunctionalNetwork, Model, Network, seed_generator
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.execution import Execution


class FittedNetwork(Network):
    """A network with the weights of a run.

    Attributes
    ----------
    class_names
        Names of the outputs, in order.
    provenance
        Origin of the weights: study, run, round, client, file with SHA-256, and the versions that made it.
    """

    def __init__(self, network: Network, class_names: Sequence[str], provenance: dict[str, Any]) -> None:
        super().__init__(network.body, network.head)
        self.class_names: tuple[str, ...] = tuple(class_names)
        self.provenance: dict[str, Any] = provenance


def open_run_on_cpu(files: RunFiles) -> Run:
    """Open a run on the CPU without changing PyTorch's settings."""
    with numerics.preserve_torch_flags():
        return Run(files, Execution(device="cpu", stack=1))


def list_batches(run: Run, client: int, round_number: int, stream: str) -> list[list[int]]:
    """List the samples of each training step of a client in a round, in the Train passes of a stream.

    Raises a SettingsError if the client is held out, or there is no pass with this stream.
    """
    if client not in run.clients.ids:
        raise SettingsError(f"client: {client} is held out and has no batches. Use one of {list(run.clients.ids)}.")
    algorithm = run.algorithm.bind_round(round_number, run.settings.seed)
    client_run = ClientRun(algorithm, run.clients.select_round_samples(round_number), round_number, client)
    passes = [pass_ for pass_ in get_passes(algorithm, "train", 1) if isinstance(pass_, Train)]
    if stream not in (streams := list(dict.fromkeys(training.stream for training in passes))):
        raise SettingsError(f"stream: no Train pass has the stream '{stream}'. Use one of: {', '.join(streams)}.")
    return [
        order.tolist()
        for training in passes
        if training.stream == stream
        for order in client_run.list_step_samples(training)
    ]


def load_clients(files: RunFiles) -> FederatedData:
    """Load the samples of all clients on the CPU, with those of a drift and of held-out clients."""
    settings = RunSettings.read(files.settings)
    federation = settings.build_federation_settings()
    clients = load_federated_data(settings, getattr(torch, federation.dtype), torch.device("cpu"))
    return drift.add_drift(clients, federation)


def load_model(
    run: Run, round_number: int, client: int | None, class_names: Sequence[str], provenance: dict[str, Any]
) -> FittedNetwork:
    """Load the global model after a round, or a client's personal model, if the method has it."""
    shape = store.read_dataset_info(get_data_paths(run.settings)["data set"]).shape  # run.clients may have features
    tensors = (
        _compute_global_model(run, round_number)
        if client is None
        else _compute_personal_model(run, round_number, client)
    )
    model_family, algorithm = cast(Model, run.settings.build_model()), cast(Algorithm, run.settings.build_algorithm())
    with seed_generator(run.algorithm.net.entropy):  # constants that the network draws
        network = algorithm.adapt(model_family.build_initial_network(shape, run.clients.classes))
    network.to(run.algorithm.net.dtype)
    if run.federation.buffers == "drop":
        for layer in network.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    with torch.no_grad():
        load_result = network.load_state_dict({name: value.clone() for name, value in tensors.items()}, strict=False)
    constants = {name for name, value in network.named_parameters() if not value.requires_grad}
    tied_names = {name for name, _ in network.named_parameters(remove_duplicate=False)} - dict(
        network.named_parameters()
    ).keys()
    missing = [
        name
        for name in load_result.missing_keys
        if not name.endswith(BATCH_COUNTER) and name not in constants and name not in tied_names
    ]
    if missing or load_result.unexpected_keys:
        raise SettingsError(
            f"{run.files.path}: the stored model does not fit the network in "
            f"{(missing + load_result.unexpected_keys)[0]}."
        )
    return FittedNetwork(network, class_names, provenance).eval()


def _compute_global_model(run: Run, round_number: int) -> Tensors:
    label = run.files.path.parent.name
    global_model = contract.compute_global_model(run.algorithm, run.load_server_state(round_number))
    if global_model is None:
        raise SettingsError(f"{label} has no global model. Name a client, such as client=0, for its personal model.")
    if run.algorithm.net.client_buffers:
        raise SettingsError(
            f"{label}: the global model has no BatchNorm statistics, because clients keep them (federation.buffers: "
            "keep). Name a client, such as client=0."
        )
    return global_model


def _compute_personal_model(run: Run, round_number: int, client: int) -> Tensors:
    task = run.make_task("receive", round_number + 1, [client], ["global"], samples_round=round_number)
    algorithm, clients = run.algorithm, run.clients
    if run.new_clients and client in run.new_clients.clients.ids:
        algorithm, clients = run.new_clients.algorithm, run.new_clients.clients
        round_algorithm = algorithm.bind_round(round_number + 1, run.settings.seed)
        send = run.new_clients.make_download_function(round_algorithm, run.load_server_state(round_number))
        task = dataclasses.replace(task, send=send)
    with numerics.preserve_torch_flags():
        list((capture := _ModelCapture(algorithm, clients)).run(task))
    return capture.captured_model


class _ModelCapture(LoopExecutor):
    """Executor that captures a client's model instead of measuring it."""

    captured_model: Tensors

    def _score_test_set(self, client_run: ClientRun, task: ClientTask, state: State, test: TestSet) -> Score:
        algorithm = client_run.algorithm
        calls: list[tuple[dict[str, Tensor], Tensor]] = []
        recording_algorithm = algorithm.bind(
            cast(FunctionalNetwork, _RecordingNet(algorithm.net, calls)), algorithm.federation
        )
        x, _ = self._clients.gather_samples(self._clients.global_test[:1])
        with activate_eval_mode(algorithm, state):
            logits = recording_algorithm.predict(state, x)
        if len(calls) != 1 or not torch.equal(calls[0][1], logits):
            raise SettingsError(
                f"client: the personal model of {type(algorithm).__name__} can't be returned as a module, because its "
                "logits are not the output of one network. Use results.state, which returns its parts."
            )
        self.captured_model = Tensors((name, value.detach()) for name, value in calls[0][0].items())
        return Score(0, 0, 0.0, ())


class _RecordingNet:
    """Network that records the tensors of its calls."""

    def __init__(self, net: FunctionalNetwork, calls: list[tuple[dict[str, Tensor], Tensor]]) -> None:
        self._net, self._calls = net, calls

    def __call__(self, model: Tensors, x: Tensor, *, teacher: bool = False) -> Tensor:
        logits = self._net(model, x, teacher=teacher)
        self._calls.append(({**self._net.mode.buffers, **model}, logits))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)
