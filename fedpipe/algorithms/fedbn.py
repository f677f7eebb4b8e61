"""FedBN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.settings.params import Params


@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    r"""FedAvg of all layers except normalization layers, which stay at their clients.

    Source: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021, Alg. 1.
    With :math:`\beta_k` the weights, biases and running statistics of client k's normalization layers and
    :math:`\phi` all else,

    .. math:: \phi^{t+1} = \sum_{k \in S} w_k \phi_k, \qquad \beta_k \text{ as client k trained it last.}

    Normalization layers are told by their type, wherever they are inside (the authors' search for "bn" in names misses
    those of shortcuts). A client that was not in a round yet has the initial ones. On a network without such layers it
    is FedAvg, as on FedDUAL's LeNet and VGG16.

    State: the normalization layers at the client. Traffic: all else down, all else up. There is no global model, unless
    the network has no such layers or ``average`` asks for one. Deviations: the authors' code takes uniform means; here
    the study's weighting holds.

    Parameters
    ----------
    average
        Send the normalization layers up as well, for a global model with their mean; no client takes it.
    """

    average: bool = False

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """The shared layers; the mean of the others where it is asked for."""
        return self._select_shared(fresh(0))

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """The initial normalization layers."""
        return self.keep({"model": fresh(0)})

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The shared layers with the client's own normalization."""
        return {"model": self.net.to_model(received["model"] | kept["norm"])}

    def upload(self, client: State) -> State:
        """The shared layers."""
        return self._select_shared(client["model"])

    def _select_shared(self, model: Tensors) -> State:
        shared = model.without(self.net.norm_names)
        return {"model": shared} | ({"norm": model.only(self.net.norm_names)} if self.average else {})

    def keep(self, client: State) -> State:
        """The normalization layers."""
        return {"norm": client["model"].only(self.net.norm_names)}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The weighted means."""
        return {part: uploads.mean(part) for part in ("model", "norm") if part in server}

    def global_model(self, server: State) -> Tensors | None:
        """The shared layers with the mean normalization, if there is one."""
        if self.net.norm_names and not self.average:
            return None
        return self.net.to_model(server["model"] | server.get("norm", {}))

    def warnings(self, params: Params, key: str) -> Sequence[str]:
        """Without normalization layers there is nothing to keep."""
        if self.summarize_network(params).has_norm_layers is not False:
            return ()
        hint = "; model.batch_norm true adds some" if hasattr(params.model, "batch_norm") else ""
        return (f"{key}: the network of model.name has no normalization layers, so that FedBN is FedAvg{hint}.",)
