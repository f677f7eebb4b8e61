"""Snakemake's command line, which queries Slurm every two seconds.

The Slurm plugin waits ten seconds longer after each query without a finished job. This suits jobs of hours, but tests
with jobs of seconds would only wait. The thread of the plugin's first query starts while the plugin is set up. Here the
setup always waits for this query. SIGUSR1 prints the stack of each thread.
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
