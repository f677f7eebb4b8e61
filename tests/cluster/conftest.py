"""A real Slurm for each process of pytest, and a clone of the project whose commands run on it."""

import os
import re
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
#: `snakemake` with a query of Slurm every two seconds.
FAST_SNAKEMAKE = (sys.executable, str(HERE / "fast_polling.py"), "--profile", "slurm")
RUNS = (*FAST_SNAKEMAKE, "runs")
STOPPED = "stopped by SIGTERM after round"
#: Rounds of faulty_algorithms.py. They take minutes, so no run ends before the test has observed it.
ROUNDS = 40
PATIENCE = 600  #: maximum seconds of a command or a wait on any machine


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """Slurm, started once in each process. Skip tests if it is not installed, unless FEDPIPE_REQUIRE_SLURM is set."""
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

    def __init__(self, folder: Path, cluster: slurm.Cluster, prepared_results: Path) -> None:
        super().__init__(folder)
        self.cluster, self._prepared_results = cluster, prepared_results
        self._environment = ENVIRONMENT | {
            "SLURM_CONF": cluster.environment["SLURM_CONF"],
            "PATH": f"{cluster.folder}/bin:{ENVIRONMENT['PATH']}",
        }
        self._outputs: list[Path] = []  #: file with the output of each command
        self._running: dict[subprocess.Popen[bytes], Path] = {}  #: output of each running command

    # -- commands ------------------------------------------------------------------------------------------------------

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in a new process group."""
        self._outputs.append(self.folder.parent / f"output-{len(self._outputs)}")
        with self._outputs[-1].open("wb") as output:
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
        self._running[running] = self._outputs[-1]
        return running

    def wait_for(self, running: subprocess.Popen[bytes], check: bool = True) -> str:
        """Wait for a command. Return its output."""
        try:
            running.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGUSR1)
            raise
        output = self._running.pop(running).read_text()
        assert not check or running.returncode == 0, f"the command ended with {running.returncode}:\n{output}"
        return output

    def run_on_slurm(self, *command: str, check: bool = True) -> str:
        """Run a command to its end. Return its output."""
        return self.wait_for(self.start(*command), check)

    def wait_until(self, ready: Callable[[], Any], what: str) -> None:
        """Wait until a condition is true. Fail if a command ends earlier."""
        over = time.monotonic() + PATIENCE
        while not ready():
            for running in self._running:
                assert running.poll() is None, f"the command ended with {running.returncode} before {what}"
            assert time.monotonic() < over, f"{what}: not within {PATIENCE} seconds"
            time.sleep(0.5)

    def skip_delays(self) -> None:
        """Let the rounds of faulty_algorithms.py end without their delays."""
        (self.folder / "hurry").touch()

    def kill_commands(self) -> None:
        """Kill the running commands, and let the jobs end."""
        for running in self._running:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        self.skip_delays()

    # -- observations --------------------------------------------------------------------------------------------------

    def list_segments(self) -> dict[int, str]:
        """Return the algorithm of each running training job by the job's number."""
        prefix, jobs = "rule_segment_wildcards_", self.cluster.jobs()
        return {job: rule.removeprefix(prefix).split("_")[0] for job, rule in jobs.items() if rule.startswith(prefix)}

    def find_training_process(self, job: int) -> int | None:
        """Return the process ID of the training in a job, or None before it begins."""
        for pid in self.cluster.processes(job):
            with suppress(OSError):  # the process has ended
                if b"/fedpipe\0segment\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def list_started_segments(self) -> dict[int, str]:
        """Return the running segments that have completed a round."""
        jobs = self.list_segments().items()
        return {
            job: label for job, label in jobs if self.find_training_process(job) and ": round " in self.read_log(label)
        }

    def read_log(self, label: str) -> str:
        """Read the output of the algorithm's last segment. It is empty without a segment."""
        with suppress(ValueError, FileNotFoundError), self.open_log(label) as log:
            return log.read()
        return ""

    def open_log(self, label: str) -> TextIO:
        """Open the algorithm's log. It stays readable when Snakemake removes the file before the next attempt."""
        (path,) = self.folder.glob(f"results/logs/segment/{label}-*.log")
        return path.open()

    def read_round_times(self) -> dict[tuple[str, int], str]:
        """Read the times of each complete round. They change if a round is repeated."""
        runs = self.folder.glob("results/runs/*/*")
        return {
            (run.parent.name, number): times for run in runs for number, times in studies.read_round_times(run).items()
        }

    def hash_runs(self) -> dict[str, dict[str, str]]:
        """Return the bits of each algorithm's run."""
        runs = self.folder.glob("results/runs/*/*")
        return {run.parent.name: bits for run in runs if (bits := studies.hash_results(run))}

    def describe_events(self) -> str:
        """Return the logs of commands, jobs and Slurm's daemons, and the queue."""
        logs = [*self.folder.glob("results/logs/*/*.log"), *self.folder.glob(".snakemake/slurm_logs/*/*/*.log")]
        message = [self.cluster.queue(), self.cluster.log()]
        for path in (*self._outputs, *logs):
            with suppress(FileNotFoundError):  # Snakemake has removed it
                message.append(f"-- {path} --\n{path.read_text()[-6000:]}")
        return "\n".join(message)

    # -- edits ---------------------------------------------------------------------------------------------------------

    def prepare_study(self, params: dict[str, Any]) -> None:
        """Write a study with the data and the partition of faulty studies."""
        self.write(params)
        shutil.copytree(self._prepared_results, self.folder / "results", symlinks=True, dirs_exist_ok=True)

    def set_profile(self, training: dict[str, Any] | None = None, **values: Any) -> None:
        """Edit the profile: the resources of training jobs, and other keys."""
        path = self.folder / PROFILE
        profile = yaml.safe_load(path.read_text())
        profile["set-resources"]["segment"] |= training or {}
        path.write_text(yaml.safe_dump(profile | values))


