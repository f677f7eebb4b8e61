"""Training of the papers' models by fedpipe, against the fastest plain PyTorch loop over the same batches.

    python benchmarks/models.py [--models NAME ...] [--seconds N] [--json FILE]

On a CPU, one thread. Samples are synthetic, of the shapes of the papers' data sets. A plain loop is a module, the
cross-entropy and ``torch.optim.SGD``, its images as they come or channels-last: the faster of the two counts. Each
model is trained by fedpipe (float32, and `federation.precision: bfloat16`) and by the plain loops in turn, over and
over for half a minute, and each one's best processor time counts: other work on the machine says little. What is timed
is a client's round of about 0.3 seconds, at least two batches, with all that it costs beside its batches. Memory that
malloc once had stays with the process for all of them alike (`fedpipe/engine/torch_env/memory.py`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.engine.clients.executor import FIRST, ClientTask
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.loop import Loop
from fedpipe.models.base import FunctionalNetwork, Model, Network
from fedpipe.settings.federation import Federation

RATE = 0.005
ROUND = 0.3  #: seconds of what is timed, about


class Case(NamedTuple):
    """A model on a data set's shape."""

    model: str
    data: str
    shape: tuple[int, ...]
    classes: int
    batch: int
    parameters: dict[str, Any] = {}  # noqa: RUF012
    words: int = 0  #: token ids, where inputs are texts


CASES = (
    Case("cnn4", "MNIST", (1, 28, 28), 10, 10),
    Case("cnn4", "CIFAR-10", (3, 32, 32), 10, 10),
    Case("cnn4", "CIFAR-10", (3, 32, 32), 10, 64),
    Case("cnn5", "CIFAR-10", (3, 32, 32), 10, 64),
    Case("feddw_cnn", "CIFAR-10", (3, 32, 32), 10, 64),
    Case("lenet", "MNIST", (1, 28, 28), 10, 64),
    Case("feddw_resnet18", "CIFAR-10", (3, 32, 32), 10, 32),
    Case("resnet18", "Tiny ImageNet", (3, 64, 64), 200, 32),
    Case("mobilenet", "CIFAR-10", (3, 32, 32), 10, 32),
    Case("shufflenet", "CIFAR-10", (3, 32, 32), 10, 32),
    Case("vgg16", "CIFAR-10", (512,), 10, 32, {"weights": None, "frozen": False}),  # above its base's features
    Case("bilstm", "IMDB", (200,), 2, 32, {"vocabulary": 10_000}, 10_000),
    Case("fasttext", "AG News", (100,), 4, 64, {}, 98_635),
)


def make_federated_data(case: Case, steps: int) -> FederatedData:
    """One client with so many whole batches."""
    random, count = np.random.default_rng(0), steps * case.batch
    if case.words:
        x = torch.from_numpy(random.integers(1, case.words, (count, *case.shape)))
    else:
        x = torch.from_numpy(random.random((count, *case.shape), np.float32))
    y, everyone = torch.from_numpy(random.integers(0, case.classes, count)), np.arange(count)
    return FederatedData(x, y, [everyone], [everyone[:0]], everyone[:0], case.classes, 0)


def network(case: Case, family: Model) -> Network:
    """What trains: of VGG16, whose base is frozen in its paper, the part above the features of that base."""
    if case.model == "vgg16":
        return family.split_frozen_base(family.build((3, 32, 32), case.classes))[1]
    return family.build(case.shape, case.classes)


def fedpipes(case: Case, family: Model, clients: FederatedData, **settings: Any) -> Callable[[], None]:
    """A client's round by fedpipe's loop."""
    federation = Federation(clients=1, batch_size=case.batch, learning_rate=RATE, **settings)
    net = FunctionalNetwork(lambda: network(case, family), precision=federation.precision)
    algorithm = FedAvg().bind(net, federation)
    server, loop = algorithm.init(lambda _: net.make_initial_model(0)), Loop(algorithm, clients)

    def train() -> None:
        kept = {FIRST: torch.ones(())}
        list(loop.run(ClientTask("train", 1, [0], lambda _: kept, lambda ids: algorithm.send(server, ids))))

    return train


def plain(case: Case, family: Model, clients: FederatedData, layout: torch.memory_format) -> Callable[[], None]:
    """The same batches as one would write it."""
    module = network(case, family).to(memory_format=layout).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def train() -> None:
        x, y = clients.gather(clients.shuffle_indices(0, 1, "batches", 0))
        if x.dim() == 4:
            x = x.contiguous(memory_format=layout)
        for first in range(0, len(y), case.batch):
            optimizer.zero_grad()
            F.cross_entropy(module(x[first : first + case.batch]), y[first : first + case.batch]).backward()
            optimizer.step()

    return train


def seconds(work: Callable[[], None]) -> float:
    """Processor time of all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def loops(case: Case, steps: int) -> dict[str, Callable[[], None]]:
    """All that train on the same batches."""
    torch.manual_seed(0)
    family = cast(Model, registry.build_component(component.MODEL, case.model, case.parameters))
    clients = make_federated_data(case, steps)
    found = {
        "fedpipe": fedpipes(case, family, clients),
        "bfloat16": fedpipes(case, family, clients, precision="bfloat16"),
        "plain": plain(case, family, clients, torch.contiguous_format),
    }
    if len(case.shape) == 3:
        found["channels_last"] = plain(case, family, clients, torch.channels_last)
    return found


def measure(case: Case, budget: float) -> dict[str, Any]:
    """Samples a second of each loop, and fedpipe's over the fastest plain loop's."""
    warm = loops(case, 2)["fedpipe"]
    warm()
    steps = max(2, round(2 * min(ROUND, budget) / seconds(warm)))
    taken: dict[str, list[float]] = {}
    begin, works = time.perf_counter(), loops(case, steps)
    while time.perf_counter() - begin < budget or len(taken.get("fedpipe", [])) < 4:
        for name, work in works.items():
            taken.setdefault(name, []).append(seconds(work))
    rates = {name: steps * case.batch / min(times[1:]) for name, times in taken.items()}  # the first one warms up
    fastest = max(rate for name, rate in rates.items() if name in {"plain", "channels_last"})
    return {
        "model": case.model,
        "data": case.data,
        "batch": case.batch,
        "steps": steps,
        **{f"{name}_samples_per_second": rate for name, rate in rates.items()},
        "over_fastest_plain": rates["fedpipe"] / fastest,
        "bfloat16_over_float32": rates["bfloat16"] / rates["fedpipe"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="some of them (default all)")
    parser.add_argument("--seconds", type=float, default=30, help="of a model and its loops, about (default 30)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    print("| model | data | batch | fedpipe | plain | channels-last | over fastest plain | bfloat16 over float32 |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if options.models and case.model not in options.models:
            continue
        row = measure(case, options.seconds)
        rates = (row.get(f"{name}_samples_per_second") for name in ("fedpipe", "plain", "channels_last"))
        told = " | ".join("–" if rate is None else f"{rate:,.0f}" for rate in rates)
        ratios = f"{row['over_fastest_plain']:.2f} | {row['bfloat16_over_float32']:.2f}"
        print(f"| {case.model} | {case.data} | {case.batch} | {told} | {ratios} |", flush=True)
        found.append(row)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
