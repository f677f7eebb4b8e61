"""AG News: short news articles in four classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedpipe.data.datasets.base import Length, PublishedTexts, Samples, Vocabulary
from fedpipe.data.sources import text
from fedpipe.data.sources.fetch import PublishedFile

BASE_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
MD5 = {"train.csv": "b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "d52ea96a97a2d943681189a97654912d"}


@dataclass(frozen=True, kw_only=True)
class AGNews(PublishedTexts):
    """127,600 news articles (world, sports, business, science) as token ids, 7,600 of them for testing.

    Title and description are one text, tokenized like torchtext's "basic_english". The ids are those of PFLlib's
    generator, which cwFedAvg's code uses: 0 is padding, 1 starts a text, 2 is an unknown word, and 4 is the most
    frequent word. PFLlib's vocabulary of 98,635 ids, the default here, includes words of the test texts. Here the
    vocabulary comes from the training texts alone, so its last ids are unused.

    Source: X. Zhang, J. Zhao and Y. LeCun, Character-level Convolutional Networks for Text Classification, NeurIPS
    2015.

    Parameters
    ----------
    vocabulary
        Number of token ids.
    length
        Token ids per text.
    sha256
        SHA-256 of a mirror's ``ag_news.parquet``, if you use it instead. `fedpipe download` fills it in.
    """

    classes: ClassVar[int] = 4
    size: ClassVar[int] = 127_600
    tests: ClassVar[int] = 7_600
    vocabulary: Vocabulary = 98_635
    length: Length = 200
    files: ClassVar[tuple[PublishedFile, ...]] = tuple(
        PublishedFile(f"ag-news/{name}", f"md5:{md5}", (BASE_URL + name,)) for name, md5 in MD5.items()
    )

    @override
    def _read(self, files: Sequence[Path]) -> Samples:
        import pandas as pd

        frames = [pd.read_csv(file, header=None, keep_default_na=False) for file in files]
        rows = pd.concat(frames, ignore_index=True)
        labels = rows[0].to_numpy(np.int64) - 1  # classes 1 to 4
        return self._encode_texts((rows[1] + " " + rows[2]).tolist(), labels, np.arange(len(rows)) >= len(frames[0]))

    @override
    def _encode_texts(
        self, texts: Sequence[str], labels: npt.NDArray[np.int64], test: npt.NDArray[np.bool_]
    ) -> Samples:
        return Samples(
            text.encode_texts(texts, test, text.make_basic_english_analyzer(), self.vocabulary, self.length),
            labels,
            test,
        )
