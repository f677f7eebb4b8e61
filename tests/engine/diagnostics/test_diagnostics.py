"""What diagnostics find in the states of a run, against plain PyTorch and against what the run itself has recorded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout, packing
from fedpipe.core.storage.files import read_json, read_pt, write_json, write_pt
from fedpipe.engine import collect
from fedpipe.engine.clients import optimizers
from fedpipe.engine.clients.executor import BUFFERS
from fedpipe.engine.diagnostics import features, gradients, head_norms, local_models, step_traces, surface
from fedpipe.engine.run import Run
from tests import small_studies as studies

ROUNDS, AT = 3, 2
PROTOCOLS = ["personal-on-local", "trained-on-local", "finetuned-on-local"]
NORMS = {"models": ["trained"], "finetune_epochs": 2}


def normalized(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    """A model with batch normalization, of one's own."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 12), nn.BatchNorm1d(12), nn.ReLU())
    return body, nn.Linear(12, classes)


def finished(label: str = "fedavg", execution: dict[str, Any] | None = None, **sections: Any) -> Run:
    evaluation = {"protocols": PROTOCOLS, "finetune_epochs": 2}
    sections["dataset"] = {"subset": 400} | sections.get("dataset", {})
    made = studies.prepare(studies.settings((label,), ROUNDS, evaluation=evaluation, **sections))
    (run,) = studies.open_runs(made, **(execution or {}))
    list(run.run_segment(ROUNDS))
    collect.collect_rounds(run.files, ROUNDS, made.keep_models)
    return run


def network(run: Run, local: local_models.LocalModel) -> nn.Module:
    """Plain PyTorch's, with a client's model."""
    found: nn.Module = run.algorithm.net._build().to(next(iter(local.model.values())).dtype)
    found.load_state_dict({**found.state_dict(), **local.model, **(local.buffers or {})})
    return found.eval()


def right(run: Run, local: local_models.LocalModel) -> int:
    x, y = run.clients.gather(run.clients.test[local.client])
    with torch.no_grad():
        return int((network(run, local)(x).argmax(-1) == y).sum())


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "is_accepted"), [("bfloat16", True), ("full", False)])
def test_on_another_device_the_rounding_of_the_runs_precision_decides(
    monkeypatch: pytest.MonkeyPatch, precision: str, is_accepted: bool
) -> None:
    """Steps that are 1 % longer stand for the rounding of another device: less than bfloat16's, more than float32's."""
    run = finished(federation={"precision": precision})
    update, environment = optimizers.SGD.update, run.get_environment()
    monkeypatch.setattr(Run, "get_environment", lambda self: environment | {"device": "another CPU"})
    monkeypatch.setattr(
        optimizers.SGD,
        "update",
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
        ("fedper", {"model": {"name": f"{__name__}.normalized"}, "federation": {"buffers": "keep"}}),
    ],
)
def test_models_are_those_that_the_protocols_have_measured(label: str, sections: dict[str, Any], stack: int) -> None:
    """The accuracies of the models that diagnostics read, computed by plain PyTorch, are the recorded ones."""
    run = _run(label, sections, stack)
    recorded = {
        (row["protocol"], row["client"]): row["correct"]
        for row in layout.read_merged_table(run.files.merged_files(ROUNDS).metrics).to_pylist()
        if row["round"] == AT
    }
    looked = {
        "trained-on-local": local_models.replay_local_models(run, AT),
        "personal-on-local": list(local_models.compute_personal_models(run, AT)),
        "finetuned-on-local": list(local_models.compute_personal_models(run, AT, 2)),
    }
    assert [local.client for local in looked["trained-on-local"]] == run.participants(AT)
    for protocol, found in looked.items():
        assert {(protocol, local.client): right(run, local) for local in found} == {
            key: value for key, value in recorded.items() if key[0] == protocol
        }
    assert len({right(run, local) for found in looked.values() for local in found}) > 3, "models must differ"


def _run(label: str, sections: dict[str, Any], stack: int) -> Run:
    evaluation = {"protocols": PROTOCOLS, "finetune_epochs": 2}
    params = studies.settings((label,), ROUNDS, evaluation=evaluation, dataset={"subset": 400})
    params["federation"] |= sections.get("federation", {})
    if "model" in sections:
        params["model"] = {"name": sections["model"]["name"]}
    made = studies.prepare(params)
    (run,) = studies.open_runs(made, stack=stack)
    list(run.run_segment(ROUNDS))
    collect.collect_rounds(run.files, ROUNDS, made.keep_models)
    return run


