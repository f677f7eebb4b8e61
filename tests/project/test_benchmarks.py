"""Each program in benchmarks/ runs at a tiny size and prints consistent numbers."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpipe.core.components import component, registry
from fedpipe.core.storage import files as storage_files
from fedpipe.engine import checkpoint, collect, rounds, run
from tests.docs.page_blocks import ROOT, read

#: Programs that other tests run, in tests/docs, tests/pipeline/test_forked_jobs.py and tests/runs/test_faults.py.
ELSEWHERE = {"all_methods", "demo", "faults", "readings", "tuned_methods"}
SCRIPTS = {"common", "gpu_figures", "results"}  #: what programs share, and programs that use the others' numbers
SMALL = {
    "algorithms": ("--algorithms", "fedprox", "--rounds", "1", "--samples", "10"),
    "clients": ("--clients", "20", "--samples", "20", "--rounds", "1"),
    "kernels": ("--models", "cnn4", "--seconds", "0"),
    "learns": ("--seeds", "1", "--algorithms", "local", "--rounds", "1", "--workers", "2"),
    "models": ("--models", "lenet", "fasttext", "--seconds", "0.01"),
    "partitions": ("--seeds", "1"),
    "peers": ("--synthetic", "--samples", "1000", "--rounds", "1", "--threads", "1", "--case", "mnist"),
    "round": ("--samples", "1000", "--rounds", "1", "--threads", "1", "--device", "cpu"),
    "scale": ("--clients", "10", "--rounds", "1", "--runs", "10", "--submissions", "3"),
    "startup": ("--repeats", "0", "--seeds", "1"),
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


def run_program(name: str, *options: str) -> str:
    """Run a program. Return its output."""
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py"), *SMALL[name], *options]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def measure_figures(name: str, folder: Path, *options: str) -> Any:
    """Run a program. Return the numbers that it writes to a file in a folder."""
    run_program(name, *options, "--json", str(folder / "figures.json"))
    return json.loads((folder / "figures.json").read_text())


@pytest.fixture(autouse=True)
def importable_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_tests_cover_all_benchmark_programs() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == SMALL.keys() | ELSEWHERE | SCRIPTS


@pytest.mark.slow
def test_round_figures_are_consistent(tmp_path: Path) -> None:
    figures = measure_figures("round", tmp_path)
    assert figures["training_samples"] + figures["test_samples"] == 1000
    assert figures["precision"] == "full"
    rate, seconds = max(figures["blas_gflops"], figures["onednn_gflops"]), figures["seconds_per_round"]
    work = (figures["training_samples"] * 25.5 + figures["test_samples"] * 8.5) / 1e3
    assert figures["matrix_rate_share"] == pytest.approx(work / seconds / rate)
    assert 0 < figures["matrix_rate_share"] < 1
    assert figures["artifacts_seconds"] == pytest.approx(figures["share_artifacts"] * seconds)
    assert figures["bare_loop_seconds"] / figures["bare_loop_over_training"] < seconds


def test_round_stopwatch_times_files_that_engine_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine imports the functions that write files, so each of its modules has its own name for them."""
    program = importlib.import_module("round")
    functions = {name: value for name, value in vars(storage_files).items() if name.startswith(("write_", "read_"))}
    for module in [module for name, module in sys.modules.items() if name.startswith("fedpipe.")]:
        for name, function in functions.items():
            if getattr(module, name, None) is function:
                monkeypatch.setattr(module, name, function)  # and restore it afterwards
    stopwatch = program.Stopwatch()
    for module in (checkpoint, rounds, run, collect, storage_files):
        for name in functions.keys() & vars(module).keys():
            assert getattr(module, name) is not functions[name], f"{module.__name__}.{name}"
    seconds_inside = []

    def save(*arguments: Any) -> None:
        seconds_inside.append(stopwatch.seconds)
        torch_save(*arguments)

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", save)
    checkpoint.write_pt(tmp_path / "state.pt", {"x": torch.zeros(1)})
    assert seconds_inside == [0.0], "the tensors are encoded within the measured time"
    assert stopwatch.seconds > 0


