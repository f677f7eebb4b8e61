"""The section `diagnostics`: analyses of stored states."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
)

from fedpipe.core.errors import suggest_name
from fedpipe.settings.base import Label, Section, require_unique


class _Diagnostic(Section):
    """What is looked at in stored states, and where; it changes no run, and its change runs no training."""

    rounds: tuple[Annotated[int, Field(ge=1, strict=True)] | Literal["last"], ...] = Field(
        ("last",), min_length=1, description="After which rounds; the states of each and of the one before it stay."
    )
    algorithms: tuple[Label, ...] | None = Field(None, min_length=1, description="Of which methods; all by default.")
    seeds: tuple[int, ...] | None = Field(None, min_length=1, description="Of which seeds; all by default.")
    where: dict[str, Any] = Field(
        default_factory=dict,
        description="Of which points of the grid: a value, or a list of values, of any name of study.grid.",
    )

    _require_unique_values = field_validator("rounds", "algorithms", "seeds", "models", "clients", check_fields=False)(
        lambda values: values and require_unique(values)
    )

    @property
    def settings(self) -> dict[str, Any]:
        """What is looked at, without where."""
        return self.model_dump(mode="json", exclude=set(_Diagnostic.model_fields))


class HeadNorms(_Diagnostic):
    """Norms of the rows of heads, beside the class shares of who owns them."""

    kind: Literal["head-norms"]
    models: tuple[Literal["received", "trained", "finetuned", "class", "global"], ...] = Field(
        ("trained",),
        min_length=1,
        description="trained: the round's participants', right after training; received, finetuned: all clients', as "
        "the next round begins; class: the server's models of classes (cwfedavg); global: the server's model.",
    )
    finetune_epochs: int = Field(1, ge=1, description="Of the fine-tuned ones.")


class Features(_Diagnostic):
    """Features of global test samples and the rows of the head, in two dimensions by t-SNE."""

    kind: Literal["features"]
    samples: int = Field(500, ge=3, description="At most so many of the global test set, drawn once.")
    perplexity: float = Field(30, gt=0, description="Of t-SNE.")
    seed: int = Field(0, ge=0, description="Of samples and of t-SNE.")


class Surface(_Diagnostic):
    """The training loss around the global model, in two filter-normalized random directions."""

    kind: Literal["surface"]
    points: int = Field(21, ge=3, description="Of the grid, along each direction; an odd number has the model itself.")
    radius: float = Field(1.0, gt=0, description="Of the grid, where 1 is as long as the model's own filters.")
    samples: int | None = Field(1000, ge=1, description="At most so many training samples, drawn once; null: all.")
    seed: int = Field(0, ge=0, description="Of samples and directions, the same for all runs.")


class Gradients(_Diagnostic):
    """Norms of each layer's gradient: of each client on its data, and of the global model on all."""

    kind: Literal["gradients"]


class Locals(_Diagnostic):
    """The class shares that the head's norms tell, by step of the participants' training in the round."""

    kind: Literal["locals"]
    clients: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="Of these participants; all by default."
    )


Diagnostic = HeadNorms | Features | Surface | Gradients | Locals
DIAGNOSTIC_KINDS = tuple(get_args(diagnostic.model_fields["kind"].annotation)[0] for diagnostic in get_args(Diagnostic))


def get_diagnostic_kind(value: Any) -> str:
    """Which kind an entry of `diagnostics` is of."""
    return str(value.get("kind")) if isinstance(value, dict) else str(getattr(value, "kind", value))


def _check_diagnostic_kinds(entries: Any) -> Any:
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, _Diagnostic):
            continue
        if not isinstance(entry, dict) or "kind" not in entry:
            raise ValueError(
                f"diagnostics.{name}: its kind is missing; it should be one of: {', '.join(DIAGNOSTIC_KINDS)}."
            )
        if entry["kind"] not in DIAGNOSTIC_KINDS:
            hint = suggest_name(str(entry["kind"]), DIAGNOSTIC_KINDS)
            raise ValueError(f"diagnostics.{name}.kind: there is no diagnostic '{entry['kind']}'; {hint}")
    return entries


#: Entries of `diagnostics`, by names of one's own; what else an entry may hold follows from its kind.
DiagnosticSections = Annotated[
    dict[
        Label,
        Annotated[
            Annotated[HeadNorms, Tag("head-norms")]
            | Annotated[Features, Tag("features")]
            | Annotated[Surface, Tag("surface")]
            | Annotated[Gradients, Tag("gradients")]
            | Annotated[Locals, Tag("locals")],
            Discriminator(get_diagnostic_kind),
        ],
    ],
    BeforeValidator(_check_diagnostic_kinds),
    Field(default_factory=dict, description="What is looked at in stored states, by names of your own."),
]
