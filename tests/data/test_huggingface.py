"""Data sets of Hugging Face. The library reads local repositories without a network."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner
from typing_extensions import override

from fedpipe.cli import app
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.data import store
from fedpipe.data.class_names import read_class_names_or_numbers
from fedpipe.data.datasets.huggingface import HuggingFace
from fedpipe.planning import download, planner
from fedpipe.planning.derived_study import DerivedStudy
from fedpipe.report import table_notes
from fedpipe.settings import parser
from tests import small_studies as studies
from tests.data import hub
from tests.data.repositories import encode_image, write_image, write_repository
from tests.errors import rejects
from tests.small_studies import ROOT

pytestmark = pytest.mark.usefixtures("offline")

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
WRITERS = [f"f{number % 4:03}" for number in range(60)]
TEXTS = {"text": ["a b", "b"] * 30, "label": [0, 1] * 30}
HUB_DATASET = {"name": "huggingface", "path": hub.NAME, "split": "pooled", "vocabulary": 50}


def download_and_plan(**dataset: Any) -> planner.NewPlan:
    """Write a study of the repository, run `fedpipe download` and plan."""
    params = studies.settings(
        dataset={"name": "huggingface", "path": "repository", "split": "pooled", **dataset}, federation={"clients": 3}
    ) | {"partition": {"scheme": "natural"} if "client" in dataset else {"scheme": "iid"}}
    if "vocabulary" in dataset:
        params["model"] = {"name": "fasttext"}
    studies.write(params, Path())
    download.download_and_pin_dataset(None, Path("params.yaml"))
    return studies.prepare(planner.loader.read_params(Path("params.yaml")))


def load_samples(plan: planner.NewPlan) -> store.StoredSamples:
    return store.load_samples(layout.get_dataset_path(plan.runs[0].dataset))


def test_huggingface_loads_images_labels_and_writers() -> None:
    import datasets

    columns = {
        "image": [{"bytes": encode_image(pixels), "path": None} for pixels in IMAGES],
        "character": [number % 3 for number in range(60)],
        "writer_id": WRITERS,
        "hsf_id": range(60),
    }
    features = {"image": datasets.Image(), "character": datasets.ClassLabel(names=["a", "b", "c"])}
    write_repository(columns, features=features)
    plan = download_and_plan(input="image", label="character", client="writer_id")
    samples = load_samples(plan)
    assert np.array_equal(samples.x[:, 0].numpy(), IMAGES)
    assert samples.y.tolist() == [number % 3 for number in range(60)]
    assert samples.columns.keys() == {"writer_id"}
    assert read_class_names_or_numbers(plan.runs[0].dataset, 3) == ("a", "b", "c")
    assert samples.columns["writer_id"].names == ("f000", "f001", "f002", "f003")
    before, (key,) = plan.runs[0].key, plan.partitions
    preview = CliRunner().invoke(app.app, ["partition", "--preview"], catch_exceptions=False).output
    assert preview.startswith("huggingface repository (pooled split, "), (
        "the preview contains the name of the repository"
    )
    assert table_notes.describe_data_and_partitions(plan).startswith("Data: huggingface repository (pooled split, ")
    assert plan.build_partition_report_labels(key)["data set"] == "huggingface repository"
    Path("repository").rename("elsewhere")
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("path: repository", "path: elsewhere"))
    assert planner.make_plan(Path("params.yaml")).runs[0].key == before, (
        "the plan needs only the stored data set, and the path is not in the key"
    )


def test_huggingface_loads_table_with_test_split() -> None:
    columns = {"age": np.arange(60.0), "size": np.arange(60) * 2, "ill": [number % 2 == 0 for number in range(60)]}
    write_repository(columns, tests=15)
    samples = load_samples(download_and_plan(input=["age", "size"], label="ill"))
    rows = np.r_[15:60, 0:15]
    assert np.array_equal(samples.x.numpy(), np.stack([rows, rows * 2], axis=1).astype(np.float32))
    assert samples.y.tolist() == [int(row % 2 == 0) for row in rows]
    assert samples.test.tolist() == [False] * 45 + [True] * 15


def test_huggingface_loads_folder_of_image_files() -> None:
    """The library reads a folder of images as its format imagefolder."""
    for row, pixels in enumerate(IMAGES[:6]):
        write_image(f"repository/train/{'ab'[row % 2]}/{row}.png", pixels)
    plan = download_and_plan()
    samples = load_samples(plan)
    assert np.array_equal(samples.x[:, 0].numpy(), IMAGES[[0, 2, 4, 1, 3, 5]])
    assert samples.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert read_class_names_or_numbers(plan.runs[0].dataset, 2) == ("a", "b")


def test_huggingface_loads_texts_and_rejects_changed_repository() -> None:
    write_repository(TEXTS)
    plan = download_and_plan(vocabulary=50, length=3)
    assert load_samples(plan).x[:2].tolist() == [[1, 5, 4], [1, 4, 0]]
    write_repository(TEXTS | {"text": ["a c", "b"] * 30})
    with pytest.raises(ArtifactError, match=r"^dataset\.sha256: [0-9a-f]{64} is declared, but repository has SHA-256"):
        download.download_dataset(plan.runs[0].dataset)


def test_huggingface_config_selects_files_and_changes_key() -> None:
    """A repository with several configurations needs `dataset.config`."""
    for name, label in (("old", 0), ("new", 1)):
        write_repository({"text": ["a b"] * 30, "label": [label] * 30})
        Path("repository/data").rename(f"repository/{name}")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in ("old", "new"))
    Path("repository/README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    plans = {name: download_and_plan(vocabulary=50, length=3, config=name) for name in ("old", "new")}
    assert [load_samples(plan).y.unique().tolist() for plan in plans.values()] == [[0], [1]]
    assert plans["old"].runs[0].key != plans["new"].runs[0].key
    with pytest.raises(ArtifactError, match=r"^dataset\.config: missing for repository\. Use one of: old, new\."):
        download_and_plan(vocabulary=50)
    with rejects("dataset.config: 'odl' is not a ... of repository. Use one of: old, new", ArtifactError):
        download_and_plan(vocabulary=50, config="odl")
    plain = HuggingFace(path="repository", sha256="0" * 64)
    assert "config" not in plain.get_hashed_parameters(), (
        "the key of a study without a configuration equals that of earlier versions"
    )


@dataclass(frozen=True, kw_only=True)
class Reviews(HuggingFace):
    """A custom data set in a repository."""

    path: str = "repository"
    vocabulary: int = 50

    @override
    def find_current_commit(self) -> str:
        return "c0ffee"


@pytest.mark.parametrize("text", [None, "dataset: {name: digits}\n"])
def test_download_of_other_repository_keeps_study_unchanged(text: str | None) -> None:
    write_repository(TEXTS)
    params, name = Path("params.yaml"), f"{__name__}.Reviews"
    if text is not None:
        params.write_text(text)
    message = download.download_and_pin_dataset(name, params)
    assert f"under dataset with name {name}:\n  revision: c0ffee\n" in message
    assert (params.read_text() if params.exists() else None) == text


def run_download(dataset: dict[str, Any], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `fedpipe download` in a new process, because the library reads the hub's address when it is imported."""
    settings = studies.settings(dataset=dataset) | {"partition": {"scheme": "iid"}, "model": {"name": "fasttext"}}
    studies.write(settings, Path())
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "fedpipe", "download"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_download_writes_commit_into_study_and_reads_cache_of_hub_offline() -> None:
    """Without revision or SHA-256, or if the cache lacks declared files, the error names what to do."""
    write_repository(TEXTS)
    with hub.serve_repository(Path("repository")) as address:
        process = run_download(HUB_DATASET, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
        assert f"params.yaml now contains dataset.revision: {hub.COMMIT}." in process.stdout, process.stderr
    declared = planner.loader.read_params(Path("params.yaml"))["dataset"]
    assert declared == HUB_DATASET | {"revision": hub.COMMIT, "sha256": declared["sha256"]}
    (stored,) = Path("results/data").glob("*.pt")
    content = stored.read_bytes()
    shutil.rmtree("results")
    for dataset in (declared, declared | {"length": 3}):
        process = run_download(dataset, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
        assert process.returncode == 0, process.stderr
    assert stored.read_bytes() == content
    assert len([*Path("results/data").glob("*.pt")]) == 2
    shutil.rmtree("results")
    for dataset, problem in (
        (HUB_DATASET, f"dataset.path: {hub.NAME} can't be fetched, because the hub can't be reached."),
        (
            declared | {"sha256": "0" * 64},
            f"dataset.sha256: {'0' * 64} is declared, but the hub's cache has other files",
        ),
    ):
        process = run_download(dataset, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
        assert f"fedpipe: {problem}" in process.stderr
        assert process.returncode == 2


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        ({"path": "flwrlabs/femnist"}, "dataset.path: flwrlabs/femnist can't be fetched ("),
        ({"label": "lable"}, "dataset.label: 'lable' is not a column of repository. Use one of: text, label."),
        ({"client": "writer"}, "dataset.client: 'writer' is not a column of repository. Use one of: text, label."),
        ({"input": "txt"}, "dataset.input: 'txt' is not a column of repository. Use one of: text, label."),
        (
            {"path": "repository/data/train-00000-of-00001.parquet"},
            "dataset.path: repository/data/train-00000-of-00001.parquet can't be fetched ( ... dataset.name parquet",
        ),
    ],
)
def test_huggingface_error_shows_key_and_valid_values(dataset: dict[str, Any], problem: str) -> None:
    write_repository(TEXTS)
    with rejects(problem, ArtifactError):
        download_and_plan(vocabulary=50, **dataset)


def test_test_split_without_train_split_is_rejected() -> None:
    """Its samples would be the training samples."""
    write_repository(TEXTS, tests=15)
    Path("repository/data/train-00000-of-00001.parquet").rename("repository/data/validation-00000-of-00001.parquet")
    with rejects("dataset.path: repository has the splits validation, test. Use a data set with train", ArtifactError):
        download_and_plan(vocabulary=50)


def test_error_without_default_input_column_lists_all_columns() -> None:
    write_repository({"words": ["a b", "b"] * 30, "label": [0, 1] * 30})
    with pytest.raises(ArtifactError, match=r"^dataset\.input: missing, because .* Use one of: words, label\."):
        download_and_plan(vocabulary=50)


def test_repository_description_contains_path_and_revision() -> None:
    dataset = {"name": "huggingface", "path": "flwrlabs/femnist", "sha256": "0" * 64}
    names = [parser.parse_dataset(dataset | {"revision": one}).repository for one in (None, hub.COMMIT, "v1.0")]
    assert names == ["flwrlabs/femnist", f"flwrlabs/femnist at {hub.COMMIT[:12]}", "flwrlabs/femnist at v1.0"]
    assert not parser.parse_dataset({}).repository


@pytest.mark.parametrize(("path", "option"), [("params.yaml", ""), ("studies/a.yaml", " --params studies/a.yaml")])
def test_plan_without_sha256_shows_download_command(path: str, option: str) -> None:
    Path("studies").mkdir()
    settings = studies.settings(dataset={"name": "huggingface", "path": "flwrlabs/femnist"})
    Path(path).write_text(yaml.safe_dump(settings))
    with rejects(f"dataset.sha256: missing for flwrlabs/femnist. Run `fedpipe download{option}`,"):
        planner.make_plan(Path(path))


@pytest.mark.parametrize("has_dry_run", [True, False], ids=["plan", "run"])
def test_download_command_in_error_stores_dataset_of_overridden_column(has_dry_run: bool) -> None:
    """The study lacks the column, so only the study with the overridden column can be stored."""
    write_repository({"text": TEXTS["text"], "kind": TEXTS["label"]})
    dataset = HUB_DATASET | {"path": "repository"}
    settings = studies.settings(dataset=dataset) | {"partition": {"scheme": "iid"}, "model": {"name": "fasttext"}}
    studies.write(settings, Path())

    def plan_with(column: str) -> tuple[str, Path]:
        study = DerivedStudy.from_options(Path("params.yaml"), [f"dataset.label={column}"])
        with pytest.raises(SettingsError) as error:
            study.make_plan("full") if has_dry_run else study.write_study("full")
        return str(error.value), study.path

    for column in ("kinds", "kind"):
        message, path = plan_with(column)
        assert f"Run `fedpipe download --params {path}`" in message
        if column == "kinds":
            with pytest.raises(ArtifactError, match=r"^dataset\.label: 'kinds' .*: text, kind\."):
                download.download_and_pin_dataset(None, path)
    download.download_and_pin_dataset(None, path)
    assert planner.make_plan(path).runs
