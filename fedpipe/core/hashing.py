"""The hash of settings, for keys and fingerprints."""

import hashlib
import json
from typing import Any

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
