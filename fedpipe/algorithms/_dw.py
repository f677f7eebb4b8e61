"""DW as a module: FedDW's regularizer on any other method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from fedpipe.algorithms.base import Algorithm, Batch, ClientInfo, Measure, Pass, State, Train, Uploads
from fedpipe.algorithms.feddw import FedDW, regularizer
from fedpipe.config import Federation
from fedpipe.models.base import Net, Network
from fedpipe.tensors import Tensors

OMEGA, OWN, COUNTS = "dw/omega", "dw/own", "dw/counts"


@dataclass(frozen=True, kw_only=True)
class WithDW(Algorithm):
    r"""A method X whose clients also pull their class relations to the global average soft labels.

    Source: Liu et al., FedDW, 2024, section V-E ("DW on X"). In every pass of X that trains a classification layer
    :math:`\omega`, :math:`\mu L_{reg}` (eq. 11) is added to its loss, also in those before training that make the
    personal model (Per-FedAvg's step, FedALA's mixing), so that evaluation makes the models that training counts on;
    after training each client measures its SL matrix, and the server takes the rows' means (eq. 7). Nothing else of X
    changes but its head, which has no bias (as FedDW's: compare with X on a model whose head has none either). A pass
    that holds the head fixed feels nothing: DW on FedBABU is FedBABU, and on FedRep it acts in the head's epochs.
    Fine-tuning is X's own. FedDW has the regularizer already, and FedNH no such layer: both refuse. Traffic: C x C more
    down, C x C and C counts more up.

    Parameters
    ----------
    inner
        The method X.
    """

    inner: Algorithm

    @property
    def _dw(self) -> FedDW:
        assert self.inner.dw is not None
        return FedDW(mu=self.inner.dw.mu)

    def bind(self, net: Net, federation: Federation) -> Self:
        """X bound with it."""
        bound = super().bind(net, federation)
        object.__setattr__(bound, "inner", self.inner.bind(net, federation))
        return bound

    @property
    def prototypes(self) -> bool:  # type: ignore[override]
        """As X."""
        return self.inner.prototypes

    def adapt(self, network: Network) -> Network:
        """X's network with a head without bias."""
        return self._dw.adapt(self.inner.adapt(network))

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """X's state, and the identity as SL matrix."""
        return self.inner.init(fresh) | {OMEGA: self._dw.init(fresh)["omega"]}

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """As X."""
        return self.inner.init_client(server, fresh)

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """What X sends, and the SL matrix."""
        common, own = self.inner.send(server, ids)
        return common | {OMEGA: server[OMEGA]}, own

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """As X begins, with the SL matrix."""
        return self.inner.start(kept, received, info) | {OMEGA: received[OMEGA]}

    def personalize(self) -> Sequence[Pass]:
        """X's passes, regularized."""
        return [*map(self._regularized, self.inner.personalize())]

    def local_passes(self) -> Sequence[Pass]:
        """X's passes, regularized, then the client's own SL matrix."""
        return [*map(self._regularized, self.inner.local_passes()), Measure(self.soft_labels, self.store)]

    def _regularized(self, each: Pass) -> Pass:
        if not isinstance(each, Train):
            return each

        def loss(client: State, batch: Batch) -> Tensor:
            omega = client[each.group].get("head.weight")
            value = each.loss(client, batch)
            return value if omega is None else value + self._dw.mu * regularizer(omega, client[OMEGA])

        return dataclasses.replace(each, loss=loss)

    def soft_labels(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Sums of X's softmax outputs by class, and the classes' counts."""
        return self._dw.sums(self.inner.predict(client, batch.x), batch)

    def store(self, client: State, sums: dict[str, Tensor]) -> State:
        """The client's SL matrix."""
        own = self._dw.store({}, sums)
        return client | {OWN: own["own"], COUNTS: own["counts"]}

    def finetune(self, epochs: int) -> Sequence[Pass]:
        """As X."""
        return self.inner.finetune(epochs)

    def upload(self, client: State) -> State:
        """What X uploads, the client's SL matrix and its class counts."""
        return self.inner.upload(client) | {OWN: client[OWN], COUNTS: client[COUNTS]}

    def keep(self, client: State) -> State:
        """As X."""
        return self.inner.keep(client)

    def predict(self, client: State, x: Tensor) -> Tensor:
        """As X."""
        return self.inner.predict(client, x)

    def prototype_logits(self, client: State, x: Tensor) -> Tensor:
        """As X."""
        return self.inner.prototype_logits(client, x)

    def traffic(self, state: State) -> State:
        """As X."""
        return self.inner.traffic(state)

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """X's next state, and the rows' means."""
        matrices = [{"omega": upload[OWN], "counts": upload[COUNTS]} for _, _, upload in uploads]
        return self.inner.aggregate(server, uploads) | {OMEGA: self._dw.rows(server[OMEGA], matrices)}

    def global_model(self, server: State) -> Tensors | None:
        """As X."""
        return self.inner.global_model(server)

    def extra_models(self, server: State) -> Mapping[str, Tensors]:
        """As X."""
        return self.inner.extra_models(server)

    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """As X."""
        return self.inner.metrics(server)

    def matrices(self, state: State) -> Mapping[str, Any]:
        """What X exchanges, and the SL matrix as it travels."""
        return {**self.inner.matrices(state), "SL": state[OMEGA] if OMEGA in state else state[OWN]}


def complete(algorithm: Algorithm) -> Algorithm:
    """The algorithm with the modules that its settings ask for."""
    return algorithm if algorithm.dw is None else WithDW(inner=algorithm)
