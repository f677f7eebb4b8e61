"""Measure how much of the time of `make demo` is training, in a fresh copy of this clone, from data to figures.

    python benchmarks/demo.py [--algorithms N] [--seeds N] [--rounds N] [--json FILE]

``wall_s`` is the duration of the command. ``compute_core_s`` is the recorded time of training, aggregation and
evaluation, each on one core. ``ratio`` is ``wall_s`` over ``compute_core_s / cores``. It is 1 for a study without any
other work. ``cpu_core_s`` is the processor time of all processes. If other programs use the machine, ``wall_s`` is much
longer than ``cpu_core_s / cores``, and the ratio is meaningless. ``--seeds 22`` is a study of 198 runs of two seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import yaml
from common import ROOT, make_parser, measure_processor_time, print_figures

SUBREAPER = 36  #: Linux's PR_SET_CHILD_SUBREAPER: this process is the parent of the job server
PHASES = ("train", "aggregate", "evaluate")


def copy_clone(folder: Path) -> None:
    """Copy the clone without results."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        source, target = ROOT / name, folder / name
        if (source.is_file() or source.is_symlink()) and (target.name == ".gitignore" or "results" not in target.parts):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def shorten(params: Path, algorithms: int | None, seeds: int | None, rounds: int | None) -> None:
    """Change the study to its first algorithms, to this number of seeds and to this number of rounds."""
    study = yaml.safe_load(params.read_text())
    study["study"]["algorithms"] = study["study"]["algorithms"][:algorithms]
    study["study"]["seeds"] = list(range(seeds or len(study["study"]["seeds"])))
    study["federation"]["rounds"] = rounds or study["federation"]["rounds"]
    params.write_text(yaml.safe_dump(study, sort_keys=False))


def run(folder: Path) -> tuple[float, float]:
    """Run the study. Return its duration and processor time in seconds."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": "."}
    command = ["snakemake", "all", "--profile", "workflow/profiles/local", "--quiet", "rules", "host"]
    processor_begin, begin = measure_processor_time(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    wall = time.perf_counter() - begin
    if process.returncode:
        sys.exit(process.stdout + process.stderr)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return wall, measure_processor_time(resource.RUSAGE_CHILDREN) - processor_begin


def sum_compute_time(folder: Path) -> float:
    """Seconds of training, aggregation and evaluation of all rounds."""
    all_times = [json.loads(path.read_text()) for path in folder.glob("results/runs/*/*/joined/*/times.json")]
    return sum(seconds[phase] for times in all_times for seconds in times["rounds"] for phase in PHASES)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--algorithms", type=int, help="number of first algorithms (default all)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: as in the study)")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: as in the study)")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="demo-") as temporary:
        folder = Path(temporary) / "clone"
        copy_clone(folder)
        shorten(folder / "params.yaml", options.algorithms, options.seeds, options.rounds)
        wall, processor_seconds = run(folder)
        compute, cores = sum_compute_time(folder), len(os.sched_getaffinity(0))
    figures = {
        "wall_s": wall,
        "compute_core_s": compute,
        "cores": cores,
        "ratio": wall * cores / compute,
        "cpu_core_s": processor_seconds,
    }
    print_figures(figures, options.json)


if __name__ == "__main__":
    main()
