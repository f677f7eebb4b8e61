"""Checks an algorithm's class before it runs: names that are similar to a hook's, and hooks with wrong arguments."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from fedpipe.algorithms.base import Algorithm
from fedpipe.core.components import component, registry
from fedpipe.core.errors import suggest_name
from fedpipe.settings.federation import Federation

#: Former names of hooks. A class that still has one would silently do what FedAvg does.
FORMER_HOOKS = {
    "combine": "aggregate",
    "work": "local_passes",
    "prepare": "personal_passes",
    "personalize": "personal_passes",
    "finetune": "finetune_passes",
    "first": "init_client",
    "deploy": "global_model",
    "beside": "extra_models",
    "observe": "metrics",
    "exchanged": "matrices",
    "nearest": "prototype_logits",
    "averaged": "server_optimizer_part",
    "several": "needs_several_models",
    "ignores": "unsupported_settings",
    "prototypes": "has_prototype_logits",
    "needs_epochs": "local_steps_conflict",
    "in_round": "bind_round",
    "without_dw": "dw_conflict",
    "training": "training_pass",
}
SIMILARITY = 0.75  #: least similarity of a misspelled name and its hook, such as "kepe" and "keep"
FIELDS = frozenset(field.name for field in dataclasses.fields(Algorithm))
HOOKS = tuple(name for name in dir(Algorithm) if not name.startswith("_") and name not in FIELDS)


def get_algorithm_name(algorithm: Algorithm) -> str:
    """Name of an algorithm in params.yaml or its dotted path, without extensions."""
    classes = [base for base in type(algorithm).__mro__ if issubclass(base, Algorithm)]
    named_classes = [base for base in classes if not base.__module__.startswith("fedpipe.algorithms.extensions")]
    return registry.get_component_name(component.ALGORITHM, named_classes[0])


def find_naming_mistakes(algorithm: Algorithm) -> Iterator[str]:
    """Messages about names in an algorithm's class, and about arguments of its hooks."""
    label = get_algorithm_name(algorithm)
    classes = [base for base in type(algorithm).__mro__ if base not in Algorithm.__mro__]
    used_names = set().union(*(_find_used_names(value) for base in classes for value in vars(base).values()))
    fields = {field.name for field in dataclasses.fields(algorithm)}
    for base in classes:
        for name, value in vars(base).items():
            if name in HOOKS and callable(getattr(Algorithm, name)):
                yield from _check_hook(label, name, value)
            elif not name.startswith("_") and name not in HOOKS and name not in fields | FIELDS:
                yield from _check_unused_name(label, name, used_names)
    for key in algorithm.unsupported_settings:
        if key not in Federation.model_fields:
            yield (
                f"{label}.unsupported_settings: '{key}' is not a key of the section federation. "
                f"{suggest_name(key, [*Federation.model_fields])}"
            )
    for name in fields:
        if name in HOOKS:
            yield f"{label}: the field '{name}' hides the hook with that name. Rename the field."


def _check_hook(label: str, name: str, value: Any) -> Iterator[str]:
    expected_arguments = [
        argument for argument in inspect.signature(getattr(Algorithm, name)).parameters if argument != "self"
    ]
    if isinstance(value, property) or not callable(getattr(value, "__func__", value)):
        yield f"{label}.{name} is not a method. Define a method with the arguments ({', '.join(expected_arguments)})."
        return
    if not isinstance(value, FunctionType):  # static methods, class methods and partials: other checks call them
        return
    signature = inspect.signature(value)
    try:
        signature.bind(None, *expected_arguments)
    except TypeError:
        actual_arguments = [argument for argument in signature.parameters if argument != "self"]
        yield f"{label}.{name} takes ({', '.join(actual_arguments)}). Use ({', '.join(expected_arguments)})."


def _check_unused_name(label: str, name: str, used_names: set[str]) -> Iterator[str]:
    """Check a name that the class never uses. If it is not a hook, it has no effect."""
    if name in used_names:
        return
    matches = difflib.get_close_matches(name, (*HOOKS, *FORMER_HOOKS), n=1, cutoff=SIMILARITY)
    if matches:
        hook = FORMER_HOOKS.get(matches[0], matches[0])
        yield f"{label}.{name} is never used, because no hook has that name. Did you mean '{hook}'?"


def _find_used_names(value: Any) -> set[str]:
    """Names of attributes and globals that a function or its inner functions use."""
    if isinstance(value, property):
        return set().union(*(_find_used_names(accessor) for accessor in (value.fget, value.fset, value.fdel)))
    if isinstance(value, functools.cached_property):
        return _find_used_names(value.func)
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return _find_names_in_code(code) if code is not None else set()


def _find_names_in_code(code: CodeType) -> set[str]:
    inner = (_find_names_in_code(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
