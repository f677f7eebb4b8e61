"""Small federations in memory: the engine's round without its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedpipe import registry, rng
from fedpipe.algorithms.base import Algorithm, State, Uploads
from fedpipe.config import Federation
from fedpipe.engine import contract
from fedpipe.engine.clients import Clients
from fedpipe.engine.executor import Executor, Outcome, Phase, Test, init_client, start_client
from fedpipe.engine.loop import Loop
from fedpipe.engine.server import aggregate, init_server
from fedpipe.engine.stack import Stack
from fedpipe.engine.trees import contiguous, unstack
from fedpipe.models.base import Model, Net, Network
from fedpipe.models.cnn import CNN
from fedpipe.models.mlp import MLP
from fedpipe.tensors import Tensors

SIZES = (1, 5, 9, 12, 7, 16, 3, 20)  #: of one sample, of whole batches, of batches that end with a single sample
CLASSES = 4


class Normalized(Model):
    """An MLP with batch normalization."""

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
        clients: Clients,
        build: Callable[[], Network],
        federation: Federation,
        width: int | None = None,
        threads: int = 1,
        fresh: Callable[[int], Tensors] | None = None,
    ) -> None:
        buffers, precision = federation.buffers, federation.precision
        net = Net(lambda: algorithm.adapt(build()), clients.dtype, buffers=buffers, precision=precision)
        self.algorithm, self.clients, self.net = algorithm.bind(net, federation), clients, net
        self.executor: Executor = (
            Stack(self.algorithm, clients, width) if width else Loop(self.algorithm, clients, threads)
        )
        self.fresh = fresh or (lambda index: net.fresh(rng.entropy(clients.seed, f"init/{index}")))
        with torch.no_grad(), contract.told(self.algorithm):
            self.server = contiguous(init_server(self.algorithm, self.fresh))
            self.initial = contiguous(init_client(self.algorithm, self.server, self.fresh))
        self.kept: dict[int, State] = dict.fromkeys(range(len(clients)), self.initial)
        self.outcomes: list[Outcome] = []
        self.rounds = 0

    def participants(self, number: int) -> list[int]:
        """The clients of a round, in ascending order."""
        draw = rng.generator(self.clients.seed, "participants", number)
        federation = self.algorithm.federation
        return sorted(draw.choice(federation.clients, federation.participants, replace=False).tolist())

    def train(
        self, ids: Sequence[int] | None = None, tests: Sequence[Test] = (), phase: Phase = "train"
    ) -> list[Outcome]:
        """What the next round's participants, or these of all clients, send; changes nothing."""
        number = self.rounds + 1
        among = self.participants(number) if ids is None else None
        ids = among or ids or []
        return list(self.executor.run(phase, number, ids, self.kept.__getitem__, self.send, tests, among))

    def send(self, ids: Sequence[int]) -> tuple[State, State]:
        """What clients receive from the server."""
        return self.algorithm.in_round(self.rounds + 1).send(self.server, ids)

    def uploads(self, outcomes: Sequence[Outcome]) -> Uploads:
        """As the server reads them."""
        ids = [outcome.client for outcome in outcomes]
        by_count = self.algorithm.federation.weighting == "count"
        weights = self.clients.sizes[ids].tolist() if by_count else [1] * len(ids)
        return Uploads(ids, weights, [outcome.upload for outcome in outcomes])

    def aggregate(self, uploads: Uploads) -> State:
        """The server's next state, were these the round's uploads."""
        with torch.no_grad(), contract.told(self.algorithm):
            return contiguous(aggregate(self.algorithm.in_round(self.rounds + 1), self.server, uploads))

    def run(self, rounds: int = 1, ids: Sequence[int] | None = None, tests: Sequence[Test] = ()) -> Self:
        """So many rounds, with their own participants or with these clients."""
        for _ in range(rounds):
            self.outcomes = self.train(ids, tests)
            self.server = self.aggregate(self.uploads(self.outcomes))
            self.kept |= {outcome.client: outcome.keep for outcome in self.outcomes}
            self.rounds += 1
        return self

    def start(self, client: int) -> State:
        """A client's tensors as it begins the next round, before any pass."""
        with torch.no_grad(), contract.told(self.algorithm):
            common, own = contract.sent(self.algorithm, self.send([client]))
            info = self.clients.facts(client, self.rounds + 1)
            return start_client(self.algorithm, self.kept[client], common | unstack(own, 0), info)


