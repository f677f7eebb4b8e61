"""Handwritten digits of 8x8 pixels, which are part of scikit-learn, so you need no network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from fedpipe.data.datasets.base import Dataset, Samples
from fedpipe.data.sources.fetch import Fetcher


@dataclass(frozen=True, kw_only=True)
class Digits(Dataset):
    """1,797 gray 8x8 images of the digits 0 to 9, pixels in [0, 1].

    The published collection has no test set. Here the official test set is a stratified fifth, drawn once
    (``random_state=0``). It is the same for all seeds of a study.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998
    (its test part, as in ``sklearn.datasets.load_digits``).
    """

    shape: ClassVar[tuple[int, ...]] = (1, 8, 8)
    classes: ClassVar[int] = 10
    size: ClassVar[int] = 1797
    tests: ClassVar[int] = 360
    checksum: ClassVar[str] = "6c22173b92213b98d63c5dfb1ef609779fcc73b493cacdd73b16ddcecde4bec9"

    @override
    def load(self, fetch: Fetcher) -> Samples:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        x = (digits.images / 16).astype(np.float32)[:, None]  # multiples of 1/16 are exact in float32
        y = digits.target.astype(np.int64)
        _, held_out = train_test_split(np.arange(len(y)), stratify=y, test_size=0.2, random_state=0)
        test = np.zeros(len(y), dtype=np.bool_)
        test[held_out] = True
        return Samples(x, y, test)
