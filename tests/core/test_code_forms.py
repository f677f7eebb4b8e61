"""Code digests of users' modules for each way to use other code, from code_forms.yaml."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.page_blocks import ROOT

FORMS = yaml.safe_load(Path(__file__).with_name("code_forms.yaml").read_text())
PRINT_DIGEST = """
import json, sys
sys.path.insert(0, ".")
import own
from fedpipe.core.components import code_digest as code
print(json.dumps([repr(own.M().f()), code.compute_code_digest(own.M).text]))
"""

PRINT_TWO_DIGESTS = """
import sys
sys.path[:0] = [".", "site-packages"]
import mylab, own
from fedpipe.core.components import code_digest as code
first_digest = code.compute_code_digest(own.M).text
code.compute_code_digest(mylab.Algo)
code.compute_code_digest.cache_clear()
print(first_digest, code.compute_code_digest(own.M).text)
"""


def run_script(script: str, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process that imports fedpipe from the clone."""
    command, environment = [sys.executable, "-B", "-P", "-c", script], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=check)


def run_method(folder: Path) -> list[str]:
    """Return the result of ``own.M().f()`` and the digest of ``own.M`` from a new process."""
    output: list[str] = json.loads(run_script(PRINT_DIGEST, folder).stdout)
    return output


def compose_files(form: dict[str, str]) -> dict[str, str]:
    """Compose the text of each file of a form. The class that returns its `result` is at the end of own.py."""
    method = f"class M:\n    def f(self): return {form['result']}\n" if "result" in form else ""
    files = {"own.py": ""} | form
    return {
        name: f"{text}\n{method}" if name.endswith("own.py") else text
        for name, text in files.items()
        if name != "result"
    }


def write_files(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("form", FORMS.values(), ids=[name.replace(" ", "-") for name in FORMS])
def test_edit_that_changes_result_changes_code_digest(form: dict[str, str], tmp_path: Path) -> None:
    files = compose_files(form)
    texts = {name: text for name, text in files.items() if not name.startswith("edited ")}
    edits = {name.removeprefix("edited "): text for name, text in files.items() if name.startswith("edited ")}
    edits = edits or {name: text.replace("7", "8") for name, text in texts.items() if "7" in text}
    assert len(edits) == 1
    write_files(tmp_path, texts)
    value, digest = run_method(tmp_path)
    write_files(tmp_path, edits)
    new_value, new_digest = run_method(tmp_path)
    assert new_value != value, "the edit has no effect"
    assert new_digest != digest


def test_code_digest_accepts_optional_import_of_missing_module(tmp_path: Path) -> None:
    package = "try:\n    from . import _version\nexcept ImportError:\n    pass\nV = 7\n"
    module = "import pack\nclass M:\n    def f(self): return pack.V, getattr(pack, '_version', 0)\n"
    write_files(tmp_path, {"pack/__init__.py": package, "own.py": module})
    assert run_method(tmp_path)[0] == "(7, 0)"


def test_code_digest_does_not_depend_on_earlier_digests(tmp_path: Path) -> None:
    """The class uses an installed package that defines a component."""
    site_packages = tmp_path / "site-packages"
    site_packages.mkdir()
    (site_packages / "mylab.py").write_text("class Algo:\n    rate = 0.1\n\ndef helper(): return 3\n")
    (tmp_path / "own.py").write_text("import mylab\nclass M:\n    def f(self): return mylab.helper()\n")
    first_digest, second_digest = run_script(PRINT_TWO_DIGESTS, tmp_path).stdout.split()
    assert first_digest == second_digest


def test_code_digest_rejects_import_of_invalid_python(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class M:\n    def f(self):\n        import bad\n        return bad.V\n")
    (tmp_path / "bad.py").write_text("V = (\n")
    script = PRINT_DIGEST.replace("repr(own.M().f())", "''")
    last_line = run_script(script, tmp_path, check=False).stderr.splitlines()[-1]
    assert "SettingsError" in last_line
    assert "bad.py can't be read as Python ('(' was never closed" in last_line
