"""The server's side of a round: running statistics by the federation's rule, and the server's optimizers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.core.tensors import Tensors
from fedpipe.engine.server.server import M, V, aggregate_uploads, apply_server_optimizer, init_moments
from fedpipe.settings.federation import Server

ALGORITHMS = registry.list_components(component.ALGORITHM)
AVERAGING = [name for name in ALGORITHMS if registry.find_component(component.ALGORITHM, name).server_optimizer_part]


def build(name):
    return registry.build_component(component.ALGORITHM, name, {"feddual": {"epsilon": 0.1}}.get(name, {}))


def mean(trial, part):
    """The weighted mean of what was uploaded in the last round, by hand."""
    sizes = trial.clients.sizes[[outcome.client for outcome in trial.outcomes]]
    parts = [outcome.upload[part] for outcome in trial.outcomes]
    return Tensors(
        (name, sum(s * p[name] for s, p in zip(sizes / sizes.sum(), parts, strict=True))) for name in parts[0]
    )


# -- running statistics ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Heavy(FedAvg):
    """Server momentum as one would write it, with whole models."""

    equal: bool = False

    def init(self, fresh):
        return {"model": fresh(0), "momentum": fresh(0).zeros()}

    def aggregate(self, server, uploads):
        mean = (uploads.uniform() if self.equal else uploads).mean("model")
        momentum = 0.9 * server["momentum"] + (server["model"] - mean)
        return {"model": server["model"] - momentum, "momentum": momentum}


@pytest.mark.parametrize("width", [None, 3])
def test_naive_server_momentum_leaves_running_statistics_the_mean_of_the_uploads(make_trial, assert_same, width):
    trial, lowest = make_trial(Heavy(), "norm", width=width, participation=1.0, local_epochs=4), []
    raw = trial.server
    momentum = trial.net.parameters(trial.server["model"]).zeros()
    for _ in range(12):
        before = trial.net.parameters(trial.server["model"])
        trial.run()
        raw = trial.algorithm.aggregate(raw, trial.collect_uploads(trial.outcomes))
        lowest.append(float(raw["model"]["body.1.running_var"].min()))
        model, wanted = trial.server["model"], mean(trial, "model")
        assert_same(trial.net.buffers(model), trial.net.buffers(wanted), within=1e-14)
        assert model["body.1.running_var"].min() > 0
        momentum = 0.9 * momentum + (before - trial.net.parameters(wanted))
        assert_same(trial.net.parameters(model), before - momentum, within=1e-12)
        assert tuple(model) == trial.net.names + trial.net.buffer_names
    assert min(lowest) < 0, "the rule alone drives a variance below 0, or this test shows nothing"


def test_statistics_are_weighted_as_the_rule_weighs(make_trial, assert_same):
    trial = make_trial(Heavy(equal=True), "norm").run()
    sent = [trial.net.buffers(outcome.upload["model"]) for outcome in trial.outcomes]
    wanted = sent[0].map(torch.zeros_like)
    for statistics in sent:
        wanted = wanted + statistics / len(sent)
    assert_same(trial.net.buffers(trial.server["model"]), wanted, within=1e-14)


@dataclass(frozen=True, kw_only=True)
class Bare(FedAvg):
    """A rule that says nothing of running statistics."""

    def aggregate(self, server, uploads):
        return {"model": self.net.parameters(uploads.mean("model"))}


def test_statistics_that_a_rule_leaves_out_are_those_of_fedavg(make_trial, assert_same):
    bare, plain = (make_trial(algorithm, "norm").run(3) for algorithm in (Bare(), FedAvg()))
    assert_same(bare.server, plain.server)


@pytest.mark.parametrize("buffers", ["keep", "drop"])
def test_where_models_hold_no_statistics_there_is_nothing_to_average(make_trial, assert_same, buffers):
    trial = make_trial(Heavy(), "norm", buffers=buffers).run(2)
    assert tuple(trial.server["model"]) == trial.net.names


# -- optimizers: exact numbers -----------------------------------------------------------------------------------------


def walk(rule, deltas, x=1.0):
    """Where a scalar model is after each of these mean updates."""
    rule, point = Server(**rule), Tensors({"x": torch.tensor(x, dtype=torch.float64)})
    state, found = init_moments(rule, point), []
    for delta in deltas:
        point, state = apply_server_optimizer(
            rule, point, Tensors({"x": torch.tensor(delta, dtype=torch.float64)}), state
        )
        found.append(float(point["x"]))
    return found, {name: float(value["x"]) for name, value in state.items()}


def test_fedavgm_by_hand():
    """Momentum 1/2: m is 1, 3/2, 3/4."""
    found, state = walk({"optimizer": "momentum", "momentum": 0.5, "learning_rate": 0.1}, [1.0, 1.0, 0.0])
    assert found == pytest.approx([1.1, 1.25, 1.325], rel=1e-15)
    assert state == {M: 0.75}


def test_fedadagrad_by_hand():
    """With tau 0.6, v begins at 0.36: 1 after 0.8, 1.5625 after 0.75; its roots are 1 and 1.25."""
    found, state = walk({"optimizer": "adagrad", "tau": 0.6}, [0.8, 0.75])
    assert found == pytest.approx([1.5, 1.5 + 0.75 / 1.85], rel=1e-14)
    assert state == pytest.approx({M: 0.75, V: 1.5625}, rel=1e-14)


def test_fedadam_by_hand():
    """m is 0.1, 0.29; v is 0.9 * 0.25 + 0.1 = 0.325, then 0.9 * 0.325 + 0.4 = 0.6925; and no bias correction."""
    found, state = walk(
        {"optimizer": "adam", "beta1": 0.9, "beta2": 0.9, "tau": 0.5, "learning_rate": 0.01}, [1.0, 2.0]
    )
    first = 1 + 0.001 / (0.5700877125495690 + 0.5)
    assert found == pytest.approx([first, first + 0.0029 / (0.8321658488546619 + 0.5)], rel=1e-15)
    assert state == pytest.approx({M: 0.29, V: 0.6925}, rel=1e-14)


def test_fedyogi_by_hand():
    """v is 0.25, then 0.25 + 0.1 * 1 since it is less than 1, then 0.35 - 0.1 * 0.04 since it is more than 0.04."""
    found, state = walk(
        {"optimizer": "yogi", "beta1": 0.0, "beta2": 0.9, "tau": 0.5, "learning_rate": 0.01}, [1.0, -0.2]
    )
    first = 1 + 0.01 / (0.5916079783099616 + 0.5)
    assert found == pytest.approx([first, first - 0.002 / (0.5882176467941097 + 0.5)], rel=1e-15)
    assert state == pytest.approx({M: -0.2, V: 0.346}, rel=1e-14)


def test_before_the_first_round_v_is_tau_squared():
    """So that an update of zeros moves nothing, and the first step is bounded by eta (1 - beta1) |delta| / 2 tau."""
    for optimizer in ("adam", "yogi", "adagrad"):
        rule = Server(optimizer=optimizer, tau=0.25)
        assert init_moments(rule, Tensors(x=torch.ones(2)))[V]["x"].tolist() == [0.0625, 0.0625]
        assert walk({"optimizer": optimizer, "tau": 0.25}, [0.0])[0] == [1.0]


def test_defaults():
    told = {name: Server(optimizer=name).model_dump() for name in ("sgd", "momentum", "adam", "yogi", "adagrad")}
    adaptive = {"learning_rate": 1.0, "beta1": 0.9, "beta2": 0.99, "tau": 0.001}
    assert told == {
        "sgd": {"optimizer": "sgd", "learning_rate": 1.0},
        "momentum": {"optimizer": "momentum", "learning_rate": 1.0, "momentum": 0.9},
        "adam": {"optimizer": "adam", **adaptive},
        "yogi": {"optimizer": "yogi", **adaptive},
        "adagrad": {"optimizer": "adagrad", "learning_rate": 1.0, "beta1": 0.0, "tau": 0.001},
    }


# -- optimizers in rounds ----------------------------------------------------------------------------------------------

RULES = [
    {"optimizer": "sgd", "learning_rate": 0.5},
    {"optimizer": "momentum", "learning_rate": 0.7},
    {"optimizer": "adam", "learning_rate": 0.01},
    {"optimizer": "yogi", "learning_rate": 0.02, "beta1": 0.8},
    {"optimizer": "adagrad", "learning_rate": 0.03, "beta1": 0.5, "tau": 0.01},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["optimizer"])
def test_rounds_are_those_of_the_papers(make_trial, rule):
    """FedAvg with each rule, beside numpy's recomputation from what was uploaded; statistics stay the mean."""
    trial = make_trial(FedAvg(), "norm", server=rule)
    eta, names = rule["learning_rate"], trial.net.names
    x = {name: trial.server["model"][name].numpy().copy() for name in names}
    beta1, tau = rule.get("beta1", 0.9), rule.get("tau", 0.001)
    m = {name: np.zeros_like(value) for name, value in x.items()}
    v = {name: np.full_like(value, tau**2) for name, value in x.items()}
    for _ in range(4):
        trial.run()
        target = mean(trial, "model")
        for name in names:
            delta = target[name].numpy() - x[name]
            match rule["optimizer"]:
                case "sgd":
                    x[name] = x[name] + eta * delta
                    continue
                case "momentum":
                    m[name] = 0.9 * m[name] + delta
                    x[name] = x[name] + eta * m[name]
                    continue
                case "adam":
                    v[name] = 0.99 * v[name] + 0.01 * delta**2
                case "yogi":
                    v[name] = v[name] - 0.01 * delta**2 * np.sign(v[name] - delta**2)
                case "adagrad":
                    v[name] = v[name] + delta**2
            m[name] = beta1 * m[name] + (1 - beta1) * delta
            x[name] = x[name] + eta * m[name] / (np.sqrt(v[name]) + tau)
        for name in names:
            np.testing.assert_allclose(trial.server["model"][name].numpy(), x[name], rtol=1e-10, atol=1e-12)
        for name in trial.net.buffer_names:
            np.testing.assert_allclose(trial.server["model"][name].numpy(), target[name].numpy(), rtol=1e-13)


