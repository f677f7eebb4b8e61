"""What Snakemake's executor for Slurm lacks: jobs that Slurm forgot, limits that no job can keep, memory that ran out.

The plugin asks Slurm how its jobs are. Where slurmctld does not answer, it loses sight of them all; and for one that
Slurm has forgotten (it remembers for ``MinJobAge``) it waits for ever. It tries a job again that needs more time than
it may have, and knows no way to ask for more memory after a job that ran out of it, and no other. The Snakefile puts
this executor in its place, so that `executor: slurm` and all options stay as they are. Imports no torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_executor_plugin_slurm.job_cancellation import cancel_slurm_jobs
from snakemake_executor_plugin_slurm.job_status_query import query_job_status
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from fedpipe.artifacts import RunFiles
from fedpipe.errors import UserError

#: How Slurm says in a job's log that its memory ran out; PyTorch says the same of a GPU's.
STARVED = re.compile(
    r"^(slurmstepd|srun)\S*: error: .*(oom.?kill|out.of.memory|memory limit)", re.IGNORECASE | re.MULTILINE
)
FORGOTTEN = "Slurm knows nothing of this job any more, and it left no results: it has to be done again. "
TOO_LONG = "It asks for more time than its partition allows, so that Slurm would never start it: ask for less. "
TOO_SHORT = (
    "Its time ended before a round was done, and so would that of another: ask for more, or cut rounds into jobs. "
)
ADVICE = (
    "A job's time is `runtime` in the profile, a partition's limit is shown by `sinfo -o '%P %l'`, and a round becomes "
    "several jobs with `execution: {rounds_per_job: 1, clients_per_job: 1}`; until then this job is not queued again. "
)


class Executor(plugin.Executor):  # type: ignore[misc]
    """The plugin's, which in addition sees what becomes of each job."""

    def __init__(self, workflow: Any, logger: Any) -> None:
        path = f"{Path.cwd()}{sys.executable}"
        if not workflow.executor_settings.pass_command_as_script and (odd := re.search(r"[$`\\]", path)):
            raise WorkflowError(
                f"fedpipe: {Path.cwd()}: a path with {odd[0]} cannot be passed on to Slurm's nodes; move the clone."
            )
        self._reported: set[Any] = set()  #: jobs whose end was told in this poll
        self._missed: set[str] = set()  #: numbers that Slurm did not know in the poll before
        self._before: dict[Any, list[int | None]] = {}  #: when a job's outputs were written before it was submitted
        self._rounds: dict[Any, int] = {}  #: how many of its run's rounds were complete then
        self._starved: dict[Any, int] = {}  #: how often a job ran out of memory
        self._limits: dict[Any, int] = {}  #: minutes that were too few, or too many
        super().__init__(workflow, logger)

    # -- submission ----------------------------------------------------------------------------------------------------

    def run_job(self, job: Any) -> None:
        """Submit a job; not one whose time was wrong before and is the same now."""
        if job in self._limits and self._limits[job] == job.resources.get("runtime"):
            job.attempt = job.restart_times + 1  # the last one
            self._report_job_error_threadsafe(SubmittedJobInfo(job), ADVICE)
            return
        self._before[job], self._rounds[job] = _moments(job), _rounds(job)
        if job in self._starved and (usual := job.resources.get("mem_mb")):
            job.resources.mem_mb = max(usual, min(usual * 2 ** self._starved[job], _largest_memory(job)))
            self.logger.info(f"Job {job.jobid} ran out of memory; now it asks for {job.resources.mem_mb} MB.")
        super().run_job(job)

    # -- what becomes of jobs ------------------------------------------------------------------------------------------

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report each job that ended; yield the others."""
        if not active_jobs:  # so it is at first, when a thread asks already while the plugin is still being set up
            async for info in super().check_active_jobs(active_jobs):
                yield info
            return
        command = f"squeue --format='%i|%T %r' --states=all --noheader --name {self.run_uuid}"
        known, _ = await query_job_status(command, self.logger)
        if known is None:  # slurmctld does not answer, and the plugin would lose them
            for info in active_jobs:
                yield info
            return
        self._reported.clear()
        polled = super().check_active_jobs(active_jobs)
        left = [info async for info in polled]
        left += [info for info in active_jobs if info not in left and info.job not in self._reported]
        missing = {info.external_jobid for info in left} - known.keys()
        if self._submitted_job_clusters:  # of other clusters this squeue knows nothing
            missing.clear()
        missed, self._missed = self._missed, missing
        for info in left:
            if info.external_jobid in missing & missed:
                self._forgotten(info)
            elif known.get(info.external_jobid) == "PENDING PartitionTimeLimit":
                cancel_slurm_jobs([info], self._submitted_job_clusters, self.logger)
                self._limits[info.job] = info.job.resources.get("runtime")
                self.report_job_error(info, msg=TOO_LONG + ADVICE)
            else:
                yield info

    def _forgotten(self, info: SubmittedJobInfo) -> None:
        """Tell the end of a job that Slurm does not remember by the files that it should have written."""
        now = _moments(info.job)
        if None not in now and all(after != before for after, before in zip(now, self._before[info.job], strict=True)):
            self.report_job_success(info)
        else:
            self.report_job_error(info, msg=FORGOTTEN, aux_logs=[str(info.aux["slurm_logfile"])])

    def report_job_success(self, job_info: SubmittedJobInfo) -> None:
        """Tell Snakemake that a job is done."""
        self._reported.add(job_info.job)
        super().report_job_success(job_info)

    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **more: Any) -> None:
        """Tell Snakemake that a job failed, and remember why."""
        job, said = job_info.job, msg or ""
        self._reported.add(job)
        if job_info.external_jobid is None:  # Slurm would not have it
            self._starved.pop(job, None)
        elif "'OUT_OF_MEMORY'" in said or any(STARVED.search(_text(log)) for log in more.get("aux_logs", ())):
            self._starved[job] = self._starved.get(job, 0) + 1
        elif "'TIMEOUT'" in said and _rounds(job) <= self._rounds[job]:
            self._limits[job] = job.resources.get("runtime")
            said = f"{said} {TOO_SHORT}{ADVICE}"
        super().report_job_error(job_info, msg=said, **more)


def mend() -> None:
    """Let Snakemake's `executor: slurm` be this one."""
    ExecutorPluginRegistry().get_plugin("slurm").executor = Executor


