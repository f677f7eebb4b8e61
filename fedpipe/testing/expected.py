"""Expectations of one algorithm beyond the contract: its traffic, and a setting that switches it off.

An algorithm's test declares them once, as ``EXPECTED = Expected(...)``. They are not in the algorithm, because its code
is part of its runs' keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.executor import FIRST
from fedpipe.models.mlp import MLP
from fedpipe.testing.comparisons import ADAM, SGD, TESTS
from fedpipe.testing.trial import CLASSES, difference, make_trial, synthetic

Build = Callable[..., Algorithm]  #: parameters to an algorithm


class Sizes(NamedTuple):
    """Numbers in a model and its parts, of which traffic is made."""

    all: int  #: in the whole model
    body: int
    head: int
    classes: int  #: C
    features: int  #: d


Formula = Callable[[Sizes], tuple[int, int]]  #: numbers down and up, for a client of a round


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is expected of an algorithm.

    Parameters
    ----------
    traffic
        Numbers down and up, for each of some parameters.
    centralized
        The parameters that switch off all that it adds to training, so that one client alone trains as PyTorch would
        without a federation; or why there are none.
    parameters
        Other than the defaults, where those leave a part of it idle or amplify rounding.
    momentum
        Whether its local steps have the federation's momentum.
    no_models
        Parts of the server's state that are named tensors, and follow the data whatever the learning rate.
    exceptions
        What does not hold of it, and why: names of :data:`EXPECTATIONS` to a reason. What does hold after all, fails.
    """

    traffic: Sequence[tuple[Mapping[str, Any], Formula]]
    centralized: Mapping[str, Any] | str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    momentum: bool = True
    no_models: frozenset[str] = frozenset()
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.traffic:
            raise ValueError("traffic: empty. Use numbers down and up, as [({}, lambda n: (n.all, n.all))].")
        for name in self.exceptions:
            if name not in EXPECTATIONS:
                raise ValueError(f"exceptions: '{name}' is not one of {', '.join(EXPECTATIONS)}.")


def check_expected(build: Build, expected: Expected, *selected_names: str) -> list[str]:
    """A sentence for each expectation that does not hold, and for each exception that does.

    Parameters
    ----------
    build
        Makes the algorithm of parameters, as its class does.
    expected
        What is expected of it.
    selected_names
        Names of :data:`EXPECTATIONS`; by default all.
    """
    breaches = []
    for name in selected_names or EXPECTATIONS:
        breach = EXPECTATIONS[name](build, expected)
        if name not in expected.exceptions:
            breaches += [f"{name}: {breach}"] if breach else []
        elif not breach:
            breaches.append(
                f"{name}: holds, although it should not ({expected.exceptions[name]}); strike that exception."
            )
    return breaches


def expect_equal_uploads(build: Build, expected: Expected) -> str | None:
    """Where all clients send the same model, that is the model with which clients begin the next round."""
    trial = make_trial(build(**expected.parameters)).run(1)
    upload = trial.outcomes[-1].upload
    model = upload.get("model", upload.get("body"))
    if not isinstance(model, Tensors):
        return "no model is uploaded"
    ids = [outcome.client for outcome in trial.outcomes]
    trial.server = trial.aggregate(Uploads(ids, trial.clients.sizes[ids].tolist(), [upload] * len(ids)))
    trial.kept = dict.fromkeys(trial.kept, trial.initial | {FIRST: torch.ones(())})
    starts = (trial.start(client)["model"].only(model) for client in ids)
    return next((message for start in starts if (message := difference(start, model, 1e-14))), None)


