"""The executor `fedpipe-slurm`: Snakemake's plugin for Slurm, with its defects fixed.

Snakemake finds this package by its name. Its options are those of the plugin, so `--slurm-requeue` becomes
`--fedpipe-slurm-requeue`. docs/upstream.md has a reproduction and a patch for each defect:

- If slurmctld does not answer, the plugin loses all its jobs.
- It waits forever for a job that Slurm has purged. Slurm purges a finished job after ``MinJobAge``.
- It waits forever for a job with ``PartitionTimeLimit``, and resubmits a job that can't end within its time limit.
- It waits for a preempted job that Slurm does not queue again, until Slurm purges it.
- It can't request more memory only after a job that ran out of memory.
- Ctrl-C cancels no job if Snakemake is checking the jobs at that moment, and it submits the jobs that wait for sbatch.

Snakemake imports this package before it reads a Snakefile. So nothing here imports fedpipe at the top: the Snakefile
would get that fedpipe, and not the one of its own folder.
"""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import redirect_stderr, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_executor_plugin_slurm import ExecutorSettings as ExecutorSettings
from snakemake_executor_plugin_slurm import common_settings as common_settings
from snakemake_executor_plugin_slurm.job_cancellation import cancel_slurm_jobs
from snakemake_executor_plugin_slurm.job_status_query import query_job_status
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry
from typing_extensions import override

#: Slurm's message in the log of a job that ran out of memory. It begins with `slurmstepd: error:`, in newer versions
#: with `[2026-11-29T21:52:34.030] error:`. PyTorch's message about a GPU does not match.
OUT_OF_MEMORY_PATTERN = re.compile(
    r"^((slurmstepd|srun)\S*:|\[[-\d]+T[.:\d]+\]) error: .*(oom.?kill|out.of.memory|memory limit)",
    re.IGNORECASE | re.MULTILINE,
)
PREEMPTED_MESSAGE = "A job with more priority preempted it, and Slurm did not queue it again. It has to run again. "
PURGED_MESSAGE = "Slurm has no record of this job, and its output files are missing. It has to run again. "
TIME_LIMIT_MESSAGE = "It requests more time than its partition allows, so Slurm would never start it. Request less. "
TIMEOUT_MESSAGE = (
    "Its time ended before a round was complete, and another attempt would end in the same way. Request more time, or "
    "split rounds into several jobs. "
)
TIME_ADVICE = (
    "The time of a job is `runtime` in the profile, and `sinfo -o '%P %l'` shows the limit of each partition. "
    "`execution: {rounds_per_job: 1, clients_per_job: 1}` splits a round into several jobs. Until you change one of "
    "these, this job is not submitted again. "
)


