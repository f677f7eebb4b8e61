"""Snakemake's command line, asking Slurm every two seconds.

Its plugin for Slurm asks ten seconds later each time that no job has finished. That is right for jobs of hours; tests
of jobs of seconds would wait for nothing else.
"""

import sys

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

interval = RemoteExecutor.next_seconds_between_status_checks


def at_most_two(executor: RemoteExecutor, seconds: float | None) -> None:
    interval.fset(executor, seconds and min(seconds, 2))


RemoteExecutor.next_seconds_between_status_checks = property(interval.fget, at_most_two)
sys.exit(main())