def expect_centralized(build: Build, expected: Expected) -> str | None:
    """One client alone, with all switched off that the algorithm adds, trains as PyTorch would."""
    if isinstance(expected.centralized, str):
        return None
    for momentum in (0.9, 0.0) if expected.momentum else (0.0,):
        clients, rate, decay = synthetic(sizes=[17], labels=lambda client: range(CLASSES)), 0.1, 0.01
        algorithm = build(**expected.parameters | expected.centralized)  # type: ignore[operator]
        settings: dict[str, Any] = {"learning_rate": rate, "weight_decay": decay, "momentum": momentum}
        trial = make_trial(algorithm, clients=clients, participation=1.0, **settings)
        module = trial.algorithm.adapt(MLP(hidden=(6,)).build((5,), CLASSES)).double()
        module.load_state_dict(trial.fresh(0))
        for number in (1, 2, 3):
            rule = torch.optim.SGD(module.parameters(), rate, momentum, 0, decay)
            for epoch in range(2):
                order = clients.shuffle_indices(0, number, "batches", epoch)
                for first in range(0, len(order), 4):
                    x, y = clients.gather(order[first : first + 4])
                    rule.zero_grad()
                    torch.nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
                    rule.step()
        central = Tensors((name, value.detach()) for name, value in module.named_parameters())
        if message := difference(trial.run(3).start(0)["model"], central, 1e-12):
            return (
                f"one client alone trains otherwise than without a federation, at a momentum of {momentum}: {message}"
            )
    return None


def expect_no_learning_rate(build: Build, expected: Expected) -> str | None:
    """At a learning rate of 0 no model of the server changes."""

    def get_models(server: State) -> dict[str, Tensors]:
        return {
            part: value
            for part, value in server.items()
            if isinstance(value, Tensors) and part not in expected.no_models
        }

    for settings in (SGD, ADAM):
        algorithm = build(**expected.parameters)
        if algorithm.needs_sgd and settings is ADAM:
            algorithm = build(**{**expected.parameters, "adam": True})
        trial = make_trial(algorithm, **{**settings, "learning_rate": 0.0})
        initial_models = get_models(trial.server)
        if message := difference(get_models(trial.run(3).server), initial_models, 1e-14):
            return f"{message} at a learning rate of 0, with {settings['optimizer']}"
    return None


def expect_class_names(build: Build, expected: Expected) -> str | None:
    """Labels and the head's rows permuted alike: the same samples are classified correctly."""
    new_labels = [2, 0, 3, 1]
    plain_trial = make_trial(build(**expected.parameters), participation=1.0)

    def make_permuted_model(index: int) -> Tensors:
        rows, model = torch.tensor(new_labels).argsort(), plain_trial.fresh(index)
        return model | {name: value[rows] for name, value in model.items() if name in ("head.weight", "head.bias")}

    renamed_trial = make_trial(
        build(**expected.parameters),
        clients=synthetic(relabel=new_labels),
        participation=1.0,
        fresh=make_permuted_model,
    )
    renamed_scores, plain_scores = (
        [score for outcome in trial.run(3, tests=TESTS).outcomes for score in outcome.scores.values()]
        for trial in (renamed_trial, plain_trial)
    )
    restored_scores = [
        score._replace(classes=tuple(tuple(row[name] for name in new_labels) for row in score.classes))
        for score in renamed_scores
    ]
    return difference([tuple(score) for score in restored_scores], [tuple(score) for score in plain_scores], 1e-9)


def expect_traffic(build: Build, expected: Expected) -> str | None:
    """The bytes of a round, in loop and stack, are those of the formula."""
    for parameters, formula in expected.traffic:
        for width in (None, 3):
            trial = make_trial(build(**{**expected.parameters, **parameters}), width=width)
            model, net = trial.fresh(0), trial.net
            body, head = (
                sum(model[name].numel() for name in tensor_names) for tensor_names in (net.body_names, net.head_names)
            )
            assert body + head == sum(value.numel() for value in model.values()), "what is neither body nor head?"
            down, up = formula(Sizes(body + head, body, head, CLASSES, 6))
            byte_counts = {(outcome.bytes_down, outcome.bytes_up) for outcome in trial.train()}
            if byte_counts != {(8 * down, 8 * up)}:
                return f"{sorted(byte_counts)} bytes are counted with {dict(parameters)}, not {(8 * down, 8 * up)}"
    return None


EXPECTATIONS: dict[str, Callable[[Build, Expected], str | None]] = {
    "equal_uploads": expect_equal_uploads,
    "centralized": expect_centralized,
    "no_learning_rate": expect_no_learning_rate,
    "class_names": expect_class_names,
    "traffic": expect_traffic,
}
