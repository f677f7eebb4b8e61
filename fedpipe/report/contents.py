"""The report stage: from the files of all runs to tables and figures.

All reported numbers are a pure function of the plan and its runs' files (:func:`build_report_files`), so that each file
can be checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedpipe.core.errors import ArtifactError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage.files import encode_json, write_bytes
from fedpipe.planning import freshness
from fedpipe.planning.plan import Cell, Plan

if TYPE_CHECKING:  # commands without numbers import no pandas
    from fedpipe.report.data import StudyData

FileContents = dict[Path, bytes]  #: content by path
TableFormat = Literal["markdown", "latex", "csv"]  #: formats of `fedpipe show`
COMMENT_PREFIXES: dict[TableFormat, str] = {"markdown": "", "latex": "% ", "csv": "# "}  #: of lines outside the table


def build_report_files(data: StudyData) -> FileContents:
    """Build all files with numbers: tables, metrics.json, plots' numbers and keys."""
    return build_table_files(data) | build_plot_data_files(data) | build_run_key_files(data.plan)


def build_table_files(data: StudyData) -> FileContents:
    """Build the tables (``results`` in three formats, statistics, times), ``metrics.json`` and ``curves.csv``."""
    return {path: build() for path, build in _get_table_builders(data).items()}


def build_plot_data_files(data: StudyData) -> FileContents:
    """Build the numbers of DVC's plots that are too large for git: clients, matrices, partitions."""
    from fedpipe.report import plots

    frames = {
        "clients": plots.build_client_accuracies(data),
        "matrices": plots.build_matrix_entries(data),
        "partition": plots.build_partition_counts(data),
    }
    return {
        data.plan.study_files.get_plot_data_path(name): plots.encode_plot_csv(frame) for name, frame in frames.items()
    }


def build_run_key_files(plan: Plan) -> FileContents:
    """Build the keys of each algorithm's runs with their rounds: the shared runs that a commit needs."""
    key_files, runs = {}, plan.add_search_results(has_draws=True).runs
    for label in plan.algorithms:
        rounds = {run.key: run.rounds for run in runs if run.algorithm == label}
        key_files[plan.study_files.get_run_keys_path(label)] = encode_json({"keys": rounds})
    return key_files


def write_report_files(contents_by_path: Mapping[Path, bytes]) -> None:
    """Write the files of :func:`build_report_files`."""
    for path, data in contents_by_path.items():
        write_bytes(path, data)


def find_outdated_files(contents_by_path: Mapping[Path, bytes]) -> list[Path]:
    """Find files that are missing or differ from :func:`build_report_files`."""
    return [path for path, data in contents_by_path.items() if not path.is_file() or path.read_bytes() != data]


def render_results(data: StudyData, output_format: TableFormat = "markdown") -> str:
    """Render the table and the paths of the figures, or the wide table for papers.

    Raises
    ------
    ArtifactError
        There is no table yet, or it differs from the runs.
    """
    plan = data.plan
    plan.require_finished_search()
    table = plan.study_files.get_result_table_path("md")
    if table.is_file() and len(_get_complete_cells(plan)) < len(plan.cells):
        raise ArtifactError(f"{table} is outdated, because runs are missing. Type `{plan.run_command}` to run them.")
    require_current_tables(data, table.name)
    if output_format != "markdown":
        from fedpipe.report import wide

        return wide.TABLE_RENDERERS[output_format](data, None).rstrip("\n")
    figures = [f"\n  {path}" for path in plan.figure_files if path.suffix == ".svg" and path.is_file()]
    figure_list = "".join(["\nFigures (also as PDF and PNG):", *figures]) if figures else ""
    return table.read_text(encoding="utf-8") + figure_list


def compute_plans_fingerprint(plans: Iterable[Plan]) -> str:
    """Compute the hash of several complete plans, for pages, which also describe diagnostics and code."""
    return compute_json_digest([plan.to_dict() for plan in plans])


def require_unchanged_plan(plan: Plan, expected_fingerprint: str | None) -> None:
    """Require that the plan of tables and figures has not changed since this Snakemake began."""
    if expected_fingerprint is not None:
        _require_equal_digests(plan, plan.report_fingerprint, expected_fingerprint)


