"""Features of a data set by a network's frozen base, computed once and stored as an artifact that runs share.

A frozen base gives the same features in every epoch, round and run, so runs of such a model train on the features. They
are computed in batches of a fixed size on one thread, so that their bits depend only on the kind of machine. Each round
records its features, and a run resumes only with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import files, packing
from fedpipe.core.storage.files import RESULTS
from fedpipe.core.storage.locks import lock_file
from fedpipe.data import store
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.models.base import Model, Network
from fedpipe.planning.run_settings import RunSettings

BATCH_SIZE = 250  #: samples per call of the base


def get_features_path(settings: RunSettings) -> Path:
    """Path of a run's features, with a hash of the base, the data set and the transforms."""
    dataset, model = store.get_stored_dataset_path(settings.dataset).stem, settings.model
    dtype = settings.federation["dtype"]
    key = compute_json_digest({"dataset": dataset, "model": model, "transforms": settings.transforms, "dtype": dtype})
    return RESULTS / "features" / f"{dataset}-{model['name']}-{key}.pt"


def replace_frozen_base(
    model: Model,
    build_network: Callable[[], Network],
    clients: FederatedData,
    path: Path,
    threads: int,
    made_by: Mapping[str, Any],
) -> tuple[FederatedData, Callable[[], Network]]:
    """Replace the samples by features of the frozen base, which are computed if ``path`` is missing.

    Return the samples with features, and the builder of the other layers.
    """
    with torch.random.fork_rng(devices=[]):
        base, _ = model.split_frozen_base(build_network())
    marker = path.with_suffix(".json")
    lock = packing.PACK_LOCK.with_name(f"{path.stem}.lock")  # ignored by git and DVC
    with lock_file(lock):  # runs that start together wait for the first one
        if not marker.is_file():
            sha256 = files.write_pt(path, {"features": compute_features(clients, base, threads)})
            files.write_json(marker, {path.name: sha256, "made_by": dict(made_by)})
    sha256 = files.read_recorded_sha256(path)
    features = clients.replace_inputs(files.read_pt(path, sha256)["features"], {"features": sha256})
    return features, lambda: model.split_frozen_base(build_network())[1]


def compute_features(clients: FederatedData, base: nn.Module, threads: int = 1) -> Tensor:
    """Compute the features of all samples, shape (n, d), on the CPU."""
    base = base.to(clients.device, clients.dtype).eval()

    def compute_batch_features(first: int) -> Tensor:
        with torch.no_grad():
            x, _ = clients.gather_samples(torch.arange(first, min(first + BATCH_SIZE, len(clients.y))))
            features: Tensor = base(x)
            return features.cpu()

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return torch.cat(list(pool.map(compute_batch_features, range(0, len(clients.y), BATCH_SIZE))))
