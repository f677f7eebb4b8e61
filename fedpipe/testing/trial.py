"""Small federations in memory: the engine's round without its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core import rng
from fedpipe.core.components import component, registry
from fedpipe.core.tensors import Tensors, describe_tensor
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import (
    FIRST,
    ClientTask,
    Executor,
    Outcome,
    Phase,
    TestSet,
    make_client_start_state,
    make_initial_client_state,
)
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.loop import LoopExecutor
from fedpipe.engine.environment import configure_device
from fedpipe.engine.server.server import aggregate_uploads, make_download, make_initial_server_state
from fedpipe.engine.stack.stack import StackExecutor
from fedpipe.engine.torch_env.trees import make_contiguous, move_state, unstack_client
from fedpipe.engine.user_errors import explain_user_errors
from fedpipe.engine.weights import compute_aggregation_weights, select_participants
from fedpipe.models.base import FunctionalNetwork, Model, Network
from fedpipe.models.cnn import CNN
from fedpipe.models.mlp import MLP
from fedpipe.settings.execution import Execution
from fedpipe.settings.federation import Federation

SIZES = (1, 5, 9, 12, 7, 16, 3, 20)  #: a single sample, full batches, and last batches with a single sample
CLASSES = 4


class Normalized(Model):
    """An MLP with batch normalization."""

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        return Network(nn.Sequential(nn.Linear(shape[0], 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, num_classes))


#: Models, each with the shape of its inputs.
MODELS: dict[str, tuple[Model, tuple[int, ...]]] = {
    "mlp": (MLP(hidden=(6,)), (5,)),
    "cnn": (CNN(channels=(2, 3), hidden=5), (1, 4, 4)),
    "norm": (Normalized(), (5,)),
}


class Trial:
    """A small federation in memory.

    Parameters
    ----------
    algorithm
        The algorithm, not bound to a network.
    clients
        Samples of the clients, on the device of the trial.
    build
        Builds the network that the algorithm trains.
    federation
        Settings of the federation.
    width
        Number of clients that train in one call. None: clients train one after the other.
    threads
        Threads of the loop over clients.
    initial_model
        Returns the i-th initial model. By default the same as in runs.

    Attributes
    ----------
    server, client_states
        State of the server, and states of the clients by index, after the last round.
    outcomes
        Results of the clients in the last round.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: FederatedData,
        build: Callable[[], Network],
        federation: Federation,
        width: int | None = None,
        threads: int = 1,
        initial_model: Callable[[int], Tensors] | None = None,
    ) -> None:
        device = clients.device
        net = FunctionalNetwork(
            lambda: algorithm.adapt(build()), clients.dtype, device, federation.buffers, federation.precision
        )
        self.algorithm, self.clients, self.net = algorithm.bind(net, federation), clients, net
        self.executor: Executor = (
            StackExecutor(self.algorithm, clients, width) if width else LoopExecutor(self.algorithm, clients, threads)
        )
        self.initial_model = initial_model or (
            lambda index: net.make_initial_model(rng.derive_entropy(clients.seed, f"init/{index}"))
        )
        with torch.no_grad(), explain_user_errors(self.algorithm):
            server = make_initial_server_state(self._bind_algorithm(0), self.initial_model)
            client_state = make_initial_client_state(self._bind_algorithm(0), server, self.initial_model)
            self.server = move_state(make_contiguous(server), device)
            self.initial_client_state = move_state(make_contiguous(client_state), device)
        self.client_states: dict[int, State] = dict.fromkeys(
            range(len(clients)), self.initial_client_state | {FIRST: torch.ones((), device=device)}
        )
        self.outcomes: list[Outcome] = []
        self.rounds = 0

    def _bind_algorithm(self, round_number: int) -> Algorithm:
        return self.algorithm.bind_round(round_number, self.clients.seed)

    def select_participants(self, round_number: int) -> list[int]:
        """Participants of a round, in ascending order."""
        algorithm = self._bind_algorithm(round_number)
        return select_participants(algorithm, self.clients.seed, round_number, self.clients.sizes, lambda: self.server)

    def train(
        self, ids: Sequence[int] | None = None, tests: Sequence[TestSet] = (), phase: Phase = "train"
    ) -> list[Outcome]:
        """Train the next round's participants, or the clients ``ids``. The states of the trial do not change."""
        number = self.rounds + 1
        participants = self.select_participants(number) if ids is None else None
        ids = participants or ids or []
        task = ClientTask(phase, number, ids, self.client_states.__getitem__, self.send, tests, participants)
        return list(self.executor.run(task))

    def send(self, ids: Sequence[int]) -> tuple[State, State]:
        """What clients receive from the server."""
        algorithm = self._bind_algorithm(self.rounds + 1)
        return make_download(algorithm, self.server, self.clients.get_client_positions, ids)

    def collect_uploads(self, outcomes: Sequence[Outcome]) -> Uploads:
        """Uploads with weights, as the server reads them."""
        ids = [outcome.client for outcome in outcomes]
        weights = compute_aggregation_weights(self.algorithm.federation, self.clients.sizes[ids])
        return Uploads(ids, weights.tolist(), [outcome.upload for outcome in outcomes])

    def aggregate(self, uploads: Uploads) -> State:
        """The server's next state with these uploads. The trial's own state does not change."""
        with torch.no_grad(), explain_user_errors(self.algorithm):
            return make_contiguous(aggregate_uploads(self._bind_algorithm(self.rounds + 1), self.server, uploads))

    def run(self, rounds: int = 1, ids: Sequence[int] | None = None, tests: Sequence[TestSet] = ()) -> Self:
        """Run rounds with the drawn participants, or with the clients ``ids`` in each round."""
        for _ in range(rounds):
            self.outcomes = self.train(ids, tests)
            self.server = self.aggregate(self.collect_uploads(self.outcomes))
            first = torch.zeros((), device=self.clients.device)
            self.client_states |= {outcome.client: outcome.kept_state | {FIRST: first} for outcome in self.outcomes}
            self.rounds += 1
        return self

    def start(self, client: int) -> State:
        """A client's tensors at the start of the next round, before any pass."""
        with torch.no_grad(), explain_user_errors(self.algorithm):
            common, client_parts = contract.validate_download(self.algorithm, self.send([client]))
            info = self.clients.get_client_info(client, self.rounds + 1, self.client_states[client][FIRST])
            return make_client_start_state(
                self.algorithm, self.client_states[client], common | unstack_client(client_parts, 0), info
            )


