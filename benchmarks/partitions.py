"""Seconds in which each partition scheme deals 60,000 samples to 100 clients.

    python benchmarks/partitions.py [--seeds N]

MNIST's sizes: ten classes, and 10,000 more samples for testing, of which each client gets its share. Alpha is 0.01
where a scheme draws from a Dirichlet distribution: to draw again until everybody has enough would not end there. Timed
is `assign`, from the labels to the table of who owns which sample; the slowest of N seeds (default 5) counts.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from fedpipe.core.components import component, registry
from fedpipe.data.assignment import assign_samples
from fedpipe.data.partitions.base import Scheme

SAMPLES, TESTS, CLASSES, CLIENTS, ALPHA = 60_000, 10_000, 10, 100, 0.01


def seconds(scheme: Scheme, seed: int) -> float:
    labels = np.random.default_rng(0).permutation(np.arange(SAMPLES + TESTS) % CLASSES)
    for_test = np.arange(len(labels)) >= SAMPLES
    begin = time.perf_counter()
    assign_samples(scheme, labels, for_test, CLIENTS, "official", 0, seed)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default 5)")
    options = parser.parse_args()
    print("| scheme | seconds |\n|---|---|")
    for name in registry.list_components(component.PARTITION):
        known = {
            parameter.name
            for parameter in component.list_parameters(registry.find_component(component.PARTITION, name))
        }
        if "path" in known:
            continue  # dealt by a file of one's own
        scheme = registry.build_component(component.PARTITION, name, {"alpha": ALPHA} if "alpha" in known else {})
        assert isinstance(scheme, Scheme)
        print(f"| {name} | {max(seconds(scheme, seed) for seed in range(options.seeds)):.2f} |")


if __name__ == "__main__":
    main()
