"""Groups the clients of a round into stacks, and plans the widths and batches of a pass.

Bits may depend on a call's width, but must not depend on the other clients of a job. So a client's stack and the width
of each step depend only on the round's participants: the largest clients share a stack, and a stack becomes narrower in
fixed widths as its smaller clients finish. If a job trains only some of them, the rows of the others are empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpipe.engine.clients.federated_data import Integers

EMPTY = -1  #: entry of an index table without a sample


class StepRange(NamedTuple):
    """Consecutive steps with one width, the same in every epoch."""

    width: int
    first: int
    stop: int


def get_allowed_stack_widths(width: int) -> tuple[int, ...]:
    """Get the widths of stacks up to ``width``: 1, 2, 3, 4, 6, 8, 12, 16, ..., and ``width`` itself."""
    powers = [1 << power for power in range(width.bit_length())]
    return tuple(
        sorted({candidate for two in powers for candidate in (two, two + two // 2) if candidate < width} | {width})
    )


def group_clients_into_stacks(sizes: Integers, ids: Iterable[int], width: int) -> list[list[int]]:
    """Group clients into stacks, the largest first. Clients of equal size are in the order of their ids."""
    ordered_clients = sorted(ids, key=lambda client: (-int(sizes[client]), client))
    return [ordered_clients[first : first + width] for first in range(0, len(ordered_clients), width)]


def count_batches(num_samples: int, batch_size: int, max_batches: int | None = None) -> int:
    """Number of batches, at most ``max_batches``. At least one, which may be empty."""
    batches = max(1, -(-num_samples // batch_size))
    return batches if max_batches is None else min(batches, max_batches)


def split_steps_by_stack_width(counts: Sequence[int], allowed_widths: Sequence[int]) -> list[StepRange]:
    """Make the step ranges of a stack, each as narrow as its unfinished clients allow.

    ``counts`` are the steps of the client in each row. A row stays while it or a later row has steps left. The allowed
    widths are in ascending order.
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


def make_sample_index_table(
    sample_orders: Sequence[Integers], noise_keys: Sequence[int] | None, batch_size: int, num_steps: int, width: int
) -> Integers:
    """Plan an epoch, shape (num_steps, width, batch_size + 1): each row's samples and noise key at each step.

    The first rows have the samples of the clients in order, and the others are empty. The number of a batch is added to
    a client's noise key.
    """
    plan = np.full((num_steps, width, batch_size + 1), EMPTY, np.int64)
    for row, order in enumerate(sample_orders):
        samples = np.full(num_steps * batch_size, EMPTY, np.int64)
        samples[: len(order)] = order[: num_steps * batch_size]
        plan[:, row, :batch_size] = samples.reshape(num_steps, batch_size)
    if noise_keys is not None:
        first = np.asarray([*noise_keys, *[0] * (width - len(noise_keys))], np.int64)
        plan[:, :, batch_size] = first + np.arange(num_steps)[:, None]
    return plan


class StackBatch(NamedTuple):
    """The batch of a step of a stack."""

    samples: Tensor  #: indices of samples, shape (width, batch)
    mask: Tensor  #: 1 for samples and 0 for padding, shape (width, batch)
    live: Tensor | None  #: clients with samples, shape (width,). None: all
    noise_keys: Tensor | None  #: noise keys, shape (width,). None without noise


class BatchPlan(NamedTuple):
    """The plan of a pass on the device, with consecutive steps along the first axis."""

    samples: Tensor
    mask: Tensor
    live: Tensor
    noise_keys: Tensor | None
    filled_rows: Integers  #: number of rows with samples at each step, on the CPU

    @classmethod
    def from_table(cls, plan: Integers, has_noise: bool, dtype: torch.dtype, device: torch.device) -> BatchPlan:
        """Send a table of :func:`make_sample_index_table` to the device in one transfer."""
        plan_tensor = torch.from_numpy(plan)
        if device.type == "cuda":
            plan_tensor = plan_tensor.pin_memory()
        plan_tensor = plan_tensor.to(device, non_blocking=True)
        samples = plan_tensor[:, :, :-1]
        noise_keys = plan_tensor[:, :, -1].contiguous() if has_noise else None
        sample_mask = samples != EMPTY
        return cls(
            samples.clamp(min=0),
            sample_mask.to(dtype),
            sample_mask[:, :, 0],
            noise_keys,
            (plan[:, :, 0] != EMPTY).sum(1),
        )

    def slice_steps(self, first: int, stop: int, width: int) -> BatchPlan:
        """Slice consecutive steps of the first ``width`` rows."""
        noise_keys = None if self.noise_keys is None else self.noise_keys[first:stop, :width]
        samples, mask, live = (tensor[first:stop, :width] for tensor in (self.samples, self.mask, self.live))
        return BatchPlan(samples, mask, live, noise_keys, self.filled_rows[first:stop])

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors with one row per step: samples, masks, live clients, and noise keys if there are any."""
        return [tensor for tensor in (self.samples, self.mask, self.live, self.noise_keys) if tensor is not None]

    @property
    def has_idle_clients(self) -> bool:
        """Whether some clients have no samples at some step."""
        return bool((self.filled_rows < self.samples.shape[1]).any())

    def get_step_batch(self, step: int) -> StackBatch:
        """Get the batch of a step."""
        live = None if self.filled_rows[step] == self.samples.shape[1] else self.live[step]
        return StackBatch(
            self.samples[step], self.mask[step], live, None if self.noise_keys is None else self.noise_keys[step]
        )
