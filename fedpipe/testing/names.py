"""Checks a class before it runs: names that are similar to a hook's, and hooks with wrong arguments."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from fedpipe.algorithms.base import Algorithm
from fedpipe.engine import contract

#: Names of hooks in version 0.1.0. A class that still has one would silently do what FedAvg does.
FORMER_HOOKS = {
    "combine": "aggregate",
    "work": "local_passes",
    "prepare": "personalize",
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
    "needs_epochs": "local_steps_refusal",
    "in_round": "bind_round",
    "without_dw": "dw_refusal",
}
SIMILARITY = 0.75  #: of a name and the hook that it may be a misspelling of: "kepe" and "keep"
FIELDS = frozenset(field.name for field in dataclasses.fields(Algorithm))
HOOKS = tuple(name for name in dir(Algorithm) if not name.startswith("_") and name not in FIELDS)


def find_naming_mistakes(algorithm: Algorithm) -> Iterator[str]:
    """What is wrong with the names of an algorithm's class, and with the arguments of its hooks."""
    label = contract.get_algorithm_name(algorithm)
    kinds = [kind for kind in type(algorithm).__mro__ if kind not in Algorithm.__mro__]
    used_names = set().union(*(_find_used_names(value) for kind in kinds for value in vars(kind).values()))
    fields = {field.name for field in dataclasses.fields(algorithm)}
    for kind in kinds:
        for name, value in vars(kind).items():
            if name in HOOKS and callable(getattr(Algorithm, name)):
                yield from _check_hook(label, name, value)
            elif not name.startswith("_") and name not in HOOKS and name not in fields | FIELDS:
                yield from _check_other_name(label, name, used_names)
    for name in fields:
        if name in HOOKS:
            yield f"{label}: its field '{name}' hides the hook of that name. It must have another name."


def _check_hook(label: str, name: str, value: Any) -> Iterator[str]:
    expected_arguments = [
        argument for argument in inspect.signature(getattr(Algorithm, name)).parameters if argument != "self"
    ]
    if isinstance(value, property) or not callable(getattr(value, "__func__", value)):
        yield f"{label}.{name} is no method. It must take ({', '.join(expected_arguments)})."
        return
    if not isinstance(value, FunctionType):  # a static or class method, a partial: calls will say
        return
    signature = inspect.signature(value)
    try:
        signature.bind(None, *expected_arguments)
    except TypeError:
        actual_arguments = [argument for argument in signature.parameters if argument != "self"]
        yield f"{label}.{name} takes ({', '.join(actual_arguments)}). It must take ({', '.join(expected_arguments)})."


def _check_other_name(label: str, name: str, used_names: set[str]) -> Iterator[str]:
    """Check a name that the class never uses. If it is not a hook, it has no effect."""
    if name in used_names:
        return
    matches = difflib.get_close_matches(name, (*HOOKS, *FORMER_HOOKS), n=1, cutoff=SIMILARITY)
    if matches:
        hook = FORMER_HOOKS.get(matches[0], matches[0])
        yield f"{label}.{name} is never called, since no hook has that name; if '{hook}' is meant, rename it."


def _find_used_names(value: Any) -> set[str]:
    """The names that a function takes of anything, its inner functions' too."""
    if isinstance(value, property):
        return set().union(*(_find_used_names(accessor) for accessor in (value.fget, value.fset, value.fdel)))
    if isinstance(value, functools.cached_property):
        return _find_used_names(value.func)
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return _find_names_in_code(code) if code is not None else set()


def _find_names_in_code(code: CodeType) -> set[str]:
    inner = (_find_names_in_code(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
