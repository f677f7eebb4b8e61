"""The section `transforms`: how images are normalized and augmented."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from fedpipe.core.errors import SettingsError
from fedpipe.settings.base import Section, convert_to_number


def _convert_to_list(value: Any) -> Any:
    """Convert a number to a list of one, so that both have the same key."""
    number = convert_to_number(value)
    return [number] if isinstance(number, (int, float)) and not isinstance(number, bool) else value


def _make_number_or_list_annotations(**limits: float) -> tuple[Any, ...]:
    """One number, or a list of numbers."""
    number = {"type": "number", **limits}
    return BeforeValidator(_convert_to_list), WithJsonSchema({"anyOf": [number, {"type": "array", "items": number}]})


class Transforms(Section):
    """Normalization of all images, and random augmentation of training images."""

    mean: Annotated[tuple[float, ...], *_make_number_or_list_annotations()] = Field(
        (), description="Mean that is subtracted from pixels in [0, 1]: one number, or one per channel."
    )
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], *_make_number_or_list_annotations(exclusiveMinimum=0)] = (
        Field((), description="Standard deviation by which pixels are divided: one number, or one per channel.")
    )
    crop: int = Field(0, ge=0, description="Padding in pixels for a random crop to the original size.")
    flip: bool = Field(False, description="Random horizontal flip with probability 0.5.")
    rotation: float = Field(0, ge=0, le=180, description="Maximum random rotation in degrees, in both directions.")
    fill: Literal["black", "mean"] = Field(
        "black",
        description="Color of the padding of crops and rotations. black: 0 before normalization, like torchvision's "
        "transforms. mean: the color that is 0 after normalization.",
    )
    on_test: bool = Field(False, description="Augment test images too, like FedDW's code (noisy accuracies).")

    @property
    def is_random(self) -> bool:
        """Whether images are augmented at random."""
        return bool(self.crop or self.flip or self.rotation)

    @property
    def has_padding(self) -> bool:
        """Whether augmented images have pixels that are outside of the original image."""
        return bool(self.crop or self.rotation)

    def check_input_shape(self, shape: tuple[int, ...], has_tokens: bool = False) -> None:
        """Raise a SettingsError if inputs of this shape can't be transformed."""
        for name in ("mean", "std", "crop", "flip", "rotation"):
            is_normalization = name in {"mean", "std"}
            value = list(getattr(self, name)) if is_normalization else getattr(self, name)
            if value and len(shape) != 3:
                advice = " Numbers are used as they are, so standardize them in your file."
                raise SettingsError(
                    f"transforms.{name}: {value} is for images, but inputs have shape {shape}. Remove it."
                    f"{advice if is_normalization and not has_tokens else ''}"
                )
            if is_normalization and len(value) not in {0, 1, shape[0]}:
                counts = "one number" if shape[0] == 1 else f"one number, or {shape[0]} (one per channel)"
                raise SettingsError(f"transforms.{name}: {value} can't be used. Use {counts}.")
