"""The result table, metrics.json and the curves' numbers."""

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import layout
from fedpipe.data import heterogeneity
from fedpipe.report import contents, table_notes, tables
from fedpipe.report.figures.curves import write_curves_figure
from fedpipe.report.words import format_bytes, format_metric_label
from fedpipe.settings.base import Protocol
from fedpipe.settings.report import Report
from tests.report.conftest import read_markdown_rows, select_rows


def find_row(table, **values):
    """Return the only row with these values, of the last round over all test samples by default."""
    (row,) = select_rows(table, **{"average": "sample", "round": "last"} | values).to_dict("records")
    return row


def make_round_counts(right):
    """Return the counts of one round, with this number of correct answers of 10."""
    return [{"global-on-global": [(right, 10)], "personal-on-local": [(right, 10), (right, 10)]}]


@pytest.fixture
def grid(make):
    """Two algorithms and one seed, with one shared grid axis and one grid axis of FedProx."""
    tree = make(["fedavg", "fedprox"], [0], {"partition.alpha": [0.1, 0.5], "algorithms.fedprox.mu": [1, 2]})
    tree.write_all(map(make_round_counts, range(len(tree.runs))))
    return tree


def test_score_table_has_mean_and_sample_deviation_over_seeds(two):
    table = two.data.score_table
    assert len(table) == 2 * 2 * 3 * 3  # algorithms, protocols, averages, rounds
    row = find_row(table, algorithm="fedavg", protocol="global-on-global")
    assert row["mean"] == pytest.approx(70)
    assert row["std"] == pytest.approx(math.sqrt(200))
    assert row["seeds"] == 2
    assert row["bytes_down"] == 300
    assert row["bytes_up"] == 300
    row = find_row(table, algorithm="fedavg", protocol="personal-on-local", average="client")
    assert row["mean"] == pytest.approx(62.5)
    assert row["std"] == pytest.approx(math.sqrt(312.5))
    row = find_row(table, algorithm="fedavg", protocol="global-on-global", average="client", round="mean-last")
    assert row["mean"] == pytest.approx(65)


def test_score_table_has_nan_for_missing_protocol(two):
    row = find_row(two.data.score_table, algorithm="local", protocol="global-on-global")
    assert math.isnan(row["mean"])
    assert row["seeds"] == 0
    assert row["bytes_up"] == 200


def test_markdown_table_keeps_row_of_algorithm_without_protocols(make):
    tree = make(["fedavg", "local"], [0])
    tree.write(0, make_round_counts(5))
    tree.write(1, [{}])
    assert "| local | – | – |" in " ".join(tree.render_markdown().split())
    assert tables.build_dvc_metrics(tree.data) == {"fedavg": 50.0}


def test_extra_protocol_of_one_method_is_only_in_score_table(make):
    tree = make(["feddyn", "fedavg"], [0])
    tree.write(0, [make_round_counts(5)[0] | {"mean-on-global": [(7, 10)]}])
    tree.write(1, make_round_counts(4))
    table = tree.data.score_table
    assert find_row(table, algorithm="feddyn", protocol="mean-on-global")["mean"] == 70
    assert find_row(table, algorithm="fedavg", protocol="mean-on-global")["seeds"] == 0
    assert "mean-on-global" not in tree.render_markdown()
    assert tables.build_dvc_metrics(tree.data) == {"feddyn": 50.0, "fedavg": 40.0}
    assert set(tree.data.build_metric_curves()["protocol"]) == {"global-on-global", "personal-on-local"}


