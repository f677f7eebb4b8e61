import functools

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedas import FedAS
from fedpipe.algorithms.fedper import FedPer
from fedpipe.algorithms.uploads import Uploads
from fedpipe.testing.trial import Normalized
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import average_models, copy_parameters, list_batches, load_mlp, take_steps

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.body, n.body + 1))],
    centralized={"alignment_rate": 0.0},
    exceptions={"no_learning_rate": "the alignment has its own rate"},
)

f64 = torch.float64


def test_fedas_averages_bodies_by_fisher_traces(make_trial, assert_same):
    trial = make_trial(FedAS())
    body = trial.server["body"]

    def make_upload(scale, trace):
        return {"body": scale * body, "fisher": torch.tensor(trace, dtype=f64)}

    found = trial.aggregate(Uploads([0, 1], [0.5, 0.5], [make_upload(1.0, 0.1), make_upload(2.0, 0.3)]))
    assert_same(found["body"], 1.75 * body, tolerance=1e-14)
    found = trial.aggregate(Uploads([0, 1], [0.25, 0.75], [make_upload(1.0, 0.0), make_upload(2.0, 0.0)]))
    assert_same(found["body"], 1.75 * body, tolerance=1e-14)


def test_fedas_misalignment_matches_exact_value(make_trial):
    """Class 0 has squared distances 1 and 9, class 2 has 4, the width is 6, and the last sample is padding."""
    trial = make_trial(FedAS())
    model = trial.initial_model(0).zeros()
    means = torch.zeros(4, 6, dtype=f64)
    x, y = torch.zeros(4, 5, dtype=f64), torch.tensor([0, 0, 2, 1])
    bias = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=f64)
    weight = torch.zeros(6, 5, dtype=f64)
    weight[0, 0] = 1
    x[:, 0] = torch.tensor([0.0, 2.0, 1.0, 9.0])
    names = [name for name in trial.net.body_names if name.endswith("weight")]
    model = model | {names[0]: weight, names[0].replace("weight", "bias"): bias}
    client = {"model": model, "means": means, "counts": torch.zeros(4)}
    batch = Batch(x, y, torch.tensor([1.0, 1, 1, 0], dtype=f64))
    assert float(trial.algorithm.compute_misalignment(client, batch)) == pytest.approx((5 + 4) / 6, abs=1e-14)


@pytest.mark.parametrize("width", [None, 3])
def test_fedas_measures_fisher_trace_in_evaluation_mode(make_trial, assert_same, width):
    """The trace does not change BatchNorm's running statistics, and uses them."""
    aligned, per = (
        make_trial(algorithm, "norm", width=width, learning_rate=0.1)
        for algorithm in (FedAS(alignment_epochs=0), FedPer())
    )
    (outcome,), (plain_outcome,) = (trial.train([5]) for trial in (aligned, per))
    assert_same(outcome.upload["body"], plain_outcome.upload["body"])
    network, trace = Normalized().build((5,), 4).double().eval(), 0.0
    network.load_state_dict(outcome.upload["body"] | outcome.kept_state["head"], strict=False)
    for x, y in list_batches(aligned, 5, 1, "fisher", epochs=1):
        gradients = torch.autograd.grad(cross_entropy(network(x), y), list(network.parameters()))
        trace += sum(float(gradient.square().sum()) for gradient in gradients)
    assert float(outcome.upload["fisher"]) == pytest.approx(trace, rel=1e-12)


@pytest.mark.parametrize("width", [None, 3])
def test_fedas_measures_class_means_by_body_with_statistics_of_client(make_trial, assert_same, width):
    """The body that a client trained last includes its running statistics, which are not those of the server."""
    trial = make_trial(FedAS(), "norm", width=width, learning_rate=0.1, participation=1.0).run(1)
    upload, client = trial.outcomes[2].upload, trial.start(2)
    assert_same(client["previous"].without(trial.net.head_names), upload["body"])
    statistics = trial.net.buffers(client["previous"])
    assert statistics
    for name, value in trial.net.buffers(client["model"]).items():
        assert not torch.allclose(statistics[name], value)


def test_fedas_with_one_client_and_no_alignment_equals_fedper(make_trial, make_clients, assert_same):
    clients = make_clients(sizes=[17])
    aligned, per = (
        make_trial(algorithm, clients=clients, participation=1.0, momentum=0.9).run(3)
        for algorithm in (FedAS(alignment_rate=0.0), FedPer())
    )
    assert_same(aligned.start(0)["model"], per.start(0)["model"], tolerance=1e-13)


@pytest.mark.parametrize("width", [None, 3])
def test_fedas_three_rounds_match_pfllib(make_trial, assert_same, width):
    """PFLlib's initial class means are random. Here a client's first class means come from the received body."""
    trial = make_trial(FedAS(alignment_rate=0.05), width=width, learning_rate=0.1)
    clients, body = trial.clients, trial.server["body"]
    heads = [trial.initial_client_state["head"]] * len(clients)
    previous = {}

    def compute_alignment_loss(module, means, x, y):
        features = module.body(x)
        return sum(mse_loss(features[y == c], means[int(c)].expand(int((y == c).sum()), -1)) for c in y.unique())

    for number in (1, 2, 3):
        ids, traces = trial.select_participants(number), []
        for client in ids:
            module, old = load_mlp(body, heads[client]), load_mlp(previous.get(client, body), heads[client])
            x, y = clients.gather_samples(clients.train[client])
            means = {c: old.body(x[y == c]).detach().mean(0) for c in set(y.tolist())}
            take_steps(
                torch.optim.SGD(module.body.parameters(), 0.05),
                functools.partial(compute_alignment_loss, module, means),
                list_batches(trial, client, number, "alignment", epochs=1),
            )
            take_steps(
                torch.optim.SGD(module.parameters(), 0.1),
                lambda x, y, module=module: cross_entropy(module(x), y),
                list_batches(trial, client, number),
            )
            traces.append(0.0)
            for x, y in list_batches(trial, client, number, "fisher", epochs=1):
                grads = torch.autograd.grad(cross_entropy(module(x), y), list(module.parameters()))
                traces[-1] += sum(float((g**2).sum()) for g in grads)
            previous[client], heads[client] = copy_parameters(module, "body."), copy_parameters(module, "head.")
        body = average_models([previous[client] for client in ids], traces)
    trial.run(3)
    assert_same(trial.server["body"], body, tolerance=1e-10)
    for client, head in enumerate(heads):
        assert_same(trial.client_states[client]["head"], head, tolerance=1e-10)