def require_unchanged_search(plan: Plan, expected_search: str | None) -> None:
    """Require that section `tune` has not changed since this Snakemake began."""
    if expected_search is not None:
        _require_equal_digests(plan, plan.search_digest, expected_search)


def _require_equal_digests(plan: Plan, digest: str, expected_digest: str) -> None:
    if digest != expected_digest:
        raise ArtifactError(
            f"{plan.study_files.plan} has changed since this Snakemake began, because {plan.params} was edited. Type "
            f"`{plan.run_command}` again."
        )


def get_staleness_warning(plan: Plan) -> str | None:
    """Warning if the study's file or code now gives other tables. None otherwise."""
    if freshness.compare_plan_with_files(plan, Plan.select_reported_fields).state != "stale":
        return None  # also if it is unknown, because a clone lacks data for planning
    return f"{plan.params} or code has changed since these results were made. Type `{plan.run_command}` to update them."


def require_current_tables(data: StudyData, *names: str) -> None:
    """Compare tables of a study, such as ``results.md``, with its runs.

    Raises
    ------
    ArtifactError
        A table is missing or differs.
    """
    plan, builders = data.plan, _get_table_builders(data)
    for path in (plan.study_files.tables_folder / name for name in names):
        if not path.is_file():
            raise ArtifactError(f"{path} is missing. Type `{plan.run_command}` to make it.")
        if path.read_bytes() != builders[path]():
            raise ArtifactError(
                f"{path} does not match the runs of {plan.params}. Delete it, and type `{plan.run_command}` to make it "
                "again."
            )


def render_partial_results(plan: Plan, output_format: TableFormat = "markdown") -> str:
    """Render the marked table of complete runs and the failures, if runs are missing. Otherwise empty.

    In other formats than Markdown, everything except the table is in comments.
    """
    from fedpipe.report import status, tables, wide
    from fedpipe.report.data import StudyData

    complete_cells = _get_complete_cells(plan)
    if len(complete_cells) == len(plan.cells) and not plan.is_searching:
        return ""
    runs, failures = status.load_progress_and_failures(plan.add_search_results(has_draws=True))
    prefix = COMMENT_PREFIXES[output_format]
    failure_lines = [f"{prefix}{line}" for failure in failures for line in failure.format_line().splitlines()]
    if not complete_cells:
        return "\n".join(failure_lines)
    complete_runs = tuple(dict.fromkeys(map(plan.get_run, complete_cells)))
    partial_data = StudyData(dataclasses.replace(plan, cells=complete_cells, runs=complete_runs))
    head = f"{prefix}PARTIAL (this table is not stored): {status.summarize_progress(runs)[0]}"
    if output_format == "markdown":
        return "\n".join([head, "", tables.render_markdown_table(partial_data), *failure_lines])
    table = wide.TABLE_RENDERERS[output_format](partial_data, plan).rstrip("\n")
    return "\n".join([head, *failure_lines, table])


def _get_complete_cells(plan: Plan) -> tuple[Cell, ...]:
    return tuple(cell for cell in plan.cells if cell.merged_files.marker.is_file())


def _get_table_builders(data: StudyData) -> dict[Path, Callable[[], bytes]]:
    """Get the function that builds each file of :func:`build_table_files`."""
    from fedpipe.report import plots, ranks, tables

    files = data.plan.study_files
    rank_builders = {files.ranks_table: lambda: tables.encode_table_csv(ranks.build_method_pairs_table(data))}
    return (rank_builders if data.plan.report.rank_test else {}) | {
        files.get_result_table_path("csv"): lambda: tables.encode_table_csv(data.score_table),
        files.get_result_table_path("html"): lambda: tables.render_html_page(data).encode(),
        files.get_result_table_path("md"): lambda: tables.render_markdown_table(data).encode(),
        files.statistics_table: lambda: tables.encode_table_csv(data.statistics),
        files.times_table: lambda: tables.encode_table_csv(data.mean_run_times),
        files.metrics: lambda: encode_json(tables.build_dvc_metrics(data)),
        files.get_plot_data_path("curves"): lambda: plots.encode_plot_csv(plots.build_learning_curves(data)),
    }