class Executor(plugin.Executor):  # type: ignore[misc]
    """Snakemake's executor for Slurm, which also handles jobs that Slurm has purged or that can't run."""

    def __init__(self, workflow: Any, logger: Any) -> None:
        if ignored := _find_ignored_options():
            raise WorkflowError(
                f"fedpipe: the executor fedpipe-slurm does not read {ignored[0]}. Use --fedpipe-{ignored[0][2:]}, in a "
                f"profile fedpipe-{ignored[0][2:]}."
            )
        if workflow.executor_settings.array_jobs:
            raise WorkflowError(
                "fedpipe: --fedpipe-slurm-array-jobs can't be used, because the end of one task would be the end of "
                "all. Remove it."
            )
        path = f"{Path.cwd()}{sys.executable}"
        if not workflow.executor_settings.pass_command_as_script and (special_character := re.search(r"[$`\\]", path)):
            raise WorkflowError(
                f"fedpipe: {Path.cwd()}: a path with {special_character[0]} can't be passed to Slurm's nodes. Move the "
                "clone."
            )
        self._active_infos: dict[str, SubmittedJobInfo] = {}  #: each submitted job by its id, until its end is reported
        self._ended_job_ids: set[str] = set()  #: ids of jobs that had no record or were preempted in the previous poll
        #: modification times of a job's outputs at submission
        self._output_times: dict[Any, list[int | None]] = {}
        self._complete_rounds: dict[Any, int] = {}  #: number of complete rounds of a job's run at submission
        self._memory_failures: dict[Any, int] = {}  #: number of times that a job ran out of memory
        self._rejected_runtimes: dict[Any, int] = {}  #: minutes that were too few, or more than the partition allows
        super().__init__(workflow, logger)

    # -- submission ----------------------------------------------------------------------------------------------------

    @override
    def run_job(self, job: Any) -> None:
        """Submit a job, unless its time limit was wrong before and has not changed."""
        if job in self._rejected_runtimes and self._rejected_runtimes[job] == job.resources.get("runtime"):
            job.attempt = job.restart_times + 1  # the last one
            self._report_job_error_threadsafe(SubmittedJobInfo(job), TIME_ADVICE)
            return
        try:
            self._prepare_attempt(job)
        except Exception as error:  # this thread would lose the error, and Snakemake would wait for the job forever
            self._report_job_error_threadsafe(SubmittedJobInfo(job), f"fedpipe: the job was not submitted ({error!r}).")
            return
        super().run_job(job)

    @override
    def report_job_submission(self, job_info: SubmittedJobInfo, register_job: bool = True) -> None:
        self._active_infos[job_info.external_jobid] = job_info
        super().report_job_submission(job_info, register_job)

    def _prepare_attempt(self, job: Any) -> None:
        """Record what exists before a job, and request more memory if it ran out of it."""
        self._output_times[job], self._complete_rounds[job] = _get_output_times(job), _count_complete_rounds(job)
        if job in self._memory_failures and (requested_memory := job.resources.get("mem_mb")):
            job.resources.mem_mb = max(
                requested_memory, min(requested_memory * 2 ** self._memory_failures[job], _get_largest_memory(job))
            )
            self.logger.info(f"Job {job.jobid} ran out of memory and now requests {job.resources.mem_mb} MB.")

    # -- the end of jobs -----------------------------------------------------------------------------------------------

    @override
    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report each job that ended. Yield the others."""
        if not active_jobs:  # a thread may poll before the plugin has started
            async for info in super().check_active_jobs(active_jobs):
                yield info
            return
        command = f"squeue --format='%i|%T %r' --states=all --noheader --name {self.run_uuid}"
        job_states, _ = await query_job_status(command, self.logger)
        if job_states is None:  # slurmctld does not answer, and the plugin would lose all jobs
            for info in active_jobs:
                yield info
            return
        active_infos = super().check_active_jobs(active_jobs)
        remaining_jobs = [info async for info in active_infos]
        remaining_jobs += [
            info for info in active_jobs if info not in remaining_jobs and info.external_jobid in self._active_infos
        ]
        ended_ids = {info.external_jobid for info in remaining_jobs} - job_states.keys()
        if self._submitted_job_clusters:  # this squeue does not list other clusters
            ended_ids.clear()
        if not self.workflow.executor_settings.requeue:
            ended_ids |= {job_id for job_id, state in job_states.items() if state.startswith("PREEMPTED ")}
        previously_ended_ids, self._ended_job_ids = self._ended_job_ids, ended_ids
        for info in remaining_jobs:
            if info.external_jobid in ended_ids & previously_ended_ids:
                if is_preempted := info.external_jobid in job_states:
                    self._cancel([info])  # otherwise Slurm might still queue it again
                self._report_ended_job(info, PREEMPTED_MESSAGE if is_preempted else PURGED_MESSAGE)
            elif job_states.get(info.external_jobid) == "PENDING PartitionTimeLimit" and self._cancel([info]):
                self._rejected_runtimes[info.job] = info.job.resources.get("runtime")
                self.report_job_error(info, msg=TIME_LIMIT_MESSAGE + TIME_ADVICE)
            else:
                yield info

    def _report_ended_job(self, info: SubmittedJobInfo, message: str) -> None:
        """Report the end of a job without a result in Slurm. It succeeded if its output files are new."""
        current_times = _get_output_times(info.job)
        if None not in current_times and all(
            time_after != time_before
            for time_after, time_before in zip(current_times, self._output_times[info.job], strict=True)
        ):
            self.report_job_success(info)
        else:
            self.report_job_error(info, msg=message, aux_logs=[str(info.aux["slurm_logfile"])])

    @override
    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Cancel all jobs, also those that Snakemake is checking or submitting. Its argument does not contain these."""
        self._job_submission_executor.shutdown(wait=True, cancel_futures=True)
        self._cancel(list(self._active_infos.values()))
        with suppress(OSError, subprocess.TimeoutExpired):  # also jobs whose sbatch was interrupted
            subprocess.run(["scancel", "--name", self.run_uuid], capture_output=True, check=False, timeout=60)

    @override
    async def sleep(self) -> None:
        """Wait until the next query, or until Snakemake ends. The plugin would let it wait for up to three minutes."""
        end = time.monotonic() + self.next_seconds_between_status_checks
        while self.wait and time.monotonic() < end:
            await asyncio.sleep(min(1, self.next_seconds_between_status_checks))

    def _cancel(self, infos: list[SubmittedJobInfo]) -> bool:
        """Cancel jobs. False if Slurm does not answer, or has no record of one of them."""
        try:
            cancel_slurm_jobs(infos, self._submitted_job_clusters, self.logger)
        except WorkflowError as error:
            self.logger.warning(str(error))
            return False
        return True

    @override
    def report_job_success(self, job_info: SubmittedJobInfo) -> None:
        self._active_infos.pop(job_info.external_jobid, None)
        super().report_job_success(job_info)

    @override
    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **details: Any) -> None:
        """Report a failed job, and record the cause for the next attempt."""
        job, message = job_info.job, msg or ""
        self._active_infos.pop(job_info.external_jobid, None)
        if job_info.external_jobid is None:  # Slurm rejected it
            self._memory_failures.pop(job, None)
        elif "'OUT_OF_MEMORY'" in message or any(
            OUT_OF_MEMORY_PATTERN.search(_read_log(log)) for log in details.get("aux_logs", ())
        ):
            self._memory_failures[job] = self._memory_failures.get(job, 0) + 1
        elif "'TIMEOUT'" in message and _count_complete_rounds(job) <= self._complete_rounds[job]:
            self._rejected_runtimes[job] = job.resources.get("runtime")
            message = f"{message} {TIMEOUT_MESSAGE}{TIME_ADVICE}"
        super().report_job_error(job_info, msg=message, **details)


