"""The result table: tidy for programs, wide for people, and one number a method for `dvc exp show`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from html import escape
from statistics import mean
from typing import Any, NamedTuple

import pandas as pd

from fedpipe import artifacts, changes
from fedpipe.config import Data, to_number
from fedpipe.data.heterogeneity import HeterogeneitySummary
from fedpipe.planned import Plan
from fedpipe.report import results, statistics
from fedpipe.report.results import AVERAGES, EPOCH_COLUMN, REPORTED_ROUNDS, TIMED_PHASES
from fedpipe.report.words import format_bytes

PAGE_CSS = (  #: of the page
    "body{font:15px/1.5 system-ui,sans-serif;margin:1.5rem;color:#222}p{max-width:60rem}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .8rem;text-align:left;white-space:nowrap}"
    "tr{border-bottom:1px solid #ddd}th{border-bottom:2px solid #444}.number{text-align:right}"
)
FORMULAS = tuple("=+-@\t\r＝＋－＠")  #: what a spreadsheet takes for the beginning of one
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"  #: what it reads as a number in any case
DASH = "–"  #: stands for a protocol that an algorithm does not have

ROUND_PHRASES = {
    "last": "in the last round measured",
    "best": "in each run's best round, which was chosen on the test samples themselves",
    "mean-last": "as the mean of the last {last_k} rounds measured",
}
SELECTION_PHRASES = {"test": "test samples themselves", "validation": "clients' validation samples"}
AVERAGE_PHRASES = {"sample": "over all test samples", "client": "as the mean of the clients' accuracies"}


def build_result_table(plan: Plan) -> pd.DataFrame:
    """Accuracy of every algorithm and grid point by every protocol, average and reported round.

    Returns
    -------
    pandas.DataFrame
        ``algorithm``, a column a name of the grid, ``protocol``, ``average``, ``round``; ``mean`` and ``std`` over
        ``seeds`` of the accuracy in percent; ``bytes_down`` and ``bytes_up`` of a participant in a round, mean over
        rounds and seeds; ``left_out``, updates that were not finite, and ``diverged``, runs with a round in which all
        failed. A protocol that an algorithm does not have has no mean and 0 seeds. What methods have measured beside
        the study's protocols is here, too, though people's table does not show it. There are no times, so that the
        same runs give the same bytes.
    """
    frame = results.load_accuracies(plan)
    cell_columns = [*_get_row_columns(plan), "protocol", "average"]
    last_k = plan.report.last_k
    seed_means = pd.concat(
        results.average_over_seeds(results.compute_reported_accuracies(frame, round, last_k), cell_columns).assign(
            round=round
        )
        for round in REPORTED_ROUNDS
    )
    cells = _list_rows(plan)
    for name, values in (
        ("protocol", results.list_protocols(plan, frame)),
        ("average", AVERAGES),
        ("round", REPORTED_ROUNDS),
    ):
        cells = cells.merge(pd.DataFrame({name: list(values)}), how="cross")
    bytes_sent = (
        results.load_mean_traffic(plan)
        .groupby(_get_row_columns(plan), sort=False)[["bytes_down", "bytes_up"]]
        .mean()
        .reset_index()
    )
    left_out_updates = results.count_left_out_updates(plan).assign(diverged=lambda rows: rows["diverged"] > 0)
    failure_counts = (
        left_out_updates.groupby(_get_row_columns(plan), sort=False)[["left_out", "diverged"]].sum().reset_index()
    )
    merged_table = cells.merge(seed_means, how="left", on=[*cell_columns, "round"]).merge(
        bytes_sent, how="left", on=_get_row_columns(plan)
    )
    merged_table = merged_table.merge(failure_counts, how="left", on=_get_row_columns(plan))
    return merged_table.assign(seeds=merged_table["seeds"].fillna(0).astype(int))


def average_times(plan: Plan) -> pd.DataFrame:
    """Seconds of a run by algorithm and grid point, mean over seeds: the columns of `results.times`."""
    return (
        results.load_times(plan)
        .groupby(_get_row_columns(plan), sort=False)[[*TIMED_PHASES, EPOCH_COLUMN]]
        .mean()
        .reset_index()
    )


def build_dvc_metrics(plan: Plan, table: pd.DataFrame) -> dict[str, Any]:
    """One number a method, for `dvc exp show`: the mean by the study's first protocol, in percent, as the table has it.

    A grid adds a level, as ``{"fedavg": {"alpha=0.1": 71.25}}``. A method without such a model has no number.
    """
    numbers: dict[str, Any] = {}
    reported_rows = select_reported_rows(plan, table)
    for cell in reported_rows[(reported_rows["protocol"] == plan.protocols[0]) & (reported_rows["seeds"] > 0)].to_dict(
        "records"
    ):
        point = results.describe_point({name: cell[name] for name in plan.grid})
        target, name = (numbers.setdefault(cell["algorithm"], {}), point) if point else (numbers, cell["algorithm"])
        target[name] = round(cell["mean"], 2)
    return numbers


class TextTable(NamedTuple):
    """A table as people see it: cells of text, of which the first columns are aligned to the left."""

    frame: pd.DataFrame
    left_aligned_columns: int

    @property
    def markdown(self) -> str:
        """As Markdown."""
        sides = ["left" if column < self.left_aligned_columns else "right" for column in range(self.frame.shape[1])]
        shown = self.frame.map(_unmarked).rename(columns=_unmarked)
        return str(shown.to_markdown(index=False, disable_numparse=True, colalign=sides))

    @property
    def html(self) -> str:
        """As HTML."""
        head = "".join(
            f"<th{self._get_alignment_attribute(column_index)}>{escape(str(name))}"
            for column_index, name in enumerate(self.frame.columns)
        )
        rows = (
            "".join(
                f"<td{self._get_alignment_attribute(column_index)}>{escape(str(cell))}"
                for column_index, cell in enumerate(row)
            )
            for row in self.frame.itertuples(index=False)
        )
        return f"<table>\n<tr>{head}\n" + "\n".join(f"<tr>{row}" for row in rows) + "\n</table>"

    def _get_alignment_attribute(self, column_index: int) -> str:
        return "" if column_index < self.left_aligned_columns else ' class="number"'


def render_markdown(plan: Plan, table: pd.DataFrame) -> str:
    """The table for people: what it shows, a row an algorithm and grid point, and what it was made by."""
    told = [
        report_part.markdown if isinstance(report_part, TextTable) else _unmarked(report_part)
        for report_part in build_report_parts(plan, table)
    ]
    return "\n\n".join(told) + "\n"


def _unmarked(text: Any) -> str:
    """Text in which Markdown finds no markup of HTML."""
    return escape(str(text), quote=False)


def render_html(plan: Plan, table: pd.DataFrame) -> str:
    """The same as a page that needs nothing else, for Snakemake's report."""
    html_parts = [
        report_part.html if isinstance(report_part, TextTable) else f"<p>{escape(report_part)}</p>"
        for report_part in build_report_parts(plan, table)
    ]
    title = escape(
        f"Results of {plan.params}" + ("" if plan.scale == artifacts.FULL_SCALE else f", scale {plan.scale}")
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta '
        f'charset="utf-8">\n<title>{title}</title>\n<style>{PAGE_CSS}</style>\n' + "\n".join(html_parts) + "\n</html>\n"
    )


