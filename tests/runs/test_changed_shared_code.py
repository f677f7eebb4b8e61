"""A run resumes with other shared code only if this code reproduces its last round."""

import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from fedpipe.core.components import code_digest
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive, files
from fedpipe.core.tensors import Tensors
from fedpipe.engine import collect, replay
from fedpipe.engine.clients import optimizers
from fedpipe.engine.run import Run
from fedpipe.planning import code_changes
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies

ROUNDS = 2


def start_study(label: str = "fedper", keep: str | int = "last", **sections: Any) -> NewPlan:
    """Run two rounds of a study. Return its plan."""
    plan = studies.prepare(studies.settings((label,), ROUNDS, artifacts={"keep_models": keep}, **sections))
    list(studies.open_runs(plan)[0].run_segment(ROUNDS))
    return plan


def replace_shared_code(monkeypatch: pytest.MonkeyPatch, rate: float = 1.0) -> None:
    """Replace the shared code by one with another digest, whose SGD multiplies the step by ``rate``."""
    monkeypatch.setattr(code_digest, "compute_shared_code_digest", lambda: "f00d" * 3)
    update = optimizers.SGD.update_parameters

    def update_with_rate(
        self: Any, parameters: Tensors, gradient: Tensors, slots: Any, can_overwrite: bool = False
    ) -> Any:
        return update(self, parameters, gradient * rate, slots, can_overwrite)

    monkeypatch.setattr(optimizers.SGD, "update_parameters", update_with_rate)


def read_records(run: Run) -> list[dict[str, Any]]:
    return [files.read_json(path) for path in sorted(run.files.path.glob("continued/*.json"))]


