"""Compare fedpipe's training of the papers' models with the fastest plain PyTorch loop over the same batches.

    python benchmarks/models.py [--models NAME ...] [--seconds N] [--json FILE]

The benchmark uses one thread of a CPU. Samples are synthetic, with the shapes of the papers' data sets. A plain loop is
a module, the cross-entropy and ``torch.optim.SGD``, with contiguous or channels-last images. The faster one counts.
fedpipe (float32, and `federation.precision: bfloat16`) and the plain loops train each model in turn for half a minute.
The best processor time of each counts, so that other programs on the machine have little influence. The measured time
is a client's round of about 0.3 seconds, with at least two batches and all costs outside of its batches. All of them
keep freed memory in the process (`fedpipe/engine/torch_env/memory.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from common import make_parser, write_json

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.engine.clients.executor import FIRST, ClientTask
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.loop import LoopExecutor
from fedpipe.models.base import FunctionalNetwork, Model, Network
from fedpipe.settings.federation import Federation

RATE = 0.005
ROUND = 0.3  #: approximate seconds of a measured round


class Case(NamedTuple):
    """A model on a data set's shape."""

    model: str
    data: str
    shape: tuple[int, ...]
    classes: int
    batch: int
    parameters: dict[str, Any] = {}  # noqa: RUF012
    words: int = 0  #: number of token ids, if inputs are texts


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
    Case("vgg16", "CIFAR-10", (512,), 10, 32, {"weights": None, "frozen": False}),  # on the features of its base
    Case("bilstm", "IMDB", (200,), 2, 32, {"vocabulary": 10_000}, 10_000),
    Case("fasttext", "AG News", (100,), 4, 64, {}, 98_635),
)


def make_federated_data(case: Case, steps: int) -> FederatedData:
    """One client with this number of complete batches."""
    random, count = np.random.default_rng(0), steps * case.batch
    if case.words:
        x = torch.from_numpy(random.integers(1, case.words, (count, *case.shape)))
    else:
        x = torch.from_numpy(random.random((count, *case.shape), np.float32))
    y, everyone = torch.from_numpy(random.integers(0, case.classes, count)), np.arange(count)
    return FederatedData(x, y, [everyone], [everyone[:0]], everyone[:0], case.classes, 0)


def build_network(case: Case, family: Model) -> Network:
    """The trained network. Of VGG16, only the part above its frozen base."""
    if case.model == "vgg16":
        return family.split_frozen_base(family.build((3, 32, 32), case.classes))[1]
    return family.build(case.shape, case.classes)


def make_fedpipe_loop(case: Case, family: Model, clients: FederatedData, **settings: Any) -> Callable[[], None]:
    """A client's round with fedpipe's loop."""
    federation = Federation(clients=1, batch_size=case.batch, learning_rate=RATE, **settings)
    net = FunctionalNetwork(lambda: build_network(case, family), precision=federation.precision)
    algorithm = FedAvg().bind(net, federation)
    server, loop = algorithm.init(lambda _: net.make_initial_model(0)), LoopExecutor(algorithm, clients)

    def train() -> None:
        state = {FIRST: torch.ones(())}
        list(loop.run(ClientTask("train", 1, [0], lambda _: state, lambda ids: algorithm.send(server, ids))))

    return train


def make_plain_loop(
    case: Case, family: Model, clients: FederatedData, layout: torch.memory_format
) -> Callable[[], None]:
    """A client's round with a plain PyTorch loop over the same batches."""
    module = build_network(case, family).to(memory_format=layout).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def train() -> None:
        x, y = clients.gather_samples(clients.shuffle_indices(0, 1, "batches", 0))
        if x.dim() == 4:
            x = x.contiguous(memory_format=layout)
        for first in range(0, len(y), case.batch):
            optimizer.zero_grad()
            F.cross_entropy(module(x[first : first + case.batch]), y[first : first + case.batch]).backward()
            optimizer.step()

    return train


def measure_seconds(work: Callable[[], None]) -> float:
    """Processor time of all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def make_loops(case: Case, steps: int) -> dict[str, Callable[[], None]]:
    """All loops over the same batches."""
    torch.manual_seed(0)
    family = cast(Model, registry.build_component(component.MODEL, case.model, case.parameters))
    clients = make_federated_data(case, steps)
    loops = {
        "fedpipe": make_fedpipe_loop(case, family, clients),
        "bfloat16": make_fedpipe_loop(case, family, clients, precision="bfloat16"),
        "plain": make_plain_loop(case, family, clients, torch.contiguous_format),
    }
    if len(case.shape) == 3:
        loops["channels_last"] = make_plain_loop(case, family, clients, torch.channels_last)
    return loops


def measure(case: Case, budget: float) -> dict[str, Any]:
    """Samples per second of each loop, and the ratio of fedpipe to the fastest plain loop."""
    trial_loop = make_loops(case, 2)["fedpipe"]
    trial_loop()
    steps = max(2, round(2 * min(ROUND, budget) / measure_seconds(trial_loop)))
    times_by_loop: dict[str, list[float]] = {}
    begin, loops = time.perf_counter(), make_loops(case, steps)
    while time.perf_counter() - begin < budget or len(times_by_loop.get("fedpipe", [])) < 4:
        for name, work in loops.items():
            times_by_loop.setdefault(name, []).append(measure_seconds(work))
    rates = {name: steps * case.batch / min(times[1:]) for name, times in times_by_loop.items()}  # without the first
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
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", help="names of models (default all)")
    parser.add_argument("--seconds", type=float, default=30, help="approximate seconds per model (default 30)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| model | data | batch | fedpipe | plain | channels-last | over fastest plain | bfloat16 over float32 |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if options.models and case.model not in options.models:
            continue
        row = measure(case, options.seconds)
        rates = (row.get(f"{name}_samples_per_second") for name in ("fedpipe", "plain", "channels_last"))
        rate_cells = " | ".join("–" if rate is None else f"{rate:,.0f}" for rate in rates)
        ratios = f"{row['over_fastest_plain']:.2f} | {row['bfloat16_over_float32']:.2f}"
        print(f"| {case.model} | {case.data} | {case.batch} | {rate_cells} | {ratios} |", flush=True)
        rows.append(row)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
