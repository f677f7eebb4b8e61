"""Evaluation of clients before and after training, and class counts, for every algorithm."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from fedpipe.core.components import component, registry
from fedpipe.engine.clients.executor import Phase
from tests import small_studies as studies

ALGORITHMS = registry.list_components(component.ALGORITHM)


def count_correct_predictions(trial, phase: Phase, ids=None):
    outcomes = trial.train(ids, tests=("local", "global"), phase=phase)
    return {outcome.client: {test: score.correct for test, score in outcome.scores.items()} for outcome in outcomes}


@pytest.mark.parametrize("buffers", ["average", "keep"])
@pytest.mark.parametrize("label", studies.mark_others_slow(sorted(set(ALGORITHMS) - {"gpfl"})))  # gpfl adds a valve
def test_untrained_clients_are_evaluated_with_initial_model(make_trial, label, buffers):
    trial = make_trial(label, "norm", buffers=buffers)
    clients, all_clients = trial.clients, range(len(trial.clients))
    global_model = trial.algorithm.global_model(trial.server)
    model = (trial.initial_model(0) if global_model is None else global_model).only(
        trial.net.names + trial.net.buffer_names
    )

    def count_correct(indices):
        with torch.no_grad(), trial.net.mode.activate(False, buffers=trial.net.client_buffers or None):
            x, y = clients.gather_samples(indices)
            return int((trial.net(model, x).argmax(-1) == y).sum())

    result = count_correct_predictions(trial, "begin", all_clients)
    global_count = count_correct(clients.global_test)
    assert result == {i: {"local": count_correct(clients.test[i]), "global": global_count} for i in all_clients}
    assert 0 < global_count < len(clients.global_test)
    assert (
        count_correct_predictions(make_trial(label, "norm", buffers=buffers, width=3), "begin", all_clients) == result
    )


@pytest.mark.parametrize("label", studies.mark_others_slow(ALGORITHMS))
def test_training_changes_predictions_of_every_algorithm(make_trial, label):
    trial = make_trial(label, "norm", learning_rate=0.3, local_epochs=10)
    assert count_correct_predictions(trial, "train") != count_correct_predictions(trial, "begin")


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("label", ["fedavg", "cwfedavg", "ifca"])
def test_class_counts_match_scikit_learn_confusion_matrix(make_trial, label, width):
    """Evaluate trained models on local and global test samples. The first client has no test samples."""
    trial = make_trial(label, width=width, participation=1.0, learning_rate=0.3).run()
    for outcome in trial.train(range(8), ("local", "global")):
        for test, indices in (("local", trial.clients.test[outcome.client]), ("global", trial.clients.global_test)):
            score = outcome.scores[test]
            x, y = trial.clients.gather_samples(indices)
            with torch.no_grad():
                predictions = trial.net(outcome.upload["model"], x).argmax(-1)
            table = confusion_matrix(y, predictions, labels=range(4)) if len(indices) else np.zeros((4, 4), int)
            assert [list(counts) for counts in score.classes] == [
                table.diagonal().tolist(),
                table.sum(1).tolist(),
                table.sum(0).tolist(),
            ]
            assert (score.correct, score.total) == (int(table.trace()), len(indices))
