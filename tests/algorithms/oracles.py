"""PyTorch's own loops on the MLP and the clients of `make_trial`, with which tests compare algorithms."""

import itertools

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.models.mlp import MLP
from fedpipe.testing import make_trial


def load_mlp(*parts):
    """Build the MLP in float64 with the tensors of all parts of a model."""
    module = MLP(hidden=(6,)).build((5,), 4).double()
    module.load_state_dict({name: value for part in parts for name, value in part.items()})
    return module


def copy_parameters(module, prefix=""):
    """Copy the parameters of a module, or those whose names begin with the prefix."""
    named = module.named_parameters()
    return Tensors((name, value.detach().clone()) for name, value in named if name.startswith(prefix))


def list_batches(trial, client, number, stream="batches", epochs=None):
    """List inputs and classes of each step of a client in a round."""
    federation = trial.algorithm.federation
    for epoch in range(federation.local_epochs if epochs is None else epochs):
        order = trial.clients.shuffle_indices(client, number, stream, epoch)
        for first in range(0, len(order), federation.batch_size):
            yield trial.clients.gather_samples(order[first : first + federation.batch_size])


def take_steps(rule, compute_loss, batches):
    """Take a step of a PyTorch optimizer for each batch."""
    for x, y in batches:
        rule.zero_grad()
        compute_loss(x, y).backward()
        rule.step()


def average_models(models, weights):
    """Average models with weights that are divided by their sum."""
    total, first = sum(weights), models[0]
    shares = [float(weight) / total for weight in weights]
    return Tensors(
        (name, sum(share * model[name] for share, model in zip(shares, models, strict=True))) for name in first
    )


def run_fedavg(trial, rounds, train_client, part="model"):
    """Compute the model after the trial's next rounds as in FedAvg. The trial does not change.

    ``train_client(client, number, model)`` returns a client's model after training in a round. Only the part of the
    server's state with this name is averaged.
    """
    model = trial.server[part]
    for number in range(trial.rounds + 1, trial.rounds + rounds + 1):
        ids = trial.select_participants(number)
        weights = trial.clients.sizes[ids] if trial.algorithm.federation.weighting == "count" else np.ones(len(ids))
        model = average_models([train_client(client, number, model) for client in ids], weights)
    return model


def train_plainly(trial, compute_loss, rounds, freeze=lambda module: None):
    """Compute the MLP after some rounds of FedAvg with another loss and the trial's SGD.

    The arguments of ``compute_loss(client, module, received, x, y)`` are the client, its model, the received model in
    evaluation mode, and a batch. ``freeze(module)`` can exclude parameters from training.
    """
    federation = trial.algorithm.federation

    def train_client(client, number, model):
        module, received = load_mlp(model), load_mlp(model).eval().requires_grad_(False)
        freeze(module)
        rule = torch.optim.SGD(
            module.parameters(), federation.learning_rate, federation.momentum, weight_decay=federation.weight_decay
        )
        batches = list_batches(trial, client, number)
        take_steps(rule, lambda x, y: compute_loss(client, module, received, x, y), batches)
        return copy_parameters(module)

    return run_fedavg(trial, rounds, train_client)


def compute_finetuned_loss(trial, client, parts):
    """Compute a client's test loss after one epoch on parts of the MLP, such as ``("head",)``."""
    module, federation = load_mlp(trial.start(client)["model"]), trial.algorithm.federation
    trained = [value for name, value in module.named_parameters() if name.startswith(parts)]
    rule = torch.optim.SGD(trained, federation.learning_rate, federation.momentum)
    batches = list_batches(trial, client, trial.rounds + 1, "finetune", epochs=1)
    take_steps(rule, lambda x, y: cross_entropy(module(x), y), batches)
    x, y = trial.clients.gather_samples(trial.clients.test[client])
    return float(cross_entropy(module(x), y, reduction="sum").detach())


def make_dead_initial_model(algorithm):
    """Make a function that returns initial MLPs in which each ReLU of the body is off."""
    initial_model = make_trial(algorithm).initial_model

    def make_model(index):
        model = initial_model(index)
        return model | {"body.1.bias": torch.full_like(model["body.1.bias"], -1e3)}

    return make_model


def make_opposed_clients(sizes):
    """Make six clients in two groups, even and odd, that label the same inputs in opposite ways.

    They are tested on their training samples.
    """
    bounds = [0, *itertools.accumulate(sizes)]
    train = [np.arange(first, stop) for first, stop in itertools.pairwise(bounds)]
    x = torch.randn(bounds[-1], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    y = (x[:, 0] < 0).long()
    for client in (1, 3, 5):
        y[train[client]] = 1 - y[train[client]]
    return FederatedData(x, y, train, train, train[0][:0], 2, 0, torch.float64)