def _find_ignored_options() -> list[str]:
    """List options of Snakemake's own plugin on the command line or in a profile. This executor ignores them."""
    from snakemake.cli import parse_args

    try:
        with redirect_stderr(io.StringIO()):  # it prints the profiles that it reads
            parser, arguments = parse_args(sys.argv[1:])
    except SystemExit:  # this process is not the command line of Snakemake
        return []
    slurm = ExecutorPluginRegistry().get_plugin("slurm")
    options = [slurm.get_cli_arg(field.name) for field in fields(ExecutorSettings)]
    names = {option: option[2:].replace("-", "_") for option in options}
    return [option for option, name in names.items() if getattr(arguments, name) != parser.get_default(name)]


def _get_output_times(job: Any) -> list[int | None]:
    """Get the modification time of each output of a job. None for a missing one."""
    output_paths = [Path(str(output)) for output in job.output]
    return [output_path.stat().st_mtime_ns if output_path.exists() else None for output_path in output_paths]


def _count_complete_rounds(job: Any) -> int:
    """Count the complete rounds of a segment's run. 0 for other jobs, which are single steps."""
    from fedpipe.core.errors import UserError  # the Snakefile has imported its own fedpipe by now
    from fedpipe.core.storage.layout import RunFiles

    with suppress(UserError, IndexError):
        return sum(number > 0 for number in RunFiles(Path(str(job.output[0])).parents[1]).list_complete_rounds())
    return 0


def _read_log(log: str | None) -> str:
    with suppress(OSError, TypeError):
        return Path(log).read_text(errors="replace")  # type: ignore[arg-type]
    return ""


def _get_largest_memory(job: Any) -> int:
    """Get the memory in MB of the largest node that a job may use. 0 if Slurm does not report it."""
    partitions, gpu = {*str(job.resources.get("slurm_partition") or "").split(",")}, job.resources.get("gpu")
    required_gres = str(job.resources.get("gpu_model") or "gpu") if gpu else ""
    node_memories = [0]
    for node in _query_scontrol("node"):
        if required_gres in node.get("Gres", "") and partitions & {"", *node.get("Partitions", "").split(",")}:
            node_memories.append(int(node["RealMemory"]) - int(node.get("MemSpecLimit", 0)))
    requested_partitions = [
        partition for partition in _query_scontrol("partition") if partition["PartitionName"] in partitions
    ]
    limits = [partition.get("MaxMemPerNode", "") for partition in requested_partitions]
    return min([max(node_memories), *(int(limit) for limit in limits if limit.isdigit())])


def _query_scontrol(kind: str) -> list[dict[str, str]]:
    completed_process = subprocess.run(["scontrol", "show", kind, "-o"], capture_output=True, text=True, check=False)
    return [
        dict(field.split("=", 1) for field in line.split() if "=" in field)
        for line in completed_process.stdout.splitlines()
    ]
