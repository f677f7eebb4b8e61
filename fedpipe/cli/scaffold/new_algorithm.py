"""Writes a new algorithm and its test from the folder ``templates``."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from fedpipe.cli.scaffold import templates
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files


def write_algorithm_template(name: str) -> list[Path]:
    """Write ``fedpipe/algorithms/<name>.py`` and its test below the working directory. Return both paths.

    Nothing is written if the name exists or is invalid, or if the working directory is not a clone of fedpipe.
    """
    if keyword.iskeyword(name):
        raise SettingsError(f"'{name}' is a keyword of Python. Use another name, such as my_avg.")
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise SettingsError(
            f"'{name}' can't be an algorithm's name. Use lowercase letters, digits and _, such as my_avg."
        )
    if not Path("fedpipe/algorithms/base.py").is_file():
        raise SettingsError(f"'{name}' can't be created here. Change to the root of a clone of fedpipe.")
    code, test = Path(f"fedpipe/algorithms/{name}.py"), Path(f"tests/algorithms/test_{name}.py")
    existing_path = next((path for path in (code, test) if path.exists()), None)
    if existing_path or name in registry.list_components(component.ALGORITHM):
        raise SettingsError(f"'{name}' is already used by {existing_path or code}. Use another name.")
    class_name = "".join(word.capitalize() for word in name.split("_"))
    replacements = {"fedpipe.cli.scaffold.templates.algorithm.Template": name, "Template": class_name}
    for path, template in ((code, "algorithm.py"), (test, "test_algorithm.py")):
        text = Path(templates.__path__[0], template).read_text()
        for old, new in replacements.items():
            text = text.replace(old, new)
        files.write_bytes(path, text.encode())
    return [code, test]
