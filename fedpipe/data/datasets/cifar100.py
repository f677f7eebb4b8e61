"""CIFAR-100: small photographs in many classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from fedpipe.data.datasets import cifar10
from fedpipe.data.datasets.base import PublishedImages, Samples
from fedpipe.data.sources.fetch import PublishedFile


@dataclass(frozen=True, kw_only=True)
class CIFAR100(PublishedImages):
    """60,000 color 32x32 photographs in 100 (fine) classes, 10,000 of them for testing.

    Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Read by
    `torchvision.datasets.CIFAR100` and checked with its checksums.

    Parameters
    ----------
    sha256
        SHA-256 of a mirror's ``cifar100.npz``, if you use it instead. `fedpipe download` fills it in.
    """

    shape: ClassVar[tuple[int, ...]] = (3, 32, 32)
    classes: ClassVar[int] = 100
    size: ClassVar[int] = 60_000
    tests: ClassVar[int] = 10_000
    files: ClassVar[tuple[PublishedFile, ...]] = (
        PublishedFile(
            "cifar100/cifar-100-python.tar.gz",
            "md5:eb9058c3a382ffc7106e4002c42a8d85",
            ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
        ),
    )

    @override
    def _read(self, files: Sequence[Path]) -> Samples:
        from torchvision.datasets import CIFAR100 as Reader  # noqa: N811

        return cifar10.read_torchvision_archive(Reader, *files)
