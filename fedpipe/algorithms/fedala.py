"""FedALA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Pass, Train, Update
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedALA(FedAvg):
    r"""Before local training, each client learns an element-wise mixture of its last model and the global model.

    Source: Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023, Alg. 1.

    Method: in the top layers, with weights W in [0, 1] of the same shape (ones at first), a client repeats

    .. math::
        \hat\theta = \theta_k + (\theta^t - \theta_k) \odot W, \qquad
        W \leftarrow clip_{[0, 1]} \bigl( W - \eta_w \nabla_{\hat\theta} F_k \odot (\theta^t - \theta_k) \bigr),

    batch by batch on a random fraction of its training data. Lower layers are the global ones. The first mixing repeats
    passes until it converges: the standard deviation of the last ten passes' losses falls below ``threshold``. Later
    mixings are one pass. Then the client trains and uploads the complete model as in FedAvg.

    State: the top of the local model and W at the client. Traffic: the model down, the model up.
    Values used: rate 1, the output layer, 80 % of the data (its own paper). In FedDW's code all of the data and always
    one pass (``share: 1``, ``passes: 1``). That code measures each client's model as it was last trained
    (``kept-on-global``), before it is mixed again.

    A client that never participated receives the global model and mixes nothing, because it has no local model.

    Deviations
    ----------
    Clients outside the round
        Code: every client mixes in every round except the first, also if it is not sampled, and continues from its
        mixture. So W changes in every round, and a late client has learned it against the untrained initial model.
        Here: only participants learn W, as in FedDW's code. A client that has not trained yet trains and is evaluated
        with the global model. Its first mixing is at its second participation.
    Fraction of the data
        Paper: a random fraction. Code: a random stretch of the stored order. Here: a random fraction, drawn in each
        round.
    Loss of a pass
        Code: that of its last batch, which is the same in all passes, because their order is the same. Here: that of
        the last batch. Each pass has another order, so that the losses vary more and the first mixing has more passes.
    Passes of the first mixing
        Paper: until the losses converge. Code: the same, without a maximum. Here: at most ``passes``.
    BatchNorm's running statistics
        Here: only parameters are mixed. Statistics begin as the global ones, and every pass updates them.

    Parameters
    ----------
    rate
        Learning rate of the weights, eta_w.
    share
        Fraction of the training data that a pass uses.
    layers
        How many parametrized layers, from the output, are mixed.
    threshold
        Standard deviation of the losses at which the first mixing has converged.
    passes
        Maximum number of passes in the first mixing.
    """

    excess_layers_effect: ClassVar[str] = "so all layers are mixed"

    rate: Annotated[float, Field(ge=0)] = 1.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    layers: Annotated[int, Field(ge=1)] = 1
    threshold: Annotated[float, Field(ge=0)] = 0.1
    passes: Annotated[int, Field(ge=1)] = 100

    @property
    def mixed_parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters that are mixed."""
        return self.net.last_layer_names(self.layers, buffers=False)

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The initial model, and weights of one."""
        local = server["model"].only(self.mixed_parameter_names)
        return {"local": local, "weights": local.ones(), "settled": torch.zeros_like(local.norm())}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, whose top is mixed with the local one if there is one."""
        model, local = download["model"], state["local"]
        difference = model.only(self.mixed_parameter_names) - local
        mixture = local + difference * state["weights"]
        top = {name: torch.where(info.is_first > 0, model[name], value) for name, value in mixture.items()}
        window = LossWindow.make_empty(info.size)
        return {"model": model | top, "difference": difference, "is_first": info.is_first, "window": window, **state}

    @override
    def personal_passes(self) -> Sequence[Pass]:
        """Learn the weights."""
        mixing = Train(
            self.risk,
            only=self.mixed_parameter_names,
            epochs=self.passes,
            step=self.mix_models,
            when=self.needs_another_pass,
            after=self.record_pass_loss,
            share=self.share,
            stream="mixing",
        )
        return (mixing, Update(self.mark_converged))

    def mix_models(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One step of the weights, and the model of the new mixture."""
        g, loss = gradient.with_value(client)
        weights = (client["weights"] - self.rate * (g * client["difference"])).map(lambda value: value.clamp(0, 1))
        mixture = client["local"] + client["difference"] * weights
        window = LossWindow.record_batch_loss(client["window"], loss)
        return client | {"weights": weights, "model": client["model"] | mixture, "window": window}

    def record_pass_loss(self, client: State) -> State:
        """The client after a pass."""
        return client | {"window": LossWindow.append_pass_loss(client["window"])}

    def needs_another_pass(self, client: State) -> Tensor:
        """One pass if an earlier mixing has converged, otherwise passes until this one has. None without a model."""
        window = client["window"]
        is_due = torch.where(client["settled"] > 0, window["passes"] < 1, LossWindow.is_varying(window, self.threshold))
        return (client["is_first"] == 0) & is_due

    def mark_converged(self, client: State) -> State:
        """The client has completed its first mixing."""
        has_mixed = (client["window"]["passes"] > 0).to(client["settled"].dtype)
        return client | {"settled": torch.maximum(client["settled"], has_mixed)}

    @override
    def keep(self, client: State) -> State:
        """The trained top, and the weights."""
        local = client["model"].only(self.mixed_parameter_names)
        return {"local": local, "weights": client["weights"], "settled": client["settled"]}


class LossWindow:
    """The losses of the last ten passes (authors' code), which decide when the first mixing has converged."""

    LENGTH = 10

    @staticmethod
    def make_empty(like: Tensor) -> Tensors:
        """No pass yet, in the dtype of the scalar ``like``."""
        zero = torch.zeros_like(like)
        return Tensors({"passes": zero, "loss": zero, "losses": like.new_zeros(LossWindow.LENGTH)})

    @staticmethod
    def record_batch_loss(window: Tensors, loss: Tensor) -> Tensors:
        """The window after a batch."""
        return window | {"loss": loss.to(window["loss"].dtype)}

    @staticmethod
    def append_pass_loss(window: Tensors) -> Tensors:
        """The window after a pass, whose loss is that of its last batch."""
        losses = torch.cat([window["losses"][1:], window["loss"].reshape(1)])
        return window | {"losses": losses, "passes": window["passes"] + 1}

    @staticmethod
    def is_varying(window: Tensors, threshold: float) -> Tensor:
        """Whether there are few losses, or their standard deviation is at least ``threshold``."""
        return (window["passes"] <= LossWindow.LENGTH) | (window["losses"].std(correction=0) >= threshold)
