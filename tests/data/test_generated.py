"""Generated samples have the shape of a published data set, are reproducible, and have different keys."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.data import store
from fedpipe.data.datasets.generated import Generated
from fedpipe.planning import download, planner
from fedpipe.settings import parser
from fedpipe.settings.dataset import Data
from fedpipe.settings.loader import read_params
from tests import small_studies as studies

NAMES = ("mnist", "cifar100", "imdb", "ag_news")


@pytest.fixture(autouse=True)
def _no_mirror_and_empty_cache(in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDPIPE_MIRROR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_empty_folder / "cache"))


def parse_generated(name: str = "mnist", **others: Any) -> Data:
    return parser.parse_dataset({"name": name, "on_missing": "generate", **others})


def make_mirror(folder: Path) -> Path:
    """Make a mirror with empty files that have the names of MNIST's."""
    for file in parser.parse_dataset({"name": "mnist"}).configured_dataset.files:  # type: ignore[attr-defined]
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_generated_samples_match_shape_of_published_dataset(name: str) -> None:
    generated, real = parse_generated(name), parser.parse_dataset({"name": name})
    assert generated.dataset_info == real.dataset_info._replace(
        size=2400, tests=2400 * real.dataset_info.tests // real.dataset_info.size
    )
    samples = generated.effective_dataset.load(generated.fetcher)
    assert samples.x.shape == (2400, *real.dataset_info.shape)
    assert samples.test.sum() == generated.dataset_info.tests
    assert set(np.unique(samples.y)) == set(range(real.dataset_info.classes))
    if real.dataset_info.vocabulary:
        assert samples.x.min() >= 0
        assert samples.x.max() < real.dataset_info.vocabulary
    again = Generated(like=name).load(generated.fetcher)
    assert store.compute_samples_sha256(samples) == store.compute_samples_sha256(again)


def test_generated_classes_are_separable() -> None:
    samples = Generated(like="mnist", samples=400).load(parse_generated().fetcher)
    x = samples.x.reshape(len(samples.y), -1).astype(float)
    means = np.stack([x[~samples.test & (samples.y == label)].mean(0) for label in range(10)])
    nearest = np.linalg.norm(x[samples.test][:, None] - means, axis=2).argmin(1)
    assert (nearest == samples.y[samples.test]).mean() > 0.9


def test_generated_dataset_is_used_only_without_mirror_files(tmp_path: Path) -> None:
    assert parse_generated().effective_dataset == Generated(like="mnist")
    assert parse_generated().dataset_path != parser.parse_dataset({"name": "mnist"}).dataset_path
    with_mirror = parse_generated(mirror=str(make_mirror(tmp_path / "mirror")))
    assert with_mirror.effective_dataset is with_mirror.configured_dataset
    assert parser.parse_dataset({"name": "mnist"}).effective_dataset == with_mirror.effective_dataset, (
        "samples are generated only with on_missing: generate"
    )


def test_stored_dataset_replaces_generated_dataset() -> None:
    real = parser.parse_dataset({"name": "mnist"})
    real.dataset_path.parent.mkdir(parents=True)
    real.dataset_path.write_bytes(b"")
    assert parse_generated().effective_dataset == real.effective_dataset


def test_runs_on_generated_and_real_datasets_have_different_keys(tmp_path: Path) -> None:
    def make_plan(**dataset: Any) -> planner.NewPlan:
        params = studies.settings(dataset={"name": "mnist", "subset": 300, **dataset})
        studies.write(params, Path())
        return planner.make_plan(Path("params.yaml"))

    real, generated = make_plan(), make_plan(on_missing="generate")
    with_mirror = make_plan(on_missing="generate", mirror=str(make_mirror(tmp_path / "mirror")))
    assert {run.key for run in real.runs} == {run.key for run in with_mirror.runs}
    for name in ("runs", "partitions"):
        keys = {getattr(part, "key", part) for part in getattr(generated, name)}
        assert not keys & {getattr(part, "key", part) for part in getattr(real, name)}
    (run,) = generated.runs
    text = generated.file_texts[str(run.files.settings)]
    assert "name: generated" in text
    assert "like: mnist" in text
    assert [*real.unavailable_runs.values()] == ["data not here"]
    assert (generated.unavailable_runs, with_mirror.unavailable_runs) == ({}, {})


def test_download_stores_generated_dataset_without_network() -> None:
    params = studies.settings(dataset={"name": "mnist", "subset": 300, "on_missing": "generate"})
    studies.write(params, Path())
    planner.write_plan(plan := planner.make_plan(Path("params.yaml")))
    (run,) = plan.runs
    path = download.download_dataset(run.dataset)
    assert path == layout.get_dataset_path(run.dataset)
    assert store.read_dataset_info(path) == parse_generated().dataset_info
    assert "generated" in read_params(store.get_dataset_settings_path(run.dataset))["name"]


@pytest.mark.parametrize("name", [None, "mnist"])
def test_explicit_download_stores_no_generated_samples(name: str | None, tmp_path: Path) -> None:
    first, *_ = parser.parse_dataset({"name": "mnist"}).configured_dataset.files  # type: ignore[attr-defined]
    mirror_file = tmp_path / "mirror" / first.name  # damaged, so that the download fails before it uses the network
    mirror_file.parent.mkdir(parents=True)
    mirror_file.write_bytes(b"")
    dataset = {"name": "mnist", "on_missing": "generate", "mirror": str(tmp_path / "mirror")}
    studies.write(studies.settings(dataset=dataset), Path())
    assert planner.make_plan().runs[0].dataset.startswith("generated-")
    with pytest.raises(ArtifactError, match=re.escape(str(mirror_file))):
        download.download_and_pin_dataset(name, Path("params.yaml"))
    assert not list(Path("results").rglob("*.pt"))


@pytest.mark.parametrize("like", ["digits", "generated", "nothing"])
def test_generated_dataset_rejects_unpublished_name_for_like(like: str) -> None:
    with pytest.raises(SettingsError, match=r"dataset\.like"):
        _ = parser.parse_dataset({"name": "generated", "like": like}).dataset_info
