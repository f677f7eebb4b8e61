"""Snakemake's scheduler, with nothing to do while jobs run.

After each choice of jobs it sets an alarm to choose again a second later, when a limit of jobs in a timespan may allow
more (`--max-jobs-per-timespan`, by default 100 a second). Each alarm leads to a choice, and so to the next alarm, and
each job that ends begins another such chain. After a hundred jobs of a large study Snakemake did nothing but look at
all jobs that were ready, and those that had ended waited for it.
"""

from __future__ import annotations

from typing import Any

from snakemake.scheduling.job_scheduler import JobScheduler


def patch_scheduler() -> None:
    """Let Snakemake set its alarm only where the limit is reached; else the next job that ends wakes it."""
    set_alarm = JobScheduler._schedule_reevalutation

    def set_alarm_at_limit(scheduler: Any, delay: int) -> None:
        if scheduler.job_rate_limiter is None or not scheduler.job_rate_limiter.get_free_jobs():
            set_alarm(scheduler, delay)

    JobScheduler._schedule_reevalutation = set_alarm_at_limit
