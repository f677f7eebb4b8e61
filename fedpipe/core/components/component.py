"""The base class of components, their kinds, and what is known of their parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, ClassVar

from pydantic import ConfigDict, PydanticUserError, TypeAdapter

from fedpipe.core.components.pinned_files import PinnedFile
from fedpipe.core.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component:
    """Base of everything that is found by name; its dataclass fields are its parameters in params.yaml."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def code_objects(self) -> tuple[Any, ...]:
        """The classes and functions whose code is part of the keys of all runs that use it."""
        return (type(self),)

    @property
    def pinned_file(self) -> PinnedFile | None:
        """The file of the user's own that it is made of."""
        return None

    def key_parameters(self) -> dict[str, Any]:
        """Its parameters as keys hold them: where a file lies is none of them."""
        parameters = dataclasses.asdict(self)
        if self.pinned_file:
            del parameters[self.pinned_file.parameter]
        return parameters

    @property
    def origin(self) -> dict[str, str]:
        """Where its file lies, beside a key that does not hold that."""
        return {self.pinned_file.parameter: str(self.pinned_file.path)} if self.pinned_file else {}


@dataclasses.dataclass(frozen=True)
class ComponentKind:
    """A family of components: where its modules lie, and how params.yaml and runs' settings speak of it."""

    name: str  #: as in "unknown algorithm"
    package: str  #: the package whose modules define one component each
    section: str  #: the section of params.yaml in which it is named
    selector: str  #: the key there that names it
    default: str = ""  #: what it is where that key is missing; for an algorithm its label
    run_selector: str = "name"  #: the key that names it in the settings of a run
    helpers: tuple[str, ...] = ()  #: modules of the package that components share
    function_module: str = ""  #: the module that makes components of functions, too

    @property
    def plural(self) -> str:
        """Its word on the command line: ``algorithms``."""
        return self.package.rpartition(".")[2]


ALGORITHM = ComponentKind(
    "algorithm",
    "fedpipe.algorithms",
    "algorithms",
    "algorithm",
    helpers=("adaptive_loss", "barycenter", "class_means", "model_stack", "partial_sharing", "soft_labels"),
)
MODEL = ComponentKind(
    "model",
    "fedpipe.models",
    "model",
    "name",
    "cnn",
    helpers=("blocks", "from_function", "purity"),
    function_module="fedpipe.models.from_function",
)
PARTITION = ComponentKind(
    "partition scheme", "fedpipe.data.partitions", "partition", "scheme", "dirichlet", run_selector="scheme"
)
DATASET = ComponentKind("data set", "fedpipe.data.datasets", "dataset", "name", "digits")
COMPONENT_KINDS = (ALGORITHM, MODEL, PARTITION, DATASET)


@functools.cache
def get_type_adapter(component: Any) -> TypeAdapter[Component]:
    """What checks a component's parameters and writes their JSON Schema."""
    try:
        return TypeAdapter(component)
    except PydanticUserError as error:
        reason = str(error).split("\n", 1)[0]
        raise SettingsError(
            f"'{component.__module__}.{component.__qualname__}' can't be used ({reason}); it should be a "
            "@dataclass(frozen=True, kw_only=True) with typed fields."
        ) from error


def list_parameters(component: type[Component]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a component that params.yaml may set."""
    return tuple(field for field in dataclasses.fields(component) if field.init)


def get_docstring_summary(component: type) -> str:
    """The first line of a component's docstring."""
    return (inspect.getdoc(component) or "").split("\n", 1)[0]
