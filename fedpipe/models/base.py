"""What a model is, and how algorithms call it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedpipe.layers import NORMALISATIONS, BatchNorm, Dropout, Mode, functional
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

    stackable: ClassVar[bool] = True  #: whether its clients can train in one call (an LSTM's can't: no batching rule)

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

    def outline(self, shape: tuple[int, ...], classes: int) -> Network:
        """The same network for its layers alone: none of its weights are fetched, and it may lie on the meta device."""
        return self.build(shape, classes)


class Net:
    """A network as a pure function of its parameters, which is how algorithms see it.

    A model holds its trained parameters and, with ``track``, its buffers: the running statistics of BatchNorm, which
    travel and are averaged with it. Parameters that need no gradient are the network's own constants: never trained,
    never sent. BatchNorm and dropout act as the pass at work says (`mode`).

    Parameters
    ----------
    build
        Makes the network anew; called once for its structure and once for each fresh model.
    dtype
        Of every fresh model.
    device
        Where calls are computed.
    buffers
        ``average``: buffers are part of a model; ``keep``: each client has its own; ``drop``: there are none, and every
        batch is normalised by its own statistics.

    Attributes
    ----------
    names
        The trained parameters.
    buffer_names
        The buffers that a model holds.
    body_names, head_names
        All tensors of a model that belong to the body, or to the head; buffers too.
    norm_names
        All tensors of a model that belong to normalisation layers, wherever they are inside.
    """

    def __init__(
        self,
        build: Callable[[], Network],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        buffers: Literal["average", "keep", "drop"] = "average",
    ) -> None:
        self._build, self.dtype, self._buffers = build, dtype, buffers
        with torch.random.fork_rng(devices=[]):
            self._module, self.mode = self._made()
        self._module.to(device=device, dtype=dtype)
        trained = [name for name, value in self._module.named_parameters() if value.requires_grad]
        held = [name for name, _ in self._module.named_buffers()]
        self.names = tuple(trained)
        self.buffer_names = tuple(held) if buffers == "average" else ()
        self.own = Tensors((name, value.cpu()) for name, value in self._module.named_buffers() if buffers == "keep")
        everything = self.names + self.buffer_names
        self._tied = len(list(self._module.parameters())) < len(
            list(self._module.named_parameters(remove_duplicate=False))
        )
        self.body_names = tuple(name for name in everything if name.startswith("body."))
        self.head_names = tuple(name for name in everything if name.startswith("head."))
        normal = [
            name for name, layer in self._module.named_modules() if isinstance(layer, (BatchNorm, *NORMALISATIONS))
        ]
        self.norm_names = tuple(name for name in everything if name.rpartition(".")[0] in normal)
        self.random = any(isinstance(layer, Dropout) for layer in self._module.modules())

    def _made(self) -> tuple[Network, Mode]:
        mode, network = Mode(), self._build()
        for module in network.modules():
            if "num_batches_tracked" in module._buffers:
                del module._buffers["num_batches_tracked"]  # a counter that nothing reads, and no mean makes sense of
        functional(network, mode, track=self._buffers != "drop")
        return network, mode

    def __call__(self, model: Tensors, x: Tensor, *, teacher: bool = False) -> Tensor:
        """Logits, shape (B, C), in the mode of the pass at work.

        A ``teacher`` is in evaluation mode whatever the pass; where statistics are the client's own, with those that it
        had as it began.
        """
        with self.mode.still() if teacher else nullcontext():
            tensors = {**self.mode.buffers, **model}
            logits: Tensor = functional_call(self._module, tensors, (x,), tie_weights=self._tied)
        return logits

    def features(self, model: Tensors, x: Tensor, *, teacher: bool = False) -> Tensor:
        """What the body makes of the inputs, shape (B, d); tensors of the head need not be given."""
        with self.mode.still() if teacher else nullcontext():
            tensors = {**self.mode.buffers, **model}
            body = {name[5:]: value for name, value in tensors.items() if name.startswith("body.")}
            features: Tensor = functional_call(self._module.body, body, (x,), tie_weights=self._tied)
        return features.flatten(1)

    def classify(self, model: Tensors, features: Tensor) -> Tensor:
        """What the head makes of features of shape (B, d): logits, shape (B, C); for losses that need both."""
        head = {name[5:]: value for name, value in model.items() if name.startswith("head.")}
        logits: Tensor = functional_call(self._module.head, head, (features,))
        return logits

    def layers(self) -> list[tuple[str, ...]]:
        """The names of each parametrised layer's tensors, buffers included, from the input to the output."""
        found: dict[str, list[str]] = {}
        for name in self.names + self.buffer_names:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return [tuple(names) for names in found.values()]

    def last(self, count: int, buffers: bool = True) -> tuple[str, ...]:
        """The names of the last ``count`` parametrised layers' tensors; where there are fewer, of all of them."""
        layers = self.layers()
        names = [name for layer in layers[max(0, len(layers) - count) :] for name in layer]
        return tuple(name for name in names if buffers or name in self.names)

    def fresh(self, entropy: int) -> Tensors:
        """An initial model, on the host: a function of ``entropy`` alone, whatever the device and dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(entropy % 2**63)
            module, _ = self._made()
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return Tensors((name, tensors[name].detach().to(self.dtype)) for name in self.names + self.buffer_names)

    def replica(self) -> Net:
        """The same function with a module of its own, for another thread (a call swaps its module's tensors)."""
        twin = copy.copy(self)
        twin._module, twin.mode = copy.deepcopy((self._module, self.mode))
        return twin


def class_relations(omega: Tensor) -> Tensor:
    """The CR matrix of a classification layer of shape (C, d): the row softmax of its Gram matrix, shape (C, C)."""
    return (omega @ omega.T).softmax(-1)
