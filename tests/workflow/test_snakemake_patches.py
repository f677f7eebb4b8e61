"""The installed Snakemake and Slurm plugin have all names that fedpipe replaces. Another version is an error."""

import ast
import inspect
import logging
import logging.handlers
import queue
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import snakemake
from snakemake.io import _IOFile
from snakemake.persistence import PersistenceBase
from snakemake.persistence.file import FilePersistence
from snakemake.scheduling.job_scheduler import JobRateLimiter, JobScheduler
from snakemake.settings.types import MaxJobsPerTimespan
from snakemake_executor_plugin_slurm import Executor
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

import snakemake_executor_plugin_fedpipe_slurm as slurm_plugin
from fedpipe.core.errors import SettingsError
from fedpipe.workflow import snakemake_patches
from fedpipe.workflow.snakemake_patches import (
    SNAKEMAKE_VERSION,
    patch_pandas_import,
    patch_scheduler_alarm,
    require_snakemake_version,
)
from tests.docs.page_blocks import read

SOURCES = [
    (snakemake_patches, (FilePersistence, PersistenceBase, JobScheduler, JobRateLimiter, _IOFile)),
    (slurm_plugin, (Executor, RemoteExecutor)),
]
#: Names without an underscore that are not documented.
PUBLIC = {
    *("exit_gracefully", "has_metadata", "job_rate_limiter", "max_jobs", "metadata", "params_changed", "protected"),
    "run_uuid",
}
#: A workflow whose Snakemake receives SIGTERM while it finishes its first job.
SNAKEFILE = """
import os, signal
from snakemake.jobs import Job
from fedpipe.workflow import snakemake_patches

snakemake_patches.patch_graceful_exit()
postprocess = Job.postprocess

async def postprocess_after_signal(job, **options):
    if job.rule.name == "first":
        os.kill(os.getpid(), signal.SIGTERM)
    await postprocess(job, **options)

Job.postprocess = postprocess_after_signal

rule first:
    output: "first"
    shell: "touch {output}"
rule second:
    input: "first"
    output: "second"
    shell: "touch {output}"
"""


def test_version_of_snakemake_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    require_snakemake_version()
    assert f'"snakemake=={SNAKEMAKE_VERSION}"' in read("pyproject.toml")
    monkeypatch.setattr(snakemake, "__version__", "9.28.0")
    with pytest.raises(SettingsError, match=rf"snakemake 9\.28\.0 .* {re.escape(SNAKEMAKE_VERSION)}"):
        require_snakemake_version()


def test_workflow_waits_until_loggers_have_handled_all_records() -> None:
    handled: list[int] = []

    class ListHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            handled.append(int(record.msg))

    records: queue.Queue[logging.LogRecord] = queue.Queue()
    listener = logging.handlers.QueueListener(records, ListHandler())
    for number in range(20_000):
        records.put(logging.makeLogRecord({"msg": number}))
    listener.start()
    snakemake_patches.wait_for_log_records(SimpleNamespace(queue_listener=listener))
    assert handled == list(range(20_000))
    listener.stop()
    snakemake_patches.wait_for_log_records(SimpleNamespace(queue_listener=None))


@pytest.mark.parametrize(("module", "owners"), SOURCES, ids=["patches", "executor"])
def test_installed_versions_have_all_private_names(module: object, owners: tuple[type, ...]) -> None:
    nodes = list(ast.walk(ast.parse(Path(inspect.getfile(module)).read_text())))  # type: ignore[arg-type]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own_names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own_names |= {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    used_names = {node.attr for node in attributes if re.match("_[a-z]", node.attr) or node.attr in PUBLIC} - own_names
    assert len(used_names) >= 3
    source = "".join(map(inspect.getsource, owners))
    assert [name for name in sorted(used_names) if not re.search(rf"(def |self\.){name}\b", source)] == []


def test_parameter_records_are_equal_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    serialize = FilePersistence._serialize_param_pandas
    monkeypatch.setattr(FilePersistence, "_serialize_param_pandas", serialize)  # for the end of this test
    patch_pandas_import()
    persistence: FilePersistence = FilePersistence.__new__(FilePersistence)
    values = ["a", 1, None, [0.5], Path("a"), pd.Series([1, 2])]
    expected = [serialize(persistence, value) for value in values]
    assert [persistence._serialize_param_pandas(value) for value in values] == expected
    monkeypatch.delitem(sys.modules, "pandas")
    assert [persistence._serialize_param_pandas(value) for value in values[:-1]] == expected[:-1]
    assert "pandas" not in sys.modules


@pytest.mark.parametrize("seconds", [0.0, 1.5])
@pytest.mark.parametrize(("ready", "delays"), [(99, []), (100, [1]), (300, [1])])
def test_alarm_is_set_if_rate_limit_delays_jobs(
    ready: int, delays: list[int], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is also set if the submission takes longer than the timespan, and then only the next job's end would help."""
    alarms: list[int] = []
    monkeypatch.setattr(JobScheduler, "_schedule_reevalutation", lambda scheduler, delay: alarms.append(delay))
    patch_scheduler_alarm()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    limiter = JobRateLimiter(MaxJobsPerTimespan.parse_choice("100/1s"))
    limiter.register_jobs(min(ready, limiter.get_free_jobs()))
    now += seconds  # of the submission
    JobScheduler._schedule_reevalutation(SimpleNamespace(job_rate_limiter=limiter), limiter.timespan)
    assert alarms == delays


@pytest.mark.slow
def test_snakemake_ends_after_sigterm_that_arrives_while_it_finishes_a_job(tmp_path: Path) -> None:
    """Without the patch it waits forever. The next call completes the work."""
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    command = [Path(sys.executable).parent / "snakemake", "--cores", "1", "second"]
    stopped = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (tmp_path / "first").exists()
    assert not list(tmp_path.glob(".snakemake/locks/*"))
    assert "Will exit after finishing currently running jobs" in stopped.stderr
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=300)
    assert (tmp_path / "second").exists()
