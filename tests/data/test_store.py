"""Digits, checksums, and storage of samples as tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from typing_extensions import override

from fedpipe.core.components import component, registry
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files
from fedpipe.data import store
from fedpipe.data.datasets.base import Dataset, DatasetInfo, Samples
from fedpipe.data.datasets.digits import Digits
from fedpipe.data.sources.fetch import Fetcher
from fedpipe.planning import download

FEW = Samples(
    x=np.arange(12, dtype=np.float32).reshape(3, 1, 2, 2), y=np.array([0, 1, 0]), test=np.array([False, False, True])
)


@dataclass(frozen=True, kw_only=True)
class MislabeledDataset(Dataset):
    """A data set whose samples differ from its checksum."""

    shape: ClassVar[tuple[int, ...]] = (1, 2, 2)
    classes: ClassVar[int] = 2
    size: ClassVar[int] = 3
    tests: ClassVar[int] = 1
    checksum: ClassVar[str] = "0" * 64

    @override
    def load(self, fetch: Fetcher) -> Samples:
        return FEW


@pytest.fixture(scope="module")
def digits() -> Samples:
    return Digits().load(Fetcher())


def test_digits_samples_match_class_attributes(digits: Samples) -> None:
    assert digits.x.shape == (Digits.size, *Digits.shape)
    assert [str(array.dtype) for array in digits[:3]] == ["float32", "int64", "bool"]
    assert digits.x.min() == 0
    assert digits.x.max() == 1
    assert set(digits.y) == set(range(Digits.classes))
    assert store.compute_samples_sha256(digits) == Digits.checksum


def test_digits_test_set_contains_fifth_of_each_class(digits: Samples) -> None:
    assert digits.test.sum() == 360
    class_sizes, test_counts = np.bincount(digits.y), np.bincount(digits.y[digits.test])
    assert np.abs(test_counts - class_sizes / 5).max() < 1


def test_samples_checksum_equals_pinned_value() -> None:
    assert store.compute_samples_sha256(FEW) == "0917acc340d5569023de953c7fa66d4d8119dea739a87e157d3718fb2f95cfd8"


def test_samples_checksum_ignores_memory_layout_and_byte_order() -> None:
    other = Samples(np.asfortranarray(FEW.x), FEW.y.astype(">i8"), FEW.test)
    assert store.compute_samples_sha256(other) == store.compute_samples_sha256(FEW)


@pytest.mark.parametrize(
    "other",
    [
        FEW._replace(x=FEW.x.reshape(3, 2, 2, 1)),
        FEW._replace(x=-FEW.x),
        FEW._replace(y=1 - FEW.y),
        FEW._replace(test=~FEW.test),
    ],
)
def test_samples_checksum_changes_with_shape_and_values(other: Samples) -> None:
    assert store.compute_samples_sha256(other) != store.compute_samples_sha256(FEW)


def test_saved_samples_load_as_equal_tensors(tmp_path: Path) -> None:
    path, copy = tmp_path / "few.pt", tmp_path / "copy.pt"
    sha256 = store.save_samples(path, FEW)
    assert store.save_samples(copy, FEW) == sha256
    loaded = store.load_samples(path, sha256)
    assert (loaded.x.dtype, loaded.y.dtype, loaded.test.dtype) == (torch.float32, torch.int64, torch.bool)
    assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(loaded[:3], FEW[:3], strict=True))
    assert store.compute_samples_sha256(loaded) == store.compute_samples_sha256(FEW)


def test_load_samples_rejects_model_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    files.write_pt(path, {"weight": torch.zeros(2)})
    with pytest.raises(ArtifactError, match=r"model\.pt contains weight instead of a data set"):
        store.load_samples(path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists mapped files")
def test_loaded_samples_are_memory_mapped(tmp_path: Path) -> None:
    path = tmp_path / "images.pt"
    store.save_samples(path, FEW._replace(x=np.zeros((3, 1, 100, 100), np.uint8)))
    loaded = store.load_samples(path)
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    regions = [range(*(int(address, 16) for address in region.split("-"))) for region in mapped]
    assert all(any(tensor.data_ptr() in region for region in regions) for tensor in loaded[:3])


@pytest.mark.parametrize(
    ("dtype", "stored_dtype"), [("uint8", "uint8"), ("int16", "int16"), (">i4", "int32"), ("float64", "float32")]
)
def test_saved_inputs_keep_type_except_float64(tmp_path: Path, dtype: str, stored_dtype: str) -> None:
    samples = FEW._replace(x=FEW.x.astype(dtype))
    store.save_samples(tmp_path / "few.pt", samples)
    loaded = store.load_samples(tmp_path / "few.pt")
    assert str(loaded.x.dtype) == f"torch.{stored_dtype}"
    assert np.array_equal(loaded.x.numpy(), FEW.x)
    assert store.compute_samples_sha256(loaded) == store.compute_samples_sha256(samples)


def test_stored_dataset_has_recorded_info(in_empty_folder: Path, digits: Samples) -> None:
    path = download.load_and_save_dataset(Digits(), Fetcher())
    assert path == store.get_stored_dataset_path(registry.get_component_key_settings(component.DATASET, Digits()))
    assert path.parent == Path("results/data")
    assert path.name.startswith("digits-")
    assert np.array_equal(store.load_samples(path, files.read_recorded_sha256(path)).x.numpy(), digits.x)
    assert store.read_dataset_info(path) == Digits().info == DatasetInfo((1, 8, 8), 10, 1797, 360)
    record = path.with_suffix(".json")
    files.write_json(record, {key: value for key, value in files.read_json(record).items() if key != "tests"})
    with pytest.raises(ArtifactError, match=r"\.json lacks tests.* digits-\w+\.pt"):
        store.read_dataset_info(path)


def test_stored_dataset_path_ignores_split_settings() -> None:
    description = registry.get_component_key_settings(component.DATASET, Digits())
    path = store.get_stored_dataset_path(description)
    assert store.get_stored_dataset_path(description | {"split": "pooled", "test_fraction": 0.5}) == path
    assert store.get_stored_dataset_path(description | {"sha256": "1" * 64}) != path


def test_dataset_with_wrong_checksum_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "changed.pt"
    with pytest.raises(ArtifactError) as error:
        download.load_and_save_dataset(MislabeledDataset(), Fetcher(), path)
    assert store.compute_samples_sha256(FEW) in str(error.value)
    assert "0" * 64 in str(error.value)
    assert not path.exists()


def test_error_for_dataset_class_without_checksum_contains_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MislabeledDataset, "checksum", "")
    with pytest.raises(ArtifactError, match=f"checksum {store.compute_samples_sha256(FEW)}, but none"):
        download.load_and_save_dataset(MislabeledDataset(), Fetcher())
    with pytest.raises(SettingsError, match=r"^dataset\.name: '.*MislabeledDataset' has no checksum"):
        registry.get_component_key_settings(component.DATASET, MislabeledDataset())


@pytest.mark.parametrize(
    ("name", "value"), [("shape", (1, 4, 1)), ("classes", 1), ("size", 4)], ids=["shape", "classes", "size"]
)
def test_dataset_rejects_samples_that_differ_from_class_attributes(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(MislabeledDataset, "checksum", store.compute_samples_sha256(FEW))
    monkeypatch.setattr(MislabeledDataset, name, value)
    with pytest.raises(ArtifactError, match=r"^dataset\.name: .* 3 samples of shape \(1, 2, 2\) in 2 classes"):
        download.load_and_save_dataset(MislabeledDataset(), Fetcher())


def test_download_rejects_dataset_without_plan(in_empty_folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"digits-0123\.yaml is missing\. .*`fedpipe plan` .*'digits-0123'"):
        download.download_dataset("digits-0123")
