"""The section `evaluation`: which model is tested on which samples, and when."""

from __future__ import annotations

from pydantic import (
    Field,
    field_validator,
)

from fedpipe.settings.base import Protocol, Section, require_unique


class Evaluation(Section):
    """Which model is measured on which test set, and when (docs/protocols.md tells of protocols)."""

    protocols: tuple[Protocol, ...] = Field(
        ("global-on-global", "personal-on-local"),
        min_length=1,
        description="MODEL-on-TEST. global: the server's model; personal: all clients, after they took the new server "
        "state and before they train; trained: this round's participants, right after training; kept: all clients, "
        "as each was trained last, or initially; finetuned: all clients, a copy after finetune_epochs of training; "
        "prototype: the personal model, read by the nearest class prototype. On train: on the samples that the client "
        "trains on, as they are, for its training loss.",
    )
    every: int = Field(1, ge=1, description="Measure after every k-th round.")
    finetune_epochs: int = Field(1, ge=1, description="Epochs of the finetuned protocols.")

    _require_unique_values = field_validator("protocols")(require_unique)
