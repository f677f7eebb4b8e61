"""DW as a module: FedDW's regularizer on any other method, with the key ``dw`` in its entry of params.yaml."""

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
from fedpipe.algorithms.class_means import compute_class_means
from fedpipe.algorithms.feddw import compute_regularizer, remove_head_bias
from fedpipe.algorithms.passes import Loss, Measure, Pass, Train
from fedpipe.algorithms.soft_labels import compute_soft_labels, make_initial_soft_labels, sum_soft_labels
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import Network

OMEGA, CLIENT_OMEGA, COUNTS = "dw/omega", "dw/own", "dw/counts"


@dataclass(frozen=True, kw_only=True)
class DW:
    """FedDW's regularizer as a module on another method (``dw: {mu: 0.1}``)."""

    mu: Annotated[float, Field(ge=0)] = 0.1  #: strength of the regularizer


@dataclass(frozen=True, kw_only=True)
class WithDW(Algorithm):
    r"""A mixin before a method X. Its clients also regularize their class relations towards the average soft labels.

    Source: Liu et al., FedDW, 2024, section V-E ("DW on X").

    The regularizer :math:`\mu L_{reg}` (eq. 11) is added to the loss of every pass of X that trains a classification
    layer :math:`\omega`. This includes passes before training that make the personal model, such as Per-FedAvg's step
    and FedALA's mixing, so that evaluation uses the same models as training. After training each client measures its SL
    matrix, and the server averages the rows (eq. 7). In Ditto, pFedMe, APFL, FedRoD and Per-FedAvg, the personal model
    is not the uploaded one. Their clients measure the personal one, and the losses of both have the regularizer.

    X's head has no bias, as in FedDW, so compare with X on a model whose head has no bias either. The regularizer has
    no effect in passes that do not train the head: DW on FedBABU is FedBABU, and on FedRep it acts in the head's epochs
    only. It is also in what FedAS and FedDUAL (with ``vector: gradient``) measure in a pass: the traces and the
    gradients. Fine-tuning is that of X. FedDW already has the regularizer and FedNH does not train such a layer, so for
    both the key is an error. Traffic: C x C more down, C x C and C counts more up.

    Parameters
    ----------
    dw
        FedDW's regularizer, such as ``{mu: 0.1}``. By default none.
    """

    dw: DW | None = None

    @override
    def list_hashed_code(self) -> tuple[Any, ...]:
        """X and this mixin."""
        return (*super().list_hashed_code(), WithDW)

    @override
    def adapt(self, network: Network) -> Network:
        """X's network with a head without bias."""
        return remove_head_bias(super().adapt(network))

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """X's state, and the identity as SL matrix."""
        return super().init(initial_model) | {OMEGA: make_initial_soft_labels(initial_model(0))}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """What X sends, and the SL matrix."""
        common, per_client = super().send(server, ids)
        return common | {OMEGA: server[OMEGA]}, per_client

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """X's state of the client, and the SL matrix."""
        return super().start(state, download, info) | {OMEGA: download[OMEGA]}

    @override
    def personal_passes(self) -> Sequence[Pass]:
        """X's passes, regularized."""
        return [*map(self._regularize_pass, super().personal_passes())]

    @override
    def local_passes(self) -> Sequence[Pass]:
        """X's passes, regularized, then the client's SL matrix."""
        measure = Measure(self._sum_soft_labels, self._store_soft_labels)
        return [*map(self._regularize_pass, super().local_passes()), measure]

    def _regularize_pass(self, local_pass: Pass) -> Pass:
        if not isinstance(local_pass, Train) or isinstance(local_pass.loss, _RegularizedLoss):
            return local_pass  # has no loss, or is regularized already, because X may repeat its personal passes
        loss = _RegularizedLoss(local_pass.loss, local_pass.first_trained_part, (self.dw or DW()).mu)
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
        omega = compute_class_means(uploads[CLIENT_OMEGA], uploads[COUNTS], default=server[OMEGA])
        return super().aggregate(server, uploads) | {OMEGA: omega}

    @override
    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """X's matrices, and the SL matrix as it travels."""
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
    """Metaclass of the mixed classes. They are in no module, so they are pickled as a call that makes them again."""


def _pickle_mixin_class(mixin_class: _MixinMeta) -> tuple[Any, ...]:
    return add_dw_mixin, (mixin_class.__bases__[1],)


copyreg.pickle(_MixinMeta, _pickle_mixin_class)


@functools.cache
def add_dw_mixin(method: Any) -> type[Any]:
    """Add the mixin before a method's class. The new class has the method's name."""
    if issubclass(method, WithDW):
        return method
    namespace = {"__module__": method.__module__, "__qualname__": method.__qualname__, "__doc__": method.__doc__}
    return dataclass(frozen=True, kw_only=True)(_MixinMeta(method.__name__, (WithDW, method), namespace))


def get_dw_conflict(method: Any) -> str:
    """Why a method can't have the regularizer, with the advice. Empty: it can."""
    reason: str = getattr(method, "dw_conflict", "")
    return f"{method.__qualname__} has its own parameter 'dw'" if has_dw_parameter(method) else reason


def has_dw_parameter(method: Any) -> bool:
    """Whether a method's class has a parameter with the name of the extension."""
    return not issubclass(method, WithDW) and "dw" in {field.name for field in dataclasses.fields(method)}


def add_dw_if_requested(method: Any, parameters: Mapping[str, Any], key: str) -> type[Any]:
    """Get the class for the parameters of an entry.

    Raises
    ------
    SettingsError
        The parameters contain ``dw``, but the method can't have it. The message begins with ``key``.
    """
    if parameters.get("dw") is None:
        return method
    if reason := get_dw_conflict(method):
        raise SettingsError(f"{key}.dw: {parameters['dw']} can't be used, because {reason}.")
    return add_dw_mixin(method)
