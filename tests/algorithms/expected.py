"""Expectations of one algorithm beyond the contract: its traffic, and a setting that switches it off.

An algorithm's test declares them once, as ``EXPECTED = Expected(...)``. They are not in the algorithm, because its code
is part of its runs' keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.executor import FIRST
from fedpipe.models.mlp import MLP
from fedpipe.testing.comparisons import ADAM, SGD, TESTS
from fedpipe.testing.trial import CLASSES, Trial, describe_difference, make_synthetic_clients, make_trial
from tests.algorithms.oracles import copy_parameters, list_batches, take_steps

Build = Callable[..., Algorithm]  #: builds an algorithm from parameters


class Sizes(NamedTuple):
    """Counts of numbers in a model, for formulas of traffic."""

    all: int  #: numbers in the complete model
    body: int
    head: int
    classes: int  #: C
    features: int  #: d


Formula = Callable[[Sizes], tuple[int, int]]  #: numbers down and up, for a client of a round


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Expectations of an algorithm."""

    traffic: Sequence[tuple[Mapping[str, Any], Formula]]  #: parameters, each with the counts of numbers down and up
    #: Parameters that switch off everything that the algorithm adds to training. A single client then trains as in
    #: PyTorch without a federation. If there are no such parameters, the reason.
    centralized: Mapping[str, Any] | str
    #: Parameters for the checks, if the defaults leave a part of the algorithm idle or amplify rounding.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    momentum: bool = True  #: whether its local steps use the federation's momentum
    #: Parts of the server's state that are named tensors, but change even with a learning rate of 0.
    no_models: frozenset[str] = frozenset()
    #: Names of :data:`EXPECTATIONS` that the algorithm does not meet, each with the reason. An exception that the
    #: algorithm meets is an error.
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.traffic:
            raise ValueError(
                "traffic: empty. Use parameters with the counts of numbers down and up, such as "
                "[({}, lambda n: (n.all, n.all))]."
            )
        for name in self.exceptions:
            if name not in EXPECTATIONS:
                raise ValueError(f"exceptions: '{name}' is unknown. Use one of: {', '.join(EXPECTATIONS)}.")


def check_expectations(build: Build, expected: Expected, *selected_names: str) -> list[str]:
    """Check all :data:`EXPECTATIONS` or those with these names.

    Return a message for each unmet expectation, and for each needless exception.
    """
    messages = []
    for name in selected_names or EXPECTATIONS:
        message = EXPECTATIONS[name](build, expected)
        if name not in expected.exceptions:
            messages += [f"{name}: {message}"] if message else []
        elif not message:
            reason = expected.exceptions[name]
            messages.append(f"{name}: the algorithm meets this expectation, so delete its exception ('{reason}').")
    return messages


def find_upload_mismatch(build: Build, expected: Expected) -> str | None:
    """If all clients upload the same model, clients begin the next round with it."""
    trial = make_trial(build(**expected.parameters)).run(1)
    upload = trial.outcomes[-1].upload
    model = upload.get("model", upload.get("body"))
    if not isinstance(model, Tensors):
        return "clients upload no model."
    ids = [outcome.client for outcome in trial.outcomes]
    trial.server = trial.aggregate(Uploads(ids, trial.clients.sizes[ids].tolist(), [upload] * len(ids)))
    trial.client_states = dict.fromkeys(
        trial.client_states, trial.initial_client_state | {FIRST: torch.ones((), device=trial.clients.device)}
    )
    for client in ids:
        if message := describe_difference(trial.start(client)["model"].only(model), model, 1e-14):
            return f"the next round begins with another model ({message})."
    return None


