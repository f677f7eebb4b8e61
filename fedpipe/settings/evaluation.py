"""The section `evaluation`: which model is tested on which samples, and when."""

from __future__ import annotations

from pydantic import (
    Field,
    field_validator,
)

from fedpipe.settings.base import Protocol, Section, require_unique


class Evaluation(Section):
    """Models, test sets and rounds of the evaluation (see docs/protocols.md)."""

    protocols: tuple[Protocol, ...] = Field(
        ("global-on-global", "personal-on-local"),
        min_length=1,
        description="MODEL-on-TEST. global: the server's model. personal: all clients, after they received the new "
        "server state and before they train. trained: this round's participants, after training. kept: all clients, "
        "each as last trained, or initial. finetuned: all clients, a copy after finetune_epochs of training. "
        "prototype: the personal model with the nearest class prototype. on-train: on the client's training samples "
        "without augmentation, for its training loss.",
    )
    every: int = Field(1, ge=1, description="Evaluate after every k-th round.")
    finetune_epochs: int = Field(1, ge=1, description="Epochs of the finetuned protocols.")

    _require_unique_values = field_validator("protocols")(require_unique)