def test_what_travels_is_what_a_diagnostic_finds_trained() -> None:
    run = finished()
    block = run.train(AT, run.participants(AT))
    for local, upload in zip(local_models.replay_local_models(run, AT), block.uploads, strict=True):
        assert all(torch.equal(local.model[name], value) for name, value in upload["model"].items())


def test_a_round_that_does_not_come_out_as_recorded_is_not_looked_into() -> None:
    run = finished()
    files = run.files.round(AT)
    packing.unpack_folder(run.files.rounds_folder)
    sealed, marker = read_json(files.state_marker), read_json(files.marker)
    state = {"model": {name: 1.5 * value for name, value in read_pt(files.server_state)["model"].items()}}
    sealed["sha256"][files.server_state.name] = marker["sha256"][files.server_state.name] = write_pt(
        files.server_state, state
    )
    marker["sha256"][files.state_marker.name] = write_json(files.state_marker, sealed)
    write_json(files.marker, marker)
    (again,) = [Run(run.files)]
    with pytest.raises(ArtifactError, match=rf"round {AT} has another result when it is repeated: bits differ in"):
        head_norms.compute_table(again, AT, NORMS)


# -- head norms --------------------------------------------------------------------------------------------------------


def test_norms_by_hand() -> None:
    found = list(head_norms.make_norm_rows("trained", 7, torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]]), [6, 0, 2]))
    assert found == [
        {"model": "trained", "owner": 7, "class": 0, "norm": 5, "relative": 5 / 6, "share": 0.75, "samples": 6},
        {"model": "trained", "owner": 7, "class": 1, "norm": 0, "relative": 0, "share": 0, "samples": 0},
        {"model": "trained", "owner": 7, "class": 2, "norm": 1, "relative": 1 / 6, "share": 0.25, "samples": 2},
    ]
    (row, _) = head_norms.make_norm_rows("class", 1, torch.zeros(2, 3), None)
    assert (row["relative"], row["share"], row["samples"]) == (0, None, None)


def test_the_distance_between_shares_and_norms_by_hand() -> None:
    heads = {0: ([[3.0, 4.0], [0.0, 5.0]], [1, 3]), 1: ([[1.0, 0.0], [0.0, 0.0]], [4, 0])}
    rows = [
        row
        for owner, (head, counts) in heads.items()
        for row in head_norms.make_norm_rows("trained", owner, torch.tensor(head), counts)
    ]
    rows += head_norms.make_norm_rows("received", 0, torch.ones(2, 2), [0, 8])
    table = pa.Table.from_pylist(rows, head_norms.SCHEMA)
    assert head_norms.compute_share_distance(table) == pytest.approx((math.sqrt(2 * 0.25**2) + 0) / 2)
    assert head_norms.compute_share_distance(table, "received") == pytest.approx(math.sqrt(0.5))


def test_norms_of_all_models_of_a_run() -> None:
    run = finished("cwfedavg")
    asked = ["received", "trained", "finetuned", "class"]
    frame = head_norms.compute_table(run, AT, {"models": asked, "finetune_epochs": 2}).to_pandas()
    assert list(frame["model"].unique()) == asked
    everyone, there = range(10), run.participants(AT)
    owners = {"received": everyone, "trained": there, "finetuned": everyone, "class": range(10)}
    for name, ids in owners.items():
        assert list(frame[frame["model"] == name]["owner"].unique()) == list(ids)
    classes = run.load_server_state(AT)["classes"]["head.weight"]
    mine = frame[(frame["model"] == "class") & (frame["owner"] == 4)]
    assert mine["norm"].to_list() == pytest.approx([float(row.norm()) for row in classes[4]], rel=1e-6)
    counts = np.bincount(run.clients.y[run.clients.train[there[0]]].numpy(), minlength=10)
    mine = frame[(frame["model"] == "trained") & (frame["owner"] == there[0])]
    assert mine["samples"].to_list() == counts.tolist()
    assert mine["share"].to_list() == pytest.approx((counts / counts.sum()).tolist())
    server = run.load_server_state(AT)["distributions"][there[0]]  # what the server has read off the uploaded head
    assert mine["relative"].to_list() == pytest.approx(server.tolist(), rel=1e-5)


