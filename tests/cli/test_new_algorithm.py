"""What `fedpipe new-algorithm` writes works as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedpipe.cli.scaffold import new_algorithm
from fedpipe.core.errors import SettingsError
from tests import small_studies as studies


def run(folder: Path, *module: str) -> str:
    """What `python -m MODULE` prints in a folder, whose fedpipe is then the one that is imported."""
    done = subprocess.run([sys.executable, "-m", *module], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_new_algorithm_passes_the_contract_and_can_be_planned(tmp_path: Path) -> None:
    clone = studies.copy_project(tmp_path / "clone")
    printed = run(clone, "fedpipe", "new-algorithm", "my_avg")
    files = ["fedpipe/algorithms/my_avg.py", "tests/algorithms/test_my_avg.py"]
    assert all(name in printed for name in files)
    assert "class MyAvg(FedAvg)" in (clone / files[0]).read_text()
    assert "emplate" not in (clone / files[0]).read_text() + (clone / files[1]).read_text()

    tested = run(clone, "pytest", "-q", "-p", "no:cacheprovider", "tests/algorithms", "-k", "my_avg")
    assert " passed" in tested
    assert "my_avg" in run(clone, "fedpipe", "list", "algorithms")
    params = studies.settings(("fedavg", "my_avg"), 2, algorithms={"fedavg": {}, "my_avg": {"pull": 0.1}})
    studies.write(params, clone)
    planned = run(clone, "fedpipe", "plan", "--dry-run")
    assert [line.split()[0] for line in planned.splitlines()] == ["fedavg", "my_avg"]
    for check in ("check", "format --check"):
        subprocess.run(["ruff", *check.split(), *files], cwd=clone, check=True)


@pytest.mark.slow
def test_what_is_missing_of_an_algorithm_is_demanded(tmp_path: Path) -> None:
    """A file alone in a clone, with no test: the contract's tests fail and say what they want, and skip nothing."""
    clone = studies.copy_project(tmp_path / "clone")
    text = (clone / "fedpipe/algorithms/fedavg.py").read_text().replace("class FedAvg", "class Fake")
    (clone / "fedpipe/algorithms/fake.py").write_text(text)
    chosen = "fake and (names or traffic or centralized)"
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/algorithms/test_contract.py",
        "-k",
        chosen,
    ]
    done = subprocess.run(tests, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "tests/algorithms/test_fake.py: EXPECTED is missing. Use fedpipe.testing.Expected" in done.stdout
    assert "5 failed" in done.stdout
    assert "passed" not in done.stdout
    assert "skipped" not in done.stdout

    (clone / "tests/algorithms/test_fake.py").write_text(
        "from fedpipe.testing import Expected\n\n"
        "EXPECTED = Expected(traffic=[({}, lambda n: (n.all, n.all))], centralized={})\n"
    )
    assert "5 passed" in run(clone, *tests[2:])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("MyAvg", "'MyAvg' can't be an algorithm's name. Use small letters, digits and _, as my_avg."),
        ("own.Avg", "'own.Avg' can't be an algorithm's name. Use small letters, digits and _, as my_avg."),
        ("lambda", "'lambda' is a keyword of Python. Use a name that can be imported, as my_avg."),
        ("fedavg", "'fedavg' is taken by fedpipe/algorithms/fedavg.py. Use a name of its own."),
        ("base", "'base' is taken by fedpipe/algorithms/base.py. Use a name of its own."),
        ("mine", "'mine' is taken by tests/algorithms/test_mine.py. Use a name of its own."),
    ],
)
def test_nothing_is_overwritten(name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("fedpipe/algorithms/base.py", "tests/algorithms/test_mine.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("")
    with pytest.raises(SettingsError) as error:
        new_algorithm.write_algorithm_template(name)
    assert str(error.value) == sentence
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


def test_elsewhere_it_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"root of a clone of fedpipe\.$"):
        new_algorithm.write_algorithm_template("mine")
