"""`federation.schedule`, `local_steps`, `clip_norm` and `batch_size`: keys, bits of segments and blocks, and errors."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.files import read_json
from fedpipe.core.storage.layout import RunFiles
from fedpipe.planning import planner, run_settings
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.base import make_field_omitted_at_default
from fedpipe.settings.federation import Federation, Schedule
from tests import small_studies as studies

FALLING = {"name": "cosine", "period": 4, "minimum": 0.01, "warmup": 1}
SETTINGS: dict[str, Any] = {"schedule": FALLING, "local_steps": 7, "clip_norm": 0.5}


@dataclass(frozen=True, kw_only=True)
class SevenSteps(FedAvg):
    """Each client trains for seven steps."""

    @override
    def count_local_steps(self, size: int, round_number: int, noise_key: Tensor) -> int:
        return 7


def plan_key(**federation: Any) -> str:
    """Return the key of a run with these settings of the federation."""
    studies.write(studies.settings(federation=federation), Path())
    (run,) = planner.make_plan().runs
    return run.key


def test_key_ignores_late_field_at_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version with more fields has the same keys for runs at the defaults, and reads their run.yaml."""

    class LaterFederation(Federation):
        prox: float = make_field_omitted_at_default(0.0, ge=0)
        server_schedule: Schedule = make_field_omitted_at_default(Schedule())

    in_keys = set(Federation.model_fields) - {"held_out", "drift"}  # late fields
    assert set(Federation().model_dump(mode="json")) == in_keys, "all other fields are in keys"
    assert LaterFederation().model_dump(mode="json") == Federation().model_dump(mode="json")
    assert LaterFederation(prox=0, server_schedule={"name": "constant"}).model_dump() == Federation().model_dump()
    enabled = LaterFederation(prox=0.5, server_schedule={"name": "exponential", "gamma": 0.9}).model_dump(mode="json")
    assert enabled == Federation().model_dump(mode="json") | {
        "prox": 0.5,
        "server_schedule": {"name": "exponential", "gamma": 0.9, "warmup": 0},
    }
    default_key = plan_key()
    files = RunFiles.from_key("fedavg", default_key)
    planner.write_plan(planner.make_plan())
    monkeypatch.setattr(run_settings, "Federation", LaterFederation)
    assert RunSettings.read(files.settings).build_federation_settings().prox == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("stack", [1, 4], ids=["loop", "stack"])
def test_segments_and_blocks_with_schedule_have_equal_bits(stack: int) -> None:
    """The learning rate depends only on the round, in one job, in two, and in jobs of single rounds and clients."""
    plan = studies.prepare(studies.settings(("scaffold",), federation=SETTINGS))
    studies.require_equal_bits(plan, 4, stack=stack, device="cpu")


def test_epoch_seconds_depend_on_local_steps() -> None:
    """times.json contains the seconds of a local epoch, also if steps are counted. Bytes do not change."""
    epoch_seconds, traffic = [], []
    for algorithm, settings in (
        ("fedavg", {"local_steps": 7}),
        ("fedavg", {"local_epochs": 2}),
        (f"{__name__}.SevenSteps", {"local_epochs": 2}),
    ):
        params = studies.settings(("own",), algorithms={"own": {"algorithm": algorithm}}, federation=settings)
        plan = studies.prepare(params)
        (run,) = studies.open_runs(plan, device="cpu")
        run.write_initial_round()
        block = run.train(1, run.select_participants(1))
        block.outcomes = [outcome._replace(seconds=3.0) for outcome in block.outcomes]
        run.aggregate(1, [block])
        epoch_seconds.append(read_json(run.files.get_round_files(1).times)["epoch"])
        sizes = run.clients.sizes[block.ids]
        traffic.append([(outcome.bytes_down, outcome.bytes_up) for outcome in block.outcomes])
    passes = [7 / math.ceil(size / 40) for size in sizes]
    assert len(set(passes)) > 1
    assert epoch_seconds[0] == pytest.approx(sum(3 / count for count in passes) / len(passes))
    assert epoch_seconds[1] == pytest.approx(1.5)
    assert epoch_seconds[2] == epoch_seconds[0]
    assert traffic[0] == traffic[1] == traffic[2]


def plan_with_error(settings: dict[str, Any]) -> str:
    studies.write(settings, Path())
    with pytest.raises(SettingsError) as refusal:
        planner.make_plan()
    return str(refusal.value)


def test_method_may_override_unsupported_training_settings() -> None:
    settings_with_override = studies.settings(("fedavg", "fedrep"), federation={"local_steps": 5})
    settings_with_override["algorithms"]["fedrep"] = {
        "overrides": {"federation.local_steps": None, "federation.local_epochs": 1}
    }
    studies.write(settings_with_override, Path())
    assert len(planner.make_plan().runs) == 2


def test_finetuning_rejects_learning_rate_of_zero() -> None:
    settings = studies.settings(
        federation={"schedule": {"name": "cosine", "period": 4}}, evaluation={"protocols": ["finetuned-on-local"]}
    )
    message = plan_with_error(settings)
    assert message.startswith("federation.schedule: after round 4 the learning rate is 0")
    assert "minimum" in message
    settings["federation"]["schedule"]["minimum"] = 0.01
    studies.write(settings, Path())
    assert planner.make_plan().warnings == ()


def test_plan_warns_about_learning_rate_that_rises_again() -> None:
    schedule = {"name": "cosine", "period": 2, "warmup": 1}
    rates = [Schedule(**schedule).compute_learning_rate(0.1, number) for number in range(1, 6)]
    assert rates.index(min(rates[1:])) + 1 == 4, "the first minimum after the warmup"
    studies.write(studies.settings(rounds=4, federation={"schedule": schedule}), Path())
    assert planner.make_plan().warnings == (), "the last round has the minimum"
    studies.write(studies.settings(rounds=5, federation={"schedule": schedule}), Path())
    (warning,) = planner.make_plan().warnings
    assert warning.startswith("federation.schedule.period: 2 ")
    assert "round 4 of 5" in warning


def test_grid_varies_schedule_and_local_steps() -> None:
    settings = studies.settings(federation={"schedule": {"name": "step", "step_size": 2}})
    settings["study"]["grid"] = {
        "federation.schedule.gamma": [0.1, 0.5],
        "training": {"epochs": {}, "steps": {"federation.local_epochs": None, "federation.local_steps": 3}},
    }
    studies.write(settings, Path())
    assert len({run.key for run in planner.make_plan().runs}) == 4


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
    """With ``batch_size: full``, an epoch is one step with all samples of a client."""
    full, large, small = (run_and_hash(size, stack) for size in ("full", 5000, 40))
    assert full[1] == large[1]
    assert full[1]["0002/server.pt"] != small[1]["0002/server.pt"]
    assert len({full[0], large[0], small[0]}) == 3, "the key contains the value of params.yaml"
