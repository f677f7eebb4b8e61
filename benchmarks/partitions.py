"""Measure the seconds in which each partition scheme assigns 60,000 samples to 100 clients.

    python benchmarks/partitions.py [--seeds N]

The sizes are those of MNIST: ten classes, and 10,000 more samples for testing. Schemes with a Dirichlet distribution
have an alpha of 0.01, at which rejection sampling would not end. The measured time is that of `assign`, from the labels
to the table of assignments. The slowest of N seeds (default 5) counts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from fedpipe.core.components import component, registry
from fedpipe.data.assignment import assign_samples
from fedpipe.data.partitions.base import Scheme

SAMPLES, TESTS, CLASSES, CLIENTS, ALPHA = 60_000, 10_000, 10, 100, 0.01


def measure_seconds(scheme: Scheme, seed: int) -> float:
    labels = np.random.default_rng(0).permutation(np.arange(SAMPLES + TESTS) % CLASSES)
    is_test = np.arange(len(labels)) >= SAMPLES
    begin = time.perf_counter()
    assign_samples(scheme, labels, is_test, CLIENTS, "official", 0, seed)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default 5)")
    options = parser.parse_args()
    print("| scheme | seconds |\n|---|---|")
    for name in registry.list_components(component.PARTITION):
        parameters = {
            parameter.name
            for parameter in component.list_parameters(registry.find_component(component.PARTITION, name))
        }
        if parameters & {"path", "column", "partitioner"}:
            continue  # a file, a column of the data set or another library assigns the samples
        scheme = registry.build_component(component.PARTITION, name, {"alpha": ALPHA} if "alpha" in parameters else {})
        assert isinstance(scheme, Scheme)
        print(f"| {name} | {max(measure_seconds(scheme, seed) for seed in range(options.seeds)):.2f} |")


if __name__ == "__main__":
    main()
