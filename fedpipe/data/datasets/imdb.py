"""IMDB: movie reviews."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedpipe.data.datasets.base import Length, PublishedTexts, Samples, Vocabulary
from fedpipe.data.sources import text
from fedpipe.data.sources.fetch import PublishedFile

LABELS = {"neg": 0, "pos": 1}


@dataclass(frozen=True, kw_only=True)
class IMDB(PublishedTexts):
    """50,000 movie reviews, positive or negative, as token ids, half of them for testing.

    Ids and defaults are those of Keras's reader, which FedDW's code uses: 0 is padding, 1 starts a review, 2 is an
    unknown word, and 4 is the most frequent word of the training reviews. Longer reviews are truncated at the end.
    Words are ranked by their frequency in the training reviews. Keras does not publish how its own ranks were
    computed, and they differ by a few positions (the ids 14, 22, 16, 43, 530 of a review are 14, 22, 16, 43, 528 here).

    Source: A. L. Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011.

    Parameters
    ----------
    vocabulary
        Number of token ids.
    length
        Token ids per review.
    sha256
        SHA-256 of a mirror's ``imdb.parquet``, if you use it instead. `fedpipe download` fills it in.
    """

    classes: ClassVar[int] = 2
    size: ClassVar[int] = 50_000
    tests: ClassVar[int] = 25_000
    vocabulary: Vocabulary = 10_000
    length: Length = 200
    files: ClassVar[tuple[PublishedFile, ...]] = (
        PublishedFile(
            "imdb/aclImdb_v1.tar.gz",
            "md5:7c2ac02c03563afcf9b574c7e56c153a",
            ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
        ),
    )

    @override
    def _read(self, files: Sequence[Path]) -> Samples:
        reviews: dict[tuple[bool, int, int], str] = {}
        (path,) = files
        with tarfile.open(path) as archive:
            for member in archive:
                match PurePosixPath(member.name).parts:
                    case ("aclImdb", "train" | "test" as part, "neg" | "pos" as label, name):
                        stream = archive.extractfile(member)
                        assert stream is not None
                        number = int(name.partition("_")[0])
                        reviews[part == "test", LABELS[label], number] = stream.read().decode()
        order = sorted(reviews)
        labels = np.array([label for _, label, _ in order])
        return self._encode_texts([reviews[index] for index in order], labels, np.array([test for test, _, _ in order]))

    @override
    def _encode_texts(
        self, texts: Sequence[str], labels: npt.NDArray[np.int64], test: npt.NDArray[np.bool_]
    ) -> Samples:
        return Samples(
            text.encode_texts(texts, test, text.make_word_analyzer(), self.vocabulary, self.length), labels, test
        )
