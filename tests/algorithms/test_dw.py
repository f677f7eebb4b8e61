"""DW as a module on other methods (spec, section 13)."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedpipe.algorithms.extensions.dw import DW, OMEGA, WithDW
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feddw import FedDW
from fedpipe.algorithms.fedprox import FedProx
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.engine.torch_env.trees import count_bytes
from fedpipe.models.base import Network, compute_class_relations
from tests import small_studies as studies

METHODS = registry.list_components(component.ALGORITHM)
SETTINGS = {"feddual": {"epsilon": 0.1}}
OWN_HEADS = {"feddw", "fednh"}  # they define their own classification layer and reject DW


def build_biasless_network():
    return Network(nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.Linear(6, 4, bias=False))


def build_algorithm(name, mu=None):
    dw = {} if mu is None else {"dw": {"mu": mu}}
    return registry.build_component(component.ALGORITHM, name, SETTINGS.get(name, {}) | dw)


def remove_dw_parts(state):
    """Return the state without DW's parts."""
    return {part: value for part, value in state.items() if not part.startswith("dw/")}


@pytest.mark.parametrize("name", studies.mark_others_slow(sorted(set(METHODS) - OWN_HEADS)))
def test_dw_with_mu_0_equals_method_bit_for_bit(make_trial, assert_same, name):
    with_dw, without = (
        make_trial(build_algorithm(name, mu), build_biasless_network).run(2, tests=("local",)) for mu in (0.0, None)
    )
    assert isinstance(with_dw.algorithm, WithDW)
    assert_same(remove_dw_parts(with_dw.server), without.server)
    for ours, theirs in zip(with_dw.outcomes, without.outcomes, strict=True):
        assert_same(remove_dw_parts(ours.upload), theirs.upload)
        assert_same(ours.kept_state, theirs.kept_state)
        assert ours.scores == theirs.scores


def test_dw_on_fedavg_equals_feddw_bit_for_bit(make_trial, assert_same):
    module, feddw = (
        make_trial(algorithm, build_biasless_network).run(3)
        for algorithm in (build_algorithm("fedavg", 0.7), FedDW(mu=0.7))
    )
    assert_same(module.server["model"], feddw.server["model"])
    assert_same(module.server[OMEGA], feddw.server["omega"])


def test_dw_removes_head_bias(make_trial):
    assert "head.bias" not in make_trial(build_algorithm("fedprox", 0.1)).server["model"]


@pytest.mark.parametrize("name", sorted({"fedbabu"} & set(METHODS)))
def test_dw_does_not_change_method_with_fixed_head(make_trial, assert_same, name):
    strong, without = (make_trial(build_algorithm(name, mu), build_biasless_network).run(2) for mu in (50.0, None))
    assert_same(remove_dw_parts(strong.server), without.server)


@pytest.mark.parametrize("name", studies.mark_others_slow(sorted(set(METHODS) - OWN_HEADS)))
def test_dw_stack_matches_loop(make_trial, assert_same, name):
    loop, stack = (make_trial(build_algorithm(name, 0.5), width=width).run(2, tests=("local",)) for width in (None, 3))
    assert_same(stack.server, loop.server, tolerance=1e-10)
    assert_same(
        [outcome.upload for outcome in stack.outcomes], [outcome.upload for outcome in loop.outcomes], tolerance=1e-10
    )


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "pfps_lwc", "ifca", "cwfedavg"])
def test_dw_adds_matrix_and_counts_to_traffic(make_trial, name):
    with_dw, without = (make_trial(build_algorithm(name, mu), build_biasless_network) for mu in (0.1, None))
    ids = with_dw.select_participants(1)
    down = [sum(map(count_bytes, trial.send(ids))) for trial in (with_dw, without)]
    up = [count_bytes(trial.train(ids)[0].upload) for trial in (with_dw, without)]
    assert down[0] - down[1] == 8 * 16
    assert up[0] - up[1] == 8 * (16 + 4)


def test_dw_moves_personal_heads_to_soft_labels(make_trial):
    """A larger mu moves the CR of every trained head nearer to the SL that the client received."""
    distances = []
    for mu in (0.0, 3.0, 30.0):
        trial = make_trial(
            build_algorithm("pfps_lwc", mu), build_biasless_network, participation=1.0, local_epochs=5
        ).run(2)
        omega = trial.server[OMEGA]
        trial.run()
        heads = [outcome.kept_state["head"]["head.weight"] for outcome in trial.outcomes]
        distances.append(sum(float((compute_class_relations(head) - omega).norm()) for head in heads))
    assert distances[0] > distances[1] > distances[2]