def test_the_global_models_norms() -> None:
    run = finished()
    frame = head_norms.compute_table(run, AT, {"models": ["global"], "finetune_epochs": 1}).to_pandas()
    head = run.load_server_state(AT)["model"]["head.weight"]
    assert frame["norm"].to_list() == pytest.approx([math.sqrt(float((row**2).sum())) for row in head], rel=1e-6)
    assert set(frame["owner"]) == {-1}
    assert int(frame["samples"].sum()) == sum(run.clients.sizes)


def test_who_has_no_such_model_is_told() -> None:
    run = finished("local")
    with pytest.raises(SettingsError, match=r"^diagnostics: local has no global model"):
        head_norms.compute_table(run, AT, {"models": ["global"], "finetune_epochs": 1})
    with pytest.raises(SettingsError, match=r"^diagnostics: local has no class models"):
        head_norms.compute_table(run, AT, {"models": ["class"], "finetune_epochs": 1})


# -- locals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [1, 3])
def test_shares_by_step_are_those_of_training_by_hand(stack: int) -> None:
    run = finished("cwfedavg", {"stack": stack}, algorithms={"cwfedavg": {"wdr": 3.0}}, federation={"local_epochs": 2})
    table = step_traces.compute_table(run, AT, {"clients": None})
    for client in run.participants(AT):
        net = run.algorithm.net._build()
        net.load_state_dict(_received(run, client))
        share = run.clients.class_counts[client] / run.clients.class_counts[client].sum()
        optimizer = torch.optim.SGD(net.parameters(), lr=run.federation.learning_rate)
        wanted = [_shares(net)]
        for epoch in range(2):
            order = run.clients.shuffle_indices(client, AT, "batches", epoch)
            for first in range(0, len(order), 40):
                x, y = run.clients.gather(order[first : first + 40])
                norm = net.head.weight.norm(dim=1)
                loss = F.cross_entropy(net(x), y) + 1.5 * (share - norm / norm.sum()).norm()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                wanted.append(_shares(net))
        mine = table.filter(pa.compute.equal(table["client"], client)).to_pandas()
        found = mine.pivot(index="step", columns="class", values="approximate").to_numpy()
        assert found.shape == (len(wanted), 10)
        np.testing.assert_allclose(found, np.array(wanted), rtol=2e-4)
        assert mine[mine["step"] == 0]["share"].to_list() == pytest.approx(share.tolist())


def _shares(net: Any) -> list[float]:
    norms = net.head.weight.detach().norm(dim=1)
    found: list[float] = (norms / norms.sum()).tolist()
    return found


def _received(run: Run, client: int) -> Any:
    common, own = run.algorithm.send(run.load_server_state(AT - 1), [client])
    return run.algorithm.net.to_model(common["base"] | own["upper"].map(lambda value: value[0]))


def test_a_client_that_does_not_train_in_the_round_is_refused() -> None:
    run = finished()
    away = next(client for client in range(10) if client not in run.participants(AT))
    with pytest.raises(SettingsError, match=rf"^diagnostics: client {away} does not train in round {AT}"):
        step_traces.compute_table(run, AT, {"clients": [away]})


# -- gradients, surface, features --------------------------------------------------------------------------------------


def test_gradients_are_autograds_on_all_of_a_clients_data() -> None:
    run = finished()
    frame = gradients.compute_table(run, AT, {}).to_pandas()
    whole = np.concatenate(run.clients.train)
    for client in (-1, 3):
        net = run.algorithm.net._build()
        net.load_state_dict(run.load_server_state(AT)["model"])
        x, y = run.clients.gather(whole if client < 0 else run.clients.train[client])
        F.cross_entropy(net(x), y).backward()
        wanted = [
            (name, math.sqrt(sum(float((p.grad**2).sum()) for p in layer.parameters())))
            for name, layer in net.named_modules()
            if isinstance(layer, nn.Linear)
        ]
        mine = frame[frame["client"] == client]
        assert mine["name"].to_list() == [name for name, _ in wanted]
        assert mine["norm"].to_list() == pytest.approx([norm for _, norm in wanted], rel=1e-4)
        assert set(mine["samples"]) == {len(y)}
    assert sorted(frame["client"].unique()) == [-1, *range(10)]


