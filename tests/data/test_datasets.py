"""Published data sets in small files of their formats, users' files, and real data sets of a mirror."""

import gzip
import hashlib
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torchvision
import yaml
from PIL import Image

from fedpipe.core.components import component, registry
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import compute_file_sha256, write_parquet
from fedpipe.data import class_names, store
from fedpipe.data.datasets import ag_news, cifar10, cifar100, fashion_mnist, imdb, mnist, tiny_imagenet
from fedpipe.data.datasets.base import DatasetInfo, PublishedDataset, Samples
from fedpipe.data.sources.fetch import MIRROR_VARIABLE, Fetcher, PublishedFile
from fedpipe.planning import download, partition, planner, run_settings
from fedpipe.settings import loader, parser
from tests import small_studies as studies
from tests.data.repositories import encode_archive, encode_image, write_image
from tests.errors import rejects

MIRROR = os.environ.get(MIRROR_VARIABLE)
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(MIRROR_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def fetch(tmp_path: Path) -> Fetcher:
    """Read from a folder only, because tests must not use the network."""
    return Fetcher(mirror=str(tmp_path / "mirror"), cache=tmp_path / "cache", tries=1)


def write_mirror_file(name: str, content: bytes) -> PublishedFile:
    """Write a file of the mirror, with an address that no server answers."""
    path = Path("mirror") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return PublishedFile(name, f"md5:{compute_md5(content)}", (f"http://127.0.0.1:9/{name}",))


def compute_md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def make_small_dataset(dataset: type[PublishedDataset], *files: PublishedFile, **parameters: Any) -> PublishedDataset:
    """Make a data set of the same format with other files."""
    return type(dataset.__name__, (dataset,), {"files": files, "checksum": ""})(**parameters)


# -- files and sizes of published data sets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(mnist.MNIST, torchvision.datasets.MNIST), (fashion_mnist.FashionMNIST, torchvision.datasets.FashionMNIST)],
)
def test_mnist_files_and_checksums_match_torchvision(ours: type[PublishedDataset], theirs: Any) -> None:
    assert [(Path(file.name).name, file.checksum) for file in ours.files] == [
        (name, f"md5:{md5}") for name, md5 in theirs.resources
    ]
    for file in ours.files:
        assert file.urls == tuple(host + Path(file.name).name for host in theirs.mirrors)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(cifar10.CIFAR10, torchvision.datasets.CIFAR10), (cifar100.CIFAR100, torchvision.datasets.CIFAR100)],
)
def test_cifar_archives_and_checksums_match_torchvision(ours: type[PublishedDataset], theirs: Any) -> None:
    (file,) = ours.files
    assert file[1:] == (f"md5:{theirs.tgz_md5}", (theirs.url,))
    assert Path(file.name).name == theirs.filename


