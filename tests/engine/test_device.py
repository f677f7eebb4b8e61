"""A run on a GPU keeps its states on the GPU, never mixes devices, and writes the same files as on the CPU.

No GPU is needed, because the CPU simulates one with its own arithmetic (`tests/fake_device.py`).
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils import _pytree as pytree

from fedpipe import testing
from fedpipe.algorithms.base import Algorithm
from fedpipe.core.components import component, registry
from fedpipe.core.storage.files import read_pt
from fedpipe.engine import rounds as running
from fedpipe.engine.clients import loop
from fedpipe.engine.run import Run
from fedpipe.engine.server import device as server_device
from fedpipe.testing import checks, trial
from tests import fake_device
from tests import small_studies as studies

ROUNDS = 2
NAMES = registry.list_components(component.ALGORITHM)
DW = sorted(set(NAMES) - {"feddw", "fednh"})  #: these two define the classification layer themselves

#: With these parameters, server rules make decisions within two rounds, and plans of passes are small.
PARAMETERS: dict[str, dict[str, Any]] = {
    "cfl": {"after": 0, "eps1": 100, "eps2": 0},
    "feddual": {"epsilon": 0.01},
    "fedrep": {"head_epochs": 2},
    "pfedme": {"attraction": 5.0},
}
#: Server rules that read values from the device, and the decision for which they need these values.
DECIDES = {
    "ccvr": "which classes have two samples, so that features are drawn for them",
    "cfl": "which clients leave a cluster: scikit-learn bisects it",
    "fedas": "the weights of the bodies, which are the clients' Fisher traces",
    "feddbe": "whether the mean features are known",
    "feddual": "whether the barycenter has converged, so that its iterations end",
    "fedfomo": "which models a client is sent, which it does not know yet",
    "fednova": "whether a client took any step",
    "fedpac": "the weights of the heads: SciPy minimizes their variance",
    "ifca": "which model each client has chosen",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all runs, because they share the data set and the partition."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def change_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def prepare_study(name: str, parameters: dict[str, Any], participation: float, **federation: Any) -> Any:
    """Plan a run of two rounds. Only the body of its network is large."""
    params = studies.settings(
        (name,),
        ROUNDS,
        model={"name": "mlp", "hidden": [64]},
        federation={"participation": participation, "batch_size": 100, **federation},
        evaluation={"protocols": ["global-on-global", "personal-on-local", "trained-on-local"]},
    )
    params["algorithms"][name] = PARAMETERS.get(name, {}) | parameters
    return studies.prepare(params)


class RuleRecorder:
    """Counts the values that the server's rule reads, and records the devices of its arguments and results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, crossings: Counter[str]) -> None:
        self.read, self.devices, rule = 0, set[torch.device](), running.aggregate_uploads

        def count_reads(*args: Any) -> Any:
            reads_before = crossings["read"]
            server = rule(*args)
            self.read += crossings["read"] - reads_before
            leaves = pytree.tree_leaves([args[1], [upload for _, _, upload in args[2]], server])
            self.devices |= {leaf.device for leaf in leaves}
            return server

        monkeypatch.setattr(running, "aggregate_uploads", count_reads)


def delete_results(run: Run) -> None:
    for part in ("rounds", "segments"):
        shutil.rmtree(run.files.path / part, ignore_errors=True)


def count_crossings_by_round(run: Run, crossings: Counter[str]) -> Iterator[Counter[str]]:
    """Run a study. Yield the transfers between devices of each round."""
    for number in run.run_segment(ROUNDS):
        if number:
            yield Counter(crossings)
        crossings.clear()


def count_large_tensors(run: Run, number: int) -> int:
    """Count large tensors in the files of a round's states."""
    files = run.files.get_round_files(number)
    trees = [read_pt(path) for path in (files.server_state, files.client_states) if path.exists()]
    return sum(leaf.numel() >= fake_device.LARGE for leaf in pytree.tree_leaves(trees))


def require_equal_files(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    parameters: dict[str, Any] | None = None,
    participation: float = 1.0,
    stack: int = 5,
    **federation: Any,
) -> tuple[Counter[str], int, RuleRecorder]:
    """Require the files of a run on the CPU. Return the last round's transfers and large tensors, and the recorder."""
    plan = prepare_study(name, parameters or {}, participation, **federation)
    run = studies.open_runs(plan, stack=stack)[0]
    list(run.run_segment(ROUNDS))
    expected = studies.hash_results(run.files.path)
    delete_results(run)
    monkeypatch.setattr(running, "configure_device", lambda execution: fake_device.DEVICE)
    monkeypatch.setattr(loop, "ThreadPoolExecutor", fake_device.SequentialExecutor)
    with fake_device.use_device() as crossings:
        rules = RuleRecorder(monkeypatch, crossings)
        run = studies.open_runs(plan, stack=stack)[0]
        *_, last_round = count_crossings_by_round(run, crossings)
    assert studies.hash_results(run.files.path) == expected
    has_no_upload = name == "local" and not parameters
    assert rules.devices == (set() if has_no_upload else {fake_device.DEVICE})
    result = count_large_tensors(run, ROUNDS)
    delete_results(run)
    return last_round, result, rules


