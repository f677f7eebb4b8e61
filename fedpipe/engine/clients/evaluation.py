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

from fedpipe.algorithms.base import Algorithm, one_hot
from fedpipe.algorithms.batch import State
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import ClientTask, Executor, Phase, Score, Test
from fedpipe.engine.clients.federated_data import FederatedData, Integers
from fedpipe.engine.server.device import use_device_of
from fedpipe.engine.server.server import make_download
from fedpipe.models.base import compute_class_relations
from fedpipe.settings.evaluation import Evaluation

PHASES: dict[str, Phase] = {"personal": "receive", "finetuned": "finetune", "prototype": "prototype"}

COUNTS = ("hits", "support", "predicted")  #: of each class: told right, how many there are, told to be of it

METRICS_SCHEMA = pa.schema(
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


class EvaluationResult(NamedTuple):
    """What the evaluation of a round found."""

    metrics: pa.Table
    matrices: pa.Table | None  #: None where no global model is measured


def get_test_sets(settings: Evaluation, model: str) -> list[Test]:
    """The test sets on which a model is measured."""
    test_names: tuple[Test, ...] = ("local", "global", "train", "validation")
    return [test for test in test_names if f"{model}-on-{test}" in settings.protocols]


def get_post_training_tests(settings: Evaluation, is_measured: bool) -> dict[str, list[Test]]:
    """By model, the test sets on which a round's participants are measured right after training."""
    tests_by_model = {
        "trained": get_test_sets(settings, "trained") if is_measured else [],
        "kept": get_test_sets(settings, "kept"),
    }
    return {model: test_sets for model, test_sets in tests_by_model.items() if test_sets}


def make_metrics_table(round: int, model: str, scores: Mapping[int, Mapping[Test, Score]]) -> pa.Table:
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
    return pa.Table.from_pylist(rows, METRICS_SCHEMA)


def make_kept_table(
    settings: Evaluation,
    round: int,
    last_rounds: Sequence[int],
    read_kept_table: Callable[[int], pa.Table],
    score_initial_models: Callable[[Sequence[int], Sequence[Test]], Mapping[int, Mapping[Test, Score]]],
) -> pa.Table:
    """Rows of the kept protocols: every client's model as it was last trained.

    Parameters
    ----------
    settings
        What is asked for.
    round
        The round that is measured.
    last_rounds
        The round that trained each client last; -1: none did.
    read_kept_table
        What a round recorded of its participants right after training.
    score_initial_models
        Measures the models with which these clients, whom no round has trained, begin the first one.
    """
    untrained_clients = [client for client, last_round in enumerate(last_rounds) if last_round < 0]
    rows_by_round = {number: read_kept_table(number).to_pylist() for number in sorted(set(last_rounds)) if number >= 0}
    rows_by_round[-1] = (
        make_metrics_table(
            round, "kept", score_initial_models(untrained_clients, get_test_sets(settings, "kept"))
        ).to_pylist()
        if untrained_clients
        else []
    )
    rows = [
        row for client, number in enumerate(last_rounds) for row in rows_by_round[number] if row["client"] == client
    ]
    return pa.Table.from_pylist([row | {"round": round} for row in rows], METRICS_SCHEMA)


def make_matrices_table(
    round: int, source: Literal["measured", "exchanged"], by_client: Mapping[int, Mapping[str, Tensor]]
) -> pa.Table:
    """Rows of matrices (C, C): one a client (-1: the server), matrix and class, with a column a class.

    ``source`` tells matrices of the global model, measured on the global test set, from those that an algorithm sent.
    """
    keys = ("round", "source", "client", "matrix", "class")
    columns: dict[str, list[object]] = {key: [] for key in keys}
    for client, client_matrices in by_client.items():
        for name, matrix in client_matrices.items():
            for index, row in enumerate(matrix.double().tolist()):
                for key, entry in zip(keys, (round, source, client, name, index), strict=True):
                    columns[key].append(entry)
                for column, value in enumerate(row):
                    columns.setdefault(str(column), []).append(value)
    return pa.table(columns)


def evaluate_round(
    settings: Evaluation,
    executor: Executor,
    algorithm: Algorithm,
    clients: FederatedData,
    server: State,
    get_kept_state: Callable[[int], State],
    round: int,
    next_participants: Collection[int] = (),
) -> EvaluationResult:
    """All protocols but the trained and kept ones, on the server's state after a round and on what the clients keep.

    The clients ``next_participants`` train next.
    """
    tables = []
    for model, phase in PHASES.items():
        test_sets = get_test_sets(settings, model)
        if test_sets and (model != "prototype" or algorithm.has_prototype_logits):
            send, all_clients = functools.partial(make_download, algorithm, server), range(len(clients))
            task = ClientTask(
                phase, round + 1, all_clients, get_kept_state, send, test_sets, ids_to_cache=next_participants
            )
            scores = {outcome.client: outcome.scores for outcome in executor.run(task)}
            tables.append(make_metrics_table(round, model, scores))
    test_sets = get_test_sets(settings, "global")
    has_server_statistics = (
        not algorithm.net.client_buffers
    )  # statistics that stay at the clients leave the server's model without any
    with use_device_of(server):
        global_model = algorithm.global_model(server) if test_sets and has_server_statistics else None
        needs_extra_models = global_model is not None and "global" in test_sets
        extra_models = (
            contract.validate_extra_models(algorithm, algorithm.extra_models(server)) if needs_extra_models else {}
        )
    matrices_by_name = {}
    if global_model is not None:
        global_scores, matrices_by_name["SL"] = _score_global_model(executor, clients, global_model, test_sets, round)
        tables.append(make_metrics_table(round, "global", global_scores))
        if "head.weight" in global_model:
            matrices_by_name["CR"] = compute_class_relations(global_model["head.weight"])
        for model, tensors in extra_models.items():
            tables.append(
                make_metrics_table(round, model, _score_global_model(executor, clients, tensors, ["global"], round)[0])
            )
    metrics = pa.concat_tables(tables) if tables else METRICS_SCHEMA.empty_table()
    return EvaluationResult(
        metrics, make_matrices_table(round, "measured", {-1: matrices_by_name}) if matrices_by_name else None
    )


def _score_global_model(
    executor: Executor, clients: FederatedData, model: Tensors, test_sets: Sequence[Test], round: int
) -> tuple[dict[int, dict[Test, Score]], Tensor]:
    """The global model on all test samples at once: its scores, and its SL matrix on the global test set."""
    sample_indices = clients.global_test
    logits = executor.logits(model, sample_indices, round)
    labels = clients.y[torch.as_tensor(sample_indices, device=clients.device)]
    classes = one_hot(labels, clients.classes, logits.dtype)
    soft_labels = classes.T @ logits.softmax(-1) / classes.sum(0).clamp(min=1).unsqueeze(1)
    scores: dict[int, dict[Test, Score]] = {client: {} for client in range(-1, len(clients))}
    score = _make_scorer(clients, sample_indices, logits)
    if "global" in test_sets:
        scores[-1]["global"] = score(sample_indices)
    if "local" in test_sets:
        for client, indices in enumerate(clients.test):
            scores[client]["local"] = score(indices)
    if "validation" in test_sets:
        sample_indices = np.unique(np.concatenate(clients.held_out))
        score = _make_scorer(clients, sample_indices, executor.logits(model, sample_indices, round))
        for client, indices in enumerate(clients.held_out):
            scores[client]["validation"] = score(indices)
    return {client: client_scores for client, client_scores in scores.items() if client_scores}, soft_labels


def _make_scorer(clients: FederatedData, sample_indices: Integers, logits: Tensor) -> Callable[[Integers], Score]:
    """The score on some of these samples (ascending), of which the logits are known."""
    labels = clients.y[torch.as_tensor(sample_indices, device=clients.device)]
    predictions, targets = logits.argmax(-1).cpu().numpy(), labels.cpu().numpy()
    loss = F.cross_entropy(logits, labels, reduction="none").double().cpu().numpy()

    def score(indices: Integers) -> Score:
        rows = np.searchsorted(sample_indices, indices)
        hits = rows[predictions[rows] == targets[rows]]
        counts = [
            np.bincount(class_ids, minlength=clients.classes)
            for class_ids in (targets[hits], targets[rows], predictions[rows])
        ]
        return Score.from_counts(torch.as_tensor(np.stack(counts)), float(loss[rows].sum()))

    return score