def build_report_parts(plan: Plan, table: pd.DataFrame) -> list[str | TextTable]:
    """Paragraphs and tables that people read, in order."""
    reported_rows, seeds, table_rows = (
        select_reported_rows(plan, table),
        _describe_missing_seeds(plan),
        select_table_rows(plan, table),
    )
    rows = []
    for key, cells in reported_rows.groupby(_get_row_columns(plan), sort=False):
        if key not in table_rows:
            continue
        algorithm, *point = key
        rows.append(
            {
                "algorithm": plan.title(str(algorithm)),
                **dict(zip(results.shorten_names(plan.grid), (value or DASH for value in point), strict=True)),
                **seeds.get(key, {}),
                **_format_shown_column(plan, cells),
                **{cell["protocol"]: format_accuracy(cell) for cell in cells.to_dict("records")},
                "bytes down": format_bytes(cells["bytes_down"].iloc[0]),
                "bytes up": format_bytes(cells["bytes_up"].iloc[0]),
            }
        )
    result_table = TextTable(pd.DataFrame(rows), len(_get_row_columns(plan)))
    warnings = [f"Warning: {warning}" for warning in plan.warnings]
    notes = [
        *describe_failures(plan),
        *warnings,
        *_build_heterogeneity_parts(plan),
        *describe_environments(plan),
        *changes.describe_runs_from_other_code(plan),
    ]
    alone = results.own_settings(plan)
    return [
        build_caption(plan),
        result_table,
        *alone,
        *warn_about_grid_edges(plan, table),
        *_build_statistics_parts(plan, table_rows),
        *notes,
    ]


