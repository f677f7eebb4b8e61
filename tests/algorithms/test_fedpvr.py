import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedpvr import FedPVR
from fedpipe.algorithms.scaffold import Scaffold
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import copy_parameters, list_batches, load_mlp, take_steps

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all + n.head, n.all + n.head))],
    centralized={},
    momentum=False,
    no_models=frozenset({"control"}),
)


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adam", "learning_rate": 0.01}, {"weight_decay": 0.1}])
def test_fedpvr_with_all_layers_equals_scaffold_bit_for_bit(make_trial, assert_same, settings):
    pvr, scaffold = (
        make_trial(algorithm, **settings).run(3) for algorithm in (FedPVR(layers=2, adam=True), Scaffold(adam=True))
    )
    assert_same(pvr.server, scaffold.server)
    assert_same(pvr.client_states, scaffold.client_states)


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam"}])
def test_fedpvr_without_layers_equals_uniform_fedavg(make_trial, assert_same, settings):
    settings |= {"weighting": "uniform"}
    pvr, plain = (make_trial(algorithm, **settings).run(3) for algorithm in (FedPVR(layers=0, adam=True), FedAvg()))
    assert_same(pvr.server["model"], plain.server["model"], tolerance=1e-13)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_fedpvr_corrects_last_layers(make_trial, layers):
    """Controls exclude the running statistics of these layers."""
    trial = make_trial(FedPVR(layers=layers), "norm").run(2)
    corrected = ["head", "body.1", "body.0"][:layers]
    names = [name for name in trial.net.names if name.rpartition(".")[0] in corrected]
    assert set(trial.server["control"]) == set(names)
    assert len(names) == 2 * layers


def test_fedpvr_correction_changes_head_only(make_trial, assert_same):
    """In one step, the head moves by -eta (c - c_k) more than in FedAvg, and the body moves alike."""
    settings = {"local_epochs": 1, "batch_size": 100, "participation": 1.0, "weighting": "uniform"}
    pvr, plain = make_trial(FedPVR()), make_trial(FedAvg(), **settings)
    pvr.run(2)
    again = make_trial(FedPVR(), **settings)
    again.server, again.client_states, again.rounds, plain.server, plain.rounds = (
        pvr.server,
        pvr.client_states,
        2,
        pvr.server,
        2,
    )
    head, body = again.net.head_names, again.net.body_names
    for ours, theirs in zip(again.train(), plain.train(), strict=True):
        ours_model, theirs_model = ours.upload["model"], theirs.upload["model"]
        assert_same(ours_model.only(body), theirs_model.only(body))
        correction = pvr.server["control"] - pvr.client_states[ours.client]["control"]
        moved = theirs_model.only(head) - 0.05 * correction.only(head)
        assert_same(ours_model.only(head), moved, tolerance=1e-14)
        assert correction.norm() > 0.1


def test_fedpvr_applies_momentum_to_uncorrected_layers_only(make_trial, assert_same):
    """The controls are zero in the first round. Weight decay applies to all layers."""
    trial = make_trial(FedPVR(), momentum=0.9, weight_decay=0.1)
    for outcome in trial.train():
        module = load_mlp(trial.initial_model(0))
        groups = [{"params": module.body.parameters()}, {"params": module.head.parameters(), "momentum": 0.0}]
        rule = torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=0.1)
        batches = list_batches(trial, outcome.client, 1)
        take_steps(rule, lambda x, y, module=module: cross_entropy(module(x), y), batches)
        assert_same(outcome.upload["model"], copy_parameters(module), tolerance=1e-13)


def test_fedpvr_removes_drift_on_q2(make_toy, trace_path):
    """The toy's model consists of a head only."""
    assert trace_path(make_toy(FedPVR(), local_epochs=2), 3) == pytest.approx([1.02, 1.734, 2.19504], abs=1e-13)


def test_fedpvr_needs_sgd_without_adam_parameter():
    assert FedPVR().needs_sgd
    assert not FedPVR(adam=True).needs_sgd