PUBLISHED = {
    "mnist": DatasetInfo((1, 28, 28), 10, 70_000, 10_000),
    "fashion_mnist": DatasetInfo((1, 28, 28), 10, 70_000, 10_000),
    "cifar10": DatasetInfo((3, 32, 32), 10, 60_000, 10_000),
    "cifar100": DatasetInfo((3, 32, 32), 100, 60_000, 10_000),
    "tiny_imagenet": DatasetInfo((3, 64, 64), 200, 110_000, 10_000),
    "imdb": DatasetInfo((200,), 2, 50_000, 25_000, 10_000),
    "ag_news": DatasetInfo((200,), 4, 127_600, 7_600, 98_635),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_dataset_info_needs_no_files(name: str) -> None:
    section = parser.parse_dataset({"name": name})
    assert section.dataset_info == PUBLISHED[name]
    assert section.key_settings["sha256"] == section.effective_dataset.content_digest
    assert not Path("results").exists()


def test_different_datasets_have_different_paths() -> None:
    sections = [{"name": name} for name in PUBLISHED]
    sections += [{"name": "imdb"} | others for others in ({"vocabulary": 500}, {"length": 20}, {"sha256": "0" * 64})]
    sections += [{"name": "npz", "path": "a.npz", "sha256": digit * 64} for digit in "01"]
    assert len({parser.parse_dataset(section).dataset_path for section in sections}) == len(sections)


def test_stored_dataset_path_ignores_mirror_and_source_path() -> None:
    def find_file(**settings: Any) -> Path:
        return parser.parse_dataset(settings).dataset_path

    assert find_file(name="mnist", mirror="/somewhere") == find_file(name="mnist")
    assert find_file(name="npz", path="a.npz", sha256="0" * 64) == find_file(name="npz", path="b.npz", sha256="0" * 64)


# -- readers of published formats --------------------------------------------------------------------------------------


def encode_idx(array: np.ndarray) -> bytes:
    """Encode as MNIST does: two zeros, the type 8 (uint8), the number of axes, their lengths, and the values."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(length).to_bytes(4, "big") for length in array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize(("dataset", "folder"), [(mnist.MNIST, "mnist"), (fashion_mnist.FashionMNIST, "fashion-mnist")])
def test_mnist_reader_loads_idx_files(
    dataset: type[PublishedDataset], folder: str, fetch: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    grey, labels = PIXELS[:, 0, :28, :28], np.array([3, 1, 4, 1, 5, 9])
    parts = {"train-images-idx3": grey[:4], "train-labels-idx1": labels[:4]}
    parts |= {"t10k-images-idx3": grey[4:], "t10k-labels-idx1": labels[4:]}
    contents = {f"{name}-ubyte.gz": encode_idx(array) for name, array in parts.items()}
    files = [write_mirror_file(f"{folder}/{name}", content) for name, content in contents.items()]
    reader = getattr(torchvision.datasets, dataset.__name__)
    monkeypatch.setattr(reader, "resources", [(name, compute_md5(content)) for name, content in contents.items()])
    samples = make_small_dataset(dataset, *files).load(fetch)
    assert samples.x.dtype == np.uint8
    assert np.array_equal(samples.x, grey[:, None])
    assert samples.y.tolist() == labels.tolist()
    assert samples.test.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("dataset", "labels"), [(cifar10.CIFAR10, "labels"), (cifar100.CIFAR100, "fine_labels")], ids=["10", "100"]
)
def test_cifar_reader_loads_archive(
    dataset: type[PublishedDataset], labels: str, fetch: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = getattr(torchvision.datasets, dataset.__name__)
    members = [name for name, _ in (*reader.train_list, *reader.test_list)]
    contents = {
        name: pickle.dumps({"data": PIXELS[row : row + 1].reshape(1, -1), labels: [row]})
        for row, name in enumerate(members)
    }
    contents[reader.meta["filename"]] = pickle.dumps({reader.meta["key"]: ["a", "b"]})
    archive = encode_archive({f"{reader.base_folder}/{name}": content for name, content in contents.items()})
    checksums = [[name, compute_md5(contents[name])] for name in members]
    monkeypatch.setattr(reader, "train_list", checksums[:-1])
    monkeypatch.setattr(reader, "test_list", checksums[-1:])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": compute_md5(contents[reader.meta["filename"]])})
    monkeypatch.setattr(reader, "tgz_md5", compute_md5(archive))
    samples = make_small_dataset(dataset, write_mirror_file(f"cifar/{reader.filename}", archive)).load(fetch)
    assert np.array_equal(samples.x, PIXELS[: len(members)])
    assert samples.y.tolist() == list(range(len(members)))
    assert samples.test.tolist() == [False] * (len(members) - 1) + [True]


def test_tiny_imagenet_reader_loads_color_and_gray_images(fetch: Fetcher) -> None:
    """Images are JPEG, and some are gray. Files are sorted by number, so 10 comes after 2."""
    color, grey = np.full((64, 64, 3), (200, 100, 50), np.uint8), np.full((64, 64), 30, np.uint8)
    folder = "tiny-imagenet-200"
    contents = {
        f"{folder}/train/n02/images/n02_0.JPEG": encode_image(color, "JPEG"),
        f"{folder}/train/n01/images/n01_10.JPEG": encode_image(color // 2, "JPEG"),
        f"{folder}/train/n01/images/n01_2.JPEG": encode_image(grey, "JPEG"),
        f"{folder}/val/images/val_0.JPEG": encode_image(color, "JPEG"),
        f"{folder}/val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t62\t62\n",
        f"{folder}/test/images/test_0.JPEG": encode_image(grey, "JPEG"),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    file = write_mirror_file("tiny.zip", buffer.getvalue())
    samples = make_small_dataset(tiny_imagenet.TinyImageNet, file).load(fetch)
    assert samples.x.shape == (4, 3, 64, 64)
    assert samples.y.tolist() == [0, 0, 1, 1]
    assert samples.test.tolist() == [False, False, False, True]
    assert (samples.x[0] == 30).all()
    assert np.abs(samples.x[2].astype(int) - np.array([200, 100, 50])[:, None, None]).max() <= 3


def test_imdb_reader_loads_archive(fetch: Fetcher) -> None:
    reviews = {"train/neg/10_1": "bad bad film", "train/neg/2_3": "bad film", "train/pos/0_9": "good film"}
    reviews |= {"test/neg/0_2": "good grief", "test/pos/1_7": "film", "train/unsup/0_0": "film film film film"}
    texts = reviews | {"train/urls_neg": "x", "imdb": "y"}
    archive = encode_archive({f"aclImdb/{name}.txt": text.encode() for name, text in texts.items()})
    samples = make_small_dataset(imdb.IMDB, write_mirror_file("aclImdb.tar.gz", archive), length=4).load(fetch)
    # Training words: bad 3, film 3, good 1. Reviews are sorted by number, so 2 comes before 10.
    assert samples.x.tolist() == [[1, 4, 5, 0], [1, 4, 4, 5], [1, 6, 5, 0], [1, 6, 2, 0], [1, 5, 0, 0]]
    assert samples.y.tolist() == [0, 0, 1, 0, 1]
    assert samples.test.tolist() == [False] * 3 + [True] * 2


def test_ag_news_reader_loads_tables(fetch: Fetcher) -> None:
    train = write_mirror_file("ag-news/train.csv", b'"4","Chips rise","Chips ""up"" on news"\n"1","NA","nan"\n')
    test = write_mirror_file("ag-news/test.csv", b'"2","Cup","Chips lose, 1-0."\n')
    samples = make_small_dataset(ag_news.AGNews, train, test, length=8).load(fetch)
    # Training words: chips 2; na, nan, news, on, rise, up 1 each
    assert samples.x.tolist() == [[1, 4, 9, 4, 10, 8, 7, 0], [1, 5, 6, 0, 0, 0, 0, 0], [1, 2, 4, 2, 2, 2, 2, 0]]
    assert samples.y.tolist() == [3, 0, 1]
    assert samples.test.tolist() == [False, False, True]


def test_published_dataset_rejects_tampered_file(fetch: Fetcher) -> None:
    file = write_mirror_file("aclImdb.tar.gz", b"published")
    write_mirror_file("aclImdb.tar.gz", b"tampered")
    with pytest.raises(ArtifactError, match=r"mirror/aclImdb\.tar\.gz is damaged .* md5"):
        download.load_and_save_dataset(make_small_dataset(imdb.IMDB, file), fetch)
    assert not Path("results").exists()


# -- a mirror's substitute file ---------------------------------------------------------------------------------------


def save_arrays(path: str, **content: np.ndarray) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **content)
    return compute_file_sha256(Path(path))


SPLIT_ARRAYS = {"x_train": PIXELS[:4].transpose(0, 2, 3, 1), "y_train": np.array([0, 1, 2, 9])}
SPLIT_ARRAYS |= {"x_test": PIXELS[4:].transpose(0, 2, 3, 1), "y_test": np.array([5, 5])}


def test_download_writes_checksum_of_substitute_npz_into_study() -> None:
    sha256 = save_arrays("mirror/cifar10.npz", **SPLIT_ARRAYS)
    settings = studies.settings(dataset={"name": "cifar10", "mirror": "mirror"}, federation={"clients": 2})
    studies.write(settings, Path())
    with rejects("dataset.sha256: missing ... 'cifar10' ... Run `fedpipe download`"):
        planner.make_plan(Path("params.yaml"))
    assert sha256 in download.download_and_pin_dataset(None, Path("params.yaml"))
    assert yaml.safe_load(Path("params.yaml").read_text())["dataset"]["sha256"] == sha256
    plan = planner.make_plan(Path("params.yaml"))
    samples = store.load_samples(layout.get_dataset_path(plan.runs[0].dataset))
    assert np.array_equal(samples.x.numpy(), PIXELS)
    assert samples.test.tolist() == [False] * 4 + [True] * 2
    params = parser.parse_params(loader.read_params(Path("params.yaml")))
    run = run_settings.RunSettings.from_params(params, "fedavg", 0)
    assert run.dataset["sha256"] == sha256
    assert not {"mirror", "path"} & set(run.dataset)
    assert store.read_dataset_info(store.get_stored_dataset_path(run.dataset)) == DatasetInfo((3, 32, 32), 10, 6, 2)


def test_download_stores_other_datasets_of_grid_if_one_is_damaged() -> None:
    sha256 = save_arrays("mirror/cifar10.npz", **SPLIT_ARRAYS)
    write_mirror_file("imdb/aclImdb_v1.tar.gz", b"damaged")
    names = {"IMDB": {"dataset.name": "imdb"}, "CIFAR-10": {"dataset.name": "cifar10"}}
    settings = studies.settings(dataset={"name": "digits", "mirror": "mirror"}, study={"grid": {"data": names}})
    studies.write(settings, Path())
    with pytest.raises(ArtifactError, match=r"aclImdb_v1\.tar\.gz is damaged"):
        download.download_and_pin_dataset(None, Path("params.yaml"))
    axis = yaml.safe_load(Path("params.yaml").read_text())["study"]["grid"]["data"]
    assert axis == {**names, "CIFAR-10": {"dataset.name": "cifar10", "dataset.sha256": sha256}}
    assert parser.parse_dataset({"name": "cifar10", "sha256": sha256}).dataset_path.is_file()


def test_substitute_file_with_wrong_checksum_is_rejected() -> None:
    sha256 = save_arrays("mirror/cifar10.npz", **SPLIT_ARRAYS)
    section = parser.parse_dataset({"name": "cifar10", "mirror": "mirror", "sha256": sha256})
    save_arrays("mirror/cifar10.npz", **SPLIT_ARRAYS | {"y_test": np.array([5, 6])})
    with pytest.raises(ArtifactError, match=rf"cifar10\.npz is damaged .* instead of {sha256}"):
        download.load_and_save_dataset(section.effective_dataset, section.fetcher)
    assert not Path("results").exists()


def test_substitute_file_with_wrong_shape_is_rejected() -> None:
    sha256 = save_arrays("mirror/mnist.npz", **SPLIT_ARRAYS)
    section = parser.parse_dataset({"name": "mnist", "mirror": "mirror", "sha256": sha256})
    with pytest.raises(ArtifactError, match=r"'mnist' .* 6 samples of shape \(3, 32, 32\) .* shape \(1, 28, 28\)"):
        download.load_and_save_dataset(section.effective_dataset, section.fetcher)


def test_substitute_of_texts_with_images_is_rejected() -> None:
    images = [encode_image(image.transpose(1, 2, 0)) for image in PIXELS]
    Path("mirror").mkdir()
    pd.DataFrame({"image": images, "label": [0, 1, 0, 1, 0, 1]}).to_parquet("mirror/imdb.parquet")
    section = parser.parse_dataset(
        {"name": "imdb", "mirror": "mirror", "sha256": compute_file_sha256(Path("mirror/imdb.parquet"))}
    )
    with rejects("mirror/imdb.parquet contains images. Use a table with a column text.", ArtifactError):
        download.load_and_save_dataset(section.effective_dataset, section.fetcher)


def test_mirror_prefers_original_files_to_substitute() -> None:
    write_mirror_file("imdb.parquet", b"")
    write_mirror_file("imdb/aclImdb_v1.tar.gz", b"")
    section = parser.parse_dataset({"name": "imdb", "mirror": "mirror"})
    assert section.dataset_info == PUBLISHED["imdb"]
    assert isinstance(section.effective_dataset, PublishedDataset)
    assert section.effective_dataset.compute_unpinned_sha256(section.fetcher) is None


def test_mirror_setting_overrides_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MIRROR_VARIABLE, "elsewhere")
    assert parser.parse_dataset({"name": "mnist"}).fetcher.mirror == "elsewhere"
    assert parser.parse_dataset({"name": "mnist", "mirror": "here"}).fetcher.mirror == "here"


# -- users' data sets --------------------------------------------------------------------------------------------------


def store_custom_dataset(**settings: Any) -> Path:
    """Add the SHA-256 of a user's data set and store it, like `fedpipe download`."""
    source: Any = parser.parse_dataset(settings).effective_dataset
    source = parser.parse_dataset({**settings, "sha256": source.compute_unpinned_sha256(Fetcher())}).effective_dataset
    return download.load_and_save_dataset(source, Fetcher())


def load_custom_dataset(**settings: Any) -> tuple[Samples, DatasetInfo]:
    """Store a user's data set, and load its samples."""
    path = store_custom_dataset(**settings)
    stored = store.load_samples(path)
    return Samples(**store.convert_to_canonical_arrays(stored), columns=stored.columns), store.read_dataset_info(path)


@pytest.mark.parametrize(
    ("x", "shape", "dtype"),
    [
        (PIXELS, (3, 32, 32), "uint8"),
        (PIXELS.transpose(0, 2, 3, 1), (3, 32, 32), "uint8"),
        (PIXELS[:, 0], (1, 32, 32), "uint8"),
        (PIXELS[:, :1], (1, 32, 32), "uint8"),
        (PIXELS[:, 0, 0] / 255, (32,), "float32"),
        (PIXELS.transpose(0, 2, 3, 1) / np.float32(255), (3, 32, 32), "float32"),
        (PIXELS[:, 0, 0].astype(np.int32), (32,), "int32"),
        (PIXELS[:, 0, 0].astype(np.uint16), (32,), "int32"),
    ],
    ids=["chw", "hwc", "hw", "1hw", "features", "float-hwc", "tokens", "unsigned-tokens"],
)
def test_npz_inputs_have_canonical_shape_and_type(x: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
    save_arrays("own.npz", x=x, y=np.array([0, 1, 2, 0, 1, 2]), test=np.array([0, 0, 0, 0, 1, 1]))
    samples, facts = load_custom_dataset(name="npz", path="own.npz")
    assert facts == DatasetInfo(shape, 3, 6, 2, int(x.max()) + 1 if dtype == "int32" else None)
    assert str(samples.x.dtype) == dtype
    assert samples.test.tolist() == [False] * 4 + [True] * 2
    if len(shape) == 3:
        assert np.array_equal(samples.x[:, 0], (x if x.ndim == 3 else x[:, 0] if x.shape[1] < 4 else x[..., 0]))


VALUES = np.arange(6 * 5 * 4 * 3).reshape(6, 5, 4, 3) % 251


@pytest.mark.parametrize(
    ("x", "checksum"),
    [
        (VALUES.astype(np.uint8), "d40b2a06c40d976d4bd3f30fb6b0112143e865d66a8d258e15c44b5e44c3663a"),
        (VALUES / 7, "6829893d4fafb76a5a24d62d8689029de43cc1a1c6e2f6d37244d499debacfac"),
        (VALUES[:, 0, :, 0].astype(">i4"), "3758b6fdb12cd5e29dd3743598c145cacd69847b69d4f5842b3d2bb3495d4e97"),
    ],
    ids=["images", "numbers", "tokens"],
)
def test_stored_npz_samples_have_pinned_checksum(x: np.ndarray, checksum: str) -> None:
    save_arrays("own.npz", x=x, y=np.arange(6)[:, None], test=np.arange(6.0) == 5)
    assert store.compute_samples_sha256(load_custom_dataset(name="npz", path="own.npz")[0]) == checksum


def test_npz_text_labels_become_class_numbers() -> None:
    save_arrays("own.npz", x_train=PIXELS, y_train=np.array(["cat", "dog", "ant", "cat", "dog", "ant"]))
    samples, facts = load_custom_dataset(name="npz", path="own.npz")
    assert samples.y.tolist() == [1, 2, 0, 1, 2, 0]
    assert facts.classes == 3
    assert not samples.test.any()


LABELS = np.zeros(6, int)
NOT_FINITE = "inputs of 1 of 3 samples contain NaN or infinity as float32, first those of sample"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "ytest": LABELS}, "lacks y_test. Use"),
        ({"x": np.array([[1.0], [np.nan], [2.0]]), "y": np.arange(3)}, f"{NOT_FINITE} 1"),
        ({"x": np.array([[1.0], [2.0], [1e300]]), "y": np.arange(3)}, f"{NOT_FINITE} 2"),
        ({"images": PIXELS}, "contains none of the expected arrays"),
        ({"x": PIXELS.astype(np.int64), "y": LABELS}, "inputs of int64 with shape (6, 3, 32, 32)"),
        ({"x": PIXELS, "y": np.array([0, 1, 2, -1, 0, 0])}, "label -1 can't be used"),
        ({"x": PIXELS, "y": np.arange(6) + 2**40}, f"label {2**40 + 5} can't be used, because integers are numbers"),
        ({"x": PIXELS[:0], "y": np.zeros(0, int)}, "has labels of shape (0,)"),
        ({"x": PIXELS, "y": np.array([None] * 6)}, "can't be read as .npz ... dtype=str"),
        ({"x": PIXELS, "y": np.zeros(5, int)}, "contains x of shape (6, 3, 32, 32), y of shape (5,)."),
        ({"x": PIXELS, "y": LABELS, "test": np.zeros(5, bool)}, "y of shape (6,), test of shape (5,)."),
        ({"x": PIXELS, "y": np.array(3)}, "contains x of shape (6, 3, 32, 32), y of shape ()."),
        (
            SPLIT_ARRAYS | {"y_train": np.arange(3), "y_test": np.arange(3)},
            "contains x_train of shape (4, 32, 32, 3), y_train of shape (3,).",
        ),
        (
            SPLIT_ARRAYS | {"x_test": PIXELS[4:, :, :8, :8].transpose(0, 2, 3, 1)},
            "x_train of uint8 and shape (4, 32, 32, 3) and x_test of uint8 and shape (2, 8, 8, 3). Use the same type",
        ),
        (
            SPLIT_ARRAYS | {"x_test": SPLIT_ARRAYS["x_test"] / 255},
            "and x_test of float64 and shape (2, 32, 32, 3). Use the same type",
        ),
        (
            SPLIT_ARRAYS | {"y_test": np.array(["a", "b"])},
            "y_train of int64 and shape (4,) and y_test of <U1 and shape (2,)",
        ),
        (
            {"x": PIXELS, "y": np.array([0, np.nan, 1, 2, np.nan, 3])},
            "the label is NaN for 2 of 6 samples, first for sample 1",
        ),
        ({"x": PIXELS, "y": np.arange(6), "test": np.array(["no"] * 6)}, "the array test is <U2 of shape (6,)"),
        ({"x": PIXELS, "y": np.arange(6), "test": np.arange(6)}, "the array test is int64 of shape (6,)"),
        ({"x": np.array([[4, -1], [5, 6]]), "y": np.arange(2)}, "token id -1 can't be used. Number the words from 1"),
        ({"x": np.ones((2, 3), np.uint64), "y": np.arange(2)}, "inputs of uint64 with shape (2, 3)"),
        ({"x": np.ones((2, 0), int), "y": np.arange(2)}, "inputs of int64 with shape (2, 0)"),
    ],
)
def test_npz_rejects_invalid_arrays(content: dict[str, np.ndarray], problem: str) -> None:
    save_arrays("own.npz", **content)
    with rejects(f"own.npz ... {problem}", ArtifactError):
        load_custom_dataset(name="npz", path="own.npz")


