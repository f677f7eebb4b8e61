"""The evaluation measures the models that clients receive in the next round."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from fedpipe.algorithms.base import draw_normal
from fedpipe.algorithms.fedavg import FedAvg
from tests import small_studies as studies

ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class NoisyDownload(FedAvg):
    """A download that depends on the round, by its noise and its learning rate."""

    def send(self, server, clients):
        noise = draw_normal(self.server_noise_key, "download", server["model"])
        return {"model": (server["model"] + 0.01 * noise) * (1 - self.federation.learning_rate)}, {}


@pytest.mark.parametrize("stack", [1, 3])
def test_downloads_of_next_round_are_evaluated(stack: int) -> None:
    plan = studies.prepare(
        studies.settings(
            ("noisy",),
            ROUNDS,
            algorithms={"noisy": {"algorithm": f"{__name__}.NoisyDownload"}},
            federation={"schedule": {"name": "step", "step_size": 1, "gamma": 0.5}, "held_out": [9]},
        )
    )
    (run,) = studies.open_runs(plan, stack=stack)
    studies.finish_run(run, ROUNDS)
    for protocol, clients in (("personal-on-local", run.clients), ("new-personal-on-local", run.new_clients.clients)):
        scores = studies.read_scores(run, ROUNDS, protocol)
        assert {client for _, client in scores} == {*clients.ids}
        for (number, client), (correct, total, loss) in scores.items():
            download, _ = run.make_task("receive", number + 1, [0]).send([0])
            x, y = run.clients.gather_samples(clients.test[client])
            with torch.no_grad():
                logits = studies.build_network(run, download["model"])(x)
            assert (correct, total) == (int((logits.argmax(-1) == y).sum()), len(y))
            assert loss == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
