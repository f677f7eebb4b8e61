"""What a model is, and how algorithms call it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from fedpipe import pins
from fedpipe.errors import SettingsError
from fedpipe.layers import NORMALISATIONS, BatchNorm, Dropout, Mode, functional
from fedpipe.pins import Pin, Sha256
from fedpipe.registry import Component
from fedpipe.tensors import Tensors

COUNTER = "num_batches_tracked"  #: of BatchNorm, which nothing reads


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
    """A family of networks; its fields are widths and the like.

    Parameters
    ----------
    weights
        A file with the tensors that every run begins with, all seeds alike, in place of random ones: what
        ``torch.save`` makes of the network's ``state_dict()``, named ``body.*`` and ``head.*`` (a path from the
        project's root). An algorithm that puts a head of its own in place of the model's draws that one as ever.
    sha256
        SHA-256 of that file, which makes it part of the run's key; `fedpipe download` fills it in.
    """

    weights: Annotated[str, Field(min_length=1)] | None = None
    sha256: Sha256 | None = None

    stackable: ClassVar[bool] = True  #: whether its clients can train in one call (an LSTM's can't: no batching rule)

    @property
    def frozen_base(self) -> bool:
        """Whether the first part of the body never trains, so that its features are computed once; see `parted`."""
        return False

    def parted(self, network: Network) -> tuple[nn.Module, Network]:
        """A network's frozen base, and what is left, with its tensors' names, for features of shape (B, d)."""
        raise NotImplementedError

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Refuse inputs that this family can't take, before any job starts.

        Raises
        ------
        SettingsError
            One sentence that begins with the key of params.yaml.
        """

    def build(self, shape: tuple[int, ...], classes: int) -> Network:
        """A network with PyTorch's default initialization, for inputs of this shape and C classes."""
        raise NotImplementedError

    def outline(self, shape: tuple[int, ...], classes: int) -> Network:
        """The same network for its layers alone: none of its weights are fetched, and it may lie on the meta device."""
        return self.build(shape, classes)

    @property
    def pin(self) -> Pin | None:
        """See :class:`~fedpipe.registry.Component`."""
        return None if self.weights is None else Pin("weights", Path(self.weights), self.sha256)

    @property
    def whole(self) -> bool:
        """Whether a file gives all tensors of the network, so that there is one initial model and no other."""
        return self.weights is not None

    def network(self, shape: tuple[int, ...], classes: int) -> Network:
        """The network that a run begins with: with the tensors of ``weights``, or those of :meth:`build`.

        Raises
        ------
        SettingsError
            The file of the weights is missing, is not the one that ``sha256`` says, or is of another network.
        """
        network = self.build(shape, classes)
        if self.whole:
            self._begin(network, tensors_of(self.weights_file()))
        return network

    def _begin(self, network: Network, tensors: Mapping[str, Tensor]) -> None:
        """Put the tensors of a file into a network, all of it."""
        held = {name: value for name, value in network.state_dict().items() if not name.endswith(COUNTER)}
        found = {name: value for name, value in tensors.items() if not name.endswith(COUNTER)}
        those = f"the {len(held)} of the network, from '{next(iter(held))}' to '{next(reversed(held))}'"
        for name, value in held.items():
            if name not in found:
                raise SettingsError(f"model.weights: {self.weights} has no tensor '{name}'; it should have {those}.")
            if found[name].shape != value.shape or not found[name].is_floating_point():
                raise SettingsError(
                    f"model.weights: '{name}' of {self.weights} is {_told(found[name])}; it should be {_told(value)}."
                )
            if not found[name].isfinite().all():
                raise SettingsError(
                    f"model.weights: '{name}' of {self.weights} holds NaN or infinity; no tensor should."
                )
        if extra := [name for name in found if name not in held]:
            raise SettingsError(
                f"model.weights: {self.weights} has a tensor '{extra[0]}', which the network does not have; it should "
                f"have {those}."
            )
        if any(value.dtype == torch.float64 for value in found.values()):
            network.double()  # rounded where federation.dtype says so, and not before
        network.load_state_dict(found, strict=False)

    def check_weights(self, shape: tuple[int, ...], classes: int) -> None:
        """Refuse weights of another network, before any job starts.

        A file that is not there is no error yet: a study that has run is read where its weights are not.

        Raises
        ------
        SettingsError
            One sentence that begins with the key of params.yaml.
        """
        if self.sha256 is not None and self.weights is None:
            raise SettingsError(
                "model.sha256: there is no model.weights that it could belong to; name that file, or remove it."
            )
        if self.pin is not None and self.pin.path.is_file():
            with torch.random.fork_rng(devices=[]):
                self.network(shape, classes)

    def weights_file(self) -> Path:
        """Where the file of the weights lies, which is the one that ``sha256`` says.

        Raises
        ------
        SettingsError
            It is missing, or another one.
        """
        assert self.pin is not None
        if not self.pin.path.is_file():
            raise SettingsError(
                f"model.weights: {self.pin.path} is missing; it should be the file with SHA-256 {self.sha256}."
            )
        if wrong := self.pin.mistake("model", None):
            raise SettingsError(wrong)
        return self.pin.path


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, by name, read once as long as it does not change; nothing else is ever unpickled."""
    return _read(path, pins.stamp(path))


@functools.lru_cache(maxsize=1)
def _read(path: Path, stamp: str) -> dict[str, Tensor]:
    try:
        tensors = dict(torch.load(path, weights_only=True, map_location="cpu"))
        odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
        reason = f"'{odd[0]}' is no tensor" if odd else ""
    except Exception as error:  # the file is the user's own: anything may be in it
        reason = str(error).split("\n", 1)[0] or type(error).__name__
    if reason:
        raise SettingsError(
            f"model.weights: {path} can't be read ({reason}); it should be a state dict, tensors by name."
        )
    return tensors


def _told(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


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
        batch is normalized by its own statistics.
    precision
        ``bfloat16``: so its products and convolutions are computed while it is trained; what comes out is of ``dtype``.

    Attributes
    ----------
    names
        The trained parameters.
    buffer_names
        The buffers that a model holds.
    body_names, head_names
        All tensors of a model that belong to the body, or to the head; buffers too.
    norm_names
        All tensors of a model that belong to normalization layers, wherever they are inside.
    random
        Whether it has dropout, whose noise needs a key.
    by_batch
        Whether evaluation normalizes by a batch's own statistics, so that logits hang on which samples share a call.
    """

    def __init__(
        self,
        build: Callable[[], Network],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        buffers: Literal["average", "keep", "drop"] = "average",
        precision: Literal["full", "bfloat16"] = "full",
    ) -> None:
        self._build, self.dtype, self._buffers = build, dtype, buffers
        self.lowered, self._device = precision == "bfloat16", torch.device(device).type
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
        normal = [layer for layer in self._module.modules() if isinstance(layer, BatchNorm)]
        self.by_batch = any(not layer.track for layer in normal)

    def _made(self) -> tuple[Network, Mode]:
        mode, network = Mode(), self._build()
        for module in network.modules():
            if COUNTER in module._buffers:
                del module._buffers[COUNTER]  # a counter that nothing reads, and no mean makes sense of
        functional(network, mode, track=self._buffers != "drop")
        return network, mode

    def __call__(self, model: Tensors, x: Tensor, *, teacher: bool = False) -> Tensor:
        """Logits, shape (B, C), in the mode of the pass at work.

        A ``teacher`` is in evaluation mode whatever the pass; where statistics are the client's own, with those that it
        had as it began.
        """
        with self.mode.eval_mode() if teacher else nullcontext(), self._arithmetic():
            tensors = {**self.mode.buffers, **model}
            logits: Tensor = functional_call(self._module, tensors, (x,), tie_weights=self._tied)
        return logits.to(self.dtype) if self.mode.lowered else logits

    def features(self, model: Tensors, x: Tensor, *, teacher: bool = False) -> Tensor:
        """What the body makes of the inputs, shape (B, d); tensors of the head need not be given."""
        with self.mode.eval_mode() if teacher else nullcontext(), self._arithmetic():
            tensors = {**self.mode.buffers, **model}
            body = {name[5:]: value for name, value in tensors.items() if name.startswith("body.")}
            features: Tensor = functional_call(self._module.body, body, (x,), tie_weights=self._tied)
        return features.flatten(1).to(self.dtype) if self.mode.lowered else features.flatten(1)

    def classify(self, model: Tensors, features: Tensor) -> Tensor:
        """What the head makes of features of shape (B, d): logits, shape (B, C); for losses that need both."""
        head = {name[5:]: value for name, value in model.items() if name.startswith("head.")}
        with self._arithmetic():
            logits: Tensor = functional_call(self._module.head, head, (features,))
        return logits.to(self.dtype) if self.mode.lowered else logits

    def _arithmetic(self) -> AbstractContextManager[Any]:
        """That of the pass at work, for one call of the network."""
        self.mode.calls.clear()
        return torch.autocast(self._device, torch.bfloat16) if self.mode.lowered else nullcontext()

    def parameters(self, model: Tensors) -> Tensors:
        """The trained parameters of a model, or of a part of one, in the network's order."""
        return model.only(name for name in self.names if name in model)

    def buffers(self, model: Tensors) -> Tensors:
        """Its other tensors, the running statistics."""
        return model.only(name for name in self.buffer_names if name in model)

    def model(self, tensors: Tensors) -> Tensors:
        """A whole model of its tensors, in the network's order."""
        return self.parameters(tensors) | self.buffers(tensors)

    def layers(self) -> list[tuple[str, ...]]:
        """The names of each parametrized layer's tensors, buffers included, from the input to the output."""
        found: dict[str, list[str]] = {}
        for name in self.names + self.buffer_names:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return [tuple(names) for names in found.values()]

    def last(self, count: int, buffers: bool = True) -> tuple[str, ...]:
        """The names of the last ``count`` parametrized layers' tensors; where there are fewer, of all of them."""
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
