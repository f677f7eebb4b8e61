"""A run resumes only with the data and the partition of its earlier rounds."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import layout, packing
from fedpipe.core.storage.files import (
    compute_file_sha256,
    read_json,
    read_parquet,
    read_pt,
    write_json,
    write_parquet,
    write_pt,
)
from fedpipe.data import store
from fedpipe.data.assignment import compute_assignment_sha256
from fedpipe.planning import download, partition
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies
from tests.errors import rejects
from tests.small_studies import run_command


@pytest.fixture
def study_plan() -> NewPlan:
    """A study with one run, with three of four rounds complete."""
    plan = studies.prepare(studies.settings(study={"seeds": [0]}))
    run_command("segment", str(plan.runs[0].path), "--stop", "3")
    return plan


def write_other_partition(plan: NewPlan) -> Path:
    """Replace the run's assignment, with a matching manifest."""
    path = layout.get_assignment_path(plan.runs[0].partition)
    table = read_parquet(path)
    split = table["split"].to_numpy(zero_copy_only=False).copy()
    split[np.flatnonzero(split == "test")[0]] = "train"
    changed_table = table.set_column(table.column_names.index("split"), "split", pa.array(split))
    manifest = read_json(path.with_suffix(".json"))
    write_json(path.with_suffix(".json"), manifest | {path.name: write_parquet(path, changed_table)})
    return path


def write_other_dataset(plan: NewPlan) -> Path:
    """Replace the run's data set, with a matching manifest."""
    path = layout.get_dataset_path(plan.runs[0].dataset)
    tree = {name: value.clone() for name, value in read_pt(path).items()}
    tree["x"][0, 0, 0, 0] += 0.5
    manifest = read_json(path.with_suffix(".json"))
    write_json(path.with_suffix(".json"), manifest | {path.name: write_pt(path, tree)})
    return path


def test_rounds_record_sha256_of_samples_and_assignment(study_plan: NewPlan) -> None:
    (run,) = study_plan.runs
    data, partition_path = layout.get_dataset_path(run.dataset), layout.get_assignment_path(run.partition)
    expected = {
        "data set": store.compute_samples_sha256(store.load_samples(data)),
        "partition": compute_assignment_sha256(read_parquet(partition_path)),
    }
    for number in range(4):
        assert read_json(run.files.get_round_files(number).complete_states_marker)["trained_on"] == expected
    assert expected["data set"] == yaml.safe_load((run.path / "run.yaml").read_text())["dataset"]["sha256"]


@pytest.mark.parametrize(("change", "name"), [(write_other_partition, "partition"), (write_other_dataset, "data set")])
def test_run_commands_reject_changed_data(study_plan: NewPlan, change: Any, name: str) -> None:
    (run,) = study_plan.runs
    path = change(study_plan)
    bits_before = studies.hash_results(run.path)
    steps = [
        ("segment", str(run.path), "--stop", "4"),
        ("segment", str(run.path), "--stop", "3"),
        ("train", str(run.path), "--round", "4", "--block", "0", "--size", "5"),
        ("evaluate", str(run.path), "--round", "3"),
    ]
    for step in steps:
        with pytest.raises(ArtifactError) as error:
            run_command(*step)
        message = str(error.value)
        assert message.startswith(
            f"{run.path}: {path} has changed since round 0. The content of the {name} has the SHA-"
        )
        assert f"delete {run.path} and type `fedpipe run`" in message
        assert "\n" not in message
    assert studies.hash_results(run.path) == bits_before


def test_aggregate_rejects_changed_partition() -> None:
    (run,) = (plan := studies.prepare(studies.settings())).runs
    run_command("initialize", str(run.path))
    run_command("train", str(run.path), "--round", "1", "--block", "0", "--size", "5")
    write_other_partition(plan)
    with pytest.raises(ArtifactError, match=r"has changed since round 0\. The content of the partition"):
        run_command("aggregate", str(run.path), "--round", "1", "--blocks", "1")