def make_trial(
    algorithm: Algorithm | str,
    model: str | Callable[[], Network] = "mlp",
    clients: FederatedData | None = None,
    width: int | None = None,
    threads: int = 1,
    initial_model: Callable[[int], Tensors] | None = None,
    **settings: Any,
) -> Trial:
    """A trial of an algorithm on eight clients of unequal sizes, in float64.

    Parameters
    ----------
    algorithm
        The algorithm or its name.
    model
        A name of :data:`MODELS`, or a function that builds a network.
    clients
        Samples of the clients. By default :func:`make_synthetic_clients`.
    width, threads, initial_model
        See :class:`Trial`.
    settings
        Settings of the federation. By default half of the clients train in a round, for two epochs in batches of 4.
    """
    if isinstance(algorithm, str):
        algorithm = cast(Algorithm, registry.build_component(component.ALGORITHM, algorithm, {}))
    if isinstance(model, str):
        family, shape = MODELS[model]
        clients = clients or make_synthetic_clients(shape)
        build: Callable[[], Network] = lambda: family.build(shape, CLASSES)  # noqa: E731
    else:
        clients, build = clients or make_synthetic_clients(), model
    federation_settings: dict[str, Any] = {
        "participation": 0.5,
        "local_epochs": 2,
        "batch_size": 4,
        "dtype": "float64",
    } | settings
    return Trial(
        algorithm,
        clients,
        build,
        Federation(clients=len(clients), **federation_settings),
        width,
        threads,
        initial_model,
    )


