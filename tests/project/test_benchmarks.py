"""Each program in benchmarks/ runs at a tiny size and prints consistent numbers."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.components import component, registry
from tests.docs.page_blocks import ROOT, read

#: Programs that other tests run, in tests/docs, tests/pipeline/test_forked_jobs.py and tests/runs/test_faults.py.
ELSEWHERE = {"all_methods", "demo", "faults", "readings", "tuned_methods"}
SMALL = {
    "algorithms": ("--algorithms", "fedprox", "--rounds", "1", "--samples", "10"),
    "clients": ("--clients", "20", "--samples", "20", "--rounds", "1"),
    "learns": ("--seeds", "1", "--algorithms", "local", "--rounds", "1", "--workers", "2"),
    "models": ("--models", "lenet", "fasttext", "--seconds", "0.01"),
    "partitions": ("--seeds", "1"),
    "peers": ("--synthetic", "--samples", "1000", "--rounds", "1", "--threads", "1", "--case", "mnist"),
    "round": ("--samples", "1000", "--rounds", "1", "--threads", "1", "--device", "cpu"),
    "startup": ("--repeats", "1", "--seeds", "1"),
    "versioning": ("--algorithms", "2", "--rounds", "1", "--megabytes", "0.1"),
}


#: Imitates PFLlib's FedAvg, but it does not train.
UNTRAINED_PFLLIB = {
    "system/flcore/trainmodel/models.py": "",
    "system/flcore/servers/serveravg.py": """
class FedAvg:
    clients = range(1000)

    def evaluate(self):
        pass

    def aggregate_parameters(self):
        assert len(self.selected) == 10
""",
    "system/main.py": """
import sys
from pathlib import Path
import numpy as np
from flcore.servers.serveravg import FedAvg
from flcore.trainmodel.models import FedAvgCNN

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for part, size in (("train", 10), ("test", 5)):
    for client in range(int(arguments["-nc"])):
        data = np.load(f"../dataset/MNIST/{part}/{client}.npz", allow_pickle=True)["data"].item()
        assert data["x"].shape == (size, 1, 28, 28) and data["x"].min() >= -1 and data["y"].shape == (size,)
server = FedAvg()
server.global_model = FedAvgCNN(in_features=1, num_classes=10, dim=1024)
for _ in range(int(arguments["-gr"]) + 1):
    server.selected = server.select_clients()
    server.evaluate()
    server.aggregate_parameters()
""",
}


def run(name: str, json_file: Path | None = None, *options: str) -> Any:
    """Run a program. Return its output, or the numbers that it writes to a file."""
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *SMALL[name], *options]
    command += [] if json_file is None else ["--json", str(json_file)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout if json_file is None else json.loads(json_file.read_text())


def is_installed(package: str) -> bool:
    """Whether a package is installed."""
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


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


def test_missing_peers(tmp_path: Path) -> None:
    """fedpipe is measured, and each missing system has a reason in the table."""
    missing = {"fluke": "fluke-fl", "flower": "flwr"}
    missing = {name: package for name, package in missing.items() if not is_installed(package)}
    systems = ("--system", "fedpipe", "pfllib", "fl-bench", *missing)
    table, figure = tmp_path / "table.md", tmp_path / "figure.svg"
    outputs = ("--markdown", str(table), "--figure", str(figure))
    rows = run("peers", tmp_path / "figures.json", *systems, "--fl-bench", str(tmp_path), *outputs)["rows"]
    fedpipe, *peers = rows
    assert fedpipe["round_seconds"] == [fedpipe["seconds_per_round"]]
    training = fedpipe["seconds_per_round"] - fedpipe["evaluation_seconds"][0]
    assert fedpipe["seconds_without_evaluation"] == pytest.approx(training)
    assert 0 < training < fedpipe["seconds_per_round"]
    assert fedpipe["peak_memory_gib"] > 0.1  # PyTorch alone needs more
    reasons = {row["system"]: row["reason"] for row in peers}
    assert "--pfllib is missing" in reasons["pfllib"]
    assert f"--fl-bench: {tmp_path} is not a clone" in reasons["fl-bench"]
    assert all(package in reasons[name] for name, package in missing.items())
    text = table.read_text()
    assert len(re.findall(r"^\| fedpipe \| .* 1\.00 \| .* 1\.00 \|", text, flags=re.M)) == 1
    assert all(reason in text for reason in reasons.values())
    assert ">fedpipe<" in figure.read_text()


@pytest.mark.slow
def test_a_peer_that_trains_in_another_way(tmp_path: Path) -> None:
    """A peer gets the same samples and participants. If its accuracy differs, the program fails after all systems."""
    for name, text in UNTRAINED_PFLLIB.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks/peers.py"), "--synthetic", "--samples", "20000", "--rounds", "30"]
    command += ["--case", "clients", "--system", "fedpipe", "pfllib", "--threads", "1", "--pfllib", str(tmp_path)]
    process = subprocess.run([*command, "--json", str(figures)], cwd=ROOT, capture_output=True, text=True)
    fedpipe, pfllib = json.loads(figures.read_text())["rows"]
    assert fedpipe["accuracy"] > 30 > 20 > pfllib["accuracy"]
    assert process.returncode == 1
    assert f"PFLlib has accuracy {pfllib['accuracy']:.1f}" in process.stderr


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


@pytest.mark.slow
def test_thousands_of_clients(tmp_path: Path) -> None:
    """All commands succeed, among them `fedpipe verify`."""
    figures = run("clients", tmp_path / "figures.json")
    assert figures["samples"] >= 20 * 10
    assert all(figures[name]["seconds"] > 0 for name in ("download", "plan", "partition", "rounds", "table", "verify"))
    assert "cpu_seconds" in figures["status"]
    assert "cpu_seconds" not in figures["rounds"]


def test_every_table_of_results_names_its_commit() -> None:
    """The text above each table names the commit of its numbers."""
    page = read("benchmarks/RESULTS.md")
    tables = [part for part in page.split("\n## ")[1:] if "\n|---" in part]
    assert len(tables) > 5
    for part in tables:
        assert re.search(r"at [0-9a-f]{7}\b", part.split("\n|")[0]), part.splitlines()[0]
