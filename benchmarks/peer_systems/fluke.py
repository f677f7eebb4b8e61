"""fluke, with its class FedAVG."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from peer_systems.job import CLASSES, Clock, Job, add_hooks


class Splitter:
    """Data loaders of fluke."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def assign(self, clients: int, batch_size: int) -> tuple[tuple[list[Any], list[Any]], Any]:
        """Make the loaders of the clients for training and testing, and that of the server."""
        make_loader = importlib.import_module("fluke.data").FastDataLoader

        def load(indices: np.ndarray[Any, Any], size: int, shuffle: bool) -> Any:
            return make_loader(*self.job.gather(indices), num_labels=CLASSES, batch_size=size, shuffle=shuffle)

        train, test = ([self.job.list_samples(part, client) for client in range(clients)] for part in ("train", "test"))
        loaders = (
            [load(indices, batch_size, True) for indices in train],
            [load(indices, batch_size, False) for indices in test],
        )
        return loaders, load(np.concatenate(test), 128, False)


def run(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run fluke, whose server evaluates the global model on all test samples after each round."""
    fluke = importlib.import_module("fluke")
    algorithms = importlib.import_module("fluke.algorithms.fedavg")
    evaluation = importlib.import_module("fluke.evaluation")
    environment, case = fluke.FlukeENV(), job.case
    environment.set_seed(job.seed)
    environment.set_device("cpu")
    environment.set_evaluator(evaluation.ClassificationEval(eval_every=1, n_classes=CLASSES))
    client = {"batch_size": case.batch_size, "local_epochs": 1, "loss": "CrossEntropyLoss"}
    client |= {"optimizer": {"name": "SGD", "lr": case.learning_rate}}
    client |= {"scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1}}
    settings = {"client": client, "server": {"weighted": True}, "model": job.build_network()}
    federation = algorithms.FedAVG(case.clients, Splitter(job), fluke.DDict(settings))
    schedule = iter(job.plan["schedule"])

    def select_clients(_: float) -> list[Any]:
        clock.begin_round()
        return [federation.clients[client] for client in next(schedule)]

    federation.server.get_eligible_clients = select_clients
    add_hooks(evaluation.ClassificationEval, "evaluate", clock.begin_evaluation, clock.end_evaluation)
    add_hooks(federation, "_compute_evaluation", after=clock.end_round)
    federation.finalize = environment.close_cache  # without another evaluation after the last round
    federation.run(job.rounds + 1, case.participation)
    return list(federation.server.model.parameters())
