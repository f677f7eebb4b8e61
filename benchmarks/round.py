"""Compare a round of FedAvg with the speed of the machine and with a plain PyTorch loop.

    python benchmarks/round.py [--mirror FOLDER] [--algorithm NAME] [--precision NAME] [--json FILE]
    python benchmarks/round.py --model resnet18 --clients 100 --stack 1 8 32 --graphs both --ladder both

The benchmark has 20 clients, Dirichlet(0.1) over 70,000 samples of MNIST's shape, a split of 75/25 for each client, the
4-layer CNN of cwFedAvg, batches of 10, SGD and one local epoch. ``--model resnet18`` has 60,000 samples of CIFAR-10's
shape and batches of 64. Every client is evaluated on its test split after the round. Pixels are synthetic, unless
``--mirror`` is a folder with ``mnist/*.gz``. All speeds are ratios from one run: the fraction of the float32 rate of
the same cores, the time of a plain loop over the same batches, and (for cnn4 on a CPU) the time of a loop with only
PyTorch's kernels in their best layout. The rate is that of large matrix products, on a CPU with the faster of BLAS and
oneDNN. ``--precision`` is the precision of fedpipe's round. All other loops use float32.

``--stack``, ``--graphs`` and ``--ladder`` can give several variants, which run one after the other. The figures at the
top are of the first one, and ``variants`` has all of them. ``digest`` is the SHA-256 of all states and tables that a
variant writes, so two variants with the same digest have the same bits. If a variant fails, its entry has the error,
the others are measured, and the exit status is 1. ``--json`` is written after each variant.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import itertools
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from common import make_parser, open_run, write_json
from torch import nn

from fedpipe.core.storage import files as storage_files
from fedpipe.data.assignment import Assignment, assign_samples
from fedpipe.data.partitions.dirichlet import Dirichlet
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.run import Run
from fedpipe.engine.stack import schedule
from fedpipe.engine.stack.stack import StackExecutor
from fedpipe.models.base import Model
from fedpipe.models.cnn4 import CNN4
from fedpipe.models.resnet18 import ResNet18
from fedpipe.settings.execution import Execution

CLASSES, RATE, MINIMUM = 10, 0.005, 40


class Workload(NamedTuple):
    """A model and its data."""

    model: Model
    dataset: str
    shape: tuple[int, ...]
    samples: int
    batch: int
    mflop_trained: float  #: floating-point operations per training sample
    mflop_evaluated: float


WORKLOADS = {
    "cnn4": Workload(CNN4(), "mnist", (1, 28, 28), 70_000, 10, 25.5, 8.5),
    "resnet18": Workload(ResNet18(), "cifar10", (3, 32, 32), 60_000, 64, 217.3, 74.0),
}


class Variant(NamedTuple):
    """How fedpipe trains the clients."""

    stack: int | str
    graphs: bool
    ladder: bool  #: a stack becomes narrower as its clients finish


def make_synthetic_data(shape: tuple[int, ...], num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pixels."""
    rng = np.random.default_rng(0)
    labels = np.arange(num_samples) % CLASSES
    return torch.from_numpy(rng.random((num_samples, *shape), np.float32)), torch.from_numpy(labels)


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


