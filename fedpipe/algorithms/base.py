"""The contract between an algorithm and the engine.

An algorithm is a frozen dataclass of hyper-parameters with a client side and a server side. Its client side is
written for ONE client, as pure functions of tensors, so that the same code trains clients one by one or stacked along
a leading axis:

- a client's tensors are a :data:`State`, made by ``start`` and changed only by passes;
- ``personalize`` and ``local_passes`` list the passes over its data, in order, once for all rounds:
  no ``if`` on values;
- ``upload`` and ``keep`` pick what travels back and what stays.

Its server side reads the uploads in client order, as often as it likes, and makes the next server state.
The engine samples participants, counts bytes, moves tensors, saves and resumes; no algorithm does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpipe.config import Federation, Params
from fedpipe.models.base import FunctionalNetwork, Network
from fedpipe.registry import Component
from fedpipe.tensors import Tensors

#: Named parts, each a tensor or :class:`~fedpipe.tensors.Tensors`, of the same shapes in every round.
State = dict[str, Any]


class Batch(NamedTuple):
    """Samples of one client."""

    x: Tensor  #: inputs, shape ``(B, *shape)``
    y: Tensor  #: classes, shape (B,)
    mask: Tensor | None = None  #: 1 for samples and 0 for padding, shape (B,); None where nothing is padded
    key: Tensor | None = None  #: of the noise that goes with these samples, an int64 scalar

    def split(self, parts: int) -> list[Batch]:
        """Every ``parts``-th sample, from each of the first ones on; where none is left for a part, the first part."""
        first = self._take_strided(parts, 0)
        return [first] + [self._take_strided(parts, index)._replace_if_empty(first) for index in range(1, parts)]

    def _take_strided(self, step: int, offset: int) -> Batch:
        mask = None if self.mask is None else self.mask[offset::step]
        return Batch(self.x[offset::step], self.y[offset::step], mask, self.key)

    def _replace_if_empty(self, fallback: Batch) -> Batch:
        if self.mask is None or fallback.mask is None:
            return self if len(self.y) else fallback
        is_nonempty = self.mask.sum() > 0
        x, y = torch.where(is_nonempty, self.x, fallback.x), torch.where(is_nonempty, self.y, fallback.y)
        return Batch(x, y, torch.where(is_nonempty, self.mask, fallback.mask), self.key)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the samples (first axis) of ``values``, shape (B, ...)."""
        if self.mask is None:
            return values.sum(0)
        return (values * self.mask.reshape(-1, *(1,) * (values.dim() - 1))).sum(0)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the samples of ``values``, shape (B,)."""
        return values.mean() if self.mask is None else self.sum(values) / self.mask.sum().clamp(min=1)

    def variance(self, values: Tensor) -> Tensor:
        """Unbiased variance over the samples of ``values``, shape (B, ...); of one sample 0."""
        if self.mask is None:
            return values.var(0, correction=min(len(values) - 1, 1))
        n = self.size()
        mean = self.sum(values) / n.clamp(min=1)
        return self.sum((values - mean).square()) / (n - 1).clamp(min=1)

    def size(self) -> Tensor:
        """Number of samples, a scalar."""
        return self.y.new_full((), len(self.y)) if self.mask is None else self.mask.sum()

    def pairs(self, dtype: torch.dtype) -> Tensor:
        """1 where i < j are samples and 0 elsewhere, shape (B, B)."""
        is_sample = self.y.new_ones(len(self.y), dtype=dtype) if self.mask is None else self.mask.to(dtype)
        return (is_sample.unsqueeze(1) * is_sample).triu(1)


class ClientInfo(NamedTuple):
    """What a client knows of itself: floating-point tensors."""

    size: Tensor  #: number of samples n_k, a scalar
    classes: Tensor  #: samples of each class n_kc, shape (C,)
    round: Tensor  #: the round that begins, from 1, a scalar


class Gradient(Protocol):
    """Gradient of a pass's loss and pull in the parameters that it trains, clipped as it says, and the loss's value."""

    def __call__(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        """At this point, on the batch at hand or on another one."""

    def descend(self, client: State, gradient: Tensors) -> State:
        """The client after a step of the federation's optimizer along this gradient."""


Loss = Callable[[State, Batch], Tensor]
Step = Callable[[State, Batch, Gradient], State]
Condition = Callable[[State], Tensor]


class Pull(NamedTuple):
    """A proximal term: half of a strength times the squared distance from a part of the client's state."""

    to: str  #: the part that is pulled to: it holds a tensor of the same shape for each one that is trained
    strength: float


