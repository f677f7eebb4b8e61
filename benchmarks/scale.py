"""Measure how time, memory and files grow with the clients, the rounds and the runs of a study.

    python benchmarks/scale.py [--clients N ...] [--rounds N ...] [--runs N ...] [--submissions N]

- Clients: a run of SCAFFOLD, which keeps a state of each client, with 1 % of the clients in a round. Each client has 20
  random images of 8x8 pixels.
- Rounds: a run of SCAFFOLD on digits with ten clients, of which two train in a round.
- Runs: ten methods, up to five values of alpha, ten learning rates and ten seeds on digits. Slurm is simulated: its
  commands are small scripts, and a submitted job has the results of another run at once. So the times are those of
  Snakemake and its executor for Slurm. Snakemake is killed after some submissions, and then all other runs get these
  results.

Each command runs in a new process in a temporary folder. Seconds are processor time.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from common import ROOT, copy_workflow, measure_command, measure_fedpipe, measure_size

SAMPLES = 20  #: of a client
METHODS = ["fedavg", "fedprox", "scaffold", "fednova", "feddyn", "local", "fedper", "fedrep", "ditto", "fedbabu"]
ALPHAS = [0.05, 0.1, 0.3, 0.5, 1.0]
LEARNING_RATES = [round(0.02 * number, 2) for number in range(1, 11)]
SEEDS = list(range(10))
SLURM_VARIABLE = "SIMULATED_SLURM"  #: folder with the commands of Slurm, the results of jobs, and the submitted jobs
#: Slurm's commands. The comment of a job contains the method and the key of its run.
SLURM_COMMANDS = {
    "sbatch": r"""
run=$(echo "$*" | sed -n 's|.*rule_segment_wildcards_\([a-z]*\)_\([0-9a-f]\{12\}\)_.*|\1/\2|p')
cp -r "$SIMULATED_SLURM/run/." "results/runs/$run" && echo $$ | tee -a "$SIMULATED_SLURM/jobs"
""",
    "squeue": """
echo >> "$SIMULATED_SLURM/queries"
case "$*" in
    *%r*) sed 's/$/|COMPLETED None/' "$SIMULATED_SLURM/jobs" ;;
    *) sed 's/$/|COMPLETED/' "$SIMULATED_SLURM/jobs" ;;
esac
""",
    "scontrol": "echo 'MinJobAge = 86400 sec'",
    "sinfo": ":",
}
PROFILE = ("--profile", "workflow/profiles/slurm", "--fedpipe-slurm-init-seconds-before-status-checks", "1")


def write_study(folder: Path, federation: dict[str, Any], **sections: Any) -> None:
    """Write a study of SCAFFOLD on digits with these settings."""
    study = {
        "dataset": {"name": "digits"},
        "partition": {"scheme": "iid"},
        "model": {"name": "mlp", "hidden": [16]},
        "federation": {"batch_size": 40, "learning_rate": 0.1} | federation,
        "evaluation": {"protocols": ["global-on-local", "global-on-global"]},
        "study": {"algorithms": ["scaffold"], "seeds": [0]},
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(study | sections, sort_keys=False))


def prepare_run(folder: Path) -> tuple[Path, dict[str, float]]:
    """Plan the study, its data and its partitions. Return the folder of its first run, and the seconds of both."""
    measure_fedpipe(folder, "download")
    seconds = {"plan": measure_fedpipe(folder, "plan")["cpu_seconds"]}
    plan = json.loads((folder / "results/plan.json").read_text())
    name = plan["runs"][0]["dataset"]
    if not (folder / f"results/data/{name}.pt").is_file():
        measure_fedpipe(folder, "download", name)
    partition = measure_fedpipe(folder, "partition", plan["runs"][0]["partition"])
    return folder / plan["runs"][0]["path"], seconds | {"partition": partition["cpu_seconds"]}


def run_segment(folder: Path, run: Path, rounds: int) -> dict[str, float]:
    """Run all rounds of a run in one job, and merge them."""
    return measure_fedpipe(folder, "segment", str(run.relative_to(folder)), "--stop", str(rounds), "--collect")


def measure_clients(folder: Path, clients: int) -> dict[str, Any]:
    """Measure a run with so many clients."""
    rng = np.random.default_rng(0)
    x = rng.random((clients * SAMPLES, 1, 8, 8), dtype=np.float32)
    np.savez(folder / "images.npz", x=x, y=rng.integers(0, 10, len(x)))
    federation = {"clients": clients, "participation": 0.01, "rounds": 5, "batch_size": 5}
    write_study(folder, federation, dataset={"name": "npz", "path": "images.npz", "split": "pooled"})
    run, seconds = prepare_run(folder)
    job = run_segment(folder, run, 5)
    return {
        "clients": clients,
        **{f"`fedpipe {name}` (s)": value for name, value in seconds.items()},
        "five rounds (s)": job["cpu_seconds"],
        "memory (MB)": job["memory_mb"],
        "`fedpipe status` (s)": measure_fedpipe(folder, "status")["cpu_seconds"],
        **{f"{name} of the run": value for name, value in measure_size(run).items()},
    }


def measure_rounds(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure a run with so many rounds."""
    write_study(folder, {"clients": 10, "participation": 0.2, "rounds": rounds})
    run, _ = prepare_run(folder)
    job = run_segment(folder, run, rounds)
    return {
        "rounds": rounds,
        "all rounds (s)": job["cpu_seconds"],
        "memory (MB)": job["memory_mb"],
        **{f"`fedpipe {name}` (s)": measure_fedpipe(folder, name)["cpu_seconds"] for name in ("table", "status")},
        **{f"{name} of the run": value for name, value in measure_size(run).items()},
    }


