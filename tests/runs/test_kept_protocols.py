"""Kept protocols evaluate the last trained model of each client, which is not stored."""

import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpipe.core.storage import packing
from fedpipe.engine import collect
from fedpipe.engine.clients.executor import BUFFERS
from fedpipe.engine.run import Run
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies

ROUNDS = 4
KEPT = ("kept-on-global", "kept-on-local")


def build_normalized_model(shape: tuple[int, ...], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """A custom model with batch normalization."""
    width = shape[0] * shape[1] * shape[2]
    body = nn.Sequential(nn.Flatten(), nn.Linear(width, 12), nn.BatchNorm1d(12), nn.ReLU())
    return body, nn.Linear(12, num_classes)


def prepare_study(label: str = "fedavg", protocols: tuple[str, ...] = KEPT, **sections: Any) -> NewPlan:
    """Prepare a study with three of ten clients in a round, so some clients are never trained."""
    sections["federation"] = {"participation": 0.3} | sections.get("federation", {})
    evaluation = {"protocols": list(protocols)} | sections.pop("evaluation", {})
    return studies.prepare(studies.settings((label,), ROUNDS, evaluation=evaluation, **sections))


def run_study(plan: NewPlan, **execution: Any) -> Run:
    run = studies.open_runs(plan, **execution)[0]
    studies.finish_run(run, ROUNDS, plan.keep_models)
    return run


def read_scores(run: Run, protocol: str) -> dict[tuple[int, int], tuple[int, int, float]]:
    return studies.read_scores(run, ROUNDS, protocol)


def count_correct(run: Run, model: Mapping[str, Tensor], indices: Any) -> int:
    """Count the correct predictions of a model with plain PyTorch."""
    x, y = run.clients.gather_samples(indices)
    with torch.no_grad():
        return int((studies.build_network(run, model)(x).argmax(-1) == y).sum())


@pytest.mark.parametrize("label", ["local", "fedproto"])
@pytest.mark.parametrize("test", ["global", "local"])
def test_kept_model_equals_personal_model_without_shared_model(label: str, test: str) -> None:
    run = run_study(prepare_study(label, (f"kept-on-{test}", f"personal-on-{test}")))
    scores = read_scores(run, f"kept-on-{test}")
    assert scores.keys() == {(number, client) for number in range(1, ROUNDS + 1) for client in range(10)}
    assert scores == read_scores(run, f"personal-on-{test}")


@pytest.mark.parametrize("buffers", ["average", "keep", "drop"])
def test_kept_model_is_last_uploaded_or_initial_model(buffers: str) -> None:
    model = {"name": "mlp"} if buffers == "drop" else {"name": f"{__name__}.build_normalized_model"}
    params = studies.settings(("fedavg",), ROUNDS, evaluation={"protocols": list(KEPT)})
    params["federation"] |= {"participation": 0.3, "buffers": buffers}
    run = run_study(studies.prepare(params | {"model": model}))
    models: dict[int, Mapping[str, Tensor]] = dict.fromkeys(
        range(10), run.make_initial_model(0) | run.algorithm.net.client_buffers
    )
    result = {protocol: read_scores(run, protocol) for protocol in KEPT}
    for number in range(1, ROUNDS + 1):
        block = run.train(number, run.select_participants(number))
        for client, upload, keep in zip(block.ids, block.uploads, block.kept_states, strict=True):
            models[client] = upload["model"] | keep.get(BUFFERS, {})
        for client, model in models.items():
            test = run.clients.test[client]
            assert result["kept-on-local"][number, client][:2] == (count_correct(run, model, test), len(test))
            global_indices = run.clients.global_test
            assert result["kept-on-global"][number, client][:2] == (
                count_correct(run, model, global_indices),
                len(global_indices),
            )
    trained = {client for number in range(1, ROUNDS + 1) for client in run.select_participants(number)}
    assert trained < set(range(10)), "some client should never be trained"
    assert len({values[0] for values in result["kept-on-global"].values()}) > 5, "models should differ"


def test_segments_single_rounds_threads_and_pruning_have_equal_kept_scores() -> None:
    plan = prepare_study("fedper", (*KEPT, "trained-on-global", "personal-on-local"))
    run = run_study(plan, stack=2)
    expected = studies.hash_results(run.files.path)

    def delete_results() -> None:
        studies.delete_rounds(run.files.path)
        shutil.rmtree(run.files.path / "joined", ignore_errors=True)

    delete_results()
    list(studies.open_runs(plan, stack=2)[0].run_segment(1))
    list(studies.open_runs(plan, stack=2)[0].run_segment(3))
    shutil.rmtree(run.files.path / "segments")
    assert studies.hash_results(run_study(plan, stack=2).files.path) == expected, "three segments differ from one"

    delete_results()
    studies.run_single_rounds(plan, ROUNDS, size=2, stack=2)
    collect.collect_rounds(run.files, ROUNDS, "all")
    assert studies.hash_results(run.files.path) == expected, "single rounds differ from a segment"

    delete_results()
    pruned = prepare_study(
        "fedper", (*KEPT, "trained-on-global", "personal-on-local"), artifacts={"keep_models": "last"}
    )
    pruned_bits = studies.hash_results(run_study(pruned, stack=2).files.path)
    assert pruned_bits.items() < expected.items()
    assert {name for name in expected.keys() - pruned_bits.keys() if not name.endswith(".pt")} == set()

    delete_results()
    loop = run_study(plan)
    loop_bits = studies.hash_results(run.files.path)
    assert read_scores(loop, "kept-on-global").keys() == {(n, i) for n in range(1, ROUNDS + 1) for i in range(10)}
    delete_results()
    assert studies.hash_results(run_study(plan).files.path) == loop_bits
    delete_results()
    threaded_run = studies.open_runs(plan, threads=2)[0]
    studies.finish_run(threaded_run, ROUNDS)
    assert studies.hash_results(run.files.path) == loop_bits, "threads changed bits"


def test_kept_protocols_change_only_metrics_and_kept_files() -> None:
    run_with_kept = run_study(prepare_study(protocols=("global-on-global", "trained-on-local", *KEPT)))
    run_without_kept = run_study(prepare_study(protocols=("global-on-global", "trained-on-local")))
    bits_with_kept, bits_without_kept = (
        studies.hash_results(run.files.path) for run in (run_with_kept, run_without_kept)
    )
    rounds = [f"rounds/{number:04d}" for number in range(1, ROUNDS + 1)]
    metrics_files = {f"{folder}/metrics.parquet" for folder in (*rounds, f"joined/{ROUNDS:04d}")}
    new = {f"{folder}/kept.parquet" for folder in rounds}
    assert bits_with_kept.keys() - bits_without_kept.keys() == new
    assert {name for name, sha256 in bits_without_kept.items() if bits_with_kept[name] != sha256} == metrics_files
    for protocol in ("global-on-global", "trained-on-local"):
        assert read_scores(run_with_kept, protocol) == read_scores(run_without_kept, protocol)
    trained, scores = read_scores(run_with_kept, "trained-on-local"), read_scores(run_with_kept, "kept-on-local")
    assert trained.items() <= scores.items(), "trained and kept scores of participants are equal"


def test_kept_model_may_come_from_round_without_evaluation() -> None:
    """A client may have been trained last in a round that `evaluation.every` skips."""
    all_scores = read_scores(run_study(prepare_study()), "kept-on-global")
    run = run_study(prepare_study(evaluation={"every": 2}))
    result = read_scores(run, "kept-on-global")
    assert result == {key: values for key, values in all_scores.items() if key[0] % 2 == 0}
    assert set(run.select_participants(1)) - set(run.select_participants(2)), (
        "some client should be trained only in round 1"
    )


def test_failed_update_keeps_earlier_kept_model() -> None:
    params = studies.settings(rounds=ROUNDS, evaluation={"protocols": list(KEPT)})
    faulty = {"algorithm": "tests.runs.test_failed_updates.Faulty", "size": 100, "begins": 2}
    params |= {"algorithms": {"faulty": faulty}, "study": {"algorithms": ["faulty"]}}
    run = run_study(studies.prepare(params))
    failed_clients = [client for client in run.select_participants(2) if run.clients.sizes[client] >= 100]
    assert failed_clients
    scores = read_scores(run, "kept-on-global")
    assert all(scores[2, client] == scores[1, client] for client in failed_clients)
    assert any(client not in run.select_participants(1) for client in failed_clients), (
        "some failed client should not have been trained earlier"
    )
    other_clients = set(run.select_participants(2)) - set(failed_clients)
    assert all(scores[2, client] != scores[1, client] for client in other_clients)


def test_damaged_kept_accuracies_are_recomputed() -> None:
    plan = prepare_study()
    run = studies.open_runs(plan)[0]
    list(run.run_segment(2))
    resumed_run = run_study(plan)
    expected = studies.hash_results(resumed_run.files.path)
    packing.unpack_folder(run.files.rounds_folder)
    run.files.get_round_files(1).kept_accuracies.write_bytes(b"PAR1 nothing PAR1")
    shutil.rmtree(run.files.path / "segments")
    assert studies.hash_results(run_study(plan).files.path) == expected