def test_parquet_loads_texts() -> None:
    table = {"text": ["a b", "b", "c"], "label": ["x", "y", "x"], "split": ["train", "train", "test"]}
    pd.DataFrame(table).to_parquet("own.parquet")
    samples, facts = load_custom_dataset(name="parquet", path="own.parquet", vocabulary=50, length=3)
    assert samples.x.tolist() == [[1, 5, 4], [1, 4, 0], [1, 2, 0]]
    assert samples.y.tolist() == [0, 1, 0]
    assert samples.test.tolist() == [False, False, True]
    assert facts == DatasetInfo((3,), 2, 3, 1, 50)


@pytest.mark.parametrize("cell", [lambda image: image, lambda image: {"bytes": image, "path": "x.png"}])
def test_parquet_loads_images(cell: Callable[[bytes], Any]) -> None:
    images = [cell(encode_image(image.transpose(1, 2, 0))) for image in PIXELS]
    pd.DataFrame({"image": images, "label": [0, 1, 2, 3, 4, 5]}).to_parquet("own.parquet")
    samples, facts = load_custom_dataset(name="parquet", path="own.parquet")
    assert np.array_equal(samples.x, PIXELS)
    assert facts == DatasetInfo((3, 32, 32), 6, 6, 0)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"words": ["a"], "label": [0]}, "own.parquet has the columns words, label."),
        ({"text": ["a"], "label": [0], "split": ["dev"]}, "own.parquet: the column split contains 'dev'."),
        ({"image": [b"no image"], "label": [0]}, "own.parquet, row 0 can't be read as an image"),
        (
            {"text": ["a", None], "label": [0, 1]},
            "own.parquet: the column text has no value in 1 of 2 rows, first in row 1.",
        ),
        (
            {"text": ["a", "b"], "label": [None, None]},
            "own.parquet: the column label has no value in 2 of 2 rows, first in row 0.",
        ),
        ({"text": [1, 2], "label": [0, 1]}, "own.parquet: the column text contains int64."),
        *(
            ({"text": ["a", "b"], "label": labels}, f"own.parquet: the column label contains {kind}<")
            for labels, kind in (([[0], [1]], "list"), ([[0, 1], [1]], "list"), ([{"a": 1}, {"a": 2}], "struct"))
        ),
        (
            {"image": [encode_image(np.full((2, 2), 300, np.uint16))], "label": [0]},
            "own.parquet, row 0 has more than 8 bits per channel (Pillow's mode I;16).",
        ),
        ({"image": [[1, 2]], "label": [0]}, "dataset.input: column 'image' of own.parquet contains list<"),
        ({"image": [{"path": "a.png"}], "label": [0]}, "dataset.input: column 'image' of own.parquet contains struct<"),
        (
            {"image": [Decimal("1.5")], "label": [0]},
            "dataset.input: column 'image' of own.parquet contains decimal128(",
        ),
    ],
)
def test_parquet_rejects_invalid_columns(table: dict[str, Any], problem: str) -> None:
    pd.DataFrame(table).to_parquet("own.parquet")
    with rejects(problem, ArtifactError):
        load_custom_dataset(name="parquet", path="own.parquet")


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"label": "clas", "input": ["a", "b"]},
            "dataset.label: own.parquet has no column 'clas'. Did you mean 'class'?",
        ),
        ({"label": "class", "input": ["a", "c"]}, "dataset.input: own.parquet has no column 'c'. Use one of: "),
        ({"label": "class", "input": ["a", "b"]}, None),
    ],
)
def test_plan_names_column_that_stored_file_lacks(columns: dict[str, Any], problem: str | None) -> None:
    """The samples of other columns are stored, but not these."""
    pd.DataFrame({"a": [0, 1], "b": [1.5, 2.5], "class": [0, 1]}).to_parquet("own.parquet")
    data = parser.parse_dataset({"name": "parquet", "path": "own.parquet", "sha256": "0" * 64} | columns)
    message = data.explain_missing_data("fedpipe download")
    assert message is not None
    assert message.startswith(problem or "dataset.sha256: the file with SHA-256 000")


