"""The server's side of a round: running statistics by the federation's rule, and the server's optimizers."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.engine.server.server import M, V, aggregate_uploads, apply_server_optimizer, init_server_optimizer_moments
from fedpipe.settings.federation import Server

ALGORITHMS = registry.list_components(component.ALGORITHM)
AVERAGING = [name for name in ALGORITHMS if registry.find_component(component.ALGORITHM, name).server_optimizer_part]  # type: ignore[attr-defined]


def build_algorithm(name):
    return registry.build_component(component.ALGORITHM, name, {"feddual": {"epsilon": 0.1}}.get(name, {}))


def mean(trial, part):
    """Compute the weighted mean of the last round's uploads by hand."""
    sizes = trial.clients.sizes[[outcome.client for outcome in trial.outcomes]]
    parts = [outcome.upload[part] for outcome in trial.outcomes]
    return Tensors(
        (name, sum(s * p[name] for s, p in zip(sizes / sizes.sum(), parts, strict=True))) for name in parts[0]
    )


# -- running statistics ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NaiveMomentum(FedAvg):
    """Server momentum of complete models, including running statistics."""

    equal: bool = False

    def init(self, initial_model):
        return {"model": initial_model(0), "momentum": initial_model(0).zeros()}

    def aggregate(self, server, uploads):
        mean = (uploads.with_equal_weights() if self.equal else uploads).mean("model")
        momentum = 0.9 * server["momentum"] + (server["model"] - mean)
        return {"model": server["model"] - momentum, "momentum": momentum}


@pytest.mark.parametrize("width", [None, 3])
def test_running_statistics_with_server_momentum_are_mean_of_uploads(make_trial, assert_same, width):
    trial, min_variances = make_trial(NaiveMomentum(), "norm", width=width, participation=1.0, local_epochs=4), []
    raw_state = trial.server
    momentum = trial.net.parameters(trial.server["model"]).zeros()
    for _ in range(12):
        previous = trial.net.parameters(trial.server["model"])
        trial.run()
        raw_state = trial.algorithm.aggregate(raw_state, trial.collect_uploads(trial.outcomes))
        min_variances.append(float(raw_state["model"]["body.1.running_var"].min()))
        model, expected = trial.server["model"], mean(trial, "model")
        assert_same(trial.net.buffers(model), trial.net.buffers(expected), tolerance=1e-14)
        assert model["body.1.running_var"].min() > 0
        momentum = 0.9 * momentum + (previous - trial.net.parameters(expected))
        assert_same(trial.net.parameters(model), previous - momentum, tolerance=1e-12)
        assert tuple(model) == trial.net.names + trial.net.buffer_names
    assert min(min_variances) < 0, "the rule alone must make a variance negative"


def test_running_statistics_use_weights_of_aggregation(make_trial, assert_same):
    trial = make_trial(NaiveMomentum(equal=True), "norm").run()
    statistics_by_client = [trial.net.buffers(outcome.upload["model"]) for outcome in trial.outcomes]
    expected = statistics_by_client[0].map(torch.zeros_like)
    for statistics in statistics_by_client:
        expected = expected + statistics / len(statistics_by_client)
    assert_same(trial.net.buffers(trial.server["model"]), expected, tolerance=1e-14)


@dataclass(frozen=True, kw_only=True)
class OneClientCounts(FedAvg):
    """The model of one client, and equal weights for another part."""

    chosen: int = 2
    has_slice: bool = False

    def init(self, initial_model):
        return {"model": initial_model(0), "size": self.scalar(0.0)}

    def start(self, state, download, info):
        return {"model": download["model"], "size": info.size}

    def upload(self, client):
        return {"model": client["model"], "size": client["size"]}

    def aggregate(self, server, uploads):
        weights = [float(index == self.chosen) for index in range(len(uploads))]
        chosen = uploads[self.chosen : self.chosen + 1] if self.has_slice else uploads.with_weights(weights)
        return {"model": chosen.mean("model"), "size": uploads.with_equal_weights().mean("size")}


