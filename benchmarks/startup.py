"""Measure the startup time of `fedpipe --help`, and of the plans of the default study and of a very large one.

    python benchmarks/startup.py [--repeats N] [--seeds N] [--json FILE]

Each command runs in a new process in a temporary folder, and its shortest time counts. The large study is
studies/gallery.yaml (all algorithms) with 50 seeds. A plan imports PyTorch because algorithms and
models do. ``plan_over_torch`` is the time of the default study's plan over the time of ``python -c "import torch"``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import yaml
from common import ROOT, make_parser, measure_command, print_figures


def measure_repeatedly(folder: Path, repeats: int, *command: str) -> tuple[float, float]:
    """The shortest time of a Python command in seconds, and its maximum memory in MB."""
    runs = [measure_command(folder, *command) for _ in range(repeats + 1)]  # the first run compiles
    return min(run["seconds"] for run in runs), max(run["memory_mb"] for run in runs)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--repeats", type=int, default=5, help="measured runs of each command, after a first one (default 5)"
    )
    parser.add_argument("--seeds", type=int, default=50, help="number of seeds of the large study (default 50)")
    options = parser.parse_args()
    gallery = yaml.safe_load((ROOT / "studies/gallery.yaml").read_text())
    gallery["study"]["seeds"] = list(range(options.seeds))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "params.yaml", folder)
        (folder / "studies").mkdir()
        (folder / "studies/large.yaml").write_text(yaml.safe_dump(gallery, sort_keys=False))
        torch, _ = measure_repeatedly(folder, options.repeats, "-c", "import torch")
        help_seconds, _ = measure_repeatedly(folder, options.repeats, "-m", "fedpipe", "--help")
        plan, _ = measure_repeatedly(folder, options.repeats, "-m", "fedpipe", "plan")
        large_plan = ("-m", "fedpipe", "plan", "--params", "studies/large.yaml")
        large, memory = measure_repeatedly(folder, options.repeats, *large_plan)
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
    print_figures(figures, options.json)


if __name__ == "__main__":
    main()