@dataclass(frozen=True)
class Train:
    """Epochs of mini-batch steps over the client's training data."""

    loss: Loss  #: (client, batch) -> scalar, a mean over the batch
    group: str = "model"  #: the part of the client's state that is trained
    pull: Pull | None = None  #: added to the loss, whose value leaves it out: cheaper than as a term of `loss`
    clip: float | None = None  #: the gradient of both is scaled down to this norm where it is longer
    only: tuple[str, ...] | None = None  #: the tensors of the group that are trained; all of them by default
    epochs: int | None = None  #: at most; by default the federation's local epochs or steps
    step: Step | None = None  #: (client, batch, gradient) -> client; by default the federation's optimizer
    steps: int | None = None  #: at most, in each epoch; by default as many as the data give
    batches: int = 1  #: batches that go into one step, which :meth:`Batch.split` gives apart
    when: Condition | None = None  #: asked before each epoch; the pass ends where it is false
    after: Callable[[State], State] | None = None  #: follows each epoch: client -> client; both need `epochs` by steps
    share: float = 1.0  #: share of the training data that is used, chosen at random in each round
    stream: str = "batches"  #: random stream and optimizer state; passes of one stream go on where the last one ended
    eval_mode: bool = False  #: the network is in evaluation mode, and images are as they are


@dataclass(frozen=True)
class Measure:
    """Sums over the client's data, without gradient, and what follows from them."""

    sums: Callable[[State, Batch], dict[str, Tensor]]  #: (client, batch) -> sums over the batch's samples
    then: Callable[[State, dict[str, Tensor]], State]  #: (client, sums over all data) -> client
    on: Literal["train", "validation"] = "train"  #: validation: where a client has no such part, its training data
    is_augmented: bool = False  #: whether images are changed at random, as those are that a Train pass sees


@dataclass(frozen=True)
class Update:
    """A change of the client's tensors that needs no data."""

    then: Callable[[State], State]  #: client -> client


Pass = Train | Measure | Update


class Uploads(Sequence[tuple[int, float, State]]):
    """What the participants of a round sent: (client, weight, upload) in client order; the weights sum to 1."""

    def __init__(self, ids: Sequence[int], weights: Sequence[float], uploads: Sequence[State]) -> None:
        total = sum(weights)
        self.ids, self.weights, self._uploads = tuple(ids), tuple(weight / total for weight in weights), uploads
        self.effective_uploads = self  #: with the weights that a method took: these, or those of `uniform`

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        return self.ids[index], self.weights[index], self._uploads[index]

    def __iter__(self) -> Iterator[tuple[int, float, State]]:
        return zip(self.ids, self.weights, self._uploads, strict=True)

    def uniform(self) -> Uploads:
        """The same uploads with equal weights, for methods that are defined so."""
        self.effective_uploads = Uploads(self.ids, [1.0] * len(self), self._uploads)
        return self.effective_uploads

    def mean(self, part: str, names: Iterable[str] | None = None) -> Any:
        """Weighted mean of one part of the uploads, or of these tensors of it, summed in client order."""
        total = None
        for _, weight, upload in self:
            term = (upload[part] if names is None else upload[part].only(names)) * weight
            total = term if total is None else total + term
        return total


class NetworkSummary(NamedTuple):
    """What is known of a network before it is trained; None: nothing."""

    layer_count: int | None  #: parametrized ones
    has_norm_layers: bool | None  #: whether some are normalizations


_network_summaries: dict[tuple[Any, ...], NetworkSummary] = {}


