"""Reads samples from .npz files, Parquet tables and folders of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.files import decode_parquet
from fedpipe.data.samples import Samples

if TYPE_CHECKING:
    from PIL import Image

CHANNELS = (1, 3)  #: of gray and of color images
SAMPLE_COLUMNS = {"label", "text", "image", "split"}  #: columns that a table of samples may have
HIGH_DEPTH_MODES = ("I", "F")  #: prefixes of Pillow's modes with more than 8 bits, which it clips at 255


class ParquetSamples(NamedTuple):
    """The rows of a Parquet file."""

    texts: list[str] | None  #: n texts, or None if the rows contain images
    images: npt.NDArray[np.uint8] | None  #: shape (n, c, h, w)
    labels: npt.NDArray[np.int64]  #: shape (n,)
    test: npt.NDArray[np.bool_]  #: shape (n,)


def read_npz(path: Path) -> Samples:
    """Read ``x_train`` and ``y_train`` (with ``x_test`` and ``y_test``), or ``x`` and ``y`` (with ``test``, a mask).

    If ``x`` has dtype uint8, it contains images, shape (n, h, w), (n, h, w, c) or (n, c, h, w). Floats can have any
    shape. Other integers are token ids from 0, shape (n, length).

    Raises
    ------
    ArtifactError
        The file has another format.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            array_names = {"x", "y", "test", "x_train", "y_train", "x_test", "y_test"}
            arrays = {name: file[name] for name in file.files if name in array_names}
    except Exception as error:  # any error of zip, NumPy or the system
        raise ArtifactError(f"{path} can't be read as .npz ({_format_error(error)}).") from error
    if unpaired := {"x_test", "y_test"} & arrays.keys() and {"x_test", "y_test"} - arrays.keys():
        raise ArtifactError(f"{path} lacks {unpaired.pop()}. Use both x_test and y_test, or neither.")
    if {"x_train", "y_train"} <= arrays.keys():
        splits = ["train", "test"] if {"x_test", "y_test"} <= arrays.keys() else ["train"]
        for split in splits:
            _require_equal_lengths(path, {name: arrays[name] for name in (f"x_{split}", f"y_{split}")})
        x, y = (
            _concatenate_splits(path, {f"{name}_{split}": arrays[f"{name}_{split}"] for split in splits})
            for name in "xy"
        )
        test = np.arange(len(y)) >= len(arrays["y_train"])
    elif {"x", "y"} <= arrays.keys():
        _require_equal_lengths(path, {name: arrays[name] for name in ("x", "y", "test") if name in arrays})
        x, y = arrays["x"], arrays["y"]
        test = _parse_test_mask(_flatten_column(arrays.get("test", np.zeros(len(y), dtype=np.bool_))), path)
    else:
        content = f"only {', '.join(sorted(arrays))}" if arrays else "none of the expected arrays"
        raise ArtifactError(
            f"{path} contains {content}. Use x_train and y_train (and x_test and y_test), or x and y (and test)."
        )
    labels = encode_labels(path, _flatten_column(y))
    return Samples(_prepare_inputs(path, x), labels, test)