@pytest.mark.parametrize("has_slice", [False, True])
def test_running_statistics_use_weights_of_their_own_part(make_trial, assert_same, has_slice):
    trial = make_trial(OneClientCounts(has_slice=has_slice), "norm").run()
    assert_same(trial.server["model"], trial.outcomes[2].upload["model"])
    sizes = [float(outcome.upload["size"]) for outcome in trial.outcomes]
    assert trial.server["size"].item() == pytest.approx(sum(sizes) / len(sizes))


def test_equal_weights_of_other_part_keep_weights_of_running_statistics(make_trial, assert_same):
    @dataclass(frozen=True, kw_only=True)
    class EqualSizes(OneClientCounts):
        def aggregate(self, server, uploads):
            return {"model": uploads.mean("model"), "size": uploads.with_equal_weights().mean("size")}

    assert_same(
        make_trial(EqualSizes(), "norm").run(3).server["model"], make_trial(FedAvg(), "norm").run(3).server["model"]
    )


def test_slice_of_uploads_is_uploads_with_their_weights():
    uploads = Uploads([3, 5, 8], [1, 2, 3], [{"n": torch.tensor(value)} for value in (1.0, 2.0, 4.0)])
    rest = uploads[1:]
    assert rest.ids == (5, 8)
    assert rest.weights == pytest.approx((0.4, 0.6))
    assert rest.mean("n").item() == pytest.approx(3.2)
    assert list(uploads[:0]) == []


@dataclass(frozen=True, kw_only=True)
class OtherUpload(FedAvg):
    """FedAvg, but the upload is a function of the model, which the server inverts."""

    part: str = "model"
    kind: str = "difference"

    def start(self, state, download, info):
        return {"model": download["model"], "anchor": download["model"]}

    def upload(self, client):
        match self.kind:
            case "difference":
                return {self.part: client["model"] - client["anchor"]}
            case "codes":
                return {self.part: client["model"].map(lambda value: (value * 16).round().to(torch.int8))}
            case "rows":
                return {self.part: client["model"].map(lambda value: value.unsqueeze(0))}
        return {self.part: client["model"].map(torch.Tensor.half)}

    def aggregate(self, server, uploads):
        total = server["model"].zeros()
        for _, weight, upload in uploads:
            total = total + upload[self.part].map(lambda value: value.to(torch.float64)) * weight
        factor, offset = {"difference": (1, server["model"]), "codes": (1 / 16, 0)}.get(self.kind, (1, 0))
        return {
            "model": Tensors(
                (name, value.reshape(server["model"][name].shape)) for name, value in (total * factor + offset).items()
            )
        }


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("difference", "'model.body.1.running_var' with a negative variance (-"),
        ("codes", "'model.body.1.running_mean' as int8 of shape (6,), but the server has it as float64"),
        ("half", "'model.body.1.running_mean' as float16 of shape (6,), but the server has it as float64"),
        (
            "rows",
            "'model.body.1.running_mean' as float64 of shape (1, 6), but the server has it as float64 of shape (6,)",
        ),
    ],
)
def test_upload_that_is_no_model_needs_other_name_than_server_part(make_trial, kind, problem):
    with pytest.raises(
        SettingsError,
        match=re.escape(f"test_server.OtherUpload.upload ... returned {problem}").replace(r"\.\.\.", r"\(.*\)"),
    ):
        make_trial(OtherUpload(kind=kind), "norm").run()
    make_trial(OtherUpload(kind=kind)).run()  # without BatchNorm


def test_uploaded_difference_with_other_name_equals_fedavg(make_trial, assert_same):
    trial, plain = (make_trial(algorithm, "norm").run(3) for algorithm in (OtherUpload(part="sent"), FedAvg()))
    assert_same(trial.server, plain.server, tolerance=1e-12)