@pytest.mark.parametrize("width", [None, 3])
def test_dw_personal_step_is_equal_in_training_and_evaluation(make_trial, width):
    """With rate 0, Per-FedAvg's personal step is equal before and after training. It includes DW."""

    def compute_loss(stage, mu):
        algorithm = registry.build_component(component.ALGORITHM, "perfedavg", {"alpha": 0.5, "dw": {"mu": mu}})
        trial = make_trial(algorithm, build_biasless_network, width=width, learning_rate=0.0, batch_size=12)
        return trial.train([2], ("local",), stage)[0].scores["local"].loss  # a batch of 12 contains all 9 samples

    assert compute_loss("receive", 20.0) != compute_loss("receive", 0.0)
    assert compute_loss("receive", 20.0) == pytest.approx(compute_loss("train", 20.0), rel=1e-12)


def test_dw_regularizes_fedala_mixing(make_trial):
    weights = []
    for mu in (0.0, 20.0):
        trial = make_trial(build_algorithm("fedala", mu), build_biasless_network, participation=1.0).run(1)
        weights.append(trial.train([5])[0].kept_state["weights"]["head.weight"])
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("feddw", "FedDW already has this regularizer"), ("fednh", "FedNH does not train a classification layer")],
)
def test_feddw_and_fednh_reject_dw(name, reason):
    with pytest.raises(SettingsError, match=rf"^algorithms\.mine\.dw: {{'mu': 0\.5}} .*{reason}"):
        registry.build_component(component.ALGORITHM, name, {"dw": {"mu": 0.5}}, "algorithms.mine")
    assert registry.build_component(component.ALGORITHM, name, {"dw": None}) == build_algorithm(name)
    assert build_algorithm("feddistill_plus", 0.5).dw == DW(mu=0.5), "FedDistill+ derives from FedDW but accepts DW"


def test_dw_records_soft_labels_of_server_and_clients(make_trial):
    trial = make_trial(build_algorithm("fedprox", 0.1), build_biasless_network).run()
    assert set(trial.algorithm.matrices(trial.server)) == {"SL"}
    assert set(trial.algorithm.matrices(trial.outcomes[0].upload)) == {"SL"}


def test_dw_section_of_algorithm_sets_mu():
    assert build_algorithm("scaffold", 2.0).dw == DW(mu=2.0)
    with pytest.raises(SettingsError, match=r"algorithms\.dw\.mu"):
        build_algorithm("scaffold", -1.0)


def test_algorithm_with_dw_keeps_name_and_survives_copy_and_pickle():
    """FedProx with DW is a subclass of FedProx. Repeated builds return the same class."""
    made = build_algorithm("fedprox", 0.5)
    assert isinstance(made, FedProx)
    assert registry.get_component_name(component.ALGORITHM, type(made)) == "fedprox"
    assert type(made) is type(build_algorithm("fedprox", 2.0)) is not FedProx
    for twin in (copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert twin == made
        assert type(twin) is type(made)


def test_algorithm_without_dw_has_no_dw_attribute():
    for parameters in ({}, {"dw": None}):
        made = registry.build_component(component.ALGORITHM, "fedprox", parameters)
        assert type(made) is FedProx
        assert not hasattr(made, "dw")


@dataclass(frozen=True, kw_only=True)
class Own(FedAvg):
    """A custom method with its own parameter ``dw``."""

    dw: float = 0.5


def test_custom_dw_parameter_replaces_dw_section():
    for parameters, value in (({}, 0.5), ({"dw": 2.0}, 2.0)):
        method = registry.build_component(component.ALGORITHM, f"{__name__}.Own", parameters, "algorithms.mine")
        assert (type(method), method.dw) == (Own, value)  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match=r"^algorithms\.mine\.dw: {'mu': 0\.1}"):
        registry.build_component(component.ALGORITHM, f"{__name__}.Own", {"dw": {"mu": 0.1}}, "algorithms.mine")
    assert registry.add_dw_parameter(component.ALGORITHM, Own) is Own