def build_caption(plan: Plan) -> str:
    """What the table shows: the reported round and average, seeds, rounds, data set and partition."""
    report = plan.report
    extra_sentences = (
        f"Column `shown`: by {plan.protocols[0]}, or by the protocol that stands there. " if plan.shown else ""
    )
    if report.best_over:
        extra_sentences += (
            f"Of {' and '.join(report.best_over)}, each row has the value that is best for it, which was chosen on the "
            f"{SELECTION_PHRASES[report.best_on]}. "
        )
    if sample_parts := [
        name for name in ("train", "validation") if any(protocol.endswith(f"-on-{name}") for protocol in plan.protocols)
    ]:
        extra_sentences += f"Columns on-{' and on-'.join(sample_parts)} are of those samples of the clients. "
    return (
        f"{describe_measurement(plan)} Bytes are those of one participant in one round. "
        f"{extra_sentences}A dash: the method has no such model. {describe_data(plan)}"
    )


def describe_measurement(plan: Plan) -> str:
    """What a number of the table is: the scale, the reported round and average, and over which seeds."""
    report, seeds = plan.report, len(plan.seeds)
    seeds_text = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    round_phrase = ROUND_PHRASES[report.round].format(last_k=report.last_k)
    rounds_text = " or ".join(str(rounds) for rounds in sorted({cell.rounds for cell in plan.cells}))
    scale_text = "" if plan.scale == artifacts.FULL_SCALE else f"Scale {plan.scale}. "
    return (
        f"{scale_text}Test accuracy (%) {round_phrase} ({rounds_text} rounds), {AVERAGE_PHRASES[report.average]}; "
        f"{seeds_text}."
    )


def describe_data(plan: Plan) -> str:
    """The data sets and partitions of the table."""
    return f"Data: {'; '.join(dict.fromkeys(describe_partitions(plan).values()))}."


def describe_partitions(plan: Plan) -> dict[str, str]:
    """The setup of each partition by its key; data sets of the same words are told apart by their SHA-256."""
    descriptions = {
        key: (describe_partition(partition_settings), partition_settings["dataset"].get("sha256", ""))
        for key, partition_settings in get_partitions(plan).items()
    }
    distinct_texts = [text for text, _ in dict.fromkeys(descriptions.values())]
    return {
        key: text if distinct_texts.count(text) == 1 else f"{text}, data {sha256[:12]}…"
        for key, (text, sha256) in descriptions.items()
    }


def describe_partition(partition: dict[str, Any]) -> str:
    """Data set, clients and partition in words; ``partition`` holds the settings of ``partition.yaml``."""
    dataset, scheme = partition["dataset"], partition["partition"]
    samples = [f"{dataset['subset']} samples"] if "subset" in dataset else []
    fields = {name: field.default for name, field in Data.model_fields.items()}
    described_keys = {"name", "subset", "split", "code", "sha256"}
    other_settings = [
        f"{name}={value}" for name, value in dataset.items() if name not in described_keys and value != fields.get(name)
    ]
    scheme_parameters = {name: f"{value[:12]}…" if name == "sha256" else value for name, value in scheme.items()}
    parameters = ", ".join(
        f"{name}={value}" for name, value in scheme_parameters.items() if name not in {"scheme", "code"}
    )
    scheme_text = f"{scheme['scheme']} ({parameters})" if parameters else scheme["scheme"]
    split = f"{dataset['split']} split" if "split" in dataset else "split as the file says"
    data_text = ", ".join([*samples, split, *other_settings])
    return f"{dataset['name']} ({data_text}), {partition['clients']} clients, partition {scheme_text}"


