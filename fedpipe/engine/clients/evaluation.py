"""Evaluation by protocol: the models, test sets and rounds.

A row of the metrics is one model on one test set in one round. Client -1 is a model of the server on the global test
set. A method can add models of the server, which are evaluated in addition to the study's protocols.

If the personal model of all clients is the global model, as with FedAvg, its logits are computed once for all
protocols.

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
from fedpipe.engine.clients.executor import (
    FIRST,
    ClientTask,
    Executor,
    Phase,
    Score,
    TestSet,
    has_same_bits,
    make_client_start_state,
)
from fedpipe.engine.clients.federated_data import FederatedData, Integers
from fedpipe.engine.clients.metrics import compute_probability_metrics
from fedpipe.engine.server.server import call_server_hooks
from fedpipe.engine.torch_env.trees import move_state
from fedpipe.engine.user_errors import explain_user_errors
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


def get_test_sets(settings: Evaluation, model: str) -> list[TestSet]:
    """Get the test sets of a model."""
    test_names: tuple[TestSet, ...] = ("local", "global", "train", "validation")
    return [test for test in test_names if f"{model}-on-{test}" in settings.protocols]


def get_test_sets_after_training(settings: Evaluation, is_evaluated: bool) -> dict[str, list[TestSet]]:
    """Get the test sets of each model of a participant after training, by the model's name."""
    tests_by_model = {
        "trained": get_test_sets(settings, "trained") if is_evaluated else [],
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
    settings: Evaluation, round_number: int, model: str, scores: Mapping[int, Mapping[TestSet, Score]]
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


def make_kept_model_table(
    settings: Evaluation,
    round_number: int,
    clients: FederatedData,
    last_rounds: Mapping[int, int],
    read_kept_table: Callable[[int], pa.Table],
    score_initial_models: Callable[[Sequence[int], Sequence[TestSet]], Mapping[int, Mapping[TestSet, Score]]],
) -> pa.Table:
    """Make rows of the kept protocols: every client's last trained model.

    A client whose samples have drifted since its last training (``federation.drift``) has only a result on the global
    test set, because the model was not measured on the new samples.

    ``last_rounds`` has the last round of each client. -1: it has never trained, so ``score_initial_models`` evaluates
    its initial model. ``read_kept_table`` reads the accuracies of a round's participants after training.
    """
    trained_rounds = sorted({number for number in last_rounds.values() if number >= 0})
    rows_by_round = {number: read_kept_table(number).to_pylist() for number in trained_rounds}
    if untrained_clients := [client for client, last_round in last_rounds.items() if last_round < 0]:
        scores = score_initial_models(untrained_clients, get_test_sets(settings, "kept"))
        rows_by_round[-1] = make_metrics_table(settings, round_number, "kept", scores).to_pylist()
    rows = [row for client, number in last_rounds.items() for row in rows_by_round[number] if row["client"] == client]
    drifted = {client for client in clients.ids if clients.has_drifted(client, last_rounds[client], round_number)}
    rows = [row for row in rows if row["client"] not in drifted or row["protocol"] == "kept-on-global"]
    return pa.Table.from_pylist([row | {"round": round_number} for row in rows], get_metrics_schema(settings))


def make_class_matrices_table(
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
    tables, clients = [], clients.select_round_samples(round_number)
    global_tests, global_scorer = get_test_sets(settings, "global"), None
    server_models = make_server_models(algorithm, server, global_tests)
    if (global_model := server_models.pop("global", None)) is not None:
        has_batch_statistics = algorithm.net.has_batch_statistics
        global_scorer = ModelScorer(settings, executor, clients, round_number, global_model, has_batch_statistics)
    for model, phase in PHASES.items():
        test_sets = get_test_sets(settings, model)
        if not test_sets or (model == "prototype" and not algorithm.has_prototype_logits):
            continue
        if (
            model == "personal"
            and global_scorer
            and is_personal_model_global(
                algorithm, clients, send, get_kept_state, round_number + 1, global_scorer.model
            )
        ):
            scores = global_scorer.score_client_test_sets(test_sets)
        else:
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
    matrices_by_name = {}
    if global_scorer:
        global_scores = {-1: global_scorer.score_global_test_set()} if "global" in global_tests else {}
        global_scores |= global_scorer.score_client_test_sets([test for test in global_tests if test != "global"])
        tables.append(make_metrics_table(settings, round_number, "global", global_scores))
        matrices_by_name["SL"] = global_scorer.compute_soft_labels()
        if "head.weight" in global_scorer.model:
            matrices_by_name["CR"] = compute_class_relations(global_scorer.model["head.weight"])
        for model, tensors in server_models.items():
            extra_scorer = ModelScorer(settings, executor, clients, round_number, tensors)
            tables.append(make_metrics_table(settings, round_number, model, {-1: extra_scorer.score_global_test_set()}))
    metrics = pa.concat_tables(tables) if tables else get_metrics_schema(settings).empty_table()
    return EvaluationResult(
        metrics,
        make_class_matrices_table(round_number, "measured", {-1: matrices_by_name}) if matrices_by_name else None,
    )


def make_server_models(algorithm: Algorithm, server: State, tests: Sequence[TestSet]) -> dict[str, Tensors]:
    """Make the models of the server that the test sets need, by name: the global one, if any, and extra ones."""
    if not tests or algorithm.net.client_buffers:  # a server's model needs running statistics
        return {}
    with call_server_hooks(algorithm, server):
        global_model = contract.compute_global_model(algorithm, server)
        if global_model is None:
            return {}
        extra_models = contract.compute_extra_models(algorithm, server) if "global" in tests else {}
        return {"global": global_model, **extra_models}


def is_personal_model_global(
    algorithm: Algorithm,
    clients: FederatedData,
    send: Callable[[Sequence[int]], tuple[State, State]],
    get_kept_state: Callable[[int], State],
    round_number: int,
    global_model: Tensors,
) -> bool:
    """Whether the personal model of all clients is the global model, which they receive and predict with unchanged.

    After ``start``, each client's model must have the tensors of the download, which have the bits of ``global_model``.
    False if the logits of a sample depend on its batch, or on noise that each client draws.
    """
    has_other_predictions = type(algorithm).predict is not Algorithm.predict or algorithm.personal_passes()
    if has_other_predictions or algorithm.net.has_batch_statistics or clients.transforms.on_test or not clients.ids:
        return False
    round_algorithm = algorithm.bind_round(round_number, clients.seed)
    with torch.no_grad(), explain_user_errors(round_algorithm):
        common, client_parts = contract.validate_download(round_algorithm, send(clients.ids[:1]))
        model = common.get("model")
        if client_parts or not isinstance(model, Tensors) or not has_same_bits({"": model}, {"": global_model}):
            return False
        if type(algorithm).start is Algorithm.start:
            return True
        received_state = move_state(common, clients.device)
        for client in clients.ids:
            kept_state = move_state(get_kept_state(client), clients.device)
            info = clients.get_client_info(client, round_number, kept_state[FIRST])
            client_model = make_client_start_state(round_algorithm, kept_state, received_state, info).get("model")
            if not isinstance(client_model, Tensors) or client_model.keys() != model.keys():
                return False
            if any(client_model[name] is not value for name, value in received_state["model"].items()):
                return False
    return True


class ModelScorer:
    """Scores a model of the server after a round. The logits of a set of samples are computed once.

    With ``has_batch_statistics``, logits depend on the rest of the batch, so each client's are computed separately.
    """

    def __init__(
        self,
        settings: Evaluation,
        executor: Executor,
        clients: FederatedData,
        round_number: int,
        model: Tensors,
        has_batch_statistics: bool = False,
    ) -> None:
        self._settings, self._executor, self._clients = settings, executor, clients
        self._round, self.model, self._has_batch_statistics = round_number, model, has_batch_statistics

    @functools.cached_property
    def _global_test_logits(self) -> Tensor:
        """Logits of the global test set."""
        return self._executor.compute_logits(self.model, self._clients.global_test, self._round)

    def _compute_indexed_logits(self, indices: Integers) -> tuple[Integers, Tensor]:
        """Compute logits of samples. Return ascending indices, which may include more samples, and their logits."""
        global_test = self._clients.global_test
        can_use_subset = not self._has_batch_statistics or len(indices) in (0, len(global_test))
        if can_use_subset and np.isin(indices, global_test).all():  # not if clients have noise in their test samples
            return global_test, self._global_test_logits
        return indices, self._executor.compute_logits(self.model, indices, self._round)

    def compute_soft_labels(self) -> Tensor:
        """Compute the SL matrix: mean softmax output of each class on the global test set, shape (C, C)."""
        labels = self._clients.get_labels(self._clients.global_test)
        classes = one_hot(labels, self._clients.classes, self._global_test_logits.dtype)
        return classes.T @ self._global_test_logits.softmax(-1) / classes.sum(0).clamp(min=1).unsqueeze(1)

    def score_global_test_set(self) -> dict[TestSet, Score]:
        """Score the model on the global test set."""
        return {"global": self._score_subsets([self._clients.global_test])[0]}

    def score_client_test_sets(self, tests: Sequence[TestSet]) -> dict[int, dict[TestSet, Score]]:
        """Score the model on test sets of each client. Empty without test sets."""
        scores: dict[int, dict[TestSet, Score]] = {client: {} for client in self._clients.ids if tests}
        for test in tests:
            subsets = [self._clients.get_evaluation_indices(client, test) for client in scores]
            copies = len(subsets) if test == "global" else 1  # all clients have the same samples
            subsets = subsets[::copies]
            groups = [[subset] for subset in subsets] if self._has_batch_statistics else [subsets]
            subset_scores = [score for group in groups for score in self._score_subsets(group)] * copies
            for client, score in zip(scores, subset_scores, strict=True):
                scores[client][test] = score
        return scores

    def _score_subsets(self, subsets: Sequence[Integers]) -> list[Score]:
        """Score the model on each of several subsets of the samples, from one computation of the logits."""
        sizes, classes = [len(subset) for subset in subsets], self._clients.classes
        indices, logits = self._compute_indexed_logits(np.unique(np.concatenate(subsets)))
        rows = np.searchsorted(indices, np.concatenate(subsets))
        logits, labels = logits[rows], self._clients.get_labels(indices[rows])
        losses = F.cross_entropy(logits, labels, reduction="none").double().cpu().numpy()
        predictions, targets = logits.argmax(-1).cpu().numpy(), labels.cpu().numpy()
        owners, is_correct = np.repeat(np.arange(len(sizes)), sizes), predictions == targets
        members = (owners[is_correct], targets[is_correct]), (owners, targets), (owners, predictions)
        counts = [np.bincount(owner * classes + ids, minlength=len(sizes) * classes) for owner, ids in members]
        counts_by_subset = torch.as_tensor(np.stack(counts, 1)).reshape(len(sizes), classes, 3).mT
        metrics = self._settings.recorded_metrics
        return [
            Score.from_counts(
                subset_counts,
                float(subset_losses.sum()),
                **compute_probability_metrics(metrics, subset_logits, subset_labels),
            )
            for subset_counts, subset_losses, subset_logits, subset_labels in zip(
                counts_by_subset,
                np.split(losses, np.cumsum(sizes)[:-1]),
                torch.split(logits, sizes),
                torch.split(labels, sizes),
                strict=True,
            )
        ]
