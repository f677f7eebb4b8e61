"""The section `diagnostics`: analyses of stored states."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator
from typing_extensions import override

from fedpipe.core.errors import suggest_name
from fedpipe.settings.base import Label, Section, require_unique_values


class _Diagnostic(Section):
    """Base of all diagnostics of stored states. They change no run, and changing them trains nothing."""

    needs_linear_head: ClassVar[bool] = False  #: whether it reads the weight of the last layer

    rounds: tuple[Annotated[int, Field(ge=1, strict=True)] | Literal["last"], ...] = Field(
        ("last",), min_length=1, description="Rounds to analyze. The states of each and of the previous round are kept."
    )
    algorithms: tuple[Label, ...] | None = Field(None, min_length=1, description="Methods to analyze. By default all.")
    seeds: tuple[int, ...] | None = Field(None, min_length=1, description="Seeds to analyze. By default all.")
    where: dict[str, Any] = Field(
        default_factory=dict,
        description="Points of the grid to analyze: a value or a list of values by name of study.grid.",
    )

    _require_unique_values = field_validator("rounds", "algorithms", "seeds", "models", "clients", check_fields=False)(
        lambda values: values and require_unique_values(values)
    )

    @property
    def needs_global_model(self) -> bool:
        """Whether a method without a global model can't be analyzed."""
        return False

    @property
    def settings(self) -> dict[str, Any]:
        """Settings without the selection of runs."""
        return self.model_dump(mode="json", exclude=set(_Diagnostic.model_fields))


class HeadNorms(_Diagnostic):
    """Norms of the rows of heads, next to the class fractions of their clients."""

    needs_linear_head: ClassVar[bool] = True
    kind: Literal["head-norms"]
    models: tuple[Literal["received", "trained", "finetuned", "class", "global"], ...] = Field(
        ("trained",),
        min_length=1,
        description="trained: the participants' models after training. received and finetuned: all clients' models at "
        "the start of the next round. class: the server's class models (cwfedavg). global: the server's model.",
    )
    finetune_epochs: int = Field(1, ge=1, description="Epochs of the finetuned models.")

    @property
    @override
    def needs_global_model(self) -> bool:
        return "global" in self.models


class Features(_Diagnostic):
    """Features of global test samples and the rows of the head, in two dimensions by t-SNE."""

    needs_linear_head: ClassVar[bool] = True
    kind: Literal["features"]
    samples: int = Field(500, ge=3, description="Maximum number of global test samples, drawn once.")
    perplexity: float = Field(30, gt=0, description="t-SNE perplexity.")
    seed: int = Field(0, ge=0, description="Seed of the samples and of t-SNE.")

    @property
    @override
    def needs_global_model(self) -> bool:
        return True


class Surface(_Diagnostic):
    """The training loss around the global model, in two filter-normalized random directions."""

    kind: Literal["surface"]
    points: int = Field(
        21, ge=3, description="Grid points along each direction. An odd number includes the model itself."
    )
    radius: float = Field(1.0, gt=0, description="Radius of the grid. 1 is the norm of the model's filters.")
    samples: int | None = Field(1000, ge=1, description="Maximum number of training samples, drawn once. null: all.")
    seed: int = Field(0, ge=0, description="Seed of the samples and directions, the same for all runs.")

    @property
    @override
    def needs_global_model(self) -> bool:
        return True


class Gradients(_Diagnostic):
    """Norms of each layer's gradient, for each client on its data and for the global model on all data."""

    kind: Literal["gradients"]


class Locals(_Diagnostic):
    """Class fractions estimated from the head's norms, by step of the participants' training in the round."""

    needs_linear_head: ClassVar[bool] = True
    kind: Literal["locals"]
    clients: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="Participants to analyze. By default all."
    )


Diagnostic = HeadNorms | Features | Surface | Gradients | Locals
#: Section of each kind.
DIAGNOSTIC_KINDS: dict[str, type[Diagnostic]] = {
    get_args(section.model_fields["kind"].annotation)[0]: section for section in get_args(Diagnostic)
}


def get_diagnostic_kind(value: Any) -> str:
    """Get the kind of an entry of `diagnostics`."""
    return str(value.get("kind")) if isinstance(value, dict) else str(getattr(value, "kind", value))


def _check_diagnostic_kinds(entries: Any) -> Any:
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, _Diagnostic):
            continue
        if not isinstance(entry, dict) or "kind" not in entry:
            raise ValueError(f"diagnostics.{name}: kind is missing. Use one of: {', '.join(DIAGNOSTIC_KINDS)}.")
        if entry["kind"] not in DIAGNOSTIC_KINDS:
            hint = suggest_name(str(entry["kind"]), [*DIAGNOSTIC_KINDS])
            raise ValueError(f"diagnostics.{name}.kind: unknown kind '{entry['kind']}'. {hint}")
    return entries


#: Entries of `diagnostics` by name. Their other keys depend on the kind.
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
    Field(
        default_factory=dict,
        description="Analyses of stored states, by names that you choose. Each entry has the key `kind`, one of the "
        "names below.",
    ),
]
