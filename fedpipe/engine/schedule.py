"""Which clients of a round are computed together, how wide the calls are, and the plan of a pass.

Bits may depend on a call's width, and results must not depend on who else is at work in a job. So a client's stack and
the width of each of its steps follow from the round's participants alone: the largest clients share a stack, and a
stack is cut to a narrower width of a fixed ladder as its smaller clients end. A job that trains some of them leaves the
others' rows empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpipe.engine.clients import Integers

EMPTY = -1  #: in the table of a pass, where no sample is


class Leg(NamedTuple):
    """Successive steps at one width, the same in every epoch."""

    width: int
    first: int
    stop: int


def ladder(width: int) -> tuple[int, ...]:
    """The widths of stacks of up to ``width`` clients: 1, 2, 3, 4, 6, 8, 12, 16, ..., and ``width`` itself."""
    powers = [1 << power for power in range(width.bit_length())]
    return tuple(sorted({rung for two in powers for rung in (two, two + two // 2) if rung < width} | {width}))


def stacks(sizes: Integers, ids: Iterable[int], width: int) -> list[list[int]]:
    """Clients cut into stacks, the largest first; of equal sizes in the order of their numbers."""
    ordered = sorted(ids, key=lambda client: (-int(sizes[client]), client))
    return [ordered[first : first + width] for first in range(0, len(ordered), width)]


def steps(count: int, size: int, most: int | None = None) -> int:
    """Batches of ``size`` that so many samples make, at most ``most``; one without any where there are no samples."""
    found = max(1, -(-count // size))
    return found if most is None else min(found, most)


def legs(counts: Sequence[int], rungs: Sequence[int]) -> list[Leg]:
    """The legs of a stack whose clients have so many steps: each as narrow as those that go on allow.

    Parameters
    ----------
    counts
        Steps of the client in each row. A row stays as long as it or one after it has steps left.
    rungs
        Ascending.
    """
    left = np.maximum.accumulate(counts[::-1])
    going = len(left) - np.searchsorted(left, np.arange(left[-1]), side="right")
    widths = np.asarray(rungs)[np.searchsorted(rungs, going)]
    found, first = [], 0
    for width, run in itertools.groupby(widths.tolist()):
        stop = first + len(list(run))
        found.append(Leg(width, first, stop))
        first = stop
    return found


def recorded(
    sizes: Integers, ids: Iterable[int], width: int, batch: int, fixed: int | None = None
) -> list[dict[str, Any]]:
    """The stacks of a round in words: their clients, and [width, steps] of an epoch of local training in each leg.

    Where all take a fixed number of steps, it is of the whole training.
    """
    rungs = ladder(width)
    return [
        {
            "clients": mates,
            "widths": [
                [leg.width, leg.stop - leg.first]
                for leg in legs([fixed or steps(int(sizes[client]), batch) for client in mates], rungs)
            ],
        }
        for mates in stacks(sizes, ids, width)
    ]


def table(orders: Sequence[Integers], keys: Sequence[int] | None, size: int, length: int, width: int) -> Integers:
    """The plan of an epoch, shape (length, width, size + 1): each row's samples at each step, and the key of its noise.

    Parameters
    ----------
    orders
        The samples of each client at work, in order; rows that are left are empty.
    keys
        Where each client's noise begins, to which the number of a batch is added; None where there is none.
    size
        Samples of a batch.
    length
        Steps.
    width
        Rows.
    """
    plan = np.full((length, width, size + 1), EMPTY, np.int64)
    for row, order in enumerate(orders):
        samples = np.full(length * size, EMPTY, np.int64)
        samples[: len(order)] = order[: length * size]
        plan[:, row, :size] = samples.reshape(length, size)
    if keys is not None:
        first = np.asarray([*keys, *[0] * (width - len(keys))], np.int64)
        plan[:, :, size] = first + np.arange(length)[:, None]
    return plan


class Row(NamedTuple):
    """What a step of a stack is done on."""

    samples: Tensor  #: by their numbers, shape (width, batch)
    mask: Tensor  #: 1 for samples and 0 for padding, of that shape
    live: Tensor | None  #: who has any, shape (width,); None: all of them
    key: Tensor | None  #: of each client's noise, shape (width,); None where there is none


class Feed(NamedTuple):
    """The plan of a pass on the device: successive steps along the first axis."""

    samples: Tensor
    mask: Tensor
    live: Tensor
    key: Tensor | None
    filled: Integers  #: rows that have samples at each step, on the host

    @classmethod
    def sent(cls, plan: Integers, noisy: bool, dtype: torch.dtype, device: torch.device) -> Feed:
        """A table, as :func:`table` makes it, sent in one transfer; its keys count where it is noisy."""
        packed = torch.from_numpy(plan)
        if device.type == "cuda":
            packed = packed.pin_memory()
        packed = packed.to(device, non_blocking=True)
        samples = packed[:, :, :-1]
        key = packed[:, :, -1].contiguous() if noisy else None
        there = samples != EMPTY
        return cls(samples.clamp(min=0), there.to(dtype), there[:, :, 0], key, (plan[:, :, 0] != EMPTY).sum(1))

    def leg(self, first: int, stop: int, width: int) -> Feed:
        """Some successive steps of the first ``width`` rows."""
        key = None if self.key is None else self.key[first:stop, :width]
        samples, mask, live = (part[first:stop, :width] for part in (self.samples, self.mask, self.live))
        return Feed(samples, mask, live, key, self.filled[first:stop])

    @property
    def masked(self) -> bool:
        """Whether some clients have no samples at some step."""
        return bool((self.filled < self.samples.shape[1]).any())

    def row(self, number: int) -> Row:
        """One step."""
        live = None if self.filled[number] == self.samples.shape[1] else self.live[number]
        return Row(self.samples[number], self.mask[number], live, None if self.key is None else self.key[number])
