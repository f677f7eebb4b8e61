"""Tests of Template. tests/algorithms/test_contract.py runs the checks that all algorithms must pass."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fedpipe import testing
from fedpipe.algorithms.base import Algorithm, Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.testing import make_trial
from tests.algorithms.expected import Expected

NAME = "fedpipe.cli.scaffold.templates.algorithm.Template"

# Expectations that the contract's tests need: the counts of numbers that travel down and up, and the parameters that
# switch off all that it adds to training (or why there are none). See tests/algorithms/expected.py for all fields.
EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={"pull": 0.0},
)


def build(**parameters: Any) -> Algorithm:
    """The algorithm with these parameters."""
    return cast(Algorithm, registry.build_component(component.ALGORITHM, NAME, parameters))


def test_with_a_pull_of_0_it_is_fedavg() -> None:
    """Bit by bit, over three rounds of a small federation with clients of unequal sizes."""
    trial, fedavg = (make_trial(algorithm).run(3) for algorithm in (build(pull=0.0), FedAvg()))
    testing.assert_same(trial.server, fedavg.server)


def test_the_pull_is_half_lambda_times_the_squared_distance() -> None:
    """Exact value if every parameter differs by 0.5 from the client's last model."""
    trial = make_trial(build(pull=0.7))
    client, batch = trial.start(3), Batch(*trial.clients.gather_samples(trial.clients.train[3]))
    client["model"] = client["last"] + 0.5
    pull = trial.algorithm.loss(client, batch) - trial.algorithm.risk(client, batch)
    parameters = sum(value.numel() for value in client["last"].values())
    assert float(pull) == pytest.approx(0.7 / 2 * parameters * 0.5**2, rel=1e-12)


def test_its_mechanism_acts() -> None:
    """It differs from FedAvg, and more in round 2, when clients have a last model."""
    trial, fedavg = (make_trial(algorithm, participation=1.0) for algorithm in (build(pull=1.0), FedAvg()))
    gaps = [float((trial.run().server["model"] - fedavg.run().server["model"]).norm()) for _ in range(2)]
    assert gaps[0] > 0.0
    assert gaps[1] > gaps[0]
