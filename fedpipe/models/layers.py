"""Stateless BatchNorm and dropout, which compute the same for one client and for a stack of clients.

PyTorch's layers have internal state: BatchNorm writes its running statistics in place, and dropout uses a global
generator. Here the current pass sets the mode (:class:`Mode`), gets new statistics back, and noise is a function of a
key. Padding samples have no weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpipe.core.noise import generate_uniform, generate_uniform_in_chunks, mix_bits

MAX_CHANNELS_LAST_WEIGHTS = 2**20  #: number of weights of a large convolution
CALL_STRIDE = 2**40  #: distance of the keys of a layer's successive calls
NORMALIZATION_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


class BufferRecord(NamedTuple):
    """A running statistic after a call of a model. A loss may call several models, whose old tensors differ."""

    name: str
    old: Tensor  #: the tensor of the model that was called
    new: Tensor


@dataclass
class Mode:
    """The mode of a network's call, which its layers share."""

    training: bool = False  #: training (batch statistics, dropout) or evaluation
    mask: Tensor | None = None  #: 1 for samples and 0 for padding, shape (B,). None without padding
    noise_key: Tensor | None = None  #: noise key of this batch, an int64 scalar
    autocast: bool = False  #: products and convolutions have a lower precision
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  #: the client's buffers, if models have none
    #: Buffers at the start of the round, for teachers.
    teacher_buffers: Mapping[str, Tensor] = field(default_factory=dict)
    recorded_buffers: list[BufferRecord] = field(default_factory=list)  #: new running statistics, in order
    calls: Counter[int] = field(default_factory=Counter)  #: calls of each dropout layer in a call of the network

    @contextmanager
    def activate(
        self,
        training: bool,
        mask: Tensor | None = None,
        noise_key: Tensor | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        teacher_buffers: Mapping[str, Tensor] | None = None,
        autocast: bool = False,
    ) -> Iterator[list[BufferRecord]]:
        """Activate a mode within the block. Gives the statistics that training calls record."""
        previous = vars(self).copy()
        self.training, self.mask, self.noise_key, self.autocast = training, mask, noise_key, autocast
        self.recorded_buffers, self.calls = [], Counter()
        self.buffers = {} if buffers is None else buffers
        self.teacher_buffers = self.buffers if teacher_buffers is None else teacher_buffers
        try:
            yield self.recorded_buffers
        finally:
            vars(self).update(previous)

    @contextmanager
    def evaluate_teacher(self) -> Iterator[None]:
        """Evaluate a teacher within the block, with its own statistics."""
        previous = self.training, self.buffers
        self.training, self.buffers = False, self.teacher_buffers
        try:
            yield
        finally:
            self.training, self.buffers = previous

    @contextmanager
    def discard_statistics(self) -> Iterator[None]:
        """Discard the running statistics that training calls record within the block."""
        recorded_buffers, self.recorded_buffers = self.recorded_buffers, []
        try:
            yield
        finally:
            self.recorded_buffers = recorded_buffers