@dataclass(frozen=True, kw_only=True)
class ParametersOnly(FedAvg):
    """Aggregates parameters without running statistics."""

    def aggregate(self, server, uploads):
        return {"model": self.net.parameters(uploads.mean("model"))}


def test_aggregation_without_running_statistics_equals_fedavg(make_trial, assert_same):
    parameters_trial, plain = (make_trial(algorithm, "norm").run(3) for algorithm in (ParametersOnly(), FedAvg()))
    assert_same(parameters_trial.server, plain.server)


@pytest.mark.parametrize("buffers", ["keep", "drop"])
def test_server_model_without_running_statistics_has_only_parameters(make_trial, assert_same, buffers):
    trial = make_trial(NaiveMomentum(), "norm", buffers=buffers).run(2)
    assert tuple(trial.server["model"]) == trial.net.names


# -- optimizers: exact numbers -----------------------------------------------------------------------------------------


def apply_updates(rule, deltas, x=1.0):
    """Apply mean updates to a scalar model. Return its values after each update, and the final moments."""
    rule, point = Server(**rule), Tensors({"x": torch.tensor(x, dtype=torch.float64)})
    state, result = init_server_optimizer_moments(rule, point), []
    for delta in deltas:
        point, state = apply_server_optimizer(
            rule, point, Tensors({"x": torch.tensor(delta, dtype=torch.float64)}), state
        )
        result.append(float(point["x"]))
    return result, {name: float(value["x"]) for name, value in state.items()}


def test_fedavgm_matches_hand_computed_steps():
    """Momentum 1/2: m is 1, 3/2, 3/4."""
    result, state = apply_updates({"optimizer": "momentum", "momentum": 0.5, "learning_rate": 0.1}, [1.0, 1.0, 0.0])
    assert result == pytest.approx([1.1, 1.25, 1.325], rel=1e-15)
    assert state == {M: 0.75}


def test_fedadagrad_matches_hand_computed_steps():
    """With tau 0.6, v starts at 0.36. It is 1 after 0.8 and 1.5625 after 0.75. Its roots are 1 and 1.25."""
    result, state = apply_updates({"optimizer": "adagrad", "tau": 0.6}, [0.8, 0.75])
    assert result == pytest.approx([1.5, 1.5 + 0.75 / 1.85], rel=1e-14)
    assert state == pytest.approx({M: 0.75, V: 1.5625}, rel=1e-14)


def test_fedadam_matches_hand_computed_steps():
    """m is 0.1, 0.29. v is 0.9 * 0.25 + 0.1 = 0.325, then 0.9 * 0.325 + 0.4 = 0.6925. No bias is corrected."""
    result, state = apply_updates(
        {"optimizer": "adam", "beta1": 0.9, "beta2": 0.9, "tau": 0.5, "learning_rate": 0.01}, [1.0, 2.0]
    )
    first_point = 1 + 0.001 / (0.5700877125495690 + 0.5)
    assert result == pytest.approx([first_point, first_point + 0.0029 / (0.8321658488546619 + 0.5)], rel=1e-15)
    assert state == pytest.approx({M: 0.29, V: 0.6925}, rel=1e-14)


def test_fedyogi_matches_hand_computed_steps():
    """v is 0.25, then 0.25 + 0.1 * 1 since it is less than 1, then 0.35 - 0.1 * 0.04 since it is more than 0.04."""
    result, state = apply_updates(
        {"optimizer": "yogi", "beta1": 0.0, "beta2": 0.9, "tau": 0.5, "learning_rate": 0.01}, [1.0, -0.2]
    )
    first_point = 1 + 0.01 / (0.5916079783099616 + 0.5)
    assert result == pytest.approx([first_point, first_point - 0.002 / (0.5882176467941097 + 0.5)], rel=1e-15)
    assert state == pytest.approx({M: -0.2, V: 0.346}, rel=1e-14)


