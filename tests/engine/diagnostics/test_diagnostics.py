"""Diagnostics of a run, compared with plain PyTorch and with the recorded results of the run."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.algorithms.batch import State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout, packing
from fedpipe.core.storage.files import read_json, read_pt, write_json, write_pt
from fedpipe.engine.clients import optimizers
from fedpipe.engine.clients.executor import BUFFERS
from fedpipe.engine.diagnostics import features, gradients, head_norms, local_models, step_traces, surface
from fedpipe.engine.run import Run
from tests import small_studies as studies
from tests.algorithms.oracles import list_batches
from tests.errors import rejects

ROUNDS, AT = 3, 2
PROTOCOLS = ["personal-on-local", "trained-on-local", "finetuned-on-local"]
NORMS = {"models": ["trained"], "finetune_epochs": 2}


def build_normalized_model(shape: tuple[int, ...], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """A custom model with batch normalization."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 12), nn.BatchNorm1d(12), nn.ReLU())
    return body, nn.Linear(12, num_classes)


def build_deep_head(shape: tuple[int, ...], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """A custom model whose head has two layers."""
    return nn.Flatten(), nn.Sequential(nn.Linear(math.prod(shape), 4), nn.ReLU(), nn.Linear(4, num_classes))


@dataclass(frozen=True, kw_only=True)
class PredictByParameters(FedAvg):
    """FedAvg whose `predict` uses other methods of the network, too."""

    @override
    def predict(self, client: State, x: Tensor) -> Tensor:
        return self.net(self.net.parameters(client["model"]), x)


def run_study(
    label: str = "fedavg", stack: int | None = None, model: dict[str, Any] | None = None, **sections: Any
) -> Run:
    evaluation = {"protocols": PROTOCOLS, "finetune_epochs": 2}
    params = studies.settings((label,), ROUNDS, evaluation=evaluation, dataset={"subset": 400}, **sections)
    plan = studies.prepare(params | ({"model": model} if model else {}))
    (run,) = studies.open_runs(plan, **({"stack": stack} if stack else {}))
    studies.finish_run(run, ROUNDS, plan.keep_models)
    return run


def build_network(run: Run, local: local_models.LocalModel) -> nn.Module:
    """Build a plain PyTorch network with a client's model."""
    return studies.build_network(run, {**local.model, **(local.buffers or {})})


def count_correct_predictions(run: Run, local: local_models.LocalModel) -> int:
    x, y = run.clients.gather_samples(run.clients.test[local.client])
    with torch.no_grad():
        return int((build_network(run, local)(x).argmax(-1) == y).sum())


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "is_accepted"), [("bfloat16", True), ("full", False)])
def test_replay_on_another_device_accepts_rounding_of_precision(
    monkeypatch: pytest.MonkeyPatch, precision: str, is_accepted: bool
) -> None:
    """Steps that are 1 % longer simulate another device. They exceed rounding in float32, but not in bfloat16."""
    run = run_study(federation={"precision": precision})
    update, environment = optimizers.SGD.update_parameters, run.get_environment()
    monkeypatch.setattr(Run, "get_environment", lambda self: environment | {"device": "another CPU"})
    monkeypatch.setattr(
        optimizers.SGD,
        "update_parameters",
        lambda self, parameters, gradient, *rest: update(self, parameters, gradient * 1.01, *rest),
    )
    if is_accepted:
        assert len(local_models.replay_local_models(run, AT)) == run.federation.participants
    else:
        with pytest.raises(ArtifactError, match=f"round {AT} has another result when it is repeated"):
            local_models.replay_local_models(run, AT)


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize(
    ("label", "sections"),
    [
        ("fedavg", {}),
        ("cwfedavg", {}),
        ("scaffold", {}),
        ("feddw", {}),
        ("pfedme", {}),
        ("fedala", {}),
        ("fedper", {"model": {"name": f"{__name__}.build_normalized_model"}, "federation": {"buffers": "keep"}}),
        ("own", {"algorithms": {"own": {"algorithm": f"{__name__}.PredictByParameters"}}}),
    ],
)
def test_local_models_have_accuracies_recorded_by_protocols(label: str, sections: dict[str, Any], stack: int) -> None:
    """Plain PyTorch computes the recorded accuracies from the models that diagnostics read."""
    run = run_study(label, stack, **sections)
    recorded = {
        (row["protocol"], row["client"]): row["correct"]
        for row in layout.read_merged_table(run.files.get_merged_files(ROUNDS).metrics).to_pylist()
        if row["round"] == AT
    }
    models_by_protocol = {
        "trained-on-local": local_models.replay_local_models(run, AT),
        "personal-on-local": list(local_models.compute_personal_models(run, AT)),
        "finetuned-on-local": list(local_models.compute_personal_models(run, AT, 2)),
    }
    assert [local.client for local in models_by_protocol["trained-on-local"]] == run.select_participants(AT)
    for protocol, result in models_by_protocol.items():
        assert {(protocol, local.client): count_correct_predictions(run, local) for local in result} == {
            key: value for key, value in recorded.items() if key[0] == protocol
        }
    assert (
        len({count_correct_predictions(run, local) for result in models_by_protocol.values() for local in result}) > 3
    ), "models must differ"


