"""Whether every algorithm learns: its own protocol's accuracy on digits, and what personalization gains over FedAvg.

    python benchmarks/learns.py [--seeds N] [--algorithms NAME ...] [--rounds N] [--json FILE]

The study is studies/gallery.yaml (10 clients, 20 rounds; its hyper-parameters) with all clients in every round, at
Dirichlet(0.3) and Dirichlet(0.1). Accuracies are over all test samples after the last round, means over seeds. What
should hold: 80% at Dirichlet(0.3), and of a personalized method 2 points over FedAvg's local accuracy at
Dirichlet(0.1); where it does not, the number is marked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fedpipe.core.storage import files
from fedpipe.core.storage.layout import PARAMS, RunFiles
from fedpipe.engine.collect import collect_rounds
from fedpipe.engine.run import open_run
from fedpipe.planning import download, partition, planner
from fedpipe.planning.plan import Plan
from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.settings import loader
from fedpipe.settings.execution import Execution

GALLERY = Path(__file__).parent.parent / "studies/gallery.yaml"
EASY, HARD = 0.3, 0.1  #: alpha
LEARNS, GAINS = 80.0, 2.0  #: percent; points
LOCAL = "personal-on-local"
GLOBAL = ("fedavg", "fedprox", "moon", "feduv", "fednova", "scaffold", "fedpvr", "feddyn", "feddistill_plus", "feddw")
GLOBAL += ("feddual", "fednh")
#: The protocol that an algorithm's paper uses; LOCAL for those that are not named.
OWN = {"fedbabu": "finetuned-on-local", "fedproto": "prototype-on-local"} | dict.fromkeys(GLOBAL, "global-on-global")


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
    """All rounds of a run, on one core."""
    torch.set_num_threads(1)
    run = open_run(Path(path), Execution(device="cpu"), 1, "last")
    for _ in run.run_segment(rounds):
        pass
    collect_rounds(RunFiles(Path(path)), rounds, "last")


def measure(settings: dict[str, Any], workers: int) -> Plan:
    """The plan of the study, whose runs are done in the working directory."""
    files.write_json(PARAMS, settings)  # JSON is YAML
    made = planner.make_plan()
    planner.write_plan(made)
    for name in {run.dataset for run in made.runs}:
        download.download_dataset(name)
    for key in made.partitions:
        partition.partition_dataset(key)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(work, str(run.path), run.rounds) for run in made.runs]:
            done.result()
    return made


def figures(made: Plan) -> list[dict[str, Any]]:
    """A row an algorithm: accuracies in percent by its own protocol, and the gain over FedAvg's local one."""
    data = StudyData(made)
    frame = results.compute_reported_accuracies(data.accuracies)
    frame = frame[frame["average"] == "sample"]
    means = 100 * frame.groupby(["algorithm", "partition.alpha", "protocol"])["accuracy"].mean()
    spent = data.total_times
    seconds = (
        pd.Series(spent[list(results.TIMED_PHASES)].sum(axis=1).to_numpy(), spent["algorithm"]).groupby(level=0).mean()
    )

    def row(name: str) -> dict[str, Any]:
        protocol = OWN.get(name, LOCAL)
        easy, hard = (float(means[name, str(alpha), protocol]) for alpha in (EASY, HARD))
        gain = None if protocol.startswith("global") else hard - float(means["fedavg", str(HARD), LOCAL])
        below = [
            told
            for told, short in (
                (f"below {LEARNS:.0f}%", easy < LEARNS),
                (f"gains less than {GAINS:.0f}", gain is not None and gain < GAINS),
            )
            if short
        ]
        return {
            "algorithm": name,
            "protocol": protocol,
            f"Dir({EASY})": easy,
            f"Dir({HARD})": hard,
            f"over FedAvg at Dir({HARD})": gain,
            "seconds a run": float(seconds[name]),
            "": ", ".join(below),
        }

    return [row(name) for name in made.algorithms]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--algorithms", nargs="+", help="some of the gallery's algorithms (default all)")
    parser.add_argument("--rounds", type=int, help="by default as the gallery has them")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time (default one a core)")
    parser.add_argument("--json", type=Path, help="write all figures and the settings to this file")
    options = parser.parse_args()

    settings, json_file = (
        study(options.seeds, options.algorithms, options.rounds),
        options.json and options.json.resolve(),
    )
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        rows = figures(measure(settings, options.workers))
        os.chdir("/")
    shown = pd.DataFrame(rows, dtype=object)
    print(shown.where(shown.notna(), None).to_markdown(index=False, floatfmt=".1f", missingval="–"))
    print(f"\n{options.seeds} seeds; {time.perf_counter() - begin:.0f} s with {options.workers} workers")
    if json_file:
        json_file.write_text(json.dumps({"settings": settings, "figures": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
