"""The kept protocols: every client's model as it was last trained, which nobody stores."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpipe.core.storage import layout, packing
from fedpipe.core.storage.files import write_pt
from fedpipe.engine import collect
from fedpipe.engine.blocks import Block
from fedpipe.engine.clients.executor import BUFFERS
from fedpipe.engine.run import Run
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies

ROUNDS = 4
KEPT = ("kept-on-global", "kept-on-local")


def normalized(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    """A model with batch normalization, of one's own."""
    width = shape[0] * shape[1] * shape[2]
    body = nn.Sequential(nn.Flatten(), nn.Linear(width, 12), nn.BatchNorm1d(12), nn.ReLU())
    return body, nn.Linear(12, classes)


def prepared(label: str = "fedavg", protocols: tuple[str, ...] = KEPT, **sections: Any) -> NewPlan:
    """A study with three of ten clients in a round, so that some are never trained."""
    sections["federation"] = {"participation": 0.3} | sections.get("federation", {})
    evaluation = {"protocols": list(protocols)} | sections.pop("evaluation", {})
    return studies.prepare(studies.settings((label,), ROUNDS, evaluation=evaluation, **sections))


def finished(made: NewPlan, **execution: Any) -> Run:
    run = studies.open_runs(made, **execution)[0]
    list(run.run_segment(ROUNDS))
    collect.collect_rounds(run.files, ROUNDS, made.keep_models)
    return run


def rows(run: Run, protocol: str) -> dict[tuple[int, int], tuple[int, int, float]]:
    """By round and client, what the joined metrics say."""
    found = layout.read_merged_table(run.files.list_merged_files()[-1].metrics).to_pylist()
    rows = [row for row in found if row["protocol"] == protocol]
    return {(row["round"], row["client"]): (row["correct"], row["total"], row["loss"]) for row in rows}


def right(run: Run, model: Mapping[str, Tensor], indices: Any) -> int:
    """How many test samples a model of the MLP, or of the one above, gets right, by plain PyTorch."""
    x, y = run.clients.gather(indices)
    network = run.algorithm.net._build().to(x.dtype)
    known = network.state_dict()
    network.load_state_dict({name: model.get(name, value) for name, value in known.items()})
    with torch.no_grad():
        return int((network.eval()(x).argmax(-1) == y).sum())


@pytest.mark.parametrize("label", ["local", "fedproto"])
@pytest.mark.parametrize("test", ["global", "local"])
def test_where_a_client_has_its_model_to_itself_it_is_the_personal_one(label: str, test: str) -> None:
    run = finished(prepared(label, (f"kept-on-{test}", f"personal-on-{test}")))
    kept = rows(run, f"kept-on-{test}")
    assert kept.keys() == {(number, client) for number in range(1, ROUNDS + 1) for client in range(10)}
    assert kept == rows(run, f"personal-on-{test}")


@pytest.mark.parametrize("buffers", ["average", "keep", "drop"])
def test_it_is_the_model_that_was_uploaded_last_or_the_initial_one(buffers: str) -> None:
    model = {"name": "mlp"} if buffers == "drop" else {"name": f"{__name__}.normalized"}
    params = studies.settings(("fedavg",), ROUNDS, evaluation={"protocols": list(KEPT)})
    params["federation"] |= {"participation": 0.3, "buffers": buffers}
    run = finished(studies.prepare(params | {"model": model}))
    models: dict[int, Mapping[str, Tensor]] = dict.fromkeys(
        range(10), run.make_initial_model(0) | run.algorithm.net.client_buffers
    )
    found = {protocol: rows(run, protocol) for protocol in KEPT}
    for number in range(1, ROUNDS + 1):
        block = run.train(number, run.participants(number))
        for client, upload, keep in zip(block.ids, block.uploads, block.kept_states, strict=True):
            models[client] = upload["model"] | keep.get(BUFFERS, {})
        for client, model in models.items():
            test = run.clients.test[client]
            assert found["kept-on-local"][number, client][:2] == (right(run, model, test), len(test))
            whole = run.clients.global_test
            assert found["kept-on-global"][number, client][:2] == (right(run, model, whole), len(whole))
    trained = {client for number in range(1, ROUNDS + 1) for client in run.participants(number)}
    assert trained < set(range(10)), "a client must be left that nobody has trained"
    assert len({values[0] for values in found["kept-on-global"].values()}) > 5, "models must differ"


