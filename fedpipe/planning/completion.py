"""The mark that all tables and figures of a study's plan exist.

DVC's stage `execute` has this file as an output, so `dvc exp save` and `dvc commit -f` fail without it. They record the
files as they are, and would otherwise record outdated tables as current.
"""

from __future__ import annotations

from fedpipe.core.storage.files import remove_path, write_bytes
from fedpipe.planning.plan import Plan


def update_completion_mark(plan: Plan) -> None:
    """Remove the mark of another plan when a study is planned. Restore it if the study has its earlier plan again."""
    mark, earlier_mark = plan.study_files.completion_mark, plan.study_files.earlier_completion_mark
    if mark.is_file():
        if (earlier_content := mark.read_bytes()) != _encode_mark(plan):
            write_bytes(earlier_mark, earlier_content)
            remove_path(mark)
    elif earlier_mark.is_file() and earlier_mark.read_bytes() == _encode_mark(plan):
        write_bytes(mark, _encode_mark(plan))


def remove_completion_marks(plan: Plan) -> None:
    """Remove the marks before jobs begin, because they may change tables and figures."""
    remove_path(plan.study_files.completion_mark)
    remove_path(plan.study_files.earlier_completion_mark)


def write_completion_mark(plan: Plan) -> None:
    """Write the mark after all jobs, unless another command has changed the plan in the meantime."""
    if _encode_mark(Plan.read(plan.study_files.plan)) == _encode_mark(plan):
        write_bytes(plan.study_files.completion_mark, _encode_mark(plan))


def _encode_mark(plan: Plan) -> bytes:
    """The fingerprint of all settings of tables and figures, and the digest of the shared code, which tables note."""
    return f"{plan.report_fingerprint} {plan.shared}\n".encode()
