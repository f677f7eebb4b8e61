"""A real Slurm for the session, and a clone of the project whose commands run on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import studies
from tests.cluster import slurm
from tests.pipeline.conftest import ENVIRONMENT, Project

HERE = Path(__file__).parent
PROFILE = "workflow/profiles/slurm/config.yaml"
ALL = ("snakemake", "--profile", "slurm", "all")
OFTEN = (sys.executable, str(HERE / "often.py"), "--profile", "slurm")  #: as `snakemake`, but asks Slurm more often
PATIENCE = 240  #: seconds after which something hangs


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """Slurm, started once; skips where it is not installed, unless FEDPIPE_REQUIRE_SLURM is set."""
    if absent := slurm.missing():
        said = f"Slurm is not installed here: {', '.join(absent)} not found"
        assert "FEDPIPE_REQUIRE_SLURM" not in os.environ, said
        pytest.skip(said)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        made = slurm.Cluster(Path(folder))
        made.start()
        yield made
        made.stop()


class Clone(Project):
    """A clone of the project on the cluster's login node."""

    def __init__(self, folder: Path, cluster: slurm.Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self._environment = ENVIRONMENT | {
            "SLURM_CONF": cluster.environment["SLURM_CONF"],
            "PATH": f"{cluster.folder}/bin:{ENVIRONMENT['PATH']}",
        }

    def begin(self, *command: str, seconds: float = 0, name: str = "said") -> subprocess.Popen[bytes]:
        """Start a command; what it says lies in a file of this name. Rounds of own.py last so many seconds."""
        with (self.folder.parent / name).open("wb") as said:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment | {"ROUND_SECONDS": str(seconds)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def end(self, running: subprocess.Popen[bytes], check: bool = True, name: str = "said") -> str:
        """Wait for a command; what it said."""
        try:
            running.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        said = (self.folder.parent / name).read_text()
        assert not check or running.returncode == 0, f"it ended with {running.returncode}:\n{said}\n{self.logs()}"
        return said

    def on_slurm(self, *command: str, check: bool = True, **more: Any) -> str:
        """Type a command, and wait for it."""
        return self.end(self.begin(*command, **more), check)

    def logs(self) -> str:
        """Every job's log, and Slurm's."""
        found = [*self.folder.glob("results/logs/*/*.log"), *self.folder.glob(".snakemake/slurm_logs/*/*/*.log")]
        return "\n".join(f"{path}:\n{path.read_text()}" for path in found)

    def log(self, algorithm: str) -> str:
        """What the algorithm's last segment said so far."""
        said = ""
        for path in self.folder.glob(f"results/logs/segment/{algorithm}-*.log"):
            with suppress(FileNotFoundError):  # Snakemake removes it before the next attempt
                said += path.read_text()
        return said

    def set_profile(self, **values: Any) -> None:
        """Edit the profile, as one does for one's own cluster; names are keys or resources of training jobs."""
        path = self.folder / PROFILE
        profile = yaml.safe_load(path.read_text())
        training = profile["set-resources"]["segment"]
        for name, value in values.items():
            (training if name in training else profile)[name.replace("_", "-") if name not in training else name] = (
                value
            )
        path.write_text(yaml.safe_dump(profile))

    def rounds(self, algorithm: str = "*") -> dict[tuple[str, int], str]:
        """Every complete round with its times, which differ when it is done again."""
        runs = self.folder.glob(f"results/runs/{algorithm}/*")
        return {(run.parent.name, number): times for run in runs for number, times in studies.rounds(run).items()}

    def segments(self) -> dict[str, int]:
        """Number of the running job of each algorithm's segment."""
        jobs = self.cluster.jobs()
        prefix = "rule_segment_wildcards_"
        return {said.removeprefix(prefix).split("_")[0]: job for job, said in jobs.items() if said.startswith(prefix)}


@pytest.fixture
def clone(tmp_path: Path, cluster: slurm.Cluster) -> Iterator[Clone]:
    made = Clone(studies.copy_project(tmp_path / "project"), cluster)
    shutil.copy(HERE / "own.py", made.folder)
    yield made
    for job in cluster.jobs("PD,R"):
        cluster.run("scancel", str(job))
    print(cluster.log())  # shown where the test failed
    cluster.restore()


def own_study(*labels: str, rounds: int) -> dict[str, Any]:
    """A study of own.py: algorithms with these names, each a run; ``failing`` fails once."""
    params = studies.settings(labels, rounds)
    params["algorithms"] = {
        label: {"algorithm": "own.Once" if label == "failing" else "own.Slow", "copy": number}
        for number, label in enumerate(labels)
    }
    return params


def until(ready: Callable[[], Any], running: subprocess.Popen[bytes], what: str) -> None:
    """Return when something holds, while a command runs."""
    for _ in range(PATIENCE * 5):
        if ready():
            return
        try:
            running.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"it ended with {running.returncode} before {what}")
    raise AssertionError(f"{what}: not within {PATIENCE} seconds")