def describe_partition_with_seed(partition: dict[str, Any], description: str = "") -> str:
    """The same, or what is ``description`` in its place, with the seed that it was dealt with, if with any."""
    seed = f"seed {partition['seed']}" if "seed" in partition else "all seeds"
    return f"{description or describe_partition(partition)}, {seed}"


def plain(text: str) -> str:
    """Text for a cell of a CSV file: with an apostrophe before it if a spreadsheet would take it for a formula.

    Examples
    --------
    >>> plain("=1+2"), plain("-x"), plain("-0.5"), plain("fedavg")
    ("'=1+2", "'-x", '-0.5', 'fedavg')
    """
    return f"'{text}" if text.startswith(FORMULAS) and not re.fullmatch(NUMBER, text) else text


def encode_csv(frame: pd.DataFrame, spell: Callable[[str], str] = plain) -> bytes:
    """A frame as CSV: floats in as few digits as give them back exactly, text as ``spell`` gives it."""
    texts = {
        str(name): column.map({value: spell(value) if isinstance(value, str) else value for value in column.unique()})
        for name, column in frame.select_dtypes(exclude="number").items()
    }
    return frame.assign(**texts).rename(columns=spell).to_csv(index=False, lineterminator="\n").encode()


def _get_row_columns(plan: Plan) -> list[str]:
    return ["algorithm", *plan.grid]


def _list_rows(plan: Plan) -> pd.DataFrame:
    """Algorithms and grid points, each once, in the order of the cells."""
    rows = [{"algorithm": cell.algorithm, **results.format_point(plan, cell)} for cell in results.sort_cells(plan)]
    return pd.DataFrame(rows).drop_duplicates(ignore_index=True)


def select_table_rows(plan: Plan, table: pd.DataFrame) -> list[tuple[Hashable, ...]]:
    """The rows that people's table shows, as algorithm and values of the grid: all, or only the best of some lists.

    See :func:`fedpipe.report.results.select_best_rows`, which chooses.
    """
    return results.select_best_rows(plan, select_reported_rows(plan, table))


def warn_about_grid_edges(plan: Plan, table: pd.DataFrame) -> list[str]:
    """A sentence for each list of numbers that `report.best_over` searches, where the best of a row lies at its end."""
    reported_rows, searched_names, sentences = select_reported_rows(plan, table), plan.report.best_over, []
    measured_keys = {
        key for key, cells in reported_rows.groupby(_get_row_columns(plan), sort=False) if cells["seeds"].any()
    }
    rows = [
        dict(zip(_get_row_columns(plan), map(str, key), strict=True))
        for key in select_table_rows(plan, table)
        if key in measured_keys
    ]
    for name, short_name in zip(plan.grid, results.shorten_names(plan.grid), strict=True):
        numbers = [value for value in plan.grid[name] if "." in name and type(to_number(value)) in (int, float)]
        if name not in searched_names or len(numbers) < max(2, len(plan.grid[name])):
            continue
        edge_findings = []
        for value in map(str, (min(numbers, key=float), max(numbers, key=float))):
            methods = []
            for algorithm in plan.algorithms:
                algorithm_rows = [row for row in rows if row["algorithm"] == algorithm]
                edge_rows = [row for row in algorithm_rows if row[name] == value]
                points = [
                    results.describe_point({key: "" if key in searched_names else row[key] for key in plan.grid})
                    for row in edge_rows
                ]
                title = plan.title(algorithm)
                methods += (
                    [title] if edge_rows and edge_rows == algorithm_rows else [f"{title} ({point})" for point in points]
                )
            if methods:
                edge_findings.append((", ".join(methods), value))
        if edge_findings:
            (first, value), *other_findings = edge_findings
            other_texts = "".join(f"; that of {methods} at {value}" for methods, value in other_findings)
            sentences.append(
                f"{short_name}: the best of {first} lies at the edge of the grid, {value}{other_texts}: a wider grid "
                "may be better."
            )
    return sentences