def test_resumed_run_rejects_later_rounds_of_other_data(study_plan: NewPlan) -> None:
    """A kill may leave complete rounds of an earlier run in the folder of a new run."""
    (run,) = study_plan.runs
    files = run.files
    copied_folder = Path("old")
    shutil.copytree(files.path, copied_folder)
    write_other_partition(study_plan)
    studies.delete_rounds(files.path)
    run_command("segment", str(run.path), "--stop", "1")
    packing.unpack_folder(files.rounds_folder)
    packing.unpack_folder(copied_folder / "rounds")
    for number in ("0002", "0003"):
        shutil.copytree(copied_folder / "rounds" / number, files.rounds_folder / number)
    with pytest.raises(ArtifactError, match=r"has changed since round 3\. The content of the partition"):
        run_command("segment", str(run.path), "--stop", "4")


def test_run_resumes_with_regenerated_data(study_plan: NewPlan) -> None:
    (run,) = study_plan.runs
    data, partition_path = layout.get_dataset_path(run.dataset), layout.get_assignment_path(run.partition)
    for path in (data, partition_path):
        path.unlink()
        path.with_suffix(".json").unlink()
    download.download_dataset(run.dataset)
    partition.partition_dataset(run.partition)
    table, manifest = pq.read_table(partition_path), read_json(partition_path.with_suffix(".json"))
    pq.write_table(table, partition_path, compression="gzip")  # another version of pyarrow may write other bytes
    write_json(
        partition_path.with_suffix(".json"), manifest | {partition_path.name: compute_file_sha256(partition_path)}
    )
    tree, manifest = dict(read_pt(data)), read_json(data.with_suffix(".json"))
    bits_before = compute_file_sha256(data)
    torch.save({name: value.clone() for name, value in tree.items()}, data)
    assert compute_file_sha256(data) != bits_before
    write_json(data.with_suffix(".json"), manifest | {data.name: compute_file_sha256(data)})
    run_command("segment", str(run.path), "--stop", "4")
    assert run.files.list_complete_rounds() == [0, 1, 2, 3, 4]


# -- settings that the plan writes for stages --------------------------------------------------------------------------


def test_partition_rejects_edited_settings() -> None:
    (key,) = studies.prepare(studies.settings()).partitions
    path = layout.get_assignment_path(key)
    settings_path = path.with_name("partition.yaml")
    original_text = settings_path.read_text()
    path.unlink()
    for edited_text, message in (
        (original_text.replace("alpha: 0.3", "alpha: 30.0"), "was edited"),
        (original_text.replace("seed: 0", "seed: 1"), "was edited"),
        (original_text.replace("clients: 10", "clients: 9"), "was edited"),
        ("[]", "is damaged ("),
        ("a: [", "is damaged ("),
    ):
        assert edited_text != original_text
        settings_path.write_text(edited_text)
        with rejects(f"{settings_path} {message} ... `fedpipe plan`", ArtifactError):
            run_command("partition", key)
        assert not path.exists()
    run_command("plan")
    assert settings_path.read_text() == original_text
    run_command("partition", key)
    assert path.is_file()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "imdb"}, "was edited"),
        ({"name": "npz", "path": "own.npz"}, "is damaged ("),
        ({"name": "digts"}, "is damaged (dataset.name: unknown data set 'digts'. Did you mean 'digits'?)"),
        ([], "is damaged ("),
    ],
    ids=str,
)
def test_download_rejects_edited_settings(settings: Any, message: str) -> None:
    name = studies.prepare(studies.settings()).runs[0].dataset
    path = store.get_dataset_settings_path(name)
    bits_before = studies.hash_results(Path("results/data"))
    path.write_text(yaml.safe_dump(settings))
    with rejects(f"{path} {message}", ArtifactError):
        run_command("download", name)
    assert studies.hash_results(Path("results/data")) == bits_before
    path.write_text(yaml.safe_dump({"name": "digits", "mirror": "elsewhere"}))
    run_command("download", name)
