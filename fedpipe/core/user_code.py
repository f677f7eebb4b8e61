"""Imports a user's class or function at a dotted path, such as own.Prox."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from fedpipe.core.errors import SettingsError, find_nearest_name

UNSEEDED_GENERATORS = "__unseeded_generators__"  #: attribute of a module: libraries from which it draws without a seed


def import_user_object(key: str, path: str, is_suitable: Callable[[Any], bool], advice: str) -> Any:
    """Import the class or function at a dotted path, which a key of params.yaml names.

    Raises an error if it can't be imported. The message has the line of the user's code that fails, or the nearest name
    in the module that ``is_suitable`` accepts. If there is none, it ends with ``advice``, a sentence.
    """
    module_name, _, member = path.rpartition(".")
    try:
        module = _import_and_watch_module(module_name)
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


def require_seeded_import(key: str, path: str) -> None:
    """Require that the import of an object's module drew no random numbers without a seed."""
    module_name = path.rpartition(".")[0]
    if libraries := getattr(sys.modules.get(module_name), UNSEEDED_GENERATORS, []):
        raise SettingsError(
            f"{key}: '{path}' can't be used, because the import of {module_name} draws random numbers from "
            f"{libraries[0]}'s global generator, which differ in each job. Use a generator with a seed, such as "
            "np.random.default_rng(0), or draw_normal in a hook."
        )


def read_generator_states() -> dict[str, Any]:
    """Read the states of the global random generators, by the name of the library. Only of imported libraries."""
    states: dict[str, Any] = {"Python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        _, words, *position = numpy.random.get_state()
        states["NumPy"] = (words.tobytes(), *position)
    if torch := sys.modules.get("torch"):
        states["PyTorch"] = torch.get_rng_state().numpy().tobytes()
    return states


def _import_and_watch_module(name: str) -> ModuleType:
    """Import a module, and record from which global generators it draws without a seed."""
    old_names, states = {*sys.modules}, read_generator_states()
    module = importlib.import_module(name)
    new_states = read_generator_states()  # a library that was imported now had no state
    if name not in old_names and any(new_states[library] != state for library, state in states.items()):
        folder = Path(str(module.__file__)).parent
        new_modules = [sys.modules[new_name] for new_name in sys.modules.keys() - old_names]
        user_modules = [entry for entry in new_modules if Path(str(getattr(entry, "__file__", None))).parent == folder]
        setattr(module, UNSEEDED_GENERATORS, _find_unseeded_generators(user_modules))
    return module


def _find_unseeded_generators(modules: Sequence[ModuleType]) -> list[str]:
    """Execute modules again, and find the libraries whose generators change.

    The second time, all libraries are already imported, and code that sets a seed sets the state that the generator
    already has. Some libraries, such as scikit-learn, draw from Python's generator while they are imported.
    """
    states = read_generator_states()
    for spec in (module.__spec__ for module in modules):
        if spec is None or spec.loader is None:
            continue
        with suppress(Exception):  # code that can run only once
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return [library for library, state in read_generator_states().items() if state != states.get(library)]


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
    return f"{message}, {stem}.py, line {lines[-1]}", _format_failed_line_advice(error)


def _format_failed_line_advice(error: Exception) -> str:
    """Advice for an error in a line of a user's module. A sentence."""
    if isinstance(error, ModuleNotFoundError):
        return f"Install {error.name}, or remove the import."
    if isinstance(error, TypeError) and "non-frozen dataclass from a frozen one" in str(error):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # of `dataclass`, which raised it
        rejected_class = frame.f_locals.get("cls")
        location = f"above class {rejected_class.__name__}" if inspect.isclass(rejected_class) else "above the class"
        return f"Write `@dataclass(frozen=True, kw_only=True)` {location}."
    return "Correct this line."
