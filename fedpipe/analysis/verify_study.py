"""Verifies that the tables, metrics.json, plot data and keys of a study follow from its runs."""

from __future__ import annotations

from fedpipe.analysis.verify import VerificationResult
from fedpipe.core.errors import UserError
from fedpipe.core.storage import files
from fedpipe.planning import freshness
from fedpipe.planning.plan import Plan
from fedpipe.report import contents, results, tuning
from fedpipe.report.data import StudyData


def verify_study(plan: Plan) -> VerificationResult:
    """Recompute a study's plan and all its numbers and compare them. Check that its diagnostics are complete."""
    study_files = plan.study_files
    current = freshness.compare_with_new_plan(plan)
    changed_files = current.changed_files
    try:
        if current.error and not changed_files:
            raise current.error
        if current.state != "fresh" and not changed_files:
            command = plan.run_command
            message = f"{study_files.plan}: differs from the plan of {plan.params}. Delete it and type `{command}`."
            return VerificationResult(message, False)
        for cell in results.sort_cells(plan):
            cell.merged_files.check_hashes()
        for diagnostic in plan.diagnostics:
            files.read_parquet(diagnostic.files.table, files.read_recorded_sha256(diagnostic.files.table))
        plan.require_finished_search()
        report_files = contents.build_report_files(StudyData(plan)) | tuning.build_rung_files(plan)
    except UserError as error:
        return VerificationResult(f"{study_files.path}: {error}", False)
    if outdated_files := contents.find_outdated_files(report_files):
        outdated_list = ", ".join(map(str, outdated_files))
        advice = f"Delete these files and type `{plan.run_command}`."
        return VerificationResult(
            f"{study_files.path}: differs from the runs of {plan.params}: {outdated_list}. {advice}", False
        )
    more_files = f" (and {len(changed_files) - 1} more)" if len(changed_files) > 1 else ""
    note = f"{changed_files[0]}{more_files} has changed since the results were computed" if changed_files else ""
    message = f"{study_files.path}: {len(report_files)} files agree with the runs of {plan.params}"
    return VerificationResult(". ".join(filter(None, [message, note])), True, "file", len(report_files), note)
