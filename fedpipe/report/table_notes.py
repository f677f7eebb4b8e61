"""Notes below a table: data and partitions, missing and failed runs, grid edges, code and machines."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import mean
from typing import Any

import pandas as pd

from fedpipe.core.storage import layout
from fedpipe.data.heterogeneity import HeterogeneitySummary
from fedpipe.planning.plan import Plan
from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.report.table_parts import AVERAGE_PHRASES, ROUND_PHRASES, TextTable, get_partition_settings_by_key
from fedpipe.report.words import METRICS, join_words
from fedpipe.settings.base import convert_to_number
from fedpipe.settings.dataset import Data

MAX_LISTED_COLUMNS = 4  #: maximum number of input columns in a description


def describe_reported_numbers(plan: Plan) -> str:
    """Describe the table's numbers: preset, reported round, average and seeds."""
    report, seeds = plan.report, len(plan.seeds)
    seeds_text = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    round_phrase = ROUND_PHRASES[report.round].format(last_k=report.last_k)
    heads = join_words([METRICS[metric].name_with_unit for metric in plan.metrics])
    average_phrase = AVERAGE_PHRASES[report.average]
    rounds_text = " or ".join(str(rounds) for rounds in sorted({cell.rounds for cell in plan.cells}))
    preset_text = "" if plan.preset == layout.FULL_PRESET else f"Preset {plan.preset}. "
    return (
        f"{preset_text}Test {heads} {round_phrase} ({rounds_text} rounds), {average_phrase}. {seeds_text}."
        f"{''.join(f' {sentence}' for sentence in explain_metric_values(plan))}"
    )


def explain_missing_values(plan: Plan) -> str:
    """Explain the dashes of a table."""
    undefined_text = ", or that the test samples of each client have one class" if "auc" in plan.metrics else ""
    return f"A dash means that the method has no such model{undefined_text}."


def explain_metric_values(plan: Plan) -> list[str]:
    """Explain new clients, which metrics are better if they are lower, and averages that are not obvious."""
    names = [METRICS[metric].name for metric in plan.metrics if METRICS[metric].is_lower_better]
    sentences = [f"A lower {join_words(names)} is better."] if names else []
    if plan.report.clients != "seen":
        sentences.append("New clients never participate in a round.")
    if plan.report.round == "best" and len(plan.metrics) > 1:
        sentences.append("Each metric has its own best round.")
    if "auc" in plan.metrics and plan.report.average == "sample":
        sentences.append("AUC is the mean of the clients' values, weighted by their test samples.")
    return sentences


def describe_data_and_partitions(plan: Plan) -> str:
    """Describe the data sets and partitions of the table, held-out clients and concept drifts."""
    descriptions = "; ".join(dict.fromkeys(describe_partitions(plan).values()))
    return " ".join([f"Data: {descriptions}.", *plan.held_out_notes, *plan.drift_notes])


def describe_partitions(plan: Plan) -> dict[str, str]:
    """Describe each partition by key. Data sets with equal descriptions have their SHA-256."""
    descriptions = {
        key: (
            describe_partition(partition_settings, plan.unused_keys.get(key, ())),
            partition_settings["dataset"].get("sha256", ""),
        )
        for key, partition_settings in get_partition_settings_by_key(plan).items()
    }
    distinct_texts = [text for text, _ in dict.fromkeys(descriptions.values())]
    return {
        key: text if distinct_texts.count(text) == 1 else f"{text}, data {sha256[:12]}…"
        for key, (text, sha256) in descriptions.items()
    }


def describe_partition(partition: dict[str, Any], unused_keys: Sequence[str] = ()) -> str:
    """Describe data set, clients and partition, given the settings of ``partition.yaml``.

    Keys ``unused_keys`` of the data set have no effect.
    """
    dataset, scheme = partition["dataset"], partition["partition"]
    samples = [f"{dataset['subset']} samples"] if "subset" in dataset else []
    fields = {name: field.default for name, field in Data.model_fields.items()}
    described_keys = {"name", "subset", "split", "code", "sha256", *unused_keys}
    other_settings = [
        f"{name}={_format_setting_value(value)}"
        for name, value in dataset.items()
        if name not in described_keys and value != fields.get(name)
    ]
    scheme_parameters = {name: f"{value[:12]}…" if name == "sha256" else value for name, value in scheme.items()}
    parameters = ", ".join(
        f"{name}={value}" for name, value in scheme_parameters.items() if name not in {"scheme", "code"}
    )
    scheme_text = f"{scheme['scheme']} ({parameters})" if parameters else scheme["scheme"]
    split = f"{dataset['split']} split" if "split" in dataset else "split from the file"
    data_text = ", ".join([*samples, split, *other_settings])
    return f"{dataset['name']} ({data_text}), {partition['clients']} clients, partition {scheme_text}"


def _format_setting_value(value: Any) -> str:
    """Format a setting of the data set. A long list, as of columns, has its length."""
    has_columns = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return f"[{len(value)} columns]" if has_columns and len(value) > MAX_LISTED_COLUMNS else str(value)


