"""Describes the effect of code edits: runs that will be recomputed and why, and runs of other shared code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.files import make_unreadable_file_error, read_json
from fedpipe.core.storage.layout import MergedRoundFiles, RoundFiles, RunFiles
from fedpipe.planning.combined import read_plans
from fedpipe.planning.plan import Plan
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.run_settings import RunSettings

COMPONENT_SECTIONS = {
    "dataset": "data set",
    "partition": "partition scheme",
    "model": "model",
    "algorithm": "algorithm",
}


def describe_invalidated_runs(plan: NewPlan) -> Iterator[str]:
    """Describe how many runs will be recomputed because of an edit: existing runs differ only in code."""
    planned_runs = plan.add_search_results(has_draws=True).runs
    runs = [run for run in planned_runs if run.key in plan.run_settings]  # winners are derived
    planned_paths = {run.path for run in runs}
    #: Old settings by label and the settings that an edit leaves.
    old_settings: dict[str, dict[str, dict[str, Any]]] = {}
    reasons: Counter[tuple[str, ...]] = Counter()
    for run in runs:
        files, label = run.files, run.algorithm
        if files.list_complete_rounds():
            continue
        if label not in old_settings:
            folders = [path for path in files.path.parent.glob("*") if path not in planned_paths]
            old_settings[label] = dict(_read_run_settings(folders))
        settings = vars(plan.run_settings[run.key])
        if old := old_settings[label].get(_encode_settings_without_code(settings)):
            edited_components = (
                f"{title} '{settings[name].get('scheme', settings[name].get('name'))}'"
                for name, title in COMPONENT_SECTIONS.items()
                if old[name]["code"] != settings[name]["code"]
            )
            reasons[tuple(edited_components)] += 1
    for names, count in reasons.items():
        subject = "1 run will be" if count == 1 else f"{count} runs will be"
        yield (
            f"{subject} recomputed, because the code of {' and '.join(names)} has changed. The old results stay under "
            f"{'the old key' if count == 1 else 'the old keys'} (`fedpipe prune` lists them)."
        )


def describe_runs_from_other_code(
    plan: Plan, times_by_run: Mapping[MergedRoundFiles, Any] | None = None
) -> Iterator[str]:
    """Describe how many runs come from other shared code than the plan's.

    ``times_by_run`` has the merged times of runs, if they have been read.
    """
    times_by_run = times_by_run or {}
    count = sum(
        not _is_code_of_merged_rounds(run.merged_files, plan.shared, times_by_run.get(run.merged_files))
        and has_other_shared_code(run.files, plan.shared)
        for run in plan.runs
    )
    if count:
        yield (
            f"{count} of {len(plan.runs)} run{'s' if len(plan.runs) > 1 else ''} "
            f"{'comes' if count == 1 else 'come'} from other shared code (executors, optimizers, layers, evaluation, "
            "...) than the current one. `fedpipe verify` repeats a round of each and compares."
        )


def describe_unreadable_plans() -> Iterator[str]:
    """Describe plans that can't be read, because runs keep all states that such a study may need."""
    for path, plan in read_plans():
        if plan is None:
            yield (
                f"{path} can't be read, so all runs keep the states of every round, regardless of "
                "artifacts.keep_models. Plan that study again, or delete the file."
            )


def has_other_shared_code(files: RunFiles, shared: str) -> bool:
    """Whether other shared code made the last complete round of a run."""
    rounds = files.list_complete_rounds()
    if not rounds:
        return False
    environments = read_round_environments(files.get_round_files(rounds[-1]))
    return any(environment.get("shared") != shared for environment in environments)


def read_round_environments(files: RoundFiles) -> list[dict[str, Any]]:
    """Read the environments that made a round: executor, device and versions of each block and of the server.

    Raises
    ------
    ArtifactError
        The round's ``state.json`` is missing or damaged.
    """
    marker = files.complete_states_marker
    content = read_json(marker)
    environments = content.get("made_by") if isinstance(content, dict) else None
    if not environments or not isinstance(environments, list) or not all(isinstance(one, dict) for one in environments):
        raise make_unreadable_file_error(marker, "its field made_by is missing or damaged")
    return environments


def _is_code_of_merged_rounds(files: MergedRoundFiles, shared: str, times: Any = None) -> bool:
    """Whether this shared code made all merged rounds. Their times are read much faster than a pack is opened."""
    with suppress(ArtifactError, LookupError, TypeError, AttributeError):
        return all(environment["shared"] == shared for environment in (times or read_json(files.times))["made_by"])
    return False


def _read_run_settings(folders: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the settings of runs with rounds, except those of other versions of fedpipe."""
    for files in map(RunFiles, folders):
        if files.list_complete_rounds():
            with suppress(ArtifactError, LookupError, TypeError, AttributeError):
                settings = vars(RunSettings.read_unchecked(files.settings))
                yield _encode_settings_without_code(settings), settings


def _encode_settings_without_code(settings: dict[str, Any]) -> str:
    stripped_settings = settings | {
        name: settings[name] | {"code": settings[name]["code"][:0]} for name in COMPONENT_SECTIONS
    }
    return json.dumps(stripped_settings, sort_keys=True)
