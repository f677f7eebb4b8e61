"""Accuracies by run, protocol, round and average, as exact numbers."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.report import results
from tests.report.conftest import select_rows


def select_accuracies(frame, **values):
    """Return the accuracies in the rows with these values."""
    return select_rows(frame, **values)["accuracy"].tolist()


def test_accuracies_average_samples_clients_and_worst_tenth(two):
    frame = two.data.accuracies
    columns = {"algorithm": "fedavg", "seed": 0, "protocol": "personal-on-local"}
    assert select_accuracies(frame, **columns, average="sample") == [0.3, 0.6, 0.5]
    assert select_accuracies(frame, **columns, average="client") == [0.375, 0.75, 0.5]
    assert select_accuracies(frame, **columns, average="worst") == [0.25, 0.5, 0.5]


def test_short_names_of_grid_are_no_heads_of_other_columns():
    names = ["partition.seed", "algorithms.own.rank", "partition.alpha", "algorithms.feddyn.alpha"]
    assert results.shorten_dotted_keys(names) == {
        "partition.seed": "partition.seed",
        "algorithms.own.rank": "rank",
        "partition.alpha": "partition.alpha",
        "algorithms.feddyn.alpha": "algorithms.feddyn.alpha",
    }


def test_global_accuracy_is_equal_for_all_averages(two):
    frame = two.data.accuracies
    for average in results.AVERAGES:
        columns = {"algorithm": "fedavg", "seed": 1, "protocol": "global-on-global", "average": average}
        assert select_accuracies(frame, **columns) == [0.3, 0.4, 0.8]


def test_worst_tenth_of_20_clients_averages_two_clients(make):
    tree = make(["fedavg"], seeds=[0])
    tree.write(0, [{"personal-on-local": [(right, 20) for right in range(19, -1, -1)]}])
    assert select_accuracies(tree.data.accuracies, average="worst") == [0.025]  # of 0/20 and 1/20


@pytest.mark.parametrize(("round", "expected"), [("last", [0.6, 0.8]), ("best", [0.8, 0.8]), ("mean-last", [0.7, 0.6])])
def test_reported_accuracies_use_chosen_round(two, round, expected):
    frame = results.compute_reported_scores(two.data.scores, round, last_k=2)
    selected = frame.query("protocol == 'global-on-global' and average == 'sample'")
    assert selected["score"].tolist() == pytest.approx(expected, abs=1e-15)


def test_mean_last_averages_all_rounds_if_last_k_is_larger(two):
    frame = results.compute_reported_scores(two.data.scores, "mean-last", last_k=9)
    selected = frame.query("algorithm == 'fedavg' and protocol == 'global-on-global' and average == 'sample'")
    assert selected["score"].tolist() == pytest.approx([1.6 / 3, 0.5], abs=1e-15)


def test_traffic_is_averaged_and_time_is_summed_over_rounds(two):
    assert two.data.mean_traffic["bytes_down"].tolist() == [200, 400, 200, 200]
    assert two.data.mean_traffic["bytes_up"].tolist() == [200, 400, 200, 200]
    assert two.data.total_times["train"].tolist() == [3, 9, 3, 3]


def test_incomplete_run_raises_error_with_missing_file(make: Callable):
    tree = make(["fedavg"], seeds=[0])
    with pytest.raises(ArtifactError, match=r"fedavg/000000000000/joined/0003/joined.json is missing"):
        _ = tree.data.accuracies


def test_describe_grid_point_shortens_unambiguous_keys():
    assert results.describe_grid_point({"partition.alpha": "0.1", "model.hidden": "64"}) == "alpha=0.1, hidden=64"
    point = {"algorithms.feddw.mu": "1", "algorithms.fedprox.mu": ""}
    assert results.describe_grid_point(point) == "algorithms.feddw.mu=1"
    assert results.describe_grid_point({}) == ""
    assert results.describe_grid_point({"algorithms.prox.algorithm": "fedprox"}) == "algorithms.prox.algorithm=fedprox"


def test_grid_axis_with_name_of_recorded_column_is_rejected(make: Callable):
    tree = make(["fedavg"], seeds=[0], grid={"left_out": ["all"]})
    tree.write(0, [{"global-on-global": [(1, 2)]}])
    with pytest.raises(SettingsError, match=r"^study.grid.left_out: fedavg records "):
        _ = tree.data.round_summaries


@pytest.mark.parametrize("name", ["metrics", "rounds"])
def test_merged_table_with_flipped_bit_is_rejected(make: Callable, name: str):
    tree = make(["fedavg"], seeds=[0])
    tree.write(0, [{"global-on-global": [(5, 10)]}])
    path = getattr(tree.runs[0].merged_files, name)
    content = path.read_bytes()
    for position in range(0, len(content), len(content) // 7):
        damaged_content = bytearray(content)
        damaged_content[position] ^= 1
        path.write_bytes(damaged_content)
        with pytest.raises(ArtifactError, match=rf"^{path} is damaged: "):
            _ = tree.data.score_table


def test_scores_of_many_runs_equal_scores_of_single_runs_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of some runs are sorted by group. pandas rounds differently for sorted groups."""
    monkeypatch.setattr(results, "RUNS_PER_CALL", 4)  # so that there are six calls, the last one with one run
    rng, frames = np.random.default_rng(0), []
    for clients, protocols in [(1, "a"), (10, "a"), (33, "ba"), (33, "a"), (150, "ab"), (10, "ba"), (10, "a")] * 3:
        rows = [(round, client, name) for round in range(1, 9) for name in protocols for client in range(clients)]
        frame = pd.DataFrame(rows, columns=["round", "client", "protocol"])
        total = rng.integers(0, 50, len(frame))
        frames.append(frame.assign(total=total, correct=(total * rng.random(len(frame))).astype(int)))
    for frame, scores in zip(frames, results.compute_scores_of_runs(frames, ["accuracy"]), strict=True):
        expected = results.compute_scores(frame, ["accuracy"])
        pd.testing.assert_frame_equal(scores.reset_index(drop=True), expected, check_exact=True)
        tested = frame[frame["total"] > 0]
        by_round = (tested["correct"] / tested["total"]).groupby([tested["protocol"], tested["round"]])
        worst = by_round.agg(lambda values: np.sort(values)[: max(1, len(values) // 10)].mean())
        assert (expected[expected["average"] == "worst"]["score"].to_numpy() == worst.to_numpy()).all()
