"""Measure the time of DVC for a study of 27 algorithms, 50 rounds and models of 2 MB: commit, status, push and pull.

    python benchmarks/versioning.py [--algorithms 27] [--rounds 50] [--megabytes 2] [--json FILE]

The files are those of a run with one seed (`fedpipe/core/storage/layout.py`), with random bytes and the sizes of the
default study. All folders are on one disk (``TMPDIR``), so that you can compare the times with the time of a copy of
the same tree, which is measured in the same run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from common import ROOT, make_parser, print_figures

PACKED = 12_000  #: bytes of a round's small files in the run's archive, as in the default study
JOINED = {"metrics.parquet": 12_000, "matrices.parquet": 70_000, "rounds.parquet": 4_000, "times.json": 6_000}


def run(folder: Path, *command: str) -> float:
    """Seconds that a command takes."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "DVC_NO_ANALYTICS": "1"}
    for name in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{name}_NAME": "benchmark", f"GIT_{name}_EMAIL": "benchmark@example.org"}
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def write_run(folder: Path, rounds: int, size: int) -> None:
    """The files of a run."""
    for number in range(rounds + 1):
        path = folder / "rounds" / f"{number:04d}"
        path.mkdir(parents=True)
        (path / "server.pt").write_bytes(os.urandom(size))
    joined = {f"joined/{rounds:04d}/{name}": count for name, count in JOINED.items()}
    (folder / f"joined/{rounds:04d}").mkdir(parents=True)
    for name, count in ({"rounds.zip": PACKED * rounds} | joined).items():
        (folder / name).write_bytes(os.urandom(count))


def write_study(folder: Path, algorithms: list[str], rounds: int, size: int) -> None:
    """A repository with the project's dvc.yaml and a study's results."""
    for name in ("dvc.yaml", ".dvcignore", ".gitignore", "Snakefile"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "workflow" / "rules", folder / "workflow" / "rules")
    results = folder / "results"
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    outs = [out if isinstance(out, str) else next(iter(out)) for stage in stages for out in stage.get("outs", ())]
    folders = [Path(out) for out in outs if not Path(out).suffix and "$" not in out]
    for path in (*folders, Path("results/plots"), Path("fedpipe")):
        (folder / path).mkdir(parents=True)
        (folder / path / "some").write_text(path.name)
    shutil.copy(ROOT / "results" / ".gitignore", results)
    plots = (f"plots/{name}.csv" for name in ("curves", "clients", "matrices", "partition"))
    for name in ("plan.json", "complete.txt", "metrics.json", *plots):
        (results / name).write_text("{}")
    settings = {"algorithms": {name: {} for name in algorithms}, "study": {"algorithms": algorithms}}
    (folder / "params.yaml").write_text(yaml.safe_dump(settings))
    for name in algorithms:
        (results / "keys" / f"{name}.json").write_text("{}")
        write_run(results / "runs" / name / "0123456789ab", rounds, size)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--algorithms", type=int, default=27, help="number of algorithms (default 27)")
    parser.add_argument("--rounds", type=int, default=50, help="number of rounds (default 50)")
    parser.add_argument("--megabytes", type=float, default=2.0, help="size of a model in MB (default 2)")
    arguments = parser.parse_args()
    names = [f"algorithm{index:02d}" for index in range(arguments.algorithms)]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="versioning-") as temporary:
        study, clone, store = (Path(temporary) / name for name in ("study", "clone", "store"))
        study.mkdir()
        write_study(study, names, arguments.rounds, int(arguments.megabytes * 1e6))
        files = [path for path in (study / "results" / "runs").rglob("*") if path.is_file()]
        figures["files"] = len(files)
        figures["gigabytes"] = sum(path.stat().st_size for path in files) / 1e9
        begin = time.perf_counter()
        shutil.copytree(study / "results" / "runs", Path(temporary) / "copy")
        figures["copying_seconds"] = time.perf_counter() - begin
        shutil.rmtree(Path(temporary) / "copy")

        run(study, "git", "init", "-q", "-b", "main")
        run(study, "dvc", "init", "-q")
        figures["commit_seconds"] = run(study, "dvc", "commit", "-f", "-q")
        figures["status_seconds"] = run(study, "dvc", "status")
        run(study, "dvc", "remote", "add", "-d", "store", str(store))
        run(study, "git", "add", "-A")
        run(study, "git", "commit", "-qm", "a study")
        figures["push_seconds"] = run(study, "dvc", "push", "-q")
        run(study, "git", "clone", "-q", str(study), str(clone))
        figures["pull_seconds"] = run(clone, "dvc", "pull", "-q")
        figures["status_in_clone_seconds"] = run(clone, "dvc", "status")

        new_run = study / "results" / "runs" / names[-1] / "ba9876543210"
        write_run(new_run, arguments.rounds, int(arguments.megabytes * 1e6))
        figures["one_run_more_commit_seconds"] = run(study, "dvc", "commit", "-f", "-q")
        figures["one_run_more_push_seconds"] = run(study, "dvc", "push", "-q")
    print_figures(figures, arguments.json)


if __name__ == "__main__":
    main()
