"""Samples that are none: what stands in for a published data set in a try, in its shape."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedpipe import registry
from fedpipe.data.datasets.base import Dataset, Facts, Published, Samples
from fedpipe.data.fetch import Fetcher
from fedpipe.errors import SettingsError

SIDE = 4  #: of a class's pattern, which is drawn as large as the images
CONTRAST, NOISE = 40, 50  #: of patterns and of each pixel, in steps of 255
WORDS = 50  #: of a class's own among the token ids
OWN = 0.3  #: share of a text's words that are its class's own


@dataclass(frozen=True, kw_only=True)
class Generated(Dataset):
    """Noise in the shape of a published data set, to try a study without its data: numbers made of it are no results.

    An image is its class's pattern of 4x4 squares under noise; a text's words are drawn at random, a part of them from
    its class's own. Classes are as large as each other, and as large a share is for testing as in the data set.
    `dataset.absent: generate` takes it in place of a data set that is not at hand.

    Parameters
    ----------
    like
        The published data set whose shape, classes and share of tests it has.
    samples
        How many.
    """

    like: Annotated[str, Field(min_length=1)] = "mnist"
    samples: Annotated[int, Field(ge=1)] = 2400

    @property
    def facts(self) -> Facts:
        """See :class:`~fedpipe.data.datasets.base.Dataset`."""
        published = self._published()
        shown = cast(Facts, published.facts)
        return shown._replace(size=self.samples, tests=self.samples * published.tests // published.size)

    @property
    def identity(self) -> str:
        """See :class:`~fedpipe.data.datasets.base.Dataset`: of no other data set's samples."""
        return hashlib.sha256(f"generated like {self.like}: {self.samples} of {self.facts}".encode()).hexdigest()

    def measure(self, samples: Samples) -> Facts:
        """See :class:`~fedpipe.data.datasets.base.Dataset`."""
        return self.facts._replace(size=len(samples.y), tests=int(samples.test.sum()))

    def load(self, fetch: Fetcher) -> Samples:
        """See :class:`~fedpipe.data.datasets.base.Dataset`: the same samples each time."""
        facts = self.facts
        random = np.random.default_rng(int(self.identity[:16], 16))
        y = random.permutation(np.arange(facts.size) % facts.classes)
        test = np.arange(facts.size) >= facts.size - facts.tests
        x = _texts(random, y, facts) if facts.vocabulary else _images(random, y, facts)
        return Samples(x, y, test)

    def _published(self) -> Published:
        found = registry.build(registry.DATASET, self.like, {}, "dataset.like") if self.like != "generated" else None
        if not isinstance(found, Published):
            raise SettingsError(f"dataset.like: '{self.like}' is no published data set; it should be one, as cifar10.")
        return found


def _images(random: np.random.Generator, y: npt.NDArray[np.int64], facts: Facts) -> npt.NDArray[np.uint8]:
    channels, height, width = facts.shape
    patterns = random.choice([-CONTRAST, CONTRAST], (facts.classes, channels, SIDE, SIDE))
    rows, columns = (np.arange(length) * SIDE // length for length in (height, width))
    noise = NOISE * random.standard_normal((len(y), *facts.shape), dtype=np.float32)
    return np.clip(127.5 + patterns[y][:, :, rows][:, :, :, columns] + noise, 0, 255).astype(np.uint8)


def _texts(random: np.random.Generator, y: npt.NDArray[np.int64], facts: Facts) -> npt.NDArray[np.signedinteger]:
    words = facts.vocabulary or 0
    ids = random.integers(1, words, (len(y), *facts.shape))
    own = random.integers(1, words, (facts.classes, WORDS))
    chosen = np.take_along_axis(own[y], random.integers(0, WORDS, ids.shape), axis=1)
    return np.where(random.random(ids.shape) < OWN, chosen, ids).astype(np.min_scalar_type(-words))
