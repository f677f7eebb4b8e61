"""Checks the results of hooks against the contract, in runs and in `fedpipe check`, with one message per violation.

The functions raise ``SettingsError``, whose message names the hook or pass, its result and the advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.passes import Measure, Pass, Train, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.tensors import Tensors, describe_tensor
from fedpipe.engine.user_errors import explain_user_errors, is_user_code
from fedpipe.planning.hook_names import get_algorithm_name
from fedpipe.settings.base import Protocol

#: Columns of every run's rounds. A metric can't have these names.
ROUND_COLUMNS = ("algorithm", "seed", "key", "round", "participants", "left_out", "bytes_down", "bytes_up")

STATE_ADVICE = "Return a dict of named parts, each a tensor or Tensors, such as {'model': model}."


# -- results of hooks --------------------------------------------------------------------------------------------------


def validate_state(algorithm: Algorithm, hook: str, result: Any) -> State:
    """Require that a hook returned a state."""
    if type(result) is not dict:
        raise _make_hook_error(algorithm, hook, describe_value(result), STATE_ADVICE)
    for part, value in result.items():
        if not isinstance(part, str):
            problem = f"a part with the name {part!r}"
            raise _make_hook_error(algorithm, hook, problem, "Use a string, such as 'model'.")
        if isinstance(value, Tensor):
            continue
        if not isinstance(value, Tensors):
            problem = f"'{part}' as {describe_value(value)}"
            raise _make_hook_error(algorithm, hook, problem, _format_tensor_advice(value))
        for name, tensor in value.items():
            if not isinstance(tensor, Tensor):
                problem = f"'{name}' in '{part}' as {describe_value(tensor)}"
                raise _make_hook_error(algorithm, hook, problem, _format_tensor_advice(tensor))
    return result


def reject_reserved_part_names(algorithm: Algorithm, hook: str, parts: Iterable[str]) -> None:
    """Reject parts with the engine's names of running statistics."""
    if part := next((part for part in parts if part.partition("/")[0] == "buffers"), None):
        problem = f"'{part}', which is fedpipe's name of BatchNorm's running statistics"
        raise _make_hook_error(algorithm, hook, problem, "Use another name.")


def validate_server_optimizer_part(algorithm: Algorithm, part: str, state: State) -> None:
    """Require the part that the server's optimizer updates in the server's initial state."""
    if not isinstance(state.get(part), Tensors):
        raise SettingsError(
            f"{describe_hook(algorithm, 'init')} returned no model '{part}', which "
            f"federation.server: {algorithm.federation.server.optimizer} updates. Set the class variable "
            "`server_optimizer_part` to the part that your `aggregate` averages. If there is none, set it to None, and "
            "remove federation.server."
        )


def validate_uploaded_statistics(algorithm: Algorithm, parts: Sequence[str], uploads: Uploads, server: State) -> None:
    """Require running statistics of models in the uploaded parts that have names of parts of the server's state.

    They have the dtypes and shapes of the server's, and no negative variance.
    """
    minima: dict[str, Tensor] = {}
    for part in parts:
        reference = describe_state({part: server.get(part, Tensors())})
        for name, value in algorithm.net.buffers(uploads.states[0][part]).items():
            description, expected = describe_tensor(value), reference.get(f"{part}.{name}")
            if expected and description != expected:
                problem = f"as {description}, but the server has it as {expected}"
                raise _make_statistics_error(algorithm, f"{part}.{name}", problem)
            if name.endswith("running_var"):
                minima[f"{part}.{name}"] = torch.stack([model[name] for model in uploads[part]]).min()
    if minima and (minimum := torch.stack([*minima.values()]).min()) < 0:  # the only transfer from the server's device
        name = next(name for name, value in minima.items() if value == minimum)
        raise _make_statistics_error(algorithm, name, f"with a negative variance ({minimum:.3g})")


def _make_statistics_error(algorithm: Algorithm, name: str, problem: str) -> SettingsError:
    advice = (
        "fedpipe averages BatchNorm's running statistics of each uploaded part that has the name of a part of the "
        "server. If the part is a complete model, change only self.net.parameters(model). If it contains something "
        "else, such as differences or codes, give it another name."
    )
    return _make_hook_error(algorithm, "upload", f"'{name}' {problem}", advice)


def validate_download(algorithm: Algorithm, result: Any) -> tuple[State, State]:
    """Require that `send` returned two states."""
    if not isinstance(result, tuple) or len(result) != 2:
        advice = (
            "Return a tuple of two dicts, such as ({'model': model}, {}): the parts that all clients receive, and the "
            "parts of each client, stacked along a first axis."
        )
        raise _make_hook_error(algorithm, "send", describe_value(result), advice)
    common, client_parts = (validate_state(algorithm, "send", part) for part in result)
    return common, client_parts


