"""Low-rank adaptation (LoRA) of linear layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from fedpipe.core.errors import SettingsError, suggest_name


class LoRALinear(nn.Module):
    r"""A frozen linear layer and the product of two trained matrices of a low rank.

    .. math:: y = W x + b + \frac{\alpha}{r} B A x

    A is drawn like the weights of a linear layer and B is zero, so that the initial layer is the frozen one. Source: Hu
    et al., LoRA: Low-rank adaptation of large language models (ICLR 2022), section 4.1.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self._scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., out) for x of shape (..., in)."""
        return F.linear(x, self.weight, self.bias) + self._scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Settings of low-rank adaptation.

    Parameters
    ----------
    layers
        Names of linear layers, such as qkv or mlp.fc1. Each name selects all layers whose names end with it.
    rank
        Rank r of the matrices.
    alpha
        Numerator of their scale alpha / r.
    """

    layers: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    def add_matrices(self, body: nn.Module, architecture: str) -> None:
        """Replace the selected layers of a frozen body.

        Raises
        ------
        SettingsError
            A name selects no linear layer.
        """
        linear_layers = {name: layer for name, layer in body.named_modules() if type(layer) is nn.Linear}
        if not linear_layers:
            raise SettingsError(
                f"model.lora: it can't be used with {architecture}, whose body has no linear layer. Remove it, or use "
                "another architecture."
            )
        for selected in self.layers:
            if not any(_is_selected_layer(name, selected) for name in linear_layers):
                suffixes = dict.fromkeys(_strip_numbers(name) for name in linear_layers)
                raise SettingsError(
                    f"model.lora.layers: {architecture} has no linear layer '{selected}'. "
                    f"{suggest_name(selected, [*suffixes])}"
                )
        for name, layer in linear_layers.items():
            if any(_is_selected_layer(name, selected) for selected in self.layers):
                body.set_submodule(name, LoRALinear(layer, self.rank, self.alpha))


def _is_selected_layer(layer_name: str, suffix: str) -> bool:
    return f".{layer_name}".endswith(f".{suffix}")


def _strip_numbers(name: str) -> str:
    """Name of a layer below its block, such as attn.qkv of blocks.3.attn.qkv or of encoder_layer_3.attn.qkv."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts[:-1]) if part.rpartition("_")[2].isdigit()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)
