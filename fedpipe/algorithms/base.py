"""The interface of an algorithm: its hooks, and when the engine calls them.

An algorithm is a frozen dataclass of hyperparameters that derives from :class:`Algorithm`. One run of R rounds::

    server = algorithm.init(initial_model)                   # initial_model(i): the i-th initial model
    state[k] = algorithm.init_client(server, initial_model)  # for each client k
    for round in 1..R:
        shared, personal = algorithm.send(server, ids)       # ids: one or more clients, see `send`
        for k in participants:                               # one client after the other, or many in one call
            client = algorithm.start(state[k], shared | personal[k], info[k])
            for p in algorithm.personal_passes() + algorithm.local_passes():
                client = run(p, client)                      # Train, Measure or Update, see `passes`
            upload[k], state[k] = algorithm.upload(client), algorithm.keep(client)
        server = algorithm.aggregate(server, Uploads(participants, weights, upload))

    # evaluation after a round
    global:    algorithm.global_model(server)
    personal:  start and personal_passes as in training, then algorithm.predict(client, x)
    finetuned: the same, then the passes of algorithm.finetune_passes(epochs)

You need ``aggregate``. Most methods also define ``loss``, ``start``, ``upload``, ``keep``, ``local_passes``,
``personal_passes`` and ``send``. All other hooks are for special cases.

Rules:

- Write the hooks of the client for ONE client, as pure functions of tensors. The same code then trains clients one by
  one or stacked along a leading axis, so use no ``if`` on values of tensors.
- A client's state is a :data:`State`: named parts with the same names and shapes in every round.
- ``personal_passes`` and ``local_passes`` are read once and are the same in all rounds.
- The server reads the uploads in client order.
- The engine samples participants, counts bytes, moves tensors, averages BatchNorm's running statistics, saves and
  resumes. The names ``buffers``, ``optimizer/...``, ``server/...``, ``dw/...`` and ``diagnostic/...`` are the engine's.
- In a hook, ``self.federation.learning_rate`` is the learning rate of the round.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State, one_hot
from fedpipe.algorithms.passes import Condition, Gradient, Loss, Measure, Pass, Pull, Step, Train, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core import rng
from fedpipe.core.components.component import Component
from fedpipe.core.errors import HookError
from fedpipe.core.noise import draw_normal, draw_uniform
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork, Network
from fedpipe.settings.federation import Federation

#: names for custom methods
__all__ = [
    "Algorithm",
    "Batch",
    "ClientInfo",
    "Condition",
    "Gradient",
    "Loss",
    "Measure",
    "Pass",
    "Pull",
    "State",
    "Step",
    "StudyFacts",
    "Train",
    "Update",
    "Uploads",
    "cross_entropy",
    "draw_normal",
    "draw_uniform",
    "one_hot",
]


class StudyFacts(NamedTuple):
    """Facts about a study before it runs, for an algorithm's warnings."""

    rounds: int
    momentum: float
    has_validation: bool  #: whether clients have validation data
    has_batch_norm_setting: bool  #: whether the model has the parameter `batch_norm`
    build_network: Callable[[], FunctionalNetwork | None]

    @property
    def network(self) -> FunctionalNetwork | None:
        """The network that the algorithm trains, without values. None: a custom model that can't be built here."""
        return self.build_network()


class HookFederation(Federation):
    """Settings of the federation that hooks can read. These are all except `rounds`, which is not in a run's key."""

    @classmethod
    def from_federation(cls, federation: Federation) -> HookFederation:
        """Make the settings from the section `federation`."""
        return federation if isinstance(federation, cls) else cls.model_construct(**dict(federation))

    @override
    def __getattribute__(self, name: str) -> Any:
        if name == "rounds":
            raise HookError(
                "self.federation.rounds can't be read in a hook, because more rounds continue a run. Add a parameter "
                "to your class, such as `horizon: int = 100`."
            )
        return super().__getattribute__(name)


