"""The interface of models, and the functional view of a network that algorithms call."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from fedpipe.core.components import pinned_files
from fedpipe.core.components.component import Component
from fedpipe.core.components.pinned_files import PinnedFile, Sha256
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import MissingTensorError, Tensors, describe_tensor
from fedpipe.models.layers import NORMALIZATION_LAYERS, BatchNorm, Dropout, Mode, replace_stateful_layers

T = TypeVar("T")

BATCH_COUNTER = "num_batches_tracked"  #: BatchNorm's counter, which is unused


class Network(nn.Module):
    """A body that maps inputs to features of shape (B, d), and a head that maps features to C logits."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, C) for inputs of shape (B, *shape)."""
        return self.head(self.body(x))


@dataclass(frozen=True, kw_only=True)
class Model(Component):
    """A family of networks. Its fields are settings such as widths.

    Parameters
    ----------
    weights
        File with initial tensors for all runs and seeds, instead of random ones: the network's ``state_dict()`` with
        the names ``body.*`` and ``head.*``, written by ``torch.save`` (from the folder of params.yaml). An
        algorithm that replaces the model's head still draws its own head at random.
    sha256
        SHA-256 of that file, which is part of the run's key. `fedpipe download` fills it in.
    """

    weights: Annotated[str, Field(min_length=1)] | None = None
    sha256: Sha256 | None = None

    is_stackable: ClassVar[bool] = True  #: clients can train in one vmap call (an LSTM has no batching rule)

    @property
    def has_frozen_base(self) -> bool:
        """Whether the first part of the body is frozen, so that its features are computed once."""
        return False

    def split_frozen_base(self, network: Network) -> tuple[nn.Module, Network]:
        """Split a network into its frozen base and the rest, which takes the base's features of shape (B, d)."""
        raise NotImplementedError

    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Reject inputs that this family can't process, before any job starts.

        Raises
        ------
        SettingsError
            The message is one sentence that begins with the key of params.yaml.
        """

    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        """Make a network with PyTorch's default initialization, for inputs of this shape and C classes."""
        raise NotImplementedError

    def build_without_weights(self, shape: tuple[int, ...], num_classes: int) -> Network:
        """Make the same network to inspect its layers. It loads no weights and may be on the meta device."""
        return self.build(shape, num_classes)

    @property
    @override
    def pinned_file(self) -> PinnedFile | None:
        return None if self.weights is None else PinnedFile("weights", Path(self.weights), self.sha256)

    @property
    def has_full_weights(self) -> bool:
        """Whether a file contains all tensors of the network, so that there is only one initial model."""
        return self.weights is not None

    def build_initial_network(self, shape: tuple[int, ...], num_classes: int) -> Network:
        """Make the initial network of a run, with the tensors of ``weights`` or those of :meth:`build`.

        Raises
        ------
        SettingsError
            The weights file is missing, has another SHA-256, or belongs to another network.
        """
        network = self.build(shape, num_classes)
        if self.has_full_weights:
            self._load_weights(network, read_tensors(self.weights_file()))
        return network

    def _load_weights(self, network: Network, tensors: Mapping[str, Tensor]) -> None:
        """Load all tensors of a file into a network."""
        constants = {name for name, value in network.state_dict().items() if not value.is_floating_point()}  # positions
        network_tensors = {name: value for name, value in network.state_dict().items() if name not in constants}
        file_tensors = {
            name: value for name, value in tensors.items() if name not in constants and not name.endswith(BATCH_COUNTER)
        }
        expected_tensors = (
            f"The network has {len(network_tensors)} tensors, from '{next(iter(network_tensors))}' to "
            f"'{next(reversed(network_tensors))}'."
        )
        for name, value in network_tensors.items():
            if name not in file_tensors:
                raise SettingsError(f"model.weights: {self.weights} has no tensor '{name}'. {expected_tensors}")
            if file_tensors[name].shape != value.shape or not file_tensors[name].is_floating_point():
                raise SettingsError(
                    f"model.weights: '{name}' of {self.weights} is {describe_tensor(file_tensors[name])}. "
                    f"Use {describe_tensor(value)}."
                )
            if not file_tensors[name].isfinite().all():
                raise SettingsError(
                    f"model.weights: '{name}' of {self.weights} contains NaN or infinity. Use finite numbers."
                )
        if extra_names := [name for name in file_tensors if name not in network_tensors]:
            raise SettingsError(
                f"model.weights: {self.weights} has a tensor '{extra_names[0]}', which the network does not have. "
                f"{expected_tensors}"
            )
        if any(value.dtype == torch.float64 for value in file_tensors.values()):
            network.double()  # rounded later, to federation.dtype
        network.load_state_dict(file_tensors, strict=False)

    def check_weights_file(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Reject weights of another network, before any job starts.

        A missing file is accepted here, because you can read the results of a study without its weights.

        Raises
        ------
        SettingsError
            One sentence that begins with the key of params.yaml.
        """
        if self.sha256 is not None and self.weights is None:
            raise SettingsError("model.sha256: model.weights is missing. Name the file there, or remove model.sha256.")
        if self.pinned_file is not None and self.pinned_file.path.is_file():
            with torch.random.fork_rng(devices=[]):
                self.build_initial_network(shape, num_classes)

    @property
    def has_missing_weights(self) -> bool:
        """Whether weights that a library publishes are missing on this machine."""
        return False

    def obtain_weights(self, fetch_from_mirror: Callable[[str], Path | None]) -> Path | None:
        """Get the weights that a library publishes. None if the model has no such weights.

        Parameters
        ----------
        fetch_from_mirror
            Local path of a mirror's file with this name. None if the mirror has none.

        Raises
        ------
        SettingsError
            They can't be downloaded, or have another SHA-256.
        """
        return None

    def weights_file(self) -> Path:
        """Path of the weights file, whose SHA-256 is checked.

        Raises
        ------
        SettingsError
            The file is missing or has another SHA-256.
        """
        assert self.pinned_file is not None
        if not self.pinned_file.path.is_file():
            raise SettingsError(
                f"model.weights: {self.pinned_file.path} is missing. Use the file with SHA-256 {self.sha256}."
            )
        if problem := self.pinned_file.explain_mismatch("model", None):
            raise SettingsError(problem)
        return self.pinned_file.path


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file by name, cached until the file changes. Only tensors are unpickled."""
    return _read_tensors_cached(path, pinned_files.compute_stat_fingerprint(path))


@functools.lru_cache(maxsize=1)
def _read_tensors_cached(path: Path, fingerprint: str) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors: dict[str, Any] = load_file(path)
        else:
            tensors = dict(torch.load(path, weights_only=True, map_location="cpu"))
        non_tensors = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
        reason = f"'{non_tensors[0]}' is not a tensor" if non_tensors else ""
    except pickle.UnpicklingError:
        reason = "it contains something other than tensors, such as a complete model"
    except Exception as error:  # a user's file may contain anything
        reason = str(error).split("\n", 1)[0] or type(error).__name__
    if reason:
        raise SettingsError(
            f"model.weights: {path} can't be read ({reason}). Save model.state_dict(), which contains tensors by name."
        )
    return tensors


@contextmanager
def seed_generator(entropy: int) -> Iterator[None]:
    """Seed PyTorch's generator of the CPU within the block, in which a network is built."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(entropy % 2**63)
        yield


class FunctionalNetwork:
    """A network as a pure function of its parameters, as algorithms use it.

    A model contains its trained parameters and, with ``buffers="average"``, the running statistics of BatchNorm, which
    are sent and averaged with it. Parameters without a gradient are constants, which are never trained or sent.
    BatchNorm and dropout follow the mode of the current pass (`fedpipe.models.layers.Mode`).

    Parameters
    ----------
    build
        Makes the network. It is called once for the structure and once for each initial model.
    dtype
        Data type of every initial model.
    device
        Device of all computations.
    buffers
        ``average``: buffers are part of a model. ``keep``: each client has its own buffers. ``drop``: there are none,
        and every batch is normalized by its own statistics.
    precision
        ``bfloat16``: products and convolutions in training are computed in this precision. Outputs have ``dtype``.
    entropy
        Seeds the constants that the network draws at random, such as a frozen layer. That of the first initial model.

    Attributes
    ----------
    names
        Names of the trained parameters.
    buffer_names
        Names of the buffers that are part of a model.
    shapes
        Shape of each tensor of a model.
    body_names, head_names
        Names of all tensors of the body or the head, including buffers.
    norm_names
        Names of all tensors of normalization layers, at any depth.
    has_dropout
        Whether the network has dropout, whose noise needs a key.
    has_batch_statistics
        Whether evaluation normalizes by a batch's own statistics, so that logits depend on the other samples of a
        batch.
    """

    def __init__(
        self,
        build: Callable[[], Network],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        buffers: Literal["average", "keep", "drop"] = "average",
        precision: Literal["full", "bfloat16"] = "full",
        entropy: int = 0,
    ) -> None:
        self._build, self.dtype, self._buffers, self.entropy = build, dtype, buffers, entropy
        self.is_bfloat16, self._device = precision == "bfloat16", torch.device(device).type
        self._module, self.mode = self._build_module(entropy)
        self._module.to(device=device, dtype=dtype)
        parameters, module_buffers = dict(self._module.named_parameters()), dict(self._module.named_buffers())
        self.names = tuple(name for name, value in parameters.items() if value.requires_grad)
        self.buffer_names = tuple(module_buffers) if buffers == "average" else ()
        self.client_buffers = Tensors(
            (name, value.cpu()) for name, value in module_buffers.items() if buffers == "keep"
        )
        all_names = self.names + self.buffer_names
        tensors = parameters | module_buffers
        self.shapes = {name: tensors[name].shape for name in all_names}
        prefixes = {"": "", "body": "body.", "head": "head."}
        self._names_by_part = {part: frozenset(_select_part(self.shapes, prefix)) for part, prefix in prefixes.items()}
        self._has_tied_weights = len(parameters) < len(list(self._module.named_parameters(remove_duplicate=False)))
        self.body_names = tuple(name for name in all_names if name.startswith("body."))
        self.head_names = tuple(name for name in all_names if name.startswith("head."))
        layers = dict(self._module.named_modules())
        norm_layers = [name for name, layer in layers.items() if isinstance(layer, (BatchNorm, *NORMALIZATION_LAYERS))]
        self.norm_names = tuple(name for name in all_names if name.rpartition(".")[0] in norm_layers)
        self.has_dropout = any(isinstance(layer, Dropout) for layer in layers.values())
        self.has_batch_statistics = any(isinstance(layer, BatchNorm) and not layer.track for layer in layers.values())

    def _build_module(self, entropy: int) -> tuple[Network, Mode]:
        with seed_generator(entropy):
            mode, network = Mode(), self._build()
        for module in network.modules():
            if BATCH_COUNTER in module._buffers:
                del module._buffers[BATCH_COUNTER]  # unused, and its mean would be meaningless
        replace_stateful_layers(network, mode, track=self._buffers != "drop")
        return network, mode

    def __call__(self, model: Tensors, x: Tensor, *, teacher: bool = False) -> Tensor:
        """Logits, shape (B, C), in the mode of the current pass.

        A ``teacher`` is always in evaluation mode. If each client has its own statistics, the teacher uses those from
        the start of the client's round.
        """
        with self.mode.evaluate_teacher() if teacher else nullcontext():
            return self._call_module("", {**self.mode.buffers, **model}, x)

    def features(self, model: Tensors, x: Tensor, *, teacher: bool = False) -> Tensor:
        """Features of the inputs, shape (B, d). The model may lack the head's tensors."""
        with self.mode.evaluate_teacher() if teacher else nullcontext():
            tensors = {**self.mode.buffers, **model}
            return self._call_module("body", _select_part(tensors, "body."), x).flatten(1)

    def classify(self, model: Tensors, features: Tensor) -> Tensor:
        """Logits of features of shape (B, d), shape (B, C), for losses that need both."""
        return self._call_module("head", _select_part(model, "head."), features)

    def _call_module(self, part: str, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """Call the network, its ``body`` or its ``head`` in the precision of the current pass.

        Raises
        ------
        MissingTensorError
            A tensor is missing. PyTorch would use the module's own one.
        """
        if not self._names_by_part[part] <= tensors.keys():
            missing_name = min(self._names_by_part[part] - tensors.keys())
            raise MissingTensorError(f"{part}.{missing_name}".removeprefix("."))
        self.mode.calls.clear()
        module = self._module.get_submodule(part)
        with torch.autocast(self._device, torch.bfloat16) if self.mode.autocast else nullcontext():
            output: Tensor = functional_call(module, tensors, (x,), tie_weights=self._has_tied_weights)
        return output.to(self.dtype) if self.mode.autocast else output

    def parameters(self, model: Tensors) -> Tensors:
        """Select the trained parameters of a model or of a part of it, in the network's order."""
        return model.only(name for name in self.names if name in model)

    def buffers(self, model: Tensors) -> Tensors:
        """Select the other tensors: the running statistics."""
        return model.only(name for name in self.buffer_names if name in model)

    def to_model(self, tensors: Tensors) -> Tensors:
        """Make a model from all its tensors, in the network's order."""
        return self.parameters(tensors) | self.buffers(tensors)

    def layers(self) -> list[tuple[str, ...]]:
        """Names of the tensors (with buffers) of each layer with parameters, from input to output.

        Buffers of a layer without parameters belong to the layer before it, or else to the first one.
        """
        names_by_module: dict[str, list[str]] = {name: [] for name, _ in self._module.named_modules()}
        for name in self.names + self.buffer_names:
            names_by_module[name.rpartition(".")[0]].append(name)
        layers, first_buffers, parameter_names = list[list[str]](), list[str](), set(self.names)
        for names in names_by_module.values():
            if names and names[0] in parameter_names:
                layers.append(names + first_buffers)
                first_buffers = []
            else:
                (layers[-1] if layers else first_buffers).extend(names)
        return [tuple(names) for names in layers]

    def last_layer_names(self, count: int, buffers: bool = True) -> tuple[str, ...]:
        """Names of the tensors of the last ``count`` layers with parameters, or of all if there are fewer."""
        layers = self.layers()
        names = [name for layer in layers[max(0, len(layers) - count) :] for name in layer]
        return tuple(name for name in names if buffers or name in self.names)

    def make_initial_model(self, entropy: int) -> Tensors:
        """Make an initial model on the CPU. It depends only on ``entropy``, not on device and dtype."""
        module, _ = self._build_module(entropy)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return Tensors((name, tensors[name].detach().to(self.dtype)) for name in self.names + self.buffer_names)

    def copy_for_thread(self) -> FunctionalNetwork:
        """Copy with a separate module, for another thread (a call swaps the module's tensors)."""
        twin = copy.copy(self)
        twin._module, twin.mode = copy.deepcopy((self._module, self.mode))
        return twin


def _select_part(tensors: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Select the tensors of a part of the network, by their names in it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def compute_class_relations(head_weight: Tensor) -> Tensor:
    """CR matrix of a classification layer of shape (C, d): the row softmax of its Gram matrix, shape (C, C)."""
    return (head_weight @ head_weight.T).softmax(-1)
