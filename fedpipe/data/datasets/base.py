"""What a data set is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from fedpipe.registry import Component


class Samples(NamedTuple):
    """All samples of a data set, training and test together, in a fixed order."""

    x: npt.NDArray[np.float32]  #: inputs, shape (n, *shape)
    y: npt.NDArray[np.int64]  #: classes, shape (n,), values 0 to C-1
    test: npt.NDArray[np.bool_]  #: whether a sample belongs to the official test set, shape (n,)


@dataclass(frozen=True, kw_only=True)
class Dataset(Component):
    """A named collection of labelled samples, with the official split that belongs to it."""

    shape: ClassVar[tuple[int, ...]]  #: shape of one input, channels first
    classes: ClassVar[int]  #: number of classes C
    size: ClassVar[int]  #: number of samples n
    sha256: ClassVar[str]  #: checksum of the canonical bytes (`fedpipe.data.store.checksum`); part of every run's key

    def load(self) -> Samples:
        """Obtain the samples, from the package, a mirror or the network."""
        raise NotImplementedError
