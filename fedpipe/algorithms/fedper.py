"""FedPer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedpipe.algorithms.batch import State
from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.core.tensors import Tensors
from fedpipe.settings.params import Params


@dataclass(frozen=True, kw_only=True)
class FedPer(SharedBody):
    r"""Shared base layers and personal top layers, trained together.

    Source: Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, 2019, Alg. 1-2. From
    the downloaded base :math:`\phi` and its own top :math:`h_k`, client k minimizes the mean cross-entropy over both
    for E epochs; the server averages the bases:

    .. math:: (\phi_k, h_k) \leftarrow \arg\min_{\phi, h} F_k(\phi, h), \qquad
              \phi^{t+1} = \sum_{k \in S} w_k \phi_k .

    State: the personal layers at the client. Traffic: the base down, the base up; there is no global model, unless no
    layer is personal (which is FedAvg; if all are, it is local training). A client that was not in a round takes the
    new base under its old top before it is evaluated; FedDW's code measures the model that it trained last instead
    (``kept-on-global``). Values used: one personal layer (FedDW, PFPS-LWC).

    Parameters
    ----------
    layers
        How many parametrized layers, from the output, are personal.
    """

    layers: Annotated[int, Field(ge=0)] = 1

    @property
    def personal_names(self) -> tuple[str, ...]:
        """Names of the personal layers' tensors."""
        return self.net.last_layer_names(self.layers)

    def global_model(self, server: State) -> Tensors | None:
        """The global model, where nothing is personal."""
        return None if self.layers else server["body"]

    def warnings(self, params: Params, key: str) -> Sequence[str]:
        """Layers that do not exist."""
        return self.warn_about_layers(
            params, f"{key}.layers", self.layers, "so that all are personal and clients train alone"
        )
