"""Small studies for the tests: real digits, few rounds, and functions that compare results bit for bit."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.storage import archive, layout
from fedpipe.core.storage.files import read_json, write_pt
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine import collect
from fedpipe.engine.blocks import Block
from fedpipe.engine.run import Run
from fedpipe.planning import download, partition, planner
from fedpipe.planning.plan import Plan
from fedpipe.planning.planner import NewPlan
from fedpipe.settings.execution import Execution

RunFedpipe = Callable[..., tuple[int, str, str]]  #: fixture ``run_fedpipe`` of tests/conftest.py

ROOT = Path(__file__).parent.parent
#: Root can read and write all files. This command drops the capability, so that root behaves like other users.
AS_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
#: Methods of all kinds: plain, corrected, regularized, class-wise, mixed, and personal. Slow tests cover all methods.
REPRESENTATIVE = ("fedavg", "scaffold", "feddw", "cwfedavg", "fedala", "pfps_lwc")
SHIPPED: tuple[str, ...] = tuple(yaml.safe_load((ROOT / "params.yaml").read_text())["study"]["algorithms"])


def mark_others_slow(names: Iterable[str], fast: Collection[str] = REPRESENTATIVE) -> list[Any]:
    """Return parameters of a test: the representative methods for `make test`, the others for `make test-all`."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


def settings(labels: tuple[str, ...] = ("fedavg",), rounds: int = 4, **sections: Any) -> dict[str, Any]:
    """Return the content of a params.yaml: ten clients of unequal size, half of them in each round."""
    base: dict[str, Any] = {
        "partition": {"scheme": "dirichlet", "alpha": 0.3},
        "model": {"name": "mlp", "hidden": [16]},
        "federation": {"clients": 10, "participation": 0.5, "rounds": rounds, "batch_size": 40, "learning_rate": 0.1},
        "algorithms": {label: {} for label in labels},
        "study": {"algorithms": list(labels), "seeds": [0]},
    }
    if "pfedme" in labels:
        base["algorithms"]["pfedme"] = {"attraction": 5.0}
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return base


def run_command(*arguments: str) -> str:
    """Run a command of fedpipe in this process. Return its output and its warnings."""
    result = CliRunner().invoke(app.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def write(params: dict[str, Any], folder: Path, name: str = "params.yaml") -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(params, sort_keys=False))


def prepare(params: dict[str, Any]) -> NewPlan:
    """Write the plan, data sets and partitions of a study into the current folder."""
    write(params, Path())
    plan = planner.make_plan(Path("params.yaml"))
    planner.write_plan(plan)
    prepare_data(plan)
    return plan


def prepare_data(plan: Plan) -> None:
    """Write the data sets and partitions of planned runs."""
    for name in {run.dataset for run in plan.runs}:
        if not layout.get_dataset_path(name).exists():
            download.download_dataset(name)
    for key in {run.partition for run in plan.runs}:
        partition.partition_dataset(key)


def open_runs(plan: Plan, threads: int = 1, **execution: Any) -> list[Run]:
    return [Run(run.files, Execution(**execution), threads, plan.keep_models) for run in plan.runs]


def finish_run(run: Run, rounds: int, keep_models: str | int = "all") -> None:
    """Run all rounds, and merge their files."""
    list(run.run_segment(rounds))
    collect.collect_rounds(run.files, rounds, keep_models)


def finish_study(plan: Plan) -> list[Run]:
    """Run all runs of a prepared study, and merge their files."""
    runs = open_runs(plan)
    for planned, run in zip(plan.runs, runs, strict=True):
        finish_run(run, planned.rounds, plan.keep_models)
    return runs


def compute_reference(params: dict[str, Any], folder: Path) -> dict[str, str]:
    """Run a study's runs in this process, without jobs. Return their hashes."""
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        finish_study(prepare(params))
    return hash_results(folder / "results/runs")


def run_single_rounds(plan: NewPlan, rounds: int, size: int, **execution: Any) -> None:
    """Run the first run as the DAG does: a new Run for each job, and blocks of ``size`` clients in files."""

    def open_run() -> Run:
        return open_runs(plan, **execution)[0]

    open_run().write_initial_round()
    for number in range(1, rounds + 1):
        ids, files = open_run().select_participants(number), open_run().files.get_round_files(number)
        paths = []
        for first in range(0, len(ids), size):
            paths.append(files.get_block_uploads_path(len(paths)))
            write_pt(paths[-1], open_run().train(number, ids[first : first + size]).to_tensors())
        open_run().aggregate(number, [Block.read(path) for path in paths])
        open_run().evaluate(number)