def test_markdown_table_shows_accuracies_and_heterogeneity(two):
    paragraphs = two.render_markdown().split("\n\n")
    caption, accuracies, names, heterogeneity_note, heterogeneity_table, environment = paragraphs
    assert "(3 rounds)" in caption
    assert "over 2 seeds." in caption
    assert caption.endswith(" Data: digits (official split), 2 clients, partition dirichlet (alpha=0.3).")
    assert accuracies == (
        "| algorithm   |   Global test accuracy (global model) |   Local test accuracy (personalized) "
        "|   bytes down |   bytes up |\n"
        "|:------------|--------------------------------------:|-------------------------------------:"
        "|-------------:|-----------:|\n"
        "| fedavg      |                         70.00 ± 14.14 |                         55.00 ± 7.07 "
        "|        300 B |      300 B |\n"
        "| local       |                                     – |                        50.00 ± 23.57 "
        "|        200 B |      200 B |"
    )
    assert "Global test accuracy (global model) is global-on-global" in names
    assert heterogeneity_note.startswith("Heterogeneity")
    assert heterogeneity_table == (
        "| data                                                                |   label entropy (bits) |   "
        "Jensen-Shannon distance |   Gini of sizes |\n"
        "|:--------------------------------------------------------------------|-----------------------:|"
        "--------------------------:|----------------:|\n"
        "| digits (official split), 2 clients, partition dirichlet (alpha=0.3) |"
        "                   0.50 |                     0.293 |           0.100 |"
    )
    assert all(text in environment for text in ("loop executor", "x86_64", "fedpipe 0.1.0, torch 2.11.0."))


def test_report_settings_choose_round_average_and_protocol(two):
    two.change(report=Report(round="best", last_k=2, average="client"))
    text = two.render_markdown()
    assert "in each run's best round" in text
    assert "mean of the clients' values" in text
    assert "| 80.00 ± 0.00 |" in " ".join(text.split())
    assert "| 75.00 ± 0.00 |" in " ".join(text.split())
    two.change(protocols=("personal-on-local", "global-on-global"))
    assert tables.build_dvc_metrics(two.data)["fedavg"] == 75.0


def test_tables_of_one_seed_have_no_deviation(make):
    tree = make(["fedavg"], [7])
    tree.write(0, make_round_counts(5))
    table = tree.data.score_table
    assert table["std"].isna().all()
    text = tree.render_markdown()
    assert "One seed." in text
    assert "| 50.00 |" in " ".join(text.split())
    assert "±" not in text
    assert b"fedavg,global-on-global,accuracy,sample,last,50.0,,1,100.0,200.0,0,0\n" in tables.encode_table_csv(table)


def test_markdown_table_shows_environments_of_all_runs(two):
    two.write(0, make_round_counts(5), device="NVIDIA H100", executor="stack of 32")
    text = two.render_markdown()
    assert "NVIDIA H100 by the stack of 32 executor" in text
    assert text.count(" executor, with fedpipe 0.1.0") == 2


def test_dvc_metrics_use_first_protocol(two):
    assert tables.build_dvc_metrics(two.data) == {"fedavg": 70.0}
    two.change(protocols=("personal-on-local", "global-on-global"))
    assert tables.build_dvc_metrics(two.data) == {"fedavg": 55.0, "local": 50.0}


def test_grid_adds_columns_to_tables_and_level_to_dvc_metrics(grid):
    rows = select_rows(grid.data.score_table, protocol="global-on-global", average="sample", round="last")
    # runs by grid point, then algorithm: fedavg .1, fedprox .1 1, fedprox .1 2, fedavg .5, fedprox .5 1, fedprox .5 2
    assert rows[["algorithm", "partition.alpha", "algorithms.fedprox.mu", "mean"]].to_numpy().tolist() == [
        ["fedavg", "0.1", "", 0],
        ["fedavg", "0.5", "", 30],
        ["fedprox", "0.1", "1", 10],
        ["fedprox", "0.1", "2", 20],
        ["fedprox", "0.5", "1", 40],
        ["fedprox", "0.5", "2", 50],
    ]
    metrics = tables.build_dvc_metrics(grid.data)
    assert metrics["fedavg"] == {"alpha=0.1": 0.0, "alpha=0.5": 30.0}
    assert metrics["fedprox"]["alpha=0.1, mu=2"] == 20.0
    text = grid.render_markdown()
    assert "| algorithm   | alpha   | mu   |" in text
    assert "| fedavg      | 0.5     | –    |" in text


