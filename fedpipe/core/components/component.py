"""The base class of components, their kinds, and their parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import ConfigDict, PydanticUserError, TypeAdapter

from fedpipe.core.components.pinned_files import PinnedFile
from fedpipe.core.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component:
    """Base class of all components. The dataclass fields are the parameters in params.yaml."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def list_hashed_code(self) -> tuple[Any, ...]:
        """Classes and functions whose code is part of the key of each run with this component."""
        return (type(self),)

    @property
    def pinned_file(self) -> PinnedFile | None:
        """User file that the component reads, pinned by its SHA-256."""
        return None

    def get_hashed_parameters(self) -> dict[str, Any]:
        """Parameters that enter keys. The path of a file does not enter a key."""
        values = dataclasses.asdict(self)
        parameters = {field.name: values[field.name] for field in list_parameters(type(self))}
        if self.pinned_file:
            del parameters[self.pinned_file.parameter]
        return parameters

    @property
    def path_parameters(self) -> dict[str, str]:
        """Path of its file, which the key omits."""
        return {self.pinned_file.parameter: str(self.pinned_file.path)} if self.pinned_file else {}


@dataclasses.dataclass(frozen=True)
class ComponentKind:
    """A kind of component: its package, and its names in params.yaml and in the settings of a run."""

    name: str  #: name for messages, such as "unknown algorithm"
    package: str  #: package whose modules define one component each
    section: str  #: section of params.yaml that names it
    selector: str  #: key of that section with the name
    default: str = ""  #: name if that key is missing (an algorithm's label is used instead)
    run_selector: str = "name"  #: key with the name in the settings of a run
    helpers: tuple[str, ...] = ()  #: modules of the package that are not components
    function_module: str = ""  #: module that makes components from functions

    @property
    def plural(self) -> str:
        """Name on the command line, such as ``algorithms``."""
        return self.package.rpartition(".")[2]


ALGORITHM = ComponentKind(
    "algorithm",
    "fedpipe.algorithms",
    "algorithms",
    "algorithm",
    helpers=(
        *("adaptive_loss", "barycenter", "class_means", "extra_layers", "model_stack", "partial_sharing"),
        *("personal_model", "prototypes", "soft_labels"),
    ),
)
MODEL = ComponentKind(
    "model",
    "fedpipe.models",
    "model",
    "name",
    "cnn",
    helpers=("backbone", "blocks", "conversion", "from_function", "lora", "purity"),
    function_module="fedpipe.models.from_function",
)
PARTITION = ComponentKind(
    "partition scheme", "fedpipe.data.partitions", "partition", "scheme", "dirichlet", run_selector="scheme"
)
DATASET = ComponentKind("data set", "fedpipe.data.datasets", "dataset", "name", "digits")
COMPONENT_KINDS = (ALGORITHM, MODEL, PARTITION, DATASET)


@functools.cache
def get_type_adapter(component: Any) -> TypeAdapter[Component]:
    """Pydantic adapter that validates the parameters and writes their JSON Schema."""
    try:
        return TypeAdapter(component)
    except PydanticUserError as error:
        reason = str(error).split("\n", 1)[0]
        raise SettingsError(
            f"'{component.__module__}.{component.__qualname__}' can't be used ({reason}). Use a "
            "@dataclass(frozen=True, kw_only=True) with typed fields."
        ) from error


def list_parameters(component: type[Component]) -> tuple[dataclasses.Field[Any], ...]:
    """Fields of a component that you can set in params.yaml."""
    return tuple(field for field in dataclasses.fields(component) if field.init)


def find_field_declaration_mistakes(kind: ComponentKind, component: type[Component]) -> Iterator[str]:
    """Find names that fields of a custom component can't have, and parameters that are not fields.

    Yields the rest of a sentence that begins with the class.
    """
    fields = {field.name: field for field in dataclasses.fields(component)}
    for name in sorted({"code", kind.selector, kind.run_selector} & fields.keys()):
        yield f"has a field '{name}'. Rename it, because fedpipe uses this name itself."
    for name, argument in inspect.signature(component).parameters.items():
        if name not in fields and argument.kind in {argument.KEYWORD_ONLY, argument.POSITIONAL_OR_KEYWORD}:
            yield f"has an argument '{name}' that is not a field. Make it a field, because keys contain only fields."
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING
        value = inspect.getattr_static(component, name) if has_default else vars(component).get(name, field.default)
        if value is field.default or inspect.ismemberdescriptor(value):
            continue
        if isinstance(value, property) or callable(value):
            yield f"has a method '{name}' with the name of a field. Rename the method."
        else:
            annotation = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
            yield (
                f"sets '{name}' without a type, so this value has no effect. Write `{name}: {annotation} = {value!r}`."
            )


def get_docstring_summary(component: type) -> str:
    """First line of a component's docstring."""
    return (inspect.getdoc(component) or "").split("\n", 1)[0]
