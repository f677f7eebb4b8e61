"""Runs with the same seed have equal bits for all numbers of jobs, threads and rounds per job."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.files import write_pt
from fedpipe.engine.stack import schedule
from fedpipe.engine.torch_env import numerics
from tests import small_studies as studies

FAST = ("fedavg", "scaffold", "cwfedavg")
#: All algorithms. The others are slow tests.
ALGORITHMS = studies.mark_others_slow(registry.list_components(component.ALGORITHM), FAST)


@pytest.mark.parametrize("label", ALGORITHMS)
def test_segments_threads_and_single_rounds_have_equal_bits(label: str) -> None:
    protocols = ["global-on-global", "personal-on-local", "trained-on-local", "finetuned-on-local"]
    rounds = 3 if label in FAST else 2
    plan = studies.prepare(studies.settings((label,), rounds, evaluation={"protocols": protocols}))
    studies.require_equal_bits(plan, rounds, size=3)


@pytest.mark.parametrize("label", ["fedavg", "scaffold", "fedala"])
def test_stack_has_equal_bits_in_single_rounds_with_blocks(label: str) -> None:
    plan = studies.prepare(studies.settings((label,), 2))
    run = studies.require_equal_bits(plan, 2, size=3, stack=4)
    sizes = run.clients.sizes
    largest_stack, other_stack = schedule.group_clients_into_stacks(sizes, run.select_participants(1), 4)
    assert len({schedule.count_batches(sizes[client], 40) for client in largest_stack}) > 1, "clients should end apart"
    assert other_stack


def test_client_keeps_its_row_of_stack_in_block_of_one_client() -> None:
    """Batched products round differently in another row."""
    sections = {"model": {"name": "mlp", "hidden": [10, 8]}, "federation": {"batch_size": 7, "participation": 1.0}}
    studies.require_equal_bits(studies.prepare(studies.settings(rounds=2, **sections)), 2, stack=3)


def test_cnn_with_one_participant_has_equal_bits_in_blocks() -> None:
    sections = {"model": {"name": "cnn", "channels": [2, 3], "hidden": 8}, "federation": {"participation": 0.1}}
    studies.require_equal_bits(studies.prepare(studies.settings(rounds=2, **sections)), 2)


def test_seeds_change_partition_model_and_participants() -> None:
    plan = studies.prepare(studies.settings(rounds=1, study={"seeds": [0, 1]}))
    first_run, second_run = studies.open_runs(plan)
    assert plan.runs[0].partition != plan.runs[1].partition
    assert [first_run.select_participants(r) for r in range(1, 9)] != [
        second_run.select_participants(r) for r in range(1, 9)
    ]
    assert not first_run.make_initial_model(0)["head.weight"].equal(second_run.make_initial_model(0)["head.weight"])


def test_fixed_partition_seed_gives_all_seeds_same_partition() -> None:
    plan = studies.prepare(studies.settings(rounds=1, study={"seeds": [0, 1]}, partition={"seed": 7}))
    assert plan.runs[0].partition == plan.runs[1].partition
    assert plan.runs[0].key != plan.runs[1].key


def test_key_ignores_execution_artifacts_report_and_rounds() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"execution": {"rounds_per_job": 1, "clients_per_job": 3}},
        {"artifacts": {"keep_models": "last"}},
        {"report": {"round": "best"}},
        {"federation": {"rounds": 9}},
    ]
    assert len({studies.prepare(studies.settings(**sections)).runs[0].key for sections in changes}) == 1


def test_write_pt_bytes_ignore_file_name_and_strides() -> None:
    values = torch.arange(100.0)
    odd_strides = values[:36].as_strided((4, 1, 3, 3), (9, 1, 3, 1))  # an unusual stride of the axis of size 1
    assert odd_strides.is_contiguous()
    for one, other in ((values[10:20], values[10:20].clone()), (odd_strides, values[:36].reshape(4, 1, 3, 3))):
        assert write_pt(Path("one.pt"), {"a": one}) == write_pt(Path("other.pt"), {"a": other})
        assert Path("one.pt").read_bytes() == Path("other.pt").read_bytes()


def test_opened_run_disables_tf32() -> None:
    """PyTorch's default on a GPU is TF32 for convolutions and recurrent layers."""
    kinds = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    with numerics.preserve_torch_flags():
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        assert [kind.fp32_precision for kind in kinds] == ["tf32"] * 3
        studies.open_runs(studies.prepare(studies.settings(rounds=1)))
        assert "tf32" not in [kind.fp32_precision for kind in kinds]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_device_cuda_without_gpu_is_rejected() -> None:
    plan = studies.prepare(studies.settings(rounds=1))
    with pytest.raises(SettingsError, match=r"^execution\.device: cuda .*no GPU"):
        studies.open_runs(plan, device="cuda")
