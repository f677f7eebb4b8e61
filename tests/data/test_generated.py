"""Generated samples: in a published data set's shape, the same each time, and never under the keys of real ones."""

from __future__ import annotations

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
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without data, and no mirror or cache beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPIPE_MIRROR", raising=False)
    monkeypatch.setattr("fedpipe.data.sources.fetch.get_cache_folder", lambda: tmp_path / "cache")


def section(name: str = "mnist", **others: Any) -> Data:
    return parser.parse_dataset({"name": name, "on_missing": "generate", **others})


def images(folder: Path) -> Path:
    """A mirror in which a file of each name of MNIST lies; nobody reads them."""
    for file in parser.parse_dataset({"name": "mnist"}).named_dataset.files:
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_they_have_the_shape_of_what_they_stand_for(name: str) -> None:
    found, real = section(name), parser.parse_dataset({"name": name})
    assert found.facts == real.facts._replace(size=2400, tests=2400 * real.facts.tests // real.facts.size)
    samples = found.effective_dataset.load(found.fetcher)
    assert (samples.x.shape, int(samples.test.sum())) == ((2400, *real.facts.shape), found.facts.tests)
    assert set(np.unique(samples.y)) == set(range(real.facts.classes))
    if real.facts.vocabulary:
        assert samples.x.min() >= 0
        assert samples.x.max() < real.facts.vocabulary
    assert store.compute_samples_sha256(samples) == store.compute_samples_sha256(
        Generated(like=name).load(found.fetcher)
    )


def test_classes_can_be_told_apart() -> None:
    samples = Generated(like="mnist", samples=400).load(section().fetcher)
    x = samples.x.reshape(len(samples.y), -1).astype(float)
    means = np.stack([x[~samples.test & (samples.y == label)].mean(0) for label in range(10)])
    nearest = np.linalg.norm(x[samples.test][:, None] - means, axis=2).argmin(1)
    assert (nearest == samples.y[samples.test]).mean() > 0.9


def test_what_is_at_hand_is_taken(tmp_path: Path) -> None:
    assert section().effective_dataset == Generated(like="mnist")
    assert section().file != parser.parse_dataset({"name": "mnist"}).file
    there = section(mirror=str(images(tmp_path / "mirror")))
    assert there.effective_dataset is there.named_dataset
    assert parser.parse_dataset({"name": "mnist"}).effective_dataset == there.effective_dataset, (
        "nothing is generated that was not asked for"
    )


def test_what_was_stored_is_at_hand() -> None:
    real = parser.parse_dataset({"name": "mnist"})
    real.file.parent.mkdir(parents=True)
    real.file.write_bytes(b"")
    assert section().effective_dataset == real.effective_dataset


def test_no_run_of_generated_data_has_the_key_of_a_real_one(tmp_path: Path) -> None:
    def planned(**dataset: Any) -> planner.NewPlan:
        params = studies.settings(dataset={"name": "mnist", "subset": 300, **dataset})
        studies.write(params, Path())
        return planner.make_plan(Path("params.yaml"))

    real, generated = planned(), planned(on_missing="generate")
    there = planned(on_missing="generate", mirror=str(images(tmp_path / "mirror")))
    assert {run.key for run in real.runs} == {run.key for run in there.runs}
    for name in ("runs", "partitions"):
        mine = {getattr(part, "key", part) for part in getattr(generated, name)}
        assert not mine & {getattr(part, "key", part) for part in getattr(real, name)}
    (run,) = generated.runs
    text = generated.file_texts[str(run.files.settings)]
    assert "name: generated" in text
    assert "like: mnist" in text
    assert [*real.unavailable_runs.values()] == ["data not here"]
    assert (generated.unavailable_runs, there.unavailable_runs) == ({}, {})


def test_a_plan_stores_them_without_a_network() -> None:
    params = studies.settings(dataset={"name": "mnist", "subset": 300, "on_missing": "generate"})
    studies.write(params, Path())
    planner.write_plan(made := planner.make_plan(Path("params.yaml")))
    (run,) = made.runs
    path = download.download_dataset(run.dataset)
    assert path == layout.dataset_file(run.dataset)
    assert store.read_dataset_info(path) == section().facts
    assert "generated" in read_params(store.settings_file(run.dataset))["name"]


@pytest.mark.parametrize("name", [None, "mnist"])
def test_who_asks_for_the_data_set_itself_gets_no_noise(name: str | None, tmp_path: Path) -> None:
    first, *_ = parser.parse_dataset({"name": "mnist"}).named_dataset.files
    there = tmp_path / "mirror" / first.name  # the first of several files, and damaged: no network is asked
    there.parent.mkdir(parents=True)
    there.write_bytes(b"")
    dataset = {"name": "mnist", "on_missing": "generate", "mirror": str(tmp_path / "mirror")}
    studies.write(studies.settings(dataset=dataset), Path())
    assert planner.make_plan().runs[0].dataset.startswith("generated-")
    with pytest.raises(ArtifactError, match=re.escape(str(there))):
        download.declare_dataset(name, Path("params.yaml"))
    assert not list(Path("results").rglob("*.pt"))


@pytest.mark.parametrize("like", ["digits", "generated", "nothing"])
def test_only_published_data_sets_have_a_shape_to_take(like: str) -> None:
    with pytest.raises(SettingsError, match=r"dataset\.like"):
        assert parser.parse_dataset({"name": "generated", "like": like}).facts