@pytest.mark.parametrize("label", ["fedrod", "fedcp", "gpfl", "feddbe"])
def test_method_that_classifies_with_several_parts_is_rejected(label: str) -> None:
    run = run_study(label)
    with rejects(f"diagnostics: {label}.predict ", SettingsError):
        list(local_models.compute_personal_models(run, AT))


def test_replayed_local_models_equal_uploads() -> None:
    run = run_study()
    block = run.train(AT, run.select_participants(AT))
    for local, upload in zip(local_models.replay_local_models(run, AT), block.uploads, strict=True):
        assert all(torch.equal(local.model[name], value) for name, value in upload["model"].items())


def test_diagnostic_rejects_round_with_different_result_in_replay() -> None:
    run = run_study()
    files = run.files.get_round_files(AT)
    packing.unpack_folder(run.files.rounds_folder)
    complete_states_marker, marker = read_json(files.complete_states_marker), read_json(files.marker)
    state = {"model": {name: 1.5 * value for name, value in read_pt(files.server_state)["model"].items()}}
    complete_states_marker["sha256"][files.server_state.name] = marker["sha256"][files.server_state.name] = write_pt(
        files.server_state, state
    )
    marker["sha256"][files.complete_states_marker.name] = write_json(
        files.complete_states_marker, complete_states_marker
    )
    write_json(files.marker, marker)
    (repeated_run,) = [Run(run.files)]
    with pytest.raises(ArtifactError, match=rf"round {AT} has another result when it is repeated: bits differ in"):
        head_norms.compute_table(repeated_run, AT, NORMS)


# -- head norms --------------------------------------------------------------------------------------------------------


def test_head_norm_rows_match_hand_computed_values() -> None:
    result = list(
        head_norms.make_norm_rows("trained", 7, torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]), [6, 0, 2])
    )
    assert result == [
        {"model": "trained", "owner": 7, "class": 0, "norm": 5, "relative": 5 / 6, "share": 0.75, "samples": 6},
        {"model": "trained", "owner": 7, "class": 1, "norm": 0, "relative": 0, "share": 0, "samples": 0},
        {"model": "trained", "owner": 7, "class": 2, "norm": 1, "relative": 1 / 6, "share": 0.25, "samples": 2},
    ]
    (row, _) = head_norms.make_norm_rows("class", 1, torch.zeros(2, 3), None)
    assert (row["relative"], row["share"], row["samples"]) == (0, None, None)


def test_class_distribution_distance_matches_hand_computed_value() -> None:
    heads = {0: ([[3.0, 4.0], [0.0, 5.0]], [1, 3]), 1: ([[1.0, 0.0], [0.0, 0.0]], [4, 0])}
    rows = [
        row
        for owner, (head, counts) in heads.items()
        for row in head_norms.make_norm_rows("trained", owner, torch.tensor(head), counts)
    ]
    rows += head_norms.make_norm_rows("received", 0, torch.ones(2, 2), [0, 8])
    table = pa.Table.from_pylist(rows, head_norms.SCHEMA)
    assert head_norms.compute_class_fraction_estimate_error(table) == pytest.approx((math.sqrt(2 * 0.25**2) + 0) / 2)
    assert head_norms.compute_class_fraction_estimate_error(table, "received") == pytest.approx(math.sqrt(0.5))


