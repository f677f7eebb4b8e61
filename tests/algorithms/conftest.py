"""Toy problem Q2 (spec, section 0.9): scalar clients with exact numbers, trained by the real algorithms."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.models.base import Network
from fedpipe.models.mlp import MLP


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
def list_batches():
    """``list_batches(trial, client, 1)``: inputs and classes of each step of a client in round 1, for PyTorch loops."""

    def gather_batches(trial, client, number, stream="batches", epochs=None):
        federation = trial.algorithm.federation
        for epoch in range(federation.local_epochs if epochs is None else epochs):
            order = trial.clients.shuffle_indices(client, number, stream, epoch)
            for first in range(0, len(order), federation.batch_size):
                yield trial.clients.gather_samples(order[first : first + federation.batch_size])

    return gather_batches


@pytest.fixture
def train_plainly(list_batches):
    """``train_plainly(trial, loss, 3)``: the model after 3 rounds of FedAvg as a PyTorch loop with another loss.

    The arguments of ``loss(module, received, x, y)`` are the client's model, the received model in evaluation mode, and
    a batch. Weights, batches, and the learning rate are those of the trial on the MLP.
    """

    def train(trial, loss, rounds):
        model, federation = dict(trial.server["model"]), trial.algorithm.federation
        for number in range(1, rounds + 1):
            uploads, sizes = [], []
            for client in trial.select_participants(number):
                module, received = (MLP(hidden=(6,)).build((5,), 4).double() for _ in range(2))
                module.load_state_dict(model)
                received.load_state_dict(model)
                received.eval().requires_grad_(False)
                rule = torch.optim.SGD(module.parameters(), federation.learning_rate)
                for x, y in list_batches(trial, client, number):
                    rule.zero_grad()
                    loss(module, received, x, y).backward()
                    rule.step()
                uploads.append(module.state_dict())
                sizes.append(trial.clients.sizes[client])
            model = {
                name: sum(size / sum(sizes) * upload[name] for size, upload in zip(sizes, uploads, strict=True))
                for name in model
            }
        return model

    return train


@pytest.fixture
def compute_finetuned_loss(list_batches):
    """``compute_finetuned_loss(trial, 1, ("head",))``: test loss after one PyTorch epoch on parts of the MLP."""

    def tune(trial, client, parts):
        module, federation = MLP(hidden=(6,)).build((5,), 4).double(), trial.algorithm.federation
        module.load_state_dict(trial.start(client)["model"])
        trained = [value for name, value in module.named_parameters() if name.startswith(parts)]
        rule = torch.optim.SGD(trained, federation.learning_rate, federation.momentum)
        for x, y in list_batches(trial, client, trial.rounds + 1, "finetune", epochs=1):
            rule.zero_grad()
            cross_entropy(module(x), y).backward()
            rule.step()
        x, y = trial.clients.gather_samples(trial.clients.test[client])
        return float(cross_entropy(module(x), y, reduction="sum").detach())

    return tune


@pytest.fixture
def trace_path():
    """``trace_path(trial, 4)``: the toy's parameter after each of the next 4 rounds."""

    def walk(trial, rounds):
        return [float(trial.run().server["model"]["head.weight"]) for _ in range(rounds)]

    return walk
