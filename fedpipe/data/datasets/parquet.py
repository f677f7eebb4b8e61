"""A user's table of texts, images or numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from fedpipe.data.datasets.base import Samples, TableDataset, UserDataset


@dataclass(frozen=True, kw_only=True)
class Parquet(TableDataset, UserDataset):
    """Your own table with the columns label, text or image (bytes of PNG or JPEG), and split ("train", "test").

    You can use other columns: ``input: pixels, label: digit`` for texts or images, or ``input: [age, weight]`` for
    numbers. Without a column split there is no test set. Labels are integers from 0, or values that can be sorted.
    Partition schemes can read all other columns. Parquet files of Hugging Face have
    this format, also those with images.

    Parameters
    ----------
    path
        The file.
    input
        Column of texts or images, or a list of columns of numbers. By default text or image.
    label
        Column of the labels.
    tokens
        Tokens of a text: words (in lower case, as in IMDB) or characters.
    vocabulary
        Number of token ids.
    length
        Token ids per text.
    image_size
        Width and height of the images in pixels. They are cropped to squares and resized. By default, they must have
        one size.
    sha256
        SHA-256 of the file. `fedpipe download` fills it in.
    """

    @override
    def _read(self, path: Path) -> Samples:
        from fedpipe.data.sources.formats import load_table

        return self.make_samples(load_table(path), str(path))