def test_caption_distinguishes_data_sets_in_study_order(make):
    """The caption shows that one data set has 900 samples and the other has 300."""
    tree = make(["fedavg"], [0], {"dataset.subset": [900, 300]})
    (partition,) = tree.plan.partitions.values()
    large, small = (partition | {"dataset": partition["dataset"] | {"subset": subset}} for subset in (900, 300))
    runs = [dataclasses.replace(run, partition=key) for run, key in zip(tree.runs, ("0c", "0b"), strict=True)]
    tree.change(runs=tuple(runs), partitions={"0b": small, "0c": large})  # the stored plan sorts partitions by key
    assert tables.build_table_caption(tree.plan).endswith(
        "Data: digits (900 samples, official split), 2 clients, partition dirichlet (alpha=0.3); "
        "digits (300 samples, official split), 2 clients, partition dirichlet (alpha=0.3)."
    )


def test_metric_labels_are_unique_and_describe_samples(two):
    names = {protocol: format_metric_label(protocol) for protocol in get_args(Protocol)}
    assert len(set(names.values())) == len(names)
    assert names["personal-on-train"] == "Local training accuracy (personalized)"
    assert names["finetuned-on-validation"] == "Local validation accuracy (fine-tuned)"
    assert not set(names) & set(names.values())
    assert format_metric_label("mean-on-global") == "mean-on-global", "an extra protocol of a method has no label"


def test_partition_description_shows_non_default_data_settings():
    dataset = {"name": "imdb", "sha256": "0a", "length": 100, "split": "pooled"}
    dataset |= {"test_fraction": 0.1, "stratified": False}
    description = table_notes.describe_partition(
        {"dataset": dataset, "partition": {"scheme": "iid", "code": "0123456789ab"}, "clients": 3}
    )
    assert description == "imdb (pooled split, length=100, test_fraction=0.1), 3 clients, partition iid"


def test_heterogeneity_table_has_row_per_custom_data_file(make):
    """Otherwise the heterogeneity would be a mean over both data sets."""
    tree = make(["fedavg"], [0], {"data": ["A", "B"]})
    other = "00000000000b"
    partition_settings = [
        {"dataset": {"name": "npz", "split": "official", "sha256": 64 * digit}, "partition": {"scheme": "iid"}}
        for digit in "ab"
    ]
    (first,) = tree.plan.partitions
    settings = {
        key: {**part, "clients": 2, "seed": 0} for key, part in zip((first, other), partition_settings, strict=True)
    }
    tree.change(partitions=settings, runs=(tree.runs[0], dataclasses.replace(tree.runs[1], partition=other)))
    path = layout.get_assignment_path(other).with_name("heterogeneity.parquet")
    tree.write_table(path, heterogeneity.make_heterogeneity_table(np.array([[5, 0], [0, 5]])), "assignment.json")
    tree.write_all(map(make_round_counts, range(2)))
    text = tree.render_markdown()
    assert [row[:2] for row in read_markdown_rows(text, "npz")] == [
        ["npz (official split), 2 clients, partition iid, data aaaaaaaaaaaa…", "0.50"],
        ["npz (official split), 2 clients, partition iid, data bbbbbbbbbbbb…", "0.00"],
    ]


def test_markdown_table_notes_method_reported_by_another_protocol(make):
    tree = make(["fedavg", "local"], [0])
    tree.write(0, make_round_counts(6))
    tree.write(1, [{"personal-on-local": [(7, 10), (9, 10)]}])
    tree.change(method_protocols={"local": "personal-on-local"})
    text = tree.render_markdown()
    assert "Column `reported accuracy`: Global test accuracy (global model)" in text
    head, fedavg, local = read_markdown_rows(text)[:3]
    labels = map(format_metric_label, ("global-on-global", "personal-on-local"))
    assert head[:4] == ["algorithm", "reported accuracy", *labels]
    assert fedavg[:4] == ["fedavg", "60.00", "60.00", "60.00"]
    assert local[:4] == ["local", "80.00 (Local test accuracy (personalized))", "–", "80.00"]


