"""FL-bench, with main.py in a copy of its code."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peer_systems.job import CLASSES, Clock, Job, add_hooks


def run(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run FL-bench in one process, which evaluates each participant on its test samples before and after training."""
    case, name = job.case, "cifar10" if job.case_name == "cifar10" else "mnist"
    shutil.copytree(str(job.clone), "clone", ignore=shutil.ignore_patterns(".git", "out", "raw", "*.pkl"))
    os.chdir("clone")
    sys.path.insert(0, str(Path.cwd()))
    folder, everyone = Path("data", name), list(range(case.clients))
    folder.mkdir(exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"split": "sample"}))
    samples = [{part: job.list_samples(part, client) for part in ("train", "test")} for client in everyone]
    partition = {
        "separation": {"train": everyone, "test": everyone, "val": everyone, "total": case.clients},
        "data_indices": [indices | {"val": np.empty(0, np.int64)} for indices in samples],
    }
    (folder / "partition.pkl").write_bytes(pickle.dumps(partition))
    module = importlib.import_module("src.server.fedavg")
    datasets = importlib.import_module("data.utils.datasets")
    models = importlib.import_module("src.utils.models")

    class Pixels(datasets.BaseDataset):  # type: ignore[name-defined]
        def __init__(self, root: Path, args: Any, **transforms: Any) -> None:
            x, y = job.arrays
            super().__init__(
                torch.from_numpy(x / np.float32(255)), torch.from_numpy(y), list(range(CLASSES)), **transforms
            )

    class Decoupled(models.DecoupledModel):  # type: ignore[name-defined]
        def __init__(self, dataset: str, pretrained: bool) -> None:
            super().__init__()
            network = job.build_network()
            self.base, self.classifier = network.body, network.head

    module.DATASETS[name], module.MODELS["peers"] = Pixels, Decoupled
    for constants in (module.DATA_MEAN, module.DATA_STD):
        constants[name] = [0.5] * case.dataset.shape[0]
    servers = []

    def begin_training(server: Any) -> None:
        servers.append(server)
        server.client_sample_stream = job.plan["schedule"]

    add_hooks(module.FedAvgServer, "train", begin_training)
    add_hooks(module.FedAvgServer, "train_one_round", clock.begin_round, clock.end_round)
    add_hooks(module.FedAvgClient, "evaluate", clock.begin_evaluation, clock.end_evaluation)
    overrides = {"method": "fedavg", "dataset.name": name, "model.name": "peers", "optimizer.lr": case.learning_rate}
    overrides |= {
        "common.seed": job.seed,
        "common.join_ratio": case.participation,
        "common.batch_size": case.batch_size,
    }
    overrides |= {"common.global_epoch": job.rounds + 1, "common.local_epoch": 1, "common.use_cuda": "false"}
    sys.argv = ["main.py", *(f"{key}={value}" for key, value in overrides.items())]
    runpy.run_path("main.py", run_name="__main__")
    return [value for value in servers[-1].model.parameters() if value.requires_grad]
