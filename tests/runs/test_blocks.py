"""`aggregate` accepts only blocks of its run and round."""

import shutil

import pytest
import torch

from fedpipe.core.storage.files import read_pt, write_pt
from fedpipe.core.storage.layout import RunFiles
from tests import small_studies as studies
from tests.small_studies import RunFedpipe


@pytest.fixture
def blocks(run_fedpipe: RunFedpipe) -> tuple[RunFiles, RunFiles]:
    """Two runs with the same participants, each with one block in round 1."""
    params = studies.settings(("fedavg", "fedprox"), 2, federation={"participation": 1.0})
    params["algorithms"]["fedprox"] = {"mu": 5.0}
    plan = studies.prepare(params)
    for run in plan.runs:
        assert run_fedpipe("initialize", str(run.path))[0] == 0
        train = ("train", str(run.path), "--round", "1", "--block", "0", "--size", "10")
        assert run_fedpipe(*train)[0] == 0
    first_files, second_files = (run.files for run in plan.runs)
    return first_files, second_files


def test_aggregate_rejects_block_of_another_run(blocks: tuple[RunFiles, RunFiles], run_fedpipe: RunFedpipe) -> None:
    first_files, second_files = (files.get_round_files(1) for files in blocks)
    original_bytes = first_files.get_block_uploads_path(0).read_bytes()
    shutil.copy(second_files.get_block_uploads_path(0), first_files.get_block_uploads_path(0))
    aggregate = ("aggregate", str(blocks[0].path), "--round", "1", "--blocks", "1")
    status, _, message = run_fedpipe(*aggregate)
    assert status == 2
    assert message.startswith(
        f"fedpipe: {first_files.get_block_uploads_path(0)} belongs to round 1 of run {blocks[1].path.name}"
    )
    assert f"round 1 of run {blocks[0].path.name}." in message
    assert not first_files.server_state.exists()
    assert not first_files.complete_states_marker.exists()
    first_files.get_block_uploads_path(0).write_bytes(original_bytes)
    assert run_fedpipe(*aggregate) == (0, "", "")
    assert first_files.complete_states_marker.exists()


def test_aggregate_rejects_block_of_another_round(blocks: tuple[RunFiles, RunFiles], run_fedpipe: RunFedpipe) -> None:
    files, path = blocks[0], str(blocks[0].path)
    round_1_bytes = files.get_round_files(1).get_block_uploads_path(0).read_bytes()
    assert run_fedpipe("aggregate", path, "--round", "1", "--blocks", "1")[0] == 0
    assert run_fedpipe("evaluate", path, "--round", "1")[0] == 0
    files.get_round_files(2).path.mkdir()
    files.get_round_files(2).get_block_uploads_path(0).write_bytes(round_1_bytes)
    status, _, message = run_fedpipe("aggregate", path, "--round", "2", "--blocks", "1")
    assert status == 2
    path = files.get_round_files(2).get_block_uploads_path(0)
    assert f"{path} belongs to round 1 of run {files.path.name} instead of round 2" in message
    assert not files.get_round_files(2).server_state.exists()


@pytest.mark.parametrize("problem", ["missing", "repeated"])
def test_aggregate_requires_each_participant_once(
    problem: str, blocks: tuple[RunFiles, RunFiles], run_fedpipe: RunFedpipe
) -> None:
    """Blocks of another size are left after a change of `execution.clients_per_job`."""
    files, path = blocks[0].get_round_files(1), str(blocks[0].path)
    first, second = files.get_block_uploads_path(0), files.get_block_uploads_path(1)
    if problem == "repeated":
        shutil.copy(first, second)
    else:
        assert run_fedpipe("train", path, "--round", "1", "--block", "0", "--size", "4")[0] == 0
    count = "2" if problem == "repeated" else "1"
    status, _, message = run_fedpipe("aggregate", path, "--round", "1", "--blocks", count)
    assert status == 2
    clients = [*range(10)] * 2 if problem == "repeated" else [*range(4)]
    assert message.startswith(f"fedpipe: {files.path}: its blocks contain the clients {clients} instead of [0, 1, 2, ")
    assert message.endswith("Delete the folder and run again.\n")
    assert not files.server_state.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: {name: value for name, value in tree.items() if name != "run"},  # as fedpipe 0.1.0 wrote it
        lambda tree: {**tree, "round": torch.tensor([1, 2])},
        lambda tree: {**tree, "made_by": torch.tensor([255], dtype=torch.uint8)},
        lambda tree: {**tree, "ids": torch.arange(100)},
        lambda tree: {**tree, "uploads": torch.zeros(1)},
        lambda tree: {"server": tree},
    ],
)
def test_aggregate_rejects_invalid_block(change, blocks: tuple[RunFiles, RunFiles], run_fedpipe: RunFedpipe) -> None:
    path = blocks[0].get_round_files(1).get_block_uploads_path(0)
    write_pt(path, change(read_pt(path)))
    status, _, message = run_fedpipe("aggregate", str(blocks[0].path), "--round", "1", "--blocks", "1")
    assert status == 2
    assert message.startswith(f"fedpipe: {path} is not a block of clients")
