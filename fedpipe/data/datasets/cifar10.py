"""CIFAR-10: small photographs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from fedpipe.data.datasets.base import PublishedImages, Samples
from fedpipe.data.sources.fetch import PublishedFile


@dataclass(frozen=True, kw_only=True)
class CIFAR10(PublishedImages):
    """60,000 color 32x32 photographs in ten classes, 10,000 of them for testing.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Read by
    `torchvision.datasets.CIFAR10` and checked with its checksums.

    Parameters
    ----------
    sha256
        SHA-256 of a mirror's ``cifar10.npz``, if you use it instead. `fedpipe download` fills it in.
    """

    shape: ClassVar[tuple[int, ...]] = (3, 32, 32)
    classes: ClassVar[int] = 10
    size: ClassVar[int] = 60_000
    tests: ClassVar[int] = 10_000
    files: ClassVar[tuple[PublishedFile, ...]] = (
        PublishedFile(
            "cifar10/cifar-10-python.tar.gz",
            "md5:c58f30108f718f92721af3b95e74349a",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
        ),
    )

    @override
    def _read(self, files: Sequence[Path]) -> Samples:
        from torchvision.datasets import CIFAR10 as Reader  # noqa: N811

        return read_torchvision_archive(Reader, *files)


def read_torchvision_archive(reader: Any, archive: Path) -> Samples:
    """Read the archive with torchvision's reader, which checks it again."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / archive.name).symlink_to(archive.resolve())
        splits = [reader(root, train=train, download=True) for train in (True, False)]
    x = np.concatenate([split.data for split in splits]).transpose(0, 3, 1, 2)
    y = np.concatenate([np.asarray(split.targets) for split in splits])
    return Samples(x, y, np.arange(len(y)) >= len(splits[0]))
