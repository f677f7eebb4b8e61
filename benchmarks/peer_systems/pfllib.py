"""PFLlib, with main.py in a copy of its code."""

from __future__ import annotations

import importlib
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedpipe.models.base import Network
from peer_systems.job import Clock, Job, add_hooks


class PFLlibNetwork(nn.Module):
    """The network with PFLlib's name of the head."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.body, self.fc = network.body, network.head

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, C)."""
        logits: Tensor = self.fc(self.body(x))
        return logits


def run(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run PFLlib, which evaluates the global model on all test and training samples before each round."""
    shutil.copytree(Path(str(job.clone), "system"), "system")
    for part in ("train", "test"):
        data = Path("dataset/MNIST", part)
        data.mkdir(parents=True)
        for client in range(job.case.clients):
            x, y = job.gather(job.list_samples(part, client))
            np.savez(data / str(client), data=np.array({"x": x.numpy(), "y": y.numpy()}))
    os.chdir("system")
    sys.path.insert(0, str(Path.cwd()))
    models = importlib.import_module("flcore.trainmodel.models")
    server_class = importlib.import_module("flcore.servers.serveravg").FedAvg
    models.FedAvgCNN = lambda **_: PFLlibNetwork(job.build_network())  # type: ignore[attr-defined]
    schedule, servers = iter(job.plan["schedule"]), []

    def select_clients(server: Any) -> list[Any]:
        clock.begin_round()
        servers.append(server)
        return [server.clients[client] for client in next(schedule)]

    server_class.select_clients = select_clients
    add_hooks(server_class, "evaluate", clock.begin_evaluation, clock.end_evaluation)
    add_hooks(server_class, "aggregate_parameters", after=clock.end_round)
    case = job.case
    sys.argv = ["main.py", "-data", "MNIST", "-m", "CNN", "-algo", "FedAvg", "-dev", job.device, "-gr", str(job.rounds)]
    sys.argv += ["-nc", str(case.clients), "-jr", str(case.participation)]
    sys.argv += ["-lbs", str(case.batch_size), "-lr", str(case.learning_rate)]
    runpy.run_path("main.py", run_name="__main__")  # it runs one more round, which is for warming up
    return list(servers[-1].global_model.parameters())
