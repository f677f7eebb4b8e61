"""The result table as CSV, Markdown and HTML, and one number per method for `dvc exp show`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping
from html import escape
from typing import Any

import pandas as pd

from fedpipe.core.storage import layout
from fedpipe.planning.plan import Plan
from fedpipe.report import results, statistics, table_notes, words
from fedpipe.report.data import StudyData
from fedpipe.report.ranks import build_rank_section
from fedpipe.report.table_parts import TextTable, escape_html
from fedpipe.report.tuning import build_search_section

PAGE_CSS = (  #: style of the page
    "body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;color:#222}p{max-width:60rem}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .8rem;text-align:left;white-space:nowrap}"
    "tr{border-bottom:1px solid #ddd}th{border-bottom:2px solid #444}.number{text-align:right}"
)
FORMULAS = tuple("=+-@\t\r＝＋－＠")  #: characters that begin a formula in a spreadsheet
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"  #: numbers, which are never formulas
SELECTION_PHRASES = {"test": "test samples", "validation": "clients' validation samples"}


def build_dvc_metrics(data: StudyData) -> dict[str, Any]:
    """Build one number per method for `dvc exp show`: the mean of the first metric by the first protocol, in its unit.

    A grid adds a level, such as ``{"fedavg": {"alpha=0.1": 71.25}}``. A method has no number if it has no such
    model, or if the mean is infinite.
    """
    numbers: dict[str, Any] = {}
    plan, rows = data.plan, data.reported_rows
    rows = rows[(rows["metric"] == plan.metrics[0]) & (rows["protocol"] == plan.protocols[0])]
    for cell in rows[rows["mean"].abs() < math.inf].to_dict("records"):
        point = results.describe_grid_point({name: cell[name] for name in plan.grid})
        target, name = (numbers.setdefault(cell["algorithm"], {}), point) if point else (numbers, cell["algorithm"])
        target[name] = round(cell["mean"], 2)
    return numbers


def render_markdown_table(data: StudyData) -> str:
    """Render the table as Markdown: caption, one row per algorithm and grid point, and notes."""
    text_parts = [
        part.to_markdown() if isinstance(part, TextTable) else escape_html(part) for part in build_report_sections(data)
    ]
    return "\n\n".join(text_parts) + "\n"


def render_html_page(data: StudyData) -> str:
    """Render the table as a self-contained page for Snakemake's report."""
    html_parts = [
        part.to_html() if isinstance(part, TextTable) else f"<p>{escape(part)}</p>"
        for part in build_report_sections(data)
    ]
    preset = "" if data.plan.preset == layout.FULL_PRESET else f", preset {data.plan.preset}"
    title = escape(f"Results of {data.plan.params}{preset}")
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>'
    return "\n".join([head, f"<style>{PAGE_CSS}</style>", *html_parts, "</html>\n"])


def build_report_sections(data: StudyData) -> list[str | TextTable]:
    """Build paragraphs and tables of the report, in order."""
    plan, rows = data.plan, []
    seeds = table_notes.format_seed_counts(plan)
    run_counts = results.count_runs_by_row(plan)
    cells_by_row: dict[tuple[Hashable, ...], list[dict[Hashable, Any]]] = {}
    for cell in data.reported_rows.to_dict("records"):  # a frame per row takes ten times as long
        cells_by_row.setdefault(tuple(cell[name] for name in plan.row_key_columns), []).append(cell)
    for key, cells in cells_by_row.items():
        if key in data.table_row_keys:
            labels = results.format_row_labels(plan, key) | seeds.get(key, {})
            metrics = [words.format_metric_label(str(cell["protocol"]), cell["metric"]) for cell in cells]
            score_texts = (_format_score_and_seeds(cell, run_counts[key]) for cell in cells)
            scores = dict(zip(metrics, score_texts, strict=True))
            traffic = {f"bytes {way}": words.format_bytes(cells[0][f"bytes_{way}"]) for way in ("down", "up")}
            rows.append(labels | _format_reported_scores(plan, cells) | scores | traffic)
    return [
        build_table_caption(plan),
        TextTable(pd.DataFrame(rows), len(plan.row_key_columns)),
        *build_search_section(plan),
        *results.describe_method_overrides(plan),
        *table_notes.describe_best_values_at_grid_edges(data),
        words.explain_metrics(map(str, data.reported_rows["protocol"]), plan.metrics),
        *_build_statistics_section(data),
        *build_rank_section(data),
        *table_notes.describe_omitted_updates(data),
        *(f"Warning: {warning}" for warning in plan.warnings),
        *table_notes.build_heterogeneity_section(data),
        *table_notes.describe_environments(data),
        *data.shared_code_notes,
    ]


