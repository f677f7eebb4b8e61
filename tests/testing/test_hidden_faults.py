"""Algorithms with faults that give wrong numbers without an error, and correct algorithms that are similar to them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from fedpipe import testing
from fedpipe.algorithms.base import Measure, Train
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.noise import draw_normal
from fedpipe.core.tensors import Tensors
from fedpipe.testing import checks

DRAWS: dict[str, Any] = {}


def move_model(algorithm: Any, owner: Any, server: Any, uploads: Any) -> tuple[Any, Any]:
    """Server momentum whose speed is an attribute. Return the speed and the new state."""
    model = algorithm.net.parameters(server["model"])
    change = algorithm.net.parameters(uploads.mean("model")) - model
    speed = 0.9 * getattr(owner, "speed", change.zeros()) + change
    return speed, {"model": server["model"] | (model + speed)}


@dataclass(frozen=True, kw_only=True)
class SelfMomentum(FedAvg):
    def aggregate(self, server: Any, uploads: Any) -> Any:
        speed, state = move_model(self, self, server, uploads)
        object.__setattr__(self, "speed", speed)
        return state


@dataclass(frozen=True, kw_only=True)
class NetMomentum(FedAvg):
    def aggregate(self, server: Any, uploads: Any) -> Any:
        self.net.speed, state = move_model(self, self.net, server, uploads)  # type: ignore[attr-defined]
        return state


@dataclass(frozen=True, kw_only=True)
class CachedDraw(FedAvg):
    def predict(self, client: Any, x: Any) -> Any:
        if not DRAWS:
            DRAWS["scale"] = torch.rand(())
        return self.net(client["model"], x) * DRAWS["scale"]


@dataclass(frozen=True, kw_only=True)
class CohortSize(FedAvg):
    def send(self, server: Any, ids: Any) -> Any:
        return {"model": server["model"], "count": self.scalar(float(len(ids)))}, {}


@dataclass(frozen=True, kw_only=True)
class PlaceInCohort(FedAvg):
    def send(self, server: Any, ids: Any) -> Any:
        return {"model": server["model"]}, {"place": torch.arange(len(ids)).double()}


@dataclass(frozen=True, kw_only=True)
class MeanMeasure(FedAvg):
    def start(self, state: Any, download: Any, info: Any) -> Any:
        return {"model": download["model"], "mean": torch.zeros_like(info.size)}

    def local_passes(self) -> Any:
        return Train(self.loss), Measure(self.average, lambda client, sums: client | {"mean": sums["loss"]})

    def average(self, client: Any, batch: Any) -> Any:
        return {"loss": self.risk(client, batch)}


@dataclass(frozen=True, kw_only=True)
class NoisyMeasure(MeanMeasure):
    """A correct method: the noise of a batch has a key."""

    needs_step_noise: ClassVar[bool] = True

    def local_passes(self) -> Any:
        return Train(self.loss), Measure(self.average, lambda client, sums: client, is_augmented=True)

    def average(self, client: Any, batch: Any) -> Any:
        return {"noise": draw_normal(batch.noise_key, "noise", torch.zeros(()))}


@dataclass(frozen=True, kw_only=True)
class NaNAttribute(FedAvg):
    """A correct method: NaN differs from itself, but does not change."""

    limit: ClassVar[float] = float("nan")
    table: ClassVar[Any] = torch.full((2,), float("nan"))


@dataclass(frozen=True, kw_only=True)
class UnknownSetting(FedAvg):
    unsupported_settings: ClassVar[tuple[str, ...]] = ("momentum", "weight_decays")


@pytest.mark.parametrize(
    ("algorithm", "check", "sentence"),
    [
        (SelfMomentum(), checks.check_statelessness, "SelfMomentum: 'self.speed' changes while clients train"),
        (NetMomentum(), checks.check_statelessness, "NetMomentum: 'self.net.speed' changes while clients train"),
        (NetMomentum(), checks.check_resuming, "a resumed run differs from an uninterrupted run (server, model, "),
        (CachedDraw(), checks.check_hooks, "draws random numbers from PyTorch's global generator"),
        (CohortSize(), checks.check_send, "and with ids [0]: count: differs by 7)"),
        (PlaceInCohort(), checks.check_send, "and with ids [1]: place: differs by 1)"),
        (MeanMeasure(), checks.check_measure_passes, "differ from those over all samples (loss: differs by 1."),
        (
            UnknownSetting(),
            checks.check_names,
            "UnknownSetting.unsupported_settings: 'weight_decays' is not a key of the section federation. Did you mean "
            "'weight_decay'?",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, FedAvg) else None,
)
def test_check_detects_fault(algorithm: FedAvg, check: testing.Check, sentence: str) -> None:
    DRAWS.clear()
    (message,) = check(algorithm)
    assert sentence in message


def test_check_accepts_nan_and_noise_of_augmented_measure_pass() -> None:
    testing.make_trial(NoisyMeasure()).run(1)
    assert checks.check_measure_passes(NoisyMeasure()) == []
    assert checks.check_statelessness(NaNAttribute()) == []


@dataclass(frozen=True, kw_only=True)
class Changes(FedAvg):
    """Clients upload the change of the model, also of its running statistics."""

    def start(self, state: Any, download: Any, info: Any) -> Any:
        return {"model": download["model"], "old": download["model"]}

    def upload(self, client: Any) -> Any:
        return {"change": client["model"] - client["old"]}

    def aggregate(self, server: Any, uploads: Any) -> Any:
        return {"model": server["model"] + uploads.mean("change")}


@dataclass(frozen=True, kw_only=True)
class Codes(FedAvg):
    """Clients upload 8-bit codes, and a scale for each tensor."""

    def upload(self, client: Any) -> Any:
        scales = client["model"].map(lambda value: value.abs().amax() / 127 + 1e-8)
        codes = Tensors((name, (value / scales[name]).round().char()) for name, value in client["model"].items())
        return {"codes": codes, "scales": scales}

    def aggregate(self, server: Any, uploads: Any) -> Any:
        total = server["model"].zeros()
        for _, weight, upload in uploads:
            total = total + weight * Tensors(
                (name, value * upload["scales"][name]) for name, value in upload["codes"].items()
            )
        return {"model": total}


@pytest.mark.parametrize("algorithm", [Changes(), Codes()], ids=lambda algorithm: type(algorithm).__name__)
def test_uploads_in_other_forms_pass_batch_norm_check(algorithm: FedAvg) -> None:
    assert checks.check_batch_normalization(algorithm) == []
