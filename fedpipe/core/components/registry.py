"""Finds algorithms, models, partition schemes and data sets by name.

Each kind is a package in which every module defines one class. The module's name is the name in params.yaml, so you
add a component by adding a file. `ComponentKind.helpers` lists the modules that are not components. Name a component
outside fedpipe by its dotted path, such as ``my_module.MyAlgorithm``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import pkgutil
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast, get_args, get_type_hints

from pydantic import ValidationError
from typing_extensions import Format, get_annotations

from fedpipe.core.components import code_digest
from fedpipe.core.components.component import (
    ALGORITHM,
    DATASET,
    MODEL,
    PARTITION,
    Component,
    ComponentKind,
    find_field_declaration_mistakes,
    get_type_adapter,
    list_parameters,
)
from fedpipe.core.components.module_graph import COMPONENT_PACKAGES
from fedpipe.core.errors import (
    EMPTY_MAPPING_ADVICE,
    Location,
    SettingsError,
    format_validation_errors,
    reject_booleans_and_huge_numbers,
    suggest_name,
)
from fedpipe.core.user_code import import_user_object, require_seeded_import


@functools.cache
def list_components(kind: ComponentKind) -> tuple[str, ...]:
    """Names of fedpipe's components of a kind, in alphabetical order."""
    package = importlib.import_module(kind.package)
    modules = (module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg)
    shared_modules = {*COMPONENT_PACKAGES[kind.package], *kind.helpers}
    component_modules = (name for name in modules if name not in shared_modules)
    return tuple(sorted(name.replace("_", "-") if kind is PARTITION else name for name in component_modules))


def find_component(kind: ComponentKind, name: str, key: str | None = None) -> type[Component]:
    """Find the class of a component by its name or dotted path. A model may also be a function.

    If there is none, the message of the error has ``key`` (default: the kind's section) and the nearest name.
    """
    key = key or kind.section
    if "." in name:
        return _find_custom_component(kind, name, key)
    if name not in list_components(kind):
        raise SettingsError(f"{key}: unknown {kind.name} '{name}'. {suggest_name(name, list_components(kind))}")
    return _import_component(kind, name)


def _find_custom_component(kind: ComponentKind, path: str, key: str) -> type[Component]:
    """Find the class at a dotted path, or make a model's class from the function at this path."""
    advice = "Use the path of a class, such as my_module.MyClass."
    requirement = f"It must derive from {_get_base_class(kind).__qualname__}"
    if kind.function_module:
        advice = (
            "Use a function (shape, classes) -> (body, head) such as own.network, a class such as my_module.MyClass, "
            f"or a model of `fedpipe list {kind.plural}`."
        )
        requirement += ", or be a function (shape, classes) that returns a body and a head"

    def is_suitable(value: Any) -> bool:
        return _is_component_class(kind, value) or _is_network_function(kind, value)

    candidate = import_user_object(key, path, is_suitable, advice)
    require_seeded_import(key, path)
    if _is_network_function(kind, candidate):
        function_class = importlib.import_module(kind.function_module).make_model_class(candidate)
        function_class.__module__ = candidate.__module__  # make_dataclass of Python 3.12 sets that of its caller
        return function_class
    if not is_suitable(candidate):
        raise SettingsError(f"{key}: '{path}' is not {'an' if kind is ALGORITHM else 'a'} {kind.name}. {requirement}.")
    if not f"{candidate.__module__}.".startswith(f"{path.rpartition('.')[0]}."):
        raise SettingsError(
            f"{key}: '{path}' is defined in {candidate.__module__}. "
            f"Use '{candidate.__module__}.{candidate.__qualname__}', because jobs import only that module."
        )
    annotations = get_annotations(candidate, format=Format.FORWARDREF).values()
    fields = [annotation for annotation in annotations if "ClassVar" not in str(annotation)]
    if fields and "__dataclass_params__" not in vars(candidate):
        raise SettingsError(f"{key}: '{path}' has fields. Make it a @dataclass(frozen=True, kw_only=True).")
    component_class: type[Component] = candidate
    if mistake := next(find_field_declaration_mistakes(kind, component_class), None):
        raise SettingsError(f"{key}: '{path}' {mistake}")
    return component_class


@functools.cache
def _import_component(kind: ComponentKind, name: str) -> type[Component]:
    """Import the class of one of fedpipe's components."""
    module = importlib.import_module(f"{kind.package}.{name.replace('-', '_')}")
    classes = [value for value in vars(module).values() if _is_component_class(kind, value)]
    classes = [value for value in classes if value.__module__ == module.__name__]  # without imported ones
    if len(classes) != 1:
        raise TypeError(f"{module.__name__} must define exactly one {kind.name}, but defines {len(classes)}.")
    return classes[0]


def _is_component_class(kind: ComponentKind, value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, _get_base_class(kind))


def _is_network_function(kind: ComponentKind, value: Any) -> bool:
    """Whether a model can be made from a function with a name and the arguments shape and classes."""
    if not kind.function_module or not inspect.isfunction(value) or "<" in value.__qualname__:
        return False
    try:
        inspect.signature(value).bind_partial((1,), 2)  # torchvision's functions have other arguments
    except TypeError:
        return False
    return True


def is_component(kind: ComponentKind, name: str) -> bool:
    """Whether the class at a dotted path is a component of this kind."""
    try:
        find_component(kind, name)
    except SettingsError:
        return False
    return True


