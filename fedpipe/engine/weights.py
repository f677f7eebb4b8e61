"""The participants of a round, and the weights of their uploads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.engine import contract
from fedpipe.engine.blocks import Block
from fedpipe.engine.server.server import call_server_hooks
from fedpipe.settings.federation import Federation


def select_participants(
    algorithm: Algorithm, seed: int, round_number: int, sizes: npt.NDArray[np.int64], load_server: Callable[[], State]
) -> list[int]:
    """Select the participants of a round in ascending order: the algorithm's, or a uniform draw.

    They are positions in ``sizes``, the numbers of training samples. ``load_server`` loads the server's state before
    the round. It is called only if the algorithm, which is bound to the round, has a rule.
    """
    if type(algorithm).select_participants is not Algorithm.select_participants:
        server = load_server()
        with call_server_hooks(algorithm, server):
            participants = algorithm.select_participants(server, torch.tensor(sizes))
        if participants is not None:
            return contract.validate_participants(algorithm, participants)
    return algorithm.federation.draw_participants(seed, round_number)


def compute_aggregation_weights(federation: Federation, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Compute the weights of clients with these numbers of samples."""
    return sizes if federation.weighting == "count" else np.ones_like(sizes)


class WeightedUploads(NamedTuple):
    """The participants of a round and their weights. An update that is not finite has no weight."""

    block: Block
    finite_mask: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.int64]

    @property
    def finite_uploads(self) -> Uploads:
        """The finite uploads, by client."""
        return self.renumber_uploads(self.block.ids)

    def renumber_uploads(self, numbers: Sequence[int]) -> Uploads:
        """The finite uploads, with these numbers of the clients."""
        rows, weights, states = np.flatnonzero(self.finite_mask).tolist(), self.weights.tolist(), self.block.uploads
        return Uploads([numbers[row] for row in rows], [weights[row] for row in rows], [states[row] for row in rows])

    @property
    def finite_kept_states(self) -> list[State]:
        """The kept states of the finite updates."""
        return list(itertools.compress(self.block.kept_states, self.finite_mask))
