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

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.passes import Measure, Pass, Train, Update
from fedpipe.core.errors import SettingsError
from fedpipe.engine import contract

Function = Callable[..., Any]


def with_pass_validation(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, which refuses in a sentence what its passes should not give."""
    kind = type(algorithm)

    def wrap_hook(hook: str) -> Function:
        def list_passes(self: Algorithm, *args: Any) -> Sequence[Pass]:
            return [
                _validate_pass(self, step)
                for step in contract.validate_passes(self, hook, getattr(kind, hook)(self, *args))
            ]

        return list_passes

    hooks = {hook: wrap_hook(hook) for hook in ("personalize", "local_passes", "finetune")}
    twin = copy.copy(algorithm)
    object.__setattr__(twin, "__class__", type(kind.__name__, (kind,), hooks | {"__module__": __name__}))
    return twin


def _validate_pass(algorithm: Algorithm, pass_: Pass) -> Pass:
    def wrap_client_check(function: Function) -> Function:
        return _wrap_with_check(algorithm, function, _find_client_mistake)

    match pass_:
        case Train():
            return dataclasses.replace(
                pass_,
                loss=_wrap_with_check(algorithm, pass_.loss, _find_loss_mistake),
                step=pass_.step and wrap_client_check(pass_.step),
                when=pass_.when and _wrap_with_check(algorithm, pass_.when, _find_condition_mistake),
                after=pass_.after and wrap_client_check(pass_.after),
            )
        case Measure():
            return dataclasses.replace(
                pass_,
                sums=_wrap_with_check(algorithm, pass_.sums, _find_sums_mistake),
                then=wrap_client_check(pass_.then),
            )
        case Update():
            return dataclasses.replace(pass_, then=wrap_client_check(pass_.then))


def _wrap_with_check(
    algorithm: Algorithm, function: Function, find_mistake: Callable[[Any, dict[str, Any]], str | None]
) -> Function:
    """The function, followed by a look at what it gives."""

    def call_and_check(client: dict[str, Any], *args: Any) -> Any:
        result = function(client, *args)
        if message := find_mistake(result, client):
            raise SettingsError(
                f"{contract.get_algorithm_name(algorithm)}: {_describe_function(function)} gives {message}."
            )
        return result

    return call_and_check


def _find_loss_mistake(result: Any, client: dict[str, Any]) -> str | None:
    advice = "a loss should be a scalar, a mean over the batch"
    if not isinstance(result, Tensor):
        return f"{contract.describe_value(result)}; {advice}, as a tensor"
    if result.dim():
        return f"a tensor of shape {tuple(result.shape)}; {advice}"
    return None if result.is_floating_point() else f"{result.dtype}; {advice} of floating point"


def _find_client_mistake(result: Any, client: dict[str, Any]) -> str | None:
    advice = "it should be the client with its changes, as client | {'model': model}"
    if not isinstance(result, dict):
        return f"{contract.describe_value(result)}; {advice}"
    missing_parts = [part for part in client if part not in result]
    return f"no '{missing_parts[0]}', which the client had; {advice}" if missing_parts else None


def _find_sums_mistake(result: Any, client: dict[str, Any]) -> str | None:
    advice = "it should be named tensors, as {'loss': batch.sum(losses)}"
    if not isinstance(result, dict):
        return f"{contract.describe_value(result)}; {advice}"
    invalid_values = [value for value in result.values() if not isinstance(value, Tensor)]
    return f"{contract.describe_value(invalid_values[0])}; {advice}" if invalid_values else None


def _find_condition_mistake(result: Any, client: dict[str, Any]) -> str | None:
    if isinstance(result, Tensor) and not result.dim() and result.dtype == torch.bool:
        return None
    description = (
        f"{result.dtype} of shape {tuple(result.shape)}"
        if isinstance(result, Tensor)
        else contract.describe_value(result)
    )
    return f"{description}; a condition should be one truth value, as a tensor: client['steps'] < 10"


def _describe_function(function: Function) -> str:
    """A function's name, file and line."""
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__name__", "a pass")
    return f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else name