@pytest.mark.parametrize(("name", "separator"), [("own.csv", ","), ("my own.tsv", "\t")])
def test_csv_error_shows_working_conversion_command(name: str, separator: str) -> None:
    frame = pd.DataFrame({"text": ["a b", "b"], "label": ["x", "y"]})
    frame.to_csv(name, sep=separator, index=False)
    with pytest.raises(ArtifactError) as error:
        load_custom_dataset(name="parquet", path=name)
    with pytest.raises(SettingsError) as name_error:
        load_custom_dataset(name=Path(name).suffix[1:], path=name)
    parquet_path = str(Path(name).with_suffix(".parquet"))
    message = str(error.value)
    assert message.startswith(f"{name} can't be read as Parquet")
    assert str(name_error.value).startswith("dataset.name: ")
    assert str(name_error.value).endswith(f"Use parquet. {message[message.index('Type') :]}")
    assert message.endswith(f"set dataset.path to {parquet_path}.")
    match = re.search('Type `python -c "(.*)"`', message)
    exec(match[1])
    assert pd.read_parquet(parquet_path).equals(frame)


def test_parquet_rejects_duplicate_column() -> None:
    table = pa.table([["a"], [0], [1]], names=["text", "label", "label"])
    write_parquet(Path("own.parquet"), table)
    with rejects("own.parquet has the column label more than once.", ArtifactError):
        load_custom_dataset(name="parquet", path="own.parquet")


