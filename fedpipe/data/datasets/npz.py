"""One's own arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedpipe.data.datasets.base import Samples, UserDataset


@dataclass(frozen=True, kw_only=True)
class Npz(UserDataset):
    """Your own arrays: x_train and y_train (x_test and y_test), or x and y (and test, a mask), in an .npz.

    Inputs of uint8 are images, with or without channels, which stand first or last; of floats, anything; of other
    integers, token ids. Labels are integers from 0, or anything that can be sorted.

    Parameters
    ----------
    path
        The file.
    sha256
        Its SHA-256; `fedpipe download` fills it in.
    """

    def _read(self, path: Path) -> Samples:
        from fedpipe.data.sources.formats import read_npz

        return read_npz(path)
