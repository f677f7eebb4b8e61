"""Evaluation by protocol: the models, test sets and rounds.

A row of the metrics is one model on one test set in one round. Client -1 is a model of the server on the global test
set. A method may have further models of the server evaluated, in addition to the study's protocols.

A client's last trained model is evaluated once, after that training, even if the round is not evaluated otherwise. The
result (``kept.parquet``) is used until the client trains again. So this model is never stored or sent.
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
from fedpipe.engine.clients.metrics import compute_probability_metrics
from fedpipe.engine.server.device import create_tensors_on_device_of
from fedpipe.models.base import compute_class_relations
from fedpipe.settings.base import Metric
from fedpipe.settings.evaluation import Evaluation

PHASES: dict[str, Phase] = {"personal": "receive", "finetuned": "finetune", "prototype": "prototype"}

COUNTS = ("hits", "support", "predicted")  #: counts by class: correctly classified, present, predicted

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


#: Columns of the bins of the calibration error: samples, correctly classified samples, and confidences
BIN_COLUMNS = ("bin_samples", "bin_hits", "bin_confidences")
#: Columns of a run that records the metric.
RECORDED_COLUMNS: dict[Metric, dict[str, pa.DataType]] = {
    "auc": {"auc": pa.float64()},
    "ece": dict.fromkeys(BIN_COLUMNS, pa.list_(pa.float64())),
}


class EvaluationResult(NamedTuple):
    """The result of a round's evaluation."""

    metrics: pa.Table
    matrices: pa.Table | None  #: None without a global model


def get_test_sets(settings: Evaluation, model: str) -> list[Test]:
    """Get the test sets of a model."""
    test_names: tuple[Test, ...] = ("local", "global", "train", "validation")
    return [test for test in test_names if f"{model}-on-{test}" in settings.protocols]


def get_post_training_test_sets(settings: Evaluation, is_measured: bool) -> dict[str, list[Test]]:
    """Get the test sets by model for a round's participants after training."""
    tests_by_model = {
        "trained": get_test_sets(settings, "trained") if is_measured else [],
        "kept": get_test_sets(settings, "kept"),
    }
    return {model: test_sets for model, test_sets in tests_by_model.items() if test_sets}


def get_metrics_schema(settings: Evaluation) -> pa.Schema:
    """Get the schema of a run's metrics."""
    schema = METRICS_SCHEMA
    for metric in settings.recorded_metrics:
        for name, data_type in RECORDED_COLUMNS[metric].items():
            schema = schema.append(pa.field(name, data_type))
    return schema


def make_metrics_table(
    settings: Evaluation, round_number: int, model: str, scores: Mapping[int, Mapping[Test, Score]]
) -> pa.Table:
    """Make rows of the metrics from scores by client."""
    rows = [
        {
            "round": round_number,
            "client": client,
            "protocol": f"{model}-on-{test}",
            "correct": score.correct,
            "total": score.total,
            "loss": score.loss / max(score.total, 1),
            **dict(zip(COUNTS, score.classes, strict=True)),
            "auc": score.auc,
            **dict(zip(BIN_COLUMNS, score.bins, strict=False)),
        }
        for client, by_test in scores.items()
        for test, score in by_test.items()
    ]
    return pa.Table.from_pylist(rows, get_metrics_schema(settings))


def make_kept_table(
    settings: Evaluation,
    round_number: int,
    clients: FederatedData,
    last_rounds: Mapping[int, int],
    read_kept_table: Callable[[int], pa.Table],
    score_initial_models: Callable[[Sequence[int], Sequence[Test]], Mapping[int, Mapping[Test, Score]]],
) -> pa.Table:
    """Make rows of the kept protocols: every client's last trained model.

    A client whose samples have drifted since its last training (``federation.drift``) has only a result on the global
    test set, because the model was not measured on the new samples.

    Parameters
    ----------
    settings
        Section `evaluation`.
    round_number
        Round to evaluate.
    clients
        Samples of the clients.
    last_rounds
        Last round of each client. -1: none.
    read_kept_table
        Reads the accuracies of a round's participants after training.
    score_initial_models
        Evaluates the initial models of clients that have never trained.
    """
    untrained_clients = [client for client, last_round in last_rounds.items() if last_round < 0]
    trained_rounds = sorted({number for number in last_rounds.values() if number >= 0})
    rows_by_round = {number: read_kept_table(number).to_pylist() for number in trained_rounds}
    rows_by_round[-1] = (
        make_metrics_table(
            settings, round_number, "kept", score_initial_models(untrained_clients, get_test_sets(settings, "kept"))
        ).to_pylist()
        if untrained_clients
        else []
    )
    rows = [row for client, number in last_rounds.items() for row in rows_by_round[number] if row["client"] == client]
    drifted = {client for client in clients.ids if clients.has_drifted(client, last_rounds[client], round_number)}
    rows = [row for row in rows if row["client"] not in drifted or row["protocol"] == "kept-on-global"]
    return pa.Table.from_pylist([row | {"round": round_number} for row in rows], get_metrics_schema(settings))


