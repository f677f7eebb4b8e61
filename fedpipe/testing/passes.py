"""An algorithm whose passes are looked at in every step: what a loss, a step, sums and conditions give.

The engine looks at what a client gives in the end; where a loss is no scalar, PyTorch would be the one to complain.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpipe.algorithms.base import Algorithm, Measure, Pass, Train, Update
from fedpipe.engine import contract
from fedpipe.errors import SettingsError

Function = Callable[..., Any]


def watched(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, which refuses in a sentence what its passes should not give."""
    kind = type(algorithm)

    def wrapped(hook: str) -> Function:
        def listed(self: Algorithm, *args: Any) -> Sequence[Pass]:
            return [_looked_at(self, step) for step in contract.passes(self, hook, getattr(kind, hook)(self, *args))]

        return listed

    hooks = {hook: wrapped(hook) for hook in ("personalize", "local_passes", "finetune")}
    twin = copy.copy(algorithm)
    object.__setattr__(twin, "__class__", type(kind.__name__, (kind,), hooks | {"__module__": __name__}))
    return twin


def _looked_at(algorithm: Algorithm, listed: Pass) -> Pass:
    def whole(function: Function) -> Function:
        return _after(algorithm, function, _whole)

    match listed:
        case Train():
            return dataclasses.replace(
                listed,
                loss=_after(algorithm, listed.loss, _loss),
                step=listed.step and whole(listed.step),
                when=listed.when and _after(algorithm, listed.when, _condition),
                after=listed.after and whole(listed.after),
            )
        case Measure():
            return dataclasses.replace(listed, sums=_after(algorithm, listed.sums, _sums), then=whole(listed.then))
        case Update():
            return dataclasses.replace(listed, then=whole(listed.then))


def _after(algorithm: Algorithm, function: Function, mistake: Callable[[Any, dict[str, Any]], str | None]) -> Function:
    """The function, followed by a look at what it gives."""

    def called(client: dict[str, Any], *args: Any) -> Any:
        given = function(client, *args)
        if told := mistake(given, client):
            raise SettingsError(f"{contract.name_of(algorithm)}: {_place(function)} gives {told}.")
        return given

    return called


def _loss(given: Any, client: dict[str, Any]) -> str | None:
    right = "a loss should be a scalar, a mean over the batch"
    if not isinstance(given, Tensor):
        return f"{contract.kind(given)}; {right}, as a tensor"
    if given.dim():
        return f"a tensor of shape {tuple(given.shape)}; {right}"
    return None if given.is_floating_point() else f"{given.dtype}; {right} of floating point"


def _whole(given: Any, client: dict[str, Any]) -> str | None:
    right = "it should be the client with its changes, as client | {'model': model}"
    if not isinstance(given, dict):
        return f"{contract.kind(given)}; {right}"
    lost = [part for part in client if part not in given]
    return f"no '{lost[0]}', which the client had; {right}" if lost else None


def _sums(given: Any, client: dict[str, Any]) -> str | None:
    right = "it should be named tensors, as {'loss': batch.sum(losses)}"
    if not isinstance(given, dict):
        return f"{contract.kind(given)}; {right}"
    odd = [value for value in given.values() if not isinstance(value, Tensor)]
    return f"{contract.kind(odd[0])}; {right}" if odd else None


def _condition(given: Any, client: dict[str, Any]) -> str | None:
    if isinstance(given, Tensor) and not given.dim() and given.dtype == torch.bool:
        return None
    found = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else contract.kind(given)
    return f"{found}; a condition should be one truth value, as a tensor: client['steps'] < 10"


def _place(function: Function) -> str:
    """A function's name, file and line."""
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__name__", "a pass")
    return f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else name
