"""The loss around a global model, in two filter-normalized random directions (`surface`).

Source: Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018, section 4: each filter of a direction,
or row of a linear layer, is scaled to the norm of the model's. Biases and normalization layers are fixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F

from fedpipe.core import rng
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.executor import MEASURE_BATCH
from fedpipe.engine.clients.federated_data import Integers
from fedpipe.engine.diagnostics import local_models
from fedpipe.engine.run import Run

SCHEMA = pa.schema(
    {
        "x": pa.float64(),  #: coordinate in the first direction, 0 is the model
        "y": pa.float64(),  #: coordinate in the second direction
        "loss": pa.float64(),  #: mean cross-entropy on (some of) the clients' training samples
    }
)


def compute_table(run: Run, round_number: int, settings: dict[str, Any]) -> pa.Table:
    """Compute rows of `SCHEMA`, row by row of the grid."""
    model = local_models.get_global_model(run, round_number).map(lambda value: value.to(run.clients.device))
    parameters = run.algorithm.net.parameters(model)
    one, two = (draw_random_direction(parameters, settings["seed"], index) for index in range(2))
    train = run.clients.select_round_samples(round_number).train
    samples = sample_indices(np.unique(np.concatenate(train)), settings["samples"], settings["seed"])
    steps = np.linspace(-settings["radius"], settings["radius"], settings["points"]).tolist()
    rows = [
        {"x": x, "y": y, "loss": compute_loss(run, model | (parameters + x * one + y * two), samples)}
        for y in steps
        for x in steps
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def draw_random_direction(model: Tensors, seed: int, index: int) -> Tensors:
    """Make the ``index``-th random direction. Before scaling it is the same for all models with the same shapes."""
    generator = torch.Generator().manual_seed(rng.derive_entropy(seed, f"diagnostic/surface/{index}") % 2**63)

    def scale_filters(value: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        if value.dim() < 2:
            return torch.zeros_like(value)
        filters, norms = noise.flatten(1), value.flatten(1).norm(dim=1, keepdim=True)
        length = filters.norm(dim=1, keepdim=True).clamp(min=torch.finfo(value.dtype).tiny)
        return (filters / length * norms).reshape(value.shape)

    return model.map(scale_filters)


def sample_indices(indices: Integers, count: int | None, seed: int) -> Integers:
    """Draw a number of samples with a seed, in ascending order. All if there are fewer."""
    if count is None or count >= len(indices):
        return indices
    return np.sort(rng.make_generator(seed, "diagnostic/samples").choice(indices, count, replace=False))


def compute_loss(run: Run, model: Tensors, indices: Integers) -> float:
    """Compute the mean cross-entropy of a model in evaluation mode, without augmentation."""
    total, net = 0.0, run.algorithm.net
    with torch.no_grad(), net.mode.activate(training=False):
        for x, y in run.clients.gather_batches(indices, MEASURE_BATCH):
            total += float(F.cross_entropy(net(model, x), y, reduction="none").double().sum())
    return total / len(indices)