@pytest.mark.parametrize("label", ["scaffold", "fedavg", "fedfomo", "local", "pfps_lwc"])
def test_run_resumes_if_changed_code_reproduces_last_round(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    plan = start_study(label)
    expected = studies.hash_results(Path())
    replace_shared_code(monkeypatch)
    run = studies.open_runs(plan)[0]
    assert list(run.run_segment(ROUNDS + 1)) == [ROUNDS, ROUNDS + 1]
    (record,) = read_records(run)
    assert (record["round"], record["agrees"], record["distance"]) == (ROUNDS, "bits", 0.0)
    assert record["now"]["shared"] == "f00d" * 3 != record["made_by"][0]["shared"]
    assert run.checkpoint.read_state_json(ROUNDS + 1)["made_by"][0]["shared"] == "f00d" * 3
    changed_names = {name for name, sha256 in expected.items() if studies.hash_results(Path()).get(name) != sha256}
    assert all("0001/" in name and name.endswith(".pt") for name in changed_names), "only states of round 1 are pruned"


@pytest.mark.parametrize("label", ["fedper", "local"])
def test_resumed_run_rejects_changed_code_with_other_results(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    plan = start_study(label)
    expected = studies.hash_results(Path())
    replace_shared_code(monkeypatch, rate=1.01)
    run = studies.open_runs(plan)[0]
    file = "server.pt" if label == "fedper" else "clients.pt"
    message = (
        rf"^{run.files.path} can't be resumed.* round 2, .*bits differ in .*{file}.* \(states by 0\.0\d+ of .*`rm -r "
    )
    with pytest.raises(ArtifactError, match=message):
        list(run.run_segment(ROUNDS + 1))
    assert studies.hash_results(Path()) == expected
    assert not read_records(run)


def test_finished_run_ignores_changed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = start_study()
    replace_shared_code(monkeypatch, rate=2.0)
    assert list(studies.open_runs(plan)[0].run_segment(ROUNDS)) == [ROUNDS]


def test_resumed_run_replays_initial_state(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = studies.prepare(studies.settings(("fedper",), ROUNDS))
    run = studies.open_runs(plan)[0]
    run.write_initial_round()
    replace_shared_code(monkeypatch)
    assert list(studies.open_runs(plan)[0].run_segment(1)) == [0, 1]
    assert [record["round"] for record in read_records(run)] == [0]


def test_single_round_stages_reject_changed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = start_study()
    run = studies.open_runs(plan)[0]
    block = run.train(ROUNDS + 1, run.select_participants(ROUNDS + 1))
    with monkeypatch.context() as patch:
        replace_shared_code(patch, rate=2.0)
        other_run = studies.open_runs(plan)[0]
        for step in (lambda: other_run.train(ROUNDS + 1, [0]), lambda: other_run.aggregate(ROUNDS + 1, [block])):
            with pytest.raises(ArtifactError, match="can't be resumed"):
                step()
    run.aggregate(ROUNDS + 1, [block])
    replace_shared_code(monkeypatch, rate=2.0)
    with pytest.raises(ArtifactError, match="can't be resumed"):
        studies.open_runs(plan)[0].evaluate(ROUNDS + 1)


def test_round_records_code_of_blocks_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = start_study()
    run = studies.open_runs(plan)[0]
    block = run.train(ROUNDS + 1, run.select_participants(ROUNDS + 1))
    replace_shared_code(monkeypatch)
    other_run = studies.open_runs(plan)[0]
    other_run.aggregate(ROUNDS + 1, [block])
    shared = [made_by["shared"] for made_by in other_run.checkpoint.read_state_json(ROUNDS + 1)["made_by"]]
    assert shared == [block.made_by["shared"], "f00d" * 3]


def test_reproduced_round_is_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = start_study()
    replace_shared_code(monkeypatch)
    run = studies.open_runs(plan)[0]
    replay.require_reproducible_round(run, ROUNDS)
    monkeypatch.setattr(replay, "replay_round", lambda *_: pytest.fail("replayed again"))
    replay.require_reproducible_round(run, ROUNDS)


def test_replay_needs_previous_state(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = start_study()
    run = studies.open_runs(plan)[0]
    run.files.get_round_files(ROUNDS - 1).server_state.unlink()
    replace_shared_code(monkeypatch)
    with pytest.raises(ArtifactError, match=r"can't be resumed.*states before it are missing"):
        replay.require_reproducible_round(run, ROUNDS)


@pytest.mark.parametrize(("rate", "is_reproduced"), [(1.0, True), (1 + 1e-5, True), (1.01, False)])
def test_replay_on_another_cpu_must_match_within_rounding(
    monkeypatch: pytest.MonkeyPatch, rate: float, is_reproduced: bool
) -> None:
    """Kernels of another CPU round differently. A factor near 1 simulates them."""
    plan = start_study()
    replace_shared_code(monkeypatch, rate)
    run = studies.open_runs(plan)[0]
    comparison = replay.replay_round(run, ROUNDS)
    assert bool(comparison.differing_files) == (rate != 1.0)
    assert comparison.has_same_environment
    assert comparison.is_reproduced("float32") == (rate == 1.0), "bits must be equal on the same CPU"
    monkeypatch.setattr(Run, "get_environment", lambda self: comparison.replayed_by | {"device": "another CPU"})
    if not is_reproduced:
        with pytest.raises(ArtifactError, match="can't be resumed"):
            replay.require_reproducible_round(run, ROUNDS)
        return
    replay.require_reproducible_round(run, ROUNDS)
    (record,) = read_records(run)
    assert record["agrees"] == ("bits" if rate == 1.0 else "within rounding")
    assert record["distance"] == pytest.approx(rate - 1, abs=1e-5)
    assert record["now"]["device"] == "another CPU"


def test_stack_replay_matches_loop_within_rounding() -> None:
    """A stack replays a round of the loop with other bits and close values."""
    plan = start_study(federation={"learning_rate": 0.1})
    comparison = replay.replay_round(studies.open_runs(plan, stack=3)[0], ROUNDS)
    assert not comparison.has_same_environment
    assert comparison.is_reproduced("float32")
    assert comparison.distance < 1e-4


def test_replay_compares_content_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of fedpipe or Arrow has written other bytes for the same table."""
    with monkeypatch.context() as patch:
        write_table = functools.partial(pq.write_table, compression="zstd")
        patch.setattr(pq, "write_table", write_table)
        plan = start_study()
    run = studies.open_runs(plan)[0]
    assert replay.replay_round(run, ROUNDS).differing_files == []
    round_files = run.files.get_round_files(ROUNDS)
    marker = files.read_json(round_files.marker)
    marker["sha256"]["metrics.parquet"] = files.write_parquet(
        round_files.metrics, files.read_parquet(round_files.metrics).slice(1)
    )
    files.write_json(round_files.marker, marker)
    assert replay.replay_round(run, ROUNDS).differing_files == ["metrics.parquet"]


def test_replay_rejects_nan_or_infinite_difference() -> None:
    first, second = torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([1.0, torch.nan, torch.inf])
    assert replay._compute_squared_distance(first, second) == 0
    assert replay._compute_squared_distance(first, torch.tensor([1.0, 2.0, torch.inf])) != 0
    comparison = replay.Comparison(1, [], {}, ["server.pt"], ["server.pt"], float("inf"))
    assert not comparison.is_reproduced("float32")
    assert re.search("states by inf", comparison.describe_difference())


READS = """
import json
from dataclasses import dataclass
from fedpipe.algorithms.fedavg import FedAvg
FILES = ["prior.json"]

@dataclass(frozen=True)
class Own(FedAvg):
    def aggregate(self, server, uploads):
        with open("prior.json") as stream:
            return {"model": uploads.mean("model") * json.load(stream)["factor"]}
"""


def test_changed_pinned_file_ends_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key depends on the file's content, so results with another content are not recorded."""
    monkeypatch.syspath_prepend(".")
    Path("late_reader.py").write_text(READS)
    Path("prior.json").write_text('{"factor": 1.0}')
    plan = studies.prepare(studies.settings(("own",), 4, algorithms={"own": {"algorithm": "late_reader.Own"}}))
    (run,) = studies.open_runs(plan)
    rounds = run.run_segment(4)
    assert [next(rounds), next(rounds)] == [0, 1]
    Path("prior.json").touch()
    assert next(rounds) == 2, "the content has not changed"
    Path("prior.json").write_text('{"factor": 0.2}')
    with pytest.raises(ArtifactError, match=r"prior\.json has changed since this job began"):
        next(rounds)
    assert run.files.list_complete_rounds() == [0, 1, 2]
    with pytest.raises(ArtifactError, match=r"prior\.json has changed since this job began"):
        run.train(3, run.select_participants(3))  # a job of single rounds, whose block another job aggregates
    Path("prior.json").write_text('{"factor": 1.0}')
    (resumed_run,) = studies.open_runs(plan)
    list(resumed_run.run_segment(4))
    assert resumed_run.files.list_complete_rounds() == [0, 1, 2, 3, 4]
    sys.modules.pop("late_reader")


def test_shared_code_is_read_from_merged_times_without_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pack of a long run is slow to open. It is opened only if the times differ or are damaged."""
    plan = start_study()
    (run,) = studies.open_runs(plan)
    collect.collect_rounds(run.files, ROUNDS, "last")
    with monkeypatch.context() as patch:
        patch.setattr(archive, "_open_pack", lambda _: pytest.fail("the pack was opened"))
        assert [*code_changes.describe_runs_from_other_code(plan)] == []
    (message,) = code_changes.describe_runs_from_other_code(dataclasses.replace(plan, shared="f00d" * 3))
    assert message.startswith("1 of 1 run comes from other shared code")
    run.files.get_merged_files(ROUNDS).times.write_text("{}")
    assert [*code_changes.describe_runs_from_other_code(plan)] == []


def test_edit_of_imported_module_in_linked_folder_does_not_end_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has imported the module, so its numbers do not change."""
    monkeypatch.syspath_prepend(".")
    Path("lab-code").mkdir()
    Path("lab").symlink_to("lab-code")
    source = READS.split("FILES")[0] + "\n@dataclass(frozen=True)\nclass Own(FedAvg):\n    factor: float = 1.0\n"
    Path("lab/linked.py").write_text(source)
    plan = studies.prepare(studies.settings(("own",), 2, algorithms={"own": {"algorithm": "lab.linked.Own"}}))
    rounds = studies.open_runs(plan)[0].run_segment(2)
    assert [next(rounds), next(rounds)] == [0, 1]
    Path("lab/linked.py").write_text(source.replace("1.0", "2.0"))
    assert next(rounds) == 2
    for name in ("lab.linked", "lab"):
        sys.modules.pop(name)
