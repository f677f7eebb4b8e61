"""Runs the server side of an algorithm on the device of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from fedpipe.algorithms.batch import State


@contextmanager
def use_device_of(server: State) -> Iterator[None]:
    """Within the block, new tensors are on the device of the state, and NumPy can read all of them."""
    device = next((leaf.device for leaf in pytree.tree_leaves(server)), torch.device("cpu"))
    if device.type == "cpu":
        yield
        return
    with device, _NumpyCopyMode():
        yield


class _NumpyCopyMode(TorchFunctionMode):
    """Copies tensors to the CPU before NumPy reads them."""

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.__array__):
            args = (args[0].cpu(), *args[1:])
        return func(*args, **(kwargs or {}))