def test_second_moment_starts_at_tau_squared():
    """An update of zeros changes no parameter. The first step is at most eta (1 - beta1) |delta| / 2 tau."""
    for optimizer in ("adam", "yogi", "adagrad"):
        rule = Server(optimizer=optimizer, tau=0.25)
        assert init_server_optimizer_moments(rule, Tensors(x=torch.ones(2)))[V]["x"].tolist() == [0.0625, 0.0625]
        assert apply_updates({"optimizer": optimizer, "tau": 0.25}, [0.0])[0] == [1.0]


def test_server_optimizers_have_expected_defaults():
    defaults = {name: Server(optimizer=name).model_dump() for name in ("sgd", "momentum", "adam", "yogi", "adagrad")}
    adaptive = {"learning_rate": 1.0, "beta1": 0.9, "beta2": 0.99, "tau": 0.001}
    assert defaults == {
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
def test_server_optimizer_rounds_match_numpy_recomputation(make_trial, rule):
    """NumPy computes the rules of the papers from the uploads. Running statistics are the mean of the uploads."""
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
def test_server_sgd_with_learning_rate_1_equals_no_optimizer(make_trial, assert_same, name):
    optimizer_trial, plain = (
        make_trial(build_algorithm(name), "norm", **settings).run(2)
        for settings in ({"server": {"optimizer": "sgd"}}, {})
    )
    assert_same(optimizer_trial.server, plain.server)


@pytest.mark.parametrize("name", AVERAGING)
def test_server_optimizer_changes_only_averaged_part(make_trial, assert_same, name):
    """All other parts and the running statistics are the result of the method's own rule."""
    trial = make_trial(build_algorithm(name), "norm", server={"optimizer": "adam", "learning_rate": 0.01}).run()
    part, previous = trial.algorithm.server_optimizer_part, trial.server
    uploads = trial.collect_uploads(trial.train())
    algorithm = trial.algorithm.bind_round(2, trial.clients.seed)
    own_state = algorithm.aggregate(previous, uploads)
    state = aggregate_uploads(algorithm, previous, uploads)
    x, target = (trial.net.parameters(result[part]) for result in (previous, own_state))
    new_parameters, new_moments = apply_server_optimizer(trial.algorithm.federation.server, x, target - x, previous)
    assert_same(trial.net.parameters(state[part]), new_parameters)
    assert_same({M: state[M], V: state[V]}, new_moments)
    assert state.keys() == previous.keys()
    other_parts = own_state.keys() - {part}
    assert_same(
        {other: state[other] for other in other_parts},
        {other: own_state[other] for other in other_parts},
        tolerance=1e-14,
    )
    assert tuple(state[part]) == tuple(previous[part])


@pytest.mark.parametrize("name", AVERAGING)
def test_clients_receive_part_changed_by_server_optimizer(make_trial, name):
    """With a rate of 0 the model does not change, although the method's rule would change it."""
    frozen_trial, moving_trial = (
        make_trial(build_algorithm(name), server={"learning_rate": rate}) for rate in (0.0, 0.5)
    )
    initial = frozen_trial.start(5)["model"]
    for trial in (frozen_trial, moving_trial):
        trial.run(1, ids=[5])
    part = frozen_trial.algorithm.server_optimizer_part
    tensor_names = list(frozen_trial.server[part])
    assert all(torch.equal(frozen_trial.server[part][tensor], initial[tensor]) for tensor in tensor_names)
    assert any(not torch.equal(moving_trial.server[part][tensor], initial[tensor]) for tensor in tensor_names)


def test_methods_without_averaged_model_have_no_server_optimizer_part():
    non_averaging_methods = {
        "cfl",
        "cwfedavg",
        "fedamp",
        "feddyn",
        "fedexp",
        "fedfomo",
        "fednh",
        "fedproto",
        "ifca",
        "local",
    }
    assert set(ALGORITHMS) - set(AVERAGING) == non_averaging_methods
