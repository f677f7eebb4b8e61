"""Whether what people read of a study is what its runs give: tables, metrics.json, numbers of plots, keys."""

from __future__ import annotations

from pathlib import Path

from fedpipe.analysis.verify import VerificationResult
from fedpipe.core.components import pinned_files
from fedpipe.core.errors import UserError
from fedpipe.core.storage import files
from fedpipe.planning import planner
from fedpipe.planning.plan import Plan
from fedpipe.report import contents, results
from fedpipe.report.data import StudyData


def verify_study(plan: Plan) -> VerificationResult:
    """Make a study's plan and, from its runs, all of its numbers again, and compare; see that its probes are whole."""
    study_files = plan.study_files
    sources = files.read_json(study_files.sources) if study_files.sources.is_file() else {}
    replanned_paths = {str(study_files.plan), planner.CUSTOM_MODULES_MARK}  # it is made again below
    source_marks = {path: mark for path, mark in sources.items() if path not in replanned_paths}
    changed_files = [path for path, mark in source_marks.items() if pinned_files.has_changed(Path(path), mark)]
    if changed_files and _is_still_current(
        plan
    ):  # marks are this folder's, and may be of what was tried here meanwhile
        changed_files = []
    try:
        if not changed_files and not _is_same_plan(plan, planner.make_plan(plan.params, plan.scale)):
            command = contents.get_run_command(plan)
            message = f"{study_files.plan}: not what {plan.params} gives; delete it and type `{command}`"
            return VerificationResult(message, False)
        for cell in results.sort_cells(plan):
            cell.merged_files.check()
        for probe in plan.probes:
            files.read_parquet(probe.files.table, files.read_recorded_sha256(probe.files.table))
        report_files = contents.build_report_files(StudyData(plan))
    except UserError as error:
        return VerificationResult(f"{study_files.path}: {error}", False)
    if outdated_files := contents.find_outdated_files(report_files):
        outdated_list = ", ".join(map(str, outdated_files))
        advice = f"delete what is there of them and type `{contents.get_run_command(plan)}`"
        return VerificationResult(
            f"{study_files.path}: not what the runs of {plan.params} give: {outdated_list}; {advice}", False
        )
    more_files = f" and {len(changed_files) - 1} more files" if len(changed_files) > 1 else ""
    change_note = f"; {changed_files[0]}{more_files} changed since they were made" if changed_files else ""
    message = f"{study_files.path}: {len(report_files)} files are what the runs of {plan.params} give{change_note}"
    return VerificationResult(message, True, "file", len(report_files))


def _is_still_current(plan: Plan) -> bool:
    """Whether a study's files give this plan as they are by now."""
    try:
        return _is_same_plan(plan, planner.make_plan(plan.params, plan.scale))
    except UserError:
        return False


def _is_same_plan(plan: Plan, other_plan: Plan) -> bool:
    """Whether a plan is this one, as it would be written."""
    return files.json_bytes(plan.to_dict()) == files.json_bytes(other_plan.to_dict())
