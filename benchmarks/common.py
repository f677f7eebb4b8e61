"""What several programs share: options, numbers as JSON, a run without a study, and commands in new processes.

This module does not import PyTorch, because the measured memory of a command contains that of the program.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpipe.engine.clients.federated_data import FederatedData
    from fedpipe.engine.run import Run
    from fedpipe.settings.execution import Execution

ROOT = Path(__file__).parents[1]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a program, with the option ``--json``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser


def write_json(path: Path | None, figures: Any) -> None:
    """Write numbers to the file of ``--json``, if there is one."""
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def print_figures(figures: dict[str, float], path: Path | None) -> None:
    """Print numbers by name, and write them to the file of ``--json``."""
    for name, value in figures.items():
        print(f"{name:<30}{value:>12,.2f}")
    write_json(path, figures)


def open_run(
    folder: Path,
    algorithm: str,
    clients: FederatedData,
    execution: Execution,
    threads: int = 1,
    **sections: dict[str, Any],
) -> Run:
    """Open a run of an algorithm in an empty folder, with these clients and sections of params.yaml."""
    from fedpipe.core.storage.files import write_bytes
    from fedpipe.core.storage.layout import RunFiles
    from fedpipe.engine.run import Run
    from fedpipe.planning.run_settings import RunSettings
    from fedpipe.settings.parser import parse_params

    params = parse_params({"algorithms": {algorithm: {}}, "study": {"algorithms": [algorithm]}} | sections)
    settings = RunSettings.from_params(params, algorithm, seed=0)
    files = RunFiles(folder / settings.key)
    write_bytes(files.settings, settings.to_yaml().encode())
    return Run(files, execution, threads, clients=clients)


def copy_workflow(folder: Path) -> None:
    """Copy the files of a project to a folder, without a study."""
    shutil.copy(ROOT / "Snakefile", folder)
    for part in ("profiles", "workflow"):
        shutil.copytree(ROOT / part, folder / part)


def measure_command(folder: Path, *arguments: str) -> dict[str, float]:
    """Run Python with these arguments: wall time, CPU time, and maximum memory of a process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    log = folder / "command.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"python {' '.join(arguments)} failed:\n{log.read_text()}")
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_mb": usage.ru_maxrss * 1024 / 1e6,
    }


def measure_fedpipe(folder: Path, *arguments: str) -> dict[str, float]:
    """Run a command of fedpipe, as `measure_command` does."""
    return measure_command(folder, "-m", "fedpipe", *arguments)


def measure_size(folder: Path) -> dict[str, float]:
    """Number of files in a folder, and their size."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"files": len(sizes), "megabytes": sum(sizes) / 1e6}


def measure_processor_time(*processes: int) -> float:
    """Processor seconds of `resource.RUSAGE_SELF` or `RUSAGE_CHILDREN`. `os.times` has a resolution of 0.01 s."""
    used = map(resource.getrusage, processes)
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
