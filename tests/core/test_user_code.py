"""Imports of user code: random numbers without a seed are an error, because each job would draw others."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpipe.core.callbacks import find_callback
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.user_code import import_user_object, require_seeded_import
from tests.small_studies import ROOT

IMPORTS = "import random\nimport numpy as np\nimport torch\n"


def import_value() -> object:
    """Import the value VALUE of own.py."""
    value = import_user_object("algorithms.mine", "own.VALUE", lambda value: True, "Use a value.")
    require_seeded_import("algorithms.mine", "own.VALUE")
    return value


@pytest.fixture(autouse=True)
def helper_modules() -> Iterator[None]:
    """Forget the modules that own.py imports."""
    yield
    for name in ("helper", "library"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("code", "library"),
    [
        ("VALUE = np.random.rand(4)", "NumPy"),
        ("VALUE = torch.rand(4)", "PyTorch"),
        ("VALUE = random.random()", "Python"),
        ("from helper import VALUE", "NumPy"),
    ],
)
def test_import_that_draws_without_seed_is_rejected(code: str, library: str, own_module: Path) -> None:
    own_module.write_text(IMPORTS + code)
    (own_module.parent / "helper.py").write_text(f"{IMPORTS}VALUE = np.random.rand(4)")
    for _ in range(2):  # also after the module was imported
        with pytest.raises(SettingsError, match=f"algorithms.mine: 'own.VALUE' .* own draws .* {library}'s"):
            import_value()


@pytest.mark.parametrize(
    "code",
    [
        "VALUE = np.random.default_rng(0).random(4)",
        "np.random.seed(0)\nVALUE = np.random.rand(4)",
        "torch.manual_seed(0)\nVALUE = torch.rand(4)",
        "random.seed(0)\nVALUE = random.random()",
        "import library\nVALUE = 1",
    ],
)
def test_import_that_draws_with_seed_or_in_library_is_accepted(
    code: str, own_module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_module.write_text(IMPORTS + code)
    (folder := own_module.parent / "installed").mkdir()
    (folder / "library.py").write_text(f"{IMPORTS}VALUE = np.random.rand(4)")
    monkeypatch.syspath_prepend(str(folder))
    assert import_value() is not None


def test_module_that_imports_library_first_runs_once(own_module: Path) -> None:
    """A library that was not imported had no state, so that its state is no evidence of a draw."""
    own_module.write_text("import numpy\nprint('executed')\nVALUE = 1")
    script = (
        "import sys\nfrom fedpipe.core.user_code import import_user_object\nassert 'numpy' not in sys.modules\n"
        "import_user_object('algorithms.mine', 'own.VALUE', bool, 'Use a value.')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(own_module.parent)])}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "executed\n", "")


def test_component_but_no_callback_needs_import_without_draws(own_module: Path) -> None:
    """A callback changes no number of a run."""
    own_module.write_text(
        "import random\n"
        "from fedpipe.algorithms.fedavg import FedAvg\n"
        "from fedpipe.core.callbacks import Callback\n"
        "NUMBER = random.random()\n"
        "class Own(FedAvg):\n    pass\n"
        "class Board(Callback):\n    def end_run(self, run):\n        pass\n"
    )
    assert find_callback("own.Board").__name__ == "Board"
    with pytest.raises(SettingsError, match=r"algorithms\.mine: 'own\.Own' .* own draws .* Python's"):
        registry.find_component(component.ALGORITHM, "own.Own", "algorithms.mine")
