"""Finding things by name: algorithms, models, partition schemes and data sets.

Each kind is a package in which every module defines one class; the module's name is the name used in params.yaml.
Adding one is adding a file (`base` and names that begin with an underscore are not components). Anything outside
fedpipe is named by a dotted path, ``my_module.MyAlgorithm``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import pkgutil
import traceback
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from fedpipe import code
from fedpipe.errors import SettingsError, nearest, refuse_numbers, sentences
from fedpipe.pins import Pin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component:
    """Base of everything that is found by name; its dataclass fields are its parameters in params.yaml."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def made_of(self) -> tuple[Any, ...]:
        """The classes and functions whose code is part of the keys of all runs that use it."""
        return (type(self),)

    @property
    def pin(self) -> Pin | None:
        """The file of the user's own that it is made of."""
        return None

    def keyed(self) -> dict[str, Any]:
        """Its parameters as keys hold them: where a file lies is none of them."""
        parameters = dataclasses.asdict(self)
        if self.pin:
            del parameters[self.pin.field]
        return parameters

    @property
    def origin(self) -> dict[str, str]:
        """Where its file lies, beside a key that does not hold that."""
        return {self.pin.field: str(self.pin.path)} if self.pin else {}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family of components: where its modules lie, and how params.yaml and runs' settings speak of it."""

    name: str  #: as in "unknown algorithm"
    package: str  #: the package whose modules define one component each
    section: str  #: the section of params.yaml in which it is named
    selector: str  #: the key there that names it
    default: str = ""  #: what it is where that key is missing; for an algorithm its label
    held: str = "name"  #: the key that names it in the settings of a run
    functions: str = ""  #: the module that makes components of functions, too

    @property
    def plural(self) -> str:
        """Its word on the command line: ``algorithms``."""
        return self.package.rpartition(".")[2]


ALGORITHM = Kind("algorithm", "fedpipe.algorithms", "algorithms", "algorithm")
MODEL = Kind("model", "fedpipe.models", "model", "name", "cnn", functions="fedpipe.models._factory")
PARTITION = Kind("partition scheme", "fedpipe.data.partitions", "partition", "scheme", "dirichlet", held="scheme")
DATASET = Kind("data set", "fedpipe.data.datasets", "dataset", "name", "digits")
KINDS = (ALGORITHM, MODEL, PARTITION, DATASET)


@functools.cache
def names(kind: Kind) -> tuple[str, ...]:
    """The names of all components of a kind that ship with fedpipe, in alphabetical order."""
    package = importlib.import_module(kind.package)
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    own = (name for name in modules if name != "base" and not name.startswith("_"))
    return tuple(sorted(name.replace("_", "-") if kind is PARTITION else name for name in own))


def find(kind: Kind, name: str, key: str | None = None) -> type[Component]:
    """The class called ``name``, or at the dotted path ``name``; for a model that may be a function, too.

    Raises
    ------
    SettingsError
        There is no such component; the sentence names ``key`` (default: the kind's section) and the nearest name.
    """
    key = key or kind.section
    if "." in name:
        module_name, _, class_name = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except Exception as error:  # whatever a module of the user's own does as it is imported
            raise SettingsError(
                f"{key}: '{name}' can't be imported ({_told(error, module_name)}); {_mend(kind, error)}."
            ) from error
        if kind.functions and inspect.isfunction(found) and "<" not in found.__qualname__ and _takes_inputs(found):
            made: type[Component] = importlib.import_module(kind.functions).family_of(found)
            return made
        if not (inspect.isclass(found) and issubclass(found, _base(kind))):
            instead = ", or be a function (shape, classes) that returns a body and a head" if kind.functions else ""
            one = f"{'an' if kind is ALGORITHM else 'a'} {kind.name}"
            raise SettingsError(
                f"{key}: '{name}' is not {one}; it should derive from {_base(kind).__qualname__}{instead}."
            )
        if not f"{found.__module__}.".startswith(f"{module_name}."):
            raise SettingsError(
                f"{key}: '{name}' is defined in {found.__module__}, and jobs import nothing else; it should be "
                f"'{found.__module__}.{found.__qualname__}'."
            )
        types = vars(found).get("__annotations__", {}).values()
        fields = [annotation for annotation in types if "ClassVar" not in str(annotation)]
        if fields and "__dataclass_params__" not in vars(found):
            raise SettingsError(f"{key}: '{name}' has fields; it should be a @dataclass(frozen=True, kw_only=True).")
        if "code" in vars(found).get("__dataclass_fields__", {}):
            raise SettingsError(f"{key}: '{name}' has a field 'code', which stands for its source in keys; rename it.")
        return found
    if name not in names(kind):
        raise SettingsError(f"{key}: unknown {kind.name} '{name}'; {nearest(name, names(kind))}")
    module = importlib.import_module(f"{kind.package}.{name.replace('-', '_')}")
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, _base(kind)) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise TypeError(f"{module.__name__} should define exactly one {kind.name}, but defines {len(own)}.")
    return own[0]


def _takes_inputs(function: Any) -> bool:
    """Whether a function takes shape and classes; torchvision's take neither, and would download weights for them."""
    try:
        inspect.signature(function).bind_partial((1,), 2)
    except TypeError:
        return False
    return True


def _told(error: Exception, module: str) -> str:
    """What went wrong at an import, and in which line of that module."""
    if isinstance(error, SyntaxError):
        return str(error)
    stem = module.rpartition(".")[2]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).stem == stem]
    told = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    return f"{told}, {stem}.py, line {lines[-1]}" if lines else str(error)


