"""Class fractions estimated from the norms of a client's head, by step of its training in a round (`locals`)."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.engine.diagnostics import local_models
from fedpipe.engine.run import Run

SCHEMA = pa.schema(
    {
        "client": pa.int32(),
        "step": pa.int32(),  #: step of training in the round, 0 before the first
        "class": pa.int32(),
        "approximate": pa.float64(),  #: norm of the class's row over the sum of all rows' norms
        "share": pa.float64(),  #: fraction of the client's training samples
    }
)


def compute_table(run: Run, round_number: int, settings: dict[str, Any]) -> pa.Table:
    """Compute rows of `SCHEMA`, client by client."""
    participants = run.select_participants(round_number)
    clients = participants if settings["clients"] is None else settings["clients"]
    if missing := [client for client in clients if client not in participants]:
        raise SettingsError(
            f"diagnostics: client {missing[0]} does not train in round {round_number}. Use participants: "
            f"{participants}."
        )
    counts = run.clients.select_round_samples(round_number).class_counts
    shares = (counts / counts.sum(1, keepdim=True)).double().tolist()
    rows: list[dict[str, Any]] = []
    for local in local_models.replay_local_models(run, round_number, compute_relative_norms):
        if local.client in clients and local.trace is not None:
            for step, values in enumerate(local.trace.double().tolist()):
                for label, value in enumerate(values):
                    entry = (local.client, step, label, value, shares[local.client][label])
                    rows.append(dict(zip(SCHEMA.names, entry, strict=True)))
    return pa.Table.from_pylist(rows, SCHEMA)


def compute_relative_norms(model: Tensors) -> Tensor:
    """Norms of the head's rows over their sum (cwFedAvg, eq. 4), shape (C,)."""
    if "head.weight" not in model:
        raise SettingsError(f"diagnostics: these models have no head.weight. {local_models.HEAD_ADVICE}")
    norms: Tensor = torch.linalg.vector_norm(model["head.weight"], dim=-1)
    return norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)
