"""Each way in which a user's module may reach other code: an edit that changes what it does changes its digest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.page_blocks import ROOT

FORMS = yaml.safe_load(Path(__file__).with_name("code_forms.yaml").read_text())
ASKED = """
import json, sys
sys.path[:0] = [".", sys.argv[1]]
import own
from fedpipe.core.components import code_digest as code
print(json.dumps([repr(own.M().f()), code.compute_code_digest(own.M).text]))
"""


TWICE = """
import sys
sys.path[:0] = [".", sys.argv[1], sys.argv[2]]
import mylab, own
from fedpipe.core.components import code_digest as code
before = code.compute_code_digest(own.M).text
code.compute_code_digest(mylab.Algo)
code.compute_code_digest.cache_clear()
print(before, code.compute_code_digest(own.M).text)
"""


def run_method(folder: Path) -> list[str]:
    """What ``own.M().f()`` gives, and the digest of ``own.M``; each time in a new process."""
    command = [sys.executable, "-B", "-P", "-c", ASKED, str(ROOT)]
    found: list[str] = json.loads(
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    )
    return found


@pytest.mark.parametrize("form", FORMS, ids=[form["name"].replace(" ", "-") for form in FORMS])
def test_an_edit_that_changes_what_it_does_changes_its_digest(form: dict[str, Any], tmp_path: Path) -> None:
    for name, text in form["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    value, digest = run_method(tmp_path)
    edit, edited = form["edit"], tmp_path / form["edit"]["file"]
    edited.parent.mkdir(exist_ok=True)
    if "old" in edit:
        assert edit["old"] in edited.read_text()
    edited.write_text(edited.read_text().replace(edit["old"], edit["new"]) if "old" in edit else edit["new"])
    other, changed = run_method(tmp_path)
    assert other != value, "the edit should matter"
    assert changed != digest


def test_a_package_may_import_what_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text(
        "try:\n    from . import _version\nexcept ImportError:\n    pass\nV = 7\n"
    )
    (tmp_path / "own.py").write_text(
        "import pack\nclass M:\n    def f(self): return pack.V, getattr(pack, '_version', 0)\n"
    )
    assert run_method(tmp_path)[0] == "(7, 0)"


def test_a_digest_does_not_depend_on_those_that_were_made_before(tmp_path: Path) -> None:
    """Where an installed package that it uses defines a component, too."""
    room = tmp_path / "site-packages"
    room.mkdir()
    (room / "mylab.py").write_text("class Algo:\n    rate = 0.1\n\ndef helper(): return 3\n")
    (tmp_path / "own.py").write_text("import mylab\nclass M:\n    def f(self): return mylab.helper()\n")
    command = [sys.executable, "-B", "-P", "-c", TWICE, str(ROOT), str(room)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after


def test_a_late_import_that_is_no_python_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class M:\n    def f(self):\n        import bad\n        return bad.V\n")
    (tmp_path / "bad.py").write_text("V = (\n")
    asking = ASKED.replace("repr(own.M().f())", "''")
    command = [sys.executable, "-B", "-P", "-c", asking, str(ROOT)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr.splitlines()[-1]
    assert "SettingsError" in said
    assert "bad.py can't be read as Python ('(' was never closed" in said
