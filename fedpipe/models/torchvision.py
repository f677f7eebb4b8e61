"""The classification networks of torchvision."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torchvision
from torch import Tensor, nn
from torchvision import models as library
from torchvision.ops import StochasticDepth
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.models.backbone import Backbone, PublishedWeights
from fedpipe.models.blocks import require_images
from fedpipe.models.conversion import UnsupportedArchitectureError
from fedpipe.models.layers import SampleDropout

SIZE_ARGUMENTS = {"vit_": "image_size", "maxvit_": "input_size"}  #: argument with the image size, by family
TRANSFORMING = ("googlenet", "inception_v3")  #: architectures that transform their inputs only for published weights
AUXILIARY_HEADS = ("aux1.", "aux2.", "AuxLogits.")  #: of GoogLeNet and Inception, which are left out
OLD_DENSENET_NAME = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\.\w+)$")


@dataclass(frozen=True, kw_only=True)
class Torchvision(Backbone):
    """A classification network of torchvision, with random or published weights, such as ``resnet50`` or ``vit_b_16``.

    All families that torchvision lists are supported, for color images: AlexNet, ConvNeXt, DenseNet, EfficientNet,
    GoogLeNet, Inception, MaxViT, MNASNet, MobileNet, RegNet, ResNet, ShuffleNet V2, SqueezeNet, Swin, VGG and ViT. The
    auxiliary heads of GoogLeNet and Inception are left out, and so is the ReLU after the last layer of SqueezeNet. The
    image size of ViT and MaxViT is that of the data set. Their published weights need the size with which they were
    trained. For small images, prefer a network such as `feddw_resnet18`, because most of these begin with a stride of
    4.
    """

    library: ClassVar[str] = "torchvision"

    @override
    def list_architectures(self) -> list[str]:
        return list(library.list_models(module=library))

    @override
    def list_weights(self) -> list[str]:
        return [weights.name for weights in self._list_weights_entries()]

    @override
    def check(self, shape: tuple[int, ...], num_classes: int) -> None:
        """Require color images, and the image size of the weights if the network has tables of positions."""
        has_size = self.architecture.startswith(tuple(SIZE_ARGUMENTS)) and len(shape) == 3
        for weights in self._list_weights_entries():
            height, width = weights.meta["min_size"]
            if has_size and weights.name == self.weights and shape[1:] != (height, width):
                raise SettingsError(
                    f"model.weights: {self.weights} of {self.architecture} needs images of {height}x{width} pixels, "
                    f"but the data set has {shape[1]}x{shape[2]}. Set dataset.image_size to {height}, or use timm."
                )
        if self.architecture in self.list_architectures():
            require_images(self, shape, channels=3)
        super().check(shape, num_classes)
        if self.architecture in TRANSFORMING and self.pinned_file is not None:
            raise SettingsError(
                f"model.weights: {self.weights} can't be used for {self.architecture}, because a file does not record "
                "whether its network transforms the inputs. Use the library's weights, null, or another architecture."
            )

    def _list_weights_entries(self) -> list[Any]:
        """Entries of torchvision's weights with a classifier."""
        if self.architecture not in self.list_architectures():
            return []
        return [weights for weights in library.get_model_weights(self.architecture) if weights.meta.get("categories")]

    @property
    @override
    def published_weights(self) -> PublishedWeights | None:
        url = next((weights.url for weights in self._list_weights_entries() if weights.name == self.weights), None)
        if url is None:
            return None
        name = url.rpartition("/")[2]
        return PublishedWeights(f"torchvision/{name}", url, name.rpartition("-")[2].partition(".")[0])

    @override
    def build_library_network(
        self, shape: tuple[int, ...], num_classes: int, tensors: Mapping[str, Tensor] | None
    ) -> tuple[nn.Module, str]:
        arguments: dict[str, Any] = {}
        for family, argument in SIZE_ARGUMENTS.items():
            if self.architecture.startswith(family):
                if shape[1] != shape[2]:
                    raise RuntimeError(f"images must be squares, but have {shape[1]}x{shape[2]} pixels")
                arguments[argument] = shape[1] if argument == "image_size" else shape[1:]
        if self.architecture in TRANSFORMING:
            is_transforming = self.published_weights is not None
            arguments = {"aux_logits": False, "init_weights": True, "transform_input": is_transforming}
        network = library.get_model(self.architecture, weights=None, num_classes=num_classes, **arguments)
        unused_names: tuple[str, ...] = AUXILIARY_HEADS
        if isinstance(network, torchvision.models.SqueezeNet):
            _make_linear_head(network)
            unused_names += ("classifier.1.",)
        head_name = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)][-1]
        if tensors is not None:
            _load_body(network, head_name, tensors, unused_names)
        return network, head_name

    @override
    def replace_layer(self, layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, StochasticDepth):
            if layer.mode != "row":
                raise UnsupportedArchitectureError(f"its stochastic depth drops complete batches (mode {layer.mode})")
            return SampleDropout(layer.p)
        if isinstance(layer, nn.MultiheadAttention):
            layer.register_forward_pre_hook(_disable_fused_attention, with_kwargs=True)
        return None


def _disable_fused_attention(_: nn.Module, inputs: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Compute attention by products, because PyTorch can't vectorize its other kernels over clients."""
    return inputs, arguments | {"need_weights": True}


def _make_linear_head(network: torchvision.models.SqueezeNet) -> None:
    """Replace the last convolution, which has 1x1 pixels, by average pooling and the same linear layer."""
    dropout, convolution = network.classifier[0], cast(nn.Conv2d, network.classifier[1])
    linear = nn.Linear(convolution.in_channels, convolution.out_channels)
    linear.weight = nn.Parameter(convolution.weight.detach().flatten(1))
    linear.bias = cast(nn.Parameter, convolution.bias)
    network.classifier = nn.Sequential(dropout, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)


def _load_body(
    network: nn.Module, head_name: str, tensors: Mapping[str, Tensor], unused_names: tuple[str, ...]
) -> None:
    """Load all tensors of the body. The head keeps its random weights."""
    state = OrderedDict(
        (OLD_DENSENET_NAME.sub(r"\1\2", name), value)
        for name, value in tensors.items()
        if not name.startswith((f"{head_name}.", *unused_names))
    )
    state.update(
        (f"{head_name}.{name}", value) for name, value in network.get_submodule(head_name).state_dict().items()
    )
    state._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]  # MNASNet rejects files without a version
    network.load_state_dict(state)