def select_trial_device() -> torch.device:
    """Select the device of trials: the CPU, or that of the environment variable FEDPIPE_DEVICE (auto, cpu or cuda)."""
    name: Any = os.environ.get("FEDPIPE_DEVICE", "cpu")
    return torch.device("cpu") if name == "cpu" else configure_device(Execution(device=name))


def make_synthetic_clients(
    shape: tuple[int, ...] = (5,),
    sizes: Sequence[int] = SIZES,
    labels: Callable[[int], Iterable[int]] | None = None,
    seed: int = 0,
    relabel: Sequence[int] = range(CLASSES),
    **options: Any,
) -> FederatedData:
    """Make clients of unequal sizes. Most of them lack some classes, and the first one has no test samples.

    ``labels`` returns the classes of a client, which its samples take in turn. ``relabel`` has the new number of each
    class, and does not change the inputs. ``options`` are those of :class:`FederatedData`, on
    :func:`select_trial_device` by default.
    """
    options = {"device": select_trial_device()} | options
    random = np.random.default_rng(7)
    centers = random.normal(size=(CLASSES, *shape))
    get_labels = labels or (lambda client: [(client + step) % CLASSES for step in range(1 + client % CLASSES)])
    y: list[int] = []
    train, test = [], []
    for client, size in enumerate(sizes):
        classes, first = list(get_labels(client)), len(y)
        y += [classes[index % len(classes)] for index in range(size + client)]
        train.append(np.arange(first, first + size))
        test.append(np.arange(first + size, len(y)))
    x = torch.as_tensor(centers[y] + random.normal(size=(len(y), *shape)))
    new_labels = torch.tensor(list(relabel))[torch.tensor(y)]
    return FederatedData(x, new_labels, train, test, np.concatenate(test), CLASSES, seed, torch.float64, **options)


def describe_difference(actual: Any, expected: Any, tolerance: float = 0.0) -> str | None:
    """Describe the first difference of two trees of tensors, in names, shapes, dtypes or bits. None if they are equal.

    ``tolerance`` is a tolerance relative to a tensor's largest entry (or to 1). A description is, for example,
    ``client 3, upload, model, head.bias: differs by 0.1``.
    """
    difference = _find_difference(actual, expected, tolerance)
    if difference is None:
        return None
    path, description = difference
    return f"{', '.join(map(str, path))}: {description}" if path else description


def _find_difference(actual: Any, expected: Any, tolerance: float) -> tuple[list[Any], str] | None:
    """Find the path and the description of the first difference."""
    if isinstance(expected, dict):
        if type(actual) is not type(expected) or list(actual) != list(expected):
            return [], f"{list(actual) if isinstance(actual, dict) else actual} instead of {list(expected)}"
        pairs = [(name, actual[name], value) for name, value in expected.items()]
    elif isinstance(expected, (list, tuple)):
        if type(actual) is not type(expected) or len(actual) != len(expected):
            return [], f"{actual} instead of {expected}"
        pairs = [(index, *pair) for index, pair in enumerate(zip(actual, expected, strict=True))]
    else:
        description = _describe_leaf_difference(actual, expected, tolerance)
        return ([], description) if description else None
    for name, actual_value, expected_value in pairs:
        if difference := _find_difference(actual_value, expected_value, tolerance):
            path, description = difference
            return [name, *path], description
    return None


def _describe_leaf_difference(actual: Any, expected: Any, tolerance: float) -> str | None:
    if not isinstance(actual, Tensor):
        is_equal = actual == expected or abs(actual - expected) <= tolerance * max(abs(expected), 1)
        return None if is_equal else f"{actual} instead of {expected}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{describe_tensor(actual)} instead of {describe_tensor(expected)}"
    if not tolerance:
        return None if torch.equal(actual, expected) else f"differs by {(actual - expected).abs().max():.3g}"
    if not actual.numel():
        return None
    if not actual.isfinite().all():
        return "is infinite or NaN"
    gap, scale = (actual - expected).abs().max(), expected.abs().max().clamp(min=1)
    return None if gap <= tolerance * scale else f"differs by {gap:.3g}"


def assert_same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Fail with the message of :func:`describe_difference` if there is a difference."""
    message = describe_difference(actual, expected, tolerance)
    assert message is None, message
