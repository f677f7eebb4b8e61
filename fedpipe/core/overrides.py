"""Checks the methods of a user's class that override those of a base class: their arguments and their names."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

SIMILARITY = 0.75  #: least similarity of a misspelled name and its method, such as "kepe" and "keep"


def find_override_mistakes(label: str, name: str, value: Any, base_class: type) -> Iterator[str]:
    """Check that the value of a class can be called like the method of its base class.

    Yields a message that begins with ``label``, the name of the class.
    """
    expected_arguments = [
        argument for argument in inspect.signature(getattr(base_class, name)).parameters if argument != "self"
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


def find_similar_name(name: str, method_names: Iterable[str]) -> str | None:
    """Find the method that a misspelled name probably means."""
    return next(iter(difflib.get_close_matches(name, tuple(method_names), n=1, cutoff=SIMILARITY)), None)


def find_names_in_methods(classes: Iterable[type]) -> set[str]:
    """Names of attributes and globals that the methods of classes use."""
    return set[str]().union(*(_find_names_in_value(value) for base in classes for value in vars(base).values()))


def _find_names_in_value(value: Any) -> set[str]:
    """Names that a function or its inner functions use."""
    if isinstance(value, property):
        return set[str]().union(*(_find_names_in_value(accessor) for accessor in (value.fget, value.fset, value.fdel)))
    if isinstance(value, functools.cached_property):
        return _find_names_in_value(value.func)
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return _find_names_in_code(code) if code is not None else set()


def _find_names_in_code(code: CodeType) -> set[str]:
    inner = (_find_names_in_code(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