def write_folder(*names: str, grey: bool = False) -> None:
    for row, name in enumerate(names):
        write_image(f"pictures/{name}", PIXELS[row, 0] if grey else PIXELS[row].transpose(1, 2, 0))


def test_folder_loads_train_and_test_images() -> None:
    write_folder("train/dog/1.png", "train/ant/2.png", "test/ant/1.png", "train/ant/1.png")
    samples, facts = load_custom_dataset(name="folder", path="pictures")
    assert np.array_equal(samples.x, PIXELS[[3, 1, 0, 2]])
    assert samples.y.tolist() == [0, 0, 1, 0]
    assert samples.test.tolist() == [False, False, False, True]
    assert facts == DatasetInfo((3, 32, 32), 2, 4, 1)


def test_folder_loads_gray_images_without_test_set() -> None:
    write_folder("dog/1.png", "ant/1.png", grey=True)
    samples, facts = load_custom_dataset(name="folder", path="pictures")
    assert np.array_equal(samples.x, PIXELS[[1, 0], :1])
    assert facts == DatasetInfo((1, 32, 32), 2, 2, 0)
    assert not samples.test.any()


def test_image_size_setting_crops_and_resizes_images() -> None:
    """The image is a checkerboard with squares of 2x2 pixels. Cropping removes the stripes at its sides."""
    board = np.kron(np.tile([[0, 200], [200, 0]], (4, 4)), np.ones((2, 2))).astype(np.uint8)
    wide = np.pad(board, ((0, 0), (5, 5)), constant_values=77)
    tall = np.pad(board, ((3, 3), (0, 0)), constant_values=77)
    for name, pixels in (("ant/board", board), ("ant/tall", tall), ("dog/wide", wide)):
        write_image(f"pictures/{name}.png", pixels)
    samples, facts = load_custom_dataset(name="folder", path="pictures", image_size=16)
    assert facts == DatasetInfo((1, 16, 16), 2, 3, 0)
    assert all(np.array_equal(image[0], board) for image in samples.x)
    small, _ = load_custom_dataset(name="folder", path="pictures", image_size=4)
    assert (small.x[0, 0, 1:3, 1:3] == 100).all(), "a pixel is a weighted mean"
    table = {"image": [encode_image(board), encode_image(wide)], "label": [0, 1]}
    pd.DataFrame(table).to_parquet("own.parquet")
    assert np.array_equal(load_custom_dataset(name="parquet", path="own.parquet", image_size=16)[0].x, samples.x[:2])
    with pytest.raises(ArtifactError, match=r"^own\.parquet, row 1 has 26x16 pixels.*dataset\.image_size"):
        load_custom_dataset(name="parquet", path="own.parquet")
    with pytest.raises(SettingsError, match=r"^dataset\.image_size: 0 "):
        parser.parse_dataset({"name": "parquet", "path": "own.parquet", "image_size": 0})


