"""FedExP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedExP(FedAvg):
    r"""FedAvg with extrapolation: the server takes a larger step the more the clients' updates differ.

    Source: Jhunjhunwala, Wang and Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023, Alg. 1.

    Method: with :math:`\Delta_k = \theta_k - \theta^t` the updates of the m participants and
    :math:`\bar\Delta = \sum_{k \in S} w_k \Delta_k`,

    .. math::
        \theta^{t+1} = \theta^t + \eta_g \bar\Delta, \qquad
        \eta_g = \max \left( 1, \; \frac{\sum_{k \in S} w_k \lVert \Delta_k \rVert^2}
                                        {2 (\lVert \bar\Delta \rVert^2 + \epsilon)} \right).

    Steps and norms are of parameters only, and BatchNorm's running statistics are averaged. The evaluated global model
    is the mean of the last two, because single ones oscillate.

    State: the mean of the last two models at the server. Traffic: the model down, the model up.
    Values of epsilon used: 0.001 (CIFAR), 0.1 (EMNIST).

    A client that never participated receives the model with which participants begin, and not the mean of the last two.

    Deviations
    ----------
    Averages
        Paper: uniform. Code: by sample counts. Here: ``federation.weighting``.
    Epsilon
        Paper: constant. Code: times m, and times 0.998 squared in every round, as the squared learning rate. Here: as
        the paper.
    Evaluated model
        Code: after round 1 the last model. Here: the mean, also after round 1. The last one is evaluated too, as
        ``last-on-global``. Clients begin with it, so that ``personal`` protocols measure it.

    Parameters
    ----------
    epsilon
        Constant that bounds the step. A large one gives FedAvg.
    evaluated
        Which model is the global one: mean, that of the last two models, or last. The other one is evaluated too.
    """

    server_optimizer_part: ClassVar[str | None] = None  # the rule is a server optimizer

    epsilon: Annotated[float, Field(gt=0)] = 0.001
    evaluated: Literal["mean", "last"] = "mean"

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model, the same as the mean of the last two, and a step of 1."""
        model = initial_model(0)
        return {"model": model, "mean": self.net.parameters(model), "rate": self.scalar(1.0)}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """A step along the mean update. Its rate is at least 1, and larger if the updates differ enough."""
        mean, theta = uploads.mean("model"), self.net.parameters(server["model"])
        update = self.net.parameters(mean) - theta
        square_norm = self.scalar(0.0)
        for _, weight, upload in uploads:
            square_norm = square_norm + weight * (self.net.parameters(upload["model"]) - theta).square_norm()
        rate = (square_norm / (2 * (update.square_norm() + self.epsilon))).clamp(min=1)
        last = theta + rate * update
        return {"model": mean | last, "mean": (theta + last) / 2, "rate": rate}

    def get_server_models(self, server: State) -> dict[str, Tensors]:
        """The mean of the last two models, and the last."""
        last: Tensors = server["model"]
        return {"mean": last | server["mean"], "last": last}

    @override
    def global_model(self, server: State) -> Tensors:
        """The mean of the last two models, or the last with ``evaluated: last``."""
        return self.get_server_models(server)[self.evaluated]

    @override
    def extra_models(self, server: State) -> Mapping[str, Tensors]:
        """The other one of mean and last."""
        return {name: model for name, model in self.get_server_models(server).items() if name != self.evaluated}

    @override
    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """The step of the server."""
        return {"server_rate": server["rate"]}
