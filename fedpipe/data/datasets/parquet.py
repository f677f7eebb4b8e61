"""A user's table of texts or images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from fedpipe.data.datasets.base import DatasetInfo, Length, Samples, UserDataset, Vocabulary
from fedpipe.data.sources import text


@dataclass(frozen=True, kw_only=True)
class Parquet(UserDataset):
    """Your own table with the columns label, text or image (encoded, all of one size), and split ("train", "test").

    Without a column split there is no test set. Labels are integers from 0, or values that can be sorted. Texts are
    tokenized like IMDB's.

    Parameters
    ----------
    path
        The file.
    vocabulary
        Number of token ids.
    length
        Token ids per text.
    sha256
        SHA-256 of the file. `fedpipe download` fills it in.
    """

    vocabulary: Vocabulary = 10_000
    length: Length = 200

    @override
    def infer_info(self, samples: Samples) -> DatasetInfo:
        info = super().infer_info(samples)
        return info if info.vocabulary is None else info._replace(vocabulary=self.vocabulary)

    @override
    def _read(self, path: Path) -> Samples:
        from fedpipe.data.sources.formats import read_parquet

        table = read_parquet(path)
        if table.texts is None:
            assert table.images is not None
            return Samples(table.images, table.labels, table.test)
        x = text.encode_texts(table.texts, table.test, text.make_word_analyzer(), self.vocabulary, self.length)
        return Samples(x, table.labels, table.test)
