"""Trees of tensors, which states are: all tensors of one at once, whatever their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import State


def to_host(state: State) -> State:
    """The same values on the host, contiguous: what is computed from them never depends on how they were laid out."""
    mapped: State = pytree.tree_map(lambda value: value.detach().cpu().contiguous(), state)
    return mapped


def move(state: State, device: torch.device) -> State:
    """The state on another device."""
    mapped: State = pytree.tree_map(lambda value: value.to(device), state)
    return mapped


def stack(states: Sequence[State]) -> State:
    """States of several clients along a new first axis."""
    mapped: State = pytree.tree_map(lambda *values: torch.stack(values), *states) if states else {}
    return mapped


def unstack(state: State, index: int) -> State:
    """One client's part of a stack."""
    mapped: State = pytree.tree_map(lambda value: value[index], state)
    return mapped


def finite(state: State) -> bool:
    """Whether no number is infinite or NaN."""
    return all(bool(value.isfinite().all()) for value in pytree.tree_leaves(state))


def size_in_bytes(state: Any) -> int:
    """Bytes of all tensors, by dtype."""
    leaves: list[Tensor] = pytree.tree_leaves(state)
    return sum(value.numel() * value.element_size() for value in leaves)
