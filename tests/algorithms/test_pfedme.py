import pytest
import torch

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.pfedme import PFedMe
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized="the model that travels only follows a personal one",
)


def get_personal_weight(trial, client=0):
    return float(trial.client_states[client]["personal"]["head.weight"])


def test_pfedme_with_exact_inner_solution_matches_exact_values(make_toy, trace_path):
    """One step of rate 1/2 minimizes (x - 4)^2 / 2 + x^2 / 2 at 2. Then w = 0 - 0.1 * (0 - 2)."""
    trial = make_toy(PFedMe(attraction=1.0, inner_steps=1, inner_rate=0.5), [(1, 4)])
    assert trace_path(trial, 1) == pytest.approx([0.2], abs=1e-15)
    assert get_personal_weight(trial) == pytest.approx(2, abs=1e-15)


def test_pfedme_five_inner_steps_match_exact_values(make_toy, trace_path):
    trial = make_toy(PFedMe(attraction=1.0, inner_steps=5, inner_rate=0.1), [(1, 4)])
    assert trace_path(trial, 1) == pytest.approx([0.134464], abs=1e-15)
    assert get_personal_weight(trial) == pytest.approx(1.34464, abs=1e-14)


def test_pfedme_inner_steps_continue_across_batches(make_toy, trace_path):
    """Inner steps start at w only once in a round. The personal model is the last theta, not w."""
    trial = make_toy(PFedMe(attraction=2.0, inner_steps=3, inner_rate=0.05), [(1, 4)], local_epochs=4)
    theta = w = 0.0
    for _ in range(4):
        for _ in range(3):
            theta -= 0.05 * ((theta - 4) + 2 * (theta - w))
        w -= 0.1 * 2 * (w - theta)
    assert trace_path(trial, 1) == pytest.approx([w], abs=1e-14)
    assert get_personal_weight(trial) == pytest.approx(theta, abs=1e-14)
    assert abs(theta - w) > 0.1


def test_pfedme_inner_steps_start_at_downloaded_model(make_toy):
    algorithm = PFedMe(attraction=1.0, inner_steps=1, inner_rate=0.1)
    trial = make_toy(algorithm, [(1, 4)]).run()
    w = float(trial.server["model"]["head.weight"])
    assert get_personal_weight(trial.run()) == pytest.approx(w + 0.1 * (4 - w), abs=1e-15)


def test_pfedme_with_rate_1_over_lambda_uploads_personal_model(make_toy):
    trial = make_toy(PFedMe(attraction=4.0, inner_steps=3, inner_rate=0.1), learning_rate=0.25).run()
    for outcome in trial.outcomes:
        assert outcome.upload["model"]["head.weight"] == pytest.approx(outcome.kept_state["personal"]["head.weight"])


@pytest.mark.parametrize("parameters", [{"attraction": 0.0}, {"beta": 0.0}])
def test_pfedme_without_attraction_or_beta_keeps_global_model(make_trial, assert_same, parameters):
    trial = make_trial(PFedMe(**parameters))
    before = trial.server
    assert_same(trial.run(3).server, before, tolerance=1e-14)
    assert all(
        not torch.equal(outcome.kept_state["personal"]["head.weight"], before["model"]["head.weight"])
        for outcome in trial.outcomes
    )


def test_pfedme_without_attraction_equals_local_training(make_trial, assert_same):
    """With one inner step for each batch, pFedMe takes FedAvg's local steps."""
    me = make_trial(PFedMe(attraction=0.0, inner_steps=1, inner_rate=0.05)).train()
    plain = make_trial(FedAvg(), learning_rate=0.05).train()
    for ours, theirs in zip(me, plain, strict=True):
        assert_same(ours.kept_state["personal"], theirs.upload["model"], tolerance=1e-14)


def test_pfedme_beta_mixes_old_model_with_mean_upload(make_trial, assert_same):
    trial = make_trial(PFedMe(beta=0.25))
    uploads = trial.collect_uploads(trial.train())
    wanted = 0.75 * trial.server["model"] + 0.25 * uploads.mean("model")
    assert_same(trial.aggregate(uploads)["model"], wanted, tolerance=1e-15)


def test_pfedme_absent_client_keeps_personal_model(make_trial, assert_same):
    trial = make_trial(PFedMe()).run(1, ids=[0, 1])
    state = trial.client_states[0]["personal"]
    trial.run(2, ids=[2, 3])
    assert_same(trial.start(0)["personal"], state)
    assert_same(trial.start(7)["personal"], trial.initial_client_state["personal"])


def test_pfedme_predicts_with_personal_and_deploys_global_model(make_trial):
    trial = make_trial(PFedMe()).run(2)
    x = trial.clients.gather_samples(trial.clients.test[3])[0]
    client = trial.start(3)
    assert torch.equal(trial.algorithm.predict(client, x), trial.net(client["personal"], x))
    deployed, model = trial.algorithm.global_model(trial.server), trial.server["model"]
    assert all(torch.equal(deployed[name], model[name]) for name in model)


def test_pfedme_personal_models_fit_better_than_global_model(make_trial):
    trial = make_trial(PFedMe(), participation=1.0).run(5)
    for client in range(len(trial.clients)):
        x, y = trial.clients.gather_samples(trial.clients.train[client])
        own, common = trial.client_states[client]["personal"], trial.server["model"]
        own, common = (float(torch.nn.functional.cross_entropy(trial.net(model, x), y)) for model in (own, common))
        assert own < common


def test_pfedme_uploads_and_averages_running_statistics(make_trial, assert_same):
    trial = make_trial(PFedMe(beta=2.0), "norm").run()
    names = trial.net.buffer_names
    for outcome in trial.outcomes:
        assert_same(outcome.upload["model"].only(names), outcome.kept_state["personal"].only(names))
    assert_same(
        trial.server["model"].only(names),
        trial.collect_uploads(trial.outcomes).mean("model").only(names),
        tolerance=1e-15,
    )
