"""Conversion of other libraries' networks: frozen BatchNorm, GroupNorm, constants, and networks without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

MAX_GROUPS = 32  #: largest number of groups of GroupNorm
MIN_PATCH_STRIDE = 3  #: a smaller stride ignores at most the last row and column of pixels


class UnsupportedArchitectureError(Exception):
    """An architecture can't be trained. The message is the reason."""


class FrozenBatchNorm(nn.Module):
    """BatchNorm of a frozen body, which always uses its running statistics. Its tensors are constants."""

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps = layer.eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(layer, name)
            self.register_parameter(name, None if value is None else nn.Parameter(value.detach(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` of shape (B, C) or (B, C, ...)."""
        shape = (1, -1, *(1,) * (x.dim() - 2))
        scale = torch.rsqrt(self.running_var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -self.running_mean * scale if self.bias is None else self.bias - self.running_mean * scale
        return x * scale.reshape(shape) + shift.reshape(shape)


def make_group_norm(layer: nn.modules.batchnorm._BatchNorm) -> nn.GroupNorm:
    """Make the GroupNorm that replaces a BatchNorm, with the same initial scale and shift."""
    channels = layer.num_features
    groups = max(count for count in range(1, MAX_GROUPS + 1) if channels % count == 0)
    replacement = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
    replacement.weight, replacement.bias = layer.weight, layer.bias
    return replacement


def replace_batch_norm(body: nn.Module, replace: Callable[[nn.modules.batchnorm._BatchNorm], nn.Module]) -> int:
    """Replace each BatchNorm of a body, and count them."""
    layers = [
        (name, layer) for name, layer in body.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    for name, layer in layers:
        body.set_submodule(name, replace(layer))
    return len(layers)


def disable_inplace_layers(body: nn.Module) -> None:
    """Let layers write to new tensors, because torch.func can't overwrite a tensor that is not batched."""
    for layer in body.modules():
        if isinstance(getattr(layer, "inplace", None), bool):
            layer.inplace = False  # type: ignore[assignment]


def freeze_buffers(body: nn.Module) -> None:
    """Turn buffers other than BatchNorm's, such as tables of positions, into constants, which clients do not send."""
    for layer in body.modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            for name, value in list(layer._buffers.items()):
                if value is not None:
                    delattr(layer, name)
                    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))


def record_patch_layers(network: nn.Module, shape: tuple[int, ...]) -> list[nn.Conv2d]:
    """Get a list to which each call of the network adds the convolutions that divide images into patches."""
    layers: list[nn.Conv2d] = []

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(layer, nn.Conv2d) and inputs[0].shape[1:] == shape:
            layers.append(layer)

    for layer in network.modules():
        if type(layer) is nn.Conv2d and layer.padding == (0, 0) and min(layer.stride) >= MIN_PATCH_STRIDE:
            layer.register_forward_pre_hook(record)
    return layers


class ParametersOnMeta(TorchFunctionMode):
    """Layers are built at once, because their parameters have no values. Other tensors, such as rates, have values."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*args, **{**(kwargs or {}), **({"device": "meta"} if function is torch.empty else {})})


class RandomOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations that use PyTorch's random generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in operation.tags:
            self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))