def make_trial(
    algorithm: Algorithm | str,
    model: str | Callable[[], Network] = "mlp",
    clients: Clients | None = None,
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
        algorithm = cast(Algorithm, registry.build(registry.ALGORITHM, algorithm, {}))
    if isinstance(model, str):
        family, shape = MODELS[model]
        clients = clients or synthetic(shape)
        build: Callable[[], Network] = lambda: family.build(shape, CLASSES)  # noqa: E731
    else:
        clients, build = clients or synthetic(), model
    chosen: dict[str, Any] = {"participation": 0.5, "local_epochs": 2, "batch_size": 4, "dtype": "float64"} | settings
    return Trial(algorithm, clients, build, Federation(clients=len(clients), **chosen), width, threads, fresh)


def synthetic(
    shape: tuple[int, ...] = (5,),
    sizes: Sequence[int] = SIZES,
    labels: Callable[[int], Iterable[int]] | None = None,
    seed: int = 0,
    relabel: Sequence[int] = range(CLASSES),
    **more: Any,
) -> Clients:
    """Clients of unequal sizes, of which most lack some classes; the first one has no test samples.

    ``labels`` gives the classes that a client owns, which its samples take in turn; ``relabel`` the new name of each
    class, with the inputs as they were.
    """
    random = np.random.default_rng(7)
    centers = random.normal(size=(CLASSES, *shape))
    owned = labels or (lambda client: [(client + step) % CLASSES for step in range(1 + client % CLASSES)])
    y: list[int] = []
    train, test = [], []
    for client, size in enumerate(sizes):
        classes, begin = list(owned(client)), len(y)
        y += [classes[index % len(classes)] for index in range(size + client)]
        train.append(np.arange(begin, begin + size))
        test.append(np.arange(begin + size, len(y)))
    x = torch.as_tensor(centers[y] + random.normal(size=(len(y), *shape)))
    renamed = torch.tensor(list(relabel))[torch.tensor(y)]
    return Clients(x, renamed, train, test, np.concatenate(test), CLASSES, seed, torch.float64, **more)


def difference(found: Any, wanted: Any, within: float = 0.0) -> str | None:
    """Where two trees of tensors differ in names, shapes, dtypes or bits; None where they don't.

    With ``within``, the largest difference of two tensors may be that share of their largest entry (or of 1).
    """
    if isinstance(wanted, dict):
        if type(found) is not type(wanted) or list(found) != list(wanted):
            return f"has {list(found) if isinstance(found, dict) else found}, not {list(wanted)}"
        pairs = [(name, found[name], value) for name, value in wanted.items()]
    elif isinstance(wanted, (list, tuple)):
        if type(found) is not type(wanted) or len(found) != len(wanted):
            return f"is {found}, not {wanted}"
        pairs = [(index, *pair) for index, pair in enumerate(zip(found, wanted, strict=True))]
    else:
        return _difference(found, wanted, within)
    for name, one, two in pairs:
        if told := difference(one, two, within):
            return f"{name} {told}" if not told.startswith(("has", "is", "differs")) else f"{name}: {told}"
    return None


def _difference(found: Any, wanted: Any, within: float) -> str | None:
    if not isinstance(found, Tensor):
        same = found == wanted or abs(found - wanted) <= within * max(abs(wanted), 1)
        return None if same else f"is {found}, not {wanted}"
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"is {found.dtype} of shape {tuple(found.shape)}, not {wanted.dtype} of shape {tuple(wanted.shape)}"
    if not within:
        return None if torch.equal(found, wanted) else f"differs by {(found - wanted).abs().max():.3g}"
    if not found.numel():
        return None
    if not found.isfinite().all():
        return "is not finite"
    gap, scale = (found - wanted).abs().max(), wanted.abs().max().clamp(min=1)
    return None if gap <= within * scale else f"differs by {gap:.3g}"


def assert_same(found: Any, wanted: Any, within: float = 0.0) -> None:
    """Fail with :func:`difference` where there is one."""
    told = difference(found, wanted, within)
    assert told is None, told
