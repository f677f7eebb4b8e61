"""The sections `execution` and `artifacts`: jobs, and the states that they keep."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from fedpipe.settings.base import Section, require_unique_values


class Execution(Section):
    """Size and device of jobs. Only device and stack can change a result, by rounding."""

    rounds_per_job: int | None = Field(None, ge=1, description="Rounds per job. null: all.")
    clients_per_job: int | None = Field(
        None, ge=1, description="Participants per job, for the DAG of single rounds (needs rounds_per_job: 1)."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one.")
    stack: int | Literal["auto"] = Field(
        "auto",
        description="Clients that train in one call. 1: one client at a time (the loop). n: a stack of n. "
        "auto: the loop on a CPU and a stack of up to 32 on a GPU.",
    )
    graphs: bool = Field(
        True,
        description="If true, a GPU records a stack's steps as CUDA graphs and replays them, with the same bits. This "
        "trains small models up to 13 times as fast, and can need twice the memory.",
    )
    callbacks: tuple[str, ...] = Field(
        (),
        description="Callbacks that monitor runs: dvclive, mlflow, tensorboard or wandb (docs/trackers.md), or custom "
        "classes such as own.Board (docs/callbacks.md).",
    )

    _require_unique_callbacks = field_validator("callbacks")(require_unique_values)

    @field_validator("stack")
    @classmethod
    def _check_stack(cls, stack: int | str) -> int | str:
        if isinstance(stack, int) and stack < 1:
            raise ValueError(f"{stack} can't be used. Use at least 1.")
        return stack

    @model_validator(mode="after")
    def _require_one_round_per_client_job(self) -> Execution:
        if self.clients_per_job is not None and self.rounds_per_job != 1:
            raise ValueError(
                f"execution.clients_per_job: {self.clients_per_job} can't be used with execution.rounds_per_job: "
                f"{self.rounds_per_job or 'null'}. Set execution.rounds_per_job to 1."
            )
        return self


class Artifacts(Section):
    """States that every run keeps."""

    keep_models: Literal["all", "last"] | Annotated[int, Field(ge=1)] = Field(
        "all",
        description="Rounds whose states are kept. `all`: every round. `last`: the last two. A number K: every K-th "
        "and the last two.",
    )


def is_state_retained(round_number: int, keep_models: str | int) -> bool:
    """Whether `artifacts.keep_models` keeps a round's states after later rounds."""
    return keep_models == "all" or (isinstance(keep_models, int) and round_number % keep_models == 0)
