"""Fashion-MNIST: pictures of clothes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from fedpipe.data.datasets import mnist
from fedpipe.data.datasets.base import PublishedImages, Samples
from fedpipe.data.sources.fetch import PublishedFile

BASE_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


@dataclass(frozen=True, kw_only=True)
class FashionMNIST(PublishedImages):
    """70,000 gray 28x28 images of clothes in ten classes, 10,000 of them for testing.

    Source: H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms, arXiv:1708.07747, 2017. Read by `torchvision.datasets.FashionMNIST` and checked with its checksums.

    Parameters
    ----------
    sha256
        SHA-256 of a mirror's ``fashion_mnist.npz``, if you use it instead. `fedpipe download` fills it in.
    """

    shape: ClassVar[tuple[int, ...]] = (1, 28, 28)
    classes: ClassVar[int] = 10
    size: ClassVar[int] = 70_000
    tests: ClassVar[int] = 10_000
    checksum: ClassVar[str] = "73b215efdd7b5223b57089e53726ff2f9864a605739c15e306cb38bdf0b4153f"
    files: ClassVar[tuple[PublishedFile, ...]] = tuple(
        PublishedFile(f"fashion-mnist/{name}", f"md5:{md5}", (BASE_URL + name,)) for name, md5 in MD5.items()
    )

    @override
    def _read(self, files: Sequence[Path]) -> Samples:
        from torchvision.datasets import FashionMNIST as Reader

        return mnist.read_idx_files(Reader, files)