def build_table_caption(plan: Plan) -> str:
    """Build the caption: reported round and average, seeds, rounds, data set and partition."""
    report = plan.report
    extra_sentences = (
        f"Column `{words.get_reported_column_header(plan.metrics[0])}`: "
        f"{words.format_metric_label(plan.protocols[0], plan.metrics[0])}, or the metric in parentheses. "
        if plan.method_protocols
        else ""
    )
    if report.best_over:
        extra_sentences += (
            f"Each row uses its best value of {' and '.join(report.best_over)}, selected on the "
            f"{SELECTION_PHRASES[report.best_on]}. "
        )
    return (
        f"{table_notes.describe_reported_numbers(plan)} Bytes are per participant and round. "
        f"{extra_sentences}{table_notes.explain_missing_values(plan)} {table_notes.describe_data_and_partitions(plan)}"
    )


def escape_spreadsheet_formula(text: str) -> str:
    """Add an apostrophe to text of a CSV cell that a spreadsheet would interpret as a formula.

    Examples
    --------
    >>> [escape_spreadsheet_formula(text) for text in ("=1+2", "-x", "-0.5", "fedavg")]
    ["'=1+2", "'-x", '-0.5', 'fedavg']
    """
    return f"'{text}" if text.startswith(FORMULAS) and not re.fullmatch(NUMBER, text) else text


def encode_table_csv(frame: pd.DataFrame, format_value: Callable[[str], str] = escape_spreadsheet_formula) -> bytes:
    """Encode a frame as CSV, with the shortest exact floats."""
    texts = {
        str(name): column.map(
            {value: format_value(value) if isinstance(value, str) else value for value in column.unique()}
        )
        for name, column in frame.select_dtypes(exclude="number").items()
    }
    return frame.assign(**texts).rename(columns=format_value).to_csv(index=False, lineterminator="\n").encode()


def format_score(cell: Mapping[Hashable, Any]) -> str:
    """Format mean and deviation of a row, or a dash. An infinite NLL has no deviation."""
    return words.format_mean(cell["mean"], cell["std"]) if cell["seeds"] else words.DASH


def _format_score_and_seeds(cell: Mapping[Hashable, Any], runs: int) -> str:
    """Format a score, with the number of seeds if it is not defined for all of them. AUC needs two classes."""
    text = format_score(cell)
    return f"{text.rstrip()} ({cell['seeds']} of {runs} seeds)" if 0 < cell["seeds"] < runs else text


def _format_reported_scores(plan: Plan, cells: list[dict[Hashable, Any]]) -> dict[str, str]:
    """Format the score by the method's protocol as a column. Empty if all methods have the study's first protocol."""
    if not plan.method_protocols:
        return {}
    algorithm = cells[0]["algorithm"]
    protocol = plan.get_method_protocol(algorithm)
    (cell,) = (cell for cell in cells if (cell["protocol"], cell["metric"]) == (protocol, plan.metrics[0]))
    metric = f" ({words.format_metric_label(protocol, plan.metrics[0])})" if algorithm in plan.method_protocols else ""
    return {words.get_reported_column_header(plan.metrics[0]): f"{format_score(cell)}{metric}"}


