"""Whether what people read of a study is what its runs give: tables, metrics.json, numbers of plots, keys."""

from __future__ import annotations

from pathlib import Path

from fedpipe import artifacts, pins
from fedpipe import plan as planning
from fedpipe.artifacts import StudyFiles
from fedpipe.errors import UserError
from fedpipe.lineage.verify import Verdict
from fedpipe.report import results, stage
from fedpipe.report.results import Plan


def verify(plan: Plan) -> Verdict:
    """Make a study's plan again from its settings, and all of its numbers from its runs, and compare."""
    place = StudyFiles.of(Path(plan["params"]))
    sources = artifacts.read_json(place.sources) if place.sources.is_file() else {}
    changed = [path for path, mark in sources.items() if pins.changed(Path(path), mark)]
    try:
        if not changed and not _is(plan, planning.make(Path(plan["params"]))):
            said = f"{place.plan}: not what {plan['params']} gives; delete it and run `{stage.command(plan)}`"
            return Verdict(said, False)
        for cell in results.cells(plan):
            results.files(cell).check()
        made = stage.contents(plan)
    except UserError as error:
        return Verdict(f"{place.path}: {error}", False)
    if wrong := stage.differing(made):
        listed = ", ".join(map(str, wrong))
        advice = f"delete what is there of them and run `{stage.command(plan)}`"
        return Verdict(f"{place.path}: not what the runs of {plan['params']} give: {listed}; {advice}", False)
    more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
    since = f"; {changed[0]}{more} changed since they were made" if changed else ""
    return Verdict(f"{place.path}: {len(made)} files are what the runs of {plan['params']} give{since}", True)


def _is(plan: Plan, made: Plan) -> bool:
    """Whether a plan is this one, as it would be written."""
    return artifacts.json_bytes(plan) == artifacts.json_bytes(planning.lasting(made))
