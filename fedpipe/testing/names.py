"""What a class says before anything runs: names that are nearly a hook's, and hooks that take the wrong arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from fedpipe.algorithms.base import Algorithm
from fedpipe.engine import contract

#: Names that hooks had once.
FORMER = {
    "combine": "aggregate",
    "work": "local_passes",
    "prepare": "personalize",
    "first": "init_client",
    "deploy": "global_model",
    "beside": "extra_models",
    "observe": "metrics",
    "exchanged": "matrices",
    "nearest": "prototype_logits",
}
FIELDS = frozenset(field.name for field in dataclasses.fields(Algorithm))
HOOKS = tuple(name for name in dir(Algorithm) if not name.startswith("_") and name not in FIELDS)


def sentences(algorithm: Algorithm) -> Iterator[str]:
    """What is wrong with the names of an algorithm's class, and with the arguments of its hooks."""
    label = contract.name_of(algorithm)
    kinds = [kind for kind in type(algorithm).__mro__ if kind not in Algorithm.__mro__]
    used = set().union(*(_used(value) for kind in kinds for value in vars(kind).values()))
    fields = {field.name for field in dataclasses.fields(algorithm)}
    for kind in kinds:
        for name, value in vars(kind).items():
            if name in HOOKS and callable(getattr(Algorithm, name)):
                yield from _hook(label, name, value)
            elif not name.startswith("_") and name not in HOOKS and name not in fields | FIELDS:
                yield from _other(label, name, used)
    for name in fields:
        if name in HOOKS:
            yield f"{label}: its field '{name}' hides the hook of that name; it should have another name."


def _hook(label: str, name: str, value: Any) -> Iterator[str]:
    wanted = [part for part in inspect.signature(getattr(Algorithm, name)).parameters if part != "self"]
    if isinstance(value, property) or not callable(getattr(value, "__func__", value)):
        yield f"{label}.{name} is no method; it should take ({', '.join(wanted)})."
        return
    if not isinstance(value, FunctionType):  # a static or class method, a partial: calls will say
        return
    signature = inspect.signature(value)
    try:
        signature.bind(None, *wanted)
    except TypeError:
        found = [part for part in signature.parameters if part != "self"]
        yield f"{label}.{name} takes ({', '.join(found)}); it should take ({', '.join(wanted)})."


def _other(label: str, name: str, used: set[str]) -> Iterator[str]:
    """A name that is no hook's and that the class itself never uses: nobody calls it, so that it has no effect."""
    if name in used:
        return
    edits, near = min((distance(name, hook), hook) for hook in (*HOOKS, *FORMER))
    if edits <= 2 and edits < len(near) / 2:
        right = FORMER.get(near, near)
        yield f"{label}.{name} is never called, since no hook has that name; if '{right}' is meant, rename it."


def _used(value: Any) -> set[str]:
    """The names that a function takes of anything, its inner functions' too."""
    if isinstance(value, property):
        return set().union(*(_used(part) for part in (value.fget, value.fset, value.fdel)))
    if isinstance(value, functools.cached_property):
        return _used(value.func)
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return _in(code) if code is not None else set()


def _in(code: CodeType) -> set[str]:
    inner = (_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def distance(one: str, other: str) -> int:
    """Letters to insert, to leave out, to change or to swap with their neighbor until two names are equal."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        last, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted)))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]
