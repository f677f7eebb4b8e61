import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.extensions.dw import DW, add_dw_mixin
from fedpipe.algorithms.fedbabu import FedBABU
from fedpipe.algorithms.fedrep import FedRep
from fedpipe.models.base import Network
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import (
    compute_finetuned_loss,
    copy_parameters,
    list_batches,
    load_mlp,
    run_fedavg,
    take_steps,
)

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.body, n.body))],
    centralized="head and body train one after the other",
)

RULES = {
    "sgd": (lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9), {"momentum": 0.9}),
    "adam": (lambda parameters: torch.optim.Adam(parameters, 0.05), {"optimizer": "adam"}),
}


@pytest.mark.parametrize("optimizer", RULES)
def test_fedrep_rounds_match_pytorch_loop(make_trial, assert_same, optimizer):
    """Use PyTorch's optimizers, with a new one for each phase."""
    make_rule, settings = RULES[optimizer]
    trial = make_trial(FedRep(head_epochs=3, body_epochs=2), **settings)
    heads = dict.fromkeys(range(len(trial.clients)), trial.initial_client_state["head"])

    def train_client(client, number, body):
        module = load_mlp(body, heads[client])
        for part, stream, epochs in ((module.head, "head", 3), (module.body, "batches", 2)):
            batches = list_batches(trial, client, number, stream, epochs)
            take_steps(make_rule(part.parameters()), lambda x, y: cross_entropy(module(x), y), batches)
        heads[client] = copy_parameters(module, "head.")
        return copy_parameters(module, "body.")

    expected = run_fedavg(trial, 2, train_client, "body")
    assert_same(trial.run(2).server["body"], expected, tolerance=1e-12)
    for client, head in heads.items():
        assert_same(trial.client_states[client]["head"], head, tolerance=1e-12)


@pytest.mark.parametrize("width", [None, 3])
def test_fedrep_without_body_epochs_keeps_representation(make_trial, assert_same, width):
    trial = make_trial(FedRep(head_epochs=2, body_epochs=0), width=width, weight_decay=0.1)
    body = trial.initial_model(0).only(trial.net.body_names)
    trial.run(3)
    assert_same(trial.server["body"], body, tolerance=1e-15)  # an average of equal bodies
    for outcome in trial.outcomes:
        assert not torch.equal(outcome.kept_state["head"].flat(), trial.initial_client_state["head"].flat())


@pytest.mark.parametrize("optimizer", RULES)
def test_fedrep_without_head_epochs_equals_fedbabu(make_trial, assert_same, optimizer):
    settings = RULES[optimizer][1] | {"local_epochs": 2, "weight_decay": 0.01}
    rep, babu = (
        make_trial(algorithm, **settings).run(3) for algorithm in (FedRep(head_epochs=0, body_epochs=2), FedBABU())
    )
    assert_same(rep.server["body"], babu.server["body"])
    assert_same(rep.client_states, babu.client_states)


@pytest.mark.parametrize("optimizer", RULES)
def test_fedrep_body_phase_keeps_head_bit_for_bit(make_trial, assert_same, optimizer):
    """With one optimizer for both phases, momentum and weight decay would change the head without a gradient."""
    settings = RULES[optimizer][1] | {"weight_decay": 0.1}
    one, both = (make_trial(FedRep(head_epochs=2, body_epochs=epochs), **settings).run() for epochs in (0, 3))
    assert_same(both.client_states, one.client_states)
    assert not torch.equal(both.server["body"].flat(), one.server["body"].flat())


def test_fedrep_head_epochs_lower_training_loss_of_clients(make_trial):
    """Compute the loss on the received representation, which the head phase minimizes."""
    losses = []
    for epochs in (0, 1, 10):
        settings = {"participation": 1.0, "learning_rate": 0.02}
        trial = make_trial(FedRep(head_epochs=epochs, body_epochs=0), **settings)
        samples = [trial.clients.gather_samples(indices) for indices in trial.clients.train]
        losses.append(
            [
                float(cross_entropy(trial.net(trial.server["body"] | outcome.kept_state["head"], x), y))
                for outcome, (x, y) in zip(trial.train(), samples, strict=True)
            ]
        )
    assert all(none > one > ten for none, one, ten in zip(*losses, strict=True))


def test_fedrep_absent_client_keeps_head(make_trial, assert_same):
    trial = make_trial(FedRep()).run(1, ids=[1, 2])
    head = trial.client_states[1]["head"]
    trial.run(1, ids=[2, 3])
    assert_same(trial.start(1)["model"], trial.server["body"] | head)


@pytest.mark.parametrize("width", [None, 3])
def test_fedrep_fine_tunes_head_only(make_trial, width):
    trial = make_trial(FedRep(), width=width).run(2)
    for client in (1, 4):
        (found,) = trial.train([client], ("local",), "finetune")
        assert found.scores["local"].loss == pytest.approx(compute_finetuned_loss(trial, client, ("head",)), rel=1e-12)


def test_dw_changes_fedrep_in_head_phase_only(make_trial):
    def build_biasless():
        return Network(nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.Linear(6, 4, bias=False))

    for epochs, feels in ((0, False), (1, True)):
        plain, regularized = (
            make_trial(method(head_epochs=epochs, body_epochs=2, **dw), build_biasless).run(2)
            for method, dw in ((FedRep, {}), (add_dw_mixin(FedRep), {"dw": DW(mu=5.0)}))
        )
        same = torch.equal(regularized.server["body"].flat(), plain.server["body"].flat())
        assert same is not feels
