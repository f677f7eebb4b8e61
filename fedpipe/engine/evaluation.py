"""Evaluation by protocol: which model on which test set, and when.

A row of the metrics is one model on one test set in one round: client -1 is a model of the server on the global test
set. Beside the protocols that are asked for, a method may have further models of the server measured.

A client's model as it was last trained is measured once, right after that training, whether or not that round is
measured otherwise: what a round records of it (``kept.parquet``) holds until the client trains again. So nobody stores
that model, and nothing of it travels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from fedpipe.algorithms.base import Algorithm, State, one_hot
from fedpipe.config import Evaluation
from fedpipe.engine import contract
from fedpipe.engine.clients import Clients, Integers
from fedpipe.engine.device import on_device_of
from fedpipe.engine.executor import Executor, Phase, Score, Test
from fedpipe.engine.server import send
from fedpipe.models.base import class_relations
from fedpipe.tensors import Tensors

PHASES: dict[str, Phase] = {"personal": "receive", "finetuned": "finetune", "prototype": "prototype"}

COUNTS = ("hits", "support", "predicted")  #: of each class: told right, how many there are, told to be of it

METRICS = pa.schema(
    {
        "round": pa.int32(),
        "client": pa.int32(),
        "protocol": pa.string(),
        "correct": pa.int64(),
        "total": pa.int64(),
        "loss": pa.float64(),
        **dict.fromkeys(COUNTS, pa.list_(pa.int32())),
    }
)


class Measured(NamedTuple):
    """What the evaluation of a round found."""

    metrics: pa.Table
    matrices: pa.Table | None  #: None where no global model is measured


def tests(settings: Evaluation, model: str) -> list[Test]:
    """The test sets on which a model is measured."""
    listed: tuple[Test, ...] = ("local", "global", "train", "validation")
    return [test for test in listed if f"{model}-on-{test}" in settings.protocols]


def due(settings: Evaluation, measured: bool) -> dict[str, list[Test]]:
    """By model, the test sets on which a round's participants are measured right after training."""
    wanted = {"trained": tests(settings, "trained") if measured else [], "kept": tests(settings, "kept")}
    return {model: on for model, on in wanted.items() if on}


def table(round: int, model: str, scores: Mapping[int, Mapping[Test, Score]]) -> pa.Table:
    """Rows of the metrics: ``scores`` by client."""
    rows = [
        {
            "round": round,
            "client": client,
            "protocol": f"{model}-on-{test}",
            "correct": score.correct,
            "total": score.total,
            "loss": score.loss / max(score.total, 1),
            **dict(zip(COUNTS, score.classes, strict=True)),
        }
        for client, by_test in scores.items()
        for test, score in by_test.items()
    ]
    return pa.Table.from_pylist(rows, METRICS)


def kept(
    settings: Evaluation,
    round: int,
    last: Sequence[int],
    recorded: Callable[[int], pa.Table],
    begin: Callable[[Sequence[int], Sequence[Test]], Mapping[int, Mapping[Test, Score]]],
) -> pa.Table:
    """Rows of the kept protocols: every client's model as it was last trained.

    Parameters
    ----------
    settings
        What is asked for.
    round
        The round that is measured.
    last
        The round that trained each client last; -1: none did.
    recorded
        What a round recorded of its participants right after training.
    begin
        Measures the models with which these clients, whom no round has trained, begin the first one.
    """
    untrained = [client for client, trained in enumerate(last) if trained < 0]
    found = {number: recorded(number).to_pylist() for number in sorted(set(last)) if number >= 0}
    found[-1] = table(round, "kept", begin(untrained, tests(settings, "kept"))).to_pylist() if untrained else []
    rows = [row for client, number in enumerate(last) for row in found[number] if row["client"] == client]
    return pa.Table.from_pylist([row | {"round": round} for row in rows], METRICS)


