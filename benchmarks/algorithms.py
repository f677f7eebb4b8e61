"""Compare the time of each algorithm's round with FedAvg's, and with the cost of its passes.

    python benchmarks/algorithms.py [--algorithms NAME ...] [--rounds N] [--samples N] [--json FILE]

The benchmark uses one thread of a CPU, the 4-layer CNN of cwFedAvg on MNIST's shape, 10 clients, all in every round,
batches of 10, and the hyperparameters of studies/gallery.yaml. A round is training and aggregation. The cost of the
passes is the number of floating-point operations of all products and convolutions in training, forward and backward,
relative to FedAvg's. Round 1 is for warming up. The time is processor time. A round of FedAvg runs before each round of
another algorithm, because a machine's speed changes within minutes. The row of FedAvg, which is compared with itself,
shows the accuracy of this method. Operations are counted in the last round. With at least three rounds, FedALA has
finished its first mixing by then. ``overhead`` is the ratio of the times over the ratio of the operations. It is 1 if
everything except the passes takes no time.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, make_parser, open_run, write_json
from torch.utils.flop_counter import FlopCounterMode

from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.loop import LoopExecutor
from fedpipe.engine.run import Run
from fedpipe.settings import loader
from fedpipe.settings.execution import Execution

GALLERY = ROOT / "studies/gallery.yaml"
CLASSES, CLIENTS, BATCH = 10, 10, 10


def make_federated_data(num_samples: int) -> FederatedData:
    """Random pixels of MNIST's shape, with this number of samples per client."""
    random, count = np.random.default_rng(0), num_samples * CLIENTS
    x = torch.from_numpy(random.random((count, 1, 28, 28), np.float32))
    y, parts = torch.from_numpy(random.integers(0, CLASSES, count)), np.split(np.arange(count), CLIENTS)
    return FederatedData(x, y, parts, parts, np.arange(count), CLASSES, 0)


def begin_run(folder: Path, name: str, clients: FederatedData) -> Run:
    """Begin a run of an algorithm of the gallery."""
    sections = {
        "dataset": {"name": "mnist"},
        "model": {"name": "cnn4"},
        "federation": {"clients": CLIENTS, "batch_size": BATCH, "learning_rate": 0.005},
        "algorithms": {name: loader.read_params(GALLERY)["algorithms"][name]},
    }
    run = open_run(folder / name, name, clients, Execution(device="cpu", stack=1), **sections)
    run.write_initial_round()
    return run


class Operations:
    """Floating-point operations of all clients that a loop trains within the block."""

    def __init__(self) -> None:
        self.count, self._lock, self._client = 0, threading.Lock(), LoopExecutor._run_client

    def __enter__(self) -> Operations:
        LoopExecutor._run_client = functools.partialmethod(Operations._count_client, self)  # type: ignore[assignment,method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        LoopExecutor._run_client = self._client  # type: ignore[method-assign]

    @staticmethod
    def _count_client(loop: LoopExecutor, counter: Operations, *arguments: Any) -> Any:
        with FlopCounterMode(display=False) as mode:
            outcome = counter._client(loop, *arguments)
        with counter._lock:
            counter.count += mode.get_total_flops()
        return outcome


def measure(run: Run, round_number: int) -> float:
    """Processor seconds of a round."""
    begin = time.process_time()
    block = run.train(round_number, run.select_participants(round_number))
    run.aggregate(round_number, [block])
    seconds = time.process_time() - begin
    run.checkpoint.mark_round_complete(round_number, {})
    return seconds


def count(run: Run, round_number: int) -> int:
    """Count the operations of a round's passes, which run again for this."""
    with Operations() as operations, torch.no_grad():
        run.train(round_number, run.select_participants(round_number))
    return operations.count


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--algorithms", nargs="+", help="algorithms of the gallery (default all)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after one round for warming up (default 3)"
    )
    parser.add_argument("--samples", type=int, default=300, help="samples per client (default 300)")
    options = parser.parse_args()
    names = list(dict.fromkeys(["fedavg", *(options.algorithms or loader.read_params(GALLERY)["study"]["algorithms"])]))
    clients = make_federated_data(options.samples)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        reference, numbers = begin_run(Path(folder) / "reference", "fedavg", clients), itertools.count(1)
        runs = {name: begin_run(Path(folder), name, clients) for name in names}
        for number in range(1, options.rounds + 2):
            for name, run in runs.items():
                reference_seconds = measure(reference, next(numbers))
                ratios[name].append(measure(run, number) / reference_seconds)
        operations = {name: count(run, options.rounds + 1) for name, run in runs.items()}
    figures = []
    print("| algorithm | round over FedAvg's | its passes over FedAvg's | overhead |\n|---|---|---|---|")
    for name, rounds in ratios.items():
        round_ = float(np.median(rounds[1:]))
        passes = operations[name] / operations["fedavg"]
        overhead = round_ / passes
        print(f"| {name} | {round_:.2f} | {passes:.2f} | {overhead:.2f} |", flush=True)
        figures.append({"algorithm": name, "round": round_, "passes": passes, "overhead": overhead})
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
