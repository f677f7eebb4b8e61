"""DW as a module: FedDW's regularizer on any other method, where the key ``dw`` of its entry asks for it."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.base import Algorithm, Batch, ClientInfo, Loss, Measure, Pass, State, Train, Uploads
from fedpipe.algorithms.feddw import FedDW, regularizer
from fedpipe.errors import SettingsError
from fedpipe.models.base import Network
from fedpipe.tensors import Tensors

OMEGA, OWN, COUNTS = "dw/omega", "dw/own", "dw/counts"


@dataclass(frozen=True, kw_only=True)
class DW:
    """FedDW's regularizer as a module on another method (``dw: {mu: 0.1}``)."""

    mu: Annotated[float, Field(ge=0)] = 0.1  #: its strength


@dataclass(frozen=True, kw_only=True)
class WithDW(Algorithm):
    r"""A mixin before a method X, whose clients then also pull their class relations to the average soft labels.

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
    dw
        FedDW's regularizer on top, as ``{mu: 0.1}``; nothing by default.
    """

    dw: DW | None = None

    @property
    def _feddw(self) -> FedDW:
        return FedDW(mu=(self.dw or DW()).mu)

    def made_of(self) -> tuple[Any, ...]:
        """X, and this."""
        return (*super().made_of(), WithDW)

    def adapt(self, network: Network) -> Network:
        """X's network with a head without bias."""
        return self._feddw.adapt(super().adapt(network))

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """X's state, and the identity as SL matrix."""
        return super().init(fresh) | {OMEGA: self._feddw.init(fresh)["omega"]}

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """What X sends, and the SL matrix."""
        common, own = super().send(server, ids)
        return common | {OMEGA: server[OMEGA]}, own

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """As X begins, with the SL matrix."""
        return super().start(kept, received, info) | {OMEGA: received[OMEGA]}

    def personalize(self) -> Sequence[Pass]:
        """X's passes, regularized."""
        return [*map(self._regularized, super().personalize())]

    def local_passes(self) -> Sequence[Pass]:
        """X's passes, regularized, then the client's own SL matrix."""
        measure = Measure(self._soft_labels, self._store)
        return [*map(self._regularized, super().local_passes()), measure]

    def _regularized(self, step: Pass) -> Pass:
        if not isinstance(step, Train) or isinstance(step.loss, _Regularized):  # X may list its personal passes again
            return step
        return dataclasses.replace(step, loss=_Regularized(step.loss, step.group, self._feddw.mu))

    def _soft_labels(self, client: State, batch: Batch) -> dict[str, Tensor]:
        return self._feddw.sums(self.predict(client, batch.x), batch)

    def _store(self, client: State, sums: dict[str, Tensor]) -> State:
        own = self._feddw.store({}, sums)
        return client | {OWN: own["own"], COUNTS: own["counts"]}

    def upload(self, client: State) -> State:
        """What X uploads, the client's SL matrix and its class counts."""
        return super().upload(client) | {OWN: client[OWN], COUNTS: client[COUNTS]}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """X's next state, and the rows' means."""
        matrices = [{"omega": upload[OWN], "counts": upload[COUNTS]} for _, _, upload in uploads]
        return super().aggregate(server, uploads) | {OMEGA: self._feddw.rows(server[OMEGA], matrices)}

    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """What X exchanges, and the SL matrix as it travels."""
        return {**super().matrices(state), "SL": state[OMEGA] if OMEGA in state else state[OWN]}


@dataclass(frozen=True)
class _Regularized:
    """A pass's loss with the regularizer of the classification layer that it trains, if it trains one."""

    loss: Loss
    group: str
    mu: float

    def __call__(self, client: State, batch: Batch) -> Tensor:
        omega, value = client[self.group].get("head.weight"), self.loss(client, batch)
        return value if omega is None else value + self.mu * regularizer(omega, client[OMEGA])


class _Mixed(type):
    """The type of classes that no module holds, which are pickled as what they are made of."""


def _remade(mixed: _Mixed) -> tuple[Any, ...]:
    return with_dw, (mixed.__bases__[1],)


copyreg.pickle(_Mixed, _remade)


@functools.cache
def with_dw(method: Any) -> type[Any]:
    """A method's class with the mixin before it, under its own name."""
    if issubclass(method, WithDW):
        return method
    own = {"__module__": method.__module__, "__qualname__": method.__qualname__, "__doc__": method.__doc__}
    return dataclass(frozen=True, kw_only=True)(_Mixed(method.__name__, (WithDW, method), own))


def objection(method: Any) -> str:
    """Why a method could not be fetched with it; empty where it can."""
    reason: str = getattr(method, "without_dw", "")
    return reason


def chosen(method: Any, parameters: Mapping[str, Any], key: str) -> type[Any]:
    """The class that an entry's parameters ask for.

    Raises
    ------
    SettingsError
        They ask for ``dw`` where the method refuses it, or it has a parameter of its own by that name; the sentence
        begins with ``key``.
    """
    if "dw" in {field.name for field in dataclasses.fields(method)}:
        raise SettingsError(f"{key}: {method.__qualname__} has a field 'dw', which is FedDW's regularizer; rename it.")
    if parameters.get("dw") is None:
        return method
    if reason := objection(method):
        raise SettingsError(f"{key}.dw: {parameters['dw']} can't be used, since {reason}.")
    return with_dw(method)
