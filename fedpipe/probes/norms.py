"""Norms of the rows of heads beside the class shares of who owns them (`head-norms`)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fedpipe import artifacts
from fedpipe.engine.run import Run
from fedpipe.errors import SettingsError
from fedpipe.probes import models
from fedpipe.tensors import Tensors

SCHEMA = pa.schema(
    {
        "model": pa.string(),  #: received, trained, finetuned, class or global
        "owner": pa.int32(),  #: the client; of a class model its class, of the global model -1
        "class": pa.int32(),  #: the row of the head
        "norm": pa.float64(),  #: Euclidean
        "relative": pa.float64(),  #: over the sum of the norms: cwFedAvg's estimate of the share
        "share": pa.float64(),  #: of the owner's training samples, for the global model of all; null for a class model
        "samples": pa.int64(),  #: how many those are (null likewise)
    }
)


def probe(run: Run, number: int, settings: dict[str, Any]) -> pa.Table:
    """Rows of `SCHEMA` for the models that are asked for, in their order."""
    rows: list[dict[str, Any]] = []
    for name in settings["models"]:
        for owner, model, counts in _models(run, number, name, settings["finetune_epochs"]):
            rows += norms(name, owner, _head(run, model), counts)
    return pa.Table.from_pylist(rows, SCHEMA)


def norms(name: str, owner: int, head: Tensor, counts: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    """The rows of one head of shape (C, d); ``counts`` are its owner's samples of each class."""
    found = torch.linalg.vector_norm(head.double(), dim=-1).tolist()
    total, size = sum(found), sum(counts) if counts is not None else 0
    for label, norm in enumerate(found):
        samples = None if counts is None else int(counts[label])
        share = samples / size if samples is not None and size else None
        relative = norm / total if total else 0.0
        values = (name, owner, label, norm, relative, share, samples)
        yield dict(zip(SCHEMA.names, values, strict=True))


def distance(table: pa.Table, model: str = "trained") -> float:
    """Mean over the owners of the Euclidean distance between their shares and those that the norms tell.

    cwFedAvg's R, which its regularizer brings down.
    """
    frame = artifacts.frame(table)
    mine = frame[frame["model"] == model]
    squares = (mine["share"] - mine["relative"]) ** 2
    return float(squares.groupby(mine["owner"]).sum().pow(0.5).mean())


def _models(run: Run, number: int, name: str, epochs: int) -> Iterator[tuple[int, Tensors, list[int] | None]]:
    counts = run.clients.class_counts.long()
    if name == "global":
        yield -1, models.deployed(run, number), counts.sum(0).tolist()
    elif name == "class":
        classes = run.server(number).get("classes")
        if not isinstance(classes, Tensors) or "head.weight" not in classes:
            kind = run.settings.algorithm["name"]
            raise SettingsError(f"probes: {kind} has no class models, whose head `models: [class]` could look at.")
        for label in range(run.clients.classes):
            yield label, classes.map(operator.itemgetter(label)), None
    else:
        if name == "trained":
            found: Iterator[models.Local] = iter(models.trained(run, number))
        else:
            found = models.received(run, number, epochs if name == "finetuned" else 0)
        for local in found:
            yield local.client, local.model, counts[local.client].tolist()


def _head(run: Run, model: Tensors) -> Tensor:
    if "head.weight" not in model:
        kind = run.settings.algorithm["name"]
        raise SettingsError(f"probes: the models of {kind} have no head.weight, whose rows could be looked at.")
    return model["head.weight"]
