"""Each program in benchmarks/ runs at a tiny size and prints consistent numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.components import component, registry
from tests.docs.page_blocks import ROOT, read

#: Programs that other tests run, in tests/pipeline/test_forked_jobs.py and tests/runs/test_faults.py.
ELSEWHERE = {"demo", "faults"}
SMALL = {
    "algorithms": ("--algorithms", "fedprox", "--rounds", "1", "--samples", "10"),
    "learns": ("--seeds", "1", "--algorithms", "local", "--rounds", "1", "--workers", "2"),
    "models": ("--models", "lenet", "fasttext", "--seconds", "0.01"),
    "partitions": ("--seeds", "1"),
    "round": ("--samples", "1000", "--rounds", "1", "--threads", "1", "--device", "cpu"),
    "startup": ("--repeats", "1", "--seeds", "1"),
    "versioning": ("--algorithms", "2", "--rounds", "1", "--megabytes", "0.1"),
}


#: Imitates PFLlib: reads each client's samples, and prints other seconds if it would not evaluate.
PFLLIB = """
import sys
import numpy as np
if "--help" in sys.argv:
    sys.exit()
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
sizes = {"train": 0, "test": 0}
for part in sizes:
    for client in range(int(arguments["-nc"])):
        with open(f"../dataset/{arguments['-data']}/{part}/{client}.npz", "rb") as file:
            data = np.load(file, allow_pickle=True)["data"].tolist()
        assert data["x"].shape == (len(data["y"]), 1, 28, 28) and data["x"].dtype == np.float32
        sizes[part] += len(data["y"])
rounds = int(arguments["-gr"]) + 1
for number in range(rounds):
    seconds = (100 if number == 0 else sizes["train"]) + (0 if int(arguments["-eg"]) >= rounds else sizes["test"])
    print("-" * 25, "time cost", "-" * 25, float(seconds))
"""


def run(name: str, json_file: Path | None = None, *options: str) -> Any:
    """Run a program. Return its output, or the numbers that it writes to a file."""
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *SMALL[name], *options]
    command += [] if json_file is None else ["--json", str(json_file)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout if json_file is None else json.loads(json_file.read_text())


def test_every_program_is_run_by_a_test() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == SMALL.keys() | ELSEWHERE


def test_a_round(tmp_path: Path) -> None:
    figures = run("round", tmp_path / "figures.json")
    assert figures["training_samples"] + figures["test_samples"] == 1000
    assert figures["precision"] == "full"
    rate, seconds = max(figures["blas_gflops"], figures["onednn_gflops"]), figures["seconds_per_round"]
    work = (figures["training_samples"] * 25.5 + figures["test_samples"] * 8.5) / 1e3
    assert figures["matrix_rate_share"] == pytest.approx(work / seconds / rate)
    assert 0 < figures["matrix_rate_share"] < 1
    assert figures["artifacts_seconds"] == pytest.approx(figures["share_artifacts"] * seconds)
    assert figures["bare_loop_seconds"] / figures["bare_loop_over_training"] < seconds


@pytest.mark.slow
def test_a_round_beside_pfllib(tmp_path: Path) -> None:
    """PFLlib gets all samples, and its first round, which is for warming up, does not count."""
    (tmp_path / "system").mkdir()
    (tmp_path / "system/main.py").write_text(PFLLIB)
    figures = run("round", tmp_path / "figures.json", "--pfllib", str(tmp_path), "--precision", "bfloat16")
    assert figures["precision"] == "bfloat16"
    assert figures["pfllib_seconds_per_round"] == 1000
    assert figures["pfllib_training_seconds"] == figures["training_samples"]
    assert figures["pfllib_over_fedpipe"] == 1000 / figures["seconds_per_round"]
    training = figures["plain_loop_seconds"] / figures["plain_loop_over_training"]
    assert figures["pfllib_training_over_training"] == pytest.approx(figures["training_samples"] / training)


@pytest.mark.slow
def test_what_is_no_pfllib_or_does_not_start_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/round.py"), "--pfllib", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--pfllib: {tmp_path} is not a clone of PFLlib" in done.stderr
    (tmp_path / "system").mkdir()
    (tmp_path / "system/main.py").write_text("import what_pfllib_needs\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "No module named 'what_pfllib_needs'" in done.stderr


@pytest.mark.slow
def test_startup(tmp_path: Path) -> None:
    figures = run("startup", tmp_path / "figures.json")
    assert figures["large_plan_runs"] == len(registry.list_components(component.ALGORITHM))
    assert figures["plan_over_torch"] == figures["plan_s"] / figures["torch_s"]
    assert 0 < figures["help_s"] < figures["plan_s"]


@pytest.mark.slow
def test_models(tmp_path: Path) -> None:
    lenet, fasttext = run("models", tmp_path / "figures.json")
    assert (lenet["model"], fasttext["model"]) == ("lenet", "fasttext")
    fastest = max(lenet["plain_samples_per_second"], lenet["channels_last_samples_per_second"])
    assert lenet["over_fastest_plain"] == lenet["fedpipe_samples_per_second"] / fastest
    assert "channels_last_samples_per_second" not in fasttext


@pytest.mark.slow
def test_algorithms(tmp_path: Path) -> None:
    """FedProx's passes are FedAvg's."""
    fedavg, fedprox = run("algorithms", tmp_path / "figures.json")
    for measured in (fedavg, fedprox):
        assert measured["passes"] == 1
        assert measured["overhead"] == measured["round"] > 0


def test_partitions() -> None:
    schemes = re.findall(r"^\| ([a-z-]+) \| (\d+\.\d\d) \|$", run("partitions"), flags=re.M)
    assert {"iid", "dirichlet", "shards"} < dict(schemes).keys()


@pytest.mark.slow
def test_what_algorithms_learn(tmp_path: Path) -> None:
    fedavg, local = run("learns", tmp_path / "figures.json")["figures"]
    assert (fedavg["algorithm"], local["algorithm"]) == ("fedavg", "local")
    assert 0 < local["Dir(0.1)"] <= 100


@pytest.mark.slow
def test_what_dvc_costs(tmp_path: Path) -> None:
    figures = run("versioning", tmp_path / "figures.json")
    assert figures["files"] == 2 * 7
    assert all(value > 0 for value in figures.values())


def test_every_table_of_results_names_its_commit() -> None:
    """The text above each table names the commit of its numbers."""
    page = read("benchmarks/RESULTS.md")
    tables = [part for part in page.split("\n## ")[1:] if "\n|---" in part]
    assert len(tables) > 5
    for part in tables:
        assert re.search(r"at [0-9a-f]{7}\b", part.split("\n|")[0]), part.splitlines()[0]
