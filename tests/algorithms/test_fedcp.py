import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.extra_layers import init_layer
from fedpipe.algorithms.fedcp import FedCP, compute_squared_mmd
from fedpipe.algorithms.fedper import FedPer
from fedpipe.models.base import Network
from fedpipe.models.mlp import MLP
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import average_models, copy_parameters, list_batches

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all + 2 * n.features**2 + 6 * n.features,) * 2)],
    centralized="the policy splits the features in each setting",
)

f64 = torch.float64


def test_squared_mmd_of_two_pairs_matches_exact_value():
    """Compare features 0 and 2 with 0 and 0, with padding. The squared distances are 0 and 4."""
    x, y = (torch.tensor(rows, dtype=f64) for rows in ([[0.0], [2.0], [9.0]], [[0.0], [0.0], [5.0]]))
    batch = Batch(x, torch.zeros(3, dtype=torch.long), torch.tensor([1.0, 1.0, 0.0], dtype=f64))
    k = sum(torch.exp(torch.tensor(-2.0 / width, dtype=f64)) for width in (10, 15, 20, 50))
    expected = ((2 * 4 + 2 * k) + 4 * 4 - 2 * (2 * 4 + 2 * k)) / 4
    assert float(compute_squared_mmd(x, y, batch)) == pytest.approx(float(expected), abs=1e-14)
    assert float(compute_squared_mmd(x[:2], y[:2], Batch(x[:2], batch.y[:2]))) == pytest.approx(float(expected))


def test_fedcp_policy_splits_features_by_softmax(make_trial):
    """Normalize (2, 0, ..., 0) of 12 values, then apply ReLU and the softmax of values i and d + i."""
    trial = make_trial(FedCP())
    client, d = trial.start(1), 6
    weight = torch.zeros(2 * d, d, dtype=f64)
    bias = torch.zeros(2 * d, dtype=f64)
    bias[0] = 2
    client["policy"] = client["policy"] | {"weight": weight, "bias": bias}
    z = torch.randn(3, d, dtype=f64, generator=torch.Generator().manual_seed(0))
    mean, variance = 2 / 12, 4 / 12 - (2 / 12) ** 2
    large = (2 - mean) / (variance + 1e-5) ** 0.5
    s = torch.full((d,), 0.5, dtype=f64)
    s[0] = 1 / (1 + torch.exp(torch.tensor(-large)))
    head, global_head = ((part["head.weight"], part["head.bias"]) for part in (client["model"], client["global_head"]))
    expected = F.linear(z * s, *head) + F.linear(z * (1 - s), *global_head)
    torch.testing.assert_close(trial.algorithm.classify(client, z), expected, rtol=0, atol=1e-12)


def test_extra_layer_is_drawn_from_pytorch_default_distribution():
    """Weights and biases are uniform between -1/sqrt(25) and 1/sqrt(25). Compare quantiles."""
    layer, levels = init_layer(torch.tensor(3), "policy", 400, torch.zeros(1, 25, dtype=f64)), torch.linspace(0, 1, 9)
    for name, count in (("weight", 10_000), ("bias", 400)):
        quantiles = layer[name].flatten().quantile(levels.double())
        assert layer[name].numel() == count
        torch.testing.assert_close(quantiles, 0.4 * levels.double() - 0.2, rtol=0, atol=0.4 / count**0.5)
    assert layer["scale"].tolist() == [1] * 400
    assert layer["shift"].tolist() == [0] * 400


def test_fedcp_downloaded_body_is_in_evaluation_mode(make_trial):
    """The downloaded body has no dropout while the client's body trains."""
    dropout = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5))
    trial = make_trial(FedCP(penalty=2.0), lambda: Network(dropout, nn.Linear(6, 4)))
    algorithm, client, net = trial.algorithm, trial.start(1), trial.net
    batch = Batch(torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=f64), torch.tensor([0, 1, 2]))
    with net.mode.activate(True, None, torch.tensor(7)):
        z = net.features(client["model"], batch.x)
    with net.mode.activate(True, None, torch.tensor(7)):
        loss = algorithm.loss(client, batch)
    distance = compute_squared_mmd(z, net.features(client["global_body"], batch.x), batch)
    expected = cross_entropy(algorithm.classify(client, z), batch.y) + 2 * distance
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert distance > 1e-3


