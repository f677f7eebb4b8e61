"""Norms of the rows of heads, next to the class fractions of the owners (`head-norms`)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.core.tensors import Tensors
from fedpipe.engine.diagnostics.local_models import (
    LocalModel,
    compute_personal_models,
    get_global_model,
    get_head_weight,
    replay_local_models,
)
from fedpipe.engine.run import Run

SCHEMA = pa.schema(
    {
        "model": pa.string(),  #: received, trained, finetuned, class or global
        "owner": pa.int32(),  #: client, class of a class model, or -1 for the global model
        "class": pa.int32(),  #: row of the head
        "norm": pa.float64(),  #: Euclidean norm
        "relative": pa.float64(),  #: norm over the sum of the norms: cwFedAvg's estimate of the fraction
        "share": pa.float64(),  #: fraction of the owner's (global: all) training samples. null for a class model
        "samples": pa.int64(),  #: number of the owner's training samples. null for a class model
    }
)


def compute_table(run: Run, round_number: int, settings: dict[str, Any]) -> pa.Table:
    """Compute rows of `SCHEMA` for the selected models, in order."""
    rows: list[dict[str, Any]] = []
    for name in settings["models"]:
        for owner, model, counts in _iterate_heads_and_counts(run, round_number, name, settings["finetune_epochs"]):
            rows += make_norm_rows(name, owner, get_head_weight(run, model), counts)
    return pa.Table.from_pylist(rows, SCHEMA)


def make_norm_rows(name: str, owner: int, head: Tensor, counts: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    """Make the rows of a head of shape (C, d). ``counts`` are its owner's samples by class."""
    norm_values = torch.linalg.vector_norm(head.double(), dim=-1).tolist()
    total, size = sum(norm_values), sum(counts) if counts is not None else 0
    for label, norm in enumerate(norm_values):
        samples = None if counts is None else int(counts[label])
        share = samples / size if samples is not None and size else None
        relative = norm / total if total else 0.0
        values = (name, owner, label, norm, relative, share, samples)
        yield dict(zip(SCHEMA.names, values, strict=True))


def compute_class_fraction_estimate_error(table: pa.Table, model: str = "trained") -> float:
    """Mean over owners of the Euclidean distance between class fractions and their estimates from norms.

    This is cwFedAvg's R, which its regularizer minimizes.
    """
    frame = files.table_to_frame(table)
    model_rows = frame[frame["model"] == model]
    squares = (model_rows["share"] - model_rows["relative"]) ** 2
    return float(squares.groupby(model_rows["owner"]).sum().pow(0.5).mean())


def _iterate_heads_and_counts(
    run: Run, round_number: int, name: str, epochs: int
) -> Iterator[tuple[int, Tensors, list[int] | None]]:
    counts = run.clients.select_round_samples(round_number).class_counts.long()
    if name == "global":
        yield -1, get_global_model(run, round_number), counts.sum(0).tolist()
    elif name == "class":
        classes = run.load_server_state(round_number).get("classes")
        if not isinstance(classes, Tensors) or "head.weight" not in classes:
            kind = run.settings.algorithm["name"]
            raise SettingsError(f"diagnostics: {kind} has no class models. Remove class from `models`.")
        for label in range(run.clients.classes):
            yield label, classes.map(operator.itemgetter(label)), None
    else:
        if name == "trained":
            local_models: Iterator[LocalModel] = iter(replay_local_models(run, round_number))
        else:
            local_models = compute_personal_models(run, round_number, epochs if name == "finetuned" else 0)
        for local in local_models:
            yield local.client, local.model, counts[local.client].tolist()