def _build_statistics_section(data: StudyData) -> list[str | TextTable]:
    """Build the statistics of `report.statistics`, with one row per row of the table."""
    plan, report = data.plan, data.plan.report
    if not report.statistics:
        return []
    key_columns = [*plan.row_key_columns, "protocol", "statistic"]
    statistics_by_key = data.statistics.set_index(key_columns, drop=False).to_dict("index")
    target_text = f"{100 * report.target:g} %" if report.target is not None else ""
    column_heads = {
        "client_std": "std of clients",
        "worst_tenth": "worst tenth",
        "lowest": "lowest client",
        "macro_f1": "macro F1",
        "balanced_accuracy": "balanced accuracy",
        "rounds_to_target": f"rounds to {target_text}",
        "bytes_to_target": f"bytes to {target_text}",
        "difference": f"− {plan.get_method_title(str(report.baseline))}",
    }
    rows = []
    for key in data.table_row_keys:
        protocol = plan.get_method_protocol(str(key[0]))
        metric = {"metric": words.format_metric_label(protocol)} if plan.method_protocols else {}
        cells = {
            column_heads[name]: _format_statistic_cell(plan, statistics_by_key.get((*key, protocol, name)))
            for name in report.statistics
        }
        rows.append(results.format_row_labels(plan, key) | metric | cells)
    statistics_table = pd.DataFrame(rows)
    return [
        _describe_statistics(plan, target_text),
        TextTable(statistics_table, statistics_table.shape[1] - len(report.statistics)),
    ]


def _describe_statistics(plan: Plan, target_text: str) -> str:
    """Describe the statistics of `report.statistics`, one sentence each."""
    report = plan.report
    metric_text = "the metric of each row" if plan.method_protocols else words.format_metric_label(plan.protocols[0])
    sentences = [f"Statistics of: {metric_text}."]
    if len(plan.seeds) > 1:
        sentences.append("Mean ± standard deviation over seeds.")
    if {*statistics.FAIRNESS_COLUMNS} & {*report.statistics}:
        sentences.append(
            "Statistics of the clients' accuracies (%) are from the last evaluated round. Worst tenth is the mean "
            "accuracy of the clients in the lowest tenth."
        )
    if {*statistics.CLASS_COLUMNS} & {*report.statistics}:
        sentences.append(
            "Macro F1 and balanced accuracy (%) are over all clients' test samples, in the last evaluated round."
        )
    if {*statistics.TARGET_COLUMNS} & {*report.statistics}:
        sentences.append(
            f"A run reaches the target when it classifies {target_text} of all test samples correctly. Bytes to the "
            "target are the sum over all clients. A dash means that no seed reached it."
        )
    if "difference" in report.statistics:
        sentences.append(
            f"Differences in {words.METRICS[plan.metrics[0]].name} to {_describe_baseline(plan)} are "
            f"{statistics.PAIRED_EXPLANATION} The baseline has a dash."
        )
    return " ".join(sentences)


def describe_stars(plan: Plan) -> str:
    """Describe the stars of the LaTeX table."""
    return (
        f"A star marks {words.METRICS[plan.metrics[0]].name} that differs from {_describe_baseline(plan)}: the "
        f"{statistics.CONFIDENCE:.0%} confidence interval of the difference, paired by seed (Student's t), excludes 0."
    )


def _describe_baseline(plan: Plan) -> str:
    report, baseline = plan.report, plan.get_method_title(str(plan.report.baseline))
    point_text = " at the same grid point" if {*plan.grid} - {*report.best_over} else ""
    return (f"the best {baseline}" if report.best_over else baseline) + point_text


def _format_statistic_cell(plan: Plan, row: dict[Hashable, Any] | None) -> str:
    if row is None or not row["seeds"]:
        return words.DASH
    name, mean, std, seeds = (row[key] for key in ("statistic", "mean", "std", "seeds"))
    if name == "difference":
        text = statistics.PairedDifference(mean, std, row["half_width"], seeds).formatted_difference
    else:
        formats = {"bytes_to_target": words.format_bytes, "rounds_to_target": "{:.1f}".format}
        text = words.format_mean(mean, std, formats.get(name, words.format_number))
    can_lack_seeds = name in statistics.TARGET_COLUMNS or (name == "difference" and seeds > 1)
    is_lacking_seeds = can_lack_seeds and seeds < len(plan.seeds)
    return f"{text.rstrip()} ({seeds} of {len(plan.seeds)} seeds)" if is_lacking_seeds else text
