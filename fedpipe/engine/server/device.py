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
from fedpipe.core.tensors import Tensors
from fedpipe.engine.torch_env.trees import count_bytes

#: Maximum bytes on a GPU of the server's states, uploads and kept states of a round. If there are more, all of them are
#: on the CPU. It is fixed, because bits depend on the server's device.
MAX_DEVICE_BYTES = 2**32


def choose_storage_device(
    device: torch.device,
    server: State,
    kept_state: State,
    make_initial_model: Callable[[int], Tensors],
    participants: int,
) -> torch.device:
    """Choose the device of states between passes: the job's device, or the CPU if they are too large."""
    if device.type == "cpu":
        return device
    # An upload, a kept state, and the previous kept state.
    client_bytes = count_bytes([make_initial_model(0), kept_state, kept_state])
    needed_bytes = 2 * count_bytes(server) + participants * client_bytes
    return device if needed_bytes <= MAX_DEVICE_BYTES else torch.device("cpu")


@contextmanager
def use_server_device(server: State) -> Iterator[None]:
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
