"""Finding things by name: algorithms, models, partition schemes and data sets.

Each kind is a package in which every module defines one class; the module's name is the name used in params.yaml.
Adding one is adding a file. Anything outside fedpipe is named by a dotted path, ``my_module.MyAlgorithm``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from fedpipe.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component:
    """Base of everything that is found by name; its dataclass fields are its parameters in params.yaml."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family of components: where its modules lie, and how params.yaml speaks of it."""

    name: str  #: as in "unknown algorithm"
    package: str  #: the package whose modules define one component each
    section: str  #: the section of params.yaml in which it is named


ALGORITHM = Kind("algorithm", "fedpipe.algorithms", "algorithms")
MODEL = Kind("model", "fedpipe.models", "model")
PARTITION = Kind("partition scheme", "fedpipe.data.partitions", "partition")
DATASET = Kind("data set", "fedpipe.data.datasets", "dataset")
KINDS = (ALGORITHM, MODEL, PARTITION, DATASET)


@functools.cache
def names(kind: Kind) -> tuple[str, ...]:
    """The names of all components of a kind that ship with fedpipe, in alphabetical order."""
    package = importlib.import_module(kind.package)
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name.replace("_", "-") if kind is PARTITION else name for name in modules if name != "base"))


def find(kind: Kind, name: str, key: str | None = None) -> type[Component]:
    """The class called ``name``, or at the dotted path ``name``.

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
        except (ImportError, AttributeError) as error:
            raise SettingsError(
                f"{key}: '{name}' can't be imported ({error}); it should be the path of a class, as my_module.MyClass."
            ) from error
        if not (inspect.isclass(found) and issubclass(found, _base(kind))):
            raise SettingsError(f"{key}: '{name}' is no {kind.name}; it should derive from {_base(kind).__qualname__}.")
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


def build(kind: Kind, name: str, parameters: Mapping[str, Any], key: str | None = None) -> Component:
    """A component with its parameters checked and its defaults filled in.

    Raises
    ------
    SettingsError
        The name or a parameter is unknown, of the wrong type or out of range; the sentence begins with its key.
    """
    found = find(kind, name, key)
    try:
        return adapter(found).validate_python(dict(parameters))
    except ValidationError as error:
        known = [field.name for field in parameters_of(found)]
        raise SettingsError(sentences(error, key or kind.section, lambda _: known)) from None


def adapter(component: type[Component]) -> TypeAdapter[Component]:
    """What checks a component's parameters and writes their JSON Schema."""
    try:
        return TypeAdapter(component)
    except PydanticUserError as error:
        raise TypeError(f"{component.__qualname__} should be a frozen dataclass with typed fields: {error}") from error


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


def sentences(error: ValidationError, prefix: str, known: Callable[[tuple[int | str, ...]], Sequence[str]]) -> str:
    """A pydantic error as sentences for people, one a line, each beginning with the key.

    ``known`` gives the keys that may stand in the section at a location.
    """
    lines = []
    for problem in error.errors(include_url=False):
        location = ".".join(str(part) for part in (*([prefix] if prefix else []), *problem["loc"]))
        kind, context = problem["type"], problem.get("ctx", {})
        if kind in {"extra_forbidden", "unexpected_keyword_argument"}:
            options = known(problem["loc"][:-1])
            lines.append(f"{location}: unknown key; {nearest(str(problem['loc'][-1]), options)}")
        elif kind == "missing":
            lines.append(f"{location}: missing; it must be given.")
        elif kind == "value_error":
            sentence = str(context["error"])
            lines.append(sentence if sentence.startswith(location.split(".")[0]) else f"{location}: {sentence}")
        else:
            wanted = problem["msg"].removeprefix("Input ").replace("tuple", "list").replace("dictionary", "mapping")
            lines.append(f"{location}: {problem['input']!r} can't be used; it {wanted}.")
    return "\n".join(lines)


def nearest(name: str, options: Sequence[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"it should be one of: {', '.join(options)}." if options else "remove it."


@functools.cache
def _base(kind: Kind) -> type[Component]:
    bases = {ALGORITHM: "Algorithm", MODEL: "Model", PARTITION: "Scheme", DATASET: "Dataset"}
    base: type[Component] = getattr(importlib.import_module(f"{kind.package}.base"), bases[kind])
    return base
