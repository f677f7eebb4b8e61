"""Reads images from files and folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedpipe.core.components import pinned_files
from fedpipe.core.errors import ArtifactError, format_error
from fedpipe.data.samples import Column, Samples

if TYPE_CHECKING:
    from PIL import Image

#: Names of folders that are probably no classes.
SPLIT_NAMES = ("train", "training", "test", "testing", "val", "valid", "validation")
HIGH_DEPTH_MODES = ("I", "F")  #: prefixes of Pillow's modes with more than 8 bits, which it clips at 255


def read_folder(path: Path, image_size: int | None = None) -> Samples:
    """Read images from one folder per class, below ``train`` and ``test`` or directly. Classes are sorted by name.

    Raises
    ------
    ArtifactError
        There are no images, or their sizes differ.
    """
    from torchvision.datasets.folder import find_classes

    split_folders = _list_split_folders(path) or [path]
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
            is_test = split.name == "test" and len(split_folders) == 2
            files += [(file, index[folder.name], is_test) for file in _list_image_files(folder)]
    if not files:
        raise ArtifactError(
            f"{path} contains no images. Put images into the folder of each class: {', '.join(classes)}."
        )
    if empty_classes := [name for name in classes if index[name] not in {label for _, label, _ in files}]:
        raise ArtifactError(f"{path}: the folder '{empty_classes[0]}' contains no images. Remove it, or add images.")
    x = _read_image_files([file for file, _, _ in files], image_size)
    labels, test = np.array([label for _, label, _ in files]), np.array([test for _, _, test in files])
    return Samples(x, labels, test, class_names=tuple(classes))


def _list_split_folders(path: Path) -> list[Path]:
    """List the folders train and test, or train. Empty if the folders are those of classes."""
    names = sorted(folder.name for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
    if not ({*names} & {"train", "test"} or (names and {name.lower() for name in names} <= {*SPLIT_NAMES})):
        return []
    if names not in (["train"], ["test", "train"]):
        summary = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ArtifactError(
            f"{path} contains the folders {summary}. Use train and test, or one folder for each class. If these are "
            "classes, set dataset.levels to [label]."
        )
    return [path / name for name in reversed(names)]


def read_nested_folders(path: Path, levels: Sequence[str], image_size: int | None = None) -> Samples:
    """Read images from nested folders.

    Parameters
    ----------
    path
        The outermost folder.
    levels
        Names of the levels of folders below it, from the top: ``label``, ``split`` (with the folders train and test)
        if there is one, and others, which become columns. Images may also be in deeper folders.
    image_size
        See :func:`read_images`.

    Raises
    ------
    ArtifactError
        There are no images at this depth, or their sizes differ.
    """
    files = _list_image_files(path)
    folders = [file.relative_to(path).parts[:-1] for file in files]
    if shallow_files := [file for file, names in zip(files, folders, strict=True) if len(names) < len(levels)]:
        raise ArtifactError(
            f"dataset.levels: {shallow_files[0]} is not in {len(levels)} folders ({'/'.join(levels)}). Move it, or "
            "change the levels."
        )
    if not files:
        raise ArtifactError(f"{path} contains no images. Put images into folders ({'/'.join(levels)}).")
    columns = {level: Column.from_values([names[index] for names in folders]) for index, level in enumerate(levels)}
    split, labels = columns.pop("split", Column(np.zeros(len(files), dtype=np.int64), ("train",))), columns.pop("label")
    if invalid_splits := sorted({*split.names} - {"train", "test"}):
        raise ArtifactError(f"{path}: the folder of split '{invalid_splits[0]}' can't be used. Use train and test.")
    test = np.array([split.names[code] == "test" for code in split.codes], dtype=np.bool_)
    x = _read_image_files(files, image_size)
    return Samples(x, labels.codes, test, columns, labels.names)


def _list_image_files(path: Path) -> list[Path]:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return sorted(file for file in pinned_files.list_files(path) if file.suffix.lower() in IMG_EXTENSIONS)


def _read_image_files(files: Sequence[Path], image_size: int | None) -> npt.NDArray[np.uint8]:
    """Read files with images, shape (n, channels, height, width)."""

    def open_file(file: Path) -> IO[bytes]:
        return file.open("rb")

    return read_images([(str(file), partial(open_file, file)) for file in files], image_size)


def read_images(
    files: Sequence[tuple[str, Callable[[], IO[bytes]]]], image_size: int | None = None, *, is_color: bool = False
) -> npt.NDArray[np.uint8]:
    """Decode images.

    Parameters
    ----------
    files
        n pairs of a name (for errors) and a function that opens the file.
    image_size
        Width and height to which the largest square in the middle of each image is resized. If None, all images must
        have one size.
    is_color
        Whether the result has three channels even if all images are gray.

    Returns
    -------
    numpy.ndarray
        Shape (n, 1 or 3, h, w).

    Raises
    ------
    ArtifactError
        A file is not an image, has another size, or has more than 8 bits per channel.
    """
    modes = {
        name: _decode_image(name, open_file, lambda image: image.mode)
        for name, open_file in files[: 0 if is_color else None]
    }
    if high_depth_images := [name for name, mode in modes.items() if mode.startswith(HIGH_DEPTH_MODES)]:
        raise ArtifactError(
            f"{high_depth_images[0]} has more than 8 bits per channel (Pillow's mode {modes[high_depth_images[0]]}). "
            "Use images with 8 bits, or floating-point numbers in an .npz file."
        )
    mode = "L" if modes and set(modes.values()) <= {"1", "L"} else "RGB"
    x: npt.NDArray[np.uint8] | None = None
    for row, (name, open_file) in enumerate(files):
        pixels = _decode_image(
            name, open_file, lambda image: np.asarray(_crop_and_resize_image(image.convert(mode), image_size))
        )
        pixels = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
        if x is None:
            x = np.empty((len(files), *pixels.shape), dtype=np.uint8)
        if pixels.shape != x.shape[1:]:
            raise ArtifactError(
                f"{name} has {pixels.shape[2]}x{pixels.shape[1]} pixels, but others have "
                f"{x.shape[3]}x{x.shape[2]}. Use images of one size, or set dataset.image_size."
            )
        x[row] = pixels
    assert x is not None
    return x


def _crop_and_resize_image(image: Image.Image, size: int | None) -> Image.Image:
    from PIL import Image, ImageOps

    return image if size is None else ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)


def _decode_image(name: str, open_file: Callable[[], IO[bytes]], extract: Callable[[Image.Image], Any]) -> Any:
    from PIL import Image

    try:
        with open_file() as stream, Image.open(stream) as image:
            return extract(image)
    except Exception as error:  # any error of Pillow or the system
        raise ArtifactError(f"{name} can't be read as an image ({format_error(error)}).") from error
