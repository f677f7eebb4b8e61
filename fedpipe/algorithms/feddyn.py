"""FedDyn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Pass, Pull, Train, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedDyn(FedAvg):
    r"""Dynamic regularization: a linear term, updated each round, aligns the clients' optima with the global one.

    Source: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Alg. 1.

    Method: with N clients, of which m are in the round,

    .. math::
        \theta_k &= \arg\min_\theta F_k(\theta) - \langle g_k, \theta \rangle
                    + \tfrac{\alpha}{2} \lVert \theta - \theta^t \rVert^2, \qquad
        g_k \leftarrow g_k - \alpha (\theta_k - \theta^t) \\
        h &\leftarrow h - \tfrac{\alpha}{N} \sum_{k \in S} (\theta_k - \theta^t), \qquad
        \theta^{t+1} = \tfrac{1}{m} \sum_{k \in S} \theta_k - h / \alpha

    The averages are uniform by definition of the method, and h is the mean of all :math:`g_k`. Client k minimizes for
    the federation's local epochs. As alpha goes to 0 it does not become FedAvg, because the server keeps adding the
    mean drift. Both memories are of parameters only, and BatchNorm's running statistics are averaged.

    State: :math:`g_k` at the client, :math:`h` at the server. Traffic: the model down, the model up.
    Values of alpha used by the authors: 0.1, 0.01, 0.001. FedDUAL does not report its value.

    A client that never participated receives the cloud model :math:`\theta^{t+1}`.

    Deviations
    ----------
    Global model
        Paper: the "cloud" :math:`\theta^{t+1}`, which is sent. Code: evaluates the participants' mean. Here: the cloud.
        With ``evaluated: mean``, the participants' mean. The mean is also evaluated, as ``mean-on-global``, if
        ``global-on-global`` is. The distance between the two, :math:`\lVert h \rVert / \alpha`, is recorded in every
        round.
    Alpha
        Paper: the same for all clients. Code: divided by the client's fraction of the samples. Here: as the paper.
    Clipping
        Paper: none. Code: the gradient without :math:`\alpha \theta`, which is added after the clip as weight decay. It
        also clips the methods that it compares with, FedAvg among them. Here: the gradient of all three terms, because
        h becomes large if clients are rarely in the round. Weight decay is added after the clip, as in the code.

    Parameters
    ----------
    alpha
        Strength of the regularizer. It must be positive, because the method divides by it.
    clip
        Gradients are scaled down to this norm. null: never.
    evaluated
        Which model is the global one: cloud, :math:`\theta^{t+1}`, or mean, that of the participants. The other one is
        evaluated too.
    adam
        Use ``federation.optimizer: adam`` for the minimization, although the paper uses SGD.
    """

    server_optimizer_part: ClassVar[str | None] = None  # h is the distance of the model from the mean

    alpha: Annotated[float, Field(gt=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] | None = 10.0
    evaluated: Literal["cloud", "mean"] = "cloud"
    adam: bool = False

    @property
    @override
    def needs_sgd(self) -> bool:
        """The paper's local solver is SGD."""
        return not self.adam

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model and a memory of zeros."""
        return {"model": initial_model(0), "h": self.net.parameters(initial_model(0)).zeros()}

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """A memory of zeros."""
        return {"g": server["h"]}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, the same as an anchor, the linear term, and the target of the pull."""
        model, anchor = download["model"], self.net.parameters(download["model"])
        return {"model": model, "anchor": anchor, "g": state["g"], "target": anchor + state["g"] / self.alpha}

    @override
    def training_pass(self) -> Train:
        r"""The minimization: the linear term and the proximal one are a pull to :math:`\theta^t + g_k / \alpha`."""
        return Train(self.loss, pull=Pull("target", self.alpha))

    @override
    def local_passes(self) -> Sequence[Pass]:
        """The minimization with clipped gradients, then the new linear term."""
        return (replace(self.training_pass(), clip=self.clip), Update(self.update_linear_term))

    def update_linear_term(self, client: State) -> State:
        """Update g. At an exact minimum it is the gradient of the risk."""
        drift = self.net.parameters(client["model"]) - client["anchor"]
        return client | {"g": client["g"] - self.alpha * drift}

    @override
    def keep(self, client: State) -> State:
        """The linear term."""
        return {"g": client["g"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean model, moved by h."""
        theta, mean = map(self.net.parameters, (server["model"], uploads.with_equal_weights().mean("model")))
        h = server["h"] - self.alpha * (len(uploads) / self.federation.clients) * (mean - theta)
        return {"model": mean - h / self.alpha, "h": h}

    def get_server_models(self, server: State) -> dict[str, Tensors]:
        """The cloud, and the participants' mean."""
        cloud: Tensors = server["model"]
        return {"cloud": cloud, "mean": cloud | (self.net.parameters(cloud) + server["h"] / self.alpha)}

    @override
    def global_model(self, server: State) -> Tensors:
        """The cloud, or the mean with ``evaluated: mean``."""
        return self.get_server_models(server)[self.evaluated]

    @override
    def extra_models(self, server: State) -> Mapping[str, Tensors]:
        """The other one of cloud and mean."""
        return {name: model for name, model in self.get_server_models(server).items() if name != self.evaluated}

    @override
    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """Distance of the cloud from the participants' mean."""
        return {"distance_from_mean": server["h"].norm() / self.alpha}
