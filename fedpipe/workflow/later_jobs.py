"""Counts the jobs that the search of `tune` adds to Snakemake's DAG after its rungs."""

from __future__ import annotations

import itertools
from collections import Counter

from fedpipe.planning.plan import Plan, is_default_cell
from fedpipe.planning.rungs import select_continuing_draws
from fedpipe.settings.execution import Execution


def count_later_jobs(plan: Plan, execution: Execution) -> Counter[str]:
    """Count the jobs of the next rungs and of the winners, at most, by rule.

    The draws with the lowest numbers are assumed to continue. Complete runs are counted, too.
    """
    counts = Counter[str]()
    if plan.tuning is None:
        return counts
    results, rungs = plan.read_rungs(), plan.tuning.rungs
    tuning = plan.tuning.add_draws_of_rungs(results)
    for index, search in enumerate(tuning.searches):
        selected = results[-1].searches[index].selected if results else ()
        draws = tuning.list_rung_draws(search, len(results), selected)
        for rung in range(len(results) + 1, len(rungs)):
            selected = select_continuing_draws(search.draws, draws, is_last=False)
            draws = tuning.list_rung_draws(search, rung, selected)
            for draw, _ in itertools.product(draws, tuning.seeds):
                start, participants = rungs[rung - 1] if draw in selected else 0, search.draws[draw].participants
                counts += count_run_jobs(execution, participants, start, rungs[rung])
        if draws and len(results) < len(rungs):
            participants = max(search.draws[draw].participants for draw in draws)
            for cell in plan.plan_without_tuning.cells:
                if is_default_cell(search, cell):
                    counts += count_run_jobs(execution, participants, 0, cell.rounds)
    return counts


def count_run_jobs(execution: Execution, participants: int, start: int, stop: int) -> Counter[str]:
    """Count the jobs of the rounds after ``start`` until ``stop`` of a run with so many participants, by rule."""
    if execution.clients_per_job:
        rounds, blocks = stop - start, -(-participants // execution.clients_per_job)
        first = {} if start else {"init": 1}
        return Counter(first | {"train": rounds * blocks, "aggregate": rounds, "evaluate": rounds, "collect": 1})
    if execution.rounds_per_job is None:
        return Counter(segment=1)
    ends = {*range(0, stop, execution.rounds_per_job), stop}
    return Counter(segment=sum(end > start for end in ends), collect=1)
