"""Concept drift keeps earlier rounds. Later rounds equal those of a run on the new samples."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

import fedpipe
from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.analysis.load import Results
from fedpipe.core.components import component, registry
from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine import collect, replay
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.load import load_federated_data
from fedpipe.engine.diagnostics import gradients, head_norms, local_models
from fedpipe.engine.run import Run
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.execution import Execution
from tests import small_studies as studies

CLIENTS, DRIFT_ROUND, ROUNDS = 6, 2, 3
DRIFTING, HELD_OUT = (1, 4, 5), [5]
LABEL_MAP = {1: 2, 2: 3, 3: 1}
LABELS: dict[str, Any] = {"round": DRIFT_ROUND, "clients": list(DRIFTING), "label_map": LABEL_MAP}
ROTATION: dict[str, Any] = {"round": DRIFT_ROUND, "clients": list(DRIFTING), "kind": "rotation", "angle": 90}
MODELS = ("global", "personal", "trained", "kept", "finetuned")
PROTOCOLS = [
    "global-on-global",
    *(f"{model}-on-{test}" for model in MODELS for test in ("local", "validation")),
    "personal-on-train",
    "personal-on-global",
    "prototype-on-local",
]
ALGORITHMS = studies.mark_others_slow(
    registry.list_components(component.ALGORITHM), ("fedavg", "fedala", "ccvr", "pfps_lwc")
)


def prepare(label: str = "fedavg", drift: Any = None, **federation: Any) -> NewPlan:
    sections: dict[str, Any] = {
        "dataset": {"name": "digits", "validation_fraction": 0.2},
        "partition": {"alpha": 1.0},
        "federation": {"clients": CLIENTS, "participation": 1.0, "drift": drift} | federation,
        "evaluation": {"protocols": PROTOCOLS, "metrics": ["accuracy", "ece"]},
    }
    return studies.prepare(studies.settings((label,), ROUNDS, **sections))


def open_run(drift: Any = None, label: str = "fedavg", stack: int = 1, **federation: Any) -> Run:
    (run,) = studies.open_runs(prepare(label, drift, **federation), stack=stack)
    return run


def read_rows(run: Run) -> list[dict[str, Any]]:
    collect.collect_rounds(run.files, ROUNDS, "all")
    return layout.read_merged_table(run.files.list_merged_files()[-1].metrics).to_pylist()


def get_bits(run: Run, numbers: Sequence[int]) -> dict[str, str]:
    """Return the SHA-256 of all tensors and tables of some rounds."""
    return {
        name: sha256
        for name, sha256 in studies.hash_results(run.files.path).items()
        if name.startswith("rounds/") and int(Path(name).parent.name) in numbers
    }


def transform(x: Tensor, y: Tensor, drift: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Apply the new concept to samples, one label or pixel at a time."""
    if "label_map" in drift:
        return x, torch.tensor([LABEL_MAP.get(int(label), int(label)) for label in y])
    turned = torch.empty_like(x)
    for row in range(8):
        for column in range(8):
            turned[..., 7 - column, row] = x[..., row, column]
    return turned, y


def load_new_concept(settings: RunSettings, drift: dict[str, Any]) -> FederatedData:
    """Load the clients of a study, with samples of the new concept for the drifting clients."""
    clients = load_federated_data(settings, torch.float32, torch.device("cpu"))
    parts, inputs, labels = [clients.train, clients.test, clients.validation], [clients.x], [clients.y]
    for client in DRIFTING:
        for part in parts:
            x, y = transform(clients.x[part[client]], clients.y[part[client]], drift)
            part[client] = np.arange(len(part[client])) + sum(map(len, labels))
            inputs.append(x)
            labels.append(y)
    return FederatedData(
        torch.cat(inputs),
        torch.cat(labels),
        clients.train,
        clients.test,
        clients.global_test,
        clients.classes,
        clients.seed,
        validation=clients.validation,
        data_checksums=clients.data_checksums,
    )


def check_against_new_data(label: str, drift: dict[str, Any], stack: int, **federation: Any) -> None:
    """Compare a run with a drift to a run without one, which continues on a data set of the new concept."""
    run = open_run(drift, label, stack, **federation)
    list(run.run_segment(ROUNDS))
    plain = open_run(None, label, stack, **federation)
    list(plain.run_segment(DRIFT_ROUND - 1))
    before, after = range(DRIFT_ROUND), range(DRIFT_ROUND, ROUNDS + 1)
    assert get_bits(run, before) == get_bits(plain, before)
    old_rounds = RunFiles(Path("old") / plain.files.path.name)
    shutil.copytree(plain.files.path, old_rounds.path)
    shutil.rmtree(plain.files.path / "segments")
    new = Run(plain.files, Execution(stack=stack), clients=load_new_concept(plain.settings, drift))
    list(new.run_segment(ROUNDS))
    assert get_bits(run, after) == get_bits(new, after)
    assert get_bits(run, after), "some files should be compared"
    if label in ("fedavg", "fedala"):  # the drift has an effect
        unchanged = Run(old_rounds, Execution(stack=stack))
        for number in after:
            unchanged.run_round(number)
        assert not set(get_bits(run, after).values()) & {
            sha256 for name, sha256 in get_bits(unchanged, after).items() if name.endswith("metrics.parquet")
        }


