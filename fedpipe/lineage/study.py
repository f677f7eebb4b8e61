"""Whether what people read of a study is what its runs give: tables, metrics.json, numbers of plots, keys."""

from __future__ import annotations

from pathlib import Path

from fedpipe import artifacts, pins
from fedpipe import plan as planning
from fedpipe.errors import UserError
from fedpipe.lineage.verify import Verdict
from fedpipe.planned import Plan
from fedpipe.report import results
from fedpipe.stages import report


def verify(plan: Plan) -> Verdict:
    """Make a study's plan and, from its runs, all of its numbers again, and compare; see that its probes are whole."""
    place = plan.study
    sources = artifacts.read_json(place.sources) if place.sources.is_file() else {}
    again = {str(place.plan), planning.SEARCHED}  # it is made again below
    made_of = {path: mark for path, mark in sources.items() if path not in again}
    changed = [path for path, mark in made_of.items() if pins.changed(Path(path), mark)]
    if changed and _still_given(plan):  # marks are this folder's, and may be of what was tried here meanwhile
        changed = []
    try:
        if not changed and not _is(plan, planning.make(plan.params, plan.scale)):
            said = f"{place.plan}: not what {plan.params} gives; delete it and type `{report.command(plan)}`"
            return Verdict(said, False)
        for cell in results.cells(plan):
            cell.joined.check()
        for probe in plan.probes:
            artifacts.read_parquet(probe.files.table, artifacts.manifest(probe.files.table))
        made = report.contents(plan)
    except UserError as error:
        return Verdict(f"{place.path}: {error}", False)
    if wrong := report.differing(made):
        listed = ", ".join(map(str, wrong))
        advice = f"delete what is there of them and type `{report.command(plan)}`"
        return Verdict(f"{place.path}: not what the runs of {plan.params} give: {listed}; {advice}", False)
    more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
    since = f"; {changed[0]}{more} changed since they were made" if changed else ""
    said = f"{place.path}: {len(made)} files are what the runs of {plan.params} give{since}"
    return Verdict(said, True, "file", len(made))


def _still_given(plan: Plan) -> bool:
    """Whether a study's files give this plan as they are by now."""
    try:
        return _is(plan, planning.make(plan.params, plan.scale))
    except UserError:
        return False


def _is(plan: Plan, made: Plan) -> bool:
    """Whether a plan is this one, as it would be written."""
    return artifacts.json_bytes(plan.held()) == artifacts.json_bytes(made.held())
