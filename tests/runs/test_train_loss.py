"""Losses and accuracies on the training samples of clients, and the seconds of epochs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedpipe.core.storage import files
from fedpipe.engine import rounds
from fedpipe.engine.clients import executor
from fedpipe.engine.run import Run
from fedpipe.report.data import StudyData
from tests import small_studies as studies

ROUNDS = 3
NOISY = {"mean": [0.4], "std": [0.3], "crop": 2, "flip": True, "on_test": True}


def run_study(**execution: Any) -> Run:
    """Run a study with all random transforms of images."""
    protocols = ["personal-on-train", "trained-on-train", "personal-on-local"]
    params = studies.settings(("fedavg",), ROUNDS, evaluation={"protocols": protocols}, transforms=NOISY)
    plan = studies.prepare(params)
    run = studies.open_runs(plan, **execution)[0]
    studies.finish_run(run, ROUNDS)
    return run


def score_by_hand(run: Run, model: Any, client: int) -> tuple[int, int, float]:
    """Compute the score with plain PyTorch on the stored images in [0, 1], with `mean` and `std`."""
    indices = torch.as_tensor(run.clients.train[client])
    x, y = (run.clients.x[indices] - 0.4) / 0.3, run.clients.y[indices]
    with torch.no_grad():
        logits = studies.build_network(run, model)(x)
    return int((logits.argmax(-1) == y).sum()), len(indices), float(F.cross_entropy(logits, y))


@pytest.mark.parametrize("stack", [1, 3])
def test_models_are_evaluated_on_training_samples_of_clients(stack: int) -> None:
    run = run_study(stack=stack)
    personal, trained = (
        studies.read_scores(run, ROUNDS, "personal-on-train"),
        studies.read_scores(run, ROUNDS, "trained-on-train"),
    )
    all_clients = range(run.federation.clients)
    assert personal.keys() == {(number, client) for number in range(1, ROUNDS + 1) for client in all_clients}
    expected_keys = {(number, client) for number in range(1, ROUNDS + 1) for client in run.select_participants(number)}
    assert trained.keys() == expected_keys
    for (number, client), score in personal.items():
        expected = score_by_hand(run, run.load_server_state(number)["model"], client)
        assert score[:2] == expected[:2]
        assert score[2] == pytest.approx(expected[2], rel=1e-4)
    for number in range(1, ROUNDS + 1):
        block = run.train(number, run.select_participants(number))
        for client, upload in zip(block.ids, block.uploads, strict=True):
            expected = score_by_hand(run, upload["model"], client)
            assert trained[number, client][:2] == expected[:2]
            assert trained[number, client][2] == pytest.approx(expected[2], rel=1e-4)
    assert len({score[2] for score in personal.values()}) == len(personal), "scores of models and clients should differ"


@pytest.mark.parametrize("stack", [1, 5])
def test_epoch_seconds_cover_only_passes(stack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock advances by six seconds in each pass, and nowhere else."""
    clock = [0.0]
    passes = executor.get_passes

    def get_slow_passes(*args: Any) -> Any:
        clock[0] += 6.0
        return passes(*args)

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return clock[0]

    for module in ("clients.loop", "stack.stack"):
        monkeypatch.setattr(f"fedpipe.engine.{module}.get_passes", get_slow_passes)
    for module_object in (executor, rounds):
        monkeypatch.setattr(module_object, "time", Clock)
    for module in ("clients.loop", "stack.stack"):
        monkeypatch.setattr(f"fedpipe.engine.{module}.time", Clock)
    params = studies.settings(("fedavg",), 1, federation={"local_epochs": 3})
    plan = studies.prepare(params)
    (run,) = studies.open_runs(plan, stack=stack)
    studies.finish_run(run, 1)
    (times,) = files.read_json(run.files.get_merged_files(1).times)["rounds"]
    assert run.federation.participants == 5
    assert times["epoch"] == pytest.approx(6.0 / 3 / (1 if stack == 1 else 5))
    assert times["train"] == pytest.approx(30.0 if stack == 1 else 6.0)
    assert StudyData(plan).mean_run_times["epoch"].to_list() == [pytest.approx(times["epoch"])]