@pytest.mark.parametrize("label", ALGORITHMS)
def test_drifted_run_equals_run_on_new_samples_bit_for_bit(label: str) -> None:
    check_against_new_data(label, LABELS, stack=1, held_out=HELD_OUT)


@pytest.mark.parametrize(
    ("stack", "drift", "held_out"), [(1, ROTATION, 0), (4, ROTATION, HELD_OUT), (4, LABELS, 0)], ids=str
)
def test_drifted_stack_and_rotation_equal_run_on_new_samples(stack: int, drift: dict[str, Any], held_out: Any) -> None:
    check_against_new_data("fedala", drift, stack, held_out=held_out)


@pytest.mark.parametrize("stack", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_drifted_single_rounds_with_blocks_have_equal_bits(stack: int) -> None:
    studies.require_equal_bits(prepare("fedala", LABELS), ROUNDS, size=4, stack=stack)
    for number in range(ROUNDS + 1):
        comparison = replay.replay_round(open_run(LABELS, "fedala", stack), number)
        assert not comparison.differing_files


def test_drift_changes_only_samples_of_drifting_clients() -> None:
    """A drift in round 1 changes all rounds, and only the drifting clients have other samples."""
    clients = open_run({"round": 1, "clients": 0.5}).clients
    drifting = [client for client in range(CLIENTS) if clients.has_drifted(client, 0, 1)]
    assert len(drifting) == 3
    assert clients.select_round_samples(0) is clients
    new = clients.select_round_samples(1)
    assert new is clients.select_round_samples(9)
    for client in range(CLIENTS):
        for part in ("train", "test", "validation"):
            old_rows, new_rows = getattr(clients, part)[client], getattr(new, part)[client]
            assert torch.equal(clients.x[old_rows], new.x[new_rows])
            changed = clients.y[old_rows] != new.y[new_rows]
            assert changed.all() if client in drifting else np.array_equal(old_rows, new_rows)
        counts = np.bincount(new.y[new.train[client]].numpy(), minlength=10)
        assert new.class_counts[client].tolist() == counts.tolist()
    assert np.array_equal(new.global_test, clients.global_test)
    assert int(new.global_test.max()) < 1797


# -- results -----------------------------------------------------------------------------------------------------------


def train_plain_loop(results: Results) -> dict[str, Tensor]:
    """Train FedAvg in plain PyTorch on the batches of a study."""
    x, y = results.samples("fedavg")
    model = dict(results.model("fedavg", round=0).named_parameters())
    for number in range(1, ROUNDS + 1):
        sums, total = {name: torch.zeros_like(value) for name, value in model.items()}, 0
        for client in range(CLIENTS):
            local, size = dict(model), 0
            for batch in results.batches("fedavg", client=client, round=number):
                leaves = {name: value.detach().requires_grad_() for name, value in local.items()}
                hidden = F.relu(F.linear(x[batch].flatten(1), leaves["body.1.weight"], leaves["body.1.bias"]))
                loss = F.cross_entropy(F.linear(hidden, leaves["head.weight"], leaves["head.bias"]), y[batch])
                gradient = torch.autograd.grad(loss, list(leaves.values()))
                local = {name: leaves[name] - 0.1 * g for name, g in zip(leaves, gradient, strict=True)}
                size += len(batch)
            sums, total = {name: sums[name] + size * local[name].detach() for name in sums}, total + size
        model = {name: value / total for name, value in sums.items()}
    return model


@pytest.mark.parametrize("drift", [LABELS, ROTATION], ids=lambda drift: drift.get("kind", "labels"))
def test_batches_and_samples_of_results_match_drifted_run(drift: dict[str, Any]) -> None:
    (run,) = studies.open_runs(prepare("fedavg", drift, dtype="float64"), stack=1)
    list(run.run_segment(ROUNDS))
    results = fedpipe.load()
    x, y = results.samples("fedavg")
    old_x, old_y = x[:1797], y[:1797]
    drifting_sizes = [
        sum(len(part[client]) for part in (run.clients.train, run.clients.test, run.clients.validation))
        for client in DRIFTING
    ]
    assert len(y) == 1797 + sum(drifting_sizes)
    for client in range(CLIENTS):
        earlier, later = (results.test("fedavg", client=client, round=number) for number in (1, 2))
        rows = run.clients.test[client]
        assert torch.equal(earlier[0], old_x[rows])
        assert torch.equal(earlier[1], old_y[rows])
        expected = transform(*earlier, drift) if client in DRIFTING else earlier
        for result in (later, results.test("fedavg", client=client)):
            assert torch.equal(result[0], expected[0])
            assert torch.equal(result[1], expected[1])
    assert torch.equal(results.test("fedavg")[1], old_y[run.clients.global_test])
    model = results.model("fedavg")
    for name, value in train_plain_loop(results).items():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=1e-12, atol=1e-12)
    scores = {(row["round"], row["client"], row["protocol"]): row["correct"] for row in read_rows(run)}
    for client in range(CLIENTS):
        inputs, labels = results.test("fedavg", client=client)
        correct = int((model(inputs).argmax(-1) == labels).sum())
        assert scores[ROUNDS, client, "global-on-local"] == scores[ROUNDS, client, "personal-on-local"] == correct
    inputs, labels = results.test("fedavg")
    assert scores[ROUNDS, -1, "global-on-global"] == int((model(inputs).argmax(-1) == labels).sum())


