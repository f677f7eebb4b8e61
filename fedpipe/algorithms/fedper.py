"""FedPer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.partial_sharing import SharedBody


@dataclass(frozen=True, kw_only=True)
class FedPer(SharedBody):
    r"""Shared base layers and personal top layers, trained together.

    Source: Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, 2019, Alg. 1-2.

    Method: from the downloaded base :math:`\phi` and its own top :math:`h_k`, client k minimizes the mean cross-entropy
    over both for E epochs. The server averages the bases:

    .. math:: (\phi_k, h_k) \leftarrow \arg\min_{\phi, h} F_k(\phi, h), \qquad
              \phi^{t+1} = \sum_{k \in S} w_k \phi_k .

    State: the personal layers at the client. Traffic: the base down, the base up. There is no global model, unless no
    layer is personal, which is FedAvg. If all layers are personal, it is local training.
    Values used: one personal layer (FedDW, PFPS-LWC).

    Deviations
    ----------
    Initial personal layers
        Paper: random at each client. Here: those of the common initial model.
    Evaluated model of a client that was not in the round
        Code: FedDW's evaluates the model that the client trained last. Here: the new base with its old top. For FedDW's
        use ``kept-on-global``.

    Parameters
    ----------
    layers
        How many parametrized layers, from the output, are personal.
    """

    excess_layers_effect: ClassVar[str] = "so all layers are personal and clients train alone"

    layers: Annotated[int, Field(ge=0)] = 1

    @property
    @override
    def personal_tensor_names(self) -> tuple[str, ...]:
        """Names of the personal layers' tensors."""
        return self.net.last_layer_names(self.layers)