def parse_component(kind: ComponentKind, settings: Any, label: str = "", other_keys: Sequence[str] = ()) -> Component:
    """Make the component of a section of params.yaml, which has a name and parameters (see :func:`build_component`).

    For an algorithm, ``settings`` is the entry of its label, which is the algorithm's name if the entry has none.
    ``other_keys`` are keys of the section that are not parameters of the component.
    """
    key = f"{kind.section}.{label}" if label else kind.section
    if not isinstance(settings, Mapping):
        if settings is None:
            advice = EMPTY_MAPPING_ADVICE if label else f"Use a mapping with '{kind.selector}'."
            raise SettingsError(f"{key}: empty. {advice}")
        expected_type = "valid mapping" if label else f"mapping with '{kind.selector}'"
        raise SettingsError(f"{key}: {settings!r} can't be used. Use a {expected_type}.")
    parameters = dict(settings)
    name, selector_key = parameters.pop(kind.selector, label or kind.default), f"{key}.{kind.selector}"
    if not isinstance(name, str):
        raise SettingsError(f"{selector_key}: {name!r} can't be used. Use a name.")
    try:
        find_component(kind, name, key if label else selector_key)
    except SettingsError as error:
        if kind.selector in settings or not label:
            raise
        raise SettingsError(f"{error} Or add its {kind.name}, such as `{kind.selector}: own.MyClass`.") from None
    component = build_component(kind, name, parameters, key, other_keys)
    for parameter in list_parameters(type(component)):
        if parameter.name in other_keys:
            raise SettingsError(
                f"{key}.{parameter.name}: fedpipe uses this key itself, so the field of "
                f"{type(component).__qualname__} can't be set. Rename the field."
            )
    return component


def get_component_key_settings(kind: ComponentKind, component: Component) -> dict[str, Any]:
    """Name, code digest and parameters of a component for keys and run settings, as JSON values."""
    name = get_component_name(kind, type(component))
    run_settings = {
        kind.run_selector: name,
        "code": code_digest.compute_code_digest(*component.list_hashed_code()).text,
    }
    for parameter, value in component.get_hashed_parameters().items():
        try:
            run_settings[parameter] = json.loads(json.dumps(value))
        except TypeError:
            raise SettingsError(
                f"{kind.section}: {value!r} can't be the value of '{parameter}' of '{name}', because keys contain only "
                "numbers, texts, and lists and mappings of them. Use the type str for a path, and tuple for a set."
            ) from None
    return run_settings


def build_component_from_run_settings(kind: ComponentKind, run_settings: Mapping[str, Any]) -> Component:
    """Make the component from the settings of a run (see :func:`get_component_key_settings`)."""
    parameters = {name: value for name, value in run_settings.items() if name not in {kind.run_selector, "code"}}
    return build_component(kind, run_settings[kind.run_selector], parameters)


def build_component(
    kind: ComponentKind,
    name: str,
    parameters: Mapping[str, Any],
    key: str | None = None,
    other_keys: Sequence[str] = (),
) -> Component:
    """Make a component with validated parameters of params.yaml and defaults.

    ``key`` contains the parameters (default: the kind's section). ``other_keys`` are the other keys of the section, for
    suggestions about a mistyped parameter. Messages about the name and the parameters begin with their keys.

    Raises a SettingsError, which begins with the key, if the name or a parameter is unknown, of the wrong type or out
    of range.
    """
    component_class, key = find_component(kind, name, key), key or kind.section
    if kind is ALGORITHM:
        dw = _import_feddw_extension()
        if not dw.has_dw_parameter(component_class):
            component_class = dw.add_dw_if_requested(component_class, parameters, key)
            parameters = {field: value for field, value in parameters.items() if (field, value) != ("dw", None)}
    try:
        component = get_type_adapter(cast(Hashable, component_class)).validate_python(dict(parameters))
        reject_booleans_and_huge_numbers(parameters, component)
    except ValidationError as error:
        list_keys = functools.partial(_list_known_keys, add_dw_parameter(kind, component_class), other_keys)
        raise SettingsError("\n".join(format_validation_errors(error, dict(parameters), key, list_keys))) from None
    return component


def _list_known_keys(section: Any, other_keys: Sequence[str], location: Location) -> list[str]:
    """List the keys of a component's section, or of the section at a location in it, such as ``lora``.

    The list is empty if the section at the location is not a dataclass, which a custom component may have.
    """
    for part in (part for part in location if isinstance(part, str)):  # not the numbers of a list's entries
        annotation = get_type_hints(section).get(part) if dataclasses.is_dataclass(section) else None
        section = next(filter(dataclasses.is_dataclass, (annotation, *get_args(annotation))), None)
    parameters = list_parameters(section) if section else ()
    return [*(() if location else other_keys), *(field.name for field in parameters)]


def add_dw_parameter(kind: ComponentKind, component: type[Component]) -> type[Component]:
    """Class with the parameters of extensions. Most algorithms can have FedDW's regularizer `dw`."""
    if kind is not ALGORITHM or _import_feddw_extension().get_dw_conflict(component):
        return component
    return _import_feddw_extension().add_dw_mixin(component)


def _import_feddw_extension() -> Any:
    return importlib.import_module("fedpipe.algorithms.extensions.dw")


def get_component_name(kind: ComponentKind, component: type[Component]) -> str:
    """Name with which :func:`find_component` finds this class."""
    package, _, module = component.__module__.rpartition(".")
    if package == kind.package:
        return module.replace("_", "-") if kind is PARTITION else module
    return f"{component.__module__}.{component.__qualname__}"


@functools.cache
def _get_base_class(kind: ComponentKind) -> type[Component]:
    bases = {ALGORITHM: "Algorithm", MODEL: "Model", PARTITION: "Scheme", DATASET: "Dataset"}
    return getattr(importlib.import_module(f"{kind.package}.base"), bases[kind])
