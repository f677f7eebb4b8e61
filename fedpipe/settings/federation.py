"""The section `federation`: clients, rounds, the optimizers of clients and server, learning-rate schedules."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, field_validator, model_validator

from fedpipe.core import rng
from fedpipe.core.errors import SettingsError
from fedpipe.settings.base import Choice, ClientNumber, Section, check_and_sort_clients, make_field_omitted_at_default
from fedpipe.settings.drift import Drift


class Server(Choice):
    """The server's optimizer, whose gradient is the clients' mean update."""

    section = "federation.server"
    selector = "optimizer"
    choices: ClassVar = {
        "sgd": {},
        "momentum": {"momentum": 0.9},
        "adam": {"beta1": 0.9, "beta2": 0.99, "tau": 0.001},
        "yogi": {"beta1": 0.9, "beta2": 0.99, "tau": 0.001},
        "adagrad": {"beta1": 0.0, "tau": 0.001},
    }

    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = Field(
        "sgd",
        description="sgd: FedAvg at rate 1. momentum: FedAvgM. adam, yogi, adagrad: FedAdam, FedYogi, FedAdagrad.",
    )
    learning_rate: float = Field(1.0, ge=0, description="The server's learning rate, eta.")
    momentum: float | None = Field(None, ge=0, lt=1, description="Momentum (momentum). Default 0.9.")
    beta1: float | None = Field(None, ge=0, lt=1, description="Decay of the first moment. Default 0.9, for adagrad 0.")
    beta2: float | None = Field(None, ge=0, lt=1, description="Decay of the second moment (adam, yogi). Default 0.99.")
    tau: float | None = Field(
        None, gt=0, description="Added to the root of the second moment (adam, yogi, adagrad). Default 0.001."
    )

    @property
    def is_plain_averaging(self) -> bool:
        """Whether the next model is the mean of the uploads, as without an optimizer."""
        return self.optimizer == "sgd" and self.learning_rate == 1


class Schedule(Choice):
    """The clients' learning rate by round, like torch.optim.lr_scheduler by epoch (:meth:`compute_learning_rate`)."""

    section = "federation.schedule"
    selector = "name"
    choices: ClassVar = {
        "constant": {},
        "step": {"step_size": ..., "gamma": 0.1},
        "exponential": {"gamma": ...},
        "cosine": {"period": ..., "minimum": 0.0},
    }

    name: Literal["constant", "step", "exponential", "cosine"] = Field(
        "constant",
        description="step: StepLR. exponential: ExponentialLR. cosine: CosineAnnealingLR. The rate rises again after "
        "`period`. constant: no schedule.",
    )
    step_size: int | None = Field(None, ge=1, strict=True, description="Rounds between two decays (step).")
    gamma: float | None = Field(
        None, gt=0, description="Factor of each decay (step, default 0.1) or round (exponential)."
    )
    period: int | None = Field(None, ge=1, strict=True, description="Rounds until the minimum, T_max. cosine needs it.")
    minimum: float | None = Field(None, ge=0, description="Minimum rate (cosine), eta_min. Default 0.")
    warmup: int = Field(
        0,
        ge=0,
        strict=True,
        description="Rounds of linear warm-up before the schedule. The w-th has w/warmup of the rate.",
    )

    @property
    def is_constant(self) -> bool:
        """Whether every round has the same rate."""
        return self.name == "constant" and not self.warmup

    def compute_learning_rate(self, base: float, round_number: int) -> float:
        """Learning rate of a round (from 1), given the federation's rate ``base``."""
        if round_number <= self.warmup:
            return base * round_number / self.warmup
        elapsed_rounds = round_number - 1 - self.warmup
        match self.name:
            case "step":
                return base * float(cast(float, self.gamma) ** (elapsed_rounds // cast(int, self.step_size)))
            case "exponential":
                return base * float(cast(float, self.gamma) ** elapsed_rounds)
            case "cosine":
                minimum = cast(float, self.minimum)
                fraction = (1 + math.cos(math.pi * elapsed_rounds / cast(int, self.period))) / 2
                return minimum + (base - minimum) * fraction
        return base


HeldOut = Annotated[float, Field(ge=0, lt=1)] | tuple[ClientNumber, ...]


# Declare a new field by `make_field_omitted_at_default`, because all others are in runs' keys.
class Federation(Section):
    """Clients, rounds, local training and aggregation."""

    clients: int = Field(
        10,
        ge=1,
        strict=True,
        description="Number of clients N. With `partition: {scheme: natural}`, the default is all clients of the data.",
    )
    participation: float = Field(
        1.0, gt=0, le=1, description="Fraction p of clients in a round: max(1, round(p N)) clients."
    )
    rounds: int = Field(
        20, ge=1, le=9999, strict=True, description="Communication rounds T. More rounds continue a shorter run."
    )
    local_epochs: int | None = Field(
        1,
        ge=1,
        description="Epochs over a client's training data in a round. null with local_steps. The key has no effect on "
        "fedrep, which has head_epochs and body_epochs.",
    )
    local_steps: int | None = Field(
        None, ge=1, strict=True, description="Steps of every client in a round, instead of local_epochs."
    )
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"] = Field(
        32, description="Samples per training step, including a last partial batch. full: all samples of the client."
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="The clients' optimizer, restarted in every round. adamw: Adam with decoupled weight decay."
    )
    learning_rate: float = Field(
        0.05, ge=0, description="The clients' learning rate. `schedule` changes it from round to round."
    )
    schedule: Schedule = Field(
        Schedule(), description="Learning-rate schedule by round, such as `{name: cosine, period: 100, warmup: 5}`."
    )
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="Maximum norm of the gradient of all trained parameters (torch.nn.utils.clip_grad_norm_), before "
        "weight decay and momentum.",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="Heavy-ball momentum (sgd).")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Weight decay: weight_decay * parameter is added to the gradient. With adamw, each step multiplies "
        "the parameters by 1 - learning_rate * weight_decay instead.",
    )
    weighting: Literal["count", "uniform"] = Field(
        "count",
        description="Weight of a client in averages. count: its number of training samples. uniform: equal weights. "
        "The key has no effect on fedamp, fedas (except on BatchNorm), fedcm, feddual, feddyn, fedfomo, fedproto, "
        "fedpvr and scaffold, which define their weights, and on local, which averages nothing.",
    )
    buffers: Literal["average", "keep", "drop"] = Field(
        "average",
        description="BatchNorm's running statistics. average: averaged with the model. keep: each client has its own, "
        "so that the global model is not evaluated. drop: batches are normalized by their own statistics.",
    )
    server: Server = Field(Server(), description="The server's optimizer, if the method averages models.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of models and data.")
    precision: Literal["full", "bfloat16"] = Field(
        "full",
        description="Precision of products and convolutions in training. full: that of dtype. bfloat16: autocast. "
        "Weights, updates, losses and evaluation always have dtype.",
    )
    held_out: HeldOut = make_field_omitted_at_default(
        0.0,
        description="New clients, which never participate and are evaluated: a fraction of the clients, drawn with the "
        "study's seed, or a list of their numbers or names. `participation` is a fraction of the others. "
        "`report.clients` shows them.",
    )
    drift: Drift | None = make_field_omitted_at_default(
        None,
        description="Concept drift: from a round on, some clients have other classes or rotated images in all their "
        "samples, such as `{round: 10, clients: 0.5}`. The global test set does not drift.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_epochs_or_steps(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        epochs, steps = raw.get("local_epochs", 1), raw.get("local_steps")
        if epochs is None and steps is None:
            raise ValueError("federation.local_epochs: null means no training. Use at least 1, or set local_steps.")
        if steps is not None and raw.get("local_epochs") is not None:
            raise ValueError(
                f"federation.local_steps: {steps} can't be used with local_epochs: {epochs}. Set one of them to null."
            )
        return raw if steps is None else raw | {"local_epochs": None}

    @model_validator(mode="after")
    def _check_keys_together(self) -> Federation:
        minimum = self.schedule.minimum
        if minimum is not None and minimum > self.learning_rate:
            raise ValueError(
                f"federation.schedule.minimum: {minimum} is more than federation.learning_rate. "
                f"Use at most {self.learning_rate}."
            )
        if self.precision == "bfloat16" and self.dtype != "float32":
            raise ValueError(
                f"federation.precision: bfloat16 can't be used with federation.dtype {self.dtype}. Use full, or "
                "federation.dtype float32."
            )
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(
                f"federation.momentum: {self.momentum} can't be used with {self.optimizer}. Use 0, or optimizer sgd."
            )
        self._check_held_out()
        if self.drift is not None:
            self.drift.check_clients(self.clients)
        return self

    def _check_held_out(self) -> None:
        held_out, clients, problem = self.held_out, self.clients, ""
        if isinstance(held_out, tuple) and held_out[-1] >= clients:
            problem = f"{list(held_out)} has {held_out[-1]}, but there are {clients} clients. Use 0 to {clients - 1}"
        elif held_out and not self.num_held_out_clients:
            problem = f"{held_out} of {clients} clients is less than one client. Use a larger fraction, or 0"
        elif self.num_held_out_clients >= clients:
            value = list(held_out) if isinstance(held_out, tuple) else held_out
            problem = f"{value} of {clients} clients leaves no client that trains. Use fewer"
        if problem:
            raise ValueError(f"federation.held_out: {problem}.")

    @field_validator("held_out")
    @classmethod
    def _sort_held_out_clients(cls, held_out: float | tuple[int, ...]) -> float | tuple[int, ...]:
        return check_and_sort_clients(held_out, "Use 0, or list at least one.")

    def with_round_learning_rate(self, round_number: int) -> Federation:
        """Copy with the learning rate of a round."""
        if self.schedule.is_constant:
            return self
        learning_rate = self.schedule.compute_learning_rate(self.learning_rate, round_number)
        return self.model_copy(update={"learning_rate": learning_rate, "schedule": Schedule()})

    def require_rate_of_finetuning(self, round_number: int) -> None:
        """Reject a schedule with which models do not change if they are finetuned after a round."""
        if self.learning_rate and not self.with_round_learning_rate(round_number + 1).learning_rate:
            raise SettingsError(
                f"federation.schedule: after round {round_number} the learning rate is 0, so finetuned models would "
                "not change. Use a minimum above 0, or another period."
            )

    def count_epochs(self, num_samples: int, steps: int | None = None) -> float:
        """Epochs of a client in a round, given its number of samples. It may be a fraction with local_steps.

        ``steps`` are those of an algorithm that counts the steps of each client.
        """
        if self.local_epochs is not None and steps is None:
            return self.local_epochs
        size = num_samples if self.batch_size == "full" else self.batch_size
        return cast(int, steps or self.local_steps) / max(1, math.ceil(num_samples / max(1, size)))

    @property
    def compute_dtype(self) -> str:
        """Lowest precision of its computations."""
        return self.dtype if self.precision == "full" else self.precision

    @property
    def num_held_out_clients(self) -> int:
        """Number of new clients."""
        return len(self.held_out) if isinstance(self.held_out, tuple) else round(self.held_out * self.clients)

    @property
    def held_out_note(self) -> str:
        """Sentence about clients that are held out, for captions. Empty if there are none."""
        if not (count := self.num_held_out_clients):
            return ""
        words = "is held out, so it never trains" if count == 1 else "are held out, so they never train"
        return f"{count} of {self.clients} clients {words}."

    def draw_held_out_clients(self, seed: int) -> tuple[int, ...]:
        """Draw the new clients of a run, in ascending order. Those of a smaller fraction are among them."""
        if isinstance(self.held_out, tuple):
            return self.held_out
        order = rng.make_generator(seed, "held-out").permutation(self.clients)
        return tuple(sorted(order[: self.num_held_out_clients].tolist()))

    def draw_participants(self, seed: int, round_number: int) -> list[int]:
        """Draw the participants of a round in ascending order, without held-out clients."""
        draw = rng.make_generator(seed, "participants", round_number)
        return sorted(draw.choice(self.clients, self.participants, replace=False).tolist())

    def exclude_held_out_clients(self, extra: int = 0) -> Federation:
        """Copy for an algorithm, whose clients are those that are not held out, and ``extra`` ones."""
        num_clients = self.clients - self.num_held_out_clients + extra
        return self.model_copy(update={"clients": num_clients, "held_out": 0.0, "drift": None})

    @property
    def participants(self) -> int:
        """Number of clients in a round, m."""
        return max(1, round(self.participation * (self.clients - self.num_held_out_clients)))