def validate_passes(algorithm: Algorithm, hook: str, result: Any) -> list[Pass]:
    """Require that a hook returned a list of passes."""
    if not isinstance(result, Sequence) or not all(isinstance(pass_, (Train, Measure, Update)) for pass_ in result):
        advice = "Return a tuple of passes (Train, Measure or Update), such as (Train(self.loss),)."
        raise _make_hook_error(algorithm, hook, describe_value(result), advice)
    for pass_ in result:
        needs_epochs = isinstance(pass_, Train) and pass_.epochs is None and (pass_.when or pass_.after)
        if needs_epochs and algorithm.federation.local_steps is not None:
            raise SettingsError(
                f"federation.local_steps: {algorithm.federation.local_steps} can't be used with "
                f"{describe_hook(algorithm, hook)}, because `when` and `after` of a Train pass run once per epoch. "
                "Use null, or set `epochs` of that pass."
            )
        if needs_epochs and has_local_steps_hook(algorithm):
            raise SettingsError(
                f"{describe_hook(algorithm, 'count_local_steps')} can't be used with {describe_hook(algorithm, hook)}, "
                "because `when` and `after` of a Train pass run once per epoch. Set `epochs` of that pass."
            )
    return list(result)


def validate_participants(algorithm: Algorithm, result: Any) -> list[int]:
    """Require that `select_participants` returned the right number of different clients. Return them in order."""
    clients, count = algorithm.federation.clients, algorithm.federation.participants
    ids = result.tolist() if isinstance(result, (Tensor, np.ndarray)) else result
    is_list = isinstance(ids, Sequence) and all(isinstance(client, (int, np.integer)) for client in ids)
    if not (is_list and len(set(ids)) == len(ids) == count and set(ids) <= set(range(clients))):
        advice = f"Return {count} different numbers from 0 to {clients - 1}."
        raise _make_hook_error(algorithm, "select_participants", describe_value(result), advice)
    return sorted(map(int, ids))


def has_local_steps_hook(algorithm: Algorithm) -> bool:
    """Whether the algorithm counts the local steps of each client."""
    return type(algorithm).count_local_steps is not Algorithm.count_local_steps


def count_local_steps(algorithm: Algorithm, size: int, round_number: int, noise_key: Tensor) -> int:
    """Count a client's local steps with the hook of that name, and require a whole number of at least 1."""
    with explain_user_errors(algorithm):
        result: Any = algorithm.count_local_steps(size, round_number, noise_key)
    steps = result.tolist() if isinstance(result, (Tensor, np.generic)) else result
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        advice = "Return a whole number of at least 1."
        raise _make_hook_error(algorithm, "count_local_steps", describe_value(result), advice)
    return steps


def validate_logits(algorithm: Algorithm, hook: str, result: Any, shape: tuple[int, int]) -> Tensor:
    """Require that `predict` or `prototype_logits` returned logits of this shape (B, C)."""
    if isinstance(result, Tensor) and result.is_floating_point() and result.shape == shape:
        return result
    problem = f"{_describe_tensor_or_value(result)} for {shape[0]} samples and {shape[1]} classes"
    advice = "Return logits of shape (samples, classes), as floating-point numbers."
    raise _make_hook_error(algorithm, hook, problem, advice)


def validate_metrics(algorithm: Algorithm, result: Mapping[str, Any]) -> dict[str, float]:
    """Require that `metrics` returned numbers without reserved names."""
    if reserved_name := next((name for name in result if name in ROUND_COLUMNS), None):
        problem = f"'{reserved_name}', which is already a column of every run"
        raise _make_hook_error(algorithm, "metrics", problem, "Use another name.")
    for name, value in result.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            problem = f"'{name}' as {describe_tensor(value)}"
            raise _make_hook_error(algorithm, "metrics", problem, "Return one number, such as its mean.")
    return {name: float(value) for name, value in result.items()}


def validate_matrices(algorithm: Algorithm, result: Mapping[str, Any]) -> dict[str, Tensor]:
    """Require that `matrices` returned tensors with rows and columns."""
    for name, value in result.items():
        if not isinstance(value, Tensor) or value.dim() != 2:
            problem = f"'{name}' as {_describe_tensor_or_value(value)}"
            raise _make_hook_error(algorithm, "matrices", problem, "Return a tensor of shape (classes, classes).")
    return dict(result)


def compute_global_model(algorithm: Algorithm, server: State) -> Tensors | None:
    """Call `global_model`, and require a complete model or None."""
    result: Any = algorithm.global_model(server)
    return None if result is None else _validate_model(algorithm, "global_model", result)


