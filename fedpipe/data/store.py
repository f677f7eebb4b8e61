"""Stores the samples of a data set as one file of tensors, and checks them against the digest in a run's key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedpipe.core.components import registry
from fedpipe.core.components.component import DATASET, list_parameters
from fedpipe.core.errors import ArtifactError
from fedpipe.core.hashing import compute_arrays_sha256
from fedpipe.core.storage import files, layout
from fedpipe.data.datasets.base import DatasetInfo
from fedpipe.data.samples import Column, Samples

if TYPE_CHECKING:
    import torch  # imported inside functions otherwise: it takes seconds, and not every stage needs it

SAMPLE_ARRAYS = {"x", "y", "test"}  #: names of the tensors that every data set has


class StoredSamples(NamedTuple):
    """All samples of a data set as tensors on the CPU, mapped from the file."""

    x: torch.Tensor  #: inputs, shape (n, *shape): images in uint8, token ids in signed integers, or float32
    y: torch.Tensor  #: classes, int64, shape (n,)
    test: torch.Tensor  #: whether a sample belongs to the official test set, bool, shape (n,)
    columns: Mapping[str, Column]  #: further columns by name, empty if there are none


def compute_samples_sha256(samples: Samples | StoredSamples) -> str:
    """SHA-256 of a data set's x, y and test in canonical dtypes, independent of machine and file format."""
    return compute_arrays_sha256(convert_to_canonical_arrays(samples))


def get_stored_dataset_path(description: Mapping[str, Any]) -> Path:
    """Path of a stored data set, given its key parameters or a run's ``dataset`` settings.

    The file name contains a hash of all that the tensors depend on, so that two user files, or two vocabularies of one
    text, have different names. The split of the samples is not part of it.
    """
    component = registry.find_component(DATASET, description["name"])
    fields = {"name", "code", "sha256", *(field.name for field in list_parameters(component))}
    text = json.dumps({key: value for key, value in description.items() if key in fields}, sort_keys=True)
    return layout.get_dataset_path(f"{description['name']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}")


def read_dataset_info(path: Path) -> DatasetInfo:
    """Shape, classes and size of a stored data set, from its manifest.

    Raises
    ------
    ArtifactError
        The data set is not stored, or an older fedpipe stored it without these facts.
    """
    manifest = files.read_json(path.with_suffix(".json"))
    if missing_fields := [name for name in DatasetInfo._fields if name not in manifest]:
        raise ArtifactError(
            f"{path.with_suffix('.json')} lacks {missing_fields[0]}. Delete it and {path.name}, and run again."
        )
    return DatasetInfo(**{name: manifest[name] for name in DatasetInfo._fields} | {"shape": tuple(manifest["shape"])})


def read_class_names(path: Path) -> tuple[str, ...]:
    """Names of the classes of a stored data set, from its manifest. Empty if the labels are numbers without names."""
    manifest_path = path.with_suffix(".json")
    return tuple(files.read_json(manifest_path).get("class_names", ())) if manifest_path.is_file() else ()


def read_omitted_columns(path: Path) -> dict[str, str]:
    """Reasons why arrays or columns of the user's file are not among the columns of a stored data set, by name."""
    return files.read_json(path.with_suffix(".json")).get("omitted_columns", {})


def get_dataset_settings_path(name: str) -> Path:
    """File in a plan with the settings of the data set with this name, such as ``imdb-0123456789ab``."""
    return layout.get_dataset_path(name).with_suffix(".yaml")


def save_samples(path: Path, samples: Samples) -> str:
    """Write samples as one file of tensors, atomically. Return the SHA-256 of its bytes."""
    import torch

    tensors: dict[str, Any] = {
        name: torch.from_numpy(array) for name, array in convert_to_canonical_arrays(samples).items()
    }
    if samples.columns:
        tensors["columns"] = {name: _encode_column(column) for name, column in sorted(samples.columns.items())}
    return files.write_pt(path, tensors)


def load_samples(path: Path, sha256: str | None = None) -> StoredSamples:
    """Load the samples of :func:`save_samples` as memory-mapped tensors.

    Raises
    ------
    ArtifactError
        The file is missing, damaged, or has other content.
    """
    tensors = files.read_pt(path, sha256)
    columns = tensors.pop("columns", {})
    if tensors.keys() != SAMPLE_ARRAYS:
        raise ArtifactError(
            f"{path} contains {', '.join(tensors) or 'nothing'} instead of a data set. Delete it and run again."
        )
    return StoredSamples(**tensors, columns={name: _decode_column(column) for name, column in columns.items()})


def convert_to_canonical_arrays(samples: Samples | StoredSamples) -> dict[str, npt.NDArray[Any]]:
    """Convert the arrays to the dtypes in which they are hashed and stored."""
    arrays = {name: np.asarray(getattr(samples, name)) for name in ("x", "y", "test")}
    input_dtype = arrays["x"].dtype
    dtypes = {
        "x": np.dtype("<f4") if np.issubdtype(input_dtype, np.floating) else input_dtype.newbyteorder("<"),
        "y": np.dtype("<i8"),
        "test": np.dtype("|b1"),
    }
    return {name: np.asarray(arrays[name], dtype=dtype, order="C") for name, dtype in dtypes.items()}


def _encode_column(column: Column) -> dict[str, torch.Tensor]:
    """Convert a column to tensors: its numbers in int32, and the bytes of its names as JSON."""
    import torch

    names = np.frombuffer(json.dumps(column.names).encode(), dtype=np.uint8)
    return {"codes": torch.from_numpy(column.codes.astype(np.int32)), "names": torch.from_numpy(names.copy())}


def _decode_column(tensors: Mapping[str, torch.Tensor]) -> Column:
    names = json.loads(tensors["names"].numpy().tobytes())
    return Column(tensors["codes"].numpy().astype(np.int64), tuple(names))
