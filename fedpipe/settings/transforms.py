"""The section `transforms`: how images are normalized and augmented."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    WithJsonSchema,
)

from fedpipe.core.errors import SettingsError
from fedpipe.settings.base import Section, to_number


def _to_list(value: Any) -> Any:
    """A number as a list of one, so that keys are the same for both."""
    number = to_number(value)
    return [number] if isinstance(number, (int, float)) and not isinstance(number, bool) else value


def _per_channel_field(**limits: float) -> tuple[Any, ...]:
    """One number, or a list of numbers."""
    number = {"type": "number", **limits}
    return BeforeValidator(_to_list), WithJsonSchema({"anyOf": [number, {"type": "array", "items": number}]})


class Transforms(Section):
    """What is done to images as they are gathered: all are normalized, those that are trained on change at random."""

    mean: Annotated[tuple[float, ...], *_per_channel_field()] = Field(
        (), description="Subtracted from pixels in [0, 1]: one number, or one a channel."
    )
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], *_per_channel_field(exclusiveMinimum=0)] = Field(
        (), description="Divided out then."
    )
    crop: int = Field(0, ge=0, description="Pixels of zeros put around before a window of the old size is cut out.")
    flip: bool = Field(False, description="Mirror left to right, every second image.")
    rotation: float = Field(0, ge=0, le=180, description="Turn by up to so many degrees either way.")
    on_test: bool = Field(False, description="Change test images too, as FedDW's code does (noisy accuracies).")

    @property
    def is_random(self) -> bool:
        """Whether anything is drawn."""
        return bool(self.crop or self.flip or self.rotation)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise a SettingsError if inputs of this shape can't be treated so."""
        for name in ("mean", "std", "crop", "flip", "rotation"):
            value = getattr(self, name)
            if value and len(shape) != 3:
                raise SettingsError(f"transforms.{name}: {value} is for images, not for inputs of shape {shape}.")
            if name in {"mean", "std"} and len(value) not in {0, 1, shape[0]}:
                counts = "one number" if shape[0] == 1 else f"one number or {shape[0]}, one a channel"
                raise SettingsError(f"transforms.{name}: {list(value)} can't be used; it should be {counts}.")
