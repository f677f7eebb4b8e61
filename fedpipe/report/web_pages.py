"""Templates of web pages that contain their style."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2


def build_template_environment(
    folder: Path, css_name: str, *functions: Callable[..., Any], **constants: Any
) -> jinja2.Environment:
    """Build the environment of a folder's templates, which escape all text.

    Templates use the functions and constants by their names, and the content of the CSS file as ``style``.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do"],
    )
    style = (folder / css_name).read_text(encoding="utf-8")
    environment.globals |= {function.__name__: function for function in functions} | constants | {"style": style}
    return environment