def test_head_norms_table_covers_all_models_of_run() -> None:
    run = run_study("cwfedavg")
    model_names = ["received", "trained", "finetuned", "class"]
    frame = head_norms.compute_table(run, AT, {"models": model_names, "finetune_epochs": 2}).to_pandas()
    assert list(frame["model"].unique()) == model_names
    all_clients, participants = range(10), run.select_participants(AT)
    owners = {"received": all_clients, "trained": participants, "finetuned": all_clients, "class": range(10)}
    for name, ids in owners.items():
        assert list(frame[frame["model"] == name]["owner"].unique()) == list(ids)
    for name, epochs in (("received", 0), ("finetuned", 2)):
        heads = {
            each.client: each.model["head.weight"] for each in local_models.compute_personal_models(run, AT, epochs)
        }
        norms = [float(row.norm()) for owner in all_clients for row in heads[owner]]
        assert frame[frame["model"] == name]["norm"].to_list() == pytest.approx(norms, rel=1e-6)
    classes = run.load_server_state(AT)["classes"]["head.weight"]
    rows_of_owner = frame[(frame["model"] == "class") & (frame["owner"] == 4)]
    assert rows_of_owner["norm"].to_list() == pytest.approx([float(row.norm()) for row in classes[4]], rel=1e-6)
    counts = np.bincount(run.clients.y[run.clients.train[participants[0]]].numpy(), minlength=10)
    rows_of_owner = frame[(frame["model"] == "trained") & (frame["owner"] == participants[0])]
    assert rows_of_owner["samples"].to_list() == counts.tolist()
    assert rows_of_owner["share"].to_list() == pytest.approx((counts / counts.sum()).tolist())
    server = run.load_server_state(AT)["distributions"][
        participants[0]
    ]  # the server computes it from the uploaded head
    assert rows_of_owner["relative"].to_list() == pytest.approx(server.tolist(), rel=1e-5)


def test_head_norms_of_global_model_match_server_state() -> None:
    run = run_study()
    frame = head_norms.compute_table(run, AT, {"models": ["global"], "finetune_epochs": 1}).to_pandas()
    head = run.load_server_state(AT)["model"]["head.weight"]
    assert frame["norm"].to_list() == pytest.approx([math.sqrt(float((row**2).sum())) for row in head], rel=1e-6)
    assert set(frame["owner"]) == {-1}
    assert int(frame["samples"].sum()) == sum(run.clients.sizes)


def test_head_norms_reject_method_without_requested_model() -> None:
    run = run_study("local")
    with pytest.raises(SettingsError, match=r"^diagnostics: local has no global model"):
        head_norms.compute_table(run, AT, {"models": ["global"], "finetune_epochs": 1})
    with pytest.raises(SettingsError, match=r"^diagnostics: local has no class models"):
        head_norms.compute_table(run, AT, {"models": ["class"], "finetune_epochs": 1})


def test_diagnostics_of_heads_reject_model_without_linear_head() -> None:
    run = run_study(model={"name": f"{__name__}.build_deep_head"})
    with pytest.raises(SettingsError, match=r"^diagnostics: the models of fedavg have no head\.weight.* linear head"):
        head_norms.compute_table(run, AT, NORMS)
    with pytest.raises(SettingsError, match=r"^diagnostics: the models of fedavg have no head\.weight.* linear head"):
        features.compute_table(run, AT, {"samples": 10, "perplexity": 2, "seed": 0})
    with pytest.raises(SettingsError, match=r"^diagnostics: these models have no head\.weight.* linear head"):
        step_traces.compute_table(run, AT, {"clients": None})


