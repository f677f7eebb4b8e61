"""The loss around a global model, in two filter-normalized random directions (`surface`).

Source: Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018, section 4: each filter of a direction,
or row of a linear layer, is scaled to the norm of the model's own; biases and normalization layers stand still.
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
        "x": pa.float64(),  #: steps in the first direction; 0 is the model
        "y": pa.float64(),  #: and in the second
        "loss": pa.float64(),  #: mean cross-entropy on the clients' training samples, or on some of them
    }
)


def compute_table(run: Run, number: int, settings: dict[str, Any]) -> pa.Table:
    """Rows of `SCHEMA`, row by row of the grid."""
    model = local_models.get_global_model(run, number).map(lambda value: value.to(run.clients.device))
    parameters = run.algorithm.net.parameters(model)
    one, two = (make_direction(parameters, settings["seed"], index) for index in range(2))
    samples = sample_indices(np.unique(np.concatenate(run.clients.train)), settings["samples"], settings["seed"])
    steps = np.linspace(-settings["radius"], settings["radius"], settings["points"]).tolist()
    rows = [
        {"x": x, "y": y, "loss": compute_loss(run, model | (parameters + x * one + y * two), samples)}
        for y in steps
        for x in steps
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def make_direction(model: Tensors, seed: int, index: int) -> Tensors:
    """The ``index``-th random direction: the same numbers for all models of the same shapes, before they are scaled."""
    generator = torch.Generator().manual_seed(rng.entropy(seed, f"diagnostic/surface/{index}") % 2**63)

    def scale_filters(value: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        if value.dim() < 2:
            return torch.zeros_like(value)
        filters, norms = noise.flatten(1), value.flatten(1).norm(dim=1, keepdim=True)
        length = filters.norm(dim=1, keepdim=True).clamp(min=torch.finfo(value.dtype).tiny)
        new_filters: torch.Tensor = (filters / length * norms).reshape(value.shape)
        return new_filters

    return model.map(scale_filters)


def sample_indices(indices: Integers, count: int | None, seed: int) -> Integers:
    """So many of the samples, the same for a seed, in ascending order; all, where there are fewer."""
    if count is None or count >= len(indices):
        return indices
    return np.sort(rng.generator(seed, "diagnostic/samples").choice(indices, count, replace=False))


def compute_loss(run: Run, model: Tensors, indices: Integers) -> float:
    """Mean cross-entropy of a model on samples as they are, in evaluation mode."""
    total, net = 0.0, run.algorithm.net
    with torch.no_grad(), net.mode.activate(False):
        for x, y in run.clients.gather_batches(indices, MEASURE_BATCH):
            total += float(F.cross_entropy(net(model, x), y, reduction="none").double().sum())
    return total / len(indices)
