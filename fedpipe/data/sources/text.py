"""Converts texts to token ids. Words are ranked by their frequency in the training samples."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Analyzer = Callable[[str], list[str]]

#: Ids of the readers of Keras (IMDB) and PFLlib (AG News): padding, start, unknown word, end (unused in both).
PADDING, START, UNKNOWN, END = range(4)
FIRST_WORD_ID = 4  #: id of the most frequent word


def make_word_analyzer() -> Analyzer:
    """Analyzer for lower-case words between blanks and punctuation. Apostrophes are part of a word.

    Source: Keras's ``text_to_word_sequence``, on which its IMDB reader is based (88,582 different words in the
    training reviews).
    """
    return _make_analyzer(r"""[^ \t\n!"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~]+""")


def make_basic_english_analyzer() -> Analyzer:
    """Analyzer for lower-case words, in which ``. , ( ) ! ? '`` are separate words and ``" ; :`` are dropped.

    Source: torchtext's tokenizer "basic_english", which PFLlib uses for AG News.
    """
    return _make_analyzer(
        r"[.,()!?']|[^\s.,()!?';:]+", lambda text: re.sub("<br />", " ", text.lower().replace('"', ""))
    )


def encode_texts(
    texts: Sequence[str], test: npt.NDArray[np.bool_], analyze: Analyzer, vocabulary: int, length: int
) -> npt.NDArray[np.signedinteger]:
    """Convert each text to token ids, beginning with `START`, truncated or padded at the end.

    Parameters
    ----------
    texts
        Training and test samples, n of them.
    test
        Test samples, shape (n,). The vocabulary ignores them.
    analyze
        Splits a text into words.
    vocabulary
        Number of ids: the reserved ones and those of the most frequent words (ties in alphabetical order). All other
        words are `UNKNOWN`.
    length
        Number of ids per sample.

    Returns
    -------
    numpy.ndarray
        Ids in the smallest sufficient signed integer type, shape (n, length).
    """
    counts: Counter[str] = Counter()
    for text, held_out in zip(texts, test, strict=True):
        if not held_out:
            counts.update(analyze(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - FIRST_WORD_ID]
    ids = {word: FIRST_WORD_ID + rank for rank, word in enumerate(ranked)}
    token_ids = np.full((len(texts), length), PADDING, dtype=np.min_scalar_type(-vocabulary))
    for row, text in zip(token_ids, texts, strict=True):
        row_ids = [START, *(ids.get(word, UNKNOWN) for word in analyze(text)[: length - 1])]
        row[: len(row_ids)] = row_ids
    return token_ids


def _make_analyzer(pattern: str, preprocessor: Callable[[str], str] | None = None) -> Analyzer:
    from sklearn.feature_extraction.text import CountVectorizer

    return CountVectorizer(token_pattern=pattern, preprocessor=preprocessor).build_analyzer()
