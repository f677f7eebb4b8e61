"""Explains errors in a user's code, with its file and line."""

from __future__ import annotations

import functools
import linecache
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import fedpipe
from fedpipe.algorithms.base import Algorithm
from fedpipe.core.components import component, registry
from fedpipe.core.errors import HookError, SettingsError, UserError
from fedpipe.core.tensors import MissingTensorError, NamesDifferError
from fedpipe.planning.hook_names import get_algorithm_name

#: Parts of PyTorch's errors about control flow that depends on values in a stack.
DATA_DEPENDENT_ERRORS = ("data-dependent control flow", ".item()", "dynamic shape", "not possible to vmap over .tolist")
RANDOMNESS_ERRORS = ("random operation", "randomness")
IN_PLACE_ERRORS = ("in-place", "inplace", "doesn't match the broadcast shape")

#: Names of frames inside a function.
INNER_FRAMES = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@contextmanager
def explain_user_errors(algorithm: Algorithm) -> Iterator[None]:
    """Convert an error in a user's code, algorithm or model, to a message with file and line.

    Errors in packaged code keep their traceback, and so does a lack of memory.
    """
    try:
        yield
    except HookError as error:
        raise SettingsError(explain_error(algorithm, error)) from error
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
        if isinstance(error, HookError):
            return f"{name}: {message}"
        if name in registry.list_components(component.ALGORITHM):
            return None
        if isinstance(error, NotImplementedError) and hasattr(Algorithm, frames[-1].name):
            return f"{name} has no '{frames[-1].name}'. Define that hook, or derive your class from FedAvg."
        last_frame = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE_FOLDER)][-1]
        path = Path(last_frame.filename).relative_to(_PACKAGE_FOLDER.parent)
        return (
            f"{name}: the result of one of its hooks can't be used ({type(error).__name__}: {message}, {path}, line "
            f"{last_frame.lineno}). {format_check_advice(algorithm)}"
        )
    frame = user_frames[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    prefix, error_text = f"{_describe_failed_hook(algorithm, user_frames)}: `{line}`", str(error)
    if isinstance(error, HookError):
        return f"{prefix} failed. {message}"
    if any(words in error_text for words in DATA_DEPENDENT_ERRORS):
        return (
            f"{prefix} reads a tensor's value in Python, as `if`, float() and item() do. Use torch.where, or `when` of "
            "a Train pass, because clients that train in one call have different values."
        )
    if any(words in error_text for words in RANDOMNESS_ERRORS):
        return f"{prefix} draws random numbers that do not depend on the study's seed. Use draw_normal or draw_uniform."
    if any(words in error_text for words in IN_PLACE_ERRORS):
        return f"{prefix} changes a tensor in place. Compute a new tensor, such as a = a + b."
    if type(error).__name__ == "FrozenInstanceError":
        return (
            f"{prefix} stores a value on the algorithm, which is frozen and the same for all clients. Return what a "
            "client needs in its next round from `keep`, and what the server needs from `aggregate`."
        )
    if isinstance(error, NamesDifferError):
        return f"{prefix} combines Tensors with different names: {_explain_unmatched_names(algorithm, error.names)}"
    if isinstance(error, MissingTensorError):
        return f"{prefix} calls the network without '{error.name}'. Pass a complete model, such as client['model']."
    if isinstance(error, KeyError):
        return f"{prefix} reads {message}, which does not exist. Use the name of an existing part or tensor."
    return f"{prefix} failed ({type(error).__name__}: {message}). Make it work for every client and round."


def format_check_advice(algorithm: Algorithm) -> str:
    """Advice about an error after a hook has returned."""
    return f"Type `fedpipe check {get_algorithm_name(algorithm)}` to find the hook."


def _describe_failed_hook(algorithm: Algorithm, user_frames: Sequence[traceback.FrameSummary]) -> str:
    """Name of the hook that failed, with the file and line of the user's innermost code."""
    hooks = [frame.name for frame in user_frames if hasattr(Algorithm, frame.name) and not frame.name.startswith("_")]
    label = ".".join([get_algorithm_name(algorithm), *hooks[:1]])
    frame, names = user_frames[-1], [frame.name for frame in user_frames if frame.name not in INNER_FRAMES]
    function = f", in {names[-1].replace('<lambda>', 'a lambda')}" if names and names[-1:] != hooks[:1] else ""
    return f"{label} ({Path(frame.filename).name}, line {frame.lineno}{function})"


def _explain_unmatched_names(algorithm: Algorithm, names: Sequence[str]) -> str:
    """Explain names that only one of two Tensors has."""
    summary = f"only one of them has {', '.join(names)}"
    net = getattr(algorithm, "net", None)
    if net is None or not {*names} <= {*net.buffer_names}:
        return f"{summary}. Use Tensors with the same names."
    return (
        f"{summary}. Use self.net.parameters(model), which leaves out BatchNorm's running statistics, because a "
        "gradient does not have them."
    )


def describe_error_and_line(error: Exception) -> str:
    """Describe an error with the line of the user's code that raised it."""
    user_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    message = str(error).strip().partition("\n")[0] or "no message"
    location = f", {Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno}" if user_frames else ""
    return f"{type(error).__name__}: {message}{location}"


def is_user_code(filename: str) -> bool:
    """Whether a file belongs to the user, not to fedpipe or an installed package."""
    path = Path(filename)
    return path.is_file() and not any(
        path.is_relative_to(folder) for folder in (_PACKAGE_FOLDER, *_get_installed_folders())
    )


_PACKAGE_FOLDER = Path(fedpipe.__file__).parent


@functools.cache
def _get_installed_folders() -> set[Path]:
    paths = sysconfig.get_paths()
    folders = {Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return folders | {Path(torch.__file__).parents[1]}
