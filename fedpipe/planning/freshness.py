"""Whether a study's ``plan.json`` is current: the one answer that the Snakefile, `show`, `load` and `verify` use.

`planner.write_plan` records the files that a plan was made of in ``sources.json``. `compare_source_hashes` compares
these files with the record, in milliseconds. `compare_with_new_plan` plans again in memory and compares the plans.
`compare_plan_with_files` does the second if the first does not find the plan fresh. If the record is missing or
damaged, the answer is unknown: each clone records its own sources, so a clone that pulled results has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedpipe.core.components.pinned_files import STAT_PREFIX, has_file_changed
from fedpipe.core.errors import ArtifactError, UserError
from fedpipe.core.storage.files import encode_json, read_json
from fedpipe.core.storage.layout import StudyFiles
from fedpipe.planning.plan import Plan


@dataclass(frozen=True)
class Freshness:
    """Whether a plan is what the study's file and the code give now."""

    state: Literal["fresh", "stale", "unknown"]
    changed_files: tuple[str, ...] = ()  #: source files that have changed or are missing
    error: UserError | None = None  #: reason if the study can't be planned now


def compare_source_hashes(plan: Plan) -> Freshness:
    """Compare the files that a plan was made of with their record."""
    try:
        sources = read_json(plan.study_files.source_hashes)
    except ArtifactError:
        return Freshness("unknown")
    if not isinstance(sources, dict) or not all(isinstance(mark, str) for mark in sources.values()):
        return Freshness("unknown")
    changed_names = [name for name, mark in sources.items() if _has_source_changed(name, mark)]
    # Not a source: plan.json itself, which DVC may replace, and the mark without a fingerprint (custom modules).
    changed_files = (name for name in changed_names if sources[name] and name != str(plan.study_files.plan))
    return Freshness("stale" if changed_names else "fresh", tuple(changed_files))


def compare_with_new_plan(plan: Plan, select_fields: Callable[[Plan], Mapping[str, Any]] = Plan.to_dict) -> Freshness:
    """Plan the study again, write nothing, and compare the fields that matter to the caller.

    If the study can't be planned now, the plan is stale, or unknown if its sources are not recorded.
    """
    from fedpipe.planning import planner

    by_sources = compare_source_hashes(plan)
    try:
        new_plan = planner.make_plan(plan.params, plan.preset)
    except UserError as error:
        state: Literal["stale", "unknown"] = "unknown" if by_sources.state == "unknown" else "stale"
        return Freshness(state, by_sources.changed_files, error)
    if encode_json(select_fields(new_plan)) == encode_json(select_fields(plan)):
        return Freshness("fresh")
    # The new plan has compared pinned files with their SHA-256, so only their times have changed.
    pinned_files = {name for name, mark in new_plan.source_hashes.items() if mark.startswith(STAT_PREFIX)}
    return Freshness("stale", tuple(name for name in by_sources.changed_files if name not in pinned_files))


def compare_plan_with_files(plan: Plan, select_fields: Callable[[Plan], Mapping[str, Any]] = Plan.to_dict) -> Freshness:
    """Compare the sources, and the plans only if that does not find the plan fresh."""
    by_sources = compare_source_hashes(plan)
    return by_sources if by_sources.state == "fresh" else compare_with_new_plan(plan, select_fields)


def needs_planning(params: Path, preset: str) -> bool:
    """Whether the Snakefile has to plan a study before it reads the plan.

    It plans in doubt: if the plan can't be read or is of another study, if its sources have changed or are not
    recorded, if a file that was written with it is gone, or if data are generated, because the real data may be here.
    """
    try:
        plan = Plan.read(StudyFiles.from_params(params, preset).plan)
    except UserError:
        return True
    runs = plan.add_search_results(has_draws=True).runs
    return (
        (plan.params, plan.preset) != (params, preset)
        or compare_source_hashes(plan).state != "fresh"
        or not all(map(Path.is_file, [*map(Path, plan.files), *(run.files.settings for run in runs)]))
        or any(run.dataset.startswith("generated-") for run in plan.runs)
    )


def _has_source_changed(name: str, fingerprint: str) -> bool:
    """Whether a source has changed or can't be read."""
    try:
        return has_file_changed(Path(name), fingerprint)
    except OSError:
        return True