def test_tokens_setting_characters_encodes_each_character() -> None:
    pd.DataFrame({"text": ["aab b", "Ba"], "label": [0, 1]}).to_parquet("own.parquet")
    samples, facts = load_custom_dataset(
        name="parquet", path="own.parquet", tokens="characters", length=6, vocabulary=8
    )
    assert samples.x.tolist() == [[1, 4, 4, 5, 6, 5], [1, 7, 4, 0, 0, 0]]
    assert facts.vocabulary == 8
    with pytest.raises(SettingsError, match=r"^dataset\.tokens: 'letters' .*'words' or 'characters'"):
        parser.parse_dataset({"name": "parquet", "path": "own.parquet", "tokens": "letters"})


def test_stored_class_names_match_labels() -> None:
    """Class names are stored with the samples, so the original files are not needed later."""
    write_folder("north/dog/1.png", "north/ant/1.png", "south/dog/1.png")
    texts = {"text": ["a", "b", "c"]}
    pd.DataFrame(texts | {"label": ["dog", "ant", "dog"]}).to_parquet("names.parquet")
    pd.DataFrame(texts | {"label": pd.Categorical(["dog", "ant", "dog"])}).to_parquet("categories.parquet")
    pd.DataFrame(texts | {"label": [True, False, True]}).to_parquet("truths.parquet")
    pd.DataFrame(texts | {"label": [1, 0, 1]}).to_parquet("numbers.parquet")
    features = {"label": {"names": ["ant", "dog", "cow"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    write_parquet(Path("features.parquet"), pa.table(texts | {"label": [1, 0, 1]}).replace_schema_metadata(metadata))
    save_arrays("bytes.npz", x=PIXELS[:3], y=np.array([b"dog", b"ant", b"dog"]))
    save_arrays("floats.npz", x=PIXELS[:3], y=np.array([2.0, 0.5, 2.0]))

    def read_names(path: str, **settings: Any) -> tuple[str, ...]:
        suffix = Path(path).suffix
        name = {".parquet": "parquet", ".npz": "npz", "": "folder"}[suffix]
        return class_names.read_class_names_or_numbers(store_custom_dataset(name=name, path=path, **settings).stem, 2)

    for path in ("names.parquet", "categories.parquet", "features.parquet", "bytes.npz"):
        assert read_names(path) == ("ant", "dog"), path
    assert read_names("truths.parquet") == ("False", "True")
    assert read_names("floats.npz") == ("0.5", "2")
    assert read_names("numbers.parquet") == ("0", "1")
    pd.DataFrame(texts | {"label": ["v1.0", "v1", "v1"]}).to_parquet("versions.parquet")
    assert read_names("versions.parquet") == ("v1", "v1.0")
    assert read_names("pictures") == ("north", "south")
    assert read_names("pictures", levels=["hospital", "label"]) == ("ant", "dog")


def compute_folder_sha256() -> str:
    dataset: Any = parser.parse_dataset({"name": "folder", "path": "pictures"}).effective_dataset
    return dataset.compute_unpinned_sha256(Fetcher())  # type: ignore[no-any-return]


def test_folder_checksum_changes_with_file_names() -> None:
    write_folder("dog/1.png", "ant/1.png")
    before = compute_folder_sha256()
    assert compute_folder_sha256() == before
    Path("pictures/dog/1.png").rename("pictures/dog/2.png")
    assert compute_folder_sha256() != before


def test_folder_with_links_has_checksum_of_linked_images() -> None:
    """A cluster may share images, so that the folders of classes are links."""
    write_folder("dog/1.png", "ant/1.png")
    before = compute_folder_sha256()
    Path("pictures").rename("shared")
    Path("pictures").mkdir()
    for name in ("dog", "ant"):
        Path("pictures", name).symlink_to(Path("shared", name).absolute())
    assert compute_folder_sha256() == before
    for settings in ({}, {"levels": ["label"]}):
        samples, _ = load_custom_dataset(name="folder", path="pictures", **settings)
        assert np.array_equal(samples.x, PIXELS[[1, 0]])
    write_image("shared/ant/1.png", PIXELS[2].transpose(1, 2, 0))
    assert compute_folder_sha256() != before


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("Training/ant/1.png", "Testing/ant/1.png"), " contains the folders Testing, Training. Use train and test"),
        (("train/ant/1.png", "val/ant/1.png"), " contains the folders train, val. "),
        (("train/ant/1.png", "test/ant/1.png", "val/ant/1.png"), " contains the folders test, train, val. "),
        (("control/1/1.png", "test/2/1.png"), " contains the folders control, test. ... dataset.levels to [label]."),
        (("test/ant/1.png",), " contains the folders test. "),
        (("ant/1.png", "bee/1.gif"), ": the folder 'bee' contains no images."),
        ((".checkpoints/1.txt", "ant/1.png"), ": the folder '.checkpoints' contains no images."),
        (("1.png",), " contains no folders. "),
        (("train/ant/1.png", "test/bee/1.png"), "/test/bee: class 'bee' is not in pictures/train."),
        (("ant/1.gif", "bee/1.txt"), " contains no images. ... ant, bee."),
    ],
)
def test_folder_rejects_folders_that_are_no_classes(names: tuple[str, ...], problem: str) -> None:
    write_folder(*names)
    with rejects(f"pictures{problem}", ArtifactError):
        load_custom_dataset(name="folder", path="pictures")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (encode_image(PIXELS[0, 0, :8, :8]), "has 8x8 pixels, ... 32x32"),
        (b"no image", "can't be read as an image"),
    ],
)
def test_folder_rejects_invalid_images(content: bytes, problem: str) -> None:
    write_folder("dog/1.png", "ant/1.png")
    Path("pictures/ant/2.png").write_bytes(content)
    with rejects(f"pictures/ant/2.png {problem}", ArtifactError):
        load_custom_dataset(name="folder", path="pictures")


