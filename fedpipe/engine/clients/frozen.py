"""What the frozen base of a network makes of a data set: computed once, and kept as an artifact that runs share.

A base that never trains gives the same features in every epoch, round and run, so that runs of such a model never
compute it in training: their samples are the features. Those are computed in batches of one fixed size, each on one
thread, so that their bits depend on the kind of machine alone. Each round records which features it was made with, and
a run goes on with no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from fedpipe.core.hashing import digest_json
from fedpipe.core.storage import files, packing
from fedpipe.core.storage.files import RESULTS
from fedpipe.data import store
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.models.base import Model
from fedpipe.planning.run_settings import RunSettings

BATCH_SIZE = 250  #: samples in one call of the base


def get_features_path(settings: RunSettings) -> Path:
    """Where the features of a run lie: under a hash of the base, the data set and what is done to its images."""
    key_settings = {
        "dataset": store.locate_dataset(settings.dataset).stem,
        "model": settings.model,
        "transforms": settings.transforms,
        "dtype": settings.federation["dtype"],
    }
    key = digest_json(key_settings)
    return RESULTS / "features" / f"{store.locate_dataset(settings.dataset).stem}-{settings.model['name']}-{key}.pt"


def with_features(
    clients: FederatedData, base: nn.Module, path: Path, threads: int, made_by: Mapping[str, Any]
) -> FederatedData:
    """The same clients, whose samples are the features; they are computed where they do not lie at ``path`` yet.

    Raises
    ------
    ArtifactError
        What lies there is damaged.
    """
    marker = path.with_suffix(".json")
    lock = packing.PACK_LOCK.with_name(f"{path.stem}.lock")  # where neither git nor DVC looks
    lock.parent.mkdir(exist_ok=True)
    with FileLock(lock):  # runs that begin together wait for the first
        if not marker.is_file():
            sha256 = files.write_pt(path, {"features": compute_features(clients, base, threads)})
            files.write_json(marker, {path.name: sha256, "made_by": dict(made_by)})
    sha256 = files.read_recorded_sha256(path)
    return clients.with_inputs(files.read_pt(path, sha256)["features"], {"features": sha256})


def compute_features(clients: FederatedData, base: nn.Module, threads: int = 1) -> Tensor:
    """Features of all samples, shape (n, d), on the host."""
    base = base.to(clients.device, clients.dtype).eval()

    def compute_batch(first: int) -> Tensor:
        with torch.no_grad():
            x, _ = clients.gather(torch.arange(first, min(first + BATCH_SIZE, len(clients.y))))
            features: Tensor = base(x)
            return features.cpu()

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return torch.cat(list(pool.map(compute_batch, range(0, len(clients.y), BATCH_SIZE))))


def build_frozen_base(model: Model, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The frozen base of a model's network."""
    with torch.random.fork_rng(devices=[]):
        return model.split_frozen_base(model.build_initial_network(shape, classes))[0]