@dataclass(frozen=True, kw_only=True)
class Algorithm(Component):
    """Base of all algorithms: a model that travels whole and is trained on the mean cross-entropy.

    What is left to an algorithm is ``aggregate``, and whatever else it does differently.
    """

    has_prototype_logits: ClassVar[bool] = False  #: whether `prototype_logits` is defined
    unsupported_settings: ClassVar[
        tuple[str, ...]
    ] = ()  #: keys of the federation that its steps have no use for, hence refused

    #: The part of the server's state that is the uploads' mean, or else a step along the mean of their updates, which
    #: `federation.server` may scale; None where nothing is, or where other parts count on where that step leads.
    server_optimizer_part: ClassVar[str | None] = None

    #: why FedDW's regularizer can't be added to this method (the key `dw`). Empty: it can.
    dw_refusal: ClassVar[str] = ""
    #: whether it begins with several initial models, which no file of weights has
    needs_several_models: ClassVar[bool] = False

    net: ClassVar[FunctionalNetwork]  # set by `bind`, for one thread
    federation: ClassVar[Federation]

    def bind(self, net: FunctionalNetwork, federation: Federation) -> Self:
        """A copy at work: with the network that it trains and the federation's settings.

        In hooks of a client, and in `send` and `aggregate`, ``federation.learning_rate`` is that of the round.
        """
        bound = copy.copy(self)
        object.__setattr__(bound, "net", net)
        object.__setattr__(bound, "federation", federation)
        return bound

    @property
    def needs_sgd(self) -> bool:
        """Whether its theory divides by SGD's learning rate, and its settings do not insist on another optimizer."""
        return False

    @property
    def local_steps_refusal(self) -> str | None:
        """Why clients can't train for `federation.local_steps`, as ``whose ...``; None where they can."""
        return None

    def bind_round(self, number: int) -> Self:
        """The same at work in a round, whose learning rate its federation has."""
        federation = self.federation.with_round_learning_rate(number)
        return self if federation is self.federation else self.bind(self.net, federation)

    # -- model and initial states ------------------------------------------------------------------------------------

    def adapt(self, network: Network) -> Network:
        """The network that this algorithm trains, where it needs another head."""
        return network

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """The server's state before round 1; ``fresh(i)`` is the i-th initial model."""
        return {"model": fresh(0)}

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """What a client keeps before its first round; the same for all clients. ``server`` is the initial state."""
        return {}

    # -- one client --------------------------------------------------------------------------------------------------

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The client's tensors as it begins."""
        return {"model": received["model"]}

    def personalize(self) -> Sequence[Pass]:
        """Passes that make the client's personal model of what it received, before training and before evaluation."""
        return ()

    def local_passes(self) -> Sequence[Pass]:
        """Passes of local training."""
        return (Train(self.loss),)

    def risk(self, client: State, batch: Batch) -> Tensor:
        """The empirical risk F_k on a batch, a scalar: mean cross-entropy."""
        return cross_entropy(self.net(client["model"], batch.x), batch)

    def finetune(self, epochs: int) -> Sequence[Pass]:
        """Passes that adapt a copy of the personal model to the client's data, for the finetuned protocols."""
        return (Train(self.loss, epochs=epochs, stream="finetune"),)

    def loss(self, client: State, batch: Batch) -> Tensor:
        """The local objective on a batch, a scalar: the risk and what the algorithm adds to it."""
        return self.risk(client, batch)

    def upload(self, client: State) -> State:
        """What travels to the server."""
        return {"model": client["model"]}

    def keep(self, client: State) -> State:
        """What stays at the client until its next round."""
        return {}

    def predict(self, client: State, x: Tensor) -> Tensor:
        """The client's logits, shape (B, C)."""
        return self.net(client["model"], x)

    def prototype_logits(self, client: State, x: Tensor) -> Tensor:
        """Minus the distance from each class's prototype, shape (B, C), for the protocols of the nearest prototype."""
        raise NotImplementedError

    def traffic(self, state: State) -> State:
        """What of a download or an upload travels, for counting its bytes: all, unless slots of it are empty."""
        return state

    # -- server ------------------------------------------------------------------------------------------------------

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """What the clients ``ids`` receive: a part common to all, and own parts stacked along a first axis."""
        return {"model": server["model"]}, {}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The server's state after the round.

        Rules are for parameters: of a part that is uploaded under the name that it has here, as ``model``, the engine
        takes the mean of the running statistics, whatever stands in their place or is missing.
        """
        raise NotImplementedError

    def global_model(self, server: State) -> Tensors | None:
        """The global model; None where a method has none."""
        model: Tensors = server["model"]
        return model

    def extra_models(self, server: State) -> Mapping[str, Tensors]:
        """Further models of the server, by name: NAME-on-global is recorded wherever global-on-global is."""
        return {}

    # -- what is recorded --------------------------------------------------------------------------------------------

    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """Scalars to record in every round."""
        return {}

    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """Matrices of shape (C, C) to record, of a server's state or of an upload."""
        return {}

    # -- what the plan says ------------------------------------------------------------------------------------------

    def warnings(self, params: Params, key: str) -> Sequence[str]:
        """What leaves this method idle, or another one than its name says, in a study: a sentence each.

        Parameters
        ----------
        params
            The study.
        key
            Of this entry, as ``algorithms.fedbn``, with which the sentences begin.
        """
        return ()

    def summarize_network(self, params: Params) -> NetworkSummary:
        """The network that it would train in a study."""
        info, model = params.dataset.facts, params.model
        cache_key = (type(self), repr(self), type(model), repr(model), info.shape, info.classes)
        if cache_key not in _network_summaries:
            try:
                net = FunctionalNetwork(
                    lambda: self.adapt(model.build_without_weights(info.shape, info.classes)), device="meta"
                )
                _network_summaries[cache_key] = NetworkSummary(len(net.layers()), bool(net.norm_names))
            except Exception:  # a user's own model that can't be built here: its jobs will say why
                _network_summaries[cache_key] = NetworkSummary(None, None)
        return _network_summaries[cache_key]

    def warn_about_layers(self, params: Params, key: str, layers: int, consequence: str) -> Sequence[str]:
        """The warning that the network has fewer parametrized layers than a setting counts."""
        count = self.summarize_network(params).layer_count
        if count is None or layers <= count:
            return ()
        return (f"{key}: {layers} is more than the {count} parametrized layers of the network, {consequence}.",)


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy over the batch's samples, a scalar."""
    if batch.mask is None:
        return F.cross_entropy(logits, batch.y)
    return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))


def one_hot(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Rows of the identity, shape (B, C)."""
    return (labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)).to(dtype)
