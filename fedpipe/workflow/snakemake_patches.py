"""Every patch of Snakemake, with the defect that makes it necessary.

Each patch replaces private parts of the Snakemake version that ``pyproject.toml`` pins. `require_snakemake_version`
reports another version before any job starts. docs/upstream.md has reproductions of all except the records, and the
patches to send.

- Locks: at its end Snakemake deletes the complete folder of locks, so two snakemakes that run in one folder delete each
  other's locks (``FilePersistence._delete_locks``).
- Scheduler: Snakemake sets an alarm after each selection of jobs, and each alarm causes the next selection. With
  hundreds of jobs the alarms multiply, and Snakemake spends its time on selections
  (``JobScheduler._schedule_reevalutation``).
- Signals: the handler of SIGTERM waits for a lock of the scheduler. If Snakemake has this lock when the signal arrives,
  as it does after each job, Snakemake waits for itself forever (``JobScheduler.exit_gracefully``).
- Records: Snakemake writes the record of an output in place. With DVC's `cache.type` symlink or hardlink the record is
  a link into DVC's cache, which the write would change (``FilePersistence._io_write``). Linked outputs are read-only,
  so Snakemake would never overwrite them (``_IOFile.protected``). After an interrupted `dvc pull` a table may exist
  without its record, and Snakemake would accept it for any settings (``FilePersistence.params_changed``, and
  ``has_metadata``, which skips it).
  With `--touch`, Snakemake records outputs that it does not make as made with the current settings, and with
  `--drop-metadata` it keeps the record of an earlier output with the same name (``FilePersistence.finished``).
- Parameters: Snakemake imports pandas to test whether a parameter is a frame, which takes a quarter of the time of a
  study that is complete (``FilePersistence._serialize_param_pandas``).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import snakemake
from snakemake.io import _IOFile
from snakemake.persistence import ParamsChange
from snakemake.persistence.file import FilePersistence
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake.settings.enums import PersistenceBackend, RerunTrigger

from fedpipe.core.errors import SettingsError

SNAKEMAKE_VERSION = "9.27.1"  #: the one that pyproject.toml pins
RECORDS_TIMEOUT = 5  #: seconds after which a message is printed although a logger has not handled all records


def require_snakemake_version() -> None:
    """Require the version of Snakemake that the patches are for."""
    if snakemake.__version__ != SNAKEMAKE_VERSION:
        raise SettingsError(
            f"snakemake {snakemake.__version__} is installed, but fedpipe replaces private parts of snakemake "
            f"{SNAKEMAKE_VERSION}. Install the versions of requirements.lock."
        )


def is_complete_dag(workflow: Any) -> bool:
    """Whether Snakemake makes all missing and outdated results, not only a part of them, and does not touch them."""
    settings = workflow.dag_settings
    has_all_jobs = "all" in (settings.targets or ["all"]) and RerunTrigger.all() <= {*settings.rerun_triggers}
    has_limits = settings.batch or settings.until or settings.omit_from or settings.allowed_rules
    return has_all_jobs and not (workflow.touch or has_limits)


def wait_for_log_records(logger_manager: Any) -> None:
    """Wait until a thread has printed all records of loggers, so that a message of the workflow follows them."""
    if logger_manager.queue_listener is not None:
        records = logger_manager.queue_listener.queue
        with records.all_tasks_done:
            records.all_tasks_done.wait_for(lambda: not records.unfinished_tasks, RECORDS_TIMEOUT)


def patch_lock_deletion() -> None:
    """Let Snakemake delete only its own locks. Skip this for ``snakemake --unlock``, which deletes all."""
    FilePersistence._delete_locks = _delete_own_locks


def _delete_own_locks(persistence: FilePersistence) -> None:
    for lock in persistence._lockfile.values():
        Path(lock).unlink(missing_ok=True)
    persistence._lockfile.clear()


def patch_scheduler_alarm() -> None:
    """Let Snakemake set its alarm only at the limit of jobs per timespan. Otherwise the next finished job wakes it."""
    set_alarm = JobScheduler._schedule_reevalutation

    def set_alarm_if_rate_limited(scheduler: Any, delay: int) -> None:
        limiter = scheduler.job_rate_limiter
        # get_free_jobs would forget the jobs of this selection if their submission has taken the whole timespan.
        if limiter is None or len(limiter._jobs) >= limiter.max_jobs:
            set_alarm(scheduler, delay)

    JobScheduler._schedule_reevalutation = set_alarm_if_rate_limited


def patch_graceful_exit() -> None:
    """Let Snakemake handle SIGTERM in another thread, which can wait for the scheduler's lock."""
    exit_gracefully = JobScheduler.exit_gracefully

    def exit_gracefully_in_thread(scheduler: Any, *_: Any) -> None:
        threading.Thread(target=exit_gracefully, args=(scheduler,)).start()

    JobScheduler.exit_gracefully = exit_gracefully_in_thread