def compute_extra_models(algorithm: Algorithm, server: State) -> dict[str, Tensors]:
    """Call `extra_models`, and require complete models without the names of standard models."""
    result = algorithm.extra_models(server)
    if reserved_name := next((name for name in result if f"{name}-on-global" in get_args(Protocol)), None):
        problem = f"'{reserved_name}', which is already the model of a protocol"
        raise _make_hook_error(algorithm, "extra_models", problem, "Use another name.")
    return {name: _validate_model(algorithm, "extra_models", model) for name, model in result.items()}


def _validate_model(algorithm: Algorithm, hook: str, result: Any) -> Tensors:
    """Require all tensors of the network, with their shapes."""
    problem = ""
    if not isinstance(result, Tensors):
        problem = describe_value(result)
    for name, shape in algorithm.net.shapes.items() if not problem else ():
        if name not in result:
            problem = f"a model without '{name}'"
        elif result[name].shape != shape:
            problem = f"'{name}' as {describe_tensor(result[name])} instead of shape {tuple(shape)}"
    if problem:
        advice = "Return Tensors with all parameters of the network, such as server['model']."
        raise _make_hook_error(algorithm, hook, problem, advice)
    return cast(Tensors, result)


def validate_trained_names(algorithm: Algorithm, training: Train, names: Sequence[str], client: State) -> None:
    """Require that the trained part has the trained tensors ``names`` of a pass."""
    known_names = training.get_trained_part_tensors(client)
    if unknown_name := next((name for name in names if name not in known_names), None):
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}: `only` of a Train pass has '{unknown_name}', which is not in "
            f"'{training.first_trained_part}'. {suggest_name(unknown_name, [*known_names])}"
        )


def validate_pull_target(algorithm: Algorithm, training: Train, names: Sequence[str], client: State) -> None:
    """Require the target of a pass's pull. ``names`` are the trained tensors."""
    if training.pull is None:
        return
    target_part, trained_tensors = training.pull.to, training.get_trained_part_tensors(client)
    target, problem = client.get(target_part), ""
    if target_part not in client:
        problem = f"the client has no '{target_part}'"
    elif not isinstance(target, Tensors):
        problem = f"the client has '{target_part}' as {describe_value(target)}"
    else:
        for name in reversed(names):
            if name not in target:
                problem = f"'{target_part}' has no '{name}'"
            elif (target[name].shape, target[name].dtype) != (trained_tensors[name].shape, trained_tensors[name].dtype):
                problem = (
                    f"'{name}' is {describe_tensor(target[name])} in '{target_part}' and "
                    f"{describe_tensor(trained_tensors[name])} in '{training.first_trained_part}'"
                )
    if problem:
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}: a Train pass has a pull to '{target_part}', but {problem}. Return "
            f"'{target_part}' from `start`, with a tensor of the same shape and dtype for each trained tensor of "
            f"'{training.first_trained_part}'."
        )


def validate_loss(algorithm: Algorithm, training: Train, result: Any) -> None:
    """Require a scalar loss that depends on the trained parameters."""
    problem = ""
    if not isinstance(result, Tensor):
        problem = describe_value(result)
    elif result.dim():
        problem = f"a tensor of shape {tuple(result.shape)}"
    elif not result.is_floating_point():
        problem = f"a tensor of {result.dtype}"
    if problem:
        advice = "Return a floating-point scalar tensor, such as batch.mean(losses)."
        raise _make_pass_error(algorithm, training.loss, problem, advice)
    if not result.requires_grad:
        raise SettingsError(
            f"{_describe_function(algorithm, training.loss)} returned a loss that does not depend on the parameters of "
            f"'{training.first_trained_part}', which its Train pass trains. Compute it from "
            f"client['{training.first_trained_part}'] without detach()."
        )


def call_pass_function(algorithm: Algorithm, function: Callable[..., Any], client: State, *args: Any) -> State:
    """Apply a function of a pass, which must return the client's state."""
    result = function(client, *args)
    advice = "Return the client with your changes, such as client | {'model': model}."
    if not isinstance(result, dict):
        raise _make_pass_error(algorithm, function, describe_value(result), advice)
    if missing_parts := [part for part in client if part not in result]:
        problem = f"a client without '{missing_parts[0]}', which it had before"
        raise _make_pass_error(algorithm, function, problem, advice)
    return result


def compute_pass_condition(algorithm: Algorithm, function: Callable[[State], Any], client: State) -> Tensor:
    """Compute the condition of a pass, which must be one Boolean."""
    result = function(client)
    if isinstance(result, Tensor) and not result.dim() and result.dtype == torch.bool:
        return result
    is_tensor = isinstance(result, Tensor)
    problem = f"a tensor of {result.dtype} and shape {tuple(result.shape)}" if is_tensor else describe_value(result)
    advice = "Return a Boolean scalar tensor from `when`, such as client['steps'] < 10."
    raise _make_pass_error(algorithm, function, problem, advice)


