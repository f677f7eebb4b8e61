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

from fedpipe.engine.clients.federated_data import Integers

EMPTY = -1  #: in the table of a pass, where no sample is


class StepRange(NamedTuple):
    """Successive steps at one width, the same in every epoch."""

    width: int
    first: int
    stop: int


def get_allowed_widths(width: int) -> tuple[int, ...]:
    """The widths of stacks of up to ``width`` clients: 1, 2, 3, 4, 6, 8, 12, 16, ..., and ``width`` itself."""
    powers = [1 << power for power in range(width.bit_length())]
    return tuple(
        sorted({candidate for two in powers for candidate in (two, two + two // 2) if candidate < width} | {width})
    )


def make_stacks(sizes: Integers, ids: Iterable[int], width: int) -> list[list[int]]:
    """Clients cut into stacks, the largest first; of equal sizes in the order of their numbers."""
    ordered_clients = sorted(ids, key=lambda client: (-int(sizes[client]), client))
    return [ordered_clients[first : first + width] for first in range(0, len(ordered_clients), width)]


def count_steps(count: int, size: int, limit: int | None = None) -> int:
    """Batches of ``size`` that so many samples make, at most ``limit``; one without any where there are no samples."""
    step_count = max(1, -(-count // size))
    return step_count if limit is None else min(step_count, limit)


def make_step_ranges(counts: Sequence[int], allowed_widths: Sequence[int]) -> list[StepRange]:
    """The legs of a stack whose clients have so many steps: each as narrow as those that go on allow.

    Parameters
    ----------
    counts
        Steps of the client in each row. A row stays as long as it or one after it has steps left.
    allowed_widths
        Ascending.
    """
    remaining_steps = np.maximum.accumulate(counts[::-1])
    active_counts = len(remaining_steps) - np.searchsorted(
        remaining_steps, np.arange(remaining_steps[-1]), side="right"
    )
    widths = np.asarray(allowed_widths)[np.searchsorted(allowed_widths, active_counts)]
    step_ranges, first = [], 0
    for width, run in itertools.groupby(widths.tolist()):
        stop = first + len(list(run))
        step_ranges.append(StepRange(width, first, stop))
        first = stop
    return step_ranges


def describe_stacks(
    sizes: Integers, ids: Iterable[int], width: int, batch_size: int, fixed_steps: int | None = None
) -> list[dict[str, Any]]:
    """The stacks of a round in words: their clients, and [width, steps] of an epoch of local training in each leg.

    Where all take a fixed number of steps, it is of the whole training.
    """
    allowed_widths = get_allowed_widths(width)
    return [
        {
            "clients": stack_clients,
            "widths": [
                [step_range.width, step_range.stop - step_range.first]
                for step_range in make_step_ranges(
                    [fixed_steps or count_steps(int(sizes[client]), batch_size) for client in stack_clients],
                    allowed_widths,
                )
            ],
        }
        for stack_clients in make_stacks(sizes, ids, width)
    ]


def make_index_table(
    orders: Sequence[Integers], keys: Sequence[int] | None, size: int, length: int, width: int
) -> Integers:
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


class StackBatch(NamedTuple):
    """What a step of a stack is done on."""

    samples: Tensor  #: by their numbers, shape (width, batch)
    mask: Tensor  #: 1 for samples and 0 for padding, of that shape
    live: Tensor | None  #: who has any, shape (width,); None: all of them
    key: Tensor | None  #: of each client's noise, shape (width,); None where there is none


class BatchPlan(NamedTuple):
    """The plan of a pass on the device: successive steps along the first axis."""

    samples: Tensor
    mask: Tensor
    live: Tensor
    key: Tensor | None
    filled_rows: Integers  #: rows that have samples at each step, on the host

    @classmethod
    def from_table(cls, plan: Integers, has_noise: bool, dtype: torch.dtype, device: torch.device) -> BatchPlan:
        """A table, as :func:`make_index_table` makes it, sent in one transfer; its keys count where it is noisy."""
        plan_tensor = torch.from_numpy(plan)
        if device.type == "cuda":
            plan_tensor = plan_tensor.pin_memory()
        plan_tensor = plan_tensor.to(device, non_blocking=True)
        samples = plan_tensor[:, :, :-1]
        key = plan_tensor[:, :, -1].contiguous() if has_noise else None
        sample_mask = samples != EMPTY
        return cls(
            samples.clamp(min=0), sample_mask.to(dtype), sample_mask[:, :, 0], key, (plan[:, :, 0] != EMPTY).sum(1)
        )

    def slice_steps(self, first: int, stop: int, width: int) -> BatchPlan:
        """Some successive steps of the first ``width`` rows."""
        key = None if self.key is None else self.key[first:stop, :width]
        samples, mask, live = (tensor[first:stop, :width] for tensor in (self.samples, self.mask, self.live))
        return BatchPlan(samples, mask, live, key, self.filled_rows[first:stop])

    @property
    def has_idle_clients(self) -> bool:
        """Whether some clients have no samples at some step."""
        return bool((self.filled_rows < self.samples.shape[1]).any())

    def get_step_batch(self, step: int) -> StackBatch:
        """One step."""
        live = None if self.filled_rows[step] == self.samples.shape[1] else self.live[step]
        return StackBatch(self.samples[step], self.mask[step], live, None if self.key is None else self.key[step])
