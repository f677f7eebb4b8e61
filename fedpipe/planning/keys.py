"""The form of keys and names in a study's files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

KEY_PATTERN = r"[0-9a-f]{12}"
Key = Annotated[str, Field(pattern=f"^{KEY_PATTERN}$")]  #: of a run, partition or diagnostic
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+-[0-9a-f]{12}$")]