@pytest.fixture(scope="session")
def prepared_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with the data and the partition of faulty studies, made once in each process."""
    project = Project(studies.copy_project(tmp_path_factory.mktemp("prepared") / "project"))
    project.write(studies.settings(("fedavg",), ROUNDS))
    project.snakemake("partitions")
    return project.folder / "results"


@pytest.fixture
def clone(tmp_path: Path, cluster: slurm.Cluster, prepared_results: Path) -> Iterator[Clone]:
    project_clone = Clone(studies.copy_project(tmp_path / "project"), cluster, prepared_results)
    shutil.copy(HERE / "faulty_algorithms.py", project_clone.folder)
    yield project_clone
    project_clone.kill_commands()
    print(project_clone.describe_events())  # pytest shows it if the test fails
    cluster.restore()


def faulty_study(*labels: str) -> dict[str, Any]:
    """Make a study of faulty_algorithms.py with one run for each name. ``failing`` fails once."""
    classes = {"failing": "Once", "endless": "Endless", "hungry": "Hungry"}
    params = studies.settings(labels, ROUNDS)
    params["algorithms"] = {
        label: {"algorithm": f"faulty_algorithms.{classes.get(label, 'Slow')}", "copy": number}
        for number, label in enumerate(labels)
    }
    return params


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The bits of FedAvg without jobs. All runs of faulty_algorithms.py have them."""
    folder = tmp_path_factory.mktemp("reference")
    studies.compute_reference(studies.settings(("fedavg",), ROUNDS), folder)
    (run,) = folder.glob("results/runs/fedavg/*")
    return studies.hash_results(run)


def count_submissions(output: str) -> int:
    return len(re.findall(r"has been submitted with SLURM jobid", output))


def parse_memory(job: dict[str, str]) -> int:
    """Return the MB of memory that a job requested."""
    return int(re.search(r"mem=(\d+)M", job["AllocTRES"])[1])