def make_segment_command(path: Path, stop: int) -> list[str]:
    return ["segment", str(path), "--stop", str(stop)]


def rerun_segment(path: Path, stop: int) -> tuple[int, list[int]]:
    """Run the same command again. Return the number of complete rounds, and the new rounds."""
    process = subprocess.run(
        [sys.executable, "-m", "fedpipe", *make_segment_command(path, stop)], capture_output=True, text=True, check=True
    )
    match = re.search(r"(\d+) of \d+ rounds are complete", process.stdout)
    return int(match[1]), [int(number) for number in re.findall(r"round (\d+) of", process.stdout)]


def train_scaffold(rounds: int) -> tuple[NewPlan, Run]:
    """Run SCAFFOLD, whose clients have states. Return its plan and its run."""
    plan = prepare(settings(("scaffold",), rounds))
    (run,) = open_runs(plan)
    list(run.run_segment(rounds))
    return plan, run


def build_network(run: Run, model: Mapping[str, Tensor]) -> nn.Module:
    """Return a plain PyTorch network with these tensors. Names that the model lacks keep their first values."""
    network: nn.Module = run.algorithm.net._build().to(next(iter(model.values())).dtype)
    network.load_state_dict({**network.state_dict(), **model})
    return network.eval()


def read_scores(run: Run, rounds: int, protocol: str) -> dict[tuple[int, int], tuple[int, int, float]]:
    """Return correct predictions, samples and loss by round and client, from the merged files of a run."""
    return {
        (row["round"], row["client"]): (row["correct"], row["total"], row["loss"])
        for row in layout.read_merged_table(run.files.get_merged_files(rounds).metrics).to_pylist()
        if row["protocol"] == protocol
    }


def hash_results(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every tensor file and table below a folder, by relative path. Times are excluded."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for pack in folder.rglob("rounds.zip"):
        contents |= {pack.with_suffix("") / name: data for name, data in archive.read_pack_members(pack).items()}
    return {
        str(path.relative_to(folder)): hashlib.sha256(data).hexdigest()
        for path, data in sorted(contents.items())
        if path.suffix in {".pt", ".parquet"} and not path.name.startswith(("block-", "."))
    }


def delete_rounds(run: Path) -> None:
    """Delete the rounds and segments of a run."""
    shutil.rmtree(run / "rounds")
    shutil.rmtree(run / "segments", ignore_errors=True)
    (run / "rounds.zip").unlink(missing_ok=True)


def list_temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def require_equal_bits(plan: NewPlan, rounds: int, size: int = 1, **execution: Any) -> Run:
    """Run one segment, two segments over two threads, and single rounds with blocks of clients. Require equal files."""
    run = open_runs(plan, **execution)[0]

    def collect_results() -> dict[str, str]:
        collect.collect_rounds(run.files, rounds, "all")
        return hash_results(run.files.path)

    def delete_results() -> None:
        delete_rounds(run.files.path)
        shutil.rmtree(run.files.path / "joined")

    list(run.run_segment(rounds))
    expected = collect_results()
    merged_files = {f"joined/{rounds:04}/{name}.parquet" for name in ("metrics", "matrices", "rounds")}
    assert merged_files | {f"rounds/{rounds:04}/server.pt"} <= expected.keys()

    delete_results()
    for stop in ((rounds + 1) // 2, rounds):
        list(open_runs(plan, threads=2, **execution)[0].run_segment(stop))
    assert collect_results() == expected, "two segments over two threads differ from one"

    delete_results()
    run_single_rounds(plan, rounds, size, **execution)
    assert collect_results() == expected, f"single rounds with blocks of {size} differ from a segment"
    return run


def read_round_times(run: Path) -> dict[int, str]:
    """Return the times of the complete rounds of a run, except round 0. They change if a round is repeated."""
    files = RunFiles(run)
    return {n: json.dumps(read_json(files.get_round_files(n).times)) for n in files.list_complete_rounds() if n}


def copy_project(folder: Path) -> Path:
    """Copy the project into a folder without results, like a new clone."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        source, target = ROOT / name, folder / name
        if name.startswith("results/") and name != "results/.gitignore":
            continue
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    compiled_files = [*(ROOT / "fedpipe").rglob("*.pyc"), *(ROOT / "fedpipe").rglob("__pycache__/code_digest.*.txt")]
    for compiled in compiled_files:  # otherwise each copy compiles the package
        target = folder / compiled.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(compiled, target)
    return folder
