"""What a model is, and how algorithms call it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpipe.errors import SettingsError
from fedpipe.registry import Component
from fedpipe.tensors import Tensors


class Network(nn.Module):
    """A body, which turns inputs into features of shape (B, d), and a head, which turns features into C logits."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, C) for inputs of shape (B, *shape)."""
        logits: Tensor = self.head(self.body(x))
        return logits


@dataclass(frozen=True, kw_only=True)
class Model(Component):
    """A family of networks; its fields are widths and the like."""

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Refuse inputs that this family can't take, before any job starts.

        Raises
        ------
        SettingsError
            One sentence that begins with the key of params.yaml.
        """

    def build(self, shape: tuple[int, ...], classes: int) -> Network:
        """A network with PyTorch's default initialisation, for inputs of this shape and C classes."""
        raise NotImplementedError


class Net:
    """A network as a pure function of its parameters, which is how algorithms see it.

    Parameters
    ----------
    build
        Makes the network anew; called once for its structure and once for each fresh model.
    dtype
        Of every fresh model.
    device
        Where calls are computed.
    """

    def __init__(
        self, build: Callable[[], Network], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self._build, self.dtype = build, dtype
        with torch.random.fork_rng(devices=[]):
            self._module = build().to(device=device, dtype=dtype)
        if list(self._module.buffers()):
            raise SettingsError(
                "model: it has buffers (as of BatchNorm), which are not supported yet; use one without."
            )
        self.names = tuple(name for name, _ in self._module.named_parameters())
        self._tied = len(self.names) < len(list(self._module.named_parameters(remove_duplicate=False)))
        self.body_names = tuple(name for name in self.names if name.startswith("body."))
        self.head_names = tuple(name for name in self.names if name.startswith("head."))

    def __call__(self, model: Tensors, x: Tensor) -> Tensor:
        """Logits, shape (B, C)."""
        logits: Tensor = functional_call(self._module, model, (x,), tie_weights=self._tied)
        return logits

    def features(self, model: Tensors, x: Tensor) -> Tensor:
        """What the body makes of the inputs, shape (B, d); tensors of the head need not be given."""
        body = {name.removeprefix("body."): model[name] for name in self.body_names}
        features: Tensor = functional_call(self._module.body, body, (x,), tie_weights=self._tied)
        return features.flatten(1)

    def layers(self) -> list[tuple[str, ...]]:
        """The names of each parametrised layer's tensors, from the input to the output."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return [tuple(names) for names in found.values()]

    def fresh(self, entropy: int) -> Tensors:
        """Initial parameters, on the host: a function of ``entropy`` alone, whatever the device and dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(entropy % 2**63)
            module = self._build()
        return Tensors((name, value.detach().to(self.dtype)) for name, value in module.named_parameters())

    def replica(self) -> Net:
        """The same function with a module of its own, for another thread (a call swaps its module's tensors)."""
        twin = copy.copy(self)
        twin._module = copy.deepcopy(self._module)
        return twin


def class_relations(omega: Tensor) -> Tensor:
    """The CR matrix of a classification layer of shape (C, d): the row softmax of its Gram matrix, shape (C, C)."""
    return (omega @ omega.T).softmax(-1)
