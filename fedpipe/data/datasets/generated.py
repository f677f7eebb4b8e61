"""Synthetic samples that replace a published data set in a smoke test."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import override

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.data.datasets.base import Dataset, DatasetInfo, PublishedDataset, Samples
from fedpipe.data.sources.fetch import Fetcher

PATTERN_SIDE = 4  #: side of a class's pattern before it is scaled to the image
CONTRAST, NOISE = 40, 50  #: of the patterns and of each pixel, in units of 1/255
WORDS_PER_CLASS = 50  #: number of token ids that are typical of one class
CLASS_WORD_FRACTION = 0.3  #: fraction of a text's words that are typical of its class


@dataclass(frozen=True, kw_only=True)
class Generated(Dataset):
    """Synthetic samples in the shape of a published data set, for smoke tests. Do not report numbers made from them.

    An image is its class's pattern of 4x4 squares plus noise. A text's words are drawn at random, a fraction of them
    from words that are typical of its class. Classes have equal sizes, and the fraction of test samples is that of the
    published data set. With `dataset.on_missing: generate` they replace a data set that is missing.

    Parameters
    ----------
    like
        Published data set whose shape, classes and test fraction are used.
    samples
        Number of samples.
    """

    like: Annotated[str, Field(min_length=1)] = "mnist"
    samples: Annotated[int, Field(ge=1)] = 2400

    @property
    @override
    def info(self) -> DatasetInfo:
        published_dataset = self._build_published_dataset()
        published_info = cast(DatasetInfo, published_dataset.info)
        return published_info._replace(
            size=self.samples, tests=self.samples * published_dataset.tests // published_dataset.size
        )

    @property
    @override
    def content_digest(self) -> str:
        """Digest that differs from that of every other data set."""
        return hashlib.sha256(f"generated like {self.like}: {self.samples} of {self.info}".encode()).hexdigest()

    @override
    def infer_info(self, samples: Samples) -> DatasetInfo:
        return self.info._replace(size=len(samples.y), tests=int(samples.test.sum()))

    @override
    def load(self, fetch: Fetcher) -> Samples:
        """Generate the samples, the same ones each time."""
        info = self.info
        random = np.random.default_rng(int(self.content_digest[:16], 16))
        y = random.permutation(np.arange(info.size) % info.classes)
        test = np.arange(info.size) >= info.size - info.tests
        x = _generate_texts(random, y, info) if info.vocabulary else _generate_images(random, y, info)
        return Samples(x, y, test)

    def _build_published_dataset(self) -> PublishedDataset:
        dataset = (
            registry.build_component(component.DATASET, self.like, {}, "dataset.like")
            if self.like != "generated"
            else None
        )
        if not isinstance(dataset, PublishedDataset):
            raise SettingsError(f"dataset.like: '{self.like}' is not a published data set. Use one, such as cifar10.")
        return dataset


def _generate_images(random: np.random.Generator, y: npt.NDArray[np.int64], info: DatasetInfo) -> npt.NDArray[np.uint8]:
    channels, height, width = info.shape
    patterns = random.choice([-CONTRAST, CONTRAST], (info.classes, channels, PATTERN_SIDE, PATTERN_SIDE))
    rows, columns = (np.arange(length) * PATTERN_SIDE // length for length in (height, width))
    noise = NOISE * random.standard_normal((len(y), *info.shape), dtype=np.float32)
    return np.clip(127.5 + patterns[y][:, :, rows][:, :, :, columns] + noise, 0, 255).astype(np.uint8)


def _generate_texts(
    random: np.random.Generator, y: npt.NDArray[np.int64], info: DatasetInfo
) -> npt.NDArray[np.signedinteger]:
    vocabulary_size = info.vocabulary or 0
    ids = random.integers(1, vocabulary_size, (len(y), *info.shape))
    class_words = random.integers(1, vocabulary_size, (info.classes, WORDS_PER_CLASS))
    sampled_words = np.take_along_axis(class_words[y], random.integers(0, WORDS_PER_CLASS, ids.shape), axis=1)
    return np.where(random.random(ids.shape) < CLASS_WORD_FRACTION, sampled_words, ids).astype(
        np.min_scalar_type(-vocabulary_size)
    )