def _mend(kind: Kind, error: Exception) -> str:
    """What to do where an import fails."""
    if isinstance(error, TypeError) and "non-frozen dataclass from a frozen one" in str(error):
        last = error.__traceback__
        while last and last.tb_next:
            last = last.tb_next
        refused = last.tb_frame.f_locals.get("cls") if last else None  # of `dataclass`, which raised it
        above = f"above class {refused.__name__}" if inspect.isclass(refused) else "above the class"
        return f"write `@dataclass(frozen=True, kw_only=True)` {above}"
    if kind.functions:
        return (
            "it should be a function (shape, classes) -> (body, head), as own.network, a class, as my_module.MyClass, "
            f"or a model of `fedpipe list {kind.plural}`"
        )
    return "it should be the path of a class, as my_module.MyClass"


def is_a(kind: Kind, name: str) -> bool:
    """Whether the class at a dotted path is a component of this kind."""
    try:
        find(kind, name)
    except SettingsError:
        return False
    return True


def parsed(kind: Kind, settings: Any, label: str = "", beside: Sequence[str] = ()) -> Component:
    """The component that a section of params.yaml describes: a selector, and the component's parameters.

    Parameters
    ----------
    kind
        The kind.
    settings
        The section; for an algorithm, the entry of its label.
    label
        The label, which is also the algorithm's name where the entry names none.
    beside
        Keys of the section that are not the component's.

    Raises
    ------
    SettingsError
        See :func:`build`.
    """
    key = f"{kind.section}.{label}" if label else kind.section
    if not isinstance(settings, Mapping):
        wanted = "valid mapping" if label else f"mapping with '{kind.selector}'"
        raise SettingsError(f"{key}: {settings!r} can't be used; it should be a {wanted}.")
    parameters = dict(settings)
    name, place = parameters.pop(kind.selector, label or kind.default), f"{key}.{kind.selector}"
    if not isinstance(name, str):
        raise SettingsError(f"{place}: {name!r} can't be used; it should be a name.")
    find(kind, name, key if label else place)
    return build(kind, name, parameters, key, beside)


def described(kind: Kind, component: Component) -> dict[str, Any]:
    """What keys and a run's settings hold of a component, as JSON gives it back: its name, code and parameters."""
    head = {kind.held: name_of(kind, type(component)), "code": code.of(*component.made_of()).text}
    found: dict[str, Any] = json.loads(json.dumps(head | component.keyed()))
    return found


def restored(kind: Kind, described: Mapping[str, Any]) -> Component:
    """The component that settings of a run describe; see :func:`described`."""
    parameters = {name: value for name, value in described.items() if name not in {kind.held, "code"}}
    return build(kind, described[kind.held], parameters)


def build(
    kind: Kind, name: str, parameters: Mapping[str, Any], key: str | None = None, beside: Sequence[str] = ()
) -> Component:
    """A component with its parameters checked and its defaults filled in.

    Parameters
    ----------
    kind, name
        What :func:`find` finds.
    parameters
        As they stand in params.yaml.
    key
        Where they stand there; by default the kind's section.
    beside
        Keys that stand there too, which a mistyped parameter may have meant.

    Raises
    ------
    SettingsError
        The name or a parameter is unknown, of the wrong type or out of range; the sentence begins with its key.
    """
    found, key = find(kind, name, key), key or kind.section
    if kind is ALGORITHM:
        found = _dw().chosen(found, parameters, key)
        parameters = {field: value for field, value in parameters.items() if (field, value) != ("dw", None)}
    try:
        made = adapter(cast(Hashable, found)).validate_python(dict(parameters))
        refuse_numbers(parameters, made)
    except ValidationError as error:
        known = [*beside, *(field.name for field in parameters_of(documented(kind, found)))]
        raise SettingsError("\n".join(sentences(error, dict(parameters), key, lambda _: known))) from None
    return made


def documented(kind: Kind, component: type[Component]) -> type[Component]:
    """The class with all that params.yaml may set of it: of most algorithms, with FedDW's regularizer too."""
    if kind is not ALGORITHM or _dw().objection(component):
        return component
    made: type[Component] = _dw().with_dw(component)
    return made


def _dw() -> Any:
    return importlib.import_module("fedpipe.algorithms._dw")


@functools.cache
def adapter(component: Any) -> TypeAdapter[Component]:
    """What checks a component's parameters and writes their JSON Schema."""
    try:
        return TypeAdapter(component)
    except PydanticUserError as error:
        told = str(error).split("\n", 1)[0]
        raise SettingsError(
            f"'{component.__module__}.{component.__qualname__}' can't be used ({told}); it should be a "
            "@dataclass(frozen=True, kw_only=True) with typed fields."
        ) from error


def parameters_of(component: type[Component]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a component that params.yaml may set."""
    return tuple(field for field in dataclasses.fields(component) if field.init)


def summary(component: type) -> str:
    """The first line of a component's docstring."""
    return (inspect.getdoc(component) or "").split("\n", 1)[0]


def name_of(kind: Kind, component: type[Component]) -> str:
    """The name by which :func:`find` gives this class."""
    package, _, module = component.__module__.rpartition(".")
    if package == kind.package:
        return module.replace("_", "-") if kind is PARTITION else module
    return f"{component.__module__}.{component.__qualname__}"


@functools.cache
def _base(kind: Kind) -> type[Component]:
    bases = {ALGORITHM: "Algorithm", MODEL: "Model", PARTITION: "Scheme", DATASET: "Dataset"}
    base: type[Component] = getattr(importlib.import_module(f"{kind.package}.base"), bases[kind])
    return base
