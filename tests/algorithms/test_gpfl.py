import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.gpfl import GPFL, SHARED_PARTS, apply_valve
from fedpipe.core.tensors import Tensors
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import average_models, copy_parameters, list_batches, load_mlp


def count_shared_values(n):
    return n.body + n.classes * n.features + 2 * (n.features**2 + 3 * n.features)


EXPECTED = Expected(
    traffic=[({}, lambda n: (count_shared_values(n), count_shared_values(n)))],
    centralized="the valve transforms the features in each setting",
    exceptions={"class_names": "the random embeddings depend on the numbers of classes"},
)

f64 = torch.float64


def test_valve_output_matches_exact_values():
    """With input 1, gamma normalizes (1, 0) and beta is 3. Features (1, -1) become about (1 + 1 + 3, -1 * 0 + 3)."""
    gamma = Tensors(
        weight=torch.tensor([[1.0], [-1.0]], dtype=f64),
        bias=torch.zeros(2, dtype=f64),
        scale=torch.ones(2, dtype=f64),
        shift=torch.zeros(2, dtype=f64),
    )
    beta = gamma | {"scale": torch.zeros(2, dtype=f64), "shift": torch.full((2,), 3.0, dtype=f64)}
    g = 0.5 / (0.25 + 1e-5) ** 0.5
    z, u = torch.tensor([[1.0, -1.0], [0.0, -9.0]], dtype=f64), torch.ones(1, dtype=f64)
    found = apply_valve({"gamma": gamma, "beta": beta}, z, u)
    assert found.tolist()[0] == pytest.approx([1 + g + 3, 3 - (1 - g)], abs=1e-12)
    assert found.tolist()[1] == pytest.approx([3, max(0, 3 - 9 * (1 - g))], abs=1e-12)


def test_valve_inputs_are_means_of_embeddings(make_trial):
    trial = make_trial(GPFL())
    rows = trial.server["embeddings"]["embeddings"]
    client = trial.start(2)
    _, y = trial.clients.gather_samples(trial.clients.train[2])
    torch.testing.assert_close(client["global_input"], rows.mean(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(client["personal_input"], rows[y].mean(0), rtol=0, atol=1e-14)


def test_gpfl_loss_ignores_padding(make_trial):
    trial = make_trial(GPFL(penalty=1.0))
    client, (x, y) = trial.start(4), trial.clients.gather_samples(trial.clients.train[4])
    padded = Batch(torch.cat([x, 9 * x[:1]]), torch.cat([y, y[:1]]), torch.ones(len(y) + 1, dtype=x.dtype))
    padded.mask[-1] = 0
    plain = float(trial.algorithm.loss(client, Batch(x, y)))
    assert float(trial.algorithm.loss(client, padded)) == pytest.approx(plain, abs=1e-12)


class CoV(nn.Module):
    """PFLlib's conditional valve."""

    def __init__(self, server):
        super().__init__()
        for name in ("gamma", "beta"):
            layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.LayerNorm([6])).double()
            names = ("0.weight", "0.bias", "2.weight", "2.bias")
            layers.load_state_dict(dict(zip(names, server[name].values(), strict=True)))
            setattr(self, name, layers)

    def forward(self, x, context):
        return F.relu(torch.multiply(x, self.gamma(context) + 1) + self.beta(context))


@pytest.mark.parametrize("width", [None, 3])
def test_gpfl_three_rounds_match_pfllib(make_trial, assert_same, width):
    """The inputs of the valve come from the downloaded embeddings."""
    trial = make_trial(GPFL(penalty=0.3, decay=0.2), width=width, learning_rate=0.05)
    server, heads = trial.server, [trial.initial_client_state["head"]] * len(trial.clients)
    for number in (1, 2, 3):
        ids, uploads = trial.select_participants(number), []
        for client in ids:
            module, valve = load_mlp(server["body"], heads[client]), CoV(server)
            frozen = server["embeddings"]["embeddings"]
            embedding = nn.Embedding.from_pretrained(frozen.clone(), freeze=False)
            labels = trial.clients.gather_samples(trial.clients.train[client])[1]
            generic, personal = frozen.mean(0), frozen[labels].mean(0)
            optimizers = [
                torch.optim.SGD(module.parameters(), 0.05),
                torch.optim.SGD(embedding.parameters(), 0.05, weight_decay=0.2),
                torch.optim.SGD(valve.parameters(), 0.05, weight_decay=0.2),
            ]
            for x, y in list_batches(trial, client, number):
                feat = module.body(x)
                output = module.head(valve(feat, personal))
                feat_g = valve(feat, generic)
                cosine = F.linear(F.normalize(feat_g), F.normalize(embedding.weight))
                loss = cross_entropy(output, y) + cross_entropy(cosine, y)
                loss = loss + torch.norm(feat_g - frozen[y], 2) * 0.3
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            heads[client], body = copy_parameters(module, "head."), copy_parameters(module, "body.")
            layers = {
                name: dict(zip(server[name], (v.detach() for v in getattr(valve, name).parameters()), strict=True))
                for name in ("gamma", "beta")
            }
            uploads.append({"body": body, "embeddings": {"embeddings": embedding.weight.detach()}, **layers})
        server = {
            part: average_models([upload[part] for upload in uploads], trial.clients.sizes[ids])
            for part in ("body", *SHARED_PARTS)
        }
    trial.run(3)
    for part, expected in server.items():
        assert_same(trial.server[part], expected, tolerance=1e-10)
    for client, head in enumerate(heads):
        assert_same(trial.client_states[client]["head"], head, tolerance=1e-10)
