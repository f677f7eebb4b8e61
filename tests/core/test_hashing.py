"""The digest of settings is pinned, because a change would change every key."""

import pytest

from fedpipe.core.hashing import compute_json_digest


def test_json_digest_equals_pinned_value_and_ignores_key_order() -> None:
    value = {"name": "fedprox", "mu": 0.1, "layers": [1, None, True], "title": "μ"}
    assert compute_json_digest(value) == compute_json_digest(dict(reversed(value.items()))) == "f266fb5ef36c"
    assert compute_json_digest(value | {"mu": 1}) != compute_json_digest(value | {"mu": 1.0})


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_digest_rejects_nan_and_infinity(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        compute_json_digest({"mu": number})