@pytest.mark.slow
def test_peers_table_shows_reasons_of_missing_systems(tmp_path: Path) -> None:
    """fedpipe is measured, and each missing system has a reason in the table."""
    missing = {"fluke": "fluke-fl", "flower": "flwr"}
    missing = {name: package for name, package in missing.items() if not is_installed(package)}
    systems = ("--system", "fedpipe", "pfllib", "fl-bench", *missing)
    table, figure = tmp_path / "table.md", tmp_path / "figure.svg"
    outputs = ("--markdown", str(table), "--figure", str(figure))
    rows = measure_figures("peers", tmp_path, *systems, "--fl-bench", str(tmp_path), *outputs)["rows"]
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
def test_peers_fails_if_accuracy_of_peer_differs(tmp_path: Path) -> None:
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
def test_peers_rejects_samples_without_batch_for_each_client() -> None:
    command = [sys.executable, "benchmarks/peers.py", "--synthetic", "--samples", "2000", "--case", "clients"]
    process = subprocess.run([*command, "--system", "fedpipe"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1
    assert "--samples: 2000 is too few for clients" in process.stderr


@pytest.mark.slow
def test_startup_figures_are_consistent(tmp_path: Path) -> None:
    figures = measure_figures("startup", tmp_path)
    assert figures["large_plan_runs"] == len(registry.list_components(component.ALGORITHM))
    assert figures["plan_over_torch"] == figures["plan_s"] / figures["torch_s"]
    assert 0 < figures["help_s"] < figures["plan_s"]


@pytest.mark.slow
def test_models_figures_are_consistent(tmp_path: Path) -> None:
    lenet, fasttext = measure_figures("models", tmp_path)
    assert (lenet["model"], fasttext["model"]) == ("lenet", "fasttext")
    fastest = max(lenet["plain_samples_per_second"], lenet["channels_last_samples_per_second"])
    assert lenet["over_fastest_plain"] == lenet["fedpipe_samples_per_second"] / fastest
    assert "channels_last_samples_per_second" not in fasttext


@pytest.mark.slow
def test_kernels_variants_compute_equal_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants and bare loops compute the same gradients."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # it would take most of the time
    tables = run_program("kernels", "--json", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    (compilation,), (training,), (evaluation,) = (figures[part] for part in ("compilation", "training", "evaluation"))
    assert compilation["second process (s)"] > 0
    variants = {name: cell for name, cell in training.items() if name not in {"model", "fedpipe (ms)"}}
    assert len(variants) == 5
    assert all(ratio > 0 and difference < 1e-5 for ratio, difference in variants.values())
    assert evaluation["batches of 250"] == 1
    assert [row["algorithm"] for row in figures["algorithms"]] == ["fedavg", "feddyn", "feduv"]
    assert all(row["over bare loop"][1] < 1e-5 for row in figures["algorithms"])
    assert tables.count("| cnn4 |") == 3


def test_kernels_reports_missing_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that PyTorch does not have is reported, and the other variants are measured."""
    program = importlib.import_module("kernels")

    def change(network: torch.nn.Module) -> bool:
        return bool(torch.ops.mkldnn.removed)

    variants = {"removed": change, "fused convolution": program.VARIANTS["fused convolution"]}
    monkeypatch.setattr(program, "VARIANTS", variants)
    row = program.measure_training("cnn5-norm", 0)
    assert row["removed"].startswith("AttributeError")
    assert row["fused convolution"] == "–"


@pytest.mark.slow
def test_algorithms_figures_are_consistent(tmp_path: Path) -> None:
    """FedProx has the passes of FedAvg."""
    fedavg, fedprox = measure_figures("algorithms", tmp_path)
    for measured in (fedavg, fedprox):
        assert measured["passes"] == 1
        assert measured["overhead"] == measured["round"] > 0


@pytest.mark.slow
def test_learns_figures_contain_accuracies(tmp_path: Path) -> None:
    fedavg, local = measure_figures("learns", tmp_path)["figures"]
    assert (fedavg["algorithm"], local["algorithm"]) == ("fedavg", "local")
    assert 0 < local["Dir(0.1)"] <= 100


@pytest.mark.slow
def test_versioning_figures_are_positive(tmp_path: Path) -> None:
    figures = measure_figures("versioning", tmp_path)
    assert figures["files"] == 2 * 7
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
def test_clients_figures_cover_all_commands(tmp_path: Path) -> None:
    """All commands succeed, among them `fedpipe verify`."""
    figures = measure_figures("clients", tmp_path)
    assert figures["samples"] >= 20 * 10
    assert all(figures[name]["seconds"] > 0 for name in ("download", "plan", "partition", "rounds", "table", "verify"))
    assert "cpu_seconds" in figures["status"]
    assert "cpu_seconds" not in figures["rounds"]


@pytest.mark.slow
def test_scale_tables_have_clients_rounds_and_runs() -> None:
    """The tables of clients, rounds and runs have a row each, and Snakemake submits jobs to a simulated Slurm."""
    lines = [line.strip("| ").split(" | ") for line in run_program("scale").splitlines()]
    clients, rounds, runs = (
        dict(zip(heads, cells, strict=True))
        for heads, cells in zip(lines, lines[2:], strict=False)
        if heads[0] in ("clients", "rounds", "runs")
    )
    assert (clients["clients"], rounds["rounds"], runs["runs"]) == ("10", "1", "10")
    assert int(runs["submissions"]) >= 3
    assert all(float(cell.replace(",", "")) >= 0 for cell in (*clients.values(), *rounds.values(), *runs.values()))


def run_gpu_script(**variables: str) -> tuple[int, Any]:
    """Run gpu.sh on the CPU. Return its exit status and its JSON."""
    environment = os.environ | {"SMALL": "1", "DEVICE": "cpu", "PYTHON": sys.executable, "CLIENTS": "2"} | variables
    command = ["bash", str(ROOT / "benchmarks/gpu.sh")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.stdout, process.stderr
    return process.returncode, json.loads(process.stdout)


@pytest.mark.slow
def test_gpu_script_reports_all_figures_and_failing_variant() -> None:
    """The error of a stack of 0 clients is reported with the figures of all other variants and parts."""
    status, figures = run_gpu_script(STACKS="1 2 0", MODELS="cnn4")
    assert status == 1
    assert re.fullmatch("[0-9a-f]{7,}(-dirty)?", figures["commit"])
    assert figures["device"].endswith("CPU")
    assert figures["checks"] == {"two_runs_have_equal_bits": True, "graphs_have_equal_bits": None}
    parts = figures["parts"]
    bits = ["bits-cnn4-1", "bits-cnn4-2"]
    assert [*parts] == ["contract", *bits, "round-cnn4-2", "peers"]
    assert {name for name, part in parts.items() if "error" in part} == {"round-cnn4-2"}
    assert parts["contract"]["figures"]["tests"] > 1
    assert parts["contract"]["figures"]["failed"] == []
    for name in bits:
        assert [row["graphs"] for row in parts[name]["figures"]["variants"]] == [False, True]
    assert "exit status 1" in parts["round-cnn4-2"]["error"]
    assert "0 can't be used" in parts["round-cnn4-2"]["error"]
    measured = parts["round-cnn4-2"]["figures"]
    assert measured["plain_loop_over_training"] > 0
    rows = {(row["stack"], row["graphs"], row["ladder"]): row for row in measured["variants"]}
    stacks = {(stack, graphs, ladder) for stack in (2, 0) for graphs in (False, True) for ladder in (False, True)}
    assert rows.keys() == {(1, False, True)} | stacks
    assert all(("error" in row) == (stack == 0) for (stack, _, _), row in rows.items())
    assert rows[2, False, True]["seconds_per_round"] > rows[2, False, True]["training_seconds"] > 0
    assert rows[2, False, True]["step_rows"] <= rows[2, False, False]["step_rows"]
    assert rows[2, False, True]["digest"] == rows[2, True, True]["digest"]
    fedpipe, pfllib = parts["peers"]["figures"]["rows"]
    assert fedpipe["seconds_per_round"] > 0
    assert "--pfllib is missing" in pfllib["reason"]


def test_gpu_script_without_time_reports_all_parts() -> None:
    status, figures = run_gpu_script(TOTAL="0")
    assert status == 1
    models = ("cnn4", "resnet18")
    bits, rounds = [f"bits-{model}-{n}" for model in models for n in (1, 2)], [f"round-{model}-2" for model in models]
    assert [*figures["parts"]] == ["contract", *bits, *rounds, "peers"]
    assert {part["error"] for part in figures["parts"].values()} == {"there was no time left"}
    assert figures["checks"] == {"two_runs_have_equal_bits": None, "graphs_have_equal_bits": None}


def test_gpu_figures_checks_compare_digests() -> None:
    """Runs are compared with their repetition, and recorded steps with others of the same width."""
    program = importlib.import_module("gpu_figures")

    def make_part(eager: str, recorded: str, steps: int = 1) -> dict[str, Any]:
        settings = {"stack": 8, "ladder": True}
        rows = [{"graphs": False, "recorded_steps": 0, "digest": eager}]
        rows.append({"graphs": True, "recorded_steps": steps, "digest": recorded})
        return {"figures": {"variants": [settings | row for row in rows]}}

    for again, expected in (("a", True), ("b", False)):
        parts = {"bits-cnn4-1": make_part("a", "a"), "bits-cnn4-2": make_part(again, again)}
        assert program.check_repetition(parts) is expected
        assert program.check_graphs(parts) is True
    assert program.check_graphs({"round-cnn4-20": make_part("a", "b")}) is False
    assert program.check_graphs({"round-cnn4-20": make_part("a", "b", steps=0)}) is None, "nothing was recorded"


def test_make_benchmarks_changes_only_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of a section contains the conditions and the table. All other text is unchanged."""
    program = importlib.import_module("results")
    page, text = tmp_path / "RESULTS.md", read("benchmarks/RESULTS.md")
    page.write_text(text)
    monkeypatch.setitem(program.PROGRAMS, "partitions", ("partitions.py", *SMALL["partitions"]))
    monkeypatch.setattr(sys, "argv", ["results.py", "partitions", "--page", str(page)])
    program.main()
    before, after = (
        re.split(r"(<!-- partitions -->\n.*?<!-- end -->)", part, flags=re.S) for part in (text, page.read_text())
    )
    assert (after[0], after[2]) == (before[0], before[2])
    assert re.search(
        r"cores, .*, load \d+\.\d before, \d{4}-\d\d-\d\d, at [0-9a-f]{7}.*:\n\n\| scheme \| seconds \|", after[1]
    )
    assert {"iid", "dirichlet", "shards"} < {*re.findall(r"^\| ([a-z-]+) \| \d+\.\d\d \|$", after[1], flags=re.M)}


def test_results_keep_figure_of_failed_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = importlib.import_module("results")
    script = tmp_path / "program.py"
    monkeypatch.setattr(program, "PROGRAMS", {"peers": (str(script), "{figure}")})
    monkeypatch.setattr(program, "FIGURE", tmp_path / "peers.svg")
    program.FIGURE.write_text("old")
    write_figure = "import sys\nfrom pathlib import Path\nPath(sys.argv[1]).write_text('new')\n"
    script.write_text(f"{write_figure}sys.exit(1)\n")
    with pytest.raises(subprocess.CalledProcessError):
        program.measure_table("peers", [])
    assert program.FIGURE.read_text() == "old"
    script.write_text(write_figure)
    program.measure_table("peers", [])
    assert program.FIGURE.read_text() == "new"


def test_results_page_has_section_of_each_program() -> None:
    program = importlib.import_module("results")
    sections = re.findall("<!-- ([a-z]+) -->", read("benchmarks/RESULTS.md"))
    assert sorted(sections) == sorted([*program.PROGRAMS, *["end"] * len(program.PROGRAMS)])
    table = program.render_figures({"seconds": 4187.312, "ratio": 1.4286, "runs": 1350, "variants": [], "digest": "a"})
    assert table.splitlines()[2:] == ["| seconds | 4,187 |", "| ratio | 1.43 |", "| runs | 1,350 |"]


def test_results_tables_show_their_commit() -> None:
    """The text above each table contains the commit of its numbers."""
    page = read("benchmarks/RESULTS.md")
    tables = [part for part in page.split("\n## ")[1:] if "\n|---" in part]
    assert len(tables) > 5
    for part in tables:
        assert re.search(r"at [0-9a-f]{7}\b", part.split("\n|")[0]), part.splitlines()[0]
