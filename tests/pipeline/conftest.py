"""Real snakemake, dvc and git in a copy of the project."""

import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, AnyStr

import pytest
import yaml
from typing_extensions import override

from fedpipe.cli import app
from tests import small_studies as studies
from tests.pipeline.start import server_template

BIN = Path(sys.executable).parent
TEMPLATE = f"fedpipe-template-{os.getpid()}"  #: name of the process that commands and job servers are forked from
ENVIRONMENT = os.environ | {
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "GIT_AUTHOR_NAME": "fedpipe",
    "GIT_AUTHOR_EMAIL": "fedpipe@example.org",
    "GIT_COMMITTER_NAME": "fedpipe",
    "GIT_COMMITTER_EMAIL": "fedpipe@example.org",
    "DVC_NO_ANALYTICS": "1",
    "PYTHONPATH": f".:{Path(server_template.__file__).parent}",  # the code of the copy, as in a separate installation
    "FEDPIPE_TEMPLATE": TEMPLATE,
}
LOCAL = ("--profile", "workflow/profiles/local")
#: `snakemake`, as `fedpipe run` starts it: half a second faster.
SNAKEMAKE = (sys.executable, "-P", "-m", "snakemake_logger_plugin_fedpipe")
TABLE = "results/metrics.json"  #: target of the job that writes tables, for tests that check no figure


@functools.cache
def start_server_template() -> subprocess.Popen[bytes] | None:
    """Start the process that commands and job servers are forked from. This needs Linux."""
    return server_template.start_template(TEMPLATE, ENVIRONMENT) if sys.platform == "linux" else None


class RunningCommand(subprocess.Popen[AnyStr]):
    """A running command. If the test fails, the command is killed, because it may never end."""

    @override
    def __exit__(self, kind: Any, *others: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *others)


class Project:
    """A clone of the project, and the commands that users type in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        start_server_template()

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command. Return its standard output and error together."""
        process = self._run(command, ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert not check or process.returncode == 0, (
            f"{' '.join(command)} ended with {process.returncode}:\n{process.stdout}"
        )
        return process.stdout

    def capture(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a changed environment, with separate standard output and error."""
        return self._run(command, ENVIRONMENT | environment, capture_output=True)

    def _run(
        self, command: tuple[str, ...], environment: dict[str, str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, text=True, **options)

    def start_command(self, *command: str, **options: Any) -> RunningCommand[Any]:
        """Start a command in its own process group, without waiting for its end. It gets signals, so it is no fork."""
        environment = ENVIRONMENT | {"FEDPIPE_FORKS": "servers"}
        return RunningCommand(command, cwd=self.folder, env=environment, process_group=0, **options)

    def fedpipe(self, *arguments: str, check: bool = True) -> str:
        """Run a command in a fork of this process, which has imported PyTorch. Return its output.

        The fork has the code of this process. Use `run` after edits of the package, and for commands that write a plan.
        """
        output = self.folder.parent / "output"

        def run_command_line() -> None:
            os.chdir(self.folder)
            os.environ |= ENVIRONMENT
            sys.argv = ["fedpipe", *arguments]
            with output.open("w") as stream, redirect_stdout(stream), redirect_stderr(stream):
                app.main()

        fork = multiprocessing.get_context("fork").Process(target=run_command_line)
        fork.start()
        fork.join()
        printed = output.read_text()
        assert not check or fork.exitcode == 0, f"fedpipe {' '.join(arguments)} ended with {fork.exitcode}:\n{printed}"
        return printed

    def snakemake(self, *arguments: str, check: bool = True) -> str:
        return self.run(*SNAKEMAKE, *(arguments or ("all",)), *LOCAL, check=check)

    def commit(self, message: str = "a study") -> None:
        self.run("git", "add", "-A")
        self.run("git", "commit", "-qm", message)

    def write(self, params: dict[str, Any], name: str = "params.yaml") -> None:
        studies.write(params, self.folder, name)

    def edit(self, **sections: dict[str, Any]) -> None:
        """Merge sections into params.yaml."""
        params = yaml.safe_load((self.folder / "params.yaml").read_text())
        for name, section in sections.items():
            params[name] = params.get(name, {}) | section
        self.write(params)

    def metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = json.loads((self.folder / "results/metrics.json").read_text())
        return metrics

    def hash_results(self) -> dict[str, str]:
        return studies.hash_results(self.folder / "results")


def wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], event: str) -> None:
    """Wait for an event. Fail if the process ends earlier, or after ten minutes."""
    end = time.monotonic() + 600
    while not is_ready():
        assert time.monotonic() < end, f"{event} did not happen within ten minutes"
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the process ended with {process.returncode} before {event}")


def read_until(text: str, process: subprocess.Popen[str]) -> None:
    """Read the output of a command up to the line with this text. Fail if the command ends earlier."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(
        f"the command ended before it printed '{text}': {process.stderr.read() if process.stderr else ''}"
    )


def count_jobs(output: str) -> Counter[str]:
    """Count the jobs of each rule that snakemake or `fedpipe run` ran."""
    return Counter(re.findall(r"^(?:(?:local)?rule (?=\w+:)| *\d+ of \d+  )(\w+)", output, flags=re.M))


def list_stages(output: str) -> list[str]:
    """List the stages that dvc ran. `plan` always runs, and is the only stage if nothing has changed."""
    return re.findall(r"^Running stage '([\w@]+)'", output, flags=re.M)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    clone = Project(studies.copy_project(tmp_path / "project"))
    clone.run("git", "init", "-q", "-b", "main")
    return clone
