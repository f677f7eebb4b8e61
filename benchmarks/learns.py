"""Check that every algorithm learns: its accuracy on digits, and its gain over FedAvg.

    python benchmarks/learns.py [--seeds N] [--algorithms NAME ...] [--rounds N] [--json FILE]

The study is studies/gallery.yaml (10 clients, 20 rounds, and its hyperparameters) with all clients in every round, at
Dirichlet(0.3) and Dirichlet(0.1). Accuracies are over all test samples after the last round, as means over seeds. Each
algorithm should have 80% at Dirichlet(0.3). The gain is in the protocol of the algorithm's paper at Dirichlet(0.1). It
is positive if the algorithm is better than FedAvg, which most papers claim. The last but one column counts such seeds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from common import ROOT, make_parser, write_json

from fedpipe.core.storage import files
from fedpipe.core.storage.layout import PARAMS, RunFiles
from fedpipe.engine.collect import collect_rounds
from fedpipe.engine.run import Run
from fedpipe.planning import download, partition, planner
from fedpipe.planning.plan import Plan
from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.settings import loader
from fedpipe.settings.execution import Execution

GALLERY = ROOT / "studies/gallery.yaml"
EASY, HARD = 0.3, 0.1  #: alpha
LOCAL = "personal-on-local"
GLOBAL = ("fedavg", "fedprox", "moon", "feduv", "fednova", "scaffold", "fedpvr", "feddyn", "feddistill_plus", "feddw")
GLOBAL += ("feddual", "fednh", "fedntd", "fedexp", "feddecorr", "fedlc", "fedsam", "fedcm", "ccvr")
#: The protocol of an algorithm's paper. Other algorithms have LOCAL.
PROTOCOLS = {"fedbabu": "finetuned-on-local", "fedproto": "prototype-on-local"} | dict.fromkeys(
    GLOBAL, "global-on-global"
)


def study(seeds: int, algorithms: list[str] | None, rounds: int | None) -> dict[str, Any]:
    """The gallery's settings at both partitions, with all clients in every round."""
    settings = loader.read_params(GALLERY)
    names = list(dict.fromkeys(["fedavg", *(algorithms or settings["study"]["algorithms"])]))
    settings["algorithms"] = {name: settings["algorithms"][name] for name in names}
    grid = {"partition.alpha": [EASY, HARD]}
    settings["federation"]["participation"] = 1.0
    settings["federation"]["rounds"] = rounds or settings["federation"]["rounds"]
    settings["evaluation"]["every"] = settings["federation"]["rounds"]
    return settings | {"study": {"algorithms": names, "seeds": list(range(seeds)), "grid": grid}}


def work(path: str, rounds: int) -> None:
    """Run all rounds of a run on one core."""
    torch.set_num_threads(1)
    run = Run(RunFiles(Path(path)), Execution(device="cpu"), 1, "last")
    for _ in run.run_segment(rounds):
        pass
    collect_rounds(run.files, rounds, "last")


def measure(settings: dict[str, Any], workers: int) -> Plan:
    """Run the study in the working directory and return its plan."""
    files.write_json(PARAMS, settings)  # JSON is YAML
    plan = planner.make_plan()
    planner.write_plan(plan)
    for name in {run.dataset for run in plan.runs}:
        download.download_dataset(name)
    for key in plan.partitions:
        partition.partition_dataset(key)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(work, str(run.path), run.rounds) for run in plan.runs]:
            future.result()
    return plan


def build_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row per algorithm: accuracies in percent by its protocol, and the gain over FedAvg in the same protocol."""
    data = StudyData(plan)
    frame = results.compute_reported_scores(data.scores, "last", last_k=1)
    frame = frame[frame["average"] == "sample"]
    accuracies = 100 * frame.set_index(["algorithm", "partition.alpha", "protocol", "seed"])["score"].sort_index()
    times = data.total_times
    seconds = (
        pd.Series(times[list(results.TIMED_PHASES)].sum(axis=1).to_numpy(), times["algorithm"]).groupby(level=0).mean()
    )

    def build_row(name: str) -> dict[str, Any]:
        protocol = PROTOCOLS.get(name, LOCAL)
        easy, hard = (accuracies[name, str(alpha), protocol] for alpha in (EASY, HARD))
        # FedAvg has no prototypes, so FedProto is compared with its model
        gains = hard - accuracies["fedavg", str(HARD), LOCAL if protocol.startswith("prototype") else protocol]
        return {
            "algorithm": name,
            "protocol": protocol,
            f"Dir({EASY})": float(easy.mean()),
            f"Dir({HARD})": float(hard.mean()),
            f"over FedAvg at Dir({HARD})": float(gains.mean()),
            "seeds above FedAvg": f"{(gains > 0).sum()} of {len(gains)}",
            "seconds a run": float(seconds[name]),
        }

    return [build_row(name) for name in plan.algorithms]


def main() -> None:
    """Run the study and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--algorithms", nargs="+", help="algorithms of the gallery (default all)")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: as in the gallery)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="number of parallel runs (default: one per core)"
    )
    options = parser.parse_args()

    settings = study(options.seeds, options.algorithms, options.rounds)
    json_file = options.json and options.json.resolve()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        rows = build_rows(measure(settings, options.workers))
        os.chdir("/")
    table = pd.DataFrame(rows, dtype=object)
    print(table.where(table.notna(), None).to_markdown(index=False, floatfmt=".1f", missingval="–"))
    seconds = time.perf_counter() - begin
    print(f"{options.seeds} seeds, {seconds:.0f} s with {options.workers} workers", file=sys.stderr)
    write_json(json_file, {"settings": settings, "figures": rows})


if __name__ == "__main__":
    main()
