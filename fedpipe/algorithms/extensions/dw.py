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
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.class_means import class_mean
from fedpipe.algorithms.feddw import compute_regularizer, remove_head_bias
from fedpipe.algorithms.passes import Loss, Measure, Pass, Train
from fedpipe.algorithms.soft_labels import compute_soft_labels, make_identity, sum_soft_labels
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import Network

OMEGA, CLIENT_OMEGA, COUNTS = "dw/omega", "dw/own", "dw/counts"


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

    @override
    def code_objects(self) -> tuple[Any, ...]:
        """X, and this."""
        return (*super().code_objects(), WithDW)

    @override
    def adapt(self, network: Network) -> Network:
        """X's network with a head without bias."""
        return remove_head_bias(super().adapt(network))

    @override
    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """X's state, and the identity as SL matrix."""
        return super().init(fresh) | {OMEGA: make_identity(fresh(0))}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """What X sends, and the SL matrix."""
        common, per_client = super().send(server, ids)
        return common | {OMEGA: server[OMEGA]}, per_client

    @override
    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """As X begins, with the SL matrix."""
        return super().start(kept, received, info) | {OMEGA: received[OMEGA]}

    @override
    def personalize(self) -> Sequence[Pass]:
        """X's passes, regularized."""
        return [*map(self._regularize_pass, super().personalize())]

    @override
    def local_passes(self) -> Sequence[Pass]:
        """X's passes, regularized, then the client's own SL matrix."""
        measure = Measure(self._sum_soft_labels, self._store_soft_labels)
        return [*map(self._regularize_pass, super().local_passes()), measure]

    def _regularize_pass(self, local_pass: Pass) -> Pass:
        if not isinstance(local_pass, Train) or isinstance(local_pass.loss, _RegularizedLoss):
            return local_pass  # without a loss, or regularized already, as X may repeat its personal passes
        loss = _RegularizedLoss(local_pass.loss, local_pass.group, (self.dw or DW()).mu)
        return dataclasses.replace(local_pass, loss=loss)

    def _sum_soft_labels(self, client: State, batch: Batch) -> dict[str, Tensor]:
        return sum_soft_labels(self.predict(client, batch.x), batch)

    def _store_soft_labels(self, client: State, sums: dict[str, Tensor]) -> State:
        return client | {CLIENT_OMEGA: compute_soft_labels(sums), COUNTS: sums["counts"]}

    @override
    def upload(self, client: State) -> State:
        """What X uploads, the client's SL matrix and its class counts."""
        return super().upload(client) | {CLIENT_OMEGA: client[CLIENT_OMEGA], COUNTS: client[COUNTS]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """X's next state, and the rows' means."""
        omega = class_mean(uploads[CLIENT_OMEGA], uploads[COUNTS], otherwise=server[OMEGA])
        return super().aggregate(server, uploads) | {OMEGA: omega}

    @override
    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """What X exchanges, and the SL matrix as it travels."""
        return {**super().matrices(state), "SL": state[OMEGA] if OMEGA in state else state[CLIENT_OMEGA]}


@dataclass(frozen=True)
class _RegularizedLoss:
    """A pass's loss with the regularizer of the classification layer that it trains, if it trains one."""

    loss: Loss
    group: str
    mu: float

    def __call__(self, client: State, batch: Batch) -> Tensor:
        omega, value = client[self.group].get("head.weight"), self.loss(client, batch)
        return value if omega is None else value + self.mu * compute_regularizer(omega, client[OMEGA])


class _MixinMeta(type):
    """The type of classes that no module holds, which are pickled as what they are made of."""


def _reduce_mixin_class(mixin_class: _MixinMeta) -> tuple[Any, ...]:
    return add_dw_mixin, (mixin_class.__bases__[1],)


copyreg.pickle(_MixinMeta, _reduce_mixin_class)


@functools.cache
def add_dw_mixin(method: Any) -> type[Any]:
    """A method's class with the mixin before it, under its own name."""
    if issubclass(method, WithDW):
        return method
    namespace = {"__module__": method.__module__, "__qualname__": method.__qualname__, "__doc__": method.__doc__}
    return dataclass(frozen=True, kw_only=True)(_MixinMeta(method.__name__, (WithDW, method), namespace))


def get_dw_refusal(method: Any) -> str:
    """Why a method could not be fetched with it; empty where it can."""
    reason: str = getattr(method, "dw_refusal", "")
    return reason


def resolve_algorithm_class(method: Any, parameters: Mapping[str, Any], key: str) -> type[Any]:
    """Get the class for the parameters of an entry.

    Raises
    ------
    SettingsError
        They contain ``dw``, but the method rejects it or has a parameter with that name. The message begins with
        ``key``.
    """
    if "dw" in {field.name for field in dataclasses.fields(method)}:
        raise SettingsError(f"{key}: {method.__qualname__} has a field 'dw', which is FedDW's regularizer; rename it.")
    if parameters.get("dw") is None:
        return method
    if reason := get_dw_refusal(method):
        raise SettingsError(f"{key}.dw: {parameters['dw']} can't be used, since {reason}.")
    return add_dw_mixin(method)
