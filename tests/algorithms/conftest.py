"""Toy problem Q2 (spec, section 0.9): scalar clients with exact numbers, trained by the real algorithms."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fedpipe.engine.clients import Clients
from fedpipe.models.base import Network
from fedpipe.tensors import Tensors


def scalar(value):
    """The toy's model at x = ``value``."""
    return Tensors({"head.weight": torch.tensor([[float(value)]], dtype=torch.float64)})


def quadratic(a, b, x):
    """The risk of Q2."""
    return a / 2 * (x - b) ** 2


def with_risk(algorithm, risk):
    """The same algorithm whose clients minimise ``risk``, with a and b their samples and x the only parameter."""

    class Toy(type(algorithm)):
        def risk(self, client, batch):
            a, b = batch.x.unbind(-1)
            return batch.mean(risk(a, b, client["model"]["head.weight"].reshape(())))

    return Toy(**{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)})


@pytest.fixture(name="scalar")
def scalar_fixture():
    """See :func:`scalar`."""
    return scalar


@pytest.fixture
def make_toy(make_trial):
    """A trial on scalar clients (a, b), all in every round; by default Q2 at 0 with rate 0.1.

    ``local_epochs`` is the number of exact gradient steps in a round; client k has ``sizes[k]`` equal samples.
    """

    def make(algorithm, problems=((1.0, 0.0), (3.0, 4.0)), sizes=None, start=0.0, risk=quadratic, **settings):
        sizes = sizes or [1] * len(problems)
        samples = np.repeat(np.array(problems), sizes, axis=0)
        parts = np.split(np.arange(len(samples)), np.cumsum(sizes)[:-1])
        labels, nothing = torch.zeros(len(samples), dtype=torch.long), np.arange(0)
        clients = Clients(torch.as_tensor(samples), labels, parts, [nothing] * len(parts), nothing, 1, 0, torch.float64)
        return make_trial(
            with_risk(algorithm, risk),
            lambda: Network(nn.Identity(), nn.Linear(1, 1, bias=False)),
            clients,
            fresh=lambda index: scalar(start),
            **{"participation": 1.0, "local_epochs": 1, "learning_rate": 0.1} | settings,
        )

    return make


@pytest.fixture
def path():
    """``path(trial, 4)``: where the toy's model is after each of the next 4 rounds."""

    def walk(trial, rounds):
        return [float(trial.run().server["model"]["head.weight"]) for _ in range(rounds)]

    return walk
