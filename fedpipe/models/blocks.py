"""Code that several families use: input checks, FedDW's classifier, and ReLU that does not write in place."""

from __future__ import annotations

from torch import nn

from fedpipe.core.components.component import MODEL
from fedpipe.core.components.registry import get_component_name
from fedpipe.core.errors import SettingsError
from fedpipe.models.base import Model, Network


def require_images(model: Model, shape: tuple[int, ...], side: int = 1, channels: int | None = None) -> None:
    """Require images (channels, height, width) with sides of at least ``side`` pixels.

    Raises
    ------
    SettingsError
        The inputs are not images, are too small, or have another number of channels than ``channels``.
    """
    if len(shape) == 3 and min(shape[1:]) >= side and channels in (None, shape[0]):
        return
    name = get_component_name(MODEL, type(model))
    channel_text = f" with {channels} channels" if channels else ""
    min_size = f" of at least {side}x{side} pixels" if side > 1 else ""
    advice = " Use 'cnn' for smaller ones." if side > 4 and len(shape) == 3 else ""
    raise SettingsError(
        f"model.name: '{name}' can't take inputs of shape {shape}. It needs images{channel_text}{min_size}.{advice}"
    )


def require_tokens(model: Model, shape: tuple[int, ...]) -> None:
    """Require sequences of token ids, shape (length,).

    Raises
    ------
    SettingsError
        The inputs have another number of axes.
    """
    if len(shape) != 1:
        name = get_component_name(MODEL, type(model))
        raise SettingsError(
            f"model.name: '{name}' can't take inputs of shape {shape}. It needs sequences of token ids."
        )


def make_network_with_mapped_features(extractor: list[nn.Module], width: int, num_classes: int, bias: bool) -> Network:
    """Make a network from an extractor of flat features and FedDW's classifier (two mapping layers, one output layer).

    The extractor's modules are applied in order and end with shape (B, width). There is no activation between the
    second mapping layer, whose 128 outputs are the features, and the classification layer, which has a bias if ``bias``
    is true. Source: FedDW, section V-A, and its code.
    """
    body = nn.Sequential(*extractor, nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128))
    return Network(body, nn.Linear(128, num_classes, bias=bias))


def disable_inplace_relu(module: nn.Module) -> None:
    """Disable in-place ReLU, because torch.func can't overwrite a tensor that is not batched."""
    for layer in module.modules():
        if isinstance(layer, (nn.ReLU, nn.ReLU6)):
            layer.inplace = False
