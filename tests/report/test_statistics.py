"""Fairness, cost to a target, class statistics and differences to a baseline, against scikit-learn and scipy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn import metrics as sklearn

from fedpipe.core.errors import ArtifactError
from fedpipe.report import contents, statistics, words
from fedpipe.settings.report import Report
from tests.report.conftest import Tree, read_markdown_rows, select_rows

ALL_STATISTICS = Report(last_k=2, statistics=statistics.STATISTICS, target=0.5, baseline="fedavg")


def read_row(frame: pd.DataFrame, **values: Any) -> tuple[float, float, int]:
    """Return mean, standard deviation and number of seeds of the only row with these values."""
    (row,) = select_rows(frame, **values).to_dict("records")
    return row["mean"], row["std"], row["seeds"]


def test_fairness_and_cost_to_target_match_hand_computed_values(two: Tree) -> None:
    """FedAvg's clients have 1/2 and 4/8 correct answers with one seed, and 2/2 and 4/8 with the other.

    With seed 0, round t sends 2 (100 t + 200) bytes.
    """
    two.change(report=ALL_STATISTICS)
    frame = two.data.statistics
    local = {"algorithm": "fedavg", "protocol": "personal-on-local"}
    assert read_row(frame, **local, statistic="client_std") == pytest.approx((12.5, math.sqrt(312.5), 2))
    assert read_row(frame, **local, statistic="worst_tenth") == pytest.approx((50, 0, 2))
    assert read_row(frame, **local, statistic="lowest") == pytest.approx((50, 0, 2))
    assert read_row(frame, **local, statistic="rounds_to_target") == pytest.approx((1.5, math.sqrt(0.5), 2))
    server = {"algorithm": "fedavg", "protocol": "global-on-global"}
    assert read_row(frame, **server, statistic="rounds_to_target") == pytest.approx((2.5, math.sqrt(0.5), 2))
    # seed 0 reaches it in round 2 (300 + 400), seed 1, whose traffic is twice as much, in round 3 (600 + 800 + 1000)
    assert read_row(frame, **server, statistic="bytes_to_target")[0] == (2 * 700 + 2 * 2400) / 2
    assert frame[(frame["protocol"] == "global-on-global") & frame["statistic"].isin(statistics.FAIRNESS_COLUMNS)].empty


def test_clients_with_one_test_sample_count_and_clients_without_do_not() -> None:
    columns = {"run": "a", "round": 1, "protocol": "personal-on-local", "client": [0, 1, 2]}
    classes = {
        "hits": [[0, 1], [1, 0], [0, 0]],
        "support": [[1, 1], [1, 0], [0, 0]],
        "predicted": [[0, 2], [1, 0], [0, 0]],
    }
    metrics = pd.DataFrame(columns | {"correct": [1, 1, 0], "total": [2, 1, 0]} | classes)
    (fairness,) = statistics.compute_fairness(metrics, ["run"]).to_dict("records")
    assert (fairness["clients"], fairness["mean"], fairness["lowest"]) == (2, 0.75, 0.5)
    (row,) = statistics.compute_class_statistics(metrics, ["run"]).to_dict("records")
    assert row["balanced_accuracy"] == (1 / 2 + 1) / 2


def test_cost_to_target_shows_number_of_seeds_that_reach_target(make: Any) -> None:
    tree = make(["fedavg", "local"], seeds=[0, 1])
    for index, right in enumerate((6, 8, 1, 2)):
        first, second = [(right - 1, 10), (right, 10)], [(right, 10)] * 2
        tree.write(index, [{"personal-on-local": first}, {"personal-on-local": second}])
    tree.change(report=ALL_STATISTICS, protocols=("personal-on-local",))
    tree.change_report(target=0.8, statistics=("rounds_to_target", "bytes_to_target"))
    frame = tree.data.statistics
    result = read_row(frame, algorithm="fedavg", protocol="personal-on-local", statistic="rounds_to_target")
    assert (result[0], result[2]) == (2, 1)
    assert read_row(frame, algorithm="local", protocol="personal-on-local", statistic="rounds_to_target")[2] == 0
    text = tree.render_markdown()
    below = text.partition("\nStatistics of: Local test accuracy (personalized).")[2]
    assert read_markdown_rows(below)[:3] == [
        ["algorithm", "rounds to 80 %", "bytes to 80 %"],
        ["fedavg", "2.0 (1 of 2 seeds)", "1.4 kB (1 of 2 seeds)"],
        ["local", words.DASH, words.DASH],
    ]


def test_difference_interval_equals_scipy_paired_t_interval(make: Any) -> None:
    tree = make(["fedavg", "feddw"], seeds=[0, 1, 2], grid={"algorithms.feddw.mu": [1, 2], "partition.alpha": [1]})
    right = {"fedavg": [3, 5, 4], "feddw": [4, 5, 6]}
    tree.write_all([{"global-on-global": [(right[run.algorithm][run.seed], 10)]}] for run in tree.runs)
    tree.change(report=ALL_STATISTICS)
    frame = tree.data.statistics
    result = frame[frame["statistic"] == "difference"]
    assert list(result["algorithms.feddw.mu"]) == ["1", "2"], "the baseline has no differences and no mu"
    ours, base = (10 * np.array(right[name]) for name in ("feddw", "fedavg"))
    low, high = stats.ttest_rel(ours, base).confidence_interval(0.95)
    for row in result.to_dict("records"):
        assert row["mean"] - row["half_width"] == pytest.approx(low, rel=1e-12)
        assert row["mean"] + row["half_width"] == pytest.approx(high, rel=1e-12)
        assert (row["std"], row["seeds"]) == (pytest.approx((ours - base).std(ddof=1)), 3)
    line = next(line for line in tree.render_markdown().splitlines() if "+10.00 ±" in line)
    assert f"+10.00 ± {(high - low) / 2:.2f}" in line
    assert "*" not in line, "the interval contains zero"


def test_difference_is_omitted_if_grid_varies_baseline(make: Any) -> None:
    """If the grid varies the baseline at a point of another method, the difference is ambiguous."""
    tree = make(["fedavg", "feddw"], seeds=[0], grid={"algorithms.fedavg.other": [1, 2]})
    tree.write_all([{"global-on-global": [(index, 10)]}] for index in range(len(tree.runs)))
    tree.change(report=ALL_STATISTICS)
    assert "difference" not in set(tree.data.statistics["statistic"])


def test_difference_exists_if_grid_has_one_value_of_baseline(make: Any) -> None:
    tree = make(["fedavg", "feddw"], seeds=[0], grid={"algorithms.fedavg.other": [1]})
    tree.write_all([{"global-on-global": [(3 + index, 10)]}] for index in range(2))
    tree.change(report=ALL_STATISTICS)
    (row,) = select_rows(tree.data.statistics, statistic="difference").to_dict("records")
    assert (row["algorithm"], row["mean"]) == ("feddw", pytest.approx(10))


def test_difference_of_one_seed_has_no_interval(make: Any) -> None:
    tree = make(["fedavg", "feddw"], seeds=[0])
    tree.write_all([{"global-on-global": [(3 + index, 10)]}] for index in range(2))
    tree.change(report=ALL_STATISTICS)
    frame = tree.data.statistics
    (row,) = frame[frame["statistic"] == "difference"].to_dict("records")
    assert (row["mean"], row["seeds"]) == (pytest.approx(10), 1)
    assert math.isnan(row["half_width"])
    assert "+10.00 (one seed)" in tree.render_markdown()


def make_metrics(answers: list[tuple[np.ndarray, np.ndarray]], num_classes: int) -> pd.DataFrame:
    """Return the rows that a run records for clients with these labels and predictions."""

    def make_row(client: int, y: np.ndarray, predictions: np.ndarray) -> dict[str, Any]:
        counts = {"hits": y[y == predictions], "support": y, "predicted": predictions}
        return {
            **{"run": "a", "protocol": "personal-on-local", "round": 3, "client": client},
            **{"correct": int((y == predictions).sum()), "total": len(y)},
            **{name: np.bincount(labels, minlength=num_classes) for name, labels in counts.items()},
        }

    return pd.DataFrame([make_row(client, *result) for client, result in enumerate(answers)])


@pytest.mark.parametrize("seed", range(5))
def test_class_statistics_equal_scikit_learn(seed: int) -> None:
    """Some clients have few classes. Class 6 is absent, and class 5 is only predicted."""
    random = np.random.default_rng(seed)
    answers = [(random.integers(client % 3, 5, 30), random.integers(0, 5, 30)) for client in range(4)]
    answers.append((np.array([0, 1]), np.array([5, 1])))
    answers.append((np.array([], int), np.array([], int)))
    (result,) = statistics.compute_class_statistics(make_metrics(answers, 7), ["run"]).to_dict("records")
    y, predictions = (np.concatenate(part) for part in zip(*answers, strict=True))
    assert result["macro_f1"] == pytest.approx(sklearn.f1_score(y, predictions, average="macro"), rel=1e-14)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        expected = sklearn.balanced_accuracy_score(y, predictions)
    assert result["balanced_accuracy"] == pytest.approx(expected, rel=1e-14)


def test_class_statistics_use_last_measured_round() -> None:
    first, last = (make_metrics([(np.array([0, 1]), np.array(predictions))], 2) for predictions in ([1, 0], [0, 1]))
    frame = pd.concat([last.assign(round=4), first.assign(round=2)])
    (result,) = statistics.compute_class_statistics(frame, ["run"]).to_dict("records")
    assert (result["macro_f1"], result["balanced_accuracy"]) == (1, 1)


def test_markdown_table_shows_chosen_statistics(two: Tree) -> None:
    plain = two.render_markdown()
    chosen = ("worst_tenth", "client_std", "rounds_to_target", "bytes_to_target", "difference")
    two.change(report=ALL_STATISTICS, protocols=("personal-on-local",))
    two.change_report(statistics=chosen)
    text = two.render_markdown()
    assert "worst tenth" not in plain
    cells = read_markdown_rows(text.partition("\nStatistics of: Local test accuracy (personalized).")[2])
    assert cells[0] == ["algorithm", "worst tenth", "std of clients", "rounds to 50 %", "bytes to 50 %", "− fedavg"]
    assert cells[1] == ["fedavg", "50.00 ± 0.00", "12.50 ± 17.68", "1.5 ± 0.7", "1.3 kB ± 141 B", words.DASH]
    assert cells[2][0] == "local"
    assert cells[2][5].startswith("-")
    assert "mean ± half-width of the 95% confidence interval" in text


def test_markdown_table_compares_best_grid_value_with_best_baseline(make: Any) -> None:
    """The difference to a grid value that the table omits could have the other sign."""
    rate = "federation.learning_rate"
    tree = make(["fedavg", "fedprox"], grid={rate: [0.01, 0.05]})
    tree.write_all([{"global-on-global": [(right, 10)]}] for right in (5, 5, 7, 7, 8, 8, 6, 6))
    tree.change(report=ALL_STATISTICS, protocols=("global-on-global",))
    tree.change_report(statistics=("difference",), best_over=(rate,))
    text = tree.render_markdown()
    rows = read_markdown_rows(text, "fed")
    assert [row[:3] for row in rows[:2]] == [["fedavg", "0.05", "80.00 ± 0.00"], ["fedprox", "0.01", "70.00 ± 0.00"]]
    assert [row[:2] for row in rows[2:4]] == [["fedavg", "0.05"], ["fedprox", "0.01"]]
    assert rows[3][2].startswith("-10.00 "), "not +20, the difference to FedAvg's 50 % at this rate"
    assert "Differences in accuracy to the best fedavg are paired by seed" in text
    frame = tree.data.statistics.query("statistic == 'difference'")
    assert frame[rate].tolist() == ["0.01", "0.05"]
    assert frame["mean"].tolist() == pytest.approx([-10, -20])


def test_difference_compares_methods_at_same_grid_point(make: Any) -> None:
    rate, alpha = "federation.learning_rate", "partition.alpha"
    tree = make(["fedavg", "fedprox"], [0], grid={alpha: [0.1, 0.5], rate: [0.01, 0.05]})
    for run, right in enumerate((5, 6, 8, 7, 3, 2, 1, 4)):  # by alpha, rate and method
        tree.write(run, [{"global-on-global": [(right, 10)]}])
    tree.change(report=ALL_STATISTICS, protocols=("global-on-global",))
    tree.change_report(statistics=("difference",), best_over=(rate,))
    result = tree.data.statistics.query("statistic == 'difference'").set_index([alpha, rate])["mean"]
    expected = {("0.1", "0.01"): -20, ("0.1", "0.05"): -10, ("0.5", "0.01"): -10, ("0.5", "0.05"): 10}
    assert result.to_dict() == pytest.approx(expected)
    text = tree.render_markdown()
    assert "to the best fedavg at the same grid point are paired" in text


def test_statistics_csv_is_written_and_verified_with_tables(two: Tree) -> None:
    contents.write_report_files(contents.build_table_files(two.data))
    path = Path("results/tables/statistics.csv")
    written = pd.read_csv(path)
    assert set(written["statistic"]) == {*statistics.FAIRNESS_COLUMNS}, "the runs have no class counts"
    contents.require_current_tables(two.data, path.name)
    path.write_bytes(path.read_bytes().replace(b"12.5", b"12.6"))
    with pytest.raises(ArtifactError, match=r"statistics.csv does not match the runs of params.yaml"):
        contents.require_current_tables(two.data, path.name)