def test_segments_single_rounds_threads_and_pruned_models_give_the_same_bits() -> None:
    made = prepared("fedper", (*KEPT, "trained-on-global", "personal-on-local"))
    run = finished(made, stack=2)
    once = studies.bits(run.files.path)

    def away() -> None:
        studies.forget(run.files.path)
        for path in run.files.path.glob("*.parquet"):
            path.unlink()

    away()
    list(studies.open_runs(made, stack=2)[0].run_segment(1))
    list(studies.open_runs(made, stack=2)[0].run_segment(3))
    shutil.rmtree(run.files.path / "segments")
    assert studies.bits(finished(made, stack=2).files.path) == once, "three segments differ from one"

    away()
    studies.open_runs(made, stack=2)[0].initialize()
    for number in range(1, ROUNDS + 1):
        ids = studies.open_runs(made)[0].participants(number)
        files = run.files.round(number)
        for index, members in enumerate((ids[:2], ids[2:])):
            block = studies.open_runs(made, stack=2)[0].train(number, members)
            write_pt(files.block_uploads(index), block.to_tensors())
        blocks = [Block.read(files.block_uploads(index)) for index in range(2)]
        studies.open_runs(made, stack=2)[0].aggregate(number, blocks)
        studies.open_runs(made, stack=2)[0].evaluate(number)
    collect.collect_rounds(run.files, ROUNDS, "all")
    assert studies.bits(run.files.path) == once, "single rounds differ from a segment"

    away()
    pruned = prepared("fedper", (*KEPT, "trained-on-global", "personal-on-local"), artifacts={"keep_models": "last"})
    left = studies.bits(finished(pruned, stack=2).files.path)
    assert left.items() < once.items()
    assert {name for name in once.keys() - left.keys() if not name.endswith(".pt")} == set()

    away()
    loop = finished(made)
    first = studies.bits(run.files.path)
    assert rows(loop, "kept-on-global").keys() == {(n, i) for n in range(1, ROUNDS + 1) for i in range(10)}
    away()
    assert studies.bits(finished(made).files.path) == first
    away()
    many = studies.open_runs(made, threads=2)[0]
    list(many.run_segment(ROUNDS))
    collect.collect_rounds(many.files, ROUNDS, "all")
    assert studies.bits(run.files.path) == first, "threads changed bits"


def test_nothing_else_changes_and_nothing_more_travels_or_is_stored() -> None:
    with_it = finished(prepared(protocols=("global-on-global", "trained-on-local", *KEPT)))
    without = finished(prepared(protocols=("global-on-global", "trained-on-local")))
    here, there = studies.bits(with_it.files.path), studies.bits(without.files.path)
    measured = {f"rounds/{number:04d}/metrics.parquet" for number in range(1, ROUNDS + 1)} | {
        f"joined/{ROUNDS:04d}/metrics.parquet"
    }
    new = {f"rounds/{number:04d}/kept.parquet" for number in range(1, ROUNDS + 1)}
    assert here.keys() - there.keys() == new
    assert {name for name, sha256 in there.items() if here[name] != sha256} == measured
    for protocol in ("global-on-global", "trained-on-local"):
        assert rows(with_it, protocol) == rows(without, protocol)
    trained, kept = rows(with_it, "trained-on-local"), rows(with_it, "kept-on-local")
    assert trained.items() <= kept.items(), "a participant's model is measured alike"


def test_rounds_that_are_not_measured_count() -> None:
    """A client may have been trained last in a round that `evaluation.every` skips."""
    every = rows(finished(prepared()), "kept-on-global")
    run = finished(prepared(evaluation={"every": 2}))
    found = rows(run, "kept-on-global")
    assert found == {place: values for place, values in every.items() if place[0] % 2 == 0}
    assert set(run.participants(1)) - set(run.participants(2)), "somebody must be trained in round 1 alone"


def test_a_failed_update_leaves_the_client_with_what_it_had() -> None:
    params = studies.settings(rounds=ROUNDS, evaluation={"protocols": list(KEPT)})
    faulty = {"algorithm": "tests.runs.test_failed_updates.Faulty", "size": 100, "begins": 2}
    params |= {"algorithms": {"faulty": faulty}, "study": {"algorithms": ["faulty"]}}
    run = finished(studies.prepare(params))
    failed = [client for client in run.participants(2) if run.clients.sizes[client] >= 100]
    assert failed
    kept = rows(run, "kept-on-global")
    assert all(kept[2, client] == kept[1, client] for client in failed)
    assert any(client not in run.participants(1) for client in failed), "one that was never trained"
    whole = set(run.participants(2)) - set(failed)
    assert all(kept[2, client] != kept[1, client] for client in whole)


def test_a_damaged_record_is_made_again() -> None:
    made = prepared()
    run = studies.open_runs(made)[0]
    list(run.run_segment(2))
    again = finished(made)
    once = studies.bits(again.files.path)
    packing.unpack_folder(run.files.rounds_folder)
    run.files.round(1).kept_accuracies.write_bytes(b"PAR1 nothing PAR1")
    shutil.rmtree(run.files.path / "segments")
    assert studies.bits(finished(made).files.path) == once