def append_partition_seed(partition: dict[str, Any], description: str) -> str:
    """Add the seed to a partition's description, if it has one."""
    seed = f"seed {partition['seed']}" if "seed" in partition else "all seeds"
    return f"{description}, {seed}"


def describe_best_values_at_grid_edges(data: StudyData) -> list[str]:
    """Warn about each list of `report.best_over` if a row's best value is at its edge."""
    plan, sentences = data.plan, list[str]()
    searched_names = plan.report.best_over
    measured_keys = {
        key for key, cells in data.reported_rows.groupby(plan.row_key_columns, sort=False) if cells["seeds"].any()
    }
    rows = [
        dict(zip(plan.row_key_columns, map(str, key), strict=True))
        for key in data.table_row_keys
        if key in measured_keys
    ]
    for name, short_name in results.shorten_dotted_keys(plan.grid).items():
        numbers = [value for value in plan.grid[name] if "." in name and type(convert_to_number(value)) in (int, float)]
        if name not in searched_names or len(numbers) < max(2, len(plan.grid[name])):
            continue
        edge_findings = []
        for value in map(str, (min(numbers, key=float), max(numbers, key=float))):
            methods = []
            for algorithm in plan.algorithms:
                algorithm_rows = [row for row in rows if row["algorithm"] == algorithm]
                edge_rows = [row for row in algorithm_rows if row[name] == value]
                points = [
                    results.describe_grid_point({key: "" if key in searched_names else row[key] for key in plan.grid})
                    for row in edge_rows
                ]
                title = plan.get_method_title(algorithm)
                methods += (
                    [title] if edge_rows and edge_rows == algorithm_rows else [f"{title} ({point})" for point in points]
                )
            if methods:
                edge_findings.append((", ".join(methods), value))
        if edge_findings:
            best_values = " and ".join(f"{value} for {methods}" for methods, value in edge_findings)
            subject, verb = ("value", "is") if len(edge_findings) == 1 else ("values", "are")
            sentences.append(
                f"{short_name}: the best {subject}, {best_values}, {verb} at the edge of the grid. Try a wider grid."
            )
    return sentences


def format_seed_counts(plan: Plan) -> Mapping[tuple[Hashable, ...], dict[str, str]]:
    """Describe the number of seeds by row, if some cells are missing."""
    counts = results.count_runs_by_row(plan)
    if set(counts.values()) <= {len(plan.seeds)}:
        return {}
    return {row: {"seeds": f"{count} of {len(plan.seeds)}"} for row, count in counts.items()}


def describe_omitted_updates(data: StudyData) -> list[str]:
    """Describe omitted updates, which were not finite, and divergence, by algorithm and grid point."""
    plan, sentences = data.plan, []
    for key, cells in data.divergence_by_cell.groupby(plan.row_key_columns, sort=False):
        algorithm, *values = map(str, key)
        name = results.describe_configuration(
            plan.get_method_title(algorithm), dict(zip(plan.grid, values, strict=True))
        )
        left_out_count, diverged_rounds = cells["left_out"].sum(), cells[cells["diverged"] > 0]["diverged"]
        if not left_out_count:
            continue
        updates = (
            "1 update was not finite and was"
            if left_out_count == 1
            else f"{left_out_count} updates were not finite and were"
        )
        sentence = f"{name}: {updates} omitted."
        if len(diverged_rounds):
            runs = f"{len(cells)} run{'s' if len(cells) > 1 else ''}"
            first_round = diverged_rounds.min()
            sentence += f" {len(diverged_rounds)} of {runs} diverged, first in round {first_round} (no finite update)."
        sentences.append(sentence)
    return sentences


def build_heterogeneity_section(data: StudyData) -> list[str | TextTable]:
    """Build the table of heterogeneity: one row per data set and partition, mean over seeds."""
    overalls_by_data: dict[str, list[HeterogeneitySummary]] = {}
    for key, description in describe_partitions(data.plan).items():
        overalls_by_data.setdefault(description, []).append(data.heterogeneity[key])
    rows = []
    for name, overalls in overalls_by_data.items():
        entropy, js_distance, gini = (mean(values) for values in zip(*overalls, strict=True))
        rows.append([name, f"{entropy:.2f}", f"{js_distance:.3f}", f"{gini:.3f}"])
    head = ["data", "label entropy (bits)", "Jensen-Shannon distance", "Gini of sizes"]
    description = (
        "Heterogeneity of the clients: label entropy, Jensen-Shannon distance to the label distribution of all clients "
        "(both are means over clients), and Gini index of the clients' sizes. Mean over seeds."
    )
    return [description, TextTable(pd.DataFrame(rows, columns=head), 1)]


def describe_environments(data: StudyData) -> list[str]:
    """Describe each executor, device and set of versions of the runs."""
    lines = []
    for environment in data.environments:
        versions = ", ".join(
            f"{name} {environment[name]}" for name in sorted(environment) if name not in {"executor", "device"}
        )
        lines.append(f"Computed on {environment['device']} by the {environment['executor']} executor, with {versions}.")
    return lines
