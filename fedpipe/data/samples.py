"""The samples of a data set, for code that reads or stores them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Samples(NamedTuple):
    """All samples of a data set, training and test together, in a fixed order."""

    x: npt.NDArray[Any]  #: inputs, shape (n, *shape): images in uint8 (c, h, w), token ids in integers, or floats
    y: npt.NDArray[np.int64]  #: classes, shape (n,), values 0 to C-1
    test: npt.NDArray[np.bool_]  #: whether a sample belongs to the official test set, shape (n,)