@pytest.mark.parametrize("name", studies.mark_others_slow(NAMES))
def test_only_written_tensors_leave_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients train in two stacks in every round. Then all are evaluated. No large tensor is sent to the device."""
    last_round, result, rules = require_equal_files(monkeypatch, name)
    assert last_round["large, to the host"] == result
    assert last_round["large, to the device"] == 0
    assert bool(rules.read) == (name in DECIDES)


@pytest.mark.parametrize(
    ("name", "stack"), [("fedavg", 1), ("cfl", 1), ("scaffold", 1), ("scaffold", 5), ("fedfomo", 5)]
)
def test_kept_states_of_inactive_clients_stay_on_host_until_needed(
    name: str, stack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the clients train in a round. The kept states of the others are on the host."""
    last_round, result, _ = require_equal_files(monkeypatch, name, participation=0.5, stack=stack)
    assert last_round["large, to the host"] == result
    assert last_round["large, to the device"] <= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DW if name in {*studies.REPRESENTATIVE, *DECIDES}])
def test_device_run_with_dw_writes_files_of_cpu_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    last_round, result, _ = require_equal_files(monkeypatch, name, {"dw": {"mu": 0.7}})
    assert (last_round["large, to the host"], last_round["large, to the device"]) == (result, 0)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("momentum", marks=pytest.mark.slow)])
def test_device_run_with_server_optimizer_writes_files_of_cpu_run(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_round, result, _ = require_equal_files(monkeypatch, "fedavg", server={"optimizer": optimizer})
    assert (last_round["large, to the host"], last_round["large, to the device"]) == (result, 0)


def test_single_round_jobs_load_files_onto_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare_study("scaffold", {}, 0.5)
    run = studies.open_runs(plan, stack=5)[0]
    list(run.run_segment(ROUNDS))
    expected = {name: bits for name, bits in studies.hash_results(run.files.path).items() if name.endswith(".pt")}
    delete_results(run)
    monkeypatch.setattr(running, "configure_device", lambda execution: fake_device.DEVICE)
    with fake_device.use_device() as crossings:
        rules = RuleRecorder(monkeypatch, crossings)
        studies.run_single_rounds(plan, ROUNDS, size=10, stack=5)
    result = {name: bits for name, bits in studies.hash_results(run.files.path).items() if name.endswith(".pt")}
    assert result == expected
    assert rules.devices == {fake_device.DEVICE}
    delete_results(run)


def test_states_too_large_for_device_stay_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a round of a thousand participants, if only one stack fits on the GPU."""
    plan = prepare_study("scaffold", {}, 1.0)
    run = studies.open_runs(plan, stack=5)[0]
    list(run.run_segment(ROUNDS))
    expected = studies.hash_results(run.files.path)
    delete_results(run)
    monkeypatch.setattr(running, "configure_device", lambda execution: fake_device.DEVICE)
    monkeypatch.setattr(server_device, "MAX_DEVICE_BYTES", 100_000)
    with fake_device.use_device() as crossings:
        rules = RuleRecorder(monkeypatch, crossings)
        list(studies.open_runs(plan, stack=5)[0].run_segment(ROUNDS))
    assert studies.hash_results(run.files.path) == expected
    assert rules.devices == {fake_device.HOST}
    delete_results(run)


def test_fake_device_rejects_mixed_devices_and_nondeterministic_kernels() -> None:
    with fake_device.use_device() as crossings:
        device_tensor, host_tensor = torch.ones(3).to(fake_device.DEVICE), torch.ones(3)
        assert (device_tensor * 2 + torch.tensor(1.0)).sum().item() == 9
        assert crossings == {"small, to the device": 1, "read": 1}
        with pytest.raises(RuntimeError, match="on the device and on the host"):
            device_tensor + host_tensor
        with pytest.raises(RuntimeError, match="on the device and on the host"):
            device_tensor.index_fill(0, torch.tensor([1]), 0)
        with pytest.raises(RuntimeError, match="no deterministic kernel"):
            device_tensor.cumsum(0)
        assert device_tensor.index_fill(0, torch.tensor([1], device=fake_device.DEVICE), 0).tolist() == [1, 0, 1]


@pytest.mark.slow
def test_algorithm_checks_pass_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials use the device of FEDPIPE_DEVICE, as in benchmarks/gpu.sh, and never mix devices.

    SCAFFOLD has states of the server and of clients.
    """
    for module in (trial, checks):
        monkeypatch.setattr(module, "select_trial_device", lambda: fake_device.DEVICE)
    monkeypatch.setattr(loop, "ThreadPoolExecutor", fake_device.SequentialExecutor)
    algorithm = cast(Algorithm, registry.build_component(component.ALGORITHM, "scaffold", {}))
    with fake_device.use_device():
        assert testing.check_algorithm(algorithm) == []


def test_trial_uses_device_of_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPIPE_DEVICE", "auto")
    device = testing.make_trial("fedavg").run(1).server["model"]["head.bias"].device.type
    assert device == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.delenv("FEDPIPE_DEVICE")
    assert testing.make_trial("fedavg").clients.device.type == "cpu"
