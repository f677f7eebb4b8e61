"""Stacks of models at the server, with one slot per model along the first axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedpipe.core.tensors import Tensors


def repeat_model(model: Tensors, count: int) -> Tensors:
    """A stack of ``count`` copies of the model."""
    return model.map(lambda value: value.expand(count, *value.shape))


def select_model(models: Tensors, slot: int) -> Tensors:
    """The model of one slot."""
    return models.map(lambda value: value[slot])


def replace_models(models: Tensors, slots: Sequence[int], new_models: Sequence[Tensors]) -> Tensors:
    """A stack in which ``new_models`` replace the models of ``slots``, in this order."""
    index = torch.tensor(slots)
    return Tensors(
        (name, value.index_copy(0, index, torch.stack([new_model[name] for new_model in new_models])))
        for name, value in models.items()
    )


def flatten_models(models: Tensors) -> torch.Tensor:
    """All tensors of each model in one vector: shape (slots, P)."""
    return torch.cat([value.flatten(1) for value in models.values()], 1)