def patch_record_writing() -> None:
    """Let Snakemake write the record of an output as a new file."""
    write_in_place = FilePersistence._io_write

    def write_new_file(persistence: FilePersistence, subject: str, value: Any, name: str, *mode: int) -> None:
        # If the process is killed here, the output counts as incomplete: Snakemake removes its mark after the record.
        Path(persistence._record_path(subject, name)).unlink(missing_ok=True)
        write_in_place(persistence, subject, value, name, *mode)

    FilePersistence._io_write = write_new_file


def patch_linked_outputs() -> None:
    """Let Snakemake overwrite outputs that are hard links into DVC's cache."""
    is_read_only = _IOFile.protected

    async def is_protected(file: Any) -> bool:
        return await is_read_only(file) and Path(file).stat().st_nlink == 1

    _IOFile.protected = is_protected


def _has_fixed_names(job: Any) -> bool:
    """Whether the outputs of a job have fixed names. Outputs under keys belong to their settings."""
    return "preset" in job.params.keys()  # noqa: SIM118  # `in` alone would search the values


def patch_missing_records() -> None:
    """Let Snakemake rerun outputs with fixed names that have no record."""
    get_changes = FilePersistence.params_changed

    def get_changes_or_missing(persistence: FilePersistence, job: Any, file: Any = None) -> Any:
        changes = get_changes(persistence, job, file)
        if not _has_fixed_names(job):
            return changes
        unrecorded = {output for output in job.output if persistence.metadata(output) is None}
        return changes | ParamsChange(only_new={"no record"} if unrecorded else set(), files=unrecorded)

    FilePersistence.params_changed = get_changes_or_missing
    FilePersistence.has_metadata = lambda *_: True  # Snakemake calls params_changed only if this is true


def patch_outdated_records() -> None:
    """Let Snakemake delete the records of touched outputs with fixed names, and with --drop-metadata of all outputs.

    The next command makes outputs without a record again, see `patch_missing_records`.
    """
    finish = FilePersistence.finished

    async def finish_or_delete_records(persistence: FilePersistence, job: Any) -> None:
        workflow = persistence.dag.workflow
        is_touched = workflow.touch and _has_fixed_names(job)
        if is_touched or not workflow.execution_settings.keep_metadata:
            persistence.cleanup(job)
        else:
            await finish(persistence, job)

    FilePersistence.finished = finish_or_delete_records


def require_records_in_files(workflow: Any) -> None:
    """Reject records in a database, which DVC does not version and the patches do not change."""
    if workflow.workflow_settings.persistence_backend != PersistenceBackend.FILE:
        raise SettingsError("--persistence-backend can only be `file`, because DVC versions the records of outputs.")


def patch_pandas_import() -> None:
    """Let Snakemake test whether a parameter is a frame of pandas only if pandas has been imported."""
    serialize = FilePersistence._serialize_param_pandas

    def serialize_without_import(persistence: FilePersistence, value: Any) -> Any:
        is_imported = "pandas" in sys.modules  # a frame needs pandas
        return serialize(persistence, value) if is_imported else persistence._serialize_param_builtin(value)

    FilePersistence._serialize_param_pandas = serialize_without_import
