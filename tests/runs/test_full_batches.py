"""``batch_size: full``: an epoch is one step with all samples of a client."""

from typing import Any

import numpy as np
import pytest

from tests import small_studies as studies


def run_and_hash(size: Any, stack: int) -> tuple[str, dict[str, str]]:
    """Run two rounds. Return the key of the run, and the hashes of its server states."""
    plan = studies.prepare(studies.settings(rounds=2, federation={"batch_size": size}))
    (run,) = studies.open_runs(plan, stack=stack, device="cpu")
    assert len(np.unique(run.clients.sizes)) > 1, "clients should have different sizes"
    list(run.run_segment(2))
    bits = studies.hash_results(run.files.path / "rounds")
    return plan.runs[0].key, {name: sha256 for name, sha256 in bits.items() if name.endswith("server.pt")}


@pytest.mark.parametrize("stack", [1, 4], ids=["loop", "stack"])
def test_full_batch_equals_batch_larger_than_any_client(stack: int) -> None:
    full, large, small = (run_and_hash(size, stack) for size in ("full", 5000, 40))
    assert full[1] == large[1]
    assert full[1]["0002/server.pt"] != small[1]["0002/server.pt"]
    assert len({full[0], large[0], small[0]}) == 3, "the key contains the value of params.yaml"