def test_samples_of_new_clients_drift() -> None:
    run = open_run(LABELS, held_out=HELD_OUT)
    list(run.run_segment(ROUNDS))
    results = fedpipe.load()
    (earlier_x, earlier_y), (x, y) = (results.test("fedavg", client=5, round=number) for number in (1, 2))
    assert torch.equal(x, earlier_x)
    assert torch.equal(y, transform(earlier_x, earlier_y, LABELS)[1])
    correct = {
        row["round"]: row["correct"]
        for row in read_rows(run)
        if (row["client"], row["protocol"]) == (5, "new-personal-on-local")
    }
    for number, labels in [(1, earlier_y), (2, y), (3, y)]:
        model = results.model("fedavg", client=5, round=number)
        assert correct[number] == int((model(x).argmax(-1) == labels).sum())


def test_diagnostics_use_samples_of_their_round() -> None:
    run = open_run(LABELS)
    list(run.run_segment(ROUNDS))
    counts = {number: run.clients.select_round_samples(number).class_counts for number in (1, 2)}
    for number in (1, 2):
        table = head_norms.compute_table(run, number, {"models": ["trained", "finetuned"], "finetune_epochs": 1})
        for row in table.to_pylist():
            assert row["samples"] == int(counts[number][row["owner"]][row["class"]])
        norms = {
            row["client"]: row["norm"]
            for row in gradients.compute_table(run, number, {}).to_pylist()
            if row["name"] == "head"
        }
        clients = run.clients.select_round_samples(number)
        model = local_models.get_global_model(run, number)
        for client in DRIFTING:
            gradient = gradients.compute_gradient(run, model, None, clients.train[client])
            head = torch.cat([gradient["head.weight"].flatten(), gradient["head.bias"]])
            assert norms[client] == pytest.approx(float(head.norm()), rel=1e-6)
    assert not torch.equal(counts[1][1], counts[2][1])
    rows = {(row["round"], row["client"]): row for row in read_rows(run) if row["protocol"] == "finetuned-on-local"}
    for number in (1, 2):
        clients = run.clients.select_round_samples(number)
        for local in local_models.compute_personal_models(run, number, finetune_epochs=1):
            x, y = clients.gather_samples(clients.test[local.client])
            loss = float(F.cross_entropy(run.algorithm.net(local.model, x), y))
            assert loss == pytest.approx(rows[number, local.client]["loss"], rel=1e-5)


@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    """FedAvg in which updates of the largest clients always fail, and those of larger clients since the drift."""

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        fails = (info.size >= 240) | ((info.size >= 200) & (info.round >= DRIFT_ROUND))
        return super().start(state, download, info) | {"factor": torch.where(fails, torch.nan, 1.0)}

    @override
    def upload(self, client: State) -> State:
        return {"model": super().upload(client)["model"] * client["factor"]}


@pytest.mark.parametrize("stack", [1, 3])
def test_client_with_failed_updates_since_drift_has_no_kept_on_local_score(stack: int) -> None:
    params = studies.settings(
        ("failing",),
        ROUNDS,
        federation={"clients": CLIENTS, "participation": 1.0, "drift": LABELS | {"clients": 1.0}},
        evaluation={"protocols": ["kept-on-local", "kept-on-global"]},
    )
    params["algorithms"] = {"failing": {"algorithm": f"{__name__}.Failing"}}
    (run,) = studies.open_runs(studies.prepare(params), stack=stack)
    list(run.run_segment(ROUNDS))
    everyone, sizes = {*range(CLIENTS)}, run.clients.sizes
    never, once = ({*np.flatnonzero(mask).tolist()} for mask in (sizes >= 240, (sizes >= 200) & (sizes < 240)))
    assert never, sizes
    assert once, sizes
    rows = {(row["round"], row["protocol"], row["client"]): row["correct"] for row in read_rows(run)}
    for number in range(1, ROUNDS + 1):
        measured = {
            protocol: {row[2] for row in rows if row[:2] == (number, protocol)}
            for protocol in ("kept-on-local", "kept-on-global")
        }
        assert measured["kept-on-local"] == everyone - (once if number >= DRIFT_ROUND else set())
        assert measured["kept-on-global"] == everyone
    for client in never:  # their kept model is the initial one
        x, y = run.clients.gather_samples(run.clients.test[client])
        predictions = run.algorithm.net(run.make_initial_model(0), x).argmax(-1)
        assert rows[1, "kept-on-local", client] == int((predictions == y).sum())
        for number in range(DRIFT_ROUND, ROUNDS + 1):
            assert rows[number, "kept-on-local", client] == int((predictions == transform(x, y, LABELS)[1]).sum())