def test_titles_change_only_markdown_and_html_tables(grid):
    searched = Report(best_over=("algorithms.fedprox.mu",), last_k=2, statistics=("difference",), baseline="fedavg")
    grid.change(report=searched)
    before = contents.build_table_files(grid.data)
    grid.change(titles={"fedavg": "FedAvg <b>", "fedprox": "FedProx (μ ≥ 1)"})
    after = contents.build_table_files(grid.data)
    changed = {path.name for path in after if after[path] != before[path]}
    assert changed == {"results.md", "results.html"}, "metrics.json, statistics.csv, ... have the labels"
    text = grid.render_markdown()
    heads = [row[0] for row in read_markdown_rows(text)]
    assert heads[:10] == ["algorithm", *["FedAvg &lt;b&gt;"] * 2, *["FedProx (μ ≥ 1)"] * 2] * 2
    assert "mu: the best value, 2 for FedProx (μ ≥ 1), is at the edge of the grid." in text
    assert "− FedAvg &lt;b&gt; |" in text
    assert "Differences in accuracy to the best FedAvg &lt;b&gt; at the same grid point" in text
    assert "fedavg" not in text
    assert "fedprox (" not in text
    assert "<td>FedAvg &lt;b&gt;" in tables.render_html_page(grid.data)


def test_markdown_and_html_tables_show_overrides_of_one_method(two):
    """Without this note, the table would compare different training budgets."""
    plain = contents.build_table_files(two.data)
    overrides = {"federation.local_epochs": 15, "model.hidden": [8], "federation.optimizer": "<adam>"}
    two.set_overrides(lambda cell: overrides if cell.algorithm == "local" else {})
    contents_by_path = contents.build_table_files(two.data)
    note = "Overrides of local: federation.local_epochs=15, model.hidden=[8], federation.optimizer="
    path = Path("results/tables/results.md")
    rows, _, rest = contents_by_path[path].decode().partition(f"\n\n{note}&lt;adam&gt;.\n\n")
    assert f"{rows}\n\n{rest}".encode() == plain[path]
    assert rows.splitlines()[-1].startswith("| local ")
    assert f"<p>{note}&lt;adam&gt;.</p>" in contents_by_path[path.with_suffix(".html")].decode()
    contents.write_report_files(contents_by_path)
    assert note in contents.render_results(two.data)
    changed = {path for path in contents_by_path if contents_by_path[path] != plain[path]}
    assert changed == {path, path.with_suffix(".html")}


def test_overrides_note_shows_grid_points(grid):
    grid.change(titles={"fedprox": "FedProx"})
    grid.set_overrides(lambda cell: {"federation.rounds": 9} if cell.grid["partition.alpha"] == 0.1 else {})
    text = grid.render_markdown()
    names = "fedavg (alpha=0.1), FedProx (alpha=0.1, mu=1; alpha=0.1, mu=2)"
    assert f"\nOverrides of {names}: federation.rounds=9.\n" in text


FORMULA = '=HYPERLINK("https://example.org";"x")'


def test_csv_files_escape_formulas(make):
    """Numbers of the grid are not escaped, even if they are negative."""
    values = [FORMULA, "+1+2", "-2+3", "@SUM(A1)", "\tx", -0.5, "-1e-3", "a=b"]
    tree = make(["fedavg"], [0], {"data": values})
    tree.write_all(map(make_round_counts, range(len(values))))
    contents_by_path = contents.build_table_files(tree.data)
    for name in ("tables/results.csv", "tables/times.csv", "plots/curves.csv"):
        rows = list(csv.DictReader(io.StringIO(contents_by_path[Path("results") / name].decode())))
        row = list(dict.fromkeys(row["data"] for row in rows))
        assert row == [f"'{FORMULA}", "'+1+2", "'-2+3", "'@SUM(A1)", "'\tx", "-0.5", "-1e-3", "a=b"], name


def test_markdown_and_html_tables_escape_names_of_users(make):
    hostile = '<img src=x onerror="alert(1)"></script>'
    tree = make(["fedavg"], [0], {"data": [hostile, "&lt;b>", "CIFAR|x"]})
    tree.write_all(map(make_round_counts, range(3)))
    tree.change(titles={"fedavg": hostile}, warnings=(hostile,), params=Path(f"studies/{hostile}.yaml"))
    text, page = tree.render_markdown(), tables.render_html_page(tree.data)
    assert "<" not in text.replace("<br>", "")
    assert text.count("&lt;img src=x onerror=") == 5  # three rows of a title, a value, a warning
    assert "&amp;lt;b&gt;" in text
    assert r"| CIFAR\|x " in text
    for name in ("img", "/script"):
        assert f"<{name}" not in page
        assert f"&lt;{name}" in page