def read_parquet(path: Path) -> ParquetSamples:
    """Read the columns ``label``, ``text`` or ``image`` (PNG or JPEG), and optionally ``split`` ("train", "test").

    Raises
    ------
    ArtifactError
        The file has another format.
    """
    try:
        table = decode_parquet(path)
    except Exception as error:  # any error of Arrow or the system
        raise ArtifactError(f"{path} can't be read as Parquet ({_format_error(error)}).") from error
    names = set(table.column_names)
    if duplicates := sorted(name for name in names & SAMPLE_COLUMNS if table.column_names.count(name) > 1):
        raise ArtifactError(f"{path} has the column {duplicates[0]} more than once. Keep one of them.")
    if "label" not in names or not names & {"text", "image"}:
        raise ArtifactError(f"{path} has the columns {', '.join(table.column_names)}. Use label, and text or image.")
    if incomplete_columns := sorted(name for name in names & SAMPLE_COLUMNS if table[name].null_count):
        raise ArtifactError(f"{path}: the column {incomplete_columns[0]} has rows without a value. Give each row one.")
    labels = encode_labels(path, table["label"].to_numpy())
    split = table["split"].to_pylist() if "split" in names else ["train"] * len(table)
    if invalid_splits := sorted({str(value) for value in split} - {"train", "test"}):
        raise ArtifactError(f"{path}: the column split contains '{invalid_splits[0]}'. Use 'train' or 'test'.")
    test = np.array([value == "test" for value in split], dtype=np.bool_)
    if "text" in names:
        texts = table["text"].to_pylist()
        if not all(isinstance(text, str) for text in texts):
            raise ArtifactError(f"{path}: the column text contains {table['text'].type}. Use strings.")
        return ParquetSamples(texts, None, labels, test)
    cells = [cell["bytes"] if isinstance(cell, dict) else cell for cell in table["image"].to_pylist()]

    def make_opener(cell: bytes) -> Callable[[], IO[bytes]]:
        return lambda: BytesIO(cell)

    images = read_images([(f"{path}, row {row}", make_opener(cell)) for row, cell in enumerate(cells)])
    return ParquetSamples(None, images, labels, test)


def read_folder(path: Path) -> Samples:
    """Read images from one folder per class, below ``train`` and ``test`` or directly. Classes are sorted by name.

    Raises
    ------
    ArtifactError
        There are no images, or their sizes differ.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes

    split_folders = [path / split for split in ("train", "test") if (path / split).is_dir()] or [path]
    try:
        classes, index = find_classes(str(split_folders[0]))
    except OSError as error:
        raise ArtifactError(f"{split_folders[0]} contains no folders. Use one folder per class.") from error
    files: list[tuple[Path, int, bool]] = []
    for split in split_folders:
        for folder in sorted(path for path in split.iterdir() if path.is_dir()):
            if folder.name not in index:
                raise ArtifactError(
                    f"{folder}: class '{folder.name}' is not in {split_folders[0]}. Use the same classes in both."
                )
            image_files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
            files += [
                (file, index[folder.name], split.name == "test" and len(split_folders) == 2) for file in image_files
            ]
    if not files:
        raise ArtifactError(
            f"{path} contains no images. Put images into the folder of each class: {', '.join(classes)}."
        )
    x = read_images([(str(file), lambda file=file: file.open("rb")) for file, _, _ in files])  # type: ignore[misc]
    return Samples(x, np.array([label for _, label, _ in files]), np.array([test for _, _, test in files]))


def read_images(files: Sequence[tuple[str, Callable[[], IO[bytes]]]], color: bool = False) -> npt.NDArray[np.uint8]:
    """Decode images of one size, shape (n, c, h, w). They are gray if all files are gray and ``color`` is false.

    ``files`` are pairs of a name (for errors) and a function that opens the file.

    Raises
    ------
    ArtifactError
        A file is not an image, has another size, or has more than 8 bits per channel.
    """
    modes = {
        name: _decode_image(name, open_file, lambda image: image.mode)
        for name, open_file in files[: 0 if color else None]
    }
    if high_depth_images := [name for name, mode in modes.items() if mode.startswith(HIGH_DEPTH_MODES)]:
        raise ArtifactError(
            f"{high_depth_images[0]} has more than 8 bits per channel (Pillow's mode {modes[high_depth_images[0]]}). "
            "Use images with 8 bits, or floating-point numbers in an .npz file."
        )
    mode = "L" if modes and set(modes.values()) <= {"1", "L"} else "RGB"
    x: npt.NDArray[np.uint8] | None = None
    for row, (name, open_file) in enumerate(files):
        pixels = _decode_image(name, open_file, lambda image: np.asarray(image.convert(mode)))
        pixels = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
        if x is None:
            x = np.empty((len(files), *pixels.shape), dtype=np.uint8)
        if pixels.shape != x.shape[1:]:
            raise ArtifactError(
                f"{name} has {pixels.shape[2]}x{pixels.shape[1]} pixels, but others have "
                f"{x.shape[3]}x{x.shape[2]}. Use images of one size."
            )
        x[row] = pixels
    assert x is not None
    return x


def encode_labels(path: Path, labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Convert labels to classes 0 to C-1. Integers stay as they are, other values are numbered in sorted order."""
    if not len(labels) or labels.ndim != 1:
        raise ArtifactError(f"{path} has labels of shape {labels.shape}. Use one label per sample.")
    if np.issubdtype(labels.dtype, np.integer):
        if labels.min() < 0:
            raise ArtifactError(f"{path}: label {labels.min()} can't be used. Number the classes from 0.")
        return labels.astype(np.int64)
    if labels.dtype.kind in "fcmM" and (is_nan := np.isnan(labels)).any():
        raise ArtifactError(
            f"{path}: the label is NaN for {is_nan.sum()} of {len(labels)} samples, first for sample "
            f"{is_nan.argmax()}. Give each sample a class."
        )
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _prepare_inputs(path: Path, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if x.ndim == 4 and x.shape[-1] in CHANNELS:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    signed_dtype = np.promote_types(x.dtype, np.int8) if np.issubdtype(x.dtype, np.integer) else x.dtype
    has_tokens = np.issubdtype(signed_dtype, np.signedinteger) and x.ndim == 2 and x.dtype != np.uint8
    has_images = x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in CHANNELS
    has_floats = np.issubdtype(x.dtype, np.floating) and x.ndim > 1
    if not x.size or not (has_tokens or has_images or has_floats):
        raise ArtifactError(
            f"{path}: inputs of {x.dtype} with shape {x.shape} can't be used. Use images (uint8, gray or color), "
            "floating-point numbers, or token ids (signed integers, one row per sample)."
        )
    if has_tokens:
        if x.min() < 0:
            raise ArtifactError(f"{path}: token id {x.min()} can't be used. Number the token ids from 0.")
        return x.astype(signed_dtype, copy=False)
    if has_floats:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32, order="C", copy=False)  # dtype of stored samples
        if (is_invalid := ~np.isfinite(x).reshape(len(x), -1).all(1)).any():
            raise ArtifactError(
                f"{path}: the inputs of {is_invalid.sum()} of {len(x)} samples contain NaN or infinity as float32, "
                f"first those of sample {is_invalid.argmax()}. Use finite numbers in the range of float32."
            )
    return x