def find_centralized_mismatch(build: Build, expected: Expected) -> str | None:
    """A single client trains as in PyTorch, if everything that the algorithm adds is switched off."""
    if isinstance(expected.centralized, str):
        return None
    for momentum in (0.9, 0.0) if expected.momentum else (0.0,):
        clients, rate, decay = make_synthetic_clients(sizes=[17], labels=lambda client: range(CLASSES)), 0.1, 0.01
        algorithm = build(**expected.parameters | expected.centralized)  # type: ignore[operator]
        settings: dict[str, Any] = {"learning_rate": rate, "weight_decay": decay, "momentum": momentum}
        trial = make_trial(algorithm, clients=clients, participation=1.0, **settings)
        module = trial.algorithm.adapt(MLP(hidden=(6,)).build((5,), CLASSES)).double()
        module.load_state_dict(trial.initial_model(0))
        module.to(clients.device)
        for number in (1, 2, 3):
            optimizer = torch.optim.SGD(module.parameters(), rate, momentum, 0, decay)
            compute_loss = lambda x, y, module=module: cross_entropy(module(x), y)  # noqa: E731
            take_steps(optimizer, compute_loss, list_batches(trial, 0, number))
        if message := describe_difference(trial.run(3).start(0)["model"], copy_parameters(module), 1e-12):
            return f"a single client trains another model than PyTorch, with momentum {momentum} ({message})."
    return None


def find_learning_rate_mismatch(build: Build, expected: Expected) -> str | None:
    """With a learning rate of 0, no model of the server changes."""

    def select_models(server: State) -> dict[str, Tensors]:
        return {
            part: value
            for part, value in server.items()
            if isinstance(value, Tensors) and part not in expected.no_models
        }

    for settings in (SGD, ADAM):
        algorithm = build(**expected.parameters)
        if algorithm.needs_sgd and settings is ADAM:
            if not hasattr(algorithm, "adam"):  # it has no variant for Adam
                continue
            algorithm = build(**{**expected.parameters, "adam": True})
        trial = make_trial(algorithm, **{**settings, "learning_rate": 0.0})
        initial_models = select_models(trial.server)
        if message := describe_difference(select_models(trial.run(3).server), initial_models, 1e-14):
            return f"a model changes with a learning rate of 0 and {settings['optimizer']} ({message})."
    return None


def find_class_name_mismatch(build: Build, expected: Expected) -> str | None:
    """A permutation of labels and of the head's rows does not change which samples are classified correctly."""
    new_labels = [2, 0, 3, 1]
    plain_trial = make_trial(build(**expected.parameters), participation=1.0)

    def make_permuted_model(index: int) -> Tensors:
        rows, model = torch.tensor(new_labels).argsort(), plain_trial.initial_model(index)
        return model | {name: value[rows] for name, value in model.items() if name in ("head.weight", "head.bias")}

    renamed_trial = make_trial(
        build(**expected.parameters),
        clients=make_synthetic_clients(relabel=new_labels),
        participation=1.0,
        initial_model=make_permuted_model,
    )
    renamed_scores, plain_scores = (
        [score for outcome in trial.run(3, tests=TESTS).outcomes for score in outcome.scores.values()]
        for trial in (renamed_trial, plain_trial)
    )
    restored_scores = [
        score._replace(classes=tuple(tuple(row[name] for name in new_labels) for row in score.classes))
        for score in renamed_scores
    ]
    message = describe_difference([*map(tuple, restored_scores)], [*map(tuple, plain_scores)], 1e-9)
    return f"scores depend on the numbers of classes ({message})." if message else None


def find_traffic_mismatch(build: Build, expected: Expected) -> str | None:
    """Describe a difference between the bytes of a round and the formula, in loop or stack."""
    for (parameters, formula), width in itertools.product(expected.traffic, (None, 3)):
        trial = make_trial(build(**{**expected.parameters, **parameters}), width=width)
        down, up = formula(_count_sizes(trial))
        for outcome in trial.train():
            byte_counts, expected_counts = (outcome.bytes_down, outcome.bytes_up), (8 * down, 8 * up)
            if byte_counts != expected_counts:
                return f"{byte_counts} bytes down and up with {dict(parameters)}, expected {expected_counts}."
    return None


def _count_sizes(trial: Trial) -> Sizes:
    """Count the numbers in a trial's model."""
    model, net = trial.initial_model(0), trial.net
    body, head = (sum(model[name].numel() for name in names) for names in (net.body_names, net.head_names))
    total = sum(value.numel() for value in model.values())
    assert body + head == total, "every parameter must be in the body or the head"
    return Sizes(total, body, head, CLASSES, 6)


EXPECTATIONS: dict[str, Callable[[Build, Expected], str | None]] = {
    "equal_uploads": find_upload_mismatch,
    "centralized": find_centralized_mismatch,
    "no_learning_rate": find_learning_rate_mismatch,
    "class_names": find_class_name_mismatch,
    "traffic": find_traffic_mismatch,
}
