"""One round of FedAvg on the MNIST shape, against what the machine can do and against a plain PyTorch loop.

    python benchmarks/round.py [--mirror FOLDER] [--algorithm NAME] [--precision NAME] [--pfllib FOLDER] [--json FILE]

20 clients, Dirichlet(0.1) over 70,000 samples, each client's split 75/25, the 4-layer CNN of cwFedAvg, batches of 10,
SGD, one local epoch, every client evaluated on its test split after the round. Pixels are synthetic unless ``--mirror``
names a folder that holds ``mnist/*.gz``. Speed is told as ratios, measured in one run: the share of the float32 rate of
the same cores (25.5 MFLOP a training sample, 8.5 an evaluated one), the time of a plain loop over the same batches, and
(on a CPU) that of a loop of nothing but PyTorch's kernels in their best layout. The rate is that of large matrix
products: on a CPU the best of the two libraries that PyTorch has there, its BLAS and oneDNN. ``--precision`` is that of
fedpipe's round; what it is measured against is of float32 in any case.

``--pfllib`` names a clone of PFLlib (github.com/TsingZ0/PFLlib), whose FedAvg then trains the same model on the same
samples of the same clients, by its own main.py in a copy of its code: as shipped, where a round begins with measuring
the global model on all test and training samples, and without that. PFLlib leaves out a client's last, smaller batch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
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


def synthetic(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels without meaning, of MNIST's shape."""
    rng = np.random.default_rng(0)
    labels = np.arange(samples) % CLASSES
    return torch.from_numpy(rng.random((samples, 1, 28, 28), np.float32)), torch.from_numpy(labels)


def mnist(mirror: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """MNIST from the upstream files in a folder."""
    pixels, labels = [], []
    for part in ("train", "t10k"):
        raw = gzip.decompress((mirror / "mnist" / f"{part}-images-idx3-ubyte.gz").read_bytes())
        pixels.append(np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 28, 28))
        raw = gzip.decompress((mirror / "mnist" / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        labels.append(np.frombuffer(raw, np.uint8, offset=8))
    x = torch.from_numpy(np.concatenate(pixels).astype(np.float32)) / 127.5 - 1
    return x, torch.from_numpy(np.concatenate(labels).astype(np.int64))


def deal(x: torch.Tensor, y: torch.Tensor, device: str) -> FederatedData:
    """Dirichlet(0.1), at least 40 samples a client, 75/25 within each."""
    scheme = Dirichlet(alpha=0.1, minimum=40)
    table = assign_samples(scheme, y.numpy(), np.zeros(len(y), bool), CLIENTS, "pooled", 0.25, seed=0)
    dealt = Assignment.from_table(table)
    return FederatedData(x, y, dealt.train, dealt.test, dealt.global_test, CLASSES, 0, torch.float32, device)


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
    """GFLOP/s of float32 matrix products, one product a core at a time: the best of some tries.

    oneDNN multiplies where a convolution of 1x1 is asked for, which is the same product.
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
    """Seconds of an epoch at every client as one would write it first: a module, torch.optim, all cores on a batch."""
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
    """Seconds of the same epoch with nothing but PyTorch's kernels, a thread and a module a client.

    They have their best layout: channels-last, and the weight of the layer from 1,024 to 512 by columns.
    """

    def work(client: int) -> None:
        torch.set_num_threads(1)
        network = CNN4().build((1, 28, 28), CLASSES).to(memory_format=torch.channels_last)
        wide = next(layer for layer in network.modules() if isinstance(layer, nn.Linear))
        wide.weight.data = wide.weight.data.t().contiguous().t()
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


def pfllib(clone: Path, python: str, clients: FederatedData, rounds: int, threads: int) -> dict[str, float]:
    """Seconds of a round of PFLlib's FedAvg with its evaluation and without."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(clone / "system", Path(folder) / "system")
        for part, owned in (("train", clients.train), ("test", clients.test)):
            data = Path(folder) / "dataset/MNIST" / part
            data.mkdir(parents=True)
            for client, samples in enumerate(owned):
                x, y = clients.gather(samples)
                np.savez(data / str(client), data=np.array({"x": x.cpu().numpy(), "y": y.cpu().numpy()}))
        arguments = ["-algo", "FedAvg", "-data", "MNIST", "-m", "CNN", "-nc", CLIENTS, "-lbs", BATCH, "-lr", RATE]
        arguments += ["-gr", rounds, "-dev", clients.device.type]  # it does one round more, the first, which warms up
        for name, gap in (("round", 1), ("training", rounds + 1)):
            command = [python, "main.py", *map(str, arguments), "-eg", str(gap)]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(command, cwd=Path(folder) / "system", env=environment, capture_output=True, text=True)
            times = [float(found) for found in re.findall(r"- time cost -+ (\S+)", done.stdout)]
            if done.returncode or len(times) != rounds + 1:
                raise SystemExit(f"PFLlib fails: {' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
            seconds[name] = float(np.mean(times[1:]))
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mirror", type=Path, help="folder with mnist/*.gz")
    parser.add_argument("--algorithm", default="fedavg", help="with its default parameters (default fedavg)")
    parser.add_argument("--precision", default="full", choices=["full", "bfloat16"], help="of training (default full)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--samples", type=int, default=70_000, help="of the synthetic pixels (default 70,000)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one that warms up (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores to use (default all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--stack", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--pfllib", type=Path, help="a clone of PFLlib, to be measured in the same run")
    parser.add_argument("--pfllib-python", default=sys.executable, help="a Python that has what PFLlib imports")
    options = parser.parse_args()
    python = str(Path(shutil.which(options.pfllib_python) or options.pfllib_python).absolute())
    if options.pfllib and not (options.pfllib / "system/main.py").is_file():
        parser.error(f"--pfllib: {options.pfllib} is no clone of PFLlib, it has no system/main.py")
    if options.pfllib:
        asked = subprocess.run(
            [python, "main.py", "--help"], cwd=options.pfllib / "system", capture_output=True, text=True
        )
        if asked.returncode:
            parser.error(f"--pfllib-python: PFLlib does not start with {python}\n{asked.stderr[-1000:]}")

    files = Stopwatch(
        storage_files, tuple(name for name in vars(storage_files) if name.startswith(("write_", "read_")))
    )
    clients = deal(*(mnist(options.mirror) if options.mirror else synthetic(options.samples)), options.device)
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
    if options.pfllib:
        theirs = pfllib(options.pfllib, python, clients, options.rounds, options.threads)
        figures |= {
            "pfllib_seconds_per_round": theirs["round"],
            "pfllib_over_fedpipe": theirs["round"] / seconds,
            "pfllib_training_seconds": theirs["training"],
            "pfllib_training_over_training": theirs["training"] / train,
        }
    for name, value in figures.items():
        print(f"{name:<30} {value:,.3f}" if isinstance(value, float) else f"{name:<30} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
