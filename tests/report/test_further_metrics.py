"""Tables, curves and best values of AUC, ECE and NLL. A lower ECE and NLL is better."""

import math

import pyarrow as pa
import pytest

from fedpipe.analysis import trace
from fedpipe.core.storage import files
from fedpipe.report import contents, table_notes, tables, wide
from fedpipe.report.figures.curves import build_curves_figure, write_curves_figure
from fedpipe.report.results import METRIC_COLUMNS
from fedpipe.report.words import join_words
from fedpipe.settings.report import Report
from tests.report.conftest import read_markdown_rows

PROTOCOL = "personal-on-local"


def make_row(number, client, total, auc, loss, bins):
    """Return a row of the metrics with three bins."""
    row = {"round": number, "client": client, "protocol": PROTOCOL, "correct": int(sum(bins[1])), "total": total}
    return row | {"loss": loss, "auc": auc} | dict(zip(METRIC_COLUMNS["ece"], bins, strict=True))


#: Two clients with 4 and 6 samples. Their ECE is |2 - 3.6| / 4 = 0.4 and |3 - 2.4| / 6 = 0.1. The third has no samples.
CLIENTS = [
    (0, 4, 0.8, 2.0, ([0, 0, 4], [0, 0, 2], [0, 0, 3.6])),
    (1, 6, None, 1.0, ([0, 0, 6], [0, 0, 3], [0, 0, 2.4])),
    (2, 0, None, 0.0, ([0, 0, 0], [0, 0, 0], [0, 0, 0])),
]


def write_metrics(tree, run, rounds):
    """Write a run with these values of clients by round."""
    tree.write(run, [{PROTOCOL: [(1, 2)]}] * len(rounds))
    rows = [make_row(number, *values) for number, clients in enumerate(rounds, 1) for values in clients]
    tree.write_table(tree.merged_files(run).metrics, pa.Table.from_pylist(rows))