@pytest.mark.parametrize("name", AVERAGING)
def test_sgd_at_rate_1_is_no_optimizer_at_all(make_trial, assert_same, name):
    mine, plain = (make_trial(build(name), "norm", **more).run(2) for more in ({"server": {"optimizer": "sgd"}}, {}))
    assert_same(mine.server, plain.server)


@pytest.mark.parametrize("name", AVERAGING)
def test_any_method_that_averages_models_takes_one(make_trial, assert_same, name):
    """Its own next state, of which the averaged part is moved; all else is its own, statistics too."""
    trial = make_trial(build(name), "norm", server={"optimizer": "adam", "learning_rate": 0.01}).run()
    part, before = trial.algorithm.server_optimizer_part, trial.server
    uploads = trial.collect_uploads(trial.train())
    own = trial.algorithm.aggregate(before, uploads)
    state = aggregate_uploads(trial.algorithm, before, uploads)
    x, target = (trial.net.parameters(found[part]) for found in (before, own))
    moved, after = apply_server_optimizer(trial.algorithm.federation.server, x, target - x, before)
    assert_same(trial.net.parameters(state[part]), moved)
    assert_same({M: state[M], V: state[V]}, after)
    assert state.keys() == before.keys()
    others = own.keys() - {part}
    assert_same({other: state[other] for other in others}, {other: own[other] for other in others}, within=1e-14)
    assert tuple(state[part]) == tuple(before[part])


@pytest.mark.parametrize("name", AVERAGING)
def test_what_it_moves_is_what_clients_receive(make_trial, name):
    """A rate of 0 holds the model still where the method's own rule would move it."""
    still, moving = (make_trial(build(name), server={"learning_rate": rate}) for rate in (0.0, 0.5))
    begin = still.start(5)["model"]
    for trial in (still, moving):
        trial.run(1, ids=[5])
    part = still.algorithm.server_optimizer_part
    sent = list(still.server[part])
    assert all(torch.equal(still.server[part][tensor], begin[tensor]) for tensor in sent)
    assert any(not torch.equal(moving.server[part][tensor], begin[tensor]) for tensor in sent)


def test_the_methods_that_average_no_model():
    alone = {"cfl", "cwfedavg", "fedamp", "feddyn", "fedfomo", "fednh", "fedproto", "ifca", "local"}
    assert set(ALGORITHMS) - set(AVERAGING) == alone
