"""Checks the results of hooks against the contract, in runs and in `fedpipe check`, with one message per violation."""

from __future__ import annotations

import functools
import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

import fedpipe
from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.passes import Measure, Pass, Train, Update
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError, UserError
from fedpipe.core.tensors import NamesDifferError, Tensors, describe_tensor
from fedpipe.settings.base import Protocol

#: Parts of PyTorch's errors about control flow that depends on values in a stack.
DATA_DEPENDENT_ERRORS = ("data-dependent control flow", ".item()", "dynamic shape", "not possible to vmap over .tolist")
RANDOMNESS_ERRORS = ("random operation", "randomness")
IN_PLACE_ERRORS = ("in-place", "inplace", "doesn't match the broadcast shape")

#: Columns of every run's rounds. A metric can't have these names.
ROUND_COLUMNS = ("algorithm", "seed", "key", "round", "participants", "left_out", "bytes_down", "bytes_up")

STATE_ADVICE = "it should give named parts, each a tensor or Tensors"


def get_algorithm_name(algorithm: Algorithm) -> str:
    """Name of an algorithm in params.yaml or its dotted path, without extensions."""
    classes = [base for base in type(algorithm).__mro__ if issubclass(base, Algorithm)]
    named_classes = [base for base in classes if not base.__module__.startswith("fedpipe.algorithms.extensions")]
    return registry.get_component_name(component.ALGORITHM, named_classes[0])


# -- what hooks give ---------------------------------------------------------------------------------------------------


def validate_state(algorithm: Algorithm, hook: str, result: Any) -> State:
    """Require that a hook returned a state.

    Raises
    ------
    SettingsError
        It did not. The message names the hook and its result.
    """
    if type(result) is not dict:
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}.{hook} gives {describe_value(result)}; {STATE_ADVICE}, as {{'model': "
            "model}."
        )
    for part, value in result.items():
        if not isinstance(part, str):
            raise SettingsError(
                f"{get_algorithm_name(algorithm)}.{hook} names a part {part!r}; its name should be a string."
            )
        if isinstance(value, Tensor):
            continue
        if not isinstance(value, Tensors):
            constructor = "torch.tensor(...)" if isinstance(value, (bool, int, float)) else "Tensors(...)"
            raise SettingsError(
                f"{get_algorithm_name(algorithm)}.{hook} gives '{part}' as {describe_value(value)}. Use a "
                "tensor or Tensors, "
                f"as {constructor} makes them."
            )
        for name, tensor in value.items():
            if not isinstance(tensor, Tensor):
                raise SettingsError(
                    f"{get_algorithm_name(algorithm)}.{hook} gives '{name}' in '{part}' as {describe_value(tensor)}. "
                    "Use a tensor."
                )
    return result


def validate_download(algorithm: Algorithm, result: Any) -> tuple[State, State]:
    """Require that `send` returned two states."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}.send gives {describe_value(result)}. It must give two states: what is "
            "common to all clients, "
            "and own parts stacked along a first axis, as ({'model': model}, {})."
        )
    common, client_parts = (validate_state(algorithm, "send", part) for part in result)
    return common, client_parts


def validate_passes(algorithm: Algorithm, hook: str, result: Any) -> list[Pass]:
    """Require that a hook returned a list of passes."""
    if not isinstance(result, Sequence) or not all(isinstance(pass_, (Train, Measure, Update)) for pass_ in result):
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}.{hook} gives {describe_value(result)}. It must give a tuple of "
            "passes, each a Train, Measure "
            "or Update, as (Train(self.loss),)."
        )
    for pass_ in result:
        needs_epochs = isinstance(pass_, Train) and pass_.epochs is None and (pass_.when or pass_.after)
        if needs_epochs and algorithm.federation.local_steps is not None:
            raise SettingsError(
                f"federation.local_steps: {algorithm.federation.local_steps} can't be used with "
                f"{get_algorithm_name(algorithm)}."
                f"{hook}, whose `when` or `after` goes by epochs. Use null, or the pass should have `epochs`."
            )
    return list(result)


def validate_metrics(algorithm: Algorithm, result: Mapping[str, Any]) -> dict[str, float]:
    """Require that `metrics` returned numbers without reserved names."""
    if reserved_name := next((name for name in result if name in ROUND_COLUMNS), None):
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}.metrics gives '{reserved_name}', which is recorded of every round "
            "already. It must have "
            "another name."
        )
    return {name: float(value) for name, value in result.items()}


def validate_extra_models(algorithm: Algorithm, result: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Require that `extra_models` returned models without the names of standard models."""
    if reserved_name := next((name for name in result if f"{name}-on-global" in get_args(Protocol)), None):
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}.extra_models gives '{reserved_name}', which is a model of protocols; it "
            "should have another "
            "name."
        )
    return dict(result)


