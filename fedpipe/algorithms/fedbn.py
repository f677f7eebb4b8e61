"""FedBN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedpipe.algorithms.base import StudyFacts
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedBN(SharedBody):
    r"""FedAvg of all layers except normalization layers, which stay at their clients.

    Source: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021, Alg. 1.

    Method: with :math:`\beta_k` the weights, biases and running statistics of client k's normalization layers and
    :math:`\phi` all other parameters,

    .. math:: \phi^{t+1} = \sum_{k \in S} w_k \phi_k, \qquad \beta_k \text{ as client k trained it last.}

    A client that has not been in a round yet has the initial normalization layers. On a network without such layers,
    for example FedDUAL's LeNet and VGG16, it is FedAvg.

    State: the normalization layers at the client. Traffic: all other tensors down, all other tensors up. There is no
    global model, unless the network has no normalization layers or ``average`` is set.

    A client that never participated receives the shared layers and has the initial normalization layers.

    Deviations
    ----------
    Averages
        Code: uniform. Here: ``federation.weighting``.
    Normalization layers
        Code: those with "bn" in their names, which misses those of shortcuts. Here: all layers of these types, anywhere
        in the network.

    Parameters
    ----------
    average
        Also upload the normalization layers, for a global model with their mean. Clients do not use it.
    """

    shared_part: ClassVar[str] = "model"
    personal_part: ClassVar[str] = "norm"
    server_optimizer_part: ClassVar[str | None] = "model"

    average: bool = False

    @property
    @override
    def personal_tensor_names(self) -> tuple[str, ...]:
        """Names of the normalization layers' tensors."""
        return self.net.norm_names

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The shared layers, with ``average`` also the normalization layers."""
        return super().init(initial_model) | (self.init_client({}, initial_model) if self.average else {})

    @override
    def upload(self, client: State) -> State:
        """The shared layers, with ``average`` also the normalization layers."""
        return super().upload(client) | (self.keep(client) if self.average else {})

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The weighted means."""
        return super().aggregate(server, uploads) | ({"norm": uploads.mean("norm")} if self.average else {})

    @override
    def global_model(self, server: State) -> Tensors | None:
        """The shared layers with the mean normalization layers, if there are any."""
        return self.net.to_model(server["model"] | server["norm"]) if self.average else super().global_model(server)

    @override
    def warnings(self, study: StudyFacts, key: str) -> Sequence[str]:
        """A network without normalization layers."""
        if study.network is None or study.network.norm_names:
            return ()
        hint = " Use model.batch_norm true." if study.has_batch_norm_setting else ""
        return (f"{key}: the network of model.name has no normalization layers, so FedBN is FedAvg.{hint}",)
