"""Imports a user's class or function at a dotted path, such as own.Prox."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedpipe.core.errors import SettingsError, find_nearest_name


def import_member(key: str, path: str, is_suitable: Callable[[Any], bool], advice: str) -> Any:
    """Import a class or function.

    Parameters
    ----------
    key
        Key of params.yaml for messages.
    path
        Dotted path.
    is_suitable
        Whether a class or function of the module can be used instead of one that the module lacks.
    advice
        What to use if there is no such module, and if the module has nothing suitable. A sentence.

    Raises
    ------
    SettingsError
        It can't be imported. The message has the line of the user's code that fails, or the nearest name in the module.
    """
    module_name, _, member = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason, advice = _explain_import_failure(error, module_name, advice)
        raise SettingsError(f"{key}: '{path}' can't be imported ({reason}). {advice}") from error
    try:
        return getattr(module, member)
    except Exception as error:
        names = [
            name
            for name, value in vars(module).items()
            if is_suitable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        if nearest_name := find_nearest_name(member, names):
            advice = f"Did you mean '{module_name}.{nearest_name}'?"
        elif names:
            advice = f"Use one of: {', '.join(f'{module_name}.{name}' for name in names)}."
        raise SettingsError(f"{key}: '{path}' can't be imported ({error}). {advice}") from error


def _explain_import_failure(error: Exception, module: str, advice: str) -> tuple[str, str]:
    """Reason with the line of the user's code, and what to do. ``advice`` is for a module that does not exist."""
    if isinstance(error, SyntaxError):
        location = f"{Path(error.filename or module).name}, line {error.lineno}"
        code = f": `{error.text.strip()}`" if error.text else ""
        return f"{type(error).__name__}: {error.msg}, {location}{code}", "Correct this line."
    stem = module.rpartition(".")[2]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).stem == stem]
    if not lines:
        return str(error), advice
    message = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    return f"{message}, {stem}.py, line {lines[-1]}", _advise_on_failed_line(error)


def _advise_on_failed_line(error: Exception) -> str:
    """Advice for an error in a line of a user's module. A sentence."""
    if isinstance(error, ModuleNotFoundError):
        return f"Install {error.name}, or remove the import."
    if isinstance(error, TypeError) and "non-frozen dataclass from a frozen one" in str(error):
        traceback_entry = error.__traceback__
        while traceback_entry and traceback_entry.tb_next:
            traceback_entry = traceback_entry.tb_next
        rejected_class = (
            traceback_entry.tb_frame.f_locals.get("cls") if traceback_entry else None
        )  # frames of `dataclass`, which raised it
        location = f"above class {rejected_class.__name__}" if inspect.isclass(rejected_class) else "above the class"
        return f"Write `@dataclass(frozen=True, kw_only=True)` {location}."
    return "Correct this line."