def make_matrices_table(
    round_number: int, source: Literal["measured", "exchanged"], matrices_by_client: Mapping[int, Mapping[str, Tensor]]
) -> pa.Table:
    """Make rows of matrices (C, C): one per client (-1: server), matrix and class, with one column per class.

    ``source`` is `measured` (global model on the global test set) or `exchanged` (sent by an algorithm).
    """
    keys = ("round", "source", "client", "matrix", "class")
    columns: dict[str, list[object]] = {key: [] for key in keys}
    for client, client_matrices in matrices_by_client.items():
        for name, matrix in client_matrices.items():
            for index, row in enumerate(matrix.double().tolist()):
                for key, entry in zip(keys, (round_number, source, client, name, index), strict=True):
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
    send: Callable[[Sequence[int]], tuple[State, State]],
    get_kept_state: Callable[[int], State],
    round_number: int,
    next_participants: Collection[int] = (),
) -> EvaluationResult:
    """Evaluate all protocols except trained and kept, with the server's state after a round and the kept states.

    ``send`` gives the clients' downloads, and ``next_participants`` are the clients of the next round.
    """
    tables, clients = [], clients.select_round(round_number)
    for model, phase in PHASES.items():
        test_sets = get_test_sets(settings, model)
        if test_sets and (model != "prototype" or algorithm.has_prototype_logits):
            task = ClientTask(
                phase,
                round_number + 1,
                clients.ids,
                get_kept_state,
                send,
                test_sets,
                ids_to_cache=next_participants,
                metrics=settings.recorded_metrics,
                samples_round=round_number,
            )
            scores = {outcome.client: outcome.scores for outcome in executor.run(task)}
            tables.append(make_metrics_table(settings, round_number, model, scores))
    test_sets = get_test_sets(settings, "global")
    has_server_statistics = (
        not algorithm.net.client_buffers
    )  # without running statistics the server's model can't be evaluated
    with create_tensors_on_device_of(server):
        global_model = algorithm.global_model(server) if test_sets and has_server_statistics else None
        needs_extra_models = global_model is not None and "global" in test_sets
        extra_models = (
            contract.validate_extra_models(algorithm, algorithm.extra_models(server)) if needs_extra_models else {}
        )
    matrices_by_name = {}
    score_model = functools.partial(_score_global_model, settings, executor, clients, round_number)
    if global_model is not None:
        global_scores, matrices_by_name["SL"] = score_model(global_model, test_sets)
        tables.append(make_metrics_table(settings, round_number, "global", global_scores))
        if "head.weight" in global_model:
            matrices_by_name["CR"] = compute_class_relations(global_model["head.weight"])
        for model, tensors in extra_models.items():
            tables.append(make_metrics_table(settings, round_number, model, score_model(tensors, ["global"])[0]))
    metrics = pa.concat_tables(tables) if tables else get_metrics_schema(settings).empty_table()
    return EvaluationResult(
        metrics, make_matrices_table(round_number, "measured", {-1: matrices_by_name}) if matrices_by_name else None
    )


def _score_global_model(
    settings: Evaluation,
    executor: Executor,
    clients: FederatedData,
    round_number: int,
    model: Tensors,
    test_sets: Sequence[Test],
) -> tuple[dict[int, dict[Test, Score]], Tensor]:
    """Evaluate the global model on all test samples: scores, and the SL matrix on the global test set."""
    sample_indices = clients.global_test
    logits = executor.logits(model, sample_indices, round_number)
    labels = clients.get_labels(sample_indices)
    classes = one_hot(labels, clients.classes, logits.dtype)
    soft_labels = classes.T @ logits.softmax(-1) / classes.sum(0).clamp(min=1).unsqueeze(1)
    scores: dict[int, dict[Test, Score]] = {client: {} for client in (-1, *clients.ids)}
    score = _make_scorer(settings, clients, sample_indices, logits)
    if "global" in test_sets:
        scores[-1]["global"] = score(sample_indices)
    if "local" in test_sets:
        local_indices = np.unique(np.concatenate(clients.test))
        if not np.isin(local_indices, sample_indices).all():  # clients have noise in their test samples
            score = _make_scorer(settings, clients, local_indices, executor.logits(model, local_indices, round_number))
        for client in clients.ids:
            scores[client]["local"] = score(clients.test[client])
    if "validation" in test_sets:
        sample_indices = np.unique(np.concatenate(clients.validation))
        score = _make_scorer(settings, clients, sample_indices, executor.logits(model, sample_indices, round_number))
        for client in clients.ids:
            scores[client]["validation"] = score(clients.validation[client])
    return {client: client_scores for client, client_scores in scores.items() if client_scores}, soft_labels


def _make_scorer(
    settings: Evaluation, clients: FederatedData, sample_indices: Integers, logits: Tensor
) -> Callable[[Integers], Score]:
    """Make a function that scores a subset of these samples (ascending) from their logits."""
    labels = clients.get_labels(sample_indices)
    predictions, targets = logits.argmax(-1).cpu().numpy(), labels.cpu().numpy()
    loss = F.cross_entropy(logits, labels, reduction="none").double().cpu().numpy()

    def score_subset(indices: Integers) -> Score:
        rows = np.searchsorted(sample_indices, indices)
        hits = rows[predictions[rows] == targets[rows]]
        counts = [
            np.bincount(class_ids, minlength=clients.classes)
            for class_ids in (targets[hits], targets[rows], predictions[rows])
        ]
        measured = compute_probability_metrics(settings.recorded_metrics, logits[rows], labels[rows])
        return Score.from_counts(torch.as_tensor(np.stack(counts)), float(loss[rows].sum()), **measured)

    return score_subset
