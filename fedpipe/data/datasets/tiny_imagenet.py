"""Tiny ImageNet: 200 classes of ImageNet at 64x64 pixels."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar

import numpy as np
from typing_extensions import override

from fedpipe.core.errors import ArtifactError
from fedpipe.data.datasets.base import PublishedImages, Samples
from fedpipe.data.sources.fetch import PublishedFile


@dataclass(frozen=True, kw_only=True)
class TinyImageNet(PublishedImages):
    """110,000 color 64x64 photographs in 200 classes. The 10,000 for validation are the test set.

    The labels of the published test part are secret. Classes are ordered by WordNet id, and the training images of a
    class by number.

    Source: Y. Le and X. Yang, Tiny ImageNet Visual Recognition Challenge, Stanford CS 231N, 2015.

    Parameters
    ----------
    sha256
        SHA-256 of a mirror's ``tiny_imagenet.npz``, if you use it instead. `fedpipe download` fills it in.
    """

    shape: ClassVar[tuple[int, ...]] = (3, 64, 64)
    classes: ClassVar[int] = 200
    size: ClassVar[int] = 110_000
    tests: ClassVar[int] = 10_000
    files: ClassVar[tuple[PublishedFile, ...]] = (
        PublishedFile(
            "tiny-imagenet/tiny-imagenet-200.zip",
            "md5:90528d7ca1a48142e341f4ef8d21d0de",
            ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        ),
    )

    @override
    def _read(self, files: Sequence[Path]) -> Samples:
        from fedpipe.data.sources.images import read_images

        (path,) = files
        with zipfile.ZipFile(path) as archive:
            members = {name for name in archive.namelist() if name.endswith(".JPEG")}
            train = sorted((name for name in members if "/train/" in name), key=_parse_class_and_number)
            ids = sorted({PurePosixPath(name).parts[2] for name in train})
            validation = archive.read("tiny-imagenet-200/val/val_annotations.txt").decode().splitlines()
            held_out = [line.split("\t")[:2] for line in validation]
            names = [*train, *(f"tiny-imagenet-200/val/images/{name}" for name, _ in held_out)]
            labels = [PurePosixPath(name).parts[2] for name in train] + [label for _, label in held_out]
            if missing_names := sorted(set(names) - members):
                raise ArtifactError(f"{path} lacks {missing_names[0]}.")

            def make_image_opener(name: str) -> Callable[[], IO[bytes]]:
                return lambda: archive.open(name)

            x = read_images([(f"{path}, {name}", make_image_opener(name)) for name in names], is_color=True)
        y = np.searchsorted(ids, labels)
        return Samples(x, y, np.arange(len(y)) >= len(train))


def _parse_class_and_number(name: str) -> tuple[str, int]:
    """Class and number of ``.../train/n01443537/images/n01443537_17.JPEG``."""
    wordnet, _, number = PurePosixPath(name).stem.partition("_")
    return wordnet, int(number)
