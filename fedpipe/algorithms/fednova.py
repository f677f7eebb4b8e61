"""FedNova."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedprox import FedProx
from fedpipe.algorithms.passes import Gradient, Pass
from fedpipe.algorithms.uploads import Uploads


@dataclass(frozen=True, kw_only=True)
class FedNova(FedProx):
    r"""Normalizes updates by local steps, so that clients that take more steps do not weigh more.

    Source: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
    NeurIPS 2020, Alg. 1.

    Method: client k's update is a weighted sum of the gradients of its steps. With :math:`a_k` the sum of their weights
    and :math:`p_k` the client's weight,

    .. math:: d_k = (\theta^t - \theta_k) / a_k, \qquad
              \theta^{t+1} = \theta^t - \Bigl( \sum_{k \in S} p_k a_k \Bigr) \sum_{k \in S} p_k d_k .

    :math:`a_k` is the displacement, divided by :math:`-\eta`, that the local optimizer would make if every gradient
    were 1. With momentum :math:`\rho` and FedProx's pull :math:`\mu`, each step is :math:`v \leftarrow \rho v + 1 -
    \eta \mu a, \; a \leftarrow a + v`. For plain SGD it is the number of steps. Parameters of clients without a step
    are not in the mean. BatchNorm's running statistics of all are averaged.

    State: none. Traffic: the model down. The model and :math:`a_k` up.
    Values of mu used: {0.001, 0.003, 0.05, 0.1} (tuned in FedDUAL).

    Deviations
    ----------
    Momentum together with a pull
        Paper: a formula for each of them. Code: applies both to one counter, which is not the sum of the weights. Here:
        the recursion above, which gives the paper's formula for each of them.
    Factor :math:`\sum p_k a_k` with a pull
        Paper: as above. Code: the mean number of steps. Here: as the paper.

    Parameters
    ----------
    mu
        Strength of the local solver's pull towards the global model, as FedProx's.
    adam
        Use ``federation.optimizer: adam``, although the theory is about SGD. :math:`a_k` is then the number of steps.
    """

    mu: Annotated[float, Field(ge=0)] = 0.0
    adam: bool = False

    @property
    @override
    def needs_sgd(self) -> bool:
        """The weights of gradients assume SGD."""
        return not self.adam

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """FedProx's state, and counters of steps."""
        zero = torch.zeros_like(info.size)
        return super().start(state, download, info) | {"a": zero, "v": zero}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """FedProx's steps, which are counted."""
        return (replace(self.training_pass(), step=self.step),)

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """A step of the federation's optimizer, and the same step for a gradient of 1."""
        federation, is_sgd = self.federation, self.federation.optimizer == "sgd"
        rho, shrink = (federation.momentum, federation.learning_rate * self.mu) if is_sgd else (0.0, 0.0)
        v = rho * client["v"] + 1 - shrink * client["a"]
        return gradient.descend(client, gradient(client)) | {"a": client["a"] + v, "v": v}

    @override
    def upload(self, client: State) -> State:
        """The model, and the sum of the gradients' weights."""
        return {"model": client["model"], "a": client["a"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean update per step, times the mean number of steps."""
        theta, effective_entries = (
            server["model"],
            [(client, weight, upload) for client, weight, upload in uploads if upload["a"] > 0],
        )
        if not effective_entries:
            return server
        ids, weights, client_uploads = zip(*effective_entries, strict=True)
        uploads = Uploads(
            ids, weights, [upload | {"d": (theta - upload["model"]) / upload["a"]} for upload in client_uploads]
        )
        return {"model": theta - uploads.mean("a") * uploads.mean("d")}
