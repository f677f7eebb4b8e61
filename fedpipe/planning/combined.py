"""Combines the plans of several studies for one call of Snakemake."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path

from fedpipe.core.components.pinned_files import compute_stat_fingerprint
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage.files import RESULTS
from fedpipe.core.storage.layout import MergedRoundFiles
from fedpipe.planning.plan import Plan, PlannedDiagnostic, PlannedRun, add_run
from fedpipe.settings.execution import Execution


def read_plans() -> Iterator[tuple[Path, Plan | None]]:
    """Read all plans in this folder by path. None for a plan that can't be read.

    Plans are cached until their file changes, because a job reads them after each round.
    """
    for path in filter(Path.exists, [RESULTS / "plan.json", *sorted(RESULTS.glob("studies/**/plan.json"))]):
        yield path, _read_plan_cached(path, compute_stat_fingerprint(path))


@cache
def _read_plan_cached(path: Path, fingerprint: str) -> Plan | None:
    try:
        return Plan.read(path)
    except ArtifactError:
        return None


@dataclass(frozen=True)
class CombinedPlan:
    """One study or several. Each run is computed once, with the largest number of rounds of these studies."""

    plans: tuple[Plan, ...]  #: one per study
    unavailable_runs: frozenset[str] = frozenset()  #: paths of runs that are omitted, with all that depends on them

    @cached_property
    def plans_with_draws(self) -> tuple[Plan, ...]:
        """The plans with the draws of `tune`, which also need jobs."""
        return tuple(plan.add_search_results(has_draws=True) for plan in self.plans)

    @cached_property
    def runs(self) -> dict[str, PlannedRun]:
        """All runs by path."""
        runs_by_path: dict[str, PlannedRun] = {}
        for run in itertools.chain.from_iterable(plan.runs for plan in self.plans_with_draws):
            if str(run.path) not in self.unavailable_runs:
                add_run(runs_by_path, str(run.path), run)
        return runs_by_path

    @cached_property
    def available_plans(self) -> tuple[Plan, ...]:
        """Plans without omitted runs, whose tables can be made."""
        return tuple(plan for plan in self.plans if all(str(run.path) in self.runs for run in plan.runs))

    @cached_property
    def partitions(self) -> tuple[str, ...]:
        """Keys of all partitions."""
        return tuple(dict.fromkeys(run.partition for run in self.runs.values()))

    @cached_property
    def merged_files(self) -> tuple[MergedRoundFiles, ...]:
        """Merged files of all tables, each once."""
        cells = (cell for plan in self.plans for cell in plan.cells if str(cell.files.path) in self.runs)
        return tuple(dict.fromkeys(cell.merged_files for cell in cells))

    @cached_property
    def search_run_paths(self) -> frozenset[Path]:
        """Folders of the runs of all draws."""
        return frozenset(path for plan in self.plans for path in plan.search_run_paths)

    @cached_property
    def round_counts_by_run(self) -> dict[str, tuple[int, ...]]:
        """Numbers of rounds by run that any study's cells report, ascending."""
        counts: dict[str, set[int]] = {}
        for plan in self.plans_with_draws:
            for path, lengths in plan.round_counts_by_run.items():
                counts.setdefault(str(path), set()).update(lengths)
        return {path: tuple(sorted(lengths)) for path, lengths in counts.items()}

    @cached_property
    def diagnostics(self) -> dict[str, PlannedDiagnostic]:
        """All diagnostics by table."""
        diagnostics = itertools.chain.from_iterable(plan.diagnostics for plan in self.plans)
        return {str(planned.path): planned for planned in diagnostics if str(planned.run_files.path) in self.runs}

    @property
    def execution(self) -> Execution:
        """Section `execution`, which must be the same for all studies."""
        first, *others = self.plans
        for plan, key in itertools.product(others, ("execution", "artifacts.keep_models")):
            if attrgetter(key)(plan) != attrgetter(key)(first):
                raise SettingsError(
                    f"{plan.params}: {key} differs from that of {first.params}. Use the same value in studies that "
                    "are run together."
                )
        return first.execution
