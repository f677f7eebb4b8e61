"""FedRoD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Train
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedRoD(FedAvg):
    r"""A generic model trained with a balanced loss, and a personal head per client that adds to its logits.

    Source: Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022,
    eq. 6-8 (the linear variant).

    Method: with z the features, g the generic logits, h the personal head and :math:`n_{kc}` client k's samples of
    class c, both losses are minimized together:

    .. math::
        \min_\theta \mathbb{E} \Bigl[ -\log \frac{n_{ky} e^{g_y}}{\sum_c n_{kc} e^{g_c}} \Bigr], \qquad
        \min_h \mathbb{E} \bigl[ CE(\bar g + h(\bar z), y) \bigr].

    Bars mark constants, so that the personal loss does not train the generic model. The personal logits are g + h(z).

    State: the personal head at the client. Traffic: the model down, the model up.

    A client that never participated receives the generic model, to whose logits it adds those of the initial head.

    Deviations
    ----------
    Personal head before training
        Code: a copy of the initial generic head (PFLlib, FL-bench). Here: the same.
    Hypernetwork
        Paper: a second variant generates the personal heads from class counts. Here: personal heads only.
    Personal logits
        Code: h(z) alone, whose loss trains the body too (FL-bench). Here: g + h(z) as in the paper and PFLlib.
    Optimizer
        Code: one for each loss. Here: one. ``federation.clip_norm`` clips the gradient of both losses together.
    """

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """A copy of the generic head."""
        return {"head": server["model"].only(self.net.head_names)}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The generic model, the personal head, and the logarithms of the class counts."""
        log_counts = info.class_counts.clamp(min=torch.finfo(info.class_counts.dtype).tiny).log()
        return {"model": download["model"], "head": state["head"], "log_counts": log_counts}

    @override
    def training_pass(self) -> Train:
        """Training of the generic model and the personal head."""
        return Train(self.loss, group=("model", "head"))

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """Balanced softmax of the generic logits, and the personal loss."""
        z = self.net.features(client["model"], batch.x)
        g = self.net.classify(client["model"], z)
        personal = g.detach() + self.net.classify(client["head"], z.detach())
        return cross_entropy(g + client["log_counts"], batch) + cross_entropy(personal, batch)

    @override
    def keep(self, client: State) -> State:
        """The personal head."""
        return {"head": client["head"]}

    @override
    def predict(self, client: State, x: Tensor) -> Tensor:
        """Generic and personal logits."""
        z = self.net.features(client["model"], x)
        return self.net.classify(client["model"], z) + self.net.classify(client["head"], z)