def matrices(
    round: int, source: Literal["measured", "exchanged"], by_client: Mapping[int, Mapping[str, Tensor]]
) -> pa.Table:
    """Rows of matrices (C, C): one a client (-1: the server), matrix and class, with a column a class.

    ``source`` tells matrices of the global model, measured on the global test set, from those that an algorithm sent.
    """
    keys = ("round", "source", "client", "matrix", "class")
    columns: dict[str, list[object]] = {key: [] for key in keys}
    for client, named in by_client.items():
        for name, matrix in named.items():
            for index, row in enumerate(matrix.double().tolist()):
                for key, entry in zip(keys, (round, source, client, name, index), strict=True):
                    columns[key].append(entry)
                for column, value in enumerate(row):
                    columns.setdefault(str(column), []).append(value)
    return pa.table(columns)


def measure(
    settings: Evaluation,
    executor: Executor,
    algorithm: Algorithm,
    clients: Clients,
    server: State,
    kept: Callable[[int], State],
    round: int,
    again: Collection[int] = (),
) -> Measured:
    """All protocols but the trained and kept ones, on the server's state after a round and on what the clients keep.

    The clients ``again`` train next.
    """
    found = []
    for model, phase in PHASES.items():
        wanted = tests(settings, model)
        if wanted and (model != "prototype" or algorithm.prototypes):
            sends = functools.partial(send, algorithm, server)
            outcomes = executor.run(phase, round + 1, range(len(clients)), kept, sends, wanted, again=again)
            found.append(table(round, model, {outcome.client: outcome.scores for outcome in outcomes}))
    wanted = tests(settings, "global")
    complete = not algorithm.net.own  # statistics that stay at the clients leave the server's model without any
    with on_device_of(server):
        deployed = algorithm.global_model(server) if wanted and complete else None
        asked = deployed is not None and "global" in wanted
        others = contract.extra_models(algorithm, algorithm.extra_models(server)) if asked else {}
    named = {}
    if deployed is not None:
        scores, named["SL"] = _global(executor, clients, deployed, wanted, round)
        found.append(table(round, "global", scores))
        if "head.weight" in deployed:
            named["CR"] = class_relations(deployed["head.weight"])
        for model, tensors in others.items():
            found.append(table(round, model, _global(executor, clients, tensors, ["global"], round)[0]))
    metrics = pa.concat_tables(found) if found else METRICS.empty_table()
    return Measured(metrics, matrices(round, "measured", {-1: named}) if named else None)


def _global(
    executor: Executor, clients: Clients, model: Tensors, wanted: Sequence[Test], round: int
) -> tuple[dict[int, dict[Test, Score]], Tensor]:
    """The global model on all test samples at once: its scores, and its SL matrix on the global test set."""
    every = clients.global_test
    logits = executor.logits(model, every, round)
    labels = clients.y[torch.as_tensor(every, device=clients.device)]
    classes = one_hot(labels, clients.classes, logits.dtype)
    soft_labels = classes.T @ logits.softmax(-1) / classes.sum(0).clamp(min=1).unsqueeze(1)
    scores: dict[int, dict[Test, Score]] = {client: {} for client in range(-1, len(clients))}
    score = _scoring(clients, every, logits)
    if "global" in wanted:
        scores[-1]["global"] = score(every)
    if "local" in wanted:
        for client, indices in enumerate(clients.test):
            scores[client]["local"] = score(indices)
    if "validation" in wanted:
        every = np.unique(np.concatenate(clients.held_out))
        score = _scoring(clients, every, executor.logits(model, every, round))
        for client, indices in enumerate(clients.held_out):
            scores[client]["validation"] = score(indices)
    return {client: found for client, found in scores.items() if found}, soft_labels


def _scoring(clients: Clients, every: Integers, logits: Tensor) -> Callable[[Integers], Score]:
    """The score on some of these samples (ascending), of which the logits are known."""
    labels = clients.y[torch.as_tensor(every, device=clients.device)]
    told, are = logits.argmax(-1).cpu().numpy(), labels.cpu().numpy()
    loss = F.cross_entropy(logits, labels, reduction="none").double().cpu().numpy()

    def score(indices: Integers) -> Score:
        rows = np.searchsorted(every, indices)
        hits = rows[told[rows] == are[rows]]
        counts = [np.bincount(of, minlength=clients.classes) for of in (are[hits], are[rows], told[rows])]
        return Score.of(torch.as_tensor(np.stack(counts)), float(loss[rows].sum()))

    return score
