"""Flower's simulation, with a client in the form of its tutorial."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpipe.models.base import Network
from peer_systems.job import Clock, Job, add_hooks


@functools.lru_cache(maxsize=1)
def read_job(path: Path) -> Job:
    """Read a job, once per process."""
    torch.set_num_threads(1)  # each of Flower's actors has one core
    job = Job(**json.loads(path.read_text()))
    torch.manual_seed(job.seed)
    return job


def make_client_app(job_file: Path) -> Any:
    """Make Flower's client, in the form of its tutorial."""
    app = importlib.import_module("flwr.app")
    client_app = importlib.import_module("flwr.clientapp").ClientApp()

    def load(message: Any, client: int, part: str) -> tuple[Network, Any]:
        job = read_job(job_file)
        network = job.build_network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        data = torch.utils.data.TensorDataset(*job.gather(job.list_samples(part, client)))
        return network, torch.utils.data.DataLoader(data, job.case.batch_size, shuffle=part == "train")

    def reply(message: Any, loader: Any, **records: Any) -> Any:
        metrics = app.MetricRecord({"num-examples": len(loader.dataset), **records.pop("metrics", {})})
        return app.Message(content=app.RecordDict({"metrics": metrics, **records}), reply_to=message)

    @client_app.train()
    def train(message: Any, context: Any) -> Any:
        network, loader = load(message, int(message.content["config"]["client"]), "train")
        optimizer = torch.optim.SGD(network.parameters(), lr=read_job(job_file).case.learning_rate)
        network.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        return reply(message, loader, arrays=app.ArrayRecord(network.state_dict()))

    @client_app.evaluate()
    def evaluate(message: Any, context: Any) -> Any:
        network, loader = load(message, int(context.node_config["partition-id"]), "test")
        network.eval()
        with torch.no_grad():
            correct = sum(int((network(x).argmax(1) == y).sum()) for x, y in loader)
        return reply(message, loader, metrics={"accuracy": correct / len(loader.dataset)})

    return client_app


def run(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run Flower's simulation with an actor per core. After each round, every client evaluates the global model."""
    app, serverapp = importlib.import_module("flwr.app"), importlib.import_module("flwr.serverapp")
    strategies = importlib.import_module("flwr.serverapp.strategy")
    simulation = importlib.import_module("flwr.simulation")
    case, results = job.case, []

    class Strategy(strategies.FedAvg):  # type: ignore[name-defined]
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            clock.begin_round()
            nodes, participants = sorted(grid.get_node_ids()), job.plan["schedule"][server_round - 1]
            configs = [app.ConfigRecord({"client": client}) for client in participants]
            return [
                app.Message(app.RecordDict({"arrays": arrays, "config": config}), nodes[index], "train")
                for index, config in enumerate(configs)
            ]

    add_hooks(Strategy, "aggregate_train", after=clock.begin_evaluation)
    add_hooks(Strategy, "aggregate_evaluate", None, lambda *_: (clock.end_evaluation(), clock.end_round()))
    server_app = serverapp.ServerApp()

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        arrays = app.ArrayRecord(job.build_network().state_dict())
        results.append(Strategy().start(grid, arrays, job.rounds + 1).arrays)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": job.threads}}
    client_app = make_client_app(Path(job.folder, "flower.job.json"))
    simulation.run_simulation(server_app, client_app, case.clients, backend_config=backend)
    network = job.build_network()
    network.load_state_dict(results[0].to_torch_state_dict())
    return list(network.parameters())