def _moments(job: Any) -> list[int | None]:
    """When each of a job's outputs was written, if it is there."""
    places = [Path(str(output)) for output in job.output]
    return [place.stat().st_mtime_ns if place.exists() else None for place in places]


def _rounds(job: Any) -> int:
    """Complete rounds of the run that a segment works on; of other jobs none, since they do one thing each."""
    with suppress(UserError, IndexError):
        return sum(number > 0 for number in RunFiles(Path(str(job.output[0])).parents[1]).complete())
    return 0


def _text(log: str | None) -> str:
    with suppress(OSError, TypeError):
        return Path(log).read_text(errors="replace")  # type: ignore[arg-type]
    return ""


def _largest_memory(job: Any) -> int:
    """MB that the largest node has for a job of this kind; none where Slurm does not say."""
    partitions, gpu = str(job.resources.get("slurm_partition") or ""), job.resources.get("gpu")
    wanted = str(job.resources.get("gpu_model") or "gpu") if gpu else ""
    found = [0]
    for node in _scontrol("node"):
        if wanted in node.get("Gres", "") and {*partitions.split(",")} & {"", *node.get("Partitions", "").split(",")}:
            found.append(int(node["RealMemory"]) - int(node.get("MemSpecLimit", 0)))
    asked = [partition for partition in _scontrol("partition") if partition["PartitionName"] in partitions]
    limits = [partition.get("MaxMemPerNode", "") for partition in asked]
    return min([max(found), *(int(limit) for limit in limits if limit.isdigit())])


def _scontrol(kind: str) -> list[dict[str, str]]:
    done = subprocess.run(["scontrol", "show", kind, "-o"], capture_output=True, text=True, check=False)
    return [dict(field.split("=", 1) for field in line.split() if "=" in field) for line in done.stdout.splitlines()]
