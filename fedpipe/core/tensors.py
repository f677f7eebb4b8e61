"""Named tensors with arithmetic, so that an algorithm reads like its paper: ``theta - lr * gradient``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class NamesDifferError(KeyError):
    """Tensors with different names were combined. ``names`` are the names that only one side has."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(f"names differ: {list(self.names)}")


class MissingTensorError(KeyError):
    """A network was called without one of its tensors. ``name`` is its name in a model."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"the network is called without '{name}'")


class Tensors(dict[str, Tensor]):
    """Tensors by name, a point in parameter space. All operations are element-wise and return new tensors.

    The class is a registered pytree, so ``torch.func`` transforms (grad, vmap) accept and return it.
    """

    def _combine_tensors(self, other: Any, f: Callable[[Tensor, Any], Tensor]) -> Tensors:
        if isinstance(other, Mapping):
            if other.keys() != self.keys():
                raise NamesDifferError(self.keys() ^ other.keys())
            return Tensors((name, f(value, other[name])) for name, value in self.items())
        return Tensors((name, f(value, other)) for name, value in self.items())

    def __add__(self, other: Tensors | Tensor | float) -> Tensors:
        return self._combine_tensors(other, lambda a, b: a + b)

    def __radd__(self, other: Tensor | float) -> Tensors:
        """``other + self``, so that ``sum`` adds tensors."""
        return self + other

    def __sub__(self, other: Tensors | Tensor | float) -> Tensors:
        return self._combine_tensors(other, lambda a, b: a - b)

    def __mul__(self, other: Tensors | Tensor | float) -> Tensors:
        return self._combine_tensors(other, lambda a, b: a * b)

    def __truediv__(self, other: Tensors | Tensor | float) -> Tensors:
        return self._combine_tensors(other, lambda a, b: a / b)

    def __rmul__(self, other: Tensor | float) -> Tensors:
        return self * other

    def __neg__(self) -> Tensors:
        return self.map(torch.neg)

    def __or__(self, other: Mapping[str, Tensor]) -> Tensors:  # type: ignore[override]
        return Tensors({**self, **other})

    def add(self, other: Tensors, alpha: float) -> Tensors:
        """``self + alpha * other``, with one pass over memory, like ``torch.add``."""
        return self._combine_tensors(other, lambda a, b: torch.add(a, b, alpha=alpha))

    def map(self, f: Callable[[Tensor], Tensor]) -> Tensors:
        """Apply ``f`` to each tensor."""
        return Tensors((name, f(value)) for name, value in self.items())

    def only(self, names: Iterable[str]) -> Tensors:
        """Tensors with these names, in this order."""
        return Tensors((name, self[name]) for name in names)

    def without(self, names: Iterable[str]) -> Tensors:
        """All tensors except those with these names."""
        others = set(names)
        return self.only(name for name in self if name not in others)

    def zeros(self) -> Tensors:
        """Zeros of the same shapes."""
        return self.map(torch.zeros_like)

    def ones(self) -> Tensors:
        """Ones of the same shapes."""
        return self.map(torch.ones_like)

    def dot(self, other: Tensors) -> Tensor:
        """Inner product over all elements, a scalar."""
        terms = [(value * other[name]).sum() for name, value in self.items()]
        return torch.stack(terms).sum()

    def square_norm(self) -> Tensor:
        """Sum of squares over all elements, a scalar."""
        return self.dot(self)

    def norm(self) -> Tensor:
        """Euclidean norm over all elements, a scalar. Its gradient at 0 is 0."""
        return torch.linalg.vector_norm(self.flat())

    def clipped(self, norm: float | None, inplace: bool = False) -> Tensors:
        """Scale down to this norm if it is larger, like ``torch.nn.utils.clip_grad_norm_``. None means no limit.

        With ``inplace`` the tensors themselves are changed. Use it if you don't need them any more.
        """
        if norm is None:
            return self
        total = torch.nn.utils.get_total_norm(self.values()) if inplace else self.norm()
        scale = (norm / (total + 1e-6)).clamp(max=1)
        if inplace and scale.device.type == "cpu" and scale == 1:  # on a GPU this test would synchronize
            return self
        return Tensors((name, torch.mul(value, scale, out=value if inplace else None)) for name, value in self.items())

    def flat(self) -> Tensor:
        """All elements in one vector, in the order of the names."""
        return torch.cat([value.reshape(-1) for value in self.values()])

    def unflat(self, vector: Tensor) -> Tensors:
        """Tensors with these names and shapes whose :meth:`flat` is this vector."""
        parts = torch.split(vector, [value.numel() for value in self.values()])
        return Tensors((name, part.reshape(self[name].shape)) for name, part in zip(self, parts, strict=True))


pytree.register_pytree_node(
    Tensors,
    lambda tensors: (list(tensors.values()), list(tensors.keys())),
    lambda values, names: Tensors(zip(names, values, strict=True)),
    serialized_type_name="fedpipe.core.tensors.Tensors",
)


def describe_tensor(value: Tensor) -> str:
    """A tensor's dtype and shape."""
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
