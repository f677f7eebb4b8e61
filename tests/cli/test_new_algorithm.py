"""Invalid names of new algorithms, and algorithms without a test file. test_readme_commands.py runs the new files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import ClientInfo
from fedpipe.cli.scaffold import new_algorithm
from fedpipe.core.errors import SettingsError
from tests import small_studies as studies


@pytest.mark.slow
def test_contract_tests_fail_for_algorithm_without_test_file(tmp_path: Path) -> None:
    """The failed tests print what is missing. No test is skipped."""
    clone = studies.copy_project(tmp_path / "clone")
    text = (clone / "fedpipe/algorithms/fedavg.py").read_text().replace("class FedAvg", "class Fake")
    (clone / "fedpipe/algorithms/fake.py").write_text(text)
    chosen = "fake and (names or traffic or centralized)"
    options = ["-q", "-p", "no:cacheprovider", "tests/algorithms/test_contract.py", "-k", chosen]
    command = [sys.executable, "-m", "pytest", *options]
    process = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert process.returncode == 1, process.stdout + process.stderr
    assert "tests/algorithms/test_fake.py: EXPECTED is missing." in process.stdout
    assert "5 failed" in process.stdout
    assert "passed" not in process.stdout
    assert "skipped" not in process.stdout

    (clone / "tests/algorithms/test_fake.py").write_text(
        "from tests.algorithms.expected import Expected\n\n"
        "EXPECTED = Expected(traffic=[({}, lambda n: (n.all, n.all))], centralized={})\n"
    )
    process = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "5 passed" in process.stdout


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("MyAvg", "lowercase"),
        ("own.Avg", "lowercase"),
        ("lambda", "keyword"),
        ("fedavg", "fedpipe/algorithms/fedavg.py"),
        ("base", "fedpipe/algorithms/base.py"),
        ("mine", "tests/algorithms/test_mine.py"),
    ],
)
def test_new_algorithm_rejects_invalid_or_existing_name(name: str, problem: str, in_empty_folder: Path) -> None:
    for path in ("fedpipe/algorithms/base.py", "tests/algorithms/test_mine.py"):
        (in_empty_folder / path).parent.mkdir(parents=True)
        (in_empty_folder / path).write_text("")
    with pytest.raises(SettingsError, match=f"^'{re.escape(name)}' .*{problem}"):
        new_algorithm.write_algorithm_template(name)
    assert len([path for path in in_empty_folder.rglob("*") if path.is_file()]) == 2


def test_template_names_existing_hooks_and_fields() -> None:
    text = (Path(new_algorithm.__file__).parent / "templates/algorithm.py").read_text()
    hooks = re.sub(r"\(.*?\)", "", " ".join(text.split("base.py: ")[1].split(". Write")[0].replace("#", "").split()))
    assert [name for name in hooks.split(", ") if not hasattr(Algorithm, name.strip())] == []
    field = re.search(r"``(\w+)``, which is 1 until", text)
    assert field
    assert field[1] in ClientInfo._fields


@pytest.mark.usefixtures("in_empty_folder")
def test_new_algorithm_outside_clone_is_rejected() -> None:
    with pytest.raises(SettingsError, match=r"^'mine' .* clone of fedpipe"):
        new_algorithm.write_algorithm_template("mine")
