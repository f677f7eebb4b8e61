import functools
import itertools

import pytest
import torch
from torch import nn

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedbn import FedBN
from fedpipe.engine.torch_env.trees import count_bytes
from fedpipe.models.base import Network
from fedpipe.models.cnn5 import CNN5
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={},
)


class ShortcutBlock(nn.Module):
    """A residual block with a normalized shortcut. No parameter name contains "bn"."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.shortcut = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))

    def forward(self, x):
        return (self.main(x) + self.shortcut(x)).relu()


@pytest.mark.parametrize("weighting", ["count", "uniform"])
def test_fedbn_without_normalization_equals_fedavg_bit_for_bit(make_trial, assert_same, weighting):
    settings = {"weighting": weighting, "momentum": 0.9}
    bn, plain = (make_trial(algorithm, **settings).run(3, tests=("local",)) for algorithm in (FedBN(), FedAvg()))
    assert_same(bn.server, plain.server)
    assert_same(bn.algorithm.global_model(bn.server), plain.algorithm.global_model(plain.server))
    assert [outcome.scores for outcome in bn.outcomes] == [outcome.scores for outcome in plain.outcomes]


@pytest.mark.parametrize("width", [None, 3])
def test_fedbn_clients_share_all_layers_except_normalization(make_trial, assert_same, width):
    """Trained normalization differs between clients and does not change while a client is absent."""
    trial = make_trial(FedBN(), "norm", width=width, participation=1.0).run(2)
    norm = trial.net.norm_names
    assert set(norm) == {f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
    models = [trial.start(client)["model"] for client in range(8)]
    for client, model in enumerate(models):
        assert tuple(model) == trial.net.names + trial.net.buffer_names
        assert_same(model.only(trial.server["model"]), trial.server["model"])
        assert_same(model.only(norm), trial.client_states[client]["norm"])
    assert all((one.only(norm) - two.only(norm)).norm() > 1e-3 for one, two in itertools.pairwise(models))
    trial.run(2, ids=[0, 1])
    assert_same(trial.start(5)["model"].only(norm), models[5].only(norm))


def test_fedbn_averages_shared_parameters_by_weight(make_trial, assert_same):
    trial = make_trial(FedBN(), "norm").run()
    sizes = [trial.clients.sizes[outcome.client] for outcome in trial.outcomes]
    models = [
        outcome.upload["model"] * (size / sum(sizes)) for size, outcome in zip(sizes, trial.outcomes, strict=True)
    ]
    assert_same(trial.server["model"], sum(models[1:], models[0]), tolerance=1e-15)


def test_fedbn_new_client_has_initial_normalization(make_trial, assert_same):
    trial = make_trial(FedBN(), "norm").run(2, ids=[2, 3])
    norm = trial.net.norm_names
    assert_same(trial.start(7)["model"].only(norm), trial.initial_model(0).only(norm))


@pytest.mark.parametrize("average", [False, True])
def test_fedbn_uploads_normalization_only_with_average(make_trial, average):
    trial = make_trial(FedBN(average=average), lambda: Network(ShortcutBlock(), nn.Linear(6, 4))).run()
    model = trial.initial_model(0)
    norm = sum(value.numel() for name, value in model.items() if name in trial.net.norm_names)
    assert norm == 3 * 4 * 6
    everything, shared = count_bytes(model), count_bytes(model) - 8 * norm
    for outcome in trial.outcomes:
        assert outcome.bytes_down == shared
        assert count_bytes(outcome.upload) == (everything if average else shared)


def test_fedbn_global_model_has_mean_normalization(make_trial, assert_same):
    """The option ``average`` changes only the global model."""
    trial, without = (make_trial(FedBN(average=average), "norm").run(2) for average in (True, False))
    norm = trial.net.norm_names
    model = trial.algorithm.global_model(trial.server)
    mean = trial.collect_uploads(trial.outcomes).mean("norm")
    assert_same(model, (trial.server["model"] | mean).only(model))
    assert tuple(model) == trial.net.names + trial.net.buffer_names
    assert_same(trial.server["model"], without.server["model"])
    assert_same(trial.start(0)["model"].only(norm), trial.client_states[0]["norm"])
    assert without.algorithm.global_model(without.server) is None


def test_fedbn_trains_on_single_sample(make_trial):
    """Batches of client 0 have no variance. Its running variance does not change, and all values are finite."""
    trial = make_trial(FedBN(), "norm").run(1, ids=[0])
    norm = trial.outcomes[0].kept_state["norm"]
    assert torch.equal(norm["body.1.running_var"], torch.ones(6, dtype=torch.float64))
    assert norm.flat().isfinite().all()
    assert trial.server["model"].flat().isfinite().all()


@pytest.mark.parametrize("batch_norm", [True, False])
def test_fedbn_keeps_normalization_of_cnn5(make_trial, make_clients, assert_same, batch_norm):
    family, clients = CNN5(channels=(2, 3), hidden=(6, 5), batch_norm=batch_norm), make_clients((1, 16, 16))
    build = functools.partial(family.build, (1, 16, 16), 4)
    fedbn, fedavg = (make_trial(algorithm, build, clients).run(2) for algorithm in (FedBN(), FedAvg()))
    last = fedbn.select_participants(2)[0]
    models = [trial.start(last)["model"] for trial in (fedbn, fedavg)]
    if batch_norm:
        norm = fedbn.net.norm_names
        assert len(norm) == 4 * 4
        assert_same(models[0].only(norm), fedbn.client_states[last]["norm"])
        assert not any(torch.equal(models[0][name], models[1][name]) for name in norm)
    else:
        assert_same(*models)