@pytest.mark.parametrize(
    ("kind", "name", "mode"), [(np.uint16, "1.png", "I;16"), (np.int32, "1.tif", "I"), (np.float32, "1.tif", "F")]
)
def test_folder_rejects_images_with_more_than_8_bits(kind: type[np.generic], name: str, mode: str) -> None:
    write_folder("dog/0.png", "dog/2.png", grey=True)
    Image.fromarray(np.full((32, 32), 300, kind)).save(f"pictures/dog/{name}")
    with rejects(f"pictures/dog/{name} has more than 8 bits per channel (Pillow's mode {mode}).", ArtifactError):
        load_custom_dataset(name="folder", path="pictures")


def test_two_npz_files_are_stored_separately() -> None:
    save_arrays("one.npz", x=PIXELS, y=np.arange(6))
    save_arrays("two.npz", x=PIXELS[::-1], y=np.arange(6))
    load_custom_dataset(name="npz", path="one.npz")
    load_custom_dataset(name="npz", path="two.npz")
    assert len(list(Path("results/data").glob("npz-*.pt"))) == 2


def test_stored_dataset_bytes_do_not_depend_on_file_name() -> None:
    own = {"name": "npz", "path": "one.npz", "sha256": save_arrays("one.npz", x=PIXELS, y=np.arange(6))}
    stored = [
        download.load_and_save_dataset(parser.parse_dataset(own).effective_dataset, Fetcher(), Path(name))
        for name in ("a.pt", "other.pt")
    ]
    assert stored[0].read_bytes() == stored[1].read_bytes()


def test_npz_changed_after_declaration_is_rejected() -> None:
    sha256 = save_arrays("own.npz", x=PIXELS, y=np.arange(6))
    source = parser.parse_dataset({"name": "npz", "path": "own.npz", "sha256": sha256}).effective_dataset
    new_sha256 = save_arrays("own.npz", x=PIXELS[::-1], y=np.arange(6))
    with rejects(f"dataset.sha256: {sha256} is declared, but own.npz has SHA-256 {new_sha256}.", ArtifactError):
        source.load(Fetcher())
    Path("own.npz").unlink()
    with pytest.raises(ArtifactError, match=r"^dataset\.path: own\.npz is missing"):
        source.load(Fetcher())


def test_custom_dataset_passes_through_download_and_partition() -> None:
    """The download is repeated from the file that the plan writes for the Snakemake rule."""
    x = RANDOM.integers(0, 256, (60, 8, 8), dtype=np.uint8)
    save_arrays("own.npz", x=x, y=np.arange(60) % 3, test=np.arange(60) >= 45)
    settings = studies.settings(dataset={"name": "npz", "path": "own.npz"}, federation={"clients": 3})
    studies.write(settings | {"partition": {"scheme": "iid"}}, Path())
    download.download_and_pin_dataset(None, Path("params.yaml"))
    plan = planner.make_plan(Path("params.yaml"))
    planner.write_plan(plan)
    (run,) = plan.runs
    stored_file = layout.get_dataset_path(run.dataset)
    first = stored_file.read_bytes()
    stored_file.unlink()
    stored_file.with_suffix(".json").unlink()
    assert download.download_dataset(run.dataset) == stored_file
    assert stored_file.read_bytes() == first
    assert partition.partition_dataset(run.partition).is_file()


# -- `fedpipe download` adds the SHA-256 to the study ------------------------------------------------------------------


