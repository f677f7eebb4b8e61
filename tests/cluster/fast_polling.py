"""Snakemake's command line, asking Slurm every two seconds.

Its plugin for Slurm asks ten seconds later each time that no job has finished. That is right for jobs of hours; tests
of jobs of seconds would wait for nothing else. The plugin also asks for the first time while it is still being set up,
early or late as threads happen to run; here always at once. SIGUSR1 makes it say what each of its threads does.
"""

import faulthandler
import signal
import sys
import time

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

interval = RemoteExecutor.next_seconds_between_status_checks
set_up = Executor.__post_init__


def set_short_interval(executor: RemoteExecutor, seconds: float | None) -> None:
    interval.fset(executor, seconds and min(seconds, 2))


def wait_for_first_query(executor: Executor, *arguments: object, **named: object) -> None:
    while executor._next_seconds_between_status_checks is None and executor.wait_thread.is_alive():
        time.sleep(0.01)
    set_up(executor, *arguments, **named)


RemoteExecutor.next_seconds_between_status_checks = property(interval.fget, set_short_interval)
Executor.__post_init__ = wait_for_first_query
faulthandler.register(signal.SIGUSR1)
sys.exit(main())
