"""APFL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Pass, Train
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg):
    r"""FedAvg, and a personal model per client that is a mixture of the global model and a local one.

    Source: Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020, Alg. 1.

    Method: client k has its own model v and evaluates the mixture :math:`\bar v = \alpha v + (1 - \alpha) w`. A step
    moves all three with the same batch, from their values before the step:

    .. math::
        w \leftarrow w - \eta \nabla F_k(w), \qquad v \leftarrow v - \eta \alpha \nabla F_k(\bar v), \qquad
        \alpha \leftarrow clip_{[0, 1]} \bigl( \alpha - \eta \langle v - w, \nabla F_k(\bar v) \rangle \bigr).

    State: v and alpha at the client. Traffic: the model down, the model up. BatchNorm's running statistics are those
    of w.
    Values used: alpha 0.5, learned (FL-bench).

    A client that never participated has the mixture of the global model and the initial one, with the initial alpha.

    Deviations
    ----------
    Averages
        Code: uniform (the authors' FedTorch). Here: ``federation.weighting``.
    Mixture
        Code: of logits (FedTorch, FL-bench), or of parameters after each round, and v trains alone (PFLlib). Here: of
        parameters.
    Order of a step
        Code: v and alpha use the new w (FedTorch). Here: they use w before the step.
    Steps that change alpha
        Code: the first of a round (FedTorch), those of the first epoch (FL-bench), or all (PFLlib). Here: all steps.
    Gradient of alpha
        Code: the codes replace the mixture's gradient by a mixture of gradients, and add 0.02 alpha. Here: the gradient
        of the mixture's loss.
    Optimizer
        Paper: SGD. Here: one step of the federation's for w, v and alpha, also with momentum, weight decay and
        clipping.

    Parameters
    ----------
    alpha
        Fraction of the client's own model in the mixture, or its initial value. 0 gives FedAvg if it is not adaptive.
    adaptive
        Whether each client learns alpha.
    """

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    adaptive: bool = True

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The initial model and the initial alpha."""
        return {"own": self.net.parameters(server["model"]), "mixing": Tensors(alpha=self.scalar(self.alpha))}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, the client's own model, and alpha."""
        return {"model": download["model"], **state}

    def mix_with_local_model(self, client: State, model: Tensors) -> Tensors:
        """The mixture of a global model and the client's own one."""
        alpha = client["mixing"]["alpha"]
        return model | (alpha * client["own"] + (1 - alpha) * self.net.parameters(model))

    @override
    def training_pass(self) -> Train:
        """Steps of both models, and of alpha if it is adaptive."""
        if not self.adaptive:
            return Train(self.loss, group=("model", "own"))
        return Train(self.loss, group=("model", "own", "mixing"), step=self.step)

    @override
    def finetune_passes(self, epochs: int) -> Sequence[Pass]:
        """Steps of the client's own model in the mixture."""
        return (Train(self.personal_risk, "own", epochs=epochs, stream="finetune"),)

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The global model's risk, and that of the mixture, in which the global model is constant."""
        risk = self.risk(client, batch)
        with self.net.mode.discard_statistics():
            return risk + self.personal_risk(client, batch)

    def personal_risk(self, client: State, batch: Batch) -> Tensor:
        """The mixture's risk."""
        mixture = self.mix_with_local_model(client, client["model"].map(Tensor.detach))
        return self.risk(client | {"model": mixture}, batch)

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """A step of the federation's optimizer, after which alpha is in [0, 1]."""
        client = gradient.descend(client, gradient(client))
        return client | {"mixing": client["mixing"].map(lambda alpha: alpha.clamp(0, 1))}

    @override
    def keep(self, client: State) -> State:
        """The client's own model and alpha."""
        return {"own": client["own"], "mixing": client["mixing"]}

    @override
    def predict(self, client: State, x: Tensor) -> Tensor:
        """The mixture's logits."""
        return self.net(self.mix_with_local_model(client, client["model"]), x)
