"""The weights of a round's uploads."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.engine.blocks import Block


class WeightedUploads(NamedTuple):
    """The participants of a round and what each counts for; an update that is not finite counts for nothing."""

    block: Block
    finite_mask: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.int64]

    @property
    def uploads(self) -> Uploads:
        """Those that count, as the server reads them."""
        rows = np.flatnonzero(self.finite_mask).tolist()
        ids, weights, states = self.block.ids, self.weights.tolist(), self.block.uploads
        return Uploads([ids[row] for row in rows], [weights[row] for row in rows], [states[row] for row in rows])

    @property
    def kept_states(self) -> list[State]:
        """What they keep."""
        return list(itertools.compress(self.block.kept_states, self.finite_mask))
