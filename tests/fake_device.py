"""A simulated GPU: its tensors contain real values, and no operation mixes them with tensors of the host.

The device is called `meta`. Operations that a GPU rejects raise an error. Transfers between device and host are
counted: values that are read, and small and large tensors that are copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE, HOST = torch.device("meta"), torch.device("cpu")
LARGE = 4096  #: elements of a large tensor
aten = torch.ops.aten

#: Operations on GPU tensors that accept an index on the host and copy it to the GPU.
INDEXED = {"index.Tensor", "index_put.default", "index_put_.default", "_unsafe_index.Tensor"}
#: Operations for which the host waits, because it needs a value or the size of the result.
READ = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "_unique2"}
#: Operations that, unlike arithmetic, accept no scalar tensor of the host together with tensors on a GPU.
STRICT = {
    *("cat.default", "stack.default", "index_copy.default", "index_copy_.default", "index_select.default"),
    *("index_fill.int_Tensor", "index_fill_.int_Tensor", "gather.default", "mm.default", "mv.default", "dot.default"),
}
#: Operations without a deterministic GPU kernel, which a run rejects on a GPU. The CUDA library of PyTorch 2.11 raises
#: an error for them, or its documentation lists them.
NONDETERMINISTIC = {
    *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
    *("avg_pool3d_backward", "max_pool3d_with_indices_backward", "max_unpool2d", "max_unpool3d"),
    *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
    *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
    *("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward"),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "_upsample_bilinear2d_aa_backward"),
    *("upsample_bicubic2d_backward", "_upsample_bicubic2d_aa_backward", "upsample_trilinear3d_backward"),
    *("grid_sampler_2d_backward", "grid_sampler_3d_backward", "nll_loss2d_forward", "_ctc_loss_backward"),
    *("bincount", "cumsum", "histc", "index_reduce", "median", "put_", "scatter_reduce"),
}


class DeviceTensor(Tensor):
    """A tensor on the device."""

    held: Tensor  #: values of the tensor, on the host

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.held})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute_on_device(func, args, kwargs or {}, Counter())


def compute_on_device(func: Any, args: Any, kwargs: dict[str, Any], crossed: Counter[str]) -> Any:
    """Compute an operation on the device, and count the transfers."""
    name = str(func).removeprefix("aten.")
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    there = [value for value in tensors if isinstance(value, DeviceTensor)]
    target = kwargs.get("device") or (DEVICE if there else HOST)
    inner = kwargs | ({"device": HOST} if "device" in kwargs else {})
    unwrapped, inner = pytree.tree_map_only(DeviceTensor, lambda value: value.held, (args, inner))
    chosen = any(value.dtype == torch.bool for value in there[1:]) and name in INDEXED
    crossed["read"] += bool(there) and (chosen or name.partition(".")[0] in READ)
    if func in (aten._to_copy.default, aten.copy_.default):
        source = tensors[-1].device if tensors else HOST  # otherwise a Python number
        target = tensors[0].device if func is aten.copy_.default else torch.device(kwargs.get("device") or source)
        if source != target:
            size = "large" if tensors and tensors[-1].numel() >= LARGE else "small"
            crossed[f"{size}, to the device" if target == DEVICE else f"{size}, to the host"] += 1
    elif there:
        others = [value for value in tensors if not isinstance(value, DeviceTensor)]
        if name in INDEXED:
            crossed["small, to the device"] += len(others)
        elif any(value.dim() or name in STRICT for value in others):
            raise RuntimeError(f"{name}: tensors are on the device and on the host")
        if name.partition(".")[0] in NONDETERMINISTIC:
            raise RuntimeError(f"{name} has no deterministic kernel")
    found = func(*unwrapped, **inner)
    if target == HOST or not isinstance(found, (Tensor, list, tuple)):
        return found if func is not aten.copy_.default else args[0]
    wrapped = pytree.tree_map_only(
        Tensor, lambda value: value if isinstance(value, DeviceTensor) else DeviceTensor(value), found
    )
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


class _Dispatch(TorchDispatchMode):
    def __init__(self, crossed: Counter[str]) -> None:
        super().__init__()
        self._crossed = crossed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute_on_device(func, args, kwargs or {}, self._crossed)


class _Functions(TorchFunctionMode):
    """PyTorch functions that handle a device called `meta` before any operation runs."""

    def __init__(self, crossed: Counter[str]) -> None:
        super().__init__()
        self._crossed = crossed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or HOST) == DEVICE:
            return func(*args, **kwargs | {"device": HOST}).to(DEVICE)
        if func is Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            return args[0].held.new_tensor(*args[1:], **kwargs).to(DEVICE)
        if func is Tensor.__getitem__ and isinstance(args[1], list):
            return args[0][torch.tensor(args[1], device=HOST).to(args[0].device)]
        if func is Tensor.tolist and isinstance(args[0], DeviceTensor):
            self._crossed["read"] += 1
            return args[0].held.tolist()
        return func(*args, **kwargs)


class SequentialExecutor:
    """Replacement of a thread pool, whose threads would not use the simulated device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore the arguments of a thread pool."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done

    def map(self, work: Callable[..., Any], *args: Any) -> Iterator[Any]:
        return map(work, *args)


@contextmanager
def use_device() -> Iterator[Counter[str]]:
    """Use the device. Yield the counts of transfers: "read", "large, to the host", "small, to the device" and so on."""
    crossed: Counter[str] = Counter()
    with ExitStack() as stack:
        stack.enter_context(_Functions(crossed))
        stack.enter_context(_Dispatch(crossed))
        yield crossed
