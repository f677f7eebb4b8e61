"""Values that a key of the section `report` can have. Reading a plan needs them without pydantic."""

from __future__ import annotations

from typing import Literal

ReportedRound = Literal["last", "best", "mean-last"]
Average = Literal["sample", "client"]
Statistic = Literal[
    "client_std",
    "worst_tenth",
    "lowest",
    "macro_f1",
    "balanced_accuracy",
    "rounds_to_target",
    "bytes_to_target",
    "difference",
]
