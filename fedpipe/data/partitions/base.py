"""What a partition scheme is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpipe.errors import SettingsError
from fedpipe.registry import Component

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Scheme(Component):
    """A rule that deals samples to clients."""

    seed: int | None = None  #: fixes the partition for all seeds of a study; without it each seed deals anew

    def check(self, clients: int, classes: int, samples: int) -> None:
        """Refuse what can't be done, before any job starts; schemes add their own conditions to this one.

        Raises
        ------
        SettingsError
            One sentence that begins with the key of params.yaml.
        """
        if clients > samples:
            raise SettingsError(
                f"federation.clients: {clients} is more than the {samples} samples to deal; "
                f"it should be at most {samples}."
            )

    def assign(self, labels: Integers, clients: int, rng: np.random.Generator) -> Integers:
        """The client of each sample.

        Parameters
        ----------
        labels
            Class of each sample, shape (n,), values 0 to C-1.
        clients
            Number of clients N.
        rng
            The only source of randomness.

        Returns
        -------
        Integers
            Shape (n,), values 0 to N-1; every client owns at least one sample.
        """
        raise NotImplementedError
