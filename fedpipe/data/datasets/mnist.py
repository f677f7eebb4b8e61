"""MNIST: handwritten digits."""

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

BASE_URLS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


@dataclass(frozen=True, kw_only=True)
class MNIST(PublishedImages):
    """70,000 gray 28x28 images of handwritten digits, 10,000 of them for testing.

    Source: Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, Gradient-Based Learning Applied to Document Recognition,
    Proceedings of the IEEE 86, 1998. Read by `torchvision.datasets.MNIST` and checked with its checksums.

    Parameters
    ----------
    sha256
        SHA-256 of a mirror's ``mnist.npz``, if you use it instead. `fedpipe download` fills it in.
    """

    shape: ClassVar[tuple[int, ...]] = (1, 28, 28)
    classes: ClassVar[int] = 10
    size: ClassVar[int] = 70_000
    tests: ClassVar[int] = 10_000
    checksum: ClassVar[str] = "7475069f404ed055de9d842778fbd08416de10463e5cd973927382ee08daa136"
    files: ClassVar[tuple[PublishedFile, ...]] = tuple(
        PublishedFile(f"mnist/{name}", f"md5:{md5}", tuple(host + name for host in BASE_URLS))
        for name, md5 in MD5.items()
    )

    @override
    def _read(self, files: Sequence[Path]) -> Samples:
        from torchvision.datasets import MNIST as Reader  # noqa: N811

        return read_idx_files(Reader, files)


def read_idx_files(reader: Any, files: Sequence[Path]) -> Samples:
    """Read the four compressed files with torchvision's reader, which checks them again."""
    with tempfile.TemporaryDirectory() as root:
        raw = Path(root) / reader.__name__ / "raw"
        raw.mkdir(parents=True)
        for file in files:
            (raw / file.name).symlink_to(file.resolve())
        splits = [reader(root, train=train, download=True) for train in (True, False)]
    x = np.concatenate([split.data.numpy() for split in splits])[:, None]
    y = np.concatenate([split.targets.numpy() for split in splits])
    return Samples(x, y, np.arange(len(y)) >= len(splits[0]))