def download_study(text: str | None = None, name: str | None = None) -> str:
    """Write params.yaml, run `fedpipe download`, and return its message."""
    if text is not None:
        Path("params.yaml").write_text(text)
    return download.download_and_pin_dataset(name, Path("params.yaml"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "dataset:   # mine\n  name: npz  # arrays\n  path: own.npz\n\nfederation: {clients: 3}\n",
            "dataset:   # mine\n  name: npz  # arrays\n  sha256: SUM\n  path: own.npz\n\nfederation: {clients: 3}\n",
        ),
        (
            "# A study.\ndataset: {name: npz, path: own.npz}  # mine\n",
            "# A study.\ndataset: {name: npz, sha256: SUM, path: own.npz}  # mine\n",
        ),
    ],
    ids=["block", "flow"],
)
def test_download_adds_checksum_and_keeps_rest_of_study(before: str, after: str) -> None:
    sha256 = save_arrays("own.npz", x=PIXELS, y=np.arange(6))
    download_study(before)
    assert Path("params.yaml").read_text() == after.replace("SUM", sha256)
    section = parser.parse_dataset(loader.read_params(Path("params.yaml"))["dataset"])
    assert section.dataset_info == DatasetInfo((3, 32, 32), 6, 6, 0)


def test_download_keeps_symlink_to_study() -> None:
    sha256 = save_arrays("own.npz", x=PIXELS, y=np.arange(6))
    Path("study.yaml").write_text("dataset: {name: npz, path: own.npz}\n")
    Path("params.yaml").symlink_to("study.yaml")
    download_study()
    assert Path("params.yaml").is_symlink()
    assert Path("study.yaml").read_text() == f"dataset: {{name: npz, sha256: {sha256}, path: own.npz}}\n"


def test_download_warns_about_labels_that_start_at_1() -> None:
    save_arrays("own.npz", x=PIXELS, y=np.arange(6) % 3 + 1)
    message = download_study("dataset: {name: npz, path: own.npz}\n")
    assert "labels are 1 to 3" in message
    assert "class 0 has no samples" in message
    save_arrays("own.npz", x=PIXELS, y=np.arange(6) % 3)
    assert "labels" not in download_study("dataset: {name: npz, path: own.npz}\n")


@pytest.mark.parametrize(
    ("labels", "classes", "warning"),
    [
        (["walk", "rest", "walk ", "rest"], "3 classes: rest, walk, 'walk '.", "2 of its 3 classes have one sample."),
        (["a", "b", "a", "b"], "2 classes: a, b.", ""),
        ([1, 0, 1, 0], "2 classes.", ""),
        ([1.0, 2.0, 1.0, 2.0], "2 classes: 1, 2.", ""),
        ([1.0, 2.5, 1.0, 2.5], "2 classes: 1, 2.5.", "its labels are numbers with fractions, such as 2.5,"),
        (
            [f"c{number:02}" for number in range(12)] * 2,
            "12 classes: c00, c01, c02, c03, c04, c05, c06, c07, c08, c09, and 2 more.",
            "",
        ),
    ],
)
def test_download_describes_samples_and_warns_about_labels_that_are_no_classes(
    labels: list[Any], classes: str, warning: str
) -> None:
    pd.DataFrame({"a": range(len(labels)), "b": 1.5, "label": labels}).to_parquet("own.parquet")
    message = download_study("dataset: {name: parquet, path: own.parquet, input: [a, b]}\n")
    assert f"It has {len(labels)} samples of shape (2,) in {classes}\n" in message
    assert [line for line in message.splitlines() if line.startswith(f"Warning: {warning}")] or not warning
    assert message.count("Warning: ") == bool(warning)


def test_download_prints_checksum_that_it_cannot_write() -> None:
    sha256 = save_arrays("own.npz", x=PIXELS, y=np.arange(6))
    before = "dataset:\n  ? name\n  : npz\n  ? path\n  : own.npz\n"
    message = download_study(before)
    assert "to params.yaml, under dataset:" in message
    assert message.endswith(f"\n  sha256: {sha256}")
    assert Path("params.yaml").read_text() == before


def test_download_of_other_dataset_keeps_study_unchanged() -> None:
    sha256 = save_arrays("mirror/cifar10.npz", **SPLIT_ARRAYS)
    before = "dataset: {mirror: mirror, name: digits}\n"
    assert download_study(before, "cifar10").endswith(f"sha256: {sha256}")
    assert Path("params.yaml").read_text() == before


def test_download_of_packaged_dataset_keeps_study_unchanged() -> None:
    download_study(name="digits")
    assert not Path("params.yaml").exists()
    download_study("dataset: {name: digits}\n")
    assert Path("params.yaml").read_text() == "dataset: {name: digits}\n"


# -- real data sets ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(MIRROR is None, reason=f"needs {MIRROR_VARIABLE}, the mirror with the real files")
class TestRealDatasets:
    """Data sets that the mirror lacks are skipped."""

    CHECKSUMS: ClassVar[dict[str, str]] = {"imdb": "eeba9a6f7260cf28430f46103d26c58a34547701eb9a0541de514d89bbbb9f72"}

    @pytest.fixture(params=PUBLISHED)
    def samples(self, request: pytest.FixtureRequest) -> tuple[str, Samples]:
        name = request.param
        section: Any = parser.parse_dataset({"name": name, "mirror": MIRROR})
        if all(section.fetcher.has_file(file.name) for file in section.effective_dataset.files):
            return name, section.effective_dataset.load(section.fetcher)
        sha256 = section.effective_dataset.compute_unpinned_sha256(section.fetcher)
        if sha256 is None:
            pytest.skip(f"the mirror has no {name}")
        section = parser.parse_dataset({"name": name, "mirror": MIRROR, "sha256": sha256})
        return name, section.effective_dataset.load(section.fetcher)

    def test_real_samples_match_published_facts(self, samples: tuple[str, Samples]) -> None:
        name, (x, y, test) = samples
        facts = PUBLISHED[name]
        assert len(x) == len(y) == len(test) <= facts.size  # a mirror's substitute may have fewer training samples
        assert test.sum() == facts.tests
        assert x.shape[1:] == facts.shape
        assert set(np.unique(y)) == set(range(facts.classes))
        if name != "mnist":
            assert np.bincount(y[test]).tolist() == [facts.tests // facts.classes] * facts.classes
        if facts.vocabulary is not None:
            assert x.min() == 0
            assert (x[:, 0] == 1).all()
            assert x.max() < facts.vocabulary
        dataset: Any = registry.find_component(component.DATASET, name)
        if checksum := self.CHECKSUMS.get(name, dataset.checksum):
            assert store.compute_samples_sha256(samples[1]) == checksum
