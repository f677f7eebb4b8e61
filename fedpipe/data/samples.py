"""The samples of a data set, for code that reads or stores them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Column(NamedTuple):
    """One value per sample, such as its writer. Values of any type are numbered in sorted order."""

    codes: npt.NDArray[np.int64]  #: number of each sample's value, shape (n,), or -1 if it has none
    names: tuple[str, ...]  #: the values as text, in the order of their numbers

    @classmethod
    def from_values(cls, values: Any) -> Column:
        """Number the values of an array or list, shape (n,): texts, numbers, dates or Booleans, None or NaN if missing.

        Raises
        ------
        ValueError
            The values are of several types, or of a type that can't be sorted.
        """
        import pyarrow as pa

        array = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values, from_pandas=True)
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if pa.types.is_null(array.type):
            return cls(np.full(len(array), -1), ())
        if not pa.types.is_dictionary(array.type):
            array = array.dictionary_encode()
        distinct_values = array.dictionary.to_pylist()
        is_missing = [value is None or value != value for value in distinct_values]  # only NaN differs from itself
        order = sorted(np.flatnonzero(~np.array(is_missing, dtype=np.bool_)), key=distinct_values.__getitem__)
        codes = np.full(len(distinct_values) + 1, -1, dtype=np.int64)  # the last one is that of null
        codes[order] = np.arange(len(order))
        numbers = array.indices.fill_null(len(distinct_values)).to_numpy(zero_copy_only=False).astype(np.int64)
        return cls(codes[numbers], tuple(str(distinct_values[index]) for index in order))


class Samples(NamedTuple):
    """All samples of a data set, training and test together, in a fixed order."""

    x: npt.NDArray[Any]  #: inputs, shape (n, *shape): images in uint8 (c, h, w), token ids in integers, or floats
    y: npt.NDArray[np.int64]  #: classes, shape (n,), values 0 to C-1
    test: npt.NDArray[np.bool_]  #: whether a sample belongs to the official test set, shape (n,)
    columns: Mapping[str, Column] = MappingProxyType({})  #: further columns by name, which partition schemes can read
    class_names: tuple[str, ...] = ()  #: names of classes 0 to C-1, empty if labels are numbers without names
    omitted_columns: Mapping[str, str] = MappingProxyType({})  #: reason, with advice, why an array is not a column
