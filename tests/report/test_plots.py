"""The numbers of DVC's plots, on trees whose answers are easy to check by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fedpipe import artifacts
from fedpipe.report import plots
from fedpipe.stages import report
from tests.report.conftest import PARTITION


def test_learning_curves_name_their_lines(two: Any) -> None:
    frame = plots.learning(two.plan)
    assert list(frame.columns) == ["line", "algorithm", "protocol", "round", "mean", "std", "seeds"]
    assert list(frame["line"].unique()) == ["fedavg", "local"]
    own = frame[(frame["line"] == "fedavg") & (frame["protocol"] == "global-on-global")]
    assert list(own["mean"]) == pytest.approx([25.0, 60.0, 70.0])


def test_lines_of_a_grid_name_their_point(make: Any) -> None:
    tree = make(["fedavg"], seeds=(0,), grid={"partition.alpha": [0.1, 1.0]})
    for run in range(2):
        tree.write(run, [{"global-on-global": [(run + 1, 10)]}] * 3)
    assert list(plots.learning(tree.plan)["line"].unique()) == ["fedavg (alpha=0.1)", "fedavg (alpha=1.0)"]


def test_clients_are_those_with_test_samples_in_the_last_round(two: Any) -> None:
    frame = plots.clients(two.plan)
    first = frame[(frame["line"] == "fedavg") & (frame["seed"] == 0) & (frame["protocol"] == "personal-on-local")]
    assert first[["client", "samples", "accuracy"]].to_numpy().tolist() == [[0, 2, 50.0], [1, 8, 50.0]]
    second = frame[(frame["line"] == "fedavg") & (frame["seed"] == 1) & (frame["protocol"] == "personal-on-local")]
    assert list(second["accuracy"]) == [100.0, 50.0]


def test_cells_of_the_matrices_are_the_last_measured_ones(two: Any) -> None:
    for run, measured in enumerate(({"SL": 0.1, "CR": 0.2}, None, None, None)):
        two.write_matrices(run, measured)
    frame = plots.cells(two.plan)
    assert list(frame.columns) == ["line", "matrix", "row", "column", "value"]
    assert len(frame) == 2 * 4
    assert set(frame["line"]) == {"fedavg"}
    assert list(frame[frame["matrix"] == "SL"]["value"]) == pytest.approx([0.3] * 4)


def test_partitions_tell_samples_of_clients_and_classes(two: Any) -> None:
    for run in range(4):
        two.write_matrices(run, None)
    dealt = {"sample": [0, 1, 2, 3, 4], "client": [0, 0, 1, 1, 1], "label": [0, 0, 0, 1, 1]}
    split = ["train", "train", "train", "train", "test"]
    two.write_table(artifacts.assignment_file(PARTITION), pa.table(dealt | {"split": split}), "assignment.json")
    report.write(report.plots(two.plan))
    assert Path("results/plots/partition.csv").read_text().splitlines() == [
        "partition,client,class,samples",
        '"digits (official split), 2 clients, partition dirichlet (alpha=0.3), seed 0",0,0,2',
        '"digits (official split), 2 clients, partition dirichlet (alpha=0.3), seed 0",1,0,1',
        '"digits (official split), 2 clients, partition dirichlet (alpha=0.3), seed 0",1,1,1',
    ]
    assert Path("results/plots/matrices.csv").read_text() == "line,matrix,row,column,value\n"
    assert len(Path("results/plots/clients.csv").read_text().splitlines()) == 1 + 2 * 2 + 2 * 2
