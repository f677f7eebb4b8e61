"""Networks of other libraries as a body and a head: published weights, frozen bodies, GroupNorm and LoRA."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.core.components import pinned_files
from fedpipe.core.components.component import MODEL
from fedpipe.core.components.pinned_files import PinnedFile
from fedpipe.core.components.registry import get_component_name
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.models.base import Model, Network, read_tensors
from fedpipe.models.conversion import (
    FrozenBatchNorm,
    ParametersOnMeta,
    RandomOperations,
    UnsupportedArchitectureError,
    disable_inplace_layers,
    freeze_buffers,
    make_group_norm,
    record_patch_layers,
    replace_batch_norm,
)
from fedpipe.models.layers import Mode, replace_stateful_layers
from fedpipe.models.lora import LoRA, LoRALinear
from fedpipe.models.purity import cache_check

STATISTICS = (".running_mean", ".running_var")  #: ends of the names of BatchNorm's statistics
MAX_NAMES = 3  #: number of tensors that an error lists


class PublishedWeights(NamedTuple):
    """A file of weights that a library publishes."""

    name: str  #: path below a mirror, such as "torchvision/resnet18-f37072fd.pth"
    source: str  #: address or repository of the publisher
    hash_prefix: str = ""  #: first digits of the SHA-256, if the publisher declares them

    @property
    def checkpoint(self) -> Path:
        """Path in the cache of PyTorch's hub."""
        return Path(torch.hub.get_dir(), "checkpoints", Path(self.name).name)