def test_fedcp_with_personal_head_only_equals_fedper(make_trial, assert_same):
    """The global head is zero. The first half of the policy's outputs is large, so the softmax is 1 and 0."""
    split, per = (make_trial(method, learning_rate=0.1) for method in (FedCP(penalty=0.0), FedPer()))
    shift = torch.cat([torch.full((6,), 1e3, dtype=f64), torch.zeros(6, dtype=f64)])
    policy = split.server["policy"] | {"scale": torch.zeros(12, dtype=f64), "shift": shift}
    split.server |= {"head": split.server["head"].zeros(), "policy": policy}
    split.run()
    per.run()
    assert_same(split.server["body"], per.server["body"], tolerance=1e-13)
    for client in range(len(split.clients)):
        assert_same(split.client_states[client]["head"], per.client_states[client]["head"], tolerance=1e-13)


class Ensemble(nn.Module):
    """PFLlib's model of a client, without Gumbel noise."""

    def __init__(self, policy):
        super().__init__()
        model, model_global = (MLP(hidden=(6,)).build((5,), 4).double() for _ in range(2))
        self.body, self.head, self.body_g, self.head_g = model.body, model.head, model_global.body, model_global.head
        self.cs = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm([12]), nn.ReLU()).double()
        self.cs.load_state_dict(dict(zip(("0.weight", "0.bias", "1.weight", "1.bias"), policy.values(), strict=True)))
        for part in (self.body_g, self.head_g):
            part.requires_grad_(False)

    def forward(self, x, context):
        rep = self.body(x)
        gate_in = rep * F.normalize(context, p=2, dim=1).tile(x.shape[0], 1)
        pm, gm = self.cs(gate_in).view(x.shape[0], 2, -1).softmax(1).unbind(1)
        return self.head(rep * pm) + self.head_g(rep * gm), rep, self.body_g(x)


def compute_pfllibs_mmd(x, y):
    def compute_kernels(a, b):
        distances = (a.unsqueeze(1) - b).square().sum(-1)
        return sum(torch.exp(-0.5 * distances / width) for width in (10, 15, 20, 50))

    return torch.mean(compute_kernels(x, x) + compute_kernels(y, y) - 2 * compute_kernels(x, y))


@pytest.mark.parametrize("width", [None, 3])
def test_fedcp_three_rounds_match_pfllib(make_trial, assert_same, width):
    trial = make_trial(FedCP(penalty=0.5), width=width, learning_rate=0.1)
    server = {name: trial.server[name] for name in ("body", "head", "policy")}
    heads = [trial.initial_client_state["head"]] * len(trial.clients)
    for number in (1, 2, 3):
        ids, uploads = trial.select_participants(number), []
        for client in ids:
            module = Ensemble(server["policy"])
            for target, source in ((module.body, "body"), (module.body_g, "body"), (module.head_g, "head")):
                target.load_state_dict({name[5:]: value for name, value in server[source].items()})
            module.head.load_state_dict({name[5:]: value for name, value in heads[client].items()})
            context = module.head.weight.detach().sum(0, keepdim=True)
            rule = torch.optim.SGD([value for value in module.parameters() if value.requires_grad], 0.1)
            for x, y in list_batches(trial, client, number):
                rule.zero_grad()
                output, rep, rep_base = module(x, context)
                (cross_entropy(output, y) + 0.5 * compute_pfllibs_mmd(rep, rep_base)).backward()
                rule.step()
            heads[client] = copy_parameters(module, "head.")
            uploads.append(
                {
                    "body": copy_parameters(module, "body."),
                    "head": 0.5 * heads[client] + 0.5 * server["head"],
                    "policy": dict(zip(server["policy"], (v.detach() for v in module.cs.parameters()), strict=True)),
                }
            )
        server = {
            part: average_models([upload[part] for upload in uploads], trial.clients.sizes[ids]) for part in server
        }
    trial.run(3)
    for part, expected in server.items():
        assert_same(trial.server[part], expected, tolerance=1e-10)
    for client, head in enumerate(heads):
        assert_same(trial.client_states[client]["head"], head, tolerance=1e-10)
