"""Concept drift (`federation.drift`): a change of the classes or images of some clients at a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from fedpipe.core import rng
from fedpipe.core.errors import SettingsError
from fedpipe.settings.base import NUMBER_OR_NAME, Choice, ClientNumber, check_and_sort_clients

DEFAULT_ANGLE = 180

Class = Annotated[int, Field(ge=0)]
DriftingClients = Annotated[float, Field(gt=0, le=1)] | tuple[ClientNumber, ...]


class Drift(Choice):
    """A concept drift: from a round on, some clients have the new concept in all of their samples.

    A drift of some clients is the problem of FedDrift (Jothimurugesan et al., Federated Learning under Distributed
    Concept Drift, AISTATS 2023). The rotations are those of the clusters of IFCA (Ghosh et al., An Efficient Framework
    for Clustered Federated Learning, NeurIPS 2020).
    """

    section = "federation.drift"
    selector = "kind"
    choices: ClassVar = {"labels": {"label_map": None}, "rotation": {"angle": DEFAULT_ANGLE}}

    round: int = Field(ge=1, strict=True, description="First round with the new concept.")
    clients: DriftingClients = Field(
        0.5,
        description="Clients that drift: a fraction of all clients, drawn with the study's seed, or a list of their "
        "numbers or names.",
    )
    kind: Literal["labels", "rotation"] = Field(
        "labels", description="labels: classes are permuted. rotation: images are rotated."
    )
    label_map: dict[Class, Annotated[Class, NUMBER_OR_NAME]] | None = Field(
        None,
        description="New class of each class that changes (labels), such as `{1: 2, 2: 1}`, or by names `{cat: dog, "
        "dog: cat}`. By default a random cycle of all classes, drawn with the study's seed.",
    )
    angle: Literal[90, 180, 270] | None = Field(
        None, description=f"Counterclockwise angle in degrees (rotation). Default {DEFAULT_ANGLE}."
    )

    @field_validator("clients")
    @classmethod
    def _sort_clients(cls, clients: float | tuple[int, ...]) -> float | tuple[int, ...]:
        return check_and_sort_clients(clients, "List at least one, or remove federation.drift.")

    @field_validator("label_map")
    @classmethod
    def _check_and_sort_label_map(cls, label_map: dict[int, int] | None) -> dict[int, int] | None:
        """Require a permutation. Sort the classes that change, so that every spelling has the same key."""
        if label_map is None:
            return None
        if sorted(label_map) != sorted(label_map.values()):
            raise ValueError(
                f"{label_map} is not a permutation. Use each class of the map once as a new class, such as "
                "{1: 2, 2: 1}."
            )
        changes = {old: new for old, new in sorted(label_map.items()) if old != new}
        if not changes:
            raise ValueError(f"{label_map} changes no class. Use another map, such as {{1: 2, 2: 1}}.")
        return changes

    def check_clients(self, num_clients: int) -> None:
        """Raise a ValueError if ``clients`` has a number that does not exist, or is less than one client."""
        if isinstance(self.clients, tuple):
            if self.clients[-1] >= num_clients:
                raise ValueError(
                    f"federation.drift.clients: {list(self.clients)} has {self.clients[-1]}, but there are "
                    f"{num_clients} clients. Use 0 to {num_clients - 1}."
                )
        elif not self._count_drifting_clients(num_clients):
            raise ValueError(
                f"federation.drift.clients: {self.clients} of {num_clients} clients is less than one client. Use a "
                "larger fraction, or remove federation.drift."
            )

    def check_rounds_and_samples(self, rounds: int, shape: tuple[int, ...], num_classes: int) -> None:
        """Raise a SettingsError if samples of this shape, or the classes, can't have the new concept."""
        if self.round > rounds:
            raise SettingsError(
                f"federation.drift.round: {self.round} is after the last round. Use at most {rounds}, or more "
                "federation.rounds."
            )
        if self.label_map and (largest := max(self.label_map)) >= num_classes:
            raise SettingsError(
                f"federation.drift.label_map: {self.label_map} has the class {largest}, but there are {num_classes} "
                f"classes. Use 0 to {num_classes - 1}."
            )
        if self.angle and len(shape) != 3:
            raise SettingsError(
                f"federation.drift.kind: rotation is for images, but inputs have shape {shape}. Use labels."
            )
        if self.angle in {90, 270} and shape[-1] != shape[-2]:
            raise SettingsError(
                f"federation.drift.angle: {self.angle} is for square images, but inputs have shape {shape}. Use 180."
            )

    def draw_clients(self, seed: int, num_clients: int) -> tuple[int, ...]:
        """Draw the clients of a run that drift, in ascending order. Those of a smaller fraction are among them."""
        if isinstance(self.clients, tuple):
            return self.clients
        order = rng.make_generator(seed, "drift clients").permutation(num_clients)
        return tuple(sorted(order[: self._count_drifting_clients(num_clients)].tolist()))

    def draw_label_map(self, seed: int, num_classes: int) -> list[int]:
        """Draw the new class of each class (labels). A drawn map is one cycle, so it changes every class."""
        if self.label_map is not None:
            return [self.label_map.get(label, label) for label in range(num_classes)]
        cycle = rng.make_generator(seed, "drift labels").permutation(num_classes).tolist()
        new_classes = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        return [new_classes[label] for label in range(num_classes)]

    def describe(self, num_clients: int, class_names: Sequence[str]) -> str:
        """Describe the drift in a federation of so many clients. A sentence for captions."""
        count = self._count_drifting_clients(num_clients)
        change = f"images rotated by {self.angle} degrees" if self.angle else "permuted classes"
        if self.label_map:
            pairs = [f"{class_names[old]} to {class_names[new]}" for old, new in self.label_map.items()]
            change += f" ({', '.join(pairs)})"
        verb = "has" if count == 1 else "have"
        return f"From round {self.round} on, {count} of {num_clients} clients {verb} a concept drift: {change}."

    def _count_drifting_clients(self, num_clients: int) -> int:
        return len(self.clients) if isinstance(self.clients, tuple) else round(self.clients * num_clients)