def make_nll_study(make, losses, seeds=(0,), **fields):
    """Make a study of one or two methods with these fields of its plan, and the NLL of each run."""
    tree = make(["fedavg", "fedprox"][: len(losses) // len(seeds)], seeds)
    for run, loss in enumerate(losses):
        write_metrics(tree, run, [[(0, 4, 0.5, loss, CLIENTS[0][4])]] * 3)
    tree.change(protocols=(PROTOCOL,), metrics=("nll",), **fields)
    return tree


@pytest.fixture
def single(make):
    """One method and one seed."""
    tree = make(["fedavg"], [0])
    write_metrics(tree, 0, [CLIENTS] * 3)
    tree.change(protocols=(PROTOCOL,), metrics=("accuracy", "auc", "ece", "nll"))
    return tree


@pytest.fixture
def two_methods(make):
    """Two methods and two seeds on a grid of two learning rates. Each run has a different NLL and ECE."""
    tree = make(["fedavg", "fedprox"], [0, 1], {"federation.learning_rate": [0.1, 0.5]})
    for run, loss in enumerate((8.0, 6.0, 7.0, 5.0, 4.0, 2.0, 1.0, 3.0)):
        clients = [(0, 10, loss / 10, loss, ([0, 0, 10], [0, 0, 8], [0, 0, 8 + loss / 10]))]
        write_metrics(tree, run, [[(0, 10, 0.5, loss + 1, clients[0][4])], clients, clients])
    tree.change(protocols=(PROTOCOL,), metrics=("nll", "ece", "accuracy"))
    return tree


@pytest.mark.parametrize(
    ("metric", "average", "expected"),
    [
        ("accuracy", "sample", 50),
        ("auc", "sample", 80),  # the AUC of the second client is undefined
        ("auc", "client", 80),
        ("nll", "sample", 1.4),
        ("nll", "client", 1.5),
        ("nll", "worst", 2.0),  # the highest
        ("ece", "sample", 10),  # |5 - 6| / 10
        ("ece", "client", 25),
        ("ece", "worst", 40),
        ("auc", "worst", 80),
    ],
)
def test_averages_of_metrics_match_hand_computed_values(single, metric, average, expected):
    rows = single.data.score_table.query("metric == @metric and average == @average and round == 'last'")
    assert rows["mean"].tolist() == [pytest.approx(expected)]
    assert rows["seeds"].tolist() == [1]


@pytest.mark.parametrize(
    ("round", "expected"), [("last", 2.0), ("best", 1.0), ("mean-last", 2.5)], ids=["last", "best", "mean"]
)
def test_reported_nll_uses_chosen_round(make, round, expected):
    tree = make(["fedavg"], [0])
    write_metrics(tree, 0, [[(0, 4, 0.8, loss, CLIENTS[0][4])] for loss in (1.0, 3.0, 2.0)])
    tree.change(protocols=(PROTOCOL,), metrics=("nll",), report=Report(round=round, last_k=2))
    assert tree.data.reported_rows["mean"].tolist() == [expected]


def test_nan_loss_is_reported_as_infinite(make):
    tree = make(["fedavg"], [0])
    broken = [(0, 4, 0.5, math.nan, CLIENTS[0][4]), (1, 6, 0.5, 1.0, CLIENTS[1][4])]
    write_metrics(tree, 0, [[CLIENTS[0]], [CLIENTS[0]], broken])
    tree.change(protocols=(PROTOCOL,), metrics=("nll",))
    assert tree.data.reported_rows["mean"].tolist() == [math.inf]
    assert " ∞ " in tree.render_markdown()
    assert r"$\infty$" in wide.render_latex_table(tree.data)


@pytest.mark.parametrize(
    ("baseline_loss", "text"),
    [(2.0, "+∞"), (math.inf, "–")],
    ids=["one method diverges", "both diverge with different seeds"],
)
@pytest.mark.filterwarnings("error")
def test_infinite_difference_of_two_seeds_has_no_interval(make, baseline_loss, text):
    report = Report(baseline="fedavg", statistics=("difference",))
    tree = make_nll_study(make, (1.0, baseline_loss, math.nan, 5.0), (0, 1), report=report)
    (row,) = tree.data.statistics.query("statistic == 'difference'").to_dict("records")
    assert row["seeds"] == 2
    statistics_text = tree.render_markdown().partition("\nStatistics of")[2]
    assert read_markdown_rows(statistics_text, "fed") == [["fedavg", "–"], ["fedprox", text]]


def test_dvc_metrics_omit_infinite_mean(make):
    """JSON has no infinity."""
    tree = make_nll_study(make, (1.5, math.inf))
    assert tables.build_dvc_metrics(tree.data) == {"fedavg": 1.5}


def test_difference_shows_number_of_seeds_without_infinite_values(make):
    """Both methods diverge with the first seed, so this seed has no difference."""
    report = Report(statistics=("difference",), baseline="fedavg")
    tree = make_nll_study(make, (math.nan, 2.0, 3.0, math.nan, 1.0, 2.5), (0, 1, 2), report=report)
    assert "| -0.75 ± 3.18 (2 of 3 seeds) |" in tree.render_markdown()


def test_report_shows_number_of_seeds_of_auc_that_is_not_defined_for_all(make):
    tree = make(["fedavg"], (0, 1))
    for run, auc in enumerate((0.75, None)):
        write_metrics(tree, run, [[(0, 4, auc, 2.0, CLIENTS[0][4])]] * 3)
    tree.change(protocols=(PROTOCOL,), metrics=("accuracy", "auc"))
    (row,) = read_markdown_rows(tree.render_markdown(), "fed")
    assert row[:3] == ["fedavg", "50.00 ± 0.00", "75.00 (1 of 2 seeds)"]


def test_huge_nll_is_in_scientific_notation(make):
    tree = make_nll_study(make, (67011889239508705263747072.0, 2e25), (0, 1))
    assert " 4.35e+25 ± 3.32e+25 " in tree.render_markdown()
    assert r"4.35e+25 $\pm$ 3.32e+25" in wide.render_latex_table(tree.data)


def test_auc_of_one_class_is_dash(make):
    tree = make(["fedavg"], [0])
    write_metrics(tree, 0, [CLIENTS, CLIENTS, CLIENTS[1:]])
    tree.change(protocols=(PROTOCOL,), metrics=("auc",))
    text = tree.render_markdown()
    assert read_markdown_rows(text, "fedavg")[0][:2] == ["fedavg", "–"]
    assert "the test samples of each client have one class" in text


def test_markdown_table_names_metrics_units_and_directions(single):
    text = single.render_markdown()
    heads = [f"Local test {name} (personalized)" for name in ("accuracy", "AUC", "ECE", "NLL")]
    assert read_markdown_rows(text)[0][1:5] == heads
    assert "Test accuracy (%), AUC (%), ECE (%) and NLL (nats) in the last" in text
    assert "A lower ECE and NLL is better." in text
    assert "Local test ECE (personalized) is ece of personal-on-local" in text
    single.change(metrics=("accuracy",))
    assert "better" not in (plain := table_notes.describe_reported_numbers(single.plan))
    assert plain.startswith("Test accuracy (%) in the last")


def test_latex_table_marks_lowest_loss_and_highest_accuracy(make):
    tree = make(["fedavg", "fedprox"], [0])
    for run, (loss, hits) in enumerate([(7.0, 9), (6.0, 8)]):
        write_metrics(tree, run, [[(0, 10, 0.5, loss, ([0, 0, 10], [0, 0, hits], [0, 0, 9.5]))]])
    tree.change(protocols=(PROTOCOL,), metrics=("nll", "ece", "accuracy"))
    text = wide.render_latex_table(tree.data)
    rows = [line.removesuffix(r" \\").split(" & ") for line in text.splitlines() if line.startswith("fed")]
    assert rows == [
        ["fedavg", r"\underline{7.00}", r"\textbf{5.00}", r"\textbf{90.00}"],
        ["fedprox", r"\textbf{6.00}", r"\underline{15.00}", r"\underline{80.00}"],
    ]
    assert "A lower NLL and ECE is better." in text


def test_best_over_and_dvc_metrics_use_first_metric(two_methods):
    two_methods.change(report=Report(best_over=("federation.learning_rate",)))
    data = two_methods.data
    assert data.table_row_keys == [("fedavg", "0.5"), ("fedprox", "0.5")]
    two_methods.change(metrics=("accuracy", "nll"))
    assert two_methods.data.table_row_keys == [("fedavg", "0.1"), ("fedprox", "0.1")]  # ties: the first
    two_methods.change(metrics=("nll",))
    assert tables.build_dvc_metrics(two_methods.data) == {
        "fedavg": {"learning_rate=0.1": 7.0, "learning_rate=0.5": 3.0},
        "fedprox": {"learning_rate=0.1": 6.0, "learning_rate=0.5": 2.0},
    }


def test_differences_use_first_metric(two_methods):
    two_methods.change(report=Report(baseline="fedavg", statistics=("difference",)))
    data = two_methods.data
    differences = data.statistics.query("statistic == 'difference'")
    assert differences["mean"].tolist() == pytest.approx([-1.0, -1.0])
    assert "Differences in NLL to fedavg" in tables.render_markdown_table(data)


def test_each_metric_has_curves_figure(single):
    metrics = {"curves": "accuracy", "curves_auc": "auc", "curves_ece": "ece", "curves_nll": "nll"}
    assert single.plan.metrics_by_figure == metrics
    frame = single.data.build_figure_curves("nll")
    assert frame["mean"].tolist() == pytest.approx([1.4] * 3)
    figure = build_curves_figure(single.plan, frame, "nll")
    (ax,) = figure.axes
    assert figure.get_supylabel() == "test NLL (nats)"
    assert "NLL" in ax.get_title(loc="left")
    write_curves_figure(single.data, "curves_ece")
    (path,) = single.plan.study_files.figures_folder.glob("*.svg")
    assert path in single.plan.figure_files
    assert b"ECE" in path.read_bytes()


def test_plan_without_further_metrics_has_default_figures(make):
    plan = make(["fedavg"], [0]).plan
    assert [path.stem for path in plan.figure_files if path.suffix == ".svg"][:2] == ["curves", "matrices"]
    assert len(plan.figure_files) == 9


def test_trace_cell_name_contains_further_metric(single):
    names = {f"fedavg.{PROTOCOL}{suffix}" for suffix in ("", ".auc", ".ece", ".nll")}
    assert {*trace._collect_rows_by_cell_name(single.data)} == names


def test_join_words_returns_english_list():
    assert [join_words(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


def test_curves_csv_has_accuracies_if_metrics_omit_accuracy(single):
    before = contents.build_table_files(single.data)[single.plan.study_files.get_plot_data_path("curves")]
    single.change(metrics=("nll", "ece"))
    data = single.data
    assert contents.build_table_files(data)[single.plan.study_files.get_plot_data_path("curves")] == before
    assert files.encode_json({"fedavg": 1.4}) == contents.build_table_files(data)[single.plan.study_files.metrics]
