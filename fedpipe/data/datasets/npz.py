"""A user's arrays in an .npz file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from fedpipe.data.datasets.base import Samples, UserDataset


@dataclass(frozen=True, kw_only=True)
class Npz(UserDataset):
    """Your arrays in an .npz file: x_train, y_train, x_test and y_test, or x and y.

    Without x_test and y_test there is no test set. Next to x and y, a Boolean array `test` can mark the test samples.
    Inputs of dtype uint8 are images, with channels first, last or absent. Floats can have any shape. With four axes, of
    which the last one has length 1 or 3, they are images with channels last. Other integers are token ids of texts:
    words have ids from 1, and 0 is padding at the end of a text. Labels are integers from 0, or values that can be
    sorted. Each other array with one value per sample is a column for partition schemes, such as writer (or
    writer_train and writer_test).

    Parameters
    ----------
    path
        The file.
    sha256
        SHA-256 of the file. `fedpipe download` fills it in.
    """

    @override
    def _read(self, path: Path) -> Samples:
        from fedpipe.data.sources.formats import read_npz

        return read_npz(path)
