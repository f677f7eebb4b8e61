"""pFedMe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.passes import Gradient, Pass, Pull, Train, Update
from fedpipe.algorithms.personal_model import PersonalModel
from fedpipe.algorithms.uploads import Uploads


@dataclass(frozen=True, kw_only=True)
class PFedMe(PersonalModel):
    r"""Personal models by Moreau envelopes: each is a proximal point of the client's loss around the global model.

    Source: Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Alg. 1.

    Method: for each batch, with K gradient steps of ``inner_rate`` for the minimization and :math:`\eta` the
    federation's learning rate,

    .. math::
        \tilde\theta \approx \arg\min_\theta F_k(\theta; batch) + \tfrac{\lambda}{2} \lVert \theta - w_k \rVert^2,
        \qquad w_k \leftarrow w_k - \eta \lambda (w_k - \tilde\theta),

    and the server takes :math:`w \leftarrow (1 - \beta) w + \beta \sum_k p_k w_k`.

    The inner minimization begins at the downloaded w and continues from batch to batch. The personal model is the last
    :math:`\tilde\theta`. It does not change if its client is not in the round, and equals the initial model before the
    client's first round. Both kinds of steps are plain gradient steps by definition of the method, so Adam, momentum,
    weight decay and clipping are errors. ``federation.schedule`` applies to eta only. BatchNorm's running statistics
    are those of :math:`\tilde\theta`, which travel with w_k and are averaged.

    State: the personal model at the client. Traffic: w down, w_k up.
    Values used: lambda 15, K 5, eta 0.005, inner rate 0.09 to 0.1, beta 1. PFPS-LWC does not report its values.

    Deviations
    ----------
    Personal model
        Paper: :math:`\tilde\theta`. Code: overwritten by w. Here: :math:`\tilde\theta`, kept by value.
    Clients outside the round
        Paper: all clients train in every round, and the participants upload. Here: they do not train.
    Averages
        Paper: uniform. Code: by sample counts. Here: ``federation.weighting``.
    Weight decay of the inner steps
        Code: 0.001, which is not an option. Here: none.

    Parameters
    ----------
    attraction
        Strength lambda of the proximal term. eta * lambda should be below 2.
    inner_steps, inner_rate
        Gradient steps of the inner minimization, K, and their rate, which times lambda plus the loss's curvature
        should be below 2.
    beta
        Fraction of the mean in the new global model.
    """

    unsupported_settings: ClassVar[tuple[str, ...]] = ("optimizer", "momentum", "weight_decay", "clip_norm")

    attraction: Annotated[float, Field(ge=0)] = 15.0
    inner_steps: Annotated[int, Field(ge=1)] = 5
    inner_rate: Annotated[float, Field(ge=0)] = 0.09
    beta: Annotated[float, Field(ge=0)] = 1.0

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, w_k, which starts there, and the last personal model."""
        return super().start(state, download, info) | {"local": self.net.parameters(download["model"])}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Inner minimization and outer step for each batch."""
        training_pass = Train(self.loss, pull=Pull("local", self.attraction), step=self.step)
        return (training_pass, Update.copy("model", to="personal"))

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """K inner steps, then one of w_k."""
        model, w = client["model"], client["local"]
        theta = model.only(w)
        for _ in range(self.inner_steps):
            g = gradient(client | {"model": model | theta})
            theta = theta.add(g, alpha=-self.inner_rate)
        rate = self.federation.learning_rate * self.attraction
        return client | {"model": model | theta, "local": w - rate * (w - theta)}

    @override
    def upload(self, client: State) -> State:
        """w_k."""
        return {"model": client["model"] | client["local"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """A step towards the mean."""
        return {"model": (1 - self.beta) * server["model"] + self.beta * uploads.mean("model")}
