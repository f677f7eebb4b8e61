"""Where a data set's samples lie once obtained: checked against their checksum, as one file of tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from fedpipe import artifacts, registry
from fedpipe.data.datasets.base import Dataset, Samples
from fedpipe.errors import ArtifactError

if TYPE_CHECKING:
    import torch  # imported inside functions otherwise: it takes seconds, and not every stage needs it

CANONICAL = {"x": "<f4", "y": "<i8", "test": "|b1"}  #: dtypes in which samples are hashed and stored


class Tensors(NamedTuple):
    """All samples of a data set as tensors on the CPU, mapped from the file."""

    x: torch.Tensor  #: inputs, float32, shape (n, *shape)
    y: torch.Tensor  #: classes, int64, shape (n,)
    test: torch.Tensor  #: whether a sample belongs to the official test set, bool, shape (n,)


def checksum(samples: Samples) -> str:
    """SHA-256 of the canonical bytes of a data set: the same on every machine, and for every file format.

    For each of x, y and test in turn, a line with name, dtype and shape is hashed, then the values in C order and
    little-endian.
    """
    digest = hashlib.sha256()
    for name, array in _canonical(samples).items():
        digest.update(f"{name} {CANONICAL[name]} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def download(name: str, path: Path | None = None) -> Path:
    """Obtain a data set, check that it is the one the keys of runs speak of, and save it.

    Parameters
    ----------
    name
        As in ``dataset.name``: a registered data set or a dotted path.
    path
        Where to save it; by default `fedpipe.artifacts.dataset_file`.

    Returns
    -------
    Path
        Where it lies now.

    Raises
    ------
    SettingsError
        There is no such data set.
    ArtifactError
        The samples are not those that the class's ``sha256`` stands for; nothing is saved.
    """
    dataset = cast(Dataset, registry.build(registry.DATASET, name, {}, "dataset.name"))
    samples = dataset.load()
    found = checksum(samples)
    if found != dataset.sha256:
        raise ArtifactError(
            f"dataset.name: the samples of '{name}' have checksum {found}, but {dataset.sha256} was expected; obtain "
            f"the original again (with the versions in requirements.lock), or, if the new samples are meant, "
            f"set {type(dataset).__qualname__}.sha256 to their checksum."
        )
    path = path or artifacts.dataset_file(name)
    artifacts.write_manifest(path, save(path, samples))
    return path


def save(path: Path, samples: Samples) -> str:
    """Write samples as one file of tensors, atomically; returns the SHA-256 of its bytes."""
    import torch

    return artifacts.write_pt(path, {name: torch.from_numpy(array) for name, array in _canonical(samples).items()})


def load(path: Path, sha256: str | None = None) -> Tensors:
    """The samples that :func:`save` wrote.

    Raises
    ------
    ArtifactError
        The file is missing, damaged, or holds something else.
    """
    tree = artifacts.read_pt(path, sha256)
    if tree.keys() != CANONICAL.keys():
        raise ArtifactError(f"{path} holds no data set (but {', '.join(tree)}); delete it and run again.")
    return Tensors(**tree)


def _canonical(samples: Samples) -> dict[str, np.ndarray]:
    return {name: np.asarray(getattr(samples, name), dtype=dtype, order="C") for name, dtype in CANONICAL.items()}
