"""GitHub and pre-commit run the commands of `make`, and their files exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import small_studies as studies
from tests.docs.page_blocks import ROOT, read

WORKFLOW = yaml.safe_load(read(".github/workflows/ci.yml"))
(REPOSITORY,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
(HOOK,) = REPOSITORY["hooks"]


def read_recipe(target: str) -> list[str]:
    """Read the commands of a target of the Makefile."""
    lines = read("Makefile").partition(f"\n{target}:")[2].splitlines()[1:]
    end = next(index for index, line in enumerate(lines) if not line.startswith("\t"))
    return [line.strip() for line in lines[:end]]


def list_commands(job: str) -> list[str]:
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_ci_runs_make_setup_test_test_all_and_lint() -> None:
    called = [line for line in read(".ci/run").splitlines() if line.startswith("make ")]
    assert called == ["make setup", "make test", "make test-all", "make lint"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("version", [(2, 7), (3, 10), (3, 11), (3, 14), (3, 15)])
def test_make_names_supported_pythons_if_python_is_another(version: tuple[int, int], tmp_path: Path) -> None:
    """pip would print that it can't find some package."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / "python"
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] && exec {sys.executable} -c '{code}' \"$2\"\necho made >&2; exit 1\n")
    python.chmod(0o755)
    process = subprocess.run(["make", "-C", str(tmp_path), "demo", f"PYTHON={python}"], capture_output=True, text=True)
    assert process.returncode == 2
    error = "fedpipe needs Python 3.11 to 3.14, and {} is {}.{}. Name another one: make demo PYTHON=python3.12"
    expected = "made" if (3, 11) <= version <= (3, 14) else error.format(python, *version)
    assert process.stderr.splitlines()[0] == expected


def test_session_ends_if_process_with_tests_of_one_file_ends() -> None:
    """With --dist loadfile pytest-xdist waits forever after it has replaced a process (pytest-xdist#1323)."""
    (command,) = read_recipe("test-all")
    assert "--dist loadfile" in command
    assert "--max-worker-restart 0" in command


def test_workflow_runs_ci_on_python_3_11() -> None:
    job = WORKFLOW["jobs"]["all"]
    assert job["runs-on"].startswith("ubuntu-")
    assert job["container"] == "python:3.11-bookworm"
    assert list_commands("all")[-1] == ".ci/run"
    triggers = WORKFLOW[True]  # YAML 1.1 reads `on` as true
    assert {"push", "pull_request"} <= set(triggers)


def test_workflow_runs_linters_and_everyday_tests_on_newer_pythons() -> None:
    job = WORKFLOW["jobs"]["versions"]
    assert job["strategy"]["matrix"]["python"] == ["3.12", "3.13", "3.14"]
    assert list_commands("versions") == ["make setup PYTHON=python", "make lint", "make test"]
    assert re.search(r"^PYTHON \?= ", read("Makefile"), flags=re.M)


def test_workflow_runs_everyday_tests_with_lowest_versions() -> None:
    job = WORKFLOW["jobs"]["lowest"]
    *_, compile_command, install_command, test_command = list_commands("lowest")
    assert " --resolution lowest-direct $EXTRAS pyproject.toml -o lowest.txt" in compile_command
    assert " --constraint lowest.txt -r lowest.txt -e '.[dev]'" in install_command
    (everyday,) = read_recipe("test")
    assert (
        test_command.removeprefix("source .venv/bin/activate && ")
        == f"{everyday.replace(' --durations 30', '')} $EXCEPT"
    )
    extras = re.findall(r"--extra (\S+)", read("Makefile"))
    assert re.findall(r"--extra (\S+)", job["env"]["EXTRAS"]) == [extra for extra in extras if extra != "dev"]
    names = [name for name in shlex.split(job["env"]["EXCEPT"]) if not name.startswith("--")]
    assert names
    assert all((ROOT / name.partition("::")[0]).is_file() for name in names)


def test_workflow_uses_only_github_actions_and_lock_file() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    hashed = re.findall(r"hashFiles\('([^']+)'\)", read(".github/workflows/ci.yml"))
    hashed += [step["with"]["cache-dependency-path"] for step in steps if "cache" in step.get("with", {})]
    assert hashed == ["requirements.lock", "requirements.lock"]
    assert (ROOT / "requirements.lock").is_file()


def test_pre_commit_and_make_lint_run_pinned_linters() -> None:
    assert REPOSITORY["repo"] == "local"
    assert (HOOK["entry"], HOOK["language"], HOOK["pass_filenames"]) == ("make lint-fast", "system", False)
    assert read_recipe("lint") == ["@$(MAKE) --no-print-directory lint-fast", "snakemake --lint"]
    commands = read_recipe("lint-fast")
    commands.remove("@$(MAKE) --no-print-directory -j 2 mypy-package mypy-tests")
    for command in [*commands, *read_recipe("mypy-package"), *read_recipe("mypy-tests")]:
        program = command.split()[0]
        package = {"lint-imports": "import-linter"}.get(program, program)
        assert re.search(rf"^{package}==", read("requirements.lock"), flags=re.M)


@pytest.mark.parametrize(
    ("command", "path", "bad"),
    [
        ("ruff check", "fedpipe/core/errors.py", "import os\n"),
        ("ruff format --check", "fedpipe/core/errors.py", "x  =  1\n"),
        ("snakefmt --check Snakefile workflow", "workflow/rules/data.smk", "rule   x:\n  output: 'y'\n"),
    ],
)
def test_linters_accept_project_and_reject_bad_code(command: str, path: str, bad: str, tmp_path: Path) -> None:
    clone = studies.copy_project(tmp_path / "clone")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert command in read_recipe("lint-fast")

    def run() -> int:
        return subprocess.run(shlex.split(command), cwd=clone, env=environment, capture_output=True).returncode

    assert run() == 0
    with (clone / path).open("a") as file:
        file.write(bad)
    assert run() == 1


def test_pre_commit_hook_matches_code() -> None:
    code = [
        path
        for pattern in ("Snakefile", "workflow/**/*.smk", "fedpipe/**/*.py", "tests/*.ini")
        for path in ROOT.glob(pattern)
    ]
    assert all(re.search(HOOK["files"], str(path.relative_to(ROOT))) for path in code)
    assert not re.search(HOOK["files"], "docs/install.md"), "a commit of a page needs no linter"


def test_make_papers_rejects_preset_full(tmp_path: Path) -> None:
    """`make papers PRESET=full` would take years, so it ends with an error."""
    command = ["make", "-f", str(ROOT / "Makefile"), "-o", "setup", "papers", "PRESET=full"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "would take years" in done.stderr
    assert "fedpipe run --params" in done.stderr
    assert "snakemake papers" not in done.stdout, "snakemake does not start"
