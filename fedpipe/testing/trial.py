"""Small federations in memory: the engine's round without its files."""

from __future__ import annotations

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
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import FIRST, ClientTask, Executor, Outcome, Phase, Test, init_client, start_client
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.loop import Loop
from fedpipe.engine.server.server import aggregate_uploads, init_server
from fedpipe.engine.stack.stack import Stack
from fedpipe.engine.torch_env.trees import make_contiguous, unstack_client
from fedpipe.engine.weights import compute_weights, draw_participants
from fedpipe.models.base import FunctionalNetwork, Model, Network
from fedpipe.models.cnn import CNN
from fedpipe.models.mlp import MLP
from fedpipe.settings.federation import Federation

SIZES = (1, 5, 9, 12, 7, 16, 3, 20)  #: of one sample, of whole batches, of batches that end with a single sample
CLASSES = 4


class Normalized(Model):
    """An MLP with batch normalization."""

    @override
    def build(self, shape: tuple[int, ...], classes: int) -> Network:
        """Linear, BatchNorm and ReLU; then the head."""
        return Network(nn.Sequential(nn.Linear(shape[0], 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, classes))


#: Families of networks, each with the shape of its inputs.
MODELS: dict[str, tuple[Model, tuple[int, ...]]] = {
    "mlp": (MLP(hidden=(6,)), (5,)),
    "cnn": (CNN(channels=(2, 3), hidden=5), (1, 4, 4)),
    "norm": (Normalized(), (5,)),
}


class Trial:
    """A federation at work.

    Parameters
    ----------
    algorithm
        Not bound yet.
    clients
        Their samples.
    build
        Makes the network that the algorithm trains.
    federation
        The settings.
    width
        Clients that train in one call; None: one after the other.
    threads
        Of the loop.
    fresh
        Gives the i-th initial model; by default as runs do.

    Attributes
    ----------
    server, kept
        The states after the rounds so far.
    outcomes
        Of the last round.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: FederatedData,
        build: Callable[[], Network],
        federation: Federation,
        width: int | None = None,
        threads: int = 1,
        fresh: Callable[[int], Tensors] | None = None,
    ) -> None:
        buffers, precision = federation.buffers, federation.precision
        net = FunctionalNetwork(lambda: algorithm.adapt(build()), clients.dtype, buffers=buffers, precision=precision)
        self.algorithm, self.clients, self.net = algorithm.bind(net, federation), clients, net
        self.executor: Executor = (
            Stack(self.algorithm, clients, width) if width else Loop(self.algorithm, clients, threads)
        )
        self.fresh = fresh or (lambda index: net.make_initial_model(rng.entropy(clients.seed, f"init/{index}")))
        with torch.no_grad(), contract.explain_user_errors(self.algorithm):
            self.server = make_contiguous(init_server(self.algorithm, self.fresh))
            self.initial = make_contiguous(init_client(self.algorithm, self.server, self.fresh))
        self.kept: dict[int, State] = dict.fromkeys(range(len(clients)), self.initial | {FIRST: torch.ones(())})
        self.outcomes: list[Outcome] = []
        self.rounds = 0

    def participants(self, number: int) -> list[int]:
        """The clients of a round, in ascending order."""
        return draw_participants(self.algorithm.federation, self.clients.seed, number)

    def train(
        self, ids: Sequence[int] | None = None, tests: Sequence[Test] = (), phase: Phase = "train"
    ) -> list[Outcome]:
        """What the next round's participants, or these of all clients, send; changes nothing."""
        number = self.rounds + 1
        participants = self.participants(number) if ids is None else None
        ids = participants or ids or []
        task = ClientTask(phase, number, ids, self.kept.__getitem__, self.send, tests, participants)
        return list(self.executor.run(task))

    def send(self, ids: Sequence[int]) -> tuple[State, State]:
        """What clients receive from the server."""
        return self.algorithm.bind_round(self.rounds + 1).send(self.server, ids)

    def uploads(self, outcomes: Sequence[Outcome]) -> Uploads:
        """As the server reads them."""
        ids = [outcome.client for outcome in outcomes]
        weights = compute_weights(self.algorithm.federation, self.clients.sizes[ids])
        return Uploads(ids, weights.tolist(), [outcome.upload for outcome in outcomes])

    def aggregate(self, uploads: Uploads) -> State:
        """The server's next state, were these the round's uploads."""
        with torch.no_grad(), contract.explain_user_errors(self.algorithm):
            return make_contiguous(aggregate_uploads(self.algorithm.bind_round(self.rounds + 1), self.server, uploads))

    def run(self, rounds: int = 1, ids: Sequence[int] | None = None, tests: Sequence[Test] = ()) -> Self:
        """So many rounds, with their own participants or with these clients."""
        for _ in range(rounds):
            self.outcomes = self.train(ids, tests)
            self.server = self.aggregate(self.uploads(self.outcomes))
            self.kept |= {outcome.client: outcome.keep | {FIRST: torch.zeros(())} for outcome in self.outcomes}
            self.rounds += 1
        return self

    def start(self, client: int) -> State:
        """A client's tensors as it begins the next round, before any pass."""
        with torch.no_grad(), contract.explain_user_errors(self.algorithm):
            common, client_parts = contract.validate_download(self.algorithm, self.send([client]))
            info = self.clients.get_client_info(client, self.rounds + 1, self.kept[client][FIRST])
            return start_client(self.algorithm, self.kept[client], common | unstack_client(client_parts, 0), info)


def make_trial(
    algorithm: Algorithm | str,
    model: str | Callable[[], Network] = "mlp",
    clients: FederatedData | None = None,
    width: int | None = None,
    threads: int = 1,
    fresh: Callable[[int], Tensors] | None = None,
    **settings: Any,
) -> Trial:
    """A trial of an algorithm on eight clients of unequal sizes, in float64.

    Parameters
    ----------
    algorithm
        It, or its name.
    model
        A name of :data:`MODELS`, or what builds a network.
    clients
        By default :func:`synthetic` ones.
    width, threads, fresh
        See :class:`Trial`.
    settings
        Of the federation; by default half of the clients train in a round, two epochs in batches of 4.
    """
    if isinstance(algorithm, str):
        algorithm = cast(Algorithm, registry.build_component(component.ALGORITHM, algorithm, {}))
    if isinstance(model, str):
        family, shape = MODELS[model]
        clients = clients or synthetic(shape)
        build: Callable[[], Network] = lambda: family.build(shape, CLASSES)  # noqa: E731
    else:
        clients, build = clients or synthetic(), model
    federation_settings: dict[str, Any] = {
        "participation": 0.5,
        "local_epochs": 2,
        "batch_size": 4,
        "dtype": "float64",
    } | settings
    return Trial(
        algorithm, clients, build, Federation(clients=len(clients), **federation_settings), width, threads, fresh
    )


def synthetic(
    shape: tuple[int, ...] = (5,),
    sizes: Sequence[int] = SIZES,
    labels: Callable[[int], Iterable[int]] | None = None,
    seed: int = 0,
    relabel: Sequence[int] = range(CLASSES),
    **more: Any,
) -> FederatedData:
    """Clients of unequal sizes, of which most lack some classes; the first one has no test samples.

    ``labels`` gives the classes that a client owns, which its samples take in turn; ``relabel`` the new name of each
    class, with the inputs as they were.
    """
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
    return FederatedData(x, new_labels, train, test, np.concatenate(test), CLASSES, seed, torch.float64, **more)


def difference(actual: Any, expected: Any, within: float = 0.0) -> str | None:
    """Where two trees of tensors differ in names, shapes, dtypes or bits; None where they don't.

    With ``within``, the largest difference of two tensors may be that share of their largest entry (or of 1).
    """
    if isinstance(expected, dict):
        if type(actual) is not type(expected) or list(actual) != list(expected):
            return f"has {list(actual) if isinstance(actual, dict) else actual}, not {list(expected)}"
        pairs = [(name, actual[name], value) for name, value in expected.items()]
    elif isinstance(expected, (list, tuple)):
        if type(actual) is not type(expected) or len(actual) != len(expected):
            return f"is {actual}, not {expected}"
        pairs = [(index, *pair) for index, pair in enumerate(zip(actual, expected, strict=True))]
    else:
        return _difference(actual, expected, within)
    for name, one, two in pairs:
        if message := difference(one, two, within):
            return f"{name} {message}" if not message.startswith(("has", "is", "differs")) else f"{name}: {message}"
    return None


def _difference(actual: Any, expected: Any, within: float) -> str | None:
    if not isinstance(actual, Tensor):
        is_equal = actual == expected or abs(actual - expected) <= within * max(abs(expected), 1)
        return None if is_equal else f"is {actual}, not {expected}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return (
            f"is {actual.dtype} of shape {tuple(actual.shape)}, not {expected.dtype} of shape {tuple(expected.shape)}"
        )
    if not within:
        return None if torch.equal(actual, expected) else f"differs by {(actual - expected).abs().max():.3g}"
    if not actual.numel():
        return None
    if not actual.isfinite().all():
        return "is not finite"
    gap, scale = (actual - expected).abs().max(), expected.abs().max().clamp(min=1)
    return None if gap <= within * scale else f"differs by {gap:.3g}"


def assert_same(actual: Any, expected: Any, within: float = 0.0) -> None:
    """Fail with :func:`difference` where there is one."""
    message = difference(actual, expected, within)
    assert message is None, message
