"""Compare a round of FedAvg on MNIST's shape with the speed of the machine and with a plain PyTorch loop.

    python benchmarks/round.py [--mirror FOLDER] [--algorithm NAME] [--precision NAME] [--json FILE]

The benchmark has 20 clients, Dirichlet(0.1) over 70,000 samples, a split of 75/25 for each client, the 4-layer CNN of
cwFedAvg, batches of 10, SGD and one local epoch. Every client is evaluated on its test split after the round. Pixels
are synthetic, unless ``--mirror`` is a folder with ``mnist/*.gz``. All speeds are ratios from one run: the fraction of
the float32 rate of the same cores (25.5 MFLOP per training sample, 8.5 per evaluated sample), the time of a plain loop
over the same batches, and (on a CPU) the time of a loop with only PyTorch's kernels in their best layout. The rate is
that of large matrix products, on a CPU with the faster of BLAS and oneDNN. ``--precision`` is the precision of
fedpipe's round. All other loops use float32.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedpipe.core.storage import files as storage_files
from fedpipe.core.storage.layout import RunFiles
from fedpipe.data.assignment import Assignment, assign_samples
from fedpipe.data.partitions.dirichlet import Dirichlet
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.run import Run
from fedpipe.models.cnn4 import CNN4
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.execution import Execution
from fedpipe.settings.parser import parse_params

MFLOP_TRAINED, MFLOP_EVALUATED = 25.5, 8.5
CLASSES, CLIENTS, BATCH, RATE = 10, 20, 10, 0.005


def make_synthetic_data(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pixels of MNIST's shape."""
    rng = np.random.default_rng(0)
    labels = np.arange(num_samples) % CLASSES
    return torch.from_numpy(rng.random((num_samples, 1, 28, 28), np.float32)), torch.from_numpy(labels)