def _describe_missing_seeds(plan: Plan) -> dict[tuple[Hashable, ...], dict[str, str]]:
    """Where not all cells are there, a column by row that tells of how many seeds it is."""
    rows = [(cell.algorithm, *results.format_point(plan, cell).values()) for cell in plan.cells]
    seed_count = len(plan.seeds)
    if all(rows.count(row) == seed_count for row in rows):
        return {}
    return {row: {"seeds": f"{rows.count(row)} of {seed_count}"} for row in rows}


def get_partitions(plan: Plan) -> dict[str, Any]:
    """The settings of all partitions by key, in the order of the runs."""
    return {run.partition: plan.partitions[run.partition] for run in plan.runs}


def select_reported_rows(plan: Plan, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the round and average that people's table shows, by the protocols that a study can ask for."""
    report = plan.report
    return results.select_study_protocols(
        table[(table["round"] == report.round) & (table["average"] == report.average)]
    )


def format_accuracy(cell: Mapping[Hashable, Any]) -> str:
    """Mean and deviation of a row of the table as people read them, or a dash."""
    if not cell["seeds"]:
        return DASH
    return f"{cell['mean']:.2f}" + (f" ± {cell['std']:.2f}" if cell["seeds"] > 1 else "")


def _format_shown_column(plan: Plan, cells: pd.DataFrame) -> dict[str, str]:
    """The column `shown`, where some method is shown by a protocol of its own, which stands beside the row's number."""
    if not plan.shown:
        return {}
    algorithm = cells["algorithm"].iloc[0]
    protocol = plan.shown.get(algorithm, plan.protocols[0])
    (cell,) = cells[cells["protocol"] == protocol].to_dict("records")
    return {"shown": f"{format_accuracy(cell)} ({protocol})" if algorithm in plan.shown else format_accuracy(cell)}


def _build_statistics_parts(plan: Plan, table_rows: list[tuple[Hashable, ...]]) -> list[str | TextTable]:
    """The statistics that are asked for (`report.statistics`): what they are, and a row for each of these rows."""
    report, first_protocol = plan.report, plan.protocols[0]
    if not report.statistics:
        return []
    frame = statistics.build_statistics_table(plan)
    statistics_by_key = {
        (*[row[name] for name in _get_row_columns(plan)], row["protocol"], row["statistic"]): row
        for row in frame.to_dict("records")
    }
    target_text = f"{100 * report.target:g} %" if report.target is not None else ""
    column_heads = {
        "client_std": "std of clients",
        "worst_tenth": "worst tenth",
        "lowest": "lowest client",
        "macro_f1": "macro F1",
        "balanced_accuracy": "balanced accuracy",
        "rounds_to_target": f"rounds to {target_text}",
        "bytes_to_target": f"bytes to {target_text}",
        "difference": f"− {plan.title(str(report.baseline))}",
    }
    rows = []
    for key in table_rows:
        algorithm, *point = map(str, key)
        protocol = plan.shown.get(algorithm, first_protocol)
        rows.append(
            {
                "algorithm": plan.title(algorithm),
                **dict(zip(results.shorten_names(plan.grid), (value or DASH for value in point), strict=True)),
                **({"protocol": protocol} if plan.shown else {}),
                **{
                    column_heads[name]: _format_statistic(plan, statistics_by_key.get((*key, protocol, name)))
                    for name in report.statistics
                },
            }
        )
    statistics_table = pd.DataFrame(rows)
    protocol_text = "each method's own protocol" if plan.shown else first_protocol
    seeds = "; mean ± standard deviation over seeds" if len(plan.seeds) > 1 else ""
    sentences = [f"By {protocol_text}{seeds}."]
    if {*statistics.FAIRNESS_COLUMNS} & {*report.statistics}:
        sentences.append("Of the clients' accuracies (%), in the last round measured: worst tenth is its mean.")
    if {*statistics.CLASS_STATISTICS} & {*report.statistics}:
        sentences.append(
            "Macro F1 and balanced accuracy (%) are over all clients' test samples, in the last round measured."
        )
    if {*statistics.TARGET_COLUMNS} & {*report.statistics}:
        sentences.append(
            f"A target is reached where {target_text} of all test samples are told right; bytes are all clients'."
        )
    if "difference" in report.statistics:
        baseline = plan.title(str(report.baseline))
        baseline_text = f"the best of {baseline}" if report.best_over else f"{baseline}'s"
        point_text = " at the same point of the grid" if {*plan.grid} - {*report.best_over} else ""
        sentences.append(
            f"Differences of the accuracies above to {baseline_text}{point_text} are {statistics.PAIRED_EXPLANATION}"
        )
    return [" ".join(sentences), TextTable(statistics_table, statistics_table.shape[1] - len(report.statistics))]


def _format_statistic(plan: Plan, row: dict[Hashable, Any] | None) -> str:
    if row is None or not row["seeds"]:
        return DASH
    name, mean, std, seeds = (row[key] for key in ("statistic", "mean", "std", "seeds"))
    if name == "difference":
        return statistics.PairedDifference(mean, std, row["half_width"], seeds).text
    if name == "bytes_to_target":
        text = format_bytes(mean) + (f" ± {format_bytes(std)}" if seeds > 1 else "")
    else:
        digits = 1 if name == "rounds_to_target" else 2
        text = f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if seeds > 1 else "")
    has_missing_seeds = name in statistics.TARGET_COLUMNS and seeds < len(plan.seeds)
    return f"{text} ({seeds} of {len(plan.seeds)} seeds)" if has_missing_seeds else text


