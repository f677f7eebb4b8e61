"""Metrics of predicted probabilities: the area under the ROC curve, and the bins of the calibration error.

Both are computed from logits in float64. If a model's outputs are not finite, its probabilities count as 0.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpipe.settings.base import Metric

BINS = 15  #: bins of equal width of the calibration error

Bins = tuple[tuple[float, ...], ...]  #: three sums by bin: samples, correctly classified samples, and confidences


def compute_probability_metrics(metrics: Collection[Metric], logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """Measure ``auc`` and ``bins`` of a test set from logits, shape (n, C), as far as ``metrics`` needs them."""
    measured: dict[str, Any] = {}
    if not metrics:
        return measured
    probabilities, targets = torch.nan_to_num(logits.double().softmax(-1)).cpu().numpy(), labels.cpu().numpy()
    if "auc" in metrics:
        measured["auc"] = compute_auc(probabilities, targets)
    if "ece" in metrics:
        measured["bins"] = sum_calibration_bins(probabilities, targets)
    return measured


def compute_auc(probabilities: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> float | None:
    """Compute the macro average of one-vs-rest areas under the ROC curve.

    The mean is over the classes that some of the samples have and others don't. None if there is no such class. With
    all classes it equals ``sklearn.metrics.roc_auc_score(labels, probabilities, multi_class="ovr")``. The area is
    Mann and Whitney's statistic: the fraction of pairs of a sample of the class and another sample that the class's
    probabilities, shape (n, C), rank correctly, where ties count half.
    """
    from scipy.stats import rankdata  # imported here, because it takes half a second

    positive_counts = np.bincount(labels, minlength=probabilities.shape[-1])
    classes = np.flatnonzero((positive_counts > 0) & (positive_counts < len(labels)))
    if not len(classes):
        return None
    positives = positive_counts[classes]
    ranks = rankdata(probabilities[:, classes], axis=0)
    rank_sums = np.where(labels[:, None] == classes, ranks, 0).sum(0)
    areas = (rank_sums - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))
    return float(areas.mean())


def sum_calibration_bins(probabilities: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> Bins:
    """Sum samples, correct ones and confidences by bin, shape (3, 15).

    The confidence is the largest probability (Guo et al., On Calibration of Modern Neural Networks, ICML 2017). Bin
    ``m`` has confidences in ((m - 1) / 15, m / 15]. The sums of several test sets add up to those of all samples.
    """
    if not len(labels):
        return ((0.0,) * BINS,) * 3
    confidences, hits = probabilities.max(-1), probabilities.argmax(-1) == labels
    bins = np.searchsorted(np.arange(1, BINS) / BINS, confidences)
    sums = [np.bincount(bins, weights, BINS) for weights in (np.ones(len(labels)), hits, confidences)]
    return tuple(tuple(values.tolist()) for values in sums)
