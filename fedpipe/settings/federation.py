"""The section `federation`: clients, rounds, the optimizers of clients and server, learning-rate schedules."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, cast

from pydantic import (
    Field,
    model_validator,
)

from fedpipe.settings.base import Choice, Section

#: By optimizer of the server, what it takes beside a rate, with its default.
SERVER_OPTIMIZER_DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {"beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    "yogi": {"beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    "adagrad": {"beta1": 0.0, "tau": 0.001},
}


class Server(Choice):
    """How the server moves its model along the clients' mean update, which stands for a gradient."""

    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = Field(
        "sgd",
        description="sgd: FedAvg at rate 1; momentum: FedAvgM; adam, yogi, adagrad: FedAdam, FedYogi, FedAdagrad.",
    )
    learning_rate: float = Field(1.0, ge=0, description="The server's rate, eta.")
    momentum: float | None = Field(None, ge=0, lt=1, description="Share of the last step that goes on (momentum): 0.9.")
    beta1: float | None = Field(None, ge=0, lt=1, description="Of the mean update's moment: 0.9; for adagrad 0.")
    beta2: float | None = Field(None, ge=0, lt=1, description="Of its square's moment (adam, yogi): 0.99.")
    tau: float | None = Field(None, gt=0, description="Added to the root of that (adam, yogi, adagrad): 0.001.")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        raw = {name: value for name, value in raw.items() if value is not None}
        return SERVER_OPTIMIZER_DEFAULTS.get(str(raw.get("optimizer", "sgd")), {}) | raw

    @model_validator(mode="after")
    def _check_keys(self) -> Server:
        allowed_keys = ["learning_rate", *SERVER_OPTIMIZER_DEFAULTS[self.optimizer]]
        self._reject_other_keys("federation.server", "optimizer", allowed_keys)
        return self

    @property
    def is_plain_averaging(self) -> bool:
        """Whether the next model is the mean of the uploads, as without any such optimizer."""
        return self.optimizer == "sgd" and self.learning_rate == 1


#: By name, what a schedule takes beside warm-up rounds, with its default; None: it has to be given.
SCHEDULE_DEFAULTS: dict[str, dict[str, float | None]] = {
    "constant": {},
    "step": {"step_size": None, "gamma": 0.1},
    "exponential": {"gamma": None},
    "cosine": {"period": None, "minimum": 0.0},
}


