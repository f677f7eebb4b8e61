"""FedDBE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedDBE(FedAvg):
    r"""FedAvg in which a personal vector is added to the features, and the features' mean is pulled to a global mean.

    Source: Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, NeurIPS 2023, Alg. 1,
    and PFLlib, which is by the same authors.

    Method: with f the extractor of width d, g the head, and :math:`\bar z_k` client k's personal vector (zeros at
    first), client k trains all of them on

    .. math::
        mean \; \ell \bigl( g(f(x) + \bar z_k), y \bigr) + \frac{\kappa}{2 d} \lVert r_k - \bar z^g \rVert^2, \qquad
        r_k \leftarrow (1 - \mu) \, r_k + \mu \, mean_{batch} \, f(x).

    The running mean :math:`r_k` is 0 at the start of a round, and its gradient is that of the current batch. Round 1
    initializes: it is FedAvg's, and :math:`\bar z^g` becomes the weighted mean of its participants' :math:`r_k`.

    State: :math:`\bar z_k` at the client, :math:`\bar z^g` at the server. Traffic: the model, d numbers and a flag
    down. The model and d numbers up.

    A client that never participated receives the global model, and its personal vector is zero. Values used: kappa 50
    and mu 1 (the authors' command for the CNN), kappa 0 and mu 0.1 (defaults of the authors' code, without a pull). The
    pull is proportional to both. The default kappa 1 is in no source, and pulls much less than 50, so set or tune it.

    Deviations
    ----------
    Initialization
        Code: before round 1 all clients train once, and the server uses only their mean features. Here: round 1,
        in which the server also averages the models.
    Uploads after the initialization
        Paper: the model. Here: also :math:`r_k`, which the server ignores.
    Optimizer of the personal vector
        Code: plain SGD with the learning rate of the model. Here: the federation's optimizer for both.
    Clipping
        Here: ``federation.clip_norm`` is an error, because the step reads the mean features from a gradient.

    Parameters
    ----------
    kappa
        Strength of the pull of the mean features.
    mu
        Weight of a batch in the running mean.
    """

    unsupported_settings: ClassVar[tuple[str, ...]] = ("clip_norm",)

    kappa: Annotated[float, Field(ge=0)] = 1.0
    mu: Annotated[float, Field(gt=0, le=1)] = 0.1

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model, and no global mean."""
        model = initial_model(0)
        return {"model": model, "mean": torch.zeros_like(model["head.weight"][0]), "is_known": self.scalar(0.0)}

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """A personal vector of zeros."""
        return {"vector": server["mean"]}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model, the global mean, and whether there is one."""
        return {"model": server["model"], "mean": server["mean"], "is_known": server["is_known"]}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The download, the personal vector with the probe (see `loss`), and a running mean of zeros."""
        zeros = torch.zeros_like(state["vector"])
        return {**download, "personal": Tensors(vector=state["vector"], probe=zeros), "running": zeros}

    @override
    def training_pass(self) -> Train:
        """The model and the personal vector."""
        return Train(self.loss, group=("model", "personal"), step=self.step)

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the pull. The last term is 0, and its gradient to the probe is the batch's mean feature."""
        z = self.net.features(client["model"], batch.x)
        risk = cross_entropy(self.classify(client, z), batch)
        mean = batch.sum(z) / batch.size().clamp(min=1)
        pull = (self.update_running_mean(client, mean) - client["mean"]).square().mean() / 2
        return risk + client["is_known"] * self.kappa * pull + (client["personal"]["probe"] * mean.detach()).sum()

    def classify(self, client: State, z: Tensor) -> Tensor:
        """Logits, shape (B, C), of features, shape (B, d). The personal vector is added if the server has a mean."""
        return self.net.classify(client["model"], z + client["is_known"] * client["personal"]["vector"])

    def update_running_mean(self, client: State, mean: Tensor) -> Tensor:
        """The running mean after a batch with this mean, shape (d,)."""
        running: Tensor = (1 - self.mu) * client["running"] + self.mu * mean
        return running

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """A step of the model and the personal vector, and an update of the running mean. The probe remains 0."""
        g = gradient(client)
        mean = g["personal/probe"]
        client = gradient.descend(client, g | {"personal/probe": torch.zeros_like(mean)})
        return client | {"running": self.update_running_mean(client, mean)}

    @override
    def predict(self, client: State, x: Tensor) -> Tensor:
        """Logits with the personal vector, shape (B, C)."""
        return self.classify(client, self.net.features(client["model"], x))

    @override
    def upload(self, client: State) -> State:
        """The model and the running mean."""
        return {"model": client["model"], "running": client["running"]}

    @override
    def keep(self, client: State) -> State:
        """The personal vector."""
        return {"vector": client["personal"]["vector"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The weighted mean of the models, and in round 1 that of the running means."""
        mean = server["mean"] if server["is_known"] > 0 else uploads.mean("running")
        return {"model": uploads.mean("model"), "mean": mean, "is_known": self.scalar(1.0)}
