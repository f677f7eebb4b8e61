"""Measure a study with thousands of named clients: plan, partition, rounds with 1 % of the clients, table and status.

    python benchmarks/clients.py [--clients N] [--samples N] [--rounds N] [--json FILE]

The data are random images in FEMNIST's shape (28x28 pixels, 62 classes), in a Parquet table with a column writer. The
sizes of writers are lognormal with the given mean. `partition: natural` makes each writer a client, which sets aside a
tenth of its samples for testing. FedAvg and Ditto train the small CNN, and the global model is evaluated on all test
samples after each round. Each command runs in a new process in a temporary folder. Memory is that of its largest
process. CPU time is omitted if Snakemake starts jobs.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from common import copy_workflow, make_parser, measure_fedpipe, measure_size, write_json
from PIL import Image

CLASSES = 62
COLUMNS = ("seconds", "cpu_seconds", "memory_mb")


def write_table(path: Path, clients: int, samples: int) -> int:
    """Write a table of images with a column writer. ``samples`` is the mean per client. Return the number of rows."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(10, rng.lognormal(0, 0.4, clients) * samples / np.exp(0.08)).astype(np.int64)
    images = []
    for pixels in rng.integers(0, 256, (1000, 28, 28), dtype=np.uint8):  # repeated, because only their number counts
        Image.fromarray(pixels).save(buffer := io.BytesIO(), "png", compress_level=1)
        images.append(buffer.getvalue())
    total = int(sizes.sum())
    index = rng.integers(0, len(images), total)
    writers = np.repeat([f"f{number:04}" for number in range(clients)], sizes)
    columns = {
        "image": pa.array(images, pa.binary()).take(pa.array(index)),
        "label": pa.array(rng.integers(0, CLASSES, total)),
        "writer": pa.array(writers),
    }
    pq.write_table(pa.table(columns), path)
    return total


def make_study(clients: int, rounds: int) -> dict[str, Any]:
    """Settings of the study."""
    return {
        "dataset": {"name": "parquet", "path": "writers.parquet", "split": "pooled", "test_fraction": 0.1},
        "partition": {"scheme": "natural", "column": "writer"},
        "model": {"name": "cnn"},
        "federation": {
            "clients": clients,
            "participation": 0.01,
            "rounds": rounds,
            "batch_size": 20,
            "learning_rate": 0.05,
        },
        "evaluation": {"protocols": ["global-on-local", "global-on-global"]},
        "study": {"algorithms": ["fedavg", "ditto"], "seeds": [0]},
    }


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=3500, help="number of clients (default 3500)")
    parser.add_argument("--samples", type=int, default=220, help="mean number of samples per client (default 220)")
    parser.add_argument("--rounds", type=int, default=10, help="number of rounds (default 10)")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_workflow(folder)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its memory would be that of the commands, too
            arguments = (folder / "writers.parquet", options.clients, options.samples)
            figures["samples"] = pool.submit(write_table, *arguments).result()
        study = yaml.safe_dump(make_study(options.clients, options.rounds), sort_keys=False)
        (folder / "params.yaml").write_text(study)
        commands = {
            "download": ["download"],
            "plan": ["plan"],
            "preview": ["partition", "--preview"],
            "partition": ["partition"],
            "rounds": ["run"],
            "run again": ["run"],
            "table": ["show"],
            "status": ["status"],
            "verify": ["verify"],
        }
        print("| command | seconds | CPU seconds | MB of memory |\n|---|---|---|---|")
        for title, words in commands.items():
            if title == "partition":
                plan = json.loads((folder / "results/plan.json").read_text())
                words = [*words, *plan["partitions"]]
            figures[title] = figure = measure_fedpipe(folder, *words)
            if words == ["run"]:
                del figure["cpu_seconds"]
            numbers = [f"{figure[name]:,.1f}" if name in figure else "" for name in COLUMNS]
            print(f"| {title} | {' | '.join(numbers)} |", flush=True)
        figures["results"] = measure_size(folder / "results")
    print("results: {files} files, {megabytes:.0f} MB".format(**figures["results"]), file=sys.stderr)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