@dataclass(frozen=True, kw_only=True)
class Algorithm(Component):
    """Base of all algorithms. Clients receive the complete model, train it on the mean cross-entropy and upload it.

    An algorithm defines ``aggregate``, and overrides the hooks that it changes.

    A client that never participated receives the global model, which is also its personal model.
    """

    has_prototype_logits: ClassVar[bool] = False  #: whether `prototype_logits` is defined
    #: keys of the section `federation` that its steps do not use. A study that sets one of them is an error.
    unsupported_settings: ClassVar[tuple[str, ...]] = ()

    #: Part of the server's state that `federation.server` optimizes. `aggregate` sets it to the mean of the uploads, or
    #: moves it along the mean of their updates. None: there is no such part, or other parts depend on its step.
    server_optimizer_part: ClassVar[str | None] = None

    #: Effect of a parameter `layers` that is larger than the network, as ``so ...``. Empty: there is no such parameter.
    excess_layers_effect: ClassVar[str] = ""
    #: Why FedDW's regularizer can't be added to this method (the key `dw`), with the advice. Empty: it can.
    dw_conflict: ClassVar[str] = ""
    #: whether it begins with several initial models, so `model.weights` can't be used
    needs_several_models: ClassVar[bool] = False

    #: whether its steps draw random numbers. Each batch of a Train pass then has a `noise_key`, except in `eval_mode`
    needs_step_noise: ClassVar[bool] = False

    net: ClassVar[FunctionalNetwork]  # set by `bind`, for one thread
    federation: ClassVar[Federation]
    server_noise_key: ClassVar[Tensor]  #: key of the server's random numbers in the round. Set by `bind_round`

    def bind(self, net: FunctionalNetwork, federation: Federation) -> Self:
        """A copy with the network that it trains and the federation's settings.

        In hooks of a client, and in `send` and `aggregate`, ``federation.learning_rate`` is that of the round.
        """
        bound = copy.copy(self)
        object.__setattr__(bound, "net", net)
        object.__setattr__(bound, "federation", HookFederation.from_federation(federation))
        return bound

    @property
    def needs_sgd(self) -> bool:
        """Whether the method works only with SGD."""
        return False

    @property
    def local_steps_conflict(self) -> str | None:
        """Why clients can't train for `federation.local_steps`, as ``whose ...``. None: they can."""
        return None

    def bind_round(self, round_number: int, seed: int) -> Self:
        """A copy for a round: with its learning rate in ``federation``, and the key of the server's random numbers.

        Round 0 is for the initial states.
        """
        federation = self.federation.with_round_learning_rate(round_number) if round_number else self.federation
        bound = self.bind(self.net, federation)
        key = rng.derive_entropy(seed, "server/noise", round_number) >> 66  # 62 bits
        object.__setattr__(bound, "server_noise_key", torch.tensor(key))
        return bound

    # -- model and initial states ------------------------------------------------------------------------------------

    def adapt(self, network: Network) -> Network:
        """The network that this algorithm trains, for example with another head."""
        return network

    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The server's state before round 1. ``initial_model(i)`` is the i-th initial model."""
        return {"model": initial_model(0)}

    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """What a client keeps before its first round, the same for all clients. ``server`` is the initial state."""
        return {}

    def scalar(self, value: float) -> Tensor:
        """A scalar with the dtype of the network, for states of the server and initial states of clients."""
        return torch.tensor(value, dtype=self.net.dtype)

    # -- one round ---------------------------------------------------------------------------------------------------

    def select_participants(self, server: State, sizes: Tensor) -> Sequence[int] | None:
        """The participants of a round: ``federation.participants`` different clients. None: a uniform draw.

        Parameters
        ----------
        server
            The server's state before the round.
        sizes
            Number of training samples of each client, shape (N,).
        """
        return None

    def count_local_steps(self, size: int, round_number: int, noise_key: Tensor) -> int | None:
        """How many steps a client trains in a round, instead of ``federation.local_epochs`` or ``local_steps``.

        The number is at least 1. Passes of local training that set ``epochs`` ignore it.

        Parameters
        ----------
        size
            The client's number of training samples.
        round_number
            Number of the round, from 1.
        noise_key
            ``ClientInfo.noise_key`` of the client in this round.
        """
        return None

    # -- one client --------------------------------------------------------------------------------------------------

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The client's tensors at the start of a round.

        Parameters
        ----------
        state
            What ``keep`` returned in the client's last round, or ``init_client`` before its first.
        download
            Both values of ``send`` in one dict, without the axis of the clients.
        info
            Size, class counts and round.
        """
        return {"model": download["model"]}

    def personal_passes(self) -> Sequence[Pass]:
        """Passes that make the client's personal model from what it received, before training and evaluation."""
        return ()

    def training_pass(self) -> Train:
        """The pass that trains the model, which ``local_passes`` runs and ``finetune_passes`` repeats."""
        return Train(self.loss)

    def local_passes(self) -> Sequence[Pass]:
        """Passes of local training."""
        return (self.training_pass(),)

    def risk(self, client: State, batch: Batch) -> Tensor:
        """The empirical risk F_k on a batch, a scalar: mean cross-entropy."""
        return cross_entropy(self.net(client["model"], batch.x), batch)

    def finetune_passes(self, epochs: int) -> Sequence[Pass]:
        """Passes that adapt a copy of the personal model to the client's data, for the finetuned protocols."""
        return (dataclasses.replace(self.training_pass(), epochs=epochs, stream="finetune"),)

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
        """Minus the distance from each class's prototype, shape (B, C), for protocols such as prototype-on-local."""
        raise NotImplementedError

    def traffic(self, state: State) -> State:
        """The part of a download or an upload whose bytes are counted. By default, this is all of it."""
        return state

    # -- server ------------------------------------------------------------------------------------------------------

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """What the clients ``ids`` receive: a state for all, and one per client, stacked along a first axis.

        ``ids`` contains one or more clients, and may contain a client twice. So compute each value only from the
        client's own id. Compute values that depend on the participants in ``aggregate``.
        """
        return {"model": server["model"]}, {}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The server's state after the round.

        The rule is for parameters. The engine averages the running statistics of each part that is uploaded with the
        same name, such as ``model``, and ignores the rule's. The weights of this average are those of the part's last
        ``uploads.mean``.
        """
        raise NotImplementedError

    def global_model(self, server: State) -> Tensors | None:
        """The global model. None: the method has no global model."""
        model: Tensors = server["model"]
        return model

    def extra_models(self, server: State) -> Mapping[str, Tensors]:
        """Further models of the server, by name. NAME-on-global is recorded whenever global-on-global is."""
        return {}

    # -- what is recorded --------------------------------------------------------------------------------------------

    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """Scalars to record in every round."""
        return {}

    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """Matrices of shape (C, C) to record, from a server's state or an upload."""
        return {}

    # -- for the plan ------------------------------------------------------------------------------------------------

    def warnings(self, study: StudyFacts, key: str) -> Sequence[str]:
        """Warnings about settings under which the method has no effect or becomes another method.

        Parameters
        ----------
        study
            The study.
        key
            The entry's key, such as ``algorithms.fedbn``, with which the warnings begin.

        Raises
        ------
        SettingsError
            The method can't be used with this network or these settings. The message begins with the key.
        """
        layers = getattr(self, "layers", None) if self.excess_layers_effect else None
        if not isinstance(layers, int) or study.network is None or layers <= (count := len(study.network.layers())):
            return ()
        problem = f"{key}.layers: {layers} is more than the {count} parametrized layers of the network"
        return (f"{problem}, {self.excess_layers_effect}.",)


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy over the batch's samples, a scalar."""
    if batch.mask is None:
        return F.cross_entropy(logits, batch.y)
    return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
