"""LG-FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.partial_sharing import SharedBody


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(SharedBody):
    r"""Personal lower layers and shared top layers, trained together: FedPer the other way round.

    Source: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations,
    arXiv 2001.01523, 2020, Alg. 1.

    Method: from its own body :math:`\phi_k` and the downloaded top h, client k minimizes the mean cross-entropy over
    both for E epochs. The server averages the tops:

    .. math:: (\phi_k, h_k) \leftarrow \arg\min_{\phi, h} F_k(\phi, h), \qquad
              h^{t+1} = \sum_{k \in S} w_k h_k .

    State: the personal layers at the client. Traffic: the top down, the top up. There is no global model, unless all
    layers are shared, which is FedAvg.
    Values used: one shared layer (PFLlib).

    A client that never participated receives the top, below which its layers are the initial ones.

    Deviations
    ----------
    Losses of the body
        Paper: the local representations may have additional losses. Here: the cross-entropy, as in its experiments.
    Initial model
        Code: the authors' begins with a model that FedAvg trained. Here: the common initial model, or
        ``model.weights``.
    Averages
        Code: uniform. Here: ``federation.weighting``.
    Reported model
        Code: each client's best one on its test data. Here: that of the round.
    Clients without a personal body
        Paper: an ensemble of all clients' models. Here: the initial body under the new top.
    Shared layers
        Code: FL-bench shares the first layers. Here: the last ones, as in the paper and PFLlib.

    Parameters
    ----------
    layers
        How many parametrized layers, from the output, are shared.
    """

    shared_part: ClassVar[str] = "head"
    personal_part: ClassVar[str] = "body"
    server_optimizer_part: ClassVar[str | None] = "head"
    excess_layers_effect: ClassVar[str] = "so all layers are shared, which is FedAvg"

    layers: Annotated[int, Field(ge=1)] = 1

    @property
    @override
    def personal_tensor_names(self) -> tuple[str, ...]:
        """Names of the lower layers' tensors."""
        shared_names = self.net.last_layer_names(self.layers)
        return tuple(name for layer in self.net.layers() for name in layer if name not in shared_names)