def validate_pull(algorithm: Algorithm, training: Train, names: Sequence[str], client: State) -> None:
    """Require the target of a pass's pull. ``names`` are the trained tensors.

    Raises
    ------
    SettingsError
        The message names the missing part.
    """
    if training.pull is None:
        return
    target_part, trained_tensors = training.pull.to, client[training.group]
    target, problem = client.get(target_part), ""
    if not isinstance(target, Tensors):
        problem = f"no '{target_part}'" if target_part not in client else f"'{target_part}' as {describe_value(target)}"
    else:
        for name in reversed(names):
            if name not in target:
                problem = f"no '{name}' in '{target_part}'"
            elif (target[name].shape, target[name].dtype) != (trained_tensors[name].shape, trained_tensors[name].dtype):
                problem = (
                    f"'{name}' in '{target_part}' as {describe_tensor(target[name])}, where it trains "
                    f"{describe_tensor(trained_tensors[name])}"
                )
    if problem:
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}: a Train pass has a pull to '{target_part}', but the client has "
            f"{problem}. Use a part "
            f"that holds what the pass trains of '{training.group}', as `start` may give it."
        )


def validate_loss(algorithm: Algorithm, training: Train, result: Any) -> None:
    """Require a scalar loss that depends on the trained parameters.

    Raises
    ------
    SettingsError
        The message names the loss or the trained parameters.
    """
    advice, problem = "a loss should be a scalar, a mean over the batch", ""
    if not isinstance(result, Tensor):
        problem = f"{describe_value(result)}; {advice}, as a tensor"
    elif result.dim():
        problem = f"a tensor of shape {tuple(result.shape)}; {advice}"
    elif not result.is_floating_point():
        problem = f"{result.dtype}; {advice} of floating point"
    if problem:
        raise _make_pass_error(algorithm, training.loss, problem)
    if not result.requires_grad:
        raise SettingsError(
            f"{get_algorithm_name(algorithm)}: the loss of a Train pass depends on nothing that the pass trains of "
            f"'{training.group}'. Use computed from client['{training.group}'], without detach()."
        )


def update_client(algorithm: Algorithm, function: Callable[..., Any], client: State, *args: Any) -> State:
    """Apply a function of a pass, which must return the client's state."""
    result = function(client, *args)
    advice = "it should be the client with its changes, as client | {'model': model}"
    if not isinstance(result, dict):
        raise _make_pass_error(algorithm, function, f"{describe_value(result)}; {advice}")
    if missing_parts := [part for part in client if part not in result]:
        raise _make_pass_error(algorithm, function, f"no '{missing_parts[0]}', which the client had; {advice}")
    return result


def compute_condition(algorithm: Algorithm, function: Callable[[State], Any], client: State) -> Tensor:
    """Compute the condition of a pass, which must be one Boolean."""
    result = function(client)
    if isinstance(result, Tensor) and not result.dim() and result.dtype == torch.bool:
        return result
    is_tensor = isinstance(result, Tensor)
    description = f"{result.dtype} of shape {tuple(result.shape)}" if is_tensor else describe_value(result)
    advice = "a condition should be one truth value, as a tensor: client['steps'] < 10"
    raise _make_pass_error(algorithm, function, f"{description}; {advice}")


def compute_sums(algorithm: Algorithm, measuring: Measure, client: State, batch: Batch) -> dict[str, Tensor]:
    """Compute the sums of a Measure pass over a batch, which must be named tensors."""
    result: Any = measuring.sums(client, batch)
    is_dict = isinstance(result, dict)
    if invalid_values := [value for value in (result.values() if is_dict else [0]) if not isinstance(value, Tensor)]:
        value = invalid_values[0] if is_dict else result
        advice = "it should be named tensors, as {'loss': batch.sum(losses)}"
        raise _make_pass_error(algorithm, measuring.sums, f"{describe_value(value)}; {advice}")
    return cast(dict[str, Tensor], result)


def _make_pass_error(algorithm: Algorithm, function: Callable[..., Any], problem: str) -> SettingsError:
    """Make the error of a pass's function, with its name, file and line."""
    inner = getattr(function, "__func__", function)
    code, name = getattr(inner, "__code__", None), getattr(inner, "__name__", "a pass")
    label = f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else name
    return SettingsError(f"{get_algorithm_name(algorithm)}: {label} gives {problem}.")


def require_same_structure(
    algorithm: Algorithm, hook: str, result: State, reference: State, reference_source: str
) -> None:
    """Require the same parts, shapes and dtypes as those of another hook, or of the same hook earlier.

    Raises
    ------
    SettingsError
        The message names the hook and the part.
    """
    structure, reference_structure = describe_state(result), describe_state(reference)
    if structure == reference_structure:
        return
    hook_name = f"{get_algorithm_name(algorithm)}.{hook}"
    advice = "a state should have the same parts, of the same shapes and dtypes, in every round"
    for part in [*reference_structure, *(part for part in structure if part not in reference_structure)]:
        if part not in structure:
            raise SettingsError(f"{hook_name} gives no '{part}', which {reference_source} gives; {advice}.")
        if part not in reference_structure:
            raise SettingsError(f"{hook_name} gives '{part}', which {reference_source} does not give; {advice}.")
        if structure[part] != reference_structure[part]:
            raise SettingsError(
                f"{hook_name} gives '{part}' as {structure[part]}, and {reference_source} as "
                f"{reference_structure[part]}; {advice}."
            )


