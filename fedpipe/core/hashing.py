"""Hashes of settings, for keys and fingerprints, and of arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

DIGEST_LENGTH = 12  #: hexadecimal digits of a key


def compute_json_digest(value: Any) -> str:
    """Hash a value: the first digits of the SHA-256 of its canonical JSON (sorted keys, no spaces, no NaN).

    Examples
    --------
    >>> compute_json_digest({"b": 1, "a": 2}) == compute_json_digest({"a": 2, "b": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def compute_arrays_sha256(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 of named arrays: for each one a line with name, dtype and shape, and then the values in C order."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()