class Schedule(Choice):
    """The clients' learning rate by round, as torch.optim.lr_scheduler has it by epoch; see :meth:`rate`."""

    name: Literal["constant", "step", "exponential", "cosine"] = Field(
        "constant",
        description="step: StepLR; exponential: ExponentialLR; cosine: CosineAnnealingLR, which rises again behind its "
        "period; constant: none of them.",
    )
    step_size: int | None = Field(None, ge=1, strict=True, description="Rounds from one fall to the next (step).")
    gamma: float | None = Field(None, gt=0, description="Factor of each fall (step: 0.1) or round (exponential).")
    period: int | None = Field(
        None, ge=1, strict=True, description="Rounds until the minimum is reached (cosine), T_max: federation.rounds."
    )
    minimum: float | None = Field(None, ge=0, description="The least rate (cosine), eta_min: 0.")
    warmup: int = Field(
        0, ge=0, strict=True, description="Rounds of linear warm-up before, the w-th at w/warmup of the rate."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        raw = {name: value for name, value in raw.items() if value is not None}
        defaults = SCHEDULE_DEFAULTS.get(str(raw.get("name", "constant")), {})
        return {name: value for name, value in defaults.items() if value is not None} | raw

    @model_validator(mode="after")
    def _check_keys(self) -> Schedule:
        allowed_keys = ["warmup", *SCHEDULE_DEFAULTS[self.name]]
        self._reject_other_keys("federation.schedule", "name", allowed_keys)
        for name in allowed_keys:
            if getattr(self, name) is None:
                raise ValueError(f"federation.schedule.{name}: it is missing; {self.name} needs {name}.")
        return self

    @property
    def is_constant(self) -> bool:
        """Whether every round has the same rate."""
        return self.name == "constant" and not self.warmup

    def compute_learning_rate(self, base: float, round: int) -> float:
        """The learning rate of a round, from 1, where ``base`` is that of the federation."""
        if round <= self.warmup:
            return base * round / self.warmup
        elapsed_rounds = round - 1 - self.warmup
        match self.name:
            case "step":
                return base * float(cast(float, self.gamma) ** (elapsed_rounds // cast(int, self.step_size)))
            case "exponential":
                return base * float(cast(float, self.gamma) ** elapsed_rounds)
            case "cosine":
                minimum, fraction = (
                    cast(float, self.minimum),
                    (1 + math.cos(math.pi * elapsed_rounds / cast(int, self.period))) / 2,
                )
                return minimum + (base - minimum) * fraction
        return base


class Federation(Section):  # declare a new field by `late_field`, because all others are in runs' keys
    """Who trains, how often, and with which optimizer."""

    clients: int = Field(10, ge=1, strict=True, description="Number of clients N.")
    participation: float = Field(1.0, gt=0, le=1, description="Share of clients in a round: max(1, round(p N)).")
    rounds: int = Field(
        20, ge=1, le=9999, strict=True, description="Communication rounds T; more rounds continue a shorter run."
    )
    local_epochs: int | None = Field(
        1, ge=1, description="Passes over a client's training data in a round; null with local_steps."
    )
    local_steps: int | None = Field(
        None,
        ge=1,
        strict=True,
        description="In place of local_epochs: steps of every client in a round, on batches in the order of epochs.",
    )
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"] = Field(
        32, description="Samples in a training step, the last partial batch is kept; or full: all that a client has."
    )
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="Started afresh at every client in every round.")
    learning_rate: float = Field(
        0.05, ge=0, description="The clients' rate, in all steps of a round; `schedule` changes it from round to round."
    )
    schedule: Schedule = Field(
        Schedule(), description="The learning rate by round, as `{name: cosine, period: 100, warmup: 5}`."
    )
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="Gradients of larger norm, over all that a pass trains, are scaled down to it, as by "
        "torch.nn.utils.clip_grad_norm_; before weight decay and momentum.",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="Heavy-ball momentum (sgd).")
    weight_decay: float = Field(0.0, ge=0, description="Added to the gradient as weight_decay * parameter.")
    weighting: Literal["count", "uniform"] = Field(
        "count", description="Weight of a client in averages: its training samples, or the same for all."
    )
    buffers: Literal["average", "keep", "drop"] = Field(
        "average",
        description="Running statistics of BatchNorm: averaged with the model, kept at each client (the global model "
        "then has none and is not measured), or none (every batch is normalized by its own, in evaluation too).",
    )
    server: Server = Field(Server(), description="The server's optimizer, where the method averages models.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of models and data.")
    precision: Literal["full", "bfloat16"] = Field(
        "full",
        description="Of the network's products and convolutions in training: that of dtype, or bfloat16 (autocast). "
        "Weights, their updates, losses and evaluation are of dtype in any case.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_epochs_or_steps(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        epochs, steps = raw.get("local_epochs", 1), raw.get("local_steps")
        if epochs is None and steps is None:
            raise ValueError("federation.local_epochs: null leaves no training; it should be given, or local_steps.")
        if steps is not None and raw.get("local_epochs") is not None:
            raise ValueError(
                f"federation.local_steps: {steps} can't be used beside local_epochs: {epochs}, since both say how long "
                "a client trains; one of them should be null."
            )
        return raw if steps is None else raw | {"local_epochs": None}

    @model_validator(mode="after")
    def _check_schedule_minimum(self) -> Federation:
        minimum = self.schedule.minimum
        if minimum is not None and minimum > self.learning_rate:
            raise ValueError(
                f"federation.schedule.minimum: {minimum} is more than federation.learning_rate ({self.learning_rate}); "
                "it should be less."
            )
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> Federation:
        if self.precision == "bfloat16" and self.dtype != "float32":
            raise ValueError(
                f"federation.precision: bfloat16 is for models of float32, not of {self.dtype}; it should be full, or "
                "federation.dtype float32."
            )
        return self

    def with_round_learning_rate(self, number: int) -> Federation:
        """The same settings with the learning rate of a round."""
        if self.schedule.is_constant:
            return self
        learning_rate = self.schedule.compute_learning_rate(self.learning_rate, number)
        return self.model_copy(update={"learning_rate": learning_rate, "schedule": Schedule()})

    def count_epochs(self, samples: int) -> float:
        """How many passes over its data a client of so many samples makes in a round; no whole number by steps."""
        if self.local_epochs is not None:
            return self.local_epochs
        size = samples if self.batch_size == "full" else self.batch_size
        return cast(int, self.local_steps) / max(1, math.ceil(samples / max(1, size)))

    @property
    def compute_dtype(self) -> str:
        """The least precise numbers that it computes with."""
        return self.dtype if self.precision == "full" else self.precision

    @model_validator(mode="after")
    def _check_momentum(self) -> Federation:
        if self.optimizer == "adam" and self.momentum:
            raise ValueError(
                f"federation.momentum: {self.momentum} has no meaning for adam; it should be 0, or the optimizer sgd."
            )
        return self

    @property
    def participants(self) -> int:
        """Number of clients in a round, m."""
        return max(1, round(self.participation * self.clients))