def _require_equal_lengths(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    lengths = {array.shape[:1] for array in arrays.values()}
    if len(lengths) > 1 or () in lengths:
        shapes = ", ".join(f"{name} of shape {array.shape}" for name, array in arrays.items())
        raise ArtifactError(f"{path} contains {shapes}. Use arrays with one entry per sample.")


def _concatenate_splits(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate the arrays of training and test samples."""
    kinds = {(array.shape[1:], array.dtype.kind.replace("u", "i")) for array in arrays.values()}
    if len(kinds) > 1:
        descriptions = " and ".join(
            f"{name} of {array.dtype} and shape {array.shape}" for name, array in arrays.items()
        )
        raise ArtifactError(f"{path} contains {descriptions}. Use the same type and shape, except for the length.")
    return np.concatenate(list(arrays.values()))


def _parse_test_mask(values: npt.NDArray[Any], path: Path) -> npt.NDArray[np.bool_]:
    """Convert the array ``test`` of a file to Booleans."""
    if values.ndim != 1 or values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise ArtifactError(
            f"{path}: the array test is {values.dtype} of shape {values.shape}. Use one Boolean, 0 or 1 per sample."
        )
    return values.astype(np.bool_)


def _flatten_column(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Flatten an array with one value per sample."""
    return array.ravel() if array.size == len(array) else array


def _decode_image(name: str, open_file: Callable[[], IO[bytes]], extract: Callable[[Image.Image], Any]) -> Any:
    from PIL import Image

    try:
        with open_file() as stream, Image.open(stream) as image:
            return extract(image)
    except Exception as error:  # any error of Pillow or the system
        raise ArtifactError(f"{name} can't be read as an image ({_format_error(error)}).") from error


def _format_error(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