def test_gradients_are_at_rest_with_the_clients_own_statistics() -> None:
    run = _run("fedper", {"model": {"name": f"{__name__}.normalized"}, "federation": {"buffers": "keep"}}, 1)
    frame = gradients.compute_table(run, AT, {}).to_pandas()
    for local in local_models.compute_personal_models(run, AT):
        assert local.buffers is not None
        assert BUFFERS in run.load_kept_state(local.client, AT)
        net = network(run, local)
        x, y = run.clients.gather(run.clients.train[local.client])
        F.cross_entropy(net(x), y).backward()
        norm = next(layer for layer in net.modules() if isinstance(layer, nn.BatchNorm1d))
        wanted = math.sqrt(sum(float((p.grad**2).sum()) for p in norm.parameters() if p.grad is not None))
        mine = frame[(frame["client"] == local.client) & (frame["name"] == "body.2")]
        assert mine["norm"].to_list() == pytest.approx([wanted], rel=1e-4)
    assert -1 not in set(frame["client"]), "a server without statistics has no model to measure"


def test_the_surface_is_the_loss_of_moved_models() -> None:
    run = finished()
    settings = {"points": 3, "radius": 0.5, "samples": 100, "seed": 4}
    frame = surface.compute_table(run, AT, settings).to_pandas()
    assert list(zip(frame["x"], frame["y"], strict=True)) == [(x, y) for y in (-0.5, 0, 0.5) for x in (-0.5, 0, 0.5)]
    model = run.load_server_state(AT)["model"]
    one, two = (surface.make_direction(model, 4, index) for index in range(2))
    for direction in (one, two):
        for name, value in model.items():
            if value.dim() < 2:
                assert not direction[name].any(), "biases stand still"
            else:
                torch.testing.assert_close(direction[name].norm(dim=1), value.norm(dim=1))
    assert abs(float(one.flat() @ two.flat())) < 0.2 * float(model.square_norm()), "two directions"
    rows = surface.sample_indices(np.unique(np.concatenate(run.clients.train)), 100, 4)
    assert len(set(rows)) == 100
    x, y = run.clients.gather(rows)
    for place in frame.to_dict("records"):
        net = run.algorithm.net._build()
        net.load_state_dict({name: model[name] + place["x"] * one[name] + place["y"] * two[name] for name in model})
        with torch.no_grad():
            assert place["loss"] == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-5)
    assert frame["loss"].nunique() == 9


def test_a_convolutions_filters_are_scaled_one_by_one() -> None:
    from fedpipe.core.tensors import Tensors

    model = Tensors({"weight": torch.stack([torch.full((2, 3, 3), 2.0), torch.zeros(2, 3, 3)]), "bias": torch.ones(2)})
    found = surface.make_direction(model, 0, 0)
    assert float(found["weight"][0].norm()) == pytest.approx(2 * math.sqrt(18))
    assert not found["weight"][1].any()
    again = surface.make_direction(3 * model, 0, 0)
    torch.testing.assert_close(again["weight"], 3 * found["weight"])


def test_features_and_rows_have_unit_length_and_their_classes() -> None:
    run = finished()
    settings = {"samples": 40, "perplexity": 5, "seed": 0}
    table = features.compute_table(run, AT, settings)
    frame = table.to_pandas()
    dots, crosses = frame[frame["kind"] == "feature"], frame[frame["kind"] == "row"]
    assert (len(dots), len(crosses)) == (40, 10)
    assert crosses["class"].to_list() == list(range(10))
    net = run.algorithm.net._build()
    net.load_state_dict(run.load_server_state(AT)["model"])
    assert set(dots["sample"]) <= set(run.clients.global_test)
    x, y = run.clients.gather(dots["sample"].to_numpy(copy=True))
    assert dots["class"].to_list() == y.tolist()
    with torch.no_grad():
        wanted = F.normalize(net.body(x), dim=1)
    np.testing.assert_allclose(np.stack(dots["vector"]), wanted.numpy(), atol=1e-5)
    head = F.normalize(net.head.weight.detach(), dim=1)
    np.testing.assert_allclose(np.stack(crosses["vector"]), head.numpy(), atol=1e-5)
    assert np.isfinite(frame[["x", "y"]].to_numpy()).all()
    assert features.compute_table(run, AT, settings).equals(table), "the same settings give the same picture"
    with pytest.raises(SettingsError, match=r"^diagnostics: perplexity 50 .* 50 vectors.* less than 50"):
        features.compute_table(run, AT, settings | {"perplexity": 50})
