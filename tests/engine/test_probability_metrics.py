"""The area under the ROC curve, and the bins of the calibration error."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedpipe.engine.clients.executor import ClientTask
from fedpipe.engine.clients.metrics import BINS, compute_auc, compute_probability_metrics, sum_calibration_bins
from fedpipe.report.results import compute_calibration_error


def draw_predictions(classes, samples=60, seed=0, decimals=1):
    """Draw rounded logits, so that many probabilities are equal, and classes that the logits partly predict."""
    generator = np.random.default_rng(seed)
    labels = np.arange(samples) % classes
    logits = generator.normal(size=(samples, classes)).round(decimals) + 1.5 * np.eye(classes)[labels]
    return torch.tensor(logits).softmax(-1).numpy(), labels


def test_auc_of_two_classes_is_fraction_of_ranked_pairs():
    """Of six pairs four are ranked correctly and one is tied: (4 + 0.5) / 6. Both classes have the same area."""
    scores, labels = np.array([0.9, 0.4, 0.4, 0.1, 0.8]), np.array([1, 1, 0, 0, 0])
    assert compute_auc(np.stack([1 - scores, scores], 1), labels) == pytest.approx(4.5 / 6, rel=1e-15)


@pytest.mark.parametrize(("classes", "seed"), [(3, 0), (3, 1), (10, 2)])
def test_auc_of_all_classes_matches_scikit_learn(classes, seed):
    probabilities, labels = draw_predictions(classes, seed=seed)
    expected = roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert compute_auc(probabilities, labels) == pytest.approx(expected, rel=1e-12)


def test_auc_ignores_missing_classes():
    probabilities, labels = draw_predictions(5)
    kept = labels != 3
    probabilities, labels = probabilities[kept], labels[kept]
    areas = [roc_auc_score(labels == label, probabilities[:, label]) for label in (0, 1, 2, 4)]
    assert compute_auc(probabilities, labels) == pytest.approx(np.mean(areas), rel=1e-12)


@pytest.mark.parametrize("labels", [np.array([], np.int64), np.array([2, 2, 2])])
def test_auc_of_fewer_than_two_classes_is_undefined(labels):
    assert compute_auc(np.full((len(labels), 4), 0.25), labels) is None


def test_calibration_bins_match_hand_computed_example():
    """Four samples of two classes.

    Confidences 0.6 and 0.64 share the bin (9/15, 10/15] with one hit: |1 - 1.24| = 0.24. The others are 0.9 (hit):
    0.1, and 1.0 (miss): 1. The error is (0.24 + 0.1 + 1) / 4.
    """
    probabilities = np.array([[0.61, 0.39], [0.37, 0.63], [0.9, 0.1], [0.0, 1.0]])
    bins = np.array(sum_calibration_bins(probabilities, np.array([0, 0, 0, 0])))
    assert bins.shape == (3, BINS)
    assert bins[0].tolist() == [0] * 9 + [2, 0, 0, 0, 1, 1]
    assert bins[1].tolist() == [0] * 9 + [1, 0, 0, 0, 1, 0]
    assert compute_calibration_error(*bins) == pytest.approx((0.24 + 0.1 + 1) / 4, rel=1e-15)


@pytest.mark.parametrize("number", range(1, BINS))
def test_calibration_bin_contains_its_upper_bound(number):
    bounds = np.array([[number / BINS, -1.0], [np.nextafter(number / BINS, 2), -1.0]])
    assert np.flatnonzero(sum_calibration_bins(bounds, np.array([0, 0]))[0]).tolist() == [number - 1, number]


def test_sum_of_calibration_bins_gives_error_of_all_samples():
    probabilities, labels = draw_predictions(10, samples=500, decimals=6)
    parts = [sum_calibration_bins(probabilities[rows], labels[rows]) for rows in np.array_split(np.arange(500), 7)]
    confidences, hits = probabilities.max(1), probabilities.argmax(1) == labels
    expected = 0.0
    for number in range(BINS):
        inside = (confidences > number / BINS) & (confidences <= (number + 1) / BINS)
        if inside.any():
            expected += inside.mean() * abs(hits[inside].mean() - confidences[inside].mean())
    assert compute_calibration_error(*np.sum(parts, 0)) == pytest.approx(expected, rel=1e-12)
    assert np.sum(
        [sum_calibration_bins(probabilities[:0], labels[:0]), sum_calibration_bins(probabilities, labels)], 0
    ) == pytest.approx(np.array(sum_calibration_bins(probabilities, labels)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_outputs_have_auc_of_one_half(value):
    measured = compute_probability_metrics(("auc", "ece"), torch.full((4, 3), value), torch.tensor([0, 1, 2, 0]))
    assert measured["auc"] == 0.5
    assert measured["bins"][0][0] == 4
    assert sum(measured["bins"][2]) == 0


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("label", ["fedavg", "fedproto"])
def test_probability_metrics_of_executors_match_plain_pytorch(make_trial, label, width):
    """Local test sets have several sizes, and one is empty. The global test set has several batches."""
    trial = make_trial(label, width=width, participation=1.0, learning_rate=0.3).run()
    tests = ("local", "global", "train")
    ids = range(len(trial.clients))
    task = ClientTask("receive", 2, ids, trial.client_states.__getitem__, trial.send, tests, metrics=("auc", "ece"))
    plain_task = ClientTask("receive", 2, ids, trial.client_states.__getitem__, trial.send, tests)
    outcomes, plain_outcomes = list(trial.executor.run(task)), list(trial.executor.run(plain_task))
    sizes = set()
    for outcome, plain_outcome in zip(outcomes, plain_outcomes, strict=True):
        for test, score in outcome.scores.items():
            indices = trial.clients.get_evaluation_indices(outcome.client, test)
            x, y = trial.clients.gather_samples(indices)
            model = trial.server["model"] if label == "fedavg" else trial.client_states[outcome.client]["model"]
            with torch.no_grad():
                probabilities = trial.net(model, x).double().softmax(-1).numpy()
            area = compute_auc(probabilities, y.numpy())
            assert score.auc == (None if area is None else pytest.approx(area, rel=1e-6))
            assert np.array(score.bins) == pytest.approx(
                np.array(sum_calibration_bins(probabilities, y.numpy())), rel=1e-6
            )
            assert sum(score.bins[0]) == score.total == len(indices)
            assert sum(score.bins[1]) == score.correct
            assert plain_outcome.scores[test] == score._replace(auc=None, bins=())
            sizes.add(len(indices))
    assert 0 in sizes
    assert len(sizes) > 3
