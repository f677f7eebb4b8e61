"""The networks of the library timm."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.core.optional_libraries import import_optional_library
from fedpipe.models.backbone import Backbone, PublishedWeights
from fedpipe.models.conversion import UnsupportedArchitectureError
from fedpipe.models.layers import SampleDropout

PRETRAINED = "pretrained"  #: value of ``weights`` for the library's weights
HUB_FILES = ("model.safetensors", "pytorch_model.bin")  #: files of weights in a repository of the hub


@dataclass(frozen=True, kw_only=True)
class Timm(Backbone):
    """A network of the library timm, such as ``vit_tiny_patch16_224``, with random or published weights.

    Install the library with ``pip install 'fedpipe[timm]'``. ``timm.list_models()`` lists more than a thousand
    architectures. Images can have any number of channels. Vision transformers are built for the image size of the data
    set, and the position embeddings of published weights are resized to it. Attention is computed by plain products,
    which are deterministic. `fedpipe plan` rejects architectures that can't be trained in fedpipe, such as those
    without a linear head. Jobs read weights from the cache of Hugging Face's hub or of PyTorch, so they need no
    network.

    Parameters
    ----------
    weights
        `pretrained`: the library's weights of the architecture, or of a tag after a point, as in
        ``vit_tiny_patch16_224.augreg_in21k``. null: random weights. Otherwise a file (from the folder of params.yaml)
        with either timm's state dict of the architecture, or the complete state dict of this network, ``body.*`` and
        ``head.*``. Only the body's tensors of timm's are used. The head is drawn at random from the run's seed.
    """

    library: ClassVar[str] = "timm"

    @override
    def list_architectures(self) -> list[str]:
        return _list_architectures()

    @override
    def list_weights(self) -> list[str]:
        return [PRETRAINED]

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require a known architecture with known weights that takes these inputs."""
        if self.weights == PRETRAINED and self.architecture in self.list_architectures():
            self._get_weights_config()
        super().check(shape, num_classes)

    def _get_weights_config(self) -> Any:
        """Get timm's configuration of the weights."""
        config = _import_timm().get_pretrained_cfg(self.architecture)
        if config is None or not (config.hf_hub_id or config.url) or config.custom_load == "hf":
            raise SettingsError(
                f"model.weights: timm has no weights of {self.architecture} that fedpipe can load. Use null, or "
                "another architecture or tag of `timm.list_pretrained()`."
            )
        return config

    @property
    @override
    def published_weights(self) -> PublishedWeights | None:
        if self.weights != PRETRAINED:
            return None
        config = self._get_weights_config()
        if config.hf_hub_id:
            repository = str(config.hf_hub_id)
            return PublishedWeights(f"timm/{repository.partition('@')[0].rpartition('/')[2]}.safetensors", repository)
        return PublishedWeights(f"timm/{config.url.rpartition('/')[2]}", config.url)

    @override
    def find_cached_weights(self) -> Path | None:
        if (path := super().find_cached_weights()) is not None or self.weights != PRETRAINED:
            return path
        config = self._get_weights_config()
        if not config.hf_hub_id:
            return None
        from huggingface_hub import try_to_load_from_cache

        repository, _, revision = str(config.hf_hub_id).partition("@")
        for name in self._list_hub_files(config):
            cached_file = try_to_load_from_cache(repository, name, revision=revision or None)
            if isinstance(cached_file, str):
                return Path(cached_file)
        return None

    @override
    def download_weights(self) -> None:
        config = self._get_weights_config()
        if not config.hf_hub_id:
            super().download_weights()
            return
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        repository, _, revision = str(config.hf_hub_id).partition("@")
        *other_names, last_name = self._list_hub_files(config)
        for name in other_names:
            try:
                hf_hub_download(repository, name, revision=revision or None)
                return
            except LocalEntryNotFoundError:  # a subclass without a network, where another name does not help
                raise
            except EntryNotFoundError:
                continue
        hf_hub_download(repository, last_name, revision=revision or None)

    @staticmethod
    def _list_hub_files(config: Any) -> tuple[str, ...]:
        return (config.hf_hub_filename,) if config.hf_hub_filename else HUB_FILES

    @override
    def build_library_network(
        self, shape: tuple[int, ...], num_classes: int, tensors: Mapping[str, Tensor] | None
    ) -> tuple[nn.Module, str]:
        library, description = _import_timm(), _import_timm().get_pretrained_cfg(self.architecture)
        arguments: dict[str, Any] = {"in_chans": shape[0]}
        if description is not None and description.fixed_input_size:
            arguments["img_size"] = shape[1:]
        if tensors is None:
            network = library.create_model(self.architecture, num_classes=num_classes, **arguments)
        else:
            network = self._build_network_with_tensors(tensors, arguments)
            network.reset_classifier(num_classes)
        for layer in network.modules():
            if hasattr(layer, "fused_attn"):
                layer.fused_attn = False  # its kernels on a GPU are not deterministic, and can't be vectorized
        embedding = getattr(network, "pixel_embed", None)  # of TNT, which ignores the pixels of incomplete patches
        if embedding is not None and any(side % embedding.patch_size[0] for side in shape[1:]):
            raise RuntimeError(f"image sizes must be multiples of {embedding.patch_size[0]}")
        head = network.get_classifier()
        if not isinstance(head, nn.Linear):
            raise UnsupportedArchitectureError(f"its classifier is {type(head).__name__} instead of a linear layer")
        return network, next(name for name, layer in network.named_modules() if layer is head)

    def _build_network_with_tensors(self, tensors: Mapping[str, Tensor], arguments: dict[str, Any]) -> Any:
        """Build the network with the tensors and their head. timm skips the missing tensors of some architectures."""
        library = _import_timm()
        num_classes = self._count_classes(tensors, library.get_pretrained_cfg(self.architecture))

        def build_network() -> Any:
            overlay = {"state_dict": dict(tensors), "custom_load": False, "num_classes": num_classes}
            return library.create_model(self.architecture, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)

        with torch.random.fork_rng(devices=[]):
            torch.rand(1)
            other_parameters = dict(build_network().named_parameters())
        network = build_network()
        head_parameters = {id(value) for value in network.get_classifier().parameters()}
        random_names = [
            name
            for name, value in network.named_parameters()
            if id(value) not in head_parameters and not torch.equal(value, other_parameters[name])
        ]
        if random_names:
            names = ", ".join(f'"{name}"' for name in random_names)
            raise RuntimeError(f"Missing key(s) in state_dict: {names}.")
        return network

    def _count_classes(self, tensors: Mapping[str, Tensor], config: Any) -> int:
        """Number of classes of a state dict, which is 0 if a file has no head."""
        published: int = config.num_classes
        if self.weights == PRETRAINED:
            return published
        if (weight := tensors.get(f"{config.classifier}.weight")) is not None:
            return len(weight)
        has_renamed_head = any(value.dim() and len(value) == published for value in tensors.values())
        return published if has_renamed_head else 0

    @override
    def replace_layer(self, layer: nn.Module) -> nn.Module | None:
        layers = _import_timm().layers
        if isinstance(layer, layers.DropPath):
            if not layer.scale_by_keep:
                raise UnsupportedArchitectureError("its stochastic depth does not scale the remaining samples")
            return SampleDropout(layer.drop_prob or 0.0)
        if isinstance(layer, layers.BatchNormAct2d):
            return _split_activation(layer)
        return None


def _split_activation(layer: Any) -> nn.Module:
    """Split a BatchNorm with dropout and activation into three layers."""
    norm = nn.BatchNorm2d(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
    )
    norm.weight, norm.bias = layer.weight, layer.bias
    norm._buffers.update(layer._buffers)
    return nn.Sequential(norm, layer.drop, layer.act)


@functools.cache
def _list_architectures() -> list[str]:
    """Names of all architectures, and those with the tag of published weights."""
    library = _import_timm()
    return [*library.list_models(), *library.list_models(pretrained=True)]


def _import_timm() -> Any:
    return import_optional_library("timm", "model.name", "timm")
