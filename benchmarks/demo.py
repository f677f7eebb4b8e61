"""How much of the shipped study's time is training: `make demo` in a fresh copy of this clone, data to figures.

    python benchmarks/demo.py [--algorithms N] [--seeds N] [--rounds N] [--json FILE]

``wall_s`` is what the command takes, ``compute_core_s`` what training, aggregation and evaluation say that they took
(each on one core, as the local profile has it), ``ratio`` the former over the latter shared among all cores: 1 would be
a study that does nothing else. ``cpu_core_s`` is the processor time of all processes together: where the machine is
busy with other work, ``wall_s`` is longer than ``cpu_core_s / cores``, and the ratio says little.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).parent.parent
SUBREAPER = 36  #: Linux's PR_SET_CHILD_SUBREAPER: what local jobs are forked from is nobody else's child
PHASES = ("train", "aggregate", "evaluate")


def copy(folder: Path) -> None:
    """The clone as it is, without results."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        source, target = ROOT / name, folder / name
        if (source.is_file() or source.is_symlink()) and (target.name == ".gitignore" or "results" not in target.parts):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def shorten(params: Path, algorithms: int | None, seeds: int | None, rounds: int | None) -> None:
    """Leave the study's first algorithms and seeds, and so many rounds."""
    study = yaml.safe_load(params.read_text())
    study["study"]["algorithms"] = study["study"]["algorithms"][:algorithms]
    study["study"]["seeds"] = study["study"]["seeds"][:seeds]
    study["federation"]["rounds"] = rounds or study["federation"]["rounds"]
    params.write_text(yaml.safe_dump(study, sort_keys=False))


def processor_time() -> float:
    """Seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(folder: Path) -> tuple[float, float]:
    """Seconds, and core seconds, of the study."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": "."}
    command = ["snakemake", "all", "--profile", "workflow/profiles/local", "--quiet", "rules", "host"]
    used, begin = processor_time(), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    wall = time.perf_counter() - begin
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return wall, processor_time() - used


def computed(folder: Path) -> float:
    """Core seconds of all rounds' training, aggregation and evaluation."""
    found = [json.loads(path.read_text()) for path in folder.glob("results/runs/*/*/joined/*/times.json")]
    return sum(seconds[phase] for times in found for seconds in times["rounds"] for phase in PHASES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", type=int, help="the first so many; by default all")
    parser.add_argument("--seeds", type=int, help="the first so many; by default all")
    parser.add_argument("--rounds", type=int, help="by default as the study has them")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="demo-") as temporary:
        folder = Path(temporary) / "clone"
        copy(folder)
        shorten(folder / "params.yaml", options.algorithms, options.seeds, options.rounds)
        wall, used = run(folder)
        compute, cores = computed(folder), len(os.sched_getaffinity(0))
    figures = {
        "wall_s": wall,
        "compute_core_s": compute,
        "cores": cores,
        "ratio": wall * cores / compute,
        "cpu_core_s": used,
    }
    for name, value in figures.items():
        print(f"{name:<16}{value:>10,.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
