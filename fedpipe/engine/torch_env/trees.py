"""Operations on all tensors of a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.algorithms.batch import State


def make_contiguous(state: State) -> State:
    """Make all tensors contiguous, so that results do not depend on their layout."""
    return pytree.tree_map(lambda value: value.detach().contiguous(), state)


def move_state(state: State, device: torch.device) -> State:
    """Move a state to a device."""
    return pytree.tree_map(lambda value: value.to(device), state)


def stack_states(states: Sequence[State], device: torch.device | None = None) -> State:
    """Stack states of several clients along a new first axis, on a device."""

    def stack_tensors(*values: Tensor) -> Tensor:
        if len({value.device for value in values}) > 1:
            values = tuple(value.to(device) for value in values)
        return torch.stack(values).to(device)  # one transfer if all are on the CPU

    return pytree.tree_map(stack_tensors, *states) if states else {}


def unstack_client(state: State, index: int) -> State:
    """Get one client's part of a stack."""
    return pytree.tree_map(lambda value: value[index], state)


def is_finite(state: Any) -> Tensor:
    """Whether all numbers are finite, as a Boolean tensor on the state's device."""
    leaves = [leaf for leaf in pytree.tree_leaves(state) if leaf.numel()]
    extremes = [torch.stack(torch.aminmax(leaf)) for leaf in leaves]  # NaN if any number is NaN
    return torch.stack([pair.isfinite().all() for pair in extremes]).all() if leaves else torch.tensor(True)


def count_bytes(state: Any) -> int:
    """Count the bytes of all tensors."""
    leaves: list[Tensor] = pytree.tree_leaves(state)
    return sum(value.numel() * value.element_size() for value in leaves)