def read_mnist(mirror: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST from the upstream files in a folder."""
    pixels, labels = [], []
    for part in ("train", "t10k"):
        raw = gzip.decompress((mirror / "mnist" / f"{part}-images-idx3-ubyte.gz").read_bytes())
        pixels.append(np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28))
        raw = gzip.decompress((mirror / "mnist" / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        labels.append(np.frombuffer(raw, np.uint8, offset=8))
    x = torch.from_numpy(np.concatenate(pixels).astype(np.float32)) / 127.5 - 1
    return x, torch.from_numpy(np.concatenate(labels).astype(np.int64))


def partition(x: torch.Tensor, y: torch.Tensor, device: str) -> FederatedData:
    """Dirichlet(0.1), at least 40 samples per client, and a split of 75/25 for each."""
    scheme = Dirichlet(alpha=0.1, minimum=40)
    table = assign_samples(scheme, y.numpy(), np.zeros(len(y), bool), CLIENTS, "pooled", 0.25, seed=0)
    assignment = Assignment.from_table(table)
    return FederatedData(
        x, y, assignment.train, assignment.test, assignment.global_test, CLASSES, 0, torch.float32, device
    )


def open_run(
    folder: Path, clients: FederatedData, execution: Execution, threads: int, algorithm: str, precision: str
) -> Run:
    """A run in an empty folder."""
    federation = {"clients": CLIENTS, "batch_size": BATCH, "learning_rate": RATE, "precision": precision}
    params = parse_params(
        {
            "dataset": {"name": "mnist"},
            "model": {"name": "cnn4"},
            "federation": federation,
            "evaluation": {"protocols": ["personal-on-local"]},
            "algorithms": {algorithm: {}},
            "study": {"algorithms": [algorithm]},
        }
    )
    settings = RunSettings.from_params(params, algorithm, seed=0)
    files = RunFiles(folder / settings.key)
    storage_files.write_bytes(files.settings, settings.to_yaml().encode())
    return Run(files, execution, threads, clients=clients)


class Stopwatch:
    """Seconds spent in some functions of a module."""

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        self.seconds, self._depth = 0.0, 0
        for name in names:
            setattr(module, name, self._timed(getattr(module, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, self._depth = time.perf_counter(), self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - begin

        return timed


def matrix_rate(threads: int, device: str, library: str = "blas") -> float:
    """GFLOP/s of float32 matrix products, with one product per core at a time: the best of several attempts.

    For oneDNN the product is a 1x1 convolution.
    """
    size, products = (1024, 5) if device == "cpu" else (8192, 20)
    a, b = torch.rand(2, size, size, device=device)
    image = a.reshape(1, 32, -1, size).permute(0, 3, 1, 2)  # channels-last
    kernel = b.reshape(size, size, 1, 1)

    def work(_: int) -> None:
        torch.set_num_threads(1)
        for _ in range(products):
            a @ b if library == "blas" else F.conv2d(image, kernel)

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(8):
            begin = time.perf_counter()
            list(pool.map(work, range(threads)))
            if device != "cpu":
                torch.cuda.synchronize()
            best = max(best, threads * products * 2 * size**3 / (time.perf_counter() - begin) / 1e9)
    return best


def plain_loop(clients: FederatedData, threads: int) -> float:
    """Seconds of an epoch of every client in a simple loop: a module, torch.optim, and all cores for each batch."""
    torch.set_num_threads(threads)
    network = CNN4().build((1, 28, 28), CLASSES).to(clients.device)
    begin = time.perf_counter()
    for client in range(len(clients)):
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        order = clients.shuffle_indices(client, 1, "batches", 0)
        for first in range(0, len(order), BATCH):
            x, y = clients.gather(order[first : first + BATCH])
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    if clients.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def bare_loop(clients: FederatedData, threads: int) -> float:
    """Seconds of the same epoch with only PyTorch's kernels, and one thread and module per client.

    The kernels have their best layout: channels-last, and the weight of the layer from 1,024 to 512 by columns.
    """

    def work(client: int) -> None:
        torch.set_num_threads(1)
        network = CNN4().build((1, 28, 28), CLASSES).to(memory_format=torch.channels_last)
        wide_layer = next(layer for layer in network.modules() if isinstance(layer, nn.Linear))
        wide_layer.weight.data = wide_layer.weight.data.t().contiguous().t()
        parameters = list(network.parameters())
        x, y = clients.gather(clients.shuffle_indices(client, 1, "batches", 0))
        x = x.as_strided(x.shape, (784, 1, 28, 1))
        for first in range(0, len(y), BATCH):
            loss = F.cross_entropy(network(x[first : first + BATCH]), y[first : first + BATCH])
            gradient = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradient, alpha=-RATE)

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, sorted(range(len(clients)), key=lambda client: -clients.sizes[client])))
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path, help="folder with mnist/*.gz")
    parser.add_argument("--algorithm", default="fedavg", help="algorithm with its default parameters (default fedavg)")
    parser.add_argument(
        "--precision", default="full", choices=["full", "bfloat16"], help="precision of training (default full)"
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--samples", type=int, default=70_000, help="number of synthetic samples (default 70,000)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after one round for warming up (default 3)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="number of cores (default all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--stack", default="auto", type=lambda text: text if text == "auto" else int(text))
    options = parser.parse_args()

    files = Stopwatch(
        storage_files, tuple(name for name in vars(storage_files) if name.startswith(("write_", "read_")))
    )
    clients = partition(
        *(read_mnist(options.mirror) if options.mirror else make_synthetic_data(options.samples)), options.device
    )
    execution = Execution(device=options.device, stack=options.stack)
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(Path(folder), clients, execution, options.threads, options.algorithm, options.precision)
        begin = {}
        for number in run.run_segment(options.rounds + 1):
            begin[number] = (time.perf_counter(), files.seconds)
        (first, files_before), (last, files_after) = begin[1], begin[options.rounds + 1]
        times = [storage_files.read_json(run.files.round(n).times) for n in range(2, options.rounds + 2)]
        executor = run.executor.name
    seconds = (last - first) / options.rounds
    trained, evaluated = int(clients.sizes.sum()), sum(map(len, clients.test))
    rates = {"blas": matrix_rate(options.threads, options.device)}
    if options.device == "cpu":
        rates["onednn"] = matrix_rate(options.threads, options.device, "onednn")
    rate = max(rates.values())
    plain = plain_loop(clients, options.threads)
    work = (trained * MFLOP_TRAINED + evaluated * MFLOP_EVALUATED) / 1e3  # GFLOP
    train = sum(measured["train"] for measured in times) / options.rounds
    evaluate = sum(measured["evaluate"] for measured in times) / options.rounds
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if options.device == "cuda":
        memory = torch.cuda.max_memory_allocated() / 2**20
    figures = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU",
        "threads": options.threads,
        "executor": executor,
        "algorithm": options.algorithm,
        "precision": options.precision,
        "pixels": "MNIST" if options.mirror else "synthetic",
        "torch": torch.__version__,
        "rounds_measured": options.rounds,
        "training_samples": trained,
        "test_samples": evaluated,
        "seconds_per_round": seconds,
        "training_samples_per_second": trained / train,
        "share_training": train / seconds,
        "share_evaluation": evaluate / seconds,
        "artifacts_seconds": (files_after - files_before) / options.rounds,
        "share_artifacts": (files_after - files_before) / options.rounds / seconds,
        "peak_memory_mib": memory,
        **{f"{library}_gflops": found for library, found in rates.items()},
        "matrix_rate_share": work / seconds / rate,
        "plain_loop_seconds": plain,
        "plain_loop_over_training": plain / train,
    }
    if options.device == "cpu":
        bare = bare_loop(clients, options.threads)
        figures |= {"bare_loop_seconds": bare, "bare_loop_over_training": bare / train}
    for name, value in figures.items():
        print(f"{name:<30} {value:,.3f}" if isinstance(value, float) else f"{name:<30} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
