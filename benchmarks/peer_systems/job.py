"""The cases, and what the process of a system reads and measures."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedpipe.data.assignment import Assignment, assign_samples
from fedpipe.data.datasets.base import PublishedImages
from fedpipe.data.datasets.cifar10 import CIFAR10
from fedpipe.data.datasets.mnist import MNIST
from fedpipe.data.partitions.base import Scheme
from fedpipe.data.partitions.dirichlet import Dirichlet
from fedpipe.data.partitions.iid import IID
from fedpipe.data.sources.fetch import Fetcher
from fedpipe.models.base import Model, Network
from fedpipe.models.cnn4 import CNN4
from fedpipe.models.mlp import MLP
from fedpipe.models.resnet18 import ResNet18

CLASSES = 10


class Case(NamedTuple):
    """A data set, its partition and the settings of FedAvg."""

    title: str
    dataset: PublishedImages
    scheme: Scheme
    model: Model
    clients: int
    participation: float
    batch_size: int
    learning_rate: float
    tolerance: float  #: points of accuracy, above the effect of other orders of the samples


CASES = {
    "mnist": Case(
        "MNIST, Dir(0.1), 20 clients, cnn4, batches of 10",
        *(MNIST(), Dirichlet(alpha=0.1, minimum=40), CNN4(), 20, 1.0, 10, 0.005, 5.0),
    ),
    "cifar10": Case(
        "CIFAR-10, Dir(0.5), 10 of 100 clients, ResNet-18, batches of 64",
        *(CIFAR10(), Dirichlet(alpha=0.5, minimum=90), ResNet18(), 100, 0.1, 64, 0.05, 12.0),
    ),
    "clients": Case(
        "MNIST, IID, 10 of 1,000 clients, mlp, batches of 10", *(MNIST(), IID(), MLP(), 1000, 0.01, 10, 0.01, 5.0)
    ),
}


def read_images(case: Case, mirror: str | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images in bytes and classes of a case's data set."""
    dataset, fetcher = case.dataset, Fetcher(mirror)
    sha256 = dataset.compute_unpinned_sha256(fetcher)  # of the mirror's substitute file, if there is one
    samples = (replace(dataset, sha256=sha256) if sha256 else dataset).load(fetcher)
    return samples.x, samples.y


def make_synthetic_images(case: Case) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images of the data set's shape and number, which are the noisy template of their class."""
    rng, count = np.random.default_rng(0), case.dataset.size
    labels = rng.integers(0, CLASSES, count)
    templates = rng.integers(0, 128, (CLASSES, *case.dataset.shape), np.uint8)
    return templates[labels] + rng.integers(0, 128, (count, *case.dataset.shape), np.uint8), labels


def assign_clients(case: Case, labels: np.ndarray[Any, Any]) -> dict[str, list[Tensor]]:
    """Indices of each client's samples for "train", a multiple of the batch size, and for "test"."""
    table = assign_samples(case.scheme, labels, np.zeros(len(labels), bool), case.clients, "pooled", 0.25, seed=0)
    assignment, size = Assignment.from_table(table), case.batch_size
    train = [samples[: len(samples) // size * size] for samples in assignment.train]
    return {"train": list(map(torch.from_numpy, train)), "test": list(map(torch.from_numpy, assignment.test))}


@dataclass
class Job:
    """The files that a process trains on, and its results."""

    folder: str
    case_name: str
    rounds: int  #: measured rounds
    threads: int
    seed: int = 0  #: of the order of the samples
    clone: str | None = None
    device: str = "cpu"  #: cpu or cuda

    @property
    def case(self) -> Case:
        """The job's case."""
        return CASES[self.case_name]

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """All images in bytes, which are read when they are used, and all classes."""
        return np.load(Path(self.folder, "x.npy"), mmap_mode="r"), np.load(Path(self.folder, "y.npy"))

    @functools.cached_property
    def plan(self) -> dict[str, Any]:
        """Samples of each client, participants of each round, and the initial parameters."""
        return dict(torch.load(Path(self.folder, "plan.pt"), weights_only=True))

    def list_samples(self, part: str, client: int) -> np.ndarray[Any, Any]:
        """Indices of a client's samples for "train" or "test"."""
        indices: np.ndarray[Any, Any] = self.plan[part][client].numpy()
        return indices

    def gather(self, indices: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        """Images with values in [-1, 1], and classes."""
        x, y = self.arrays
        return torch.from_numpy(x[indices]).float() / 127.5 - 1, torch.from_numpy(y[indices])

    def build_network(self) -> Network:
        """Build the initial network as a plain PyTorch module."""
        network = self.case.model.build(self.case.dataset.shape, CLASSES)
        load_parameters(network, self.plan["initial"])
        for module in network.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = True
        return network


def load_parameters(network: nn.Module, values: Sequence[Tensor]) -> None:
    """Load trained parameters in the network's order."""
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), values, strict=True):
            parameter.copy_(value)


def read_time() -> float:
    """Read the clock, after all work of the GPU if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Seconds of each round, and of the evaluation in it."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.evaluations: list[float] = []
        self._begin = self._evaluation = self._evaluation_begin = 0.0

    def begin_round(self, *_: Any) -> None:
        """Begin a round."""
        self._begin, self._evaluation = read_time(), 0.0

    def end_round(self, *_: Any) -> None:
        """End a round."""
        self.rounds.append(read_time() - self._begin)
        self.evaluations.append(self._evaluation)

    def begin_evaluation(self, *_: Any) -> None:
        """Begin an evaluation."""
        self._evaluation_begin = read_time()

    def end_evaluation(self, *_: Any) -> None:
        """End an evaluation."""
        self._evaluation += read_time() - self._evaluation_begin


def add_hooks(
    owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Call other functions before and after a method, with its arguments."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before:
            before(*args)
        result = function(*args, **kwargs)
        if after:
            after(*args)
        return result

    setattr(owner, name, call)