# -- step traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [1, 3])
def test_step_traces_match_manual_training(stack: int) -> None:
    run = run_study("cwfedavg", stack, algorithms={"cwfedavg": {"wdr": 3.0}}, federation={"local_epochs": 2})
    table = step_traces.compute_table(run, AT, {"clients": None})
    for client in run.select_participants(AT):
        net = studies.build_network(run, load_received_model(run, client))
        share = run.clients.class_counts[client] / run.clients.class_counts[client].sum()
        optimizer = torch.optim.SGD(net.parameters(), lr=run.federation.learning_rate)
        expected = [compute_class_fractions(net)]
        for x, y in list_batches(run, client, AT):
            norm = net.head.weight.norm(dim=1)
            loss = F.cross_entropy(net(x), y) + 1.5 * (share - norm / norm.sum()).norm()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(compute_class_fractions(net))
        rows_of_owner = table.filter(pa.compute.equal(table["client"], client)).to_pandas()
        result = rows_of_owner.pivot(index="step", columns="class", values="approximate").to_numpy()
        assert result.shape == (len(expected), 10)
        np.testing.assert_allclose(result, np.array(expected), rtol=2e-4)
        assert rows_of_owner[rows_of_owner["step"] == 0]["share"].to_list() == pytest.approx(share.tolist())


def test_step_traces_contain_only_steps_of_training() -> None:
    """A client of FedDW also measures its soft labels, which is a pass without steps."""
    run = run_study("feddw")
    frame = step_traces.compute_table(run, AT, {"clients": None}).to_pandas()
    counts = frame.groupby("client")["step"].max().to_dict()
    assert counts == {client: len(list(list_batches(run, client, AT))) for client in run.select_participants(AT)}


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("label", ["fedprox", "fedper"])
def test_step_traces_repeat_clipped_steps_bit_by_bit(label: str, stack: int) -> None:
    run = run_study(label, stack, federation={"clip_norm": 0.1})
    assert len(step_traces.compute_table(run, AT, {"clients": None}))


def compute_class_fractions(net: Any) -> list[float]:
    norms = net.head.weight.detach().norm(dim=1)
    result: list[float] = (norms / norms.sum()).tolist()
    return result


def load_received_model(run: Run, client: int) -> Any:
    common, own = run.algorithm.send(run.load_server_state(AT - 1), [client])
    return run.algorithm.net.to_model(common["base"] | own["upper"].map(lambda value: value[0]))


def test_step_traces_reject_client_that_does_not_train_in_round() -> None:
    run = run_study()
    absent_client = next(client for client in range(10) if client not in run.select_participants(AT))
    with pytest.raises(SettingsError, match=rf"^diagnostics: client {absent_client} does not train in round {AT}"):
        step_traces.compute_table(run, AT, {"clients": [absent_client]})


# -- gradients, surface, features --------------------------------------------------------------------------------------


def test_gradient_norms_match_autograd_on_all_client_data() -> None:
    run = run_study()
    frame = gradients.compute_table(run, AT, {}).to_pandas()
    all_indices = np.concatenate(run.clients.train)
    for client in (-1, 3):
        net = studies.build_network(run, run.load_server_state(AT)["model"])
        x, y = run.clients.gather_samples(all_indices if client < 0 else run.clients.train[client])
        F.cross_entropy(net(x), y).backward()
        expected = [
            (name, math.sqrt(sum(float((p.grad**2).sum()) for p in layer.parameters())))
            for name, layer in net.named_modules()
            if isinstance(layer, nn.Linear)
        ]
        rows_of_owner = frame[frame["client"] == client]
        assert rows_of_owner["name"].to_list() == [name for name, _ in expected]
        assert rows_of_owner["norm"].to_list() == pytest.approx([norm for _, norm in expected], rel=1e-4)
        assert set(rows_of_owner["samples"]) == {len(y)}
    assert sorted(frame["client"].unique()) == [-1, *range(10)]


def test_gradient_norms_use_running_statistics_of_client() -> None:
    run = run_study("fedper", 1, {"name": f"{__name__}.build_normalized_model"}, federation={"buffers": "keep"})
    frame = gradients.compute_table(run, AT, {}).to_pandas()
    for local in local_models.compute_personal_models(run, AT):
        assert local.buffers is not None
        assert BUFFERS in run.load_kept_state(local.client, AT)
        net = build_network(run, local)
        x, y = run.clients.gather_samples(run.clients.train[local.client])
        F.cross_entropy(net(x), y).backward()
        norm = next(layer for layer in net.modules() if isinstance(layer, nn.BatchNorm1d))
        expected = math.sqrt(sum(float((p.grad**2).sum()) for p in norm.parameters() if p.grad is not None))
        rows_of_owner = frame[(frame["client"] == local.client) & (frame["name"] == "body.2")]
        assert rows_of_owner["norm"].to_list() == pytest.approx([expected], rel=1e-4)
    assert -1 not in set(frame["client"]), "a server without statistics has no model to measure"


