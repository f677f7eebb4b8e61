"""Token ids of words in the training samples."""

import numpy as np
import numpy.typing as npt
import pytest

from fedpipe.data.sources import text

TEXTS = ["the film, the cast", "a film!", "the unknown unknown unknown"]
TEST = np.array([False, False, True])


def encode(texts: list[str] = TEXTS, vocabulary: int = 100, length: int = 6) -> npt.NDArray[np.signedinteger]:
    return text.encode_texts(texts, TEST, text.make_word_analyzer(), vocabulary, length)


def test_vocabulary_is_ranked_by_frequency_then_alphabet() -> None:
    """Frequencies in the training texts: the 2, film 2, a 1, cast 1."""
    assert encode().tolist() == [[1, 5, 4, 5, 7, 0], [1, 6, 4, 0, 0, 0], [1, 5, 2, 2, 2, 0]]


def test_vocabulary_contains_only_words_of_training_texts() -> None:
    changed = encode([*TEXTS[:2], "cast cast cast cast other"])
    assert np.array_equal(changed[:2], encode()[:2])
    assert changed[2].tolist() == [1, 7, 7, 7, 7, 2]


def test_words_outside_vocabulary_are_unknown() -> None:
    x = encode(vocabulary=6)
    assert x.tolist() == [[1, 5, 4, 5, 2, 0], [1, 2, 4, 0, 0, 0], [1, 5, 2, 2, 2, 0]]
    assert x.max() == 6 - 1


def test_long_text_is_truncated() -> None:
    assert encode(length=3).tolist() == [[1, 5, 4], [1, 6, 4], [1, 5, 2]]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(128, "int8"), (10_000, "int16"), (98_635, "int32")])
def test_token_ids_have_smallest_integer_type(vocabulary: int, dtype: str) -> None:
    assert encode(vocabulary=vocabulary).dtype == dtype


@pytest.mark.parametrize(
    ("sentence", "tokens"),
    [
        ("It's GREAT.<br /><br />Really", ["it's", "great", "br", "br", "really"]),
        ("one-two  (three)\tfour_five\n6/10", ["one", "two", "three", "four", "five", "6", "10"]),
        ("caf\u00e9 & \u201cquotes\u201d", ["caf\u00e9", "\u201cquotes\u201d"]),
    ],
)
def test_word_analyzer_matches_keras_tokens(sentence: str, tokens: list[str]) -> None:
    """The expected tokens are those of keras.preprocessing.text.text_to_word_sequence."""
    assert text.make_word_analyzer()(sentence) == tokens


@pytest.mark.parametrize(
    ("sentence", "tokens"),
    [
        ("It's GREAT. Really!", ["it", "'", "s", "great", ".", "really", "!"]),
        ('Say "yes"; or: (no), 5"disc?', ["say", "yes", "or", "(", "no", ")", ",", "5disc", "?"]),
        ("Reuters - $1.35 \\#39;s<br />x", ["reuters", "-", "$1", ".", "35", "\\#39", "s", "x"]),
    ],
)
def test_basic_english_analyzer_matches_torchtext_tokens(sentence: str, tokens: list[str]) -> None:
    """The expected tokens are those of torchtext.data.utils.get_tokenizer("basic_english")."""
    assert text.make_basic_english_analyzer()(sentence) == tokens