def measure_runs(folder: Path, runs: int, submissions: int) -> dict[str, Any]:
    """Measure a study with so many runs of one round."""
    alphas = ALPHAS[: max(1, runs // (len(METHODS) * len(SEEDS)))]
    rates = LEARNING_RATES[: max(1, runs // (len(METHODS) * len(SEEDS) * len(alphas)))]
    seeds = SEEDS[: max(1, runs // (len(METHODS) * len(alphas) * len(rates)))]
    write_study(
        folder,
        {"clients": 10, "participation": 0.2, "rounds": 1},
        partition={"scheme": "dirichlet", "alpha": 0.3},
        study={
            "algorithms": METHODS,
            "seeds": seeds,
            "grid": {"partition.alpha": alphas, "federation.learning_rate": rates},
        },
    )
    template, _ = prepare_run(folder)
    run_segment(folder, template, 1)
    plan = measure_fedpipe(folder, "plan")
    paths = [folder / run["path"] for run in json.loads((folder / "results/plan.json").read_text())["runs"]]
    measure_command(folder, "-m", "snakemake", "partitions", "--profile", "workflow/profiles/local")
    slurm = make_slurm(folder, template)
    dag = measure_command(folder, "-m", "snakemake", "-n", "runs", *PROFILE)
    submission = submit_runs(folder, slurm, min(submissions, len(paths) - 1))
    for path in paths:
        if not (path / "joined").is_dir():
            shutil.copytree(slurm / "run", path, dirs_exist_ok=True)
    complete = measure_command(folder, "-m", "snakemake", "-n", "runs", *PROFILE)
    return {
        "runs": len(paths),
        "`fedpipe plan` (s)": plan["cpu_seconds"],
        "plan (MB)": plan["memory_mb"],
        "DAG (s)": dag["cpu_seconds"],
        "DAG (MB)": dag["memory_mb"],
        **submission,
        "DAG if complete (s)": complete["cpu_seconds"],
        **{f"`fedpipe {name}` (s)": measure_fedpipe(folder, name)["cpu_seconds"] for name in ("status", "table")},
        "files": measure_size(folder / "results")["files"],
    }


def make_slurm(folder: Path, template: Path) -> Path:
    """Make the folder of the simulated Slurm. Its jobs have the results of a run, except its settings."""
    slurm = folder / "slurm"
    shutil.copytree(template, slurm / "run", ignore=shutil.ignore_patterns("run.yaml"))
    for name, text in SLURM_COMMANDS.items():
        (slurm / name).write_text(f"#!/bin/sh\n{text}\n")
        (slurm / name).chmod(0o755)
    return slurm


def submit_runs(folder: Path, slurm: Path, submissions: int) -> dict[str, Any]:
    """Let Snakemake submit so many jobs, and kill it. Return its seconds per job after the first one."""
    jobs, log = slurm / "jobs", folder / "command.log"
    environment = os.environ | {"PYTHONPATH": str(ROOT), SLURM_VARIABLE: str(slurm)}
    environment["PATH"] = f"{slurm}:{environment['PATH']}"
    command = [sys.executable, "-m", "snakemake", "runs", *PROFILE]
    with (
        log.open("w") as stream,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT) as process,
    ):
        snakemake, seconds = psutil.Process(process.pid), []
        for count in (1, submissions):
            while not jobs.is_file() or len(jobs.read_text().split()) < count:
                if process.poll() is not None:
                    sys.exit(f"snakemake ended before {count} submissions:\n{log.read_text()}")
                time.sleep(0.05)
            times = snakemake.cpu_times()
            seconds.append(times.user + times.system)
        memory = snakemake.memory_info().rss
        process.kill()
    return {
        "submissions": len(jobs.read_text().split()),
        "submission (ms)": 1000 * (seconds[1] - seconds[0]) / max(submissions - 1, 1),
        "Snakemake (MB)": memory / 1e6,
        "`squeue` calls": len((slurm / "queries").read_text().splitlines()) if (slurm / "queries").is_file() else 0,
    }


def measure_curve(measure: Callable[[Path, int], dict[str, Any]], sizes: Sequence[int]) -> str:
    """Measure each size in a new folder. Return a table with one row per size."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            copy_workflow(Path(name))
            rows.append(measure(Path(name), size))
        print(rows[-1], file=sys.stderr, flush=True)
    lines = [f"| {' | '.join(cells)} |" for cells in (rows[0], *(map(format_number, row.values()) for row in rows))]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def format_number(value: float) -> str:
    """Format a number with three digits, or all digits before the point."""
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3g}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[100, 1000, 10000], help="numbers of clients")
    parser.add_argument("--rounds", type=int, nargs="*", default=[10, 100, 1000], help="numbers of rounds")
    parser.add_argument("--runs", type=int, nargs="*", default=[50, 500, 5000], help="numbers of runs")
    parser.add_argument("--submissions", type=int, default=150, help="jobs to submit with each number of runs (150)")
    options = parser.parse_args()

    def measure_study(folder: Path, runs: int) -> dict[str, Any]:
        return measure_runs(folder, runs, options.submissions)

    curves = {
        "A run by its number of clients": (measure_clients, options.clients),
        "A run by its number of rounds": (measure_rounds, options.rounds),
        "A study by its number of runs": (measure_study, options.runs),
    }
    tables = [f"{title}:\n\n{measure_curve(measure, sizes)}" for title, (measure, sizes) in curves.items() if sizes]
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
