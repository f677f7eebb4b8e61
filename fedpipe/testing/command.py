"""The command `fedpipe check`: builds an algorithm as params.yaml would and runs the checks of the contract."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from fedpipe.algorithms.base import Algorithm
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.yaml_text import read_yaml
from fedpipe.engine.user_errors import describe_error_and_line
from fedpipe.settings import loader, methods
from fedpipe.testing.checks import check_algorithm


def build_and_check_algorithm(name: str, settings: Sequence[str], params: Path | None = None) -> list[str]:
    """Check an algorithm. Return one message per violation, also if it can't be built.

    Checks run small federations that are made to reveal violations, not the study's data. ``name`` is a name or a
    dotted path. With ``params`` it is a method of that study, which has all parameters except ``settings``
    (``key=value``).
    """
    torch.set_num_threads(1)
    try:
        parameters = _parse_parameters(settings)
        algorithm = (
            methods.parse_algorithm(loader.read_params(params), name, parameters)
            if params
            else registry.build_component(component.ALGORITHM, name, parameters, name)
        )
    except SettingsError as error:
        return str(error).splitlines()
    except Exception as error:  # any error in the __post_init__ of a user's class
        return [
            f"{name}: the class fails with these parameters ({describe_error_and_line(error)}). Correct the class "
            "or use other parameters."
        ]
    try:
        return check_algorithm(cast(Algorithm, algorithm), _print_progress if sys.stderr.isatty() else None)
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _parse_parameters(settings: Sequence[str]) -> dict[str, Any]:
    parameters = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not (key and equals):
            raise SettingsError(f"--set: '{setting}' can't be used. Use KEY=VALUE, such as mu=0.1.")
        try:
            parameters[key] = read_yaml(text, key)
        except SettingsError:
            raise SettingsError(f"--set: '{setting}' can't be read. Write the value as in params.yaml.") from None
    return parameters


def _print_progress(title: str, number: int, count: int) -> None:
    print(f"\r\033[K{number + 1} of {count}: {title}", end="", file=sys.stderr, flush=True)