class BatchNorm(nn.Module):
    """Batch normalization as PyTorch computes it, over 2 to 5 dimensions.

    In training, statistics of a batch with a single value per channel are not recorded (their variance is undefined),
    and such values become the bias. Without ``track`` there are no running statistics, and every batch is
    normalized by its own, in evaluation too.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, module: nn.modules.batchnorm._BatchNorm, name: str, mode: Mode, track: bool) -> None:
        super().__init__()
        self.weight, self.bias = module.weight, module.bias
        if module.momentum is None and track and module.track_running_stats:
            raise NotImplementedError(f"{name}: BatchNorm with momentum=None (a cumulative mean) is not supported")
        self.eps, self.momentum = module.eps, module.momentum or 0.0
        self._name, self._mode = name, mode
        self.track = track and module.running_mean is not None
        if self.track:
            self.register_buffer("running_mean", module.running_mean)
            self.register_buffer("running_var", module.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` of shape (B, C) or (B, C, ...)."""
        mode = self._mode
        if self.track and not mode.training:
            x = x.to(self.running_mean.dtype)  # in a stack, images and statistics need the same precision
            return _call_batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if mode.mask is None and x.numel() > x.shape[1]:
            return self._normalize_without_padding(x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        if mode.mask is None:  # the kernel rejects a single value per channel
            variance, mean = torch.var_mean(x, axes, correction=0)
            if self.track:
                self._record_running_statistics(*self._get_running_statistics())
        else:
            sample_mask = mode.mask.reshape(-1, *(1,) * (x.dim() - 1))
            total = mode.mask.sum() * (x[0, 0].numel())
            divisor = total.clamp(min=1)
            mean = (x * sample_mask).sum(axes) / divisor
            variance = ((x - _broadcast_channels(mean, x)).square() * sample_mask).sum(axes) / divisor
            if mode.training and self.track:
                self._update_statistics(mean.detach(), variance.detach(), total)
        y = (x - _broadcast_channels(mean, x)) * _broadcast_channels(torch.rsqrt(variance + self.eps), x)
        if self.weight is None:
            return y
        return y * _broadcast_channels(self.weight, x) + _broadcast_channels(self.bias, x)

    def _normalize_without_padding(self, x: Tensor) -> Tensor:
        """Normalize without padding by PyTorch's kernel, which updates copies of the running statistics."""
        mean, variance = (value.clone() for value in self._get_running_statistics()) if self.track else (None, None)
        y = _call_batch_norm(x, mean, variance, self.weight, self.bias, True, self.momentum, self.eps)
        if mean is not None and variance is not None:
            self._record_running_statistics(mean, variance)
        return y

    def _update_statistics(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        fraction = self.momentum * (count > 1).to(mean.dtype)
        unbiased = variance * count / (count - 1).clamp(min=1)
        old_mean, old_variance = self._get_running_statistics()
        self._record_running_statistics(
            old_mean + fraction * (mean - old_mean), old_variance + fraction * (unbiased - old_variance)
        )

    def _get_running_statistics(self) -> tuple[Tensor, Tensor]:
        """Get the current statistics: those of an earlier call of this model in this step, if any."""
        records = self._mode.recorded_buffers[::-1]
        mean, variance = (
            next((record.new for record in records if record.old is old), old)
            for old in (self.running_mean, self.running_var)
        )
        return mean, variance

    def _record_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        self._mode.recorded_buffers += [
            BufferRecord(f"{self._name}.running_mean", self.running_mean, mean),
            BufferRecord(f"{self._name}.running_var", self.running_var, variance),
        ]


def _call_batch_norm(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Call ``F.batch_norm``, by rows if its channels-last kernel would be slow.

    On a CPU that kernel loads 8 channels at once and handles a rest one by one. So 6 channels take nine times as
    long as by rows, and with 16 channels or more the conversion costs what it saves.
    """
    is_slow = x.dim() == 4 and x.stride(1) == 1 < x.shape[1] < 16 and x.shape[1] % 8 != 0 and x.device.type == "cpu"
    if not is_slow:
        return F.batch_norm(x, *arguments, **options)
    return F.batch_norm(x.contiguous(), *arguments, **options).contiguous(memory_format=torch.channels_last)


class Dropout(nn.Module):
    """Dropout whose noise is a function of the batch's key, for single values, channels or samples.

    A layer that a network calls several times has different noise each time. ``axes`` is the number of axes with
    separate noise: 1 for samples, 2 for channels, and None for single values.
    """

    def __init__(self, p: float, index: int, mode: Mode, axes: int | None) -> None:
        super().__init__()
        self.p, self._index, self._mode, self._axes = p, index, mode, axes

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to ``x``. In training a fraction p is zero and the rest is divided by 1 - p."""
        if not self._mode.training or self.p == 0:
            return x
        if self._mode.noise_key is None:
            raise RuntimeError("training a network with dropout needs a noise key")
        axes = x.dim() if self._axes is None else self._axes
        shape = (*x.shape[:axes], *(1,) * (x.dim() - axes))
        # Keys of batches are consecutive.
        key = mix_bits(self._mode.noise_key) + (self._index + CALL_STRIDE * self._mode.calls[self._index])
        self._mode.calls[self._index] += 1
        is_single_client = key.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(key)
        keep_mask = (generate_uniform_in_chunks if is_single_client else generate_uniform)(key, shape) >= self.p
        return x * (keep_mask.to(x.dtype) / (1 - self.p) if self.p < 1 else torch.zeros_like(x))


class SampleDropout(nn.modules.dropout._DropoutNd):
    """Stochastic depth: dropout of complete samples of a residual branch. :func:`replace_stateful_layers` replaces it.

    Source: Huang et al., Deep networks with stochastic depth (ECCV 2016), with one draw per sample.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to the samples of ``x``, shape (B, ...)."""
        return x * F.dropout(x.new_ones(len(x), *(1,) * (x.dim() - 1)), self.p, self.training)


class AdaptiveAvgPool2d(nn.Module):
    """Average pooling to a fixed size. On a GPU it uses two products, which have a deterministic gradient."""

    def __init__(self, size: Any) -> None:
        super().__init__()
        self._size = (size, size) if isinstance(size, int) else tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        """Pool ``x`` of shape (..., C, height, width)."""
        if x.device.type == "cpu":
            return F.adaptive_avg_pool2d(x, self._size)
        rows, columns = (
            _compute_pooling_weights(count or length, length, x)
            for count, length in zip(self._size, x.shape[-2:], strict=True)
        )
        return rows @ x @ columns.T


def _compute_pooling_weights(count: int, length: int, reference: Tensor) -> Tensor:
    """Make the weights of ``count`` even windows over ``length`` values, shape (count, length)."""
    number = torch.arange(count, device=reference.device)[:, None]
    first, stop = number * length // count, ((number + 1) * length + count - 1) // count
    position = torch.arange(length, device=reference.device)
    return ((position >= first) & (position < stop)).to(reference.dtype) / (stop - first)


def replace_stateful_layers(module: nn.Module, mode: Mode, track: bool) -> nn.Module:
    """Replace every BatchNorm and dropout of a network, at any depth, by those of this module.

    Adaptive pooling to more than one value is replaced too, because it can't be trained on a GPU.

    Raises
    ------
    NotImplementedError
        A layer of these kinds is not supported.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    named_layers = list(module.named_modules(remove_duplicate=False))  # a layer may be in several modules
    for index, (name, layer) in enumerate(list(module.named_modules())):
        if isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            raise NotImplementedError(f"{name}: {type(layer).__name__} is not supported, use nn.Dropout")
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            if not type(layer).forward.__module__.startswith("torch.nn."):
                raise NotImplementedError(
                    f"{name}: {type(layer).__name__} does more than BatchNorm. Use nn.BatchNorm2d"
                )
            replacements[layer] = BatchNorm(layer, name, mode, track)
        elif isinstance(layer, nn.modules.dropout._DropoutNd):
            is_channelwise = isinstance(layer, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))
            axes = 1 if isinstance(layer, SampleDropout) else 2 if is_channelwise else None
            replacements[layer] = Dropout(layer.p, index, mode, axes)
        elif isinstance(layer, nn.AdaptiveAvgPool2d) and layer.output_size not in (1, (1, 1)):
            replacements[layer] = AdaptiveAvgPool2d(layer.output_size)
        elif isinstance(layer, nn.Conv2d) and has_many_kernel_weights(layer.weight):
            layer.register_forward_pre_hook(_make_contiguous)
        elif isinstance(layer, (nn.LayerNorm, nn.GroupNorm)) and layer.weight is not None:
            layer.register_forward_pre_hook(_cast_to_weight_dtype)
    for name, layer in named_layers:
        if layer in replacements:
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, replacements[layer])
    return module


def has_many_kernel_weights(kernels: Tensor) -> bool:
    """Whether a convolution has so many weights that it is slower on a CPU with channels last.

    It takes twice as long with the 512 channels of ResNet-18 on 2x2 pixels, 1.4 times on 4x4, and as long on 8x8.
    """
    return kernels.numel() > MAX_CHANNELS_LAST_WEIGHTS


def _make_contiguous(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.contiguous() for value in inputs)


def _cast_to_weight_dtype(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert features of a lower precision to the layer's, like autocast on a GPU."""
    return tuple(value.to(layer.weight.dtype) for value in inputs)  # type: ignore[arg-type]


def _broadcast_channels(values: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per channel for ``x``."""
    return values.reshape(1, -1, *(1,) * (x.dim() - 2))
