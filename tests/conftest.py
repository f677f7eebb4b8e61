"""Small federations in memory, for tests of algorithms and executors: the engine's round without its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedpipe import registry, rng
from fedpipe.algorithms.base import Algorithm, State, Uploads
from fedpipe.config import Federation
from fedpipe.engine.clients import Clients
from fedpipe.engine.executor import Outcome, Phase, Test, init_client, start_client
from fedpipe.engine.loop import Loop
from fedpipe.engine.server import aggregate, init_server
from fedpipe.engine.stack import Stack
from fedpipe.engine.trees import to_host, unstack
from fedpipe.models.base import Model, Net, Network
from fedpipe.models.cnn import CNN
from fedpipe.models.mlp import MLP
from fedpipe.tensors import Tensors

#: The same examples on every machine, however slow it is.
hypothesis.settings.register_profile(
    "fedpipe", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fedpipe")

SIZES = (1, 5, 9, 12, 7, 16, 3, 20)  #: of one sample, of whole batches, of batches that end with a single sample
CLASSES = 4


class Normalized(Model):
    """An MLP with batch normalization."""

    def build(self, shape: tuple[int, ...], classes: int) -> Network:
        """Linear, BatchNorm and ReLU; then the head."""
        return Network(nn.Sequential(nn.Linear(*shape, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, classes))


MODELS: dict[str, tuple[Model, tuple[int, ...]]] = {
    "mlp": (MLP(hidden=(6,)), (5,)),
    "cnn": (CNN(channels=(2, 3), hidden=5), (1, 4, 4)),
    "norm": (Normalized(), (5,)),
}


class Trial:
    """A federation at work; ``server`` and ``kept`` are the states after the rounds so far."""

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        build: Callable[[], Network],
        federation: Federation,
        width: int | None,
        threads: int,
        fresh: Callable[[int], Tensors] | None,
    ) -> None:
        net = Net(lambda: algorithm.adapt(build()), clients.dtype, buffers=federation.buffers)
        self.algorithm, self.clients, self.net = algorithm.bind(net, federation), clients, net
        self.executor: Any = Stack(self.algorithm, clients, width) if width else Loop(self.algorithm, clients, threads)
        self.fresh = fresh or (lambda index: net.fresh(rng.entropy(clients.seed, f"init/{index}")))
        with torch.no_grad():
            self.server: State = to_host(init_server(self.algorithm, self.fresh))
            self.initial: State = to_host(init_client(self.algorithm, self.server, self.fresh))
        self.kept: dict[int, State] = dict.fromkeys(range(len(clients)), self.initial)
        self.outcomes: list[Outcome] = []  #: of the last round
        self.rounds = 0

    def participants(self, number: int) -> list[int]:
        """The clients of a round, in ascending order."""
        draw = rng.generator(self.clients.seed, "participants", number)
        federation = self.algorithm.federation
        return sorted(draw.choice(federation.clients, federation.participants, replace=False).tolist())

    def train(
        self, ids: Sequence[int] | None = None, tests: Sequence[Test] = (), phase: Phase = "train"
    ) -> list[Outcome]:
        """What the next round's participants, or these clients, send; changes nothing."""
        number = self.rounds + 1
        ids = self.participants(number) if ids is None else ids
        return list(self.executor.run(phase, number, ids, self.kept.__getitem__, self.send, tests))

    def send(self, ids: Sequence[int]) -> tuple[State, State]:
        """What clients receive from the server."""
        return self.algorithm.send(self.server, ids)

    def uploads(self, outcomes: Sequence[Outcome]) -> Uploads:
        """As the server reads them."""
        ids = [outcome.client for outcome in outcomes]
        by_count = self.algorithm.federation.weighting == "count"
        weights = self.clients.sizes[ids].tolist() if by_count else [1] * len(ids)
        return Uploads(ids, weights, [outcome.upload for outcome in outcomes])

    def aggregate(self, uploads: Uploads) -> State:
        """The server's next state, were these the round's uploads."""
        with torch.no_grad():
            return to_host(aggregate(self.algorithm, self.server, uploads))

    def run(self, rounds: int = 1, ids: Sequence[int] | None = None, tests: Sequence[Test] = ()) -> Trial:
        """So many rounds, with their own participants or with these clients."""
        for _ in range(rounds):
            self.outcomes = self.train(ids, tests)
            self.server = self.aggregate(self.uploads(self.outcomes))
            self.kept |= {outcome.client: outcome.keep for outcome in self.outcomes}
            self.rounds += 1
        return self

    def start(self, client: int) -> State:
        """A client's tensors as it begins the next round, before any pass."""
        with torch.no_grad():
            common, own = self.send([client])
            facts = self.clients.facts(client, self.rounds + 1)
            return start_client(self.algorithm, self.kept[client], common | unstack(own, 0), facts)


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
    y, train, test = [], [], []
    for client, size in enumerate(sizes):
        classes, begin = list(owned(client)), len(y)
        y += [classes[index % len(classes)] for index in range(size + client)]
        train.append(np.arange(begin, begin + size))
        test.append(np.arange(begin + size, len(y)))
    x = torch.as_tensor(centers[y] + random.normal(size=(len(y), *shape)))
    classes = torch.tensor(list(relabel))[torch.tensor(y)]
    return Clients(x, classes, train, test, np.concatenate(test), CLASSES, seed, torch.float64, **more)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_proxy() -> Iterator[None]:
    """Servers of tests are on this machine, which no proxy of its user's need reach."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield


@pytest.fixture
def make_clients() -> Callable[..., Clients]:
    """See :func:`synthetic`."""
    return synthetic


@pytest.fixture
def make_trial() -> Callable[..., Trial]:
    """A factory of trials: an algorithm or its name, a model's name or what builds a network, and any setting.

    ``width`` clients train in a stack (None: in the loop); the others are settings of the federation.
    """

    def make(
        algorithm: Algorithm | str,
        model: str | Callable[[], Network] = "mlp",
        clients: Clients | None = None,
        width: int | None = None,
        threads: int = 1,
        fresh: Callable[[int], Tensors] | None = None,
        **settings: Any,
    ) -> Trial:
        if isinstance(algorithm, str):
            algorithm = registry.build(registry.ALGORITHM, algorithm, {})  # type: ignore[assignment]
        if isinstance(model, str):
            family, shape = MODELS[model]
            clients = clients or synthetic(shape)
            build: Callable[[], Network] = lambda: family.build(shape, CLASSES)  # noqa: E731
        else:
            clients, build = clients or synthetic(), model
        chosen = {"participation": 0.5, "local_epochs": 2, "batch_size": 4, "dtype": "float64"} | settings
        federation = Federation(clients=len(clients), **chosen)
        return Trial(algorithm, clients, build, federation, width, threads, fresh)  # type: ignore[arg-type]

    return make


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """``assert_same(a, b)``: two trees of tensors have the same names, shapes, dtypes and bits.

    With ``within``, the largest difference of two tensors may be that share of their largest entry (or of 1).
    """

    def check(found: Any, wanted: Any, within: float = 0.0) -> None:
        (ours, structure), (theirs, other) = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
        assert structure == other, f"{structure} is not {other}"
        for ours_each, theirs_each in zip(ours, theirs, strict=True):
            _compare(ours_each, theirs_each, within)

    return check


def _compare(found: Any, wanted: Any, within: float) -> None:
    if not isinstance(found, Tensor):
        assert found == wanted or abs(found - wanted) <= within * max(abs(wanted), 1)
        return
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    if not within:
        assert torch.equal(found, wanted), f"differs by {(found - wanted).abs().max()}"
    elif found.numel():
        assert found.isfinite().all()
        difference, scale = (found - wanted).abs().max(), wanted.abs().max().clamp(min=1)
        assert difference <= within * scale, f"differs by {difference}"
