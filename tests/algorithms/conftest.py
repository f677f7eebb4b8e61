"""Toy problem Q2 (spec, section 0.9): scalar clients with exact numbers, trained by the real algorithms."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.models.base import Network


def make_scalar_model(value):
    """Make the toy's model at x = ``value``."""
    return Tensors({"head.weight": torch.tensor([[float(value)]], dtype=torch.float64)})


def compute_quadratic_risk(a, b, x):
    """Compute the risk of Q2."""
    return a / 2 * (x - b) ** 2


def replace_risk(algorithm, risk):
    """Copy an algorithm whose clients then minimize ``risk``. Samples are a and b, the only parameter is x."""

    class Toy(type(algorithm)):
        def risk(self, client, batch):
            a, b = batch.x.unbind(-1)
            return batch.mean(risk(a, b, client["model"]["head.weight"].reshape(())))

    return Toy(**{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)})


@pytest.fixture(name="scalar")
def scalar_fixture():
    """See :func:`make_scalar_model`."""
    return make_scalar_model


@pytest.fixture
def make_toy(make_trial):
    """Make a trial on scalar clients (a, b) that all participate in every round. The default is Q2 at 0 with rate 0.1.

    ``local_epochs`` is the number of exact gradient steps in a round. Client k has ``sizes[k]`` equal samples.
    """

    def make(
        algorithm, problems=((1.0, 0.0), (3.0, 4.0)), sizes=None, start=0.0, risk=compute_quadratic_risk, **settings
    ):
        sizes = sizes or [1] * len(problems)
        samples = np.repeat(np.array(problems), sizes, axis=0)
        parts = np.split(np.arange(len(samples)), np.cumsum(sizes)[:-1])
        labels, nothing = torch.zeros(len(samples), dtype=torch.long), np.arange(0)
        clients = FederatedData(
            torch.as_tensor(samples), labels, parts, [nothing] * len(parts), nothing, 1, 0, torch.float64
        )
        return make_trial(
            replace_risk(algorithm, risk),
            lambda: Network(nn.Identity(), nn.Linear(1, 1, bias=False)),
            clients,
            initial_model=lambda index: make_scalar_model(start),
            **{"participation": 1.0, "local_epochs": 1, "learning_rate": 0.1} | settings,
        )

    return make


@pytest.fixture
def trace_path():
    """``trace_path(trial, 4)``: the toy's parameter after each of the next 4 rounds."""

    def walk(trial, rounds):
        return [float(trial.run().server["model"]["head.weight"]) for _ in range(rounds)]

    return walk
