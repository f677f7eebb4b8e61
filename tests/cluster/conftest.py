"""A real Slurm for the session, and a clone of the project whose commands run on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest
import yaml

from tests import small_studies as studies
from tests.cluster import slurm
from tests.pipeline.conftest import ENVIRONMENT, Project

HERE = Path(__file__).parent
PROFILE = "workflow/profiles/slurm/config.yaml"
ALL = ("snakemake", "--profile", "slurm", "all")
#: `snakemake`, but it asks Slurm every two seconds.
FAST_SNAKEMAKE = (sys.executable, str(HERE / "fast_polling.py"), "--profile", "slurm")
#: Of faulty_algorithms.py: some minutes, so that no run ends before the test has seen it at work.
ROUNDS = 100
PATIENCE = 600  #: seconds after which something hangs; nothing takes as long, on any machine


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """Slurm, started once; skips where it is not installed, unless FEDPIPE_REQUIRE_SLURM is set."""
    if absent := slurm.missing():
        output = f"Slurm is not installed here: {', '.join(absent)} not found"
        assert "FEDPIPE_REQUIRE_SLURM" not in os.environ, output
        pytest.skip(output)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        slurm_cluster = slurm.Cluster(Path(folder))
        try:
            slurm_cluster.start()
            yield slurm_cluster
        finally:
            slurm_cluster.stop()


class Clone(Project):
    """A clone of the project on the cluster's login node."""

    def __init__(self, folder: Path, cluster: slurm.Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self._environment = ENVIRONMENT | {
            "SLURM_CONF": cluster.environment["SLURM_CONF"],
            "PATH": f"{cluster.folder}/bin:{ENVIRONMENT['PATH']}",
        }
        self._said: list[Path] = []  #: what each command said
        self._begun: dict[subprocess.Popen[bytes], Path] = {}  #: those that go on

    # -- commands ------------------------------------------------------------------------------------------------------

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command, in a process group of its own."""
        self._said.append(self.folder.parent / f"said-{len(self._said)}")
        with self._said[-1].open("wb") as output:
            running = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self._begun[running] = self._said[-1]
        return running

    def end(self, running: subprocess.Popen[bytes], check: bool = True) -> str:
        """Wait for a command; what it said."""
        try:
            running.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGUSR1)
            raise
        output = self._begun.pop(running).read_text()
        assert not check or running.returncode == 0, f"it ended with {running.returncode}:\n{output}"
        return output

    def on_slurm(self, *command: str, check: bool = True) -> str:
        """Type a command, and wait for it."""
        return self.end(self.begin(*command), check)

    def until(self, ready: Callable[[], Any], what: str) -> None:
        """Return when something holds, while all commands that were begun go on."""
        over = time.monotonic() + PATIENCE
        while not ready():
            for running in self._begun:
                assert running.poll() is None, f"it ended with {running.returncode} before {what}"
            assert time.monotonic() < over, f"{what}: not within {PATIENCE} seconds"
            time.sleep(0.5)

    def hurry(self) -> None:
        """Let the rounds of faulty_algorithms.py last no longer."""
        (self.folder / "hurry").touch()

    def leave(self) -> None:
        """Kill the commands that still go on; jobs need wait for nothing more."""
        for running in self._begun:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        self.hurry()

    # -- what is seen --------------------------------------------------------------------------------------------------

    def segments(self) -> dict[int, str]:
        """The algorithm of each running job that trains, by the job's number."""
        prefix, jobs = "rule_segment_wildcards_", self.cluster.jobs()
        return {job: rule.removeprefix(prefix).split("_")[0] for job, rule in jobs.items() if rule.startswith(prefix)}

    def trainer(self, job: int) -> int | None:
        """The process that trains in a job, if it has come so far."""
        for pid in self.cluster.processes(job):
            with suppress(OSError):  # it ended meanwhile
                if b"/fedpipe\0segment\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def at_work(self) -> dict[int, str]:
        """Those of the segments that have done a round."""
        jobs = self.segments().items()
        return {job: label for job, label in jobs if self.trainer(job) and ": round " in self.log(label)}

    def log(self, label: str) -> str:
        """What the algorithm's last segment said so far."""
        with suppress(ValueError, FileNotFoundError), self.open_log(label) as log:
            return log.read()
        return ""

    def open_log(self, label: str) -> TextIO:
        """The algorithm's log; once open it stays, while Snakemake removes the file before the next attempt."""
        (path,) = self.folder.glob(f"results/logs/segment/{label}-*.log")
        return path.open()

    def rounds(self) -> dict[tuple[str, int], str]:
        """Every complete round with its times, which differ when it is done again."""
        runs = self.folder.glob("results/runs/*/*")
        return {(run.parent.name, number): times for run in runs for number, times in studies.rounds(run).items()}

    def bits_of_runs(self) -> dict[str, str]:
        return studies.bits(self.folder / "results/runs")

    def story(self) -> str:
        """What happened: what commands and jobs said, which jobs there were, what Slurm's daemons noted."""
        logs = [*self.folder.glob("results/logs/*/*.log"), *self.folder.glob(".snakemake/slurm_logs/*/*/*.log")]
        message = [self.cluster.queue(), self.cluster.log()]
        for path in (*self._said, *logs):
            with suppress(FileNotFoundError):  # Snakemake removed it meanwhile
                message.append(f"-- {path} --\n{path.read_text()[-6000:]}")
        return "\n".join(message)

    # -- what one edits ------------------------------------------------------------------------------------------------

    def study(self, params: dict[str, Any]) -> None:
        """The study, with its data and partitions."""
        studies.write(params, self.folder)
        self.snakemake("partitions")

    def set_profile(self, training: dict[str, Any] | None = None, **values: Any) -> None:
        """Edit the profile, as one does for one's own cluster: what training jobs ask for, and other keys."""
        path = self.folder / PROFILE
        profile = yaml.safe_load(path.read_text())
        profile["set-resources"]["segment"] |= training or {}
        path.write_text(yaml.safe_dump(profile | values))


@pytest.fixture
def clone(tmp_path: Path, cluster: slurm.Cluster) -> Iterator[Clone]:
    project_clone = Clone(studies.copy_project(tmp_path / "project"), cluster)
    shutil.copy(HERE / "faulty_algorithms.py", project_clone.folder)
    yield project_clone
    project_clone.leave()
    print(project_clone.story())  # pytest shows it where the test failed
    cluster.restore()


def faulty_study(*labels: str) -> dict[str, Any]:
    """A study of faulty_algorithms.py: algorithms with these names, each a run; ``failing`` fails once."""
    classes = {"failing": "Once", "endless": "Endless", "hungry": "Hungry"}
    params = studies.settings(labels, ROUNDS)
    params["algorithms"] = {
        label: {"algorithm": f"faulty_algorithms.{classes.get(label, 'Slow')}", "copy": number}
        for number, label in enumerate(labels)
    }
    return params
