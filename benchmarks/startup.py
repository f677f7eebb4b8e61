"""Measure the startup time of `fedpipe --help`, and of the plans of the default study and of a very large one.

    python benchmarks/startup.py [--repeats N] [--seeds N] [--json FILE]

Each command runs in a new process in a temporary folder, and its shortest time counts. The large study is
studies/gallery.yaml (all algorithms) with 50 seeds. A plan imports PyTorch because algorithms and
models do. ``plan_over_torch`` is the time of the default study's plan over the time of ``python -c "import torch"``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def measure_command(folder: Path, repeats: int, *command: str) -> tuple[float, float]:
    """The shortest time of a Python command in seconds, and its maximum memory in MB."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT)
    best, memory = float("inf"), 0
    for _ in range(repeats + 1):  # the first run compiles
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # warnings of the large study
        )
        _, status, usage = os.wait4(process.pid, 0)
        best = min(best, time.perf_counter() - begin)
        if status:
            sys.exit(f"{' '.join(command)} failed with exit status {os.waitstatus_to_exitcode(status)}.")
        memory = max(memory, usage.ru_maxrss)
    return best, memory * 1024 / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=5, help="measured runs of each command, after a first one (default 5)"
    )
    parser.add_argument("--seeds", type=int, default=50, help="number of seeds of the large study (default 50)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    gallery = yaml.safe_load((ROOT / "studies/gallery.yaml").read_text())
    gallery["study"]["seeds"] = list(range(options.seeds))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "params.yaml", folder)
        (folder / "studies").mkdir()
        (folder / "studies/large.yaml").write_text(yaml.safe_dump(gallery, sort_keys=False))
        torch, _ = measure_command(folder, options.repeats, "-c", "import torch")
        help_seconds, _ = measure_command(folder, options.repeats, "-m", "fedpipe", "--help")
        plan, _ = measure_command(folder, options.repeats, "-m", "fedpipe", "plan")
        large, memory = measure_command(
            folder, options.repeats, "-m", "fedpipe", "plan", "--params", "studies/large.yaml"
        )
        runs = len(json.loads((folder / "results/studies/large/plan.json").read_text())["runs"])
    figures = {
        "help_s": help_seconds,
        "torch_s": torch,
        "plan_s": plan,
        "plan_over_torch": plan / torch,
        "large_plan_runs": runs,
        "large_plan_s": large,
        "large_plan_mb": memory,
    }
    for name, value in figures.items():
        print(f"{name:<16} {value:,.2f}".removesuffix(".00"))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
