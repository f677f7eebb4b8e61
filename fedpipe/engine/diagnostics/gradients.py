"""Norms of each layer's gradient, on each client's data and on all data (`gradients`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F

from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.executor import MEASURE_BATCH
from fedpipe.engine.clients.federated_data import Integers
from fedpipe.engine.diagnostics import local_models
from fedpipe.engine.run import Run

SCHEMA = pa.schema(
    {
        "client": pa.int32(),  #: client, or -1 for the global model on all training samples
        "layer": pa.int32(),  #: number of the layer from the input
        "name": pa.string(),  #: name of the layer
        "norm": pa.float64(),  #: Euclidean norm over all trained tensors of the layer
        "samples": pa.int64(),  #: number of samples in the mean cross-entropy
    }
)


def compute_table(run: Run, round_number: int, settings: dict[str, Any]) -> pa.Table:
    """Compute rows of `SCHEMA` for each client's personal model after the round and the global model, if any."""
    rows: list[dict[str, Any]] = []
    train = run.clients.select_round_samples(round_number).train
    for local in local_models.compute_personal_models(run, round_number):
        rows += _make_gradient_norm_rows(run, local.client, local.model, local.buffers, train[local.client])
    if (model := local_models.find_global_model(run, round_number)) is not None:
        rows += _make_gradient_norm_rows(run, -1, model, None, np.concatenate(train))
    return pa.Table.from_pylist(rows, SCHEMA)


def compute_gradient(run: Run, model: Tensors, buffers: Tensors | None, indices: Integers) -> Tensors:
    """Compute the gradient of the mean cross-entropy in evaluation mode, without augmentation."""
    net, device = run.algorithm.net, run.clients.device
    model = model.map(lambda value: value.to(device))
    names = [name for name in net.names if name in model]
    total: Tensors | None = None
    client_buffers = buffers.map(lambda value: value.to(device)) if buffers else None
    for x, y in run.clients.gather_batches(indices, MEASURE_BATCH):
        leaves = Tensors((name, model[name].detach().requires_grad_()) for name in names)
        with (
            torch.enable_grad(),
            net.mode.activate(training=False, buffers=client_buffers, teacher_buffers=client_buffers),
        ):
            loss = F.cross_entropy(net(model | leaves, x), y, reduction="sum") / len(indices)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        term = Tensors(zip(names, gradients, strict=True))
        total = term if total is None else total + term
    return model.only(names).zeros() if total is None else total


def _make_gradient_norm_rows(
    run: Run, client: int, model: Tensors, buffers: Tensors | None, indices: Integers
) -> list[dict[str, Any]]:
    gradients = compute_gradient(run, model, buffers, indices)
    layers = [[name for name in names if name in gradients] for names in run.algorithm.net.layers()]
    nonempty_layers = [names for names in layers if names]
    return [
        {
            "client": client,
            "layer": layer,
            "name": names[0].rpartition(".")[0],
            "norm": float(gradients.only(names).map(lambda value: value.double()).norm()),
            "samples": len(indices),
        }
        for layer, names in enumerate(nonempty_layers)
    ]