def test_markdown_table_shows_best_grid_value_per_method_and_column(grid):
    """Runs are sorted by grid point, then algorithm. They have 0 to 5 correct answers of 10, but run 1 has 9."""
    grid.change_report(best_over=("algorithms.fedprox.mu",))
    grid.write(1, make_round_counts(9))  # fedprox at alpha 0.1 and mu 1
    table = grid.data.score_table
    text = grid.render_markdown()
    assert [row[:4] for row in read_markdown_rows(text, "fed")] == [
        ["fedavg", "0.1", "–", "0.00"],
        ["fedavg", "0.5", "–", "30.00"],
        ["fedprox", "0.1", "1", "90.00"],
        ["fedprox", "0.5", "2", "50.00"],
    ]
    assert "best value of algorithms.fedprox.mu, selected on the test samples" in text
    assert len(table) == 6 * 2 * 3 * 3, "the score table has all grid values"


def test_grid_of_algorithms_keeps_method_names(make):
    tree = make(["prox", "fedavg"], [0], {"algorithms.prox.algorithm": ["fedavg", "fedprox"]})
    tree.write_all(map(make_round_counts, range(len(tree.runs))))
    assert [row[:3] for row in read_markdown_rows(tree.render_markdown())[:4]] == [
        ["algorithm", "algorithms.prox.algorithm", format_metric_label("global-on-global")],
        ["prox", "fedavg", "0.00"],
        ["prox", "fedprox", "20.00"],
        ["fedavg", "–", "10.00"],
    ]


def test_dvc_metrics_show_grid_values_that_are_lists(make):
    tree = make(["fedavg"], [0], {"model.channels": [[8, 16], [16, 32]]})
    tree.write(0, make_round_counts(1))
    tree.write(1, make_round_counts(2))
    metrics = tables.build_dvc_metrics(tree.data)
    assert metrics["fedavg"]["channels=[16, 32]"] == 20.0


def test_metric_curves_have_mean_and_std_over_seeds(two):
    rows = select_rows(two.data.build_metric_curves(), algorithm="fedavg", protocol="global-on-global")
    assert rows["round"].tolist() == [1, 2, 3]
    assert rows["seeds"].tolist() == [2, 2, 2]
    assert rows["mean"].tolist() == pytest.approx([25, 60, 70])
    assert rows["std"].tolist() == pytest.approx([math.sqrt(50), math.sqrt(800), math.sqrt(200)])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999.7, "1 kB"), (54824, "54.8 kB"), (3e6, "3 MB"), (2.5e12, "2.5 TB")],
)
def test_format_bytes_uses_decimal_units(count, text):
    assert format_bytes(count) == text


def test_metrics_json_and_times_csv_match_hand_computed_values(two):
    written = contents.build_table_files(two.data)
    assert json.loads(written[Path("results/metrics.json")])["fedavg"] == 70.0
    assert written[Path("results/tables/times.csv")] == (
        b"algorithm,train,aggregate,evaluate,epoch\nfedavg,6.0,1.5,0.75,0.5\nlocal,3.0,1.5,0.75,0.25\n"
    )


def test_results_csv_and_metrics_json_ignore_times(two):
    contents.write_report_files(contents.build_table_files(two.data))
    before = [(Path("results") / name).read_bytes() for name in ("tables/results.csv", "metrics.json")]
    for run in range(len(two.runs)):
        path = two.merged_files(run).times
        two.write_json(path, json.loads(path.read_text().replace('"train": ', '"train": 1')))
    contents.write_report_files(contents.build_table_files(two.data))
    assert [(Path("results") / name).read_bytes() for name in ("tables/results.csv", "metrics.json")] == before


def test_render_results_needs_table_and_lists_figures(two):
    with pytest.raises(ArtifactError, match=r"results/tables/results.md is missing"):
        contents.render_results(two.data)
    contents.write_report_files(contents.build_table_files(two.data))
    write_curves_figure(two.data)
    text = contents.render_results(two.data)
    assert "70.00 ± 14.14" in text
    assert text.endswith("results/figures/curves.svg")
