"""Seconds in which each partition scheme deals 60,000 samples to 100 clients.

    python benchmarks/partitions.py

Ten classes of equal size, and alpha 0.01 where a scheme draws from a Dirichlet distribution: where to draw again until
everybody has enough would not end. Timed is `assign`, from the labels to the table of who owns which sample for
training and for testing (75/25); the slowest of five seeds counts.
"""

from __future__ import annotations

import time

import numpy as np

from fedpipe import registry
from fedpipe.data.assignment import assign
from fedpipe.data.partitions.base import Scheme

SAMPLES, CLASSES, CLIENTS, ALPHA, SEEDS = 60_000, 10, 100, 0.01, 5


def seconds(scheme: Scheme, seed: int) -> float:
    labels = np.random.default_rng(0).permutation(np.arange(SAMPLES) % CLASSES)
    begin = time.perf_counter()
    assign(scheme, labels, np.zeros(SAMPLES, bool), CLIENTS, "pooled", 0.25, seed)
    return time.perf_counter() - begin


def main() -> None:
    print("| scheme | seconds |\n|---|---|")
    for name in registry.names(registry.PARTITION):
        known = {parameter.name for parameter in registry.parameters_of(registry.find(registry.PARTITION, name))}
        if "path" in known:
            continue  # dealt by a file of one's own
        scheme = registry.build(registry.PARTITION, name, {"alpha": ALPHA} if "alpha" in known else {})
        assert isinstance(scheme, Scheme)
        print(f"| {name} | {max(seconds(scheme, seed) for seed in range(SEEDS)):.2f} |")


if __name__ == "__main__":
    main()
