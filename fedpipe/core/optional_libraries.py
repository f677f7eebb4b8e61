"""Imports libraries that only some settings need."""

import importlib
from typing import Any

from fedpipe.core.errors import SettingsError


def import_optional_library(name: str, key: str, value: str) -> Any:
    """Import a library that a setting needs. The setting's value is also the name of fedpipe's extra.

    Raises a SettingsError if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.replace("_", "-")
        raise SettingsError(
            f"{key}: '{value}' needs the library {library}. Run `pip install 'fedpipe[{value}]'`."
        ) from None
