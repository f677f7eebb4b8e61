"""What an edit of code means for results that are there: which runs are made anew and why, which are of other code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from fedpipe import artifacts
from fedpipe.artifacts import RunFiles
from fedpipe.plan import NewPlan, Settings
from fedpipe.planned import Plan, plans

SECTIONS = {"dataset": "data set", "partition": "partition scheme", "model": "model", "algorithm": "algorithm"}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a study may have a thousand runs


def told(plan: NewPlan) -> list[str]:
    """What a plan that was just made says of its runs' code, in sentences; nothing where all is as it lies here."""
    return [*renewed(plan), *elsewhere(plan)]


def renewed(plan: NewPlan) -> Iterator[str]:
    """How many runs will be made anew because of an edit: there are rounds of runs that differ in code alone."""
    planned = {run.path for run in plan.runs}
    before: dict[str, dict[str, dict[str, Any]]] = {}  #: by label, what is the same after an edit: the old settings
    reasons: Counter[tuple[str, ...]] = Counter()
    for run in plan.runs:
        files, label = run.files, run.algorithm
        if files.complete():
            continue
        if label not in before:
            folders = [path for path in files.path.parent.glob("*") if path not in planned]
            before[label] = dict(_made(folders))
        settings = vars(plan.settings[run.key])
        if old := before[label].get(_without_code(settings)):
            edited = [name for name in SECTIONS if old[name]["code"] != settings[name]["code"]]
            reasons[tuple(f"{SECTIONS[name]} '{_name(settings[name])}'" for name in edited)] += 1
    for names, count in reasons.items():
        whose = "1 run will be" if count == 1 else f"{count} runs will be"
        yield (
            f"{whose} made anew: the code of {' and '.join(names)} has changed; what is there stays under "
            f"{'its old key' if count == 1 else 'the old keys'} (`fedpipe prune` removes it)."
        )


def elsewhere(plan: Plan) -> Iterator[str]:
    """How many runs come from shared code other than what lay here when the plan was made."""
    count = sum(made_elsewhere(run.files, plan.shared) for run in plan.runs)
    if count:
        yield (
            f"{count} of {len(plan.runs)} run{'s' if len(plan.runs) > 1 else ''} "
            f"{'comes' if count == 1 else 'come'} from other shared code (executors, optimizers, layers, evaluation, "
            "...) than lies here; `fedpipe verify` does a round of each again and compares."
        )


def unread() -> Iterator[str]:
    """Which studies' plans can't be read, since runs keep all that such a study may want."""
    for place, plan in plans():
        if plan is None:
            yield (
                f"{place} can't be read, so that all runs keep the states of every round, whatever "
                "artifacts.keep_models says; plan that study again, or delete the file."
            )


def made_elsewhere(files: RunFiles, shared: str) -> bool:
    """Whether the last complete round of a run was made by other shared code than this."""
    rounds = files.complete()
    if not rounds:
        return False
    made_by = artifacts.read_json(files.round(rounds[-1]).state)["made_by"]
    return any(made.get("shared") != shared for made in made_by)


def _made(folders: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings of runs that have rounds; those of another version of fedpipe are left out."""
    for files in map(RunFiles, folders):
        if files.complete():
            with suppress(OSError, yaml.YAMLError, LookupError, TypeError, AttributeError):
                settings = vars(Settings(**yaml.load(files.settings.read_text(), Loader=_LOADER)))
                yield _without_code(settings), settings


def _without_code(settings: dict[str, Any]) -> str:
    same = settings | {name: settings[name] | {"code": settings[name]["code"][:0]} for name in SECTIONS}
    return json.dumps(same, sort_keys=True)


def _name(described: dict[str, Any]) -> str:
    return str(described.get("scheme", described.get("name")))
