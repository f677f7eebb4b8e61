"""FedALA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Pass, Train, Update
from fedpipe.core.tensors import Tensors
from fedpipe.settings.params import Params

LOSS_WINDOW = 10  #: passes whose losses decide whether the first mixing has settled (authors' code)


@dataclass(frozen=True, kw_only=True)
class FedALA(FedAvg):
    r"""Before local training, each client learns an element-wise mixture of its last model and the global model.

    Source: Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023, Alg. 1.
    In the top layers, with weights W in [0, 1] of the same shape (ones at first),

    .. math::
        \hat\theta = \theta_k + (\theta^t - \theta_k) \odot W, \qquad
        W \leftarrow clip_{[0, 1]} \bigl( W - \eta_w \nabla_{\hat\theta} F_k \odot (\theta^t - \theta_k) \bigr),

    batch by batch on a random share of the training data; lower layers are the global ones. At the client's first
    participation there is nothing to mix; the first time there is, passes repeat until the standard deviation of the
    last ten passes' losses (each that of its last batch, as in the authors' code) falls below ``threshold``, capped at
    ``passes``; later it is one pass a round. Then the whole model is trained and uploaded as in FedAvg.

    A client that is first sampled late, and one that is measured before that, takes the global model whole, since it
    has trained nothing that could be mixed in; its long first mixing is at its second participation. The authors' code
    mixes at all clients in every round but the first, sampled or not, so that such a client has learnt its weights
    against the untrained initial model, and trains from that mixture.

    Only parameters are mixed: BatchNorm's running statistics come from the global model and go on with every pass.

    State: the local model's top and W at the client. Traffic: the model down, the model up. Deviations: the share is a
    random one, drawn in each round (the authors' code takes a random stretch of the stored order).
    Values used: rate 1, the output layer, 80 % of the data (its own paper); in FedDW's code all of the data and always
    one pass (``share: 1``, ``passes: 1``); that code measures each client's model as it was last trained
    (``kept-on-global``), before it is mixed again.

    Parameters
    ----------
    rate
        Learning rate of the weights, eta_w.
    share
        Share of the training data that a pass sees.
    layers
        How many parametrized layers, from the output, are mixed.
    threshold
        Standard deviation of losses at which the first mixing has settled.
    passes
        At most so many passes in the first mixing.
    """

    rate: Annotated[float, Field(ge=0)] = 1.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    layers: Annotated[int, Field(ge=1)] = 1
    threshold: Annotated[float, Field(ge=0)] = 0.1
    passes: Annotated[int, Field(ge=1)] = 100

    @property
    def mixed_names(self) -> tuple[str, ...]:
        """Names of the parameters that are mixed."""
        return self.net.last_layer_names(self.layers, buffers=False)

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """The initial model, and weights of one."""
        local = server["model"].only(self.mixed_names)
        zero = next(iter(local.values())).new_zeros(())
        return {"local": local, "weights": local.ones(), "seen": zero, "settled": zero}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The global model, with its top mixed by the weights so far."""
        model, local = received["model"], kept["local"]
        difference = model.only(self.mixed_names) - local
        mixture = local + difference * kept["weights"]
        is_new = kept["seen"] == 0
        return {
            "model": model | {name: torch.where(is_new, model[name], value) for name, value in mixture.items()},
            "local": local,
            "towards": difference,
            "weights": kept["weights"],
            "seen": kept["seen"],
            "settled": kept["settled"],
            "done": torch.zeros_like(info.size),
            "loss": torch.zeros_like(info.size),
            "losses": info.size.new_zeros(LOSS_WINDOW),
        }

    def personalize(self) -> Sequence[Pass]:
        """Learning the weights."""
        mixing = Train(
            self.risk,
            only=self.mixed_names,
            epochs=self.passes,
            step=self.mix_models,
            when=self.needs_another_pass,
            after=self.record_loss,
            share=self.share,
            stream="mixing",
        )
        return (mixing, Update(self.mark_converged))

    def mix_models(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One step of the weights, and the model that they make."""
        g, loss = gradient(client)
        weights = (client["weights"] - self.rate * (g * client["towards"])).map(lambda value: value.clamp(0, 1))
        mixture = client["local"] + client["towards"] * weights
        return client | {"weights": weights, "model": client["model"] | mixture, "loss": loss.to(client["loss"].dtype)}

    def record_loss(self, client: State) -> State:
        """The pass's loss enters the window."""
        losses = torch.cat([client["losses"][1:], client["loss"].reshape(1)])
        return client | {"losses": losses, "done": client["done"] + 1}

    def needs_another_pass(self, client: State) -> Tensor:
        """Whether another pass is due: one if settled before, else until the window's losses stand still."""
        has_unstable_loss = (client["done"] <= LOSS_WINDOW) | (client["losses"].std(correction=0) >= self.threshold)
        return (client["seen"] > 0) & torch.where(client["settled"] > 0, client["done"] < 1, has_unstable_loss)

    def mark_converged(self, client: State) -> State:
        """Whoever has mixed once is settled."""
        return client | {"settled": torch.maximum(client["settled"], (client["done"] > 0).to(client["settled"].dtype))}

    def keep(self, client: State) -> State:
        """The trained top, and the weights."""
        return {
            "local": client["model"].only(self.mixed_names),
            "weights": client["weights"],
            "seen": torch.ones_like(client["seen"]),
            "settled": client["settled"],
        }

    def warnings(self, params: Params, key: str) -> Sequence[str]:
        """Layers that do not exist."""
        return self.warn_about_layers(params, f"{key}.layers", self.layers, "so that all are mixed")
