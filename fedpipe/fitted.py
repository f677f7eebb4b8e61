"""Models of a run as torch modules, for those who look at them outside of any run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedpipe.algorithms.base import Algorithm, State
from fedpipe.artifacts import RunFiles
from fedpipe.config import Execution
from fedpipe.engine import numerics
from fedpipe.engine.executor import Phase, Score, Test, eval_mode
from fedpipe.engine.loop import Loop
from fedpipe.engine.run import Run
from fedpipe.errors import SettingsError
from fedpipe.models.base import COUNTER, Model, Net, Network
from fedpipe.tensors import Tensors


class Fitted(Network):
    """A network with the weights of a run.

    Attributes
    ----------
    class_names
        What its outputs stand for, in their order.
    provenance
        Where its weights are from: study, run, round, client, file with its SHA-256, and what made it.
    """

    def __init__(self, network: Network, class_names: Sequence[str], provenance: dict[str, Any]) -> None:
        super().__init__(network.body, network.head)
        self.class_names: tuple[str, ...] = tuple(class_names)
        self.provenance: dict[str, Any] = provenance


def open_run(files: RunFiles) -> Run:
    """A run on this machine's CPU, which leaves PyTorch's own settings as they are."""
    with numerics.kept():
        return Run(files, Execution(device="cpu", stack=1))


def model(run: Run, number: int, client: int | None, class_names: Sequence[str], provenance: dict[str, Any]) -> Fitted:
    """The global model after a round, or a client's personal one.

    Raises
    ------
    SettingsError
        The method has no such model.
    """
    tensors = _global(run, number) if client is None else _personal(run, number, client)
    family, bare = cast(Model, run.settings.build_model()), cast(Algorithm, run.settings.build_algorithm())
    with torch.random.fork_rng(devices=[]):
        network = bare.adapt(family.network(tuple(run.clients.x.shape[1:]), run.clients.classes))
    network.to(run.algorithm.net.dtype)
    if run.federation.buffers == "drop":
        for layer in network.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    with torch.no_grad():
        found = network.load_state_dict({name: value.clone() for name, value in tensors.items()}, strict=False)
    constants = {name for name, value in network.named_parameters() if not value.requires_grad}
    tied = {name for name, _ in network.named_parameters(remove_duplicate=False)} - dict(
        network.named_parameters()
    ).keys()
    missing = [
        name for name in found.missing_keys if not name.endswith(COUNTER) and name not in constants and name not in tied
    ]
    if missing or found.unexpected_keys:
        raise SettingsError(f"{run.files.path}: its network has no place for {(missing + found.unexpected_keys)[0]}.")
    return Fitted(network, class_names, provenance).eval()


def _global(run: Run, number: int) -> Tensors:
    label = run.files.path.parent.name
    found = run.algorithm.global_model(run.server(number))
    if found is None:
        raise SettingsError(f"{label} has no global model; name a client, as client=0, for its personal one.")
    if run.algorithm.net.own:
        raise SettingsError(
            f"{label}: BatchNorm's statistics stay at the clients (federation.buffers: keep), so that the global model "
            "has none; name a client, as client=0."
        )
    return found


def _personal(run: Run, number: int, client: int) -> Tensors:
    if not 0 <= client < len(run.clients):
        raise SettingsError(f"client: {client} is none of the run's; it should be from 0 to {len(run.clients) - 1}.")
    with numerics.kept():
        looking = _Looking(run.algorithm, run.clients)
        send = functools.partial(run.algorithm.send, run.server(number))
        kept = functools.partial(run.kept, number=number)
        list(looking.run("receive", number + 1, [client], kept, send, ["global"]))
    return looking.found


class _Looking(Loop):
    """Where others measure a client's model, this one takes it away."""

    found: Tensors

    def _score(self, algorithm: Algorithm, phase: Phase, state: State, round: int, client: int, test: Test) -> Score:
        calls: list[tuple[dict[str, Tensor], Tensor]] = []
        spied = algorithm.bind(cast(Net, _Spied(algorithm.net, calls)), algorithm.federation)
        x, _ = self._clients.gather(self._clients.global_test[:1])
        with eval_mode(algorithm, state):
            logits = spied.predict(state, x)
        if len(calls) != 1 or not torch.equal(calls[0][1], logits):
            raise SettingsError(f"client: {type(algorithm).__name__}'s personal model is not one network.")
        self.found = Tensors((name, value.detach()) for name, value in calls[0][0].items())
        return Score(0, 0, 0.0, ())


class _Spied:
    """A network that tells with which tensors it was called."""

    def __init__(self, net: Net, calls: list[tuple[dict[str, Tensor], Tensor]]) -> None:
        self._net, self._calls = net, calls

    def __call__(self, model: Tensors, x: Tensor, *, teacher: bool = False) -> Tensor:
        logits = self._net(model, x, teacher=teacher)
        self._calls.append(({**self._net.mode.buffers, **model}, logits))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)
