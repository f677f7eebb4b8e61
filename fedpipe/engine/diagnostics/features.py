"""Features of test samples and the rows of the head, in two dimensions by t-SNE (`features`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from fedpipe.core import rng
from fedpipe.core.errors import SettingsError
from fedpipe.engine.clients.executor import MEASURE_BATCH
from fedpipe.engine.diagnostics import local_models
from fedpipe.engine.diagnostics.surface import sample_indices
from fedpipe.engine.run import Run

SCHEMA = pa.schema(
    {
        "kind": pa.string(),  #: `feature` (of a sample) or `row` (of the head)
        "sample": pa.int64(),  #: index in the data set, -1 for a row
        "class": pa.int32(),
        "x": pa.float64(),  #: coordinate in t-SNE's plane
        "y": pa.float64(),
        "vector": pa.list_(pa.float64()),  #: embedded vector of unit length, shape (d,)
    }
)


def compute_table(run: Run, round_number: int, settings: dict[str, Any]) -> pa.Table:
    """Compute rows of `SCHEMA`: global test samples under the global model, then the rows of its head."""
    from sklearn.manifold import TSNE  # takes a second to import

    model = local_models.get_global_model(run, round_number).map(lambda value: value.to(run.clients.device))
    head_weight = local_models.get_head_weight(run, model)
    samples = sample_indices(run.clients.global_test, settings["samples"], settings["seed"])
    features, labels, net = [], [], run.algorithm.net
    with torch.no_grad(), net.mode.activate(training=False):
        for x, y in run.clients.gather_batches(samples, MEASURE_BATCH):
            features.append(net.features(model, x))
            labels += y.tolist()
    rows = head_weight.flatten(1)
    if features and features[0].shape[1] != rows.shape[1]:
        raise SettingsError(
            f"diagnostics: a row of head.weight has {rows.shape[1]} numbers and a feature vector has "
            f"{features[0].shape[1]}. Use a model with a linear head."
        )
    vectors = normalize_vectors(torch.cat([*features, rows]))
    if settings["perplexity"] >= len(vectors):
        raise SettingsError(
            f"diagnostics: perplexity {settings['perplexity']:g} can't be used with {len(vectors)} vectors. Use less "
            f"than {len(vectors)}."
        )
    # Exact, because the order of the tree's sums depends on threads.
    seed = rng.derive_entropy(settings["seed"], "diagnostic/tsne") % 2**32
    embedding = TSNE(perplexity=settings["perplexity"], init="pca", method="exact", random_state=seed)
    positions: np.ndarray[Any, Any] = embedding.fit_transform(vectors.numpy())
    columns = {
        "kind": ["feature"] * len(samples) + ["row"] * len(rows),
        "sample": [*samples.tolist(), *[-1] * len(rows)],
        "class": [*labels, *range(len(rows))],
        "x": positions[:, 0].astype(float).tolist(),
        "y": positions[:, 1].astype(float).tolist(),
        "vector": vectors.tolist(),
    }
    return pa.table(columns, SCHEMA)


def normalize_vectors(vectors: Tensor) -> Tensor:
    """Scale each vector of shape (n, d) to unit length, on the CPU."""
    return F.normalize(vectors.detach().cpu().double(), dim=1)
