"""The digits, checksums, and storing samples as tensors."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedpipe import artifacts
from fedpipe.data import store
from fedpipe.data.datasets.base import Dataset, Samples
from fedpipe.data.datasets.digits import Digits
from fedpipe.errors import ArtifactError, SettingsError

FEW = Samples(
    x=np.arange(12, dtype=np.float32).reshape(3, 1, 2, 2),
    y=np.array([0, 1, 0]),
    test=np.array([False, False, True]),
)


@dataclass(frozen=True, kw_only=True)
class Changed(Dataset):
    """A data set whose samples are not what its checksum says."""

    shape: ClassVar[tuple[int, ...]] = (1, 2, 2)
    classes: ClassVar[int] = 2
    size: ClassVar[int] = 3
    sha256: ClassVar[str] = "0" * 64

    def load(self) -> Samples:
        return FEW


@pytest.fixture(scope="module")
def digits() -> Samples:
    return Digits().load()


def test_digits_are_what_their_class_says(digits: Samples) -> None:
    assert digits.x.shape == (Digits.size, *Digits.shape)
    assert [str(array.dtype) for array in digits] == ["float32", "int64", "bool"]
    assert digits.x.min() == 0
    assert digits.x.max() == 1
    assert set(digits.y) == set(range(Digits.classes))
    assert store.checksum(digits) == Digits.sha256


def test_digits_hold_out_a_fifth_of_every_class(digits: Samples) -> None:
    assert digits.test.sum() == 360
    every, held_out = np.bincount(digits.y), np.bincount(digits.y[digits.test])
    assert np.abs(held_out - every / 5).max() < 1


def test_a_checksum_is_known() -> None:
    assert store.checksum(FEW) == "0917acc340d5569023de953c7fa66d4d8119dea739a87e157d3718fb2f95cfd8"


def test_a_checksum_does_not_see_layout_or_byte_order() -> None:
    other = Samples(np.asfortranarray(FEW.x), FEW.y.astype(">i8"), FEW.test)
    assert store.checksum(other) == store.checksum(FEW)


@pytest.mark.parametrize(
    "other",
    [
        FEW._replace(x=FEW.x.reshape(3, 2, 2, 1)),
        FEW._replace(x=-FEW.x),
        FEW._replace(y=1 - FEW.y),
        FEW._replace(test=~FEW.test),
    ],
)
def test_a_checksum_sees_everything_else(other: Samples) -> None:
    assert store.checksum(other) != store.checksum(FEW)


def test_samples_are_stored_as_tensors(tmp_path: Path) -> None:
    path, again = tmp_path / "few.pt", tmp_path / "again.pt"
    sha256 = store.save(path, FEW)
    assert store.save(again, FEW) == sha256
    loaded = store.load(path, sha256)
    assert (loaded.x.dtype, loaded.y.dtype, loaded.test.dtype) == (torch.float32, torch.int64, torch.bool)
    assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(loaded, FEW, strict=True))
    assert store.checksum(Samples(*(tensor.numpy() for tensor in loaded))) == store.checksum(FEW)


def test_something_else_is_no_data_set(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    artifacts.write_pt(path, {"weight": torch.zeros(2)})
    with pytest.raises(ArtifactError, match=r"model\.pt holds no data set \(but weight\)"):
        store.load(path)


def test_download(tmp_path: Path, digits: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = store.download("digits")
    assert path == artifacts.dataset_file("digits")
    assert np.array_equal(store.load(path).x.numpy(), digits.x)


def test_download_refuses_other_samples(tmp_path: Path) -> None:
    path = tmp_path / "changed.pt"
    with pytest.raises(ArtifactError) as error:
        store.download(f"{__name__}.Changed", path)
    assert store.checksum(FEW) in str(error.value)
    assert "0" * 64 in str(error.value)
    assert not path.exists()


def test_download_of_an_unknown_data_set_is_a_sentence() -> None:
    with pytest.raises(SettingsError, match=r"^dataset\.name: unknown data set 'digit'; did you mean 'digits'\?"):
        store.download("digit")


def test_partitioning_imports_no_torch() -> None:
    program = "import sys, fedpipe.data.store, fedpipe.data.assignment, fedpipe.data.heterogeneity; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "sklearn"} & set(modules.split())