@dataclass(frozen=True, kw_only=True)
class Backbone(Model):
    """A network of a library. Its last linear layer is the head, and everything before it is the body.

    Parameters
    ----------
    architecture
        Name of the network in its library.
    weights
        Name of the library's weights, or null for random ones. Otherwise a file (from the folder of params.yaml) with
        either the library's state dict, or the complete state dict of this network, ``body.*`` and ``head.*``. Only the
        body's tensors of a library's state dict are used. The head is drawn at random from the run's seed.
    sha256
        SHA-256 of the weights' file, which is part of the run's key. `fedpipe download` fills it in, after it has
        fetched the library's weights.
    norm
        `batch`: BatchNorm, as in the library. `group`: each BatchNorm is replaced by GroupNorm, whose number of groups
        is the greatest divisor of the channels up to 32. Then the library's weights do not fit.
    frozen
        If true, the body keeps its weights, and only the head is trained. The body's features are computed once per
        data set and stored in ``results/features``, so you can't use augmentation.
    lora
        Low-rank adaptation (LoRA) of linear layers of the body: a mapping of ``layers`` (names of layers, such as
        ``[qkv]``), ``rank`` (default 8) and ``alpha`` (default 16). All other weights of the body are frozen. Clients
        train and send only the low-rank matrices and the head.
    """

    architecture: Annotated[str, Field(min_length=1)]
    norm: Literal["batch", "group"] = "batch"
    frozen: bool = False
    lora: LoRA | None = None

    library: ClassVar[str]  #: name of the library in messages

    # -- what a library provides --------------------------------------------------------------------------------------

    def list_architectures(self) -> list[str]:
        """Names of all architectures.

        Raises
        ------
        SettingsError
            The library is not installed.
        """
        raise NotImplementedError

    def list_weights(self) -> list[str]:
        """Names of the published weights of the architecture."""
        raise NotImplementedError

    def build_library_network(
        self, shape: tuple[int, ...], num_classes: int, tensors: Mapping[str, Tensor] | None
    ) -> tuple[nn.Module, str]:
        """Build the library's network with C logits, and the name of its head.

        Parameters
        ----------
        shape, num_classes
            Input shape and number of classes.
        tensors
            State dict of the library, whose tensors of the body are loaded. None: random weights.

        Raises
        ------
        RuntimeError
            The tensors or the inputs do not fit.
        UnsupportedArchitectureError
            The architecture has no linear head, or a layer that is not supported.
        """
        raise NotImplementedError

    @property
    def published_weights(self) -> PublishedWeights | None:
        """The library's weights. None for random ones or a file."""
        raise NotImplementedError

    def find_cached_weights(self) -> Path | None:
        """Path of the library's weights on this machine. None if they are missing."""
        published = self.published_weights
        return published.checkpoint if published and published.checkpoint.is_file() else None

    def download_weights(self) -> None:
        """Download the library's weights to its cache.

        Raises
        ------
        OSError, RuntimeError
            There is no network, or the downloaded file has another SHA-256.
        """
        published = self.published_weights
        assert published is not None
        published.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            published.source, str(published.checkpoint), hash_prefix=published.hash_prefix or None
        )

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    @override
    def pinned_file(self) -> PinnedFile | None:
        """None for the library's weights."""
        return super().pinned_file if self.weights is not None and _is_path(self.weights) else None

    @property
    @override
    def has_full_weights(self) -> bool:
        """False for a state dict of the library, which contains only the body."""
        if self.pinned_file is None or not self.pinned_file.path.is_file():
            return False
        tensors = read_tensors(self.weights_file())  # timm's TResNet has its own `body.`, next to `head.fc.weight`
        return "head.weight" in tensors and any(name.startswith("body.") for name in tensors)

    @property
    @override
    def has_missing_weights(self) -> bool:
        return self.published_weights is not None and self.find_cached_weights() is None

    @override
    def obtain_weights(self, fetch_from_mirror: Callable[[str], Path | None]) -> Path | None:
        """Get the library's weights from its cache, a mirror, or the publisher."""
        published = self.published_weights
        if published is None:
            return None
        if self.find_cached_weights() is None:
            if (mirrored_file := fetch_from_mirror(published.name)) is not None:
                published.checkpoint.parent.mkdir(parents=True, exist_ok=True)
                part_file = published.checkpoint.with_name(f"{published.checkpoint.name}.part")
                shutil.copyfile(mirrored_file, part_file)
                part_file.replace(published.checkpoint)
            else:
                try:
                    self.download_weights()
                except (OSError, RuntimeError, ValueError) as error:  # libraries of hubs raise their own subclasses
                    reason = " ".join(str(error).split())
                    raise SettingsError(
                        f"model.weights: {self.weights} of {self.architecture} can't be downloaded from "
                        f"{published.source} ({reason}). Put the file at {published.checkpoint}, or below a mirror as "
                        f"{published.name}."
                    ) from None
        path = self.find_cached_weights()
        assert path is not None
        self._verify_published_file(path)
        return path

    def _verify_published_file(self, path: Path) -> None:
        """Require the declared SHA-256 of the library's weights."""
        published = self.published_weights
        assert published is not None
        actual_sha256 = pinned_files.compute_content_sha256(path)
        if not actual_sha256.startswith(published.hash_prefix):
            raise SettingsError(
                f"model.weights: {path} is damaged or another file, because its SHA-256 is {actual_sha256} and "
                f"does not begin with {published.hash_prefix}. Delete it, and run `fedpipe download`."
            )
        if self.sha256 not in (None, actual_sha256):
            raise SettingsError(
                f"model.sha256: {self.sha256} is declared, but {path} has the SHA-256 {actual_sha256}. Declare this "
                "SHA-256, or restore the declared file."
            )

    @override
    def weights_file(self) -> Path:
        """Path of the weights file, whose SHA-256 is checked.

        Raises
        ------
        SettingsError
            The file is missing or has another SHA-256.
        """
        if self.published_weights is None:
            return super().weights_file()
        if (path := self.find_cached_weights()) is None:
            raise SettingsError(
                f"model.weights: {self.weights} of {self.architecture} is not on this machine. Run `fedpipe download`, "
                f"or put the file with SHA-256 {self.sha256} at {self.published_weights.checkpoint}."
            )
        self._verify_published_file(path)
        return path

    # -- checks --------------------------------------------------------------------------------------------------------

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require a known architecture with known weights that takes these inputs."""
        architectures = self.list_architectures()
        if self.architecture not in architectures:
            raise SettingsError(
                f"model.architecture: unknown architecture '{self.architecture}' of {self.library}. "
                f"{suggest_architecture(self.architecture, architectures)}"
            )
        names = self.list_weights()
        if self.weights is not None and (name := self.weights.rpartition(".")[2]) in names and name != self.weights:
            raise SettingsError(f"model.weights: unknown weights '{self.weights}'. Did you mean '{name}'?")
        if self.weights is not None and self.weights not in names and not _is_path(self.weights):
            advice = suggest_name(self.weights, names) if names else "Use null, or the path of a file."
            raise SettingsError(f"model.weights: unknown weights '{self.weights}' of {self.architecture}. {advice}")
        self._check_settings(has_published_weights=self.weights in names)
        check_network(self, shape, num_classes)

    def _check_settings(self, has_published_weights: bool) -> None:
        """Reject settings that exclude each other, and weights without SHA-256."""
        trained_later = {"frozen": self.frozen, "lora": self.lora is not None}
        for key in (key for key, is_set in trained_later.items() if is_set and self.weights is None):
            raise SettingsError(
                f"model.{key}: it can't be used with random weights, which would never be trained. Set model.weights, "
                f"or remove model.{key}."
            )
        if self.frozen and self.lora is not None:
            raise SettingsError(
                "model.lora: it can't be used with model.frozen, which trains only the head. Remove one."
            )
        if not has_published_weights:
            return
        if self.norm == "group":
            raise self._make_batch_norm_error()
        if self.sha256 is None:
            cached_file = self.find_cached_weights()
            sha256 = f" Or set it to {pinned_files.compute_content_sha256(cached_file)}." if cached_file else ""
            raise SettingsError(
                f"model.sha256: missing for {self.weights} of {self.architecture}. Run `fedpipe download`, which fills "
                f"it in.{sha256}"
            )
        if (cached_file := self.find_cached_weights()) is not None:
            self._verify_published_file(cached_file)

    def _make_batch_norm_error(self) -> SettingsError:
        return SettingsError(
            f"model.norm: group can't be used with the weights {self.weights}, which are those of a network with "
            "BatchNorm. Use batch, or model.weights: null."
        )

    # -- networks ------------------------------------------------------------------------------------------------------

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        """Make the network, with the weights of a file.

        Raises
        ------
        SettingsError
            The weights file is missing, has another SHA-256, or belongs to another network.
        """
        if self.weights is None:
            return self._freeze_body(self._build_body_and_head(shape, num_classes, None))
        tensors = read_tensors(self.weights_file())
        if self.norm == "group" and any(name.endswith(STATISTICS) for name in tensors):
            raise self._make_batch_norm_error()
        if self.has_full_weights:
            network = self._build_body_and_head(shape, num_classes, None)
            self._load_weights(network, tensors)
            return self._freeze_body(network)
        try:
            if self.norm == "group":  # the library's network has BatchNorm when it loads the tensors
                library_network, _ = self.build_library_network(shape, num_classes, None)
                state = library_network.state_dict()
                tensors = {name: value for name, value in state.items() if name.endswith(STATISTICS)} | tensors
            return self._freeze_body(self._build_body_and_head(shape, num_classes, tensors))
        except RuntimeError as error:
            raise SettingsError(
                f"model.weights: {self.weights} does not fit {self.architecture} for inputs of shape {shape} "
                f"({_describe_mismatch(error, tensors)})."
            ) from None

    @override
    def build_initial_network(self, shape: tuple[int, ...], num_classes: int) -> Network:
        return self.build(shape, num_classes)

    @override
    def build_without_weights(self, shape: tuple[int, ...], num_classes: int) -> Network:
        """Make the network on the meta device, in about a second for any size."""
        try:
            with ParametersOnMeta():
                network = self._build_body_and_head(shape, num_classes, None)
        except RuntimeError:  # a few networks compute with their parameters
            with torch.random.fork_rng(devices=[]):
                network = self._build_body_and_head(shape, num_classes, None)
        return self._freeze_body(network).to("meta")

    def _build_body_and_head(
        self, shape: tuple[int, ...], num_classes: int, tensors: Mapping[str, Tensor] | None
    ) -> Network:
        """Build the library's network as a body and a head, with layers that clients can train."""
        body, head_name = self.build_library_network(shape, num_classes, tensors)
        head = body.get_submodule(head_name)
        body.set_submodule(head_name, nn.Identity())
        disable_inplace_layers(body)
        for name, layer in list(body.named_modules()):
            if (replacement := self.replace_layer(layer)) is not None:
                body.set_submodule(name, replacement)
        if self.norm == "group" and not replace_batch_norm(body, make_group_norm):
            raise SettingsError(
                f"model.norm: group can't be used, because {self.architecture} has no BatchNorm. Use batch."
            )
        freeze_buffers(body)
        return Network(body, head)

    def replace_layer(self, layer: nn.Module) -> nn.Module | None:
        """Make a replacement for a layer that draws random numbers or combines layers. None if it can stay."""
        return None

    def _freeze_body(self, network: Network) -> Network:
        """Freeze the body, and add the matrices of LoRA to it."""
        if not self.frozen and self.lora is None:
            return network
        replace_batch_norm(network.body, FrozenBatchNorm)
        network.body.requires_grad_(False)
        if self.lora is not None:
            self.lora.add_matrices(network.body, self.architecture)
        return network

    @property
    @override
    def has_frozen_base(self) -> bool:
        return self.frozen

    @override
    def split_frozen_base(self, network: Network) -> tuple[nn.Module, Network]:
        """Split off the complete body."""
        return network.body, Network(nn.Identity(), network.head)