def partition(x: torch.Tensor, y: torch.Tensor, num_clients: int, device: str) -> FederatedData:
    """Dirichlet(0.1), at least 40 samples per client (or half of the mean), and a split of 75/25 for each."""
    scheme = Dirichlet(alpha=0.1, minimum=min(MINIMUM, len(y) // num_clients // 2))
    table = assign_samples(scheme, y.numpy(), np.zeros(len(y), bool), num_clients, "pooled", 0.25, seed=0)
    assignment = Assignment.from_table(table)
    return FederatedData(
        x, y, assignment.train, assignment.test, assignment.global_test, CLASSES, 0, torch.float32, device
    )


def make_settings(clients: FederatedData, options: argparse.Namespace) -> dict[str, Any]:
    """Make the sections of params.yaml of a run."""
    workload = WORKLOADS[options.model]
    federation = {"clients": len(clients), "batch_size": workload.batch, "learning_rate": RATE}
    return {
        "dataset": {"name": workload.dataset},
        "model": {"name": options.model},
        "federation": federation | {"precision": options.precision},
        "evaluation": {"protocols": ["personal-on-local"]},
    }


class Stopwatch:
    """Seconds spent in the functions of fedpipe that read or write files, in all modules that import them."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0
        modules = [module for name, module in sys.modules.items() if name.startswith("fedpipe.")]
        for name, function in list(vars(storage_files).items()):
            if name.startswith(("write_", "read_")):
                timed_function = self._timed(function)
                for module in modules:
                    if getattr(module, name, None) is function:
                        setattr(module, name, timed_function)

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


def make_variants(options: argparse.Namespace) -> list[Variant]:
    """Make the variants. A width of 1 has neither graphs nor a ladder."""
    choices = {"on": [True], "off": [False], "both": [False, True]}
    ladders = choices[options.ladder][::-1]
    variants = itertools.product(options.stack, choices[options.graphs], ladders)
    return list(dict.fromkeys(Variant(stack, *(rest if stack != 1 else (False, True))) for stack, *rest in variants))


def keep_full_width(is_on: bool) -> contextlib.AbstractContextManager[Any]:
    """Within the block, a stack keeps its width until its largest client has finished."""
    if not is_on:
        return contextlib.nullcontext()
    return mock.patch.object(schedule, "get_allowed_stack_widths", lambda width: (width,))


def measure_variant(
    variant: Variant, clients: FederatedData, stopwatch: Stopwatch, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds, memory and digest of the rounds of a variant, after one round for warming up."""
    execution = Execution(device=options.device, stack=variant.stack, graphs=variant.graphs)
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, keep_full_width(not variant.ladder):
        sections = make_settings(clients, options)
        run = open_run(Path(folder), options.algorithm, clients, execution, options.threads, **sections)
        begin = {}
        for number in run.run_segment(options.rounds + 1):
            begin[number] = (time.perf_counter(), stopwatch.seconds)
        (first, files_before), (last, files_after) = begin[1], begin[options.rounds + 1]
        times = [storage_files.read_json(run.files.get_round_files(n).times) for n in range(2, options.rounds + 2)]
        digest, step_rows = compute_digest(run.files.path), count_step_rows(run)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if options.device == "cuda":
        memory = torch.cuda.max_memory_allocated() / 2**20
    return {
        "executor": run.executor.name,
        "step_rows": step_rows,
        "recorded_steps": count_recorded_steps(run),
        "seconds_per_round": (last - first) / options.rounds,
        "training_seconds": sum(measured["train"] for measured in times) / options.rounds,
        "evaluation_seconds": sum(measured["evaluate"] for measured in times) / options.rounds,
        "artifacts_seconds": (files_after - files_before) / options.rounds,
        "peak_memory_mib": memory,
        "digest": digest,
    }


def count_step_rows(run: Run) -> int:
    """Number of clients that the steps of stacks compute in a round, also those that have finished."""
    if not isinstance(run.executor, StackExecutor):
        return 0
    sizes, width = run.clients.sizes, run.executor._width
    batch_size = run.clients.resolve_batch_size(run.federation.batch_size)
    return sum(
        steps.width * (steps.stop - steps.first)
        for stack_clients in schedule.group_clients_into_stacks(sizes, run.select_participants(1), width)
        for steps in schedule.split_steps_by_stack_width(
            [schedule.count_batches(int(sizes[client]), batch_size) for client in stack_clients],
            schedule.get_allowed_stack_widths(width),
        )
    )


def count_recorded_steps(run: Run) -> int:
    """Number of steps that a stack has recorded as CUDA graphs."""
    cache = run.executor._graph_cache if isinstance(run.executor, StackExecutor) else None
    return len(cache._captured_steps) if cache else 0


def compute_digest(folder: Path) -> str:
    """SHA-256 of all states and tables of a run."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in {".pt", ".parquet"})
    text = "".join(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths)
    return hashlib.sha256(text.encode()).hexdigest()


def matrix_rate(threads: int, device: str, library: str = "blas") -> float:
    """GFLOP/s of float32 matrix products, with one product per core or GPU at a time: the best of several attempts.

    For oneDNN the product is a 1x1 convolution.
    """
    size, products, workers = (1024, 5, threads) if device == "cpu" else (8192, 20, 1)
    a, b = torch.rand(2, size, size, device=device)
    image = a.reshape(1, 32, -1, size).permute(0, 3, 1, 2)  # channels-last
    kernel = b.reshape(size, size, 1, 1)

    def work(_: int) -> None:
        torch.set_num_threads(1)
        for _ in range(products):
            a @ b if library == "blas" else F.conv2d(image, kernel)

    best = 0.0
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(8):
            begin = time.perf_counter()
            list(pool.map(work, range(workers)))
            if device != "cpu":
                torch.cuda.synchronize()
            best = max(best, workers * products * 2 * size**3 / (time.perf_counter() - begin) / 1e9)
    return best


def plain_loop(workload: Workload, clients: FederatedData, threads: int) -> float:
    """Seconds of an epoch of every client in a simple loop: a module, torch.optim, and all cores for each batch."""
    torch.set_num_threads(threads)
    network = workload.model.build(workload.shape, CLASSES).to(clients.device)
    begin = time.perf_counter()
    for client in range(len(clients)):
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        order = clients.shuffle_indices(client, 1, "batches", 0)
        for first in range(0, len(order), workload.batch):
            x, y = clients.gather_samples(order[first : first + workload.batch])
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    if clients.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def bare_loop(workload: Workload, clients: FederatedData, threads: int) -> float:
    """Seconds of the same epoch of cnn4 with only PyTorch's kernels, and one thread and module per client.

    The kernels have their best layout: channels-last, and the weight of the layer from 1,024 to 512 by columns.
    """

    def work(client: int) -> None:
        torch.set_num_threads(1)
        network = workload.model.build(workload.shape, CLASSES).to(memory_format=torch.channels_last)
        wide_layer = next(layer for layer in network.modules() if isinstance(layer, nn.Linear))
        wide_layer.weight.data = wide_layer.weight.data.t().contiguous().t()
        parameters = list(network.parameters())
        x, y = clients.gather_samples(clients.shuffle_indices(client, 1, "batches", 0))
        x = x.as_strided(x.shape, (784, 1, 28, 1))
        for first in range(0, len(y), workload.batch):
            loss = F.cross_entropy(network(x[first : first + workload.batch]), y[first : first + workload.batch])
            gradient = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradient, alpha=-RATE)

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, sorted(range(len(clients)), key=lambda client: -clients.sizes[client])))
    return time.perf_counter() - begin


def compare_with_machine(
    workload: Workload, clients: FederatedData, figures: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Compare a variant's figures with the rate of matrix products and with other loops."""
    rates = {"blas": matrix_rate(options.threads, options.device)}
    if options.device == "cpu":
        rates["onednn"] = matrix_rate(options.threads, options.device, "onednn")
    plain = plain_loop(workload, clients, options.threads)
    trained, evaluated = int(clients.sizes.sum()), sum(map(len, clients.test))
    work = (trained * workload.mflop_trained + evaluated * workload.mflop_evaluated) / 1e3  # GFLOP
    train, seconds = figures["training_seconds"], figures["seconds_per_round"]
    compared = {
        "training_samples_per_second": trained / train,
        "share_training": train / seconds,
        "share_evaluation": figures["evaluation_seconds"] / seconds,
        "share_artifacts": figures["artifacts_seconds"] / seconds,
        **{f"{library}_gflops": found for library, found in rates.items()},
        "matrix_rate_share": work / seconds / max(rates.values()),
        "plain_loop_seconds": plain,
        "plain_loop_over_training": plain / train,
    }
    if options.device == "cpu" and options.model == "cnn4":
        bare = bare_loop(workload, clients, options.threads)
        compared |= {"bare_loop_seconds": bare, "bare_loop_over_training": bare / train}
    return compared


def parse_stack_width(text: str) -> int | str:
    """Parse a width of the stack, or ``auto``."""
    return text if text == "auto" else int(text)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--mirror", type=Path, help="folder with mnist/*.gz")
    parser.add_argument("--model", default="cnn4", choices=WORKLOADS, help="model (default cnn4)")
    parser.add_argument("--clients", type=int, default=20, help="number of clients (default 20)")
    parser.add_argument("--algorithm", default="fedavg", help="algorithm with its default parameters (default fedavg)")
    parser.add_argument(
        "--precision", default="full", choices=["full", "bfloat16"], help="precision of training (default full)"
    )
    parser.add_argument("--samples", type=int, help="number of synthetic samples (default as in the data set)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after one round for warming up (default 3)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="number of cores (default all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--stack", nargs="+", default=["auto"], type=parse_stack_width, help="clients in one call (default auto)"
    )
    parser.add_argument("--graphs", default="on", choices=["off", "on", "both"], help="CUDA graphs (default on)")
    parser.add_argument(
        "--ladder", default="on", choices=["off", "on", "both"], help="narrower stacks as clients finish (default on)"
    )
    parser.add_argument("--only-rounds", action="store_true", help="measure only fedpipe's rounds")
    options = parser.parse_args()
    if options.mirror and options.model != "cnn4":
        parser.error(f"--mirror {options.mirror} can't be used with --model {options.model}. Use --model cnn4.")
    return options


def main() -> None:
    """Measure and print."""
    options = parse_options()
    workload = WORKLOADS[options.model]
    stopwatch = Stopwatch()
    data = (
        read_mnist(options.mirror)
        if options.mirror
        else make_synthetic_data(workload.shape, options.samples or workload.samples)
    )
    clients = partition(*data, options.clients, options.device)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU",
        "threads": options.threads,
        "algorithm": options.algorithm,
        "model": options.model,
        "clients": options.clients,
        "precision": options.precision,
        "pixels": "MNIST" if options.mirror else "synthetic",
        "torch": torch.__version__,
        "rounds_measured": options.rounds,
        "training_samples": int(clients.sizes.sum()),
        "test_samples": sum(map(len, clients.test)),
        "variants": [],
    }
    for variant in make_variants(options):
        row: dict[str, Any] = variant._asdict()
        figures["variants"].append(row)
        try:
            row |= measure_variant(variant, clients, stopwatch, options)
        except Exception as error:  # such as too little memory, which the other variants may not need
            row["error"] = f"{type(error).__name__}: {error}"
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
        write_json(options.json, figures)
    measured = [row for row in figures["variants"] if "error" not in row]
    if measured and not options.only_rounds:
        first = {name: value for name, value in measured[0].items() if name not in Variant._fields}
        figures |= first | compare_with_machine(workload, clients, first, options)
        write_json(options.json, figures)
    for name, value in figures.items():
        if name != "variants":
            print(f"{name:<30} {value:,.3f}" if isinstance(value, float) else f"{name:<30} {value}")
    if len(measured) < len(figures["variants"]):
        sys.exit("\n".join(row["error"] for row in figures["variants"] if "error" in row))


if __name__ == "__main__":
    main()