def describe_state(state: State) -> dict[str, str]:
    """Describe the parts of a state: dtype and shape by name."""
    flat: dict[str, str] = {}
    for part, value in state.items():
        if isinstance(value, Tensors):
            flat |= {f"{part}.{name}": describe_tensor(tensor) for name, tensor in value.items()}
            flat |= {} if value else {part: "Tensors without a tensor"}
        else:
            flat[part] = describe_tensor(value)
    return flat


def describe_value(value: Any) -> str:
    """Describe a value in a few words."""
    if value is None:
        return "nothing (None)"
    if isinstance(value, (bool, int, float, str)):
        return f"{value!r}, a Python {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "a bare tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# -- what fails --------------------------------------------------------------------------------------------------------


@contextmanager
def explain_user_errors(algorithm: Algorithm) -> Iterator[None]:
    """Convert an error in a user's code, algorithm or model, to a message with file and line.

    Errors in packaged code keep their traceback, and so does a lack of memory.
    """
    try:
        yield
    except (UserError, MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if explanation := explain_error(algorithm, error):
            raise SettingsError(explanation) from error
        raise


def explain_error(algorithm: Algorithm, error: Exception) -> str | None:
    """Explain an error in a user's code. None if no user code is in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_user_code(frame.filename)]
    name, message = get_algorithm_name(algorithm), str(error).strip().split("\n", 1)[0]
    if not user_frames:
        if name in registry.list_components(component.ALGORITHM):
            return None
        if isinstance(error, NotImplementedError) and hasattr(Algorithm, frames[-1].name):
            return f"{name} has no '{frames[-1].name}'. It must define that hook, or derive from FedAvg."
        last_frame = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE_FOLDER)][-1]
        path = Path(last_frame.filename).relative_to(_PACKAGE_FOLDER.parent)
        return (
            f"{name}: what one of its hooks gives can't be used ({type(error).__name__}: {message}; {path}, line "
            f"{last_frame.lineno}); `fedpipe check {name}` tells which, and what it should be."
        )
    frame = user_frames[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    prefix = f"{name}: {Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    error_text = str(error)
    if any(words in error_text for words in DATA_DEPENDENT_ERRORS):
        return (
            f"{prefix}: `{line}` takes a tensor's value into Python, as `if`, float() and item() do; clients that "
            "train "
            "in one call differ in it, so that it should be torch.where, or the condition `when` of a Train pass."
        )
    if any(words in error_text for words in RANDOMNESS_ERRORS):
        return (
            f"{prefix}: `{line}` draws random numbers of its own, which no seed of the study gives; an algorithm "
            "should "
            "leave what is random to batches, dropout and initial models."
        )
    if any(words in error_text for words in IN_PLACE_ERRORS):
        return f"{prefix}: `{line}` changes a tensor in place. It must make a new one, as a = a + b."
    if type(error).__name__ == "FrozenInstanceError":
        return (
            f"{prefix}: `{line}` keeps something on the algorithm, which is frozen and one for all clients; what a "
            "client remembers should be given by `keep`, what the server remembers by `aggregate`."
        )
    if isinstance(error, NamesDifferError):
        return (
            f"{prefix}: `{line}` combines tensors of different names: "
            f"{_explain_unmatched_names(algorithm, error.names)}"
        )
    if isinstance(error, KeyError):
        return f"{prefix}: `{line}` asks for {message}, which is not there. Use one of the parts at hand."
    return f"{prefix}: `{line}` fails ({type(error).__name__}: {message}). It must work for any client and round."


def _explain_unmatched_names(algorithm: Algorithm, names: Sequence[str]) -> str:
    """Explain names that only one of two Tensors has."""
    summary = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} in one only"
    net = getattr(algorithm, "net", None)
    if net is None or not {*names} <= {*net.buffer_names}:
        return f"{summary}. Use tensors of the same names."
    return (
        f"{summary}; BatchNorm's running statistics, which a gradient does not have, are left out by "
        "self.net.parameters(model)."
    )


def describe_error(error: Exception) -> str:
    """Describe an error with the line of the user's code that raised it."""
    user_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    description = (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    )
    return (
        f"{description}, {Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno}"
        if user_frames
        else description
    )


def is_user_code(filename: str) -> bool:
    """Whether a file belongs to the user, not to fedpipe or an installed package."""
    path = Path(filename)
    return path.is_file() and not any(
        path.is_relative_to(folder) for folder in (_PACKAGE_FOLDER, *_get_installed_folders())
    )


_PACKAGE_FOLDER = Path(fedpipe.__file__).parent


@functools.cache
def _get_installed_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {
        str(Path(torch.__file__).parents[1])
    }
    return tuple(Path(path) for path in sorted(folders))
