"""The hash of settings: the same for equal values, and pinned, because a change of it changes every key."""

from __future__ import annotations

import pytest

from fedpipe.core.hashing import digest_json


def test_equal_settings_have_one_digest_which_no_version_changes() -> None:
    value = {"name": "fedprox", "mu": 0.1, "layers": [1, None, True], "title": "μ"}
    assert digest_json(value) == digest_json(dict(reversed(value.items()))) == "f266fb5ef36c"
    assert digest_json(value | {"mu": 1}) != digest_json(value | {"mu": 1.0})


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_json_does_not_have_is_no_setting(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest_json({"mu": number})
