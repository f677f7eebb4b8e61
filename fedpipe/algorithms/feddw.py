"""FedDW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.soft_labels import SoftLabels
from fedpipe.models.base import Network, compute_class_relations


@dataclass(frozen=True, kw_only=True)
class FedDW(SoftLabels):
    r"""Regularizes each client's classification layer towards the soft labels averaged over all clients.

    Source: Liu et al., FedDW: Distilling Weights through Consistency Optimization in Heterogeneous Federated
    Learning, 2024, eq. 4-12, Alg. 1.

    Method: after training, client n measures its soft-label (SL) matrix :math:`\Omega^n`. Row i is the mean softmax
    output over its samples of class i. The server averages the rows by class counts:

    .. math:: \Omega[i] = \sum_n \frac{n_{n,i}}{\sum_l n_{l,i}} \Omega^n[i]

    The class-relation (CR) matrix of a classification layer :math:`\omega \in R^{C \times d}` is the row softmax of
    :math:`\omega \omega^T`. Every batch adds, with :math:`\Omega` constant,

    .. math:: \mu L_{reg} = \frac{\mu}{C^2} \lVert \Omega - softmax(\omega \omega^T) \rVert_F^2 .

    State: :math:`\Omega` at the server. Traffic: model and C x C down. Model, C x C and C counts up.
    Values of mu used: 0.1 for CIFAR-10, 10 for CIFAR-100, chosen from {0.01, 0.1, 1, 10, 100}.

    Deviations
    ----------
    Omega before round 1
        Paper: not stated. Code: the identity. Here: the identity.
    Classes without samples in a round
        Paper: not stated. Code: the mean over earlier rounds, or the identity's row. Here: the row does not change. As
        the code with ``mode: code``.
    Mean over rounds
        Paper: the uploads of the round. Code: all uploads since round 1, and Omega moves half-way to their mean. Here:
        as the paper. As the code with ``mode: code``.
    Bias of the last layer
        Paper: none. Code: a bias. Here: none. A bias with ``mode: code``.
    Strength mu
        Paper: constant. Code: divided by 10 at rounds 9, 18, 27 and so on. Here: constant. As the code with
        ``mode: code``.
    Images for SL
        Code: augmented as in training. Here: unchanged. As the code with ``mode: code``.

    Parameters
    ----------
    mu
        Strength of the regularizer.
    mode
        The paper's definition, or the authors' code. See the deviations.
    """

    dw_conflict: ClassVar[str] = "FedDW already has this regularizer. Use its parameter mu"

    mu: Annotated[float, Field(ge=0)] = 0.1
    mode: Literal["paper", "code"] = "paper"

    @property
    @override
    def has_running_means(self) -> bool:
        """True with ``mode: code``, as in the authors' code."""
        return self.mode == "code"

    @override
    def adapt(self, network: Network) -> Network:
        """The network. In the paper its last layer has no bias."""
        return remove_head_bias(network) if self.mode == "paper" else network

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model and SL matrix, with this round's mu."""
        decay = torch.floor(info.round / 9) if self.mode == "code" else torch.zeros_like(info.round)
        return super().start(state, download, info) | {"mu": self.mu * 10**-decay}

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """Eq. 12: the risk and the distance of CR from SL."""
        return self.risk(client, batch) + client["mu"] * compute_regularizer(
            client["model"]["head.weight"], client["omega"]
        )

    @override
    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """The SL matrix as it travels, and the CR matrix of the model."""
        return {"SL": state["omega"], "CR": compute_class_relations(state["model"]["head.weight"])}


def remove_head_bias(network: Network) -> Network:
    """The network with a linear head that has no bias."""
    if isinstance(network.head, nn.Linear):
        network.head.register_parameter("bias", None)
    return network


def compute_regularizer(omega: Tensor, soft_labels: Tensor) -> Tensor:
    """Eq. 11: mean square of the entries of SL - CR, a scalar between 0 and 2 / C."""
    return (soft_labels - compute_class_relations(omega)).square().mean()