def suggest_architecture(name: str, architectures: list[str]) -> str:
    """Suggest an architecture. A library has too many to print them all."""
    advice = suggest_name(name, architectures)
    return (
        advice
        if advice.startswith("Did you mean") or len(architectures) < 10
        else f"Use one such as {architectures[0]}."
    )


def _is_path(weights: str) -> bool:
    """Whether the weights are a file instead of a name."""
    return any(mark in weights for mark in "./\\")


def _describe_mismatch(error: RuntimeError, tensors: Mapping[str, Tensor]) -> str:
    """The first reason of a failed `load_state_dict`, with at most three names."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    reason = next((line.rstrip(".") for line in lines if not line.startswith("Error(s)")), type(error).__name__)
    names = re.findall(r'"([^"]+)"', reason)
    prefix = next(iter(tensors), "").partition(".")[0] + "."
    has_prefix = all(name.startswith(prefix) for name in tensors)
    if has_prefix and any(name.removeprefix(prefix) in names for name in tensors):
        return f"all its names begin with '{prefix}'. Remove this prefix"
    if len(names) <= MAX_NAMES:
        return reason
    listed_names = ", ".join(f"'{name}'" for name in names[:MAX_NAMES])
    return f"{reason.partition(':')[0]}: {listed_names} and {len(names) - MAX_NAMES} more"


@cache_check
def check_network(model: Backbone, shape: tuple[int, ...], num_classes: int) -> None:
    """Reject architectures that can't be trained on inputs of this shape. The network has no values.

    Raises
    ------
    SettingsError
        The inputs have another number of channels or are too small, the architecture has no linear head, or a layer
        draws random numbers that do not depend on the study's seeds.
    """
    name, mode, random_operations = get_component_name(MODEL, type(model)), Mode(), RandomOperations()
    if len(shape) != 3:
        raise SettingsError(f"model.name: '{name}' can't take inputs of shape {shape}. It needs images.")
    try:
        network = dataclasses.replace(model, weights=None).build_without_weights(shape, num_classes)
        replace_stateful_layers(network, mode, track=True)
        adapters = [layer for layer in network.modules() if isinstance(layer, LoRALinear)]
        called: set[nn.Module] = set()
        patch_layers = record_patch_layers(network, shape)
        for adapter in adapters:
            adapter.register_forward_hook(lambda layer, *_: called.add(layer))
        noise_key = torch.zeros((), dtype=torch.int64, device="meta")
        with torch.no_grad(), mode.activate(True, noise_key=noise_key), random_operations:
            features = network.body(torch.empty(2, *shape, device="meta"))
            logits = network.head(features)
    except SettingsError:
        raise
    except UnsupportedArchitectureError as error:
        raise SettingsError(
            f"model.architecture: {model.architecture} can't be used, because {error}. Use another architecture."
        ) from None
    except Exception as error:  # libraries raise errors of all kinds
        raise SettingsError(
            f"model.architecture: {model.architecture} can't take inputs of shape {shape} ({type(error).__name__}: "
            f"{' '.join(str(error).split())}). Use images of another size (dataset.image_size of folder, parquet and "
            "huggingface), or another architecture."
        ) from None
    if features.dim() != 2 or logits.shape != (2, num_classes):
        raise SettingsError(
            f"model.architecture: {model.architecture} can't be used, because its features have the shape "
            f"{tuple(features.shape)} for two inputs. Use an architecture with one vector of features per input."
        )
    for layer in patch_layers:
        _require_patches_of_all_pixels(model.architecture, shape, layer)
    if random_operations.names:
        raise SettingsError(
            f"model.architecture: {model.architecture} can't be used, because {random_operations.names[0]} in its "
            "layers draws random numbers that do not depend on the study's seeds. Use another architecture."
        )
    if unused := [adapter for adapter in adapters if adapter not in called]:
        unused_name = next(path for path, layer in network.body.named_modules() if layer is unused[0])
        raise SettingsError(
            f"model.lora.layers: '{unused_name}' of {model.architecture} can't be adapted, because its network reads "
            "the weights without calling the layer. Use other layers, or another architecture."
        )


def _require_patches_of_all_pixels(architecture: str, shape: tuple[int, ...], layer: nn.Conv2d) -> None:
    """Require images that consist of complete patches. A convolution ignores other pixels."""
    sides = list(zip(shape[1:], layer.kernel_size, layer.stride, strict=True))
    sides_read = [side - (side - patch) % stride for side, patch, stride in sides]
    if sides_read != list(shape[1:]):
        right_sides = [side + (patch - side) % stride for side, patch, stride in sides]
        read, size, patch_size, right_size = (
            "x".join(map(str, numbers)) for numbers in (sides_read, shape[1:], layer.kernel_size, right_sides)
        )
        raise SettingsError(
            f"model.architecture: {architecture} would read only {read} of {size} pixels, because it divides images "
            f"into patches of {patch_size}. Use images of {right_size} pixels (dataset.image_size of folder, parquet "
            "and huggingface), another data set, or another architecture."
        )