def test_loss_surface_matches_loss_of_shifted_models() -> None:
    run = run_study()
    settings = {"points": 3, "radius": 0.5, "samples": 100, "seed": 4}
    frame = surface.compute_table(run, AT, settings).to_pandas()
    assert list(zip(frame["x"], frame["y"], strict=True)) == [(x, y) for y in (-0.5, 0, 0.5) for x in (-0.5, 0, 0.5)]
    model = run.load_server_state(AT)["model"]
    first_direction, second_direction = (surface.draw_random_direction(model, 4, index) for index in range(2))
    for direction in (first_direction, second_direction):
        for name, value in model.items():
            if value.dim() < 2:
                assert not direction[name].any(), "biases are fixed"
            else:
                torch.testing.assert_close(direction[name].norm(dim=1), value.norm(dim=1))
    assert abs(float(first_direction.flat() @ second_direction.flat())) < 0.2 * float(model.square_norm()), (
        "directions must be almost orthogonal"
    )
    rows = surface.sample_indices(np.unique(np.concatenate(run.clients.train)), 100, 4)
    assert len(set(rows)) == 100
    x, y = run.clients.gather_samples(rows)
    for point in frame.to_dict("records"):
        net = studies.build_network(
            run,
            {
                name: model[name] + point["x"] * first_direction[name] + point["y"] * second_direction[name]
                for name in model
            },
        )
        with torch.no_grad():
            assert point["loss"] == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-5)
    assert frame["loss"].nunique() == 9


def test_random_direction_scales_each_convolution_filter() -> None:
    from fedpipe.core.tensors import Tensors

    model = Tensors({"weight": torch.stack([torch.full((2, 3, 3), 2.0), torch.zeros(2, 3, 3)]), "bias": torch.ones(2)})
    result = surface.draw_random_direction(model, 0, 0)
    assert float(result["weight"][0].norm()) == pytest.approx(2 * math.sqrt(18))
    assert not result["weight"][1].any()
    repeated_run = surface.draw_random_direction(3 * model, 0, 0)
    torch.testing.assert_close(repeated_run["weight"], 3 * result["weight"])


@pytest.mark.parametrize("model", [None, {"name": f"{__name__}.build_normalized_model"}])
def test_features_table_contains_normalized_features_and_head_rows(model: dict[str, Any] | None) -> None:
    run = run_study(model=model)
    settings = {"samples": 40, "perplexity": 5, "seed": 0}
    table = features.compute_table(run, AT, settings)
    frame = table.to_pandas()
    dots, crosses = frame[frame["kind"] == "feature"], frame[frame["kind"] == "row"]
    assert (len(dots), len(crosses)) == (40, 10)
    assert crosses["class"].to_list() == list(range(10))
    net = studies.build_network(run, run.load_server_state(AT)["model"])
    assert set(dots["sample"]) <= set(run.clients.global_test)
    x, y = run.clients.gather_samples(dots["sample"].to_numpy(copy=True))
    assert dots["class"].to_list() == y.tolist()
    with torch.no_grad():
        expected = F.normalize(net.body(x), dim=1)
    np.testing.assert_allclose(np.stack(dots["vector"]), expected.numpy(), atol=1e-5)
    head = F.normalize(net.head.weight.detach(), dim=1)
    np.testing.assert_allclose(np.stack(crosses["vector"]), head.numpy(), atol=1e-5)
    assert np.isfinite(frame[["x", "y"]].to_numpy()).all()
    assert features.compute_table(run, AT, settings).equals(table), "equal settings must give equal tables"
    with pytest.raises(SettingsError, match=r"^diagnostics: perplexity 50 .* 50 vectors.* less than 50"):
        features.compute_table(run, AT, settings | {"perplexity": 50})