def compute_measure_pass_sums(
    algorithm: Algorithm, measuring: Measure, client: State, batch: Batch
) -> dict[str, Tensor]:
    """Compute the sums of a Measure pass over a batch, which must be named tensors."""
    result: Any = measuring.sums(client, batch)
    advice = "Return a dict of tensors from `sums`, such as {'loss': batch.sum(losses)}."
    if not isinstance(result, dict):
        raise _make_pass_error(algorithm, measuring.sums, describe_value(result), advice)
    for name, value in result.items():
        if not isinstance(value, Tensor):
            raise _make_pass_error(algorithm, measuring.sums, f"'{name}' as {describe_value(value)}", advice)
    return cast(dict[str, Tensor], result)


def require_same_structure(
    algorithm: Algorithm, hook: str, result: State, reference: State, reference_hook: str | None = None
) -> None:
    """Require the same parts, shapes and dtypes as those of another hook, or (None) of the hook for another client."""
    structure, reference_structure = describe_state(result), describe_state(reference)
    if structure == reference_structure:
        return
    parts = [*reference_structure, *(part for part in structure if part not in reference_structure)]
    part = next(part for part in parts if structure.get(part) != reference_structure.get(part))
    description, reference_description = structure.get(part), reference_structure.get(part)
    problem = f"returned '{part}' as {description}" if description else f"returned no '{part}'"
    contrast = f"returned it as {reference_description}" if reference_description else "did not return it"
    if reference_hook is not None:
        contrast, places = f"{reference_hook} {contrast}", f"from {hook} and {reference_hook}"
    else:
        contrast, places = f"{contrast} for another client", "for all clients"
    raise SettingsError(
        f"{describe_hook(algorithm, hook)} {problem}, but {contrast}. Return the same parts, with the same shapes and "
        f"dtypes, {places}."
    )


# -- words of messages -------------------------------------------------------------------------------------------------


def describe_hook(algorithm: Algorithm, hook: str) -> str:
    """Name of an algorithm's hook, with the file and line of its definition if it is a user's."""
    functions = [vars(base)[hook] for base in type(algorithm).__mro__ if hook in vars(base)]
    codes = [code for function in functions if (code := getattr(function, "__code__", None))]
    user_code = next((code for code in codes if is_user_code(code.co_filename)), None)
    label = f"{get_algorithm_name(algorithm)}.{hook}"
    return f"{label} ({_format_code_location(user_code)})" if user_code else label


def _describe_function(algorithm: Algorithm, function: Callable[..., Any]) -> str:
    """Name of a function of a pass, with file and line."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(function, "__name__", "a function of a pass").replace("<lambda>", "a lambda")
    separator = "." if isinstance(getattr(function, "__self__", None), Algorithm) else ": "
    label = f"{get_algorithm_name(algorithm)}{separator}{name}"
    return f"{label} ({_format_code_location(code)})" if code else label


def _format_code_location(code: CodeType) -> str:
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


def _make_hook_error(algorithm: Algorithm, hook: str, problem: str, advice: str) -> SettingsError:
    """Make the error of a hook's result, with the hook's name, and file and line if it is a user's."""
    return SettingsError(f"{describe_hook(algorithm, hook)} returned {problem}. {advice}")


def _make_pass_error(algorithm: Algorithm, function: Callable[..., Any], problem: str, advice: str) -> SettingsError:
    """Make the error of a pass's function, with its name, file and line."""
    return SettingsError(f"{_describe_function(algorithm, function)} returned {problem}. {advice}")


def _format_tensor_advice(value: Any) -> str:
    """Advise what to return instead of a value that is not a tensor."""
    if isinstance(value, (bool, int, float)):
        return f"Return a tensor, such as torch.tensor({value!r})."
    if isinstance(value, Mapping):
        return "Wrap the dict in Tensors(...)."
    return "Return a tensor or Tensors."


def describe_state(state: State) -> dict[str, str]:
    """Describe the parts of a state: dtype and shape by name."""
    flat: dict[str, str] = {}
    for part, value in state.items():
        if isinstance(value, Tensors):
            flat |= {f"{part}.{name}": describe_tensor(tensor) for name, tensor in value.items()}
            flat |= {} if value else {part: "empty Tensors"}
        else:
            flat[part] = describe_tensor(value)
    return flat


def _describe_tensor_or_value(value: Any) -> str:
    return describe_tensor(value) if isinstance(value, Tensor) else describe_value(value)


def describe_value(value: Any) -> str:
    """Describe a value in a few words."""
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, str)):
        return f"{value!r}, a Python {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of length {len(value)}"
    kind = "tensor" if isinstance(value, Tensor) else type(value).__name__
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
