"""Updates that are not finite are excluded from the aggregation, recorded and reported. The run continues."""

from dataclasses import dataclass

import pytest
import torch

from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.scaffold import Scaffold
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.storage import files
from fedpipe.engine import replay
from fedpipe.engine.run import Run
from fedpipe.report import tables
from fedpipe.report.data import StudyData
from tests import small_studies as studies

ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Faulty(Scaffold):
    """SCAFFOLD whose larger clients upload NaN from round ``begins`` on."""

    size: int = 100
    begins: int = 2

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        bad = (info.size >= self.size) & (info.round >= self.begins)
        return super().start(state, download, info) | {"bad": bad}

    def upload(self, client: State) -> State:
        upload = super().upload(client)
        factor = torch.where(client["bad"], torch.nan, 1.0)
        return upload | {"model": upload["model"] * factor}


def run_studies(**faults: int) -> tuple[dict, Run]:
    protocols = {"protocols": ["personal-on-local", "trained-on-local", "kept-on-local"]}
    params = studies.settings(rounds=ROUNDS, evaluation=protocols)
    params["algorithms"] = {"faulty": {"algorithm": f"{__name__}.Faulty", **faults}, "fedavg": {}}
    params["study"]["algorithms"] = ["faulty", "fedavg"]
    plan = studies.prepare(params)
    return plan, studies.finish_study(plan)[0]


def test_aggregation_ignores_failed_updates() -> None:
    _, run = run_studies(size=150)
    sizes, previous_participants = run.clients.sizes, run.select_participants(1)
    ids = run.select_participants(2)
    failed_clients = [client for client in ids if sizes[client] >= 150]
    finite_clients = [client for client in ids if sizes[client] < 150]
    assert failed_clients
    assert finite_clients

    table_row_keys = files.read_parquet(run.files.get_round_files(2).participants).to_pylist()
    assert [row["client"] for row in table_row_keys] == ids
    assert [row["client"] for row in table_row_keys if not row["finite"]] == failed_clients
    total = sum(int(sizes[client]) for client in finite_clients)
    weights = [sizes[client] / total if client in finite_clients else 0 for client in ids]
    assert [row["weight"] for row in table_row_keys] == pytest.approx(weights, rel=1e-15)

    block = run.train(2, ids)
    finite_rows = [row for row, client in enumerate(ids) if client in finite_clients]
    uploads = Uploads(
        finite_clients, [int(sizes[client]) for client in finite_clients], [block.uploads[row] for row in finite_rows]
    )
    expected = run.algorithm.aggregate(run.load_server_state(1), uploads)
    for name, value in expected["model"].items():
        assert torch.equal(run.load_server_state(2)["model"][name], value)
        assert value.isfinite().all()

    last_rounds = files.read_json(run.files.get_round_files(2).complete_states_marker)["last"]
    assert [last_rounds[client] for client in failed_clients] == [
        1 if client in previous_participants else -1 for client in failed_clients
    ]
    assert all(last_rounds[client] == 2 for client in finite_clients)
    trained, state = (
        files.read_parquet(path)
        for path in (run.files.get_round_files(2).trained_accuracies, run.files.get_round_files(2).kept_accuracies)
    )
    assert trained["client"].to_pylist() == ids, "trained accuracies should include failed updates"
    assert state["client"].to_pylist() == finite_clients


def test_round_with_only_failed_updates_keeps_server_state() -> None:
    plan, run = run_studies(size=1)
    assert files.compute_file_sha256(run.files.get_round_files(2).server_state) == files.compute_file_sha256(
        run.files.get_round_files(1).server_state
    )
    left_out = files.read_parquet(run.files.list_merged_files()[-1].rounds)["left_out"].to_pylist()
    assert left_out == [0, 5, 5]
    divergence_by_cell = StudyData(plan).divergence_by_cell
    assert divergence_by_cell["algorithm"].tolist() == ["faulty", "fedavg"]
    assert divergence_by_cell["left_out"].tolist() == [10, 0]
    assert divergence_by_cell["diverged"].tolist() == [2, 0]  # the first round without finite updates
    table = StudyData(plan).score_table
    text = tables.render_markdown_table(StudyData(plan))
    assert "faulty: 10 updates were not finite and were omitted. 1 of 1 run diverged, first in round 2" in text
    assert "fedavg: " not in text
    assert table[table["algorithm"] == "faulty"]["mean"].notna().all()


def test_single_rounds_ignore_same_failed_updates(tmp_path) -> None:
    plan, run = run_studies(size=150)
    expected = files.compute_file_sha256(run.files.get_round_files(2).server_state)
    reopened_run = studies.open_runs(plan)[0]
    ids = reopened_run.select_participants(2)
    reopened_run.aggregate(2, [reopened_run.train(2, ids[:2]), reopened_run.train(2, ids[2:])])
    assert files.compute_file_sha256(run.files.get_round_files(2).server_state) == expected


def test_diverged_run_evaluates_all_participants_and_is_not_best() -> None:
    params = studies.settings(evaluation={"protocols": ["trained-on-local"]})
    params["study"]["grid"] = {"federation.learning_rate": [0.1, 1e12]}
    params["report"] = {"best_over": ["federation.learning_rate"]}
    plan = studies.prepare(params)
    healthy, diverged = studies.open_runs(plan)
    for run in (healthy, diverged):
        studies.finish_run(run, 4)
        trained = files.read_parquet(run.files.get_round_files(4).trained_accuracies).to_pandas()
        assert trained["client"].tolist() == run.select_participants(4)
        comparison = replay.replay_round(run, 4)
        assert not comparison.differing_files
    assert not files.read_parquet(diverged.files.get_round_files(4).participants).to_pandas()["finite"].all()
    assert trained["loss"].isna().any()
    assert StudyData(plan).table_row_keys == [("fedavg", "0.1")]
