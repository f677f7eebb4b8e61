"""The number of tensor elements that the server stores, computed from shapes without a run."""

from __future__ import annotations

from typing import Literal

import torch
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm
from fedpipe.core.tensors import Tensors
from fedpipe.engine.server.server import make_initial_server_state
from fedpipe.models.base import FunctionalNetwork, Model
from fedpipe.settings.federation import Federation


def count_server_elements(
    algorithm: Algorithm, model: Model, shape: tuple[int, ...], num_classes: int, federation: Federation
) -> dict[str, int]:
    """The number of elements in each part of the server's state, which has the same shapes in every round.

    Tensors are on the meta device, so nothing is allocated. Parts that only name tensors, or are functions of the
    state, do not count. A tensor that appears several times counts each time, because training separates the copies.
    ``algorithm`` is not bound yet, and ``shape`` is that of the network's inputs.
    """
    dtype = getattr(torch, federation.dtype)
    buffers: Literal["average", "drop"] = "average" if federation.buffers == "average" else "drop"  # or at the clients
    with torch.device("meta"), torch.no_grad():
        net = FunctionalNetwork(
            lambda: algorithm.adapt(model.build_without_weights(shape, num_classes)), dtype, "meta", buffers
        )
        initial_model = net.make_initial_model(0)

        def make_empty_model(_: int) -> Tensors:
            return initial_model.map(torch.empty_like)

        state = make_initial_server_state(algorithm.bind(net, federation).bind_round(0, 0), make_empty_model)
    return {part: sum(tensor.numel() for tensor in pytree.tree_leaves(value)) for part, value in state.items()}
