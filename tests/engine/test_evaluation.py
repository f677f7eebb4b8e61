"""What is measured of every algorithm."""

from __future__ import annotations

import pytest
import torch

from fedpipe import registry
from fedpipe.engine.executor import Phase

ALGORITHMS = registry.names(registry.ALGORITHM)


def correct(trial, phase: Phase, ids=None):
    outcomes = trial.train(ids, tests=("local", "global"), phase=phase)
    return {outcome.client: {test: score.correct for test, score in outcome.scores.items()} for outcome in outcomes}


@pytest.mark.parametrize("buffers", ["average", "keep"])
@pytest.mark.parametrize("label", ALGORITHMS)
def test_whom_no_round_has_trained_is_measured_with_the_initial_model(make_trial, label, buffers):
    trial = make_trial(label, "norm", buffers=buffers)
    clients, everyone = trial.clients, range(len(trial.clients))
    deployed = trial.algorithm.global_model(trial.server)
    model = (trial.fresh(0) if deployed is None else deployed).only(trial.net.names + trial.net.buffer_names)

    def right(indices):
        with torch.no_grad(), trial.net.mode.of(False, buffers=trial.net.own or None):
            x, y = clients.gather(indices)
            return int((trial.net(model, x).argmax(-1) == y).sum())

    found = correct(trial, "begin", everyone)
    whole = right(clients.global_test)
    assert found == {i: {"local": right(clients.test[i]), "global": whole} for i in everyone}
    assert 0 < whole < len(clients.global_test)
    assert correct(make_trial(label, "norm", buffers=buffers, width=3), "begin", everyone) == found


@pytest.mark.parametrize("label", ALGORITHMS)
def test_every_algorithm_has_a_model_right_after_training(make_trial, label):
    trial = make_trial(label, "norm", learning_rate=0.3, local_epochs=10)
    assert correct(trial, "train") != correct(trial, "begin")
