"""fedpipe, with the evaluation of its default settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import common
import numpy as np
import torch
from torch import Tensor

from fedpipe.core.storage import files
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.run import Run
from fedpipe.settings.execution import Execution
from fedpipe.settings.transforms import Transforms
from peer_systems.job import CLASSES, Clock, Job


def open_run(folder: Path, job: Job) -> Run:
    """Open fedpipe's run in an empty folder, with the default evaluation."""
    case = job.case
    federation = {"clients": case.clients, "participation": case.participation, "batch_size": case.batch_size}
    sections = {
        "dataset": {"name": type(case.dataset).__name__.lower()},
        "model": {"name": type(case.model).__name__.lower()},
        "federation": federation | {"learning_rate": case.learning_rate},
    }
    train, test = ([job.list_samples(part, client) for client in range(case.clients)] for part in ("train", "test"))
    x, y = map(torch.from_numpy, (np.array(job.arrays[0]), job.arrays[1]))
    transforms = Transforms(mean=(0.5,), std=(0.5,))
    all_test = np.sort(np.concatenate(test))
    clients = FederatedData(x, y, train, test, all_test, CLASSES, job.seed, device=job.device, transforms=transforms)
    return common.open_run(folder, "fedavg", clients, Execution(device=job.device), job.threads, **sections)


def run(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run fedpipe, which evaluates each client's model and the global model after each round."""
    experiment = open_run(Path("runs"), job)
    for number in experiment.run_segment(job.rounds + 1):
        if number:
            clock.end_round()
            clock.evaluations[-1] = files.read_json(experiment.files.get_round_files(number).times)["evaluate"]
        clock.begin_round()
    server = experiment.load_server_state(job.rounds + 1)
    return list(experiment.algorithm.net.parameters(experiment.algorithm.global_model(server)).values())