def describe_failures(plan: Plan) -> list[str]:
    """A sentence for each algorithm and grid point of which some update was not finite."""
    sentences = []
    for key, cells in results.count_left_out_updates(plan).groupby(_get_row_columns(plan), sort=False):
        algorithm, *values = map(str, key)
        name = results.describe_configuration(plan.title(algorithm), dict(zip(plan.grid, values, strict=True)))
        left_out_count, diverged_rounds = cells["left_out"].sum(), cells[cells["diverged"] > 0]["diverged"]
        if not left_out_count:
            continue
        updates = (
            "1 update was not finite and was"
            if left_out_count == 1
            else f"{left_out_count} updates were not finite and were"
        )
        sentence = f"{name}: {updates} left out"
        if len(diverged_rounds):
            runs = f"{len(cells)} run{'s' if len(cells) > 1 else ''}"
            sentence += f"; diverged (in round {diverged_rounds.min()} all failed) in {len(diverged_rounds)} of {runs}"
        sentences.append(f"{sentence}.")
    return sentences


def _build_heterogeneity_parts(plan: Plan) -> list[str | TextTable]:
    """How unlike the clients are: a row a data set and partition, mean over seeds."""
    overalls_by_data: dict[str, list[HeterogeneitySummary]] = {}
    for key, description in describe_partitions(plan).items():
        path = artifacts.heterogeneity_file(key)
        table = artifacts.read_parquet(path, artifacts.read_recorded_sha256(path, "assignment.json"))
        overalls_by_data.setdefault(description, []).append(HeterogeneitySummary.from_table(table))
    rows = []
    for name, overalls in overalls_by_data.items():
        entropy, js_distance, gini = (mean(values) for values in zip(*overalls, strict=True))
        rows.append([name, f"{entropy:.2f}", f"{js_distance:.3f}", f"{gini:.3f}"])
    head = ["data", "label entropy (bits)", "Jensen-Shannon distance", "Gini of sizes"]
    description = (
        "How unlike the clients are: label entropy and distance to the label distribution of all (mean over clients), "
        "inequality of sizes; mean over seeds."
    )
    return [description, TextTable(pd.DataFrame(rows, columns=head), 1)]


def describe_environments(plan: Plan) -> list[str]:
    """A sentence for each executor, device and set of versions that made runs."""
    lines = []
    for environment in results.load_environments(plan):
        versions = ", ".join(
            f"{name} {environment[name]}" for name in sorted(environment) if name not in {"executor", "device"}
        )
        lines.append(f"Made by the {environment['executor']} executor on {environment['device']}, with {versions}.")
    return lines
