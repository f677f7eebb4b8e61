"""Per-FedAvg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Pass, Train, Update
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg):
    r"""Meta-learning (MAML): a global model that does well after one gradient step on a client's data.

    Source: Fallah, Mokhtari and Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A
    Model-Agnostic Meta-Learning Approach, NeurIPS 2020, Alg. 1.

    Method: minimize :math:`\min_w \sum_k F_k(w - \alpha \nabla F_k(w))`. With three batches D, D', D'' and
    :math:`\beta` the federation's learning rate, a local step is

    .. math::
        \tilde w = w - \alpha \nabla F(w; D), \quad v = \nabla F(\tilde w; D'), \quad
        w \leftarrow w - \beta (v - \alpha \nabla^2 F(w; D'') v).

    ``first-order`` omits the Hessian and needs two batches. ``hessian-free`` takes
    :math:`\nabla^2 F v \approx (\nabla F(w + \delta v) - \nabla F(w - \delta v)) / 2 \delta`. The personal model is one
    alpha-step from the global one, on a batch of the client's training data. The global model is evaluated unchanged,
    which is what FedDW reports. BatchNorm's running statistics are those of a step's last gradient.

    State: none. Traffic: the model down, the model up.
    Values used: alpha 0.01, beta 0.001, first-order, one batch for all (FedDW's code).

    A client that never participated receives the global model and takes one alpha-step, as all others do.

    Deviations
    ----------
    Averages
        Paper: uniform. Here: ``federation.weighting``.
    Optimizer
        Paper: plain gradient steps. Code: FedDW's has plain steps too, and Adam for other methods. Here: plain steps.
        To set Adam, momentum or clipping is an error. Weight decay is a part of the second step only.
    BatchNorm's running statistics
        Code: FedDW's never updates them. Here: each step does.
    Length of training
        Here: a step draws two or three batches at once, and an empty one is replaced by the first. The number of epochs
        is multiplied accordingly, so that a client with several batches takes about as many steps as in FedAvg. A
        client with one batch takes two or three times as many, each on a part of its samples. With
        ``federation.local_steps`` all clients take as many as in FedAvg.

    Parameters
    ----------
    alpha
        Rate of the personal step.
    variant
        How the Hessian term is computed: first-order (omitted) or hessian-free (a finite difference).
    delta
        Width of the Hessian-free difference.
    same_batch
        One batch for all of a step's gradients.
    """

    unsupported_settings: ClassVar[tuple[str, ...]] = ("optimizer", "momentum", "clip_norm")

    alpha: Annotated[float, Field(ge=0)] = 0.01
    variant: Literal["first-order", "hessian-free"] = "first-order"
    delta: Annotated[float, Field(gt=0)] = 0.001
    same_batch: bool = False

    @property
    def batches_per_step(self) -> int:
        """How many batches a step needs."""
        return 1 if self.same_batch else {"first-order": 2, "hessian-free": 3}[self.variant]

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, and the same as the start of the personal model."""
        return {"model": download["model"], "personal": download["model"]}

    @override
    def personal_passes(self) -> Sequence[Pass]:
        """The personal step."""
        personal_pass = Train(
            self.personal_risk, "personal", epochs=1, steps=1, step=self.take_alpha_step, stream="personal"
        )
        return (Update.copy("model", to="personal"), personal_pass)

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Meta-learning, then the personal step."""
        epochs = self.federation.local_epochs and self.federation.local_epochs * self.batches_per_step
        return (Train(self.loss, epochs=epochs, step=self.step, batches=self.batches_per_step), *self.personal_passes())

    @override
    def finetune_passes(self, epochs: int) -> Sequence[Pass]:
        """Steps of the personal model."""
        return (Train(self.personal_risk, "personal", epochs=epochs, stream="finetune"),)

    def personal_risk(self, client: State, batch: Batch) -> Tensor:
        """The personal model's risk."""
        return self.risk(client | {"model": client["personal"]}, batch)

    def take_alpha_step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One alpha-step of the personal model."""
        g, w = gradient(client), client["personal"]
        return client | {"personal": w | (w.only(g) - self.alpha * g)}

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One step of the meta-objective."""
        first, second, third = (batch.split(self.batches_per_step) * 3)[:3]
        model = client["model"]
        w = self.net.parameters(model)

        def compute_gradient(point: Tensors, sub_batch: Batch) -> Tensors:
            return gradient(client | {"model": model | point}, sub_batch)

        v = compute_gradient(w - self.alpha * compute_gradient(w, first), second)
        if self.variant == "hessian-free":
            difference = compute_gradient(w + self.delta * v, third) - compute_gradient(w - self.delta * v, third)
            v = v - self.alpha / (2 * self.delta) * difference
        rate, decay = self.federation.learning_rate, self.federation.weight_decay
        return client | {"model": model | (w - rate * (v + decay * w))}

    @override
    def predict(self, client: State, x: Tensor) -> Tensor:
        """The personal model's logits."""
        return self.net(client["personal"], x)
