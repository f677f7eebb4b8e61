"""IFCA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.model_stack import select_model
from fedpipe.algorithms.passes import Measure, Pass
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class IFCA(Algorithm):
    r"""k models. Each client trains the one with the lowest loss on its data, and models are averaged per cluster.

    Source: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, Alg. 1 (model
    averaging).

    Method: client i chooses a model, trains it, and the server averages the models of each cluster:

    .. math:: \hat\jmath_i = \arg\min_j F_i(\theta_j), \qquad
              \theta_j \leftarrow \sum_{i \in S: \hat\jmath_i = j} w_i \theta_i / \sum_{i \in S: \hat\jmath_i = j} w_i .

    Ties go to the lowest index, and a model that no client chose does not change. The k initial models differ, so
    ``model.weights``, which contains one model, is an error.

    State: k models at the server. Traffic: k models down. A model and its index up. There is no single global model.
    Values of k used: 2 (CIFAR-10), 8 (CIFAR-100, Tiny ImageNet).

    A client that never participated receives the k models and chooses one, as the participants do.

    Deviations
    ----------
    Choice in evaluation
        Paper: on training data. Code: on test data, with their labels. Here: on training data.
    Initial models
        Code: all are drawn again until 35 % of the participants choose each of two models, or 10 % each of four. Here:
        drawn once.
    Choice in training
        Code: its losses include the weight decay of two layers, and augmented images. Here: the cross-entropy, without
        augmentation.
    Averages
        Code: uniform. Here: ``federation.weighting``.
    Learning rate
        Code: times 0.99 in every round after the first. Here: only ``federation.schedule`` changes it.

    Parameters
    ----------
    clusters
        Number of models, k.
    """

    needs_several_models: ClassVar[bool] = True

    clusters: Annotated[int, Field(ge=1)] = 2

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """K different models, stacked along a first axis."""
        models = [initial_model(index) for index in range(self.clusters)]
        return {"models": Tensors((name, torch.stack([model[name] for model in models])) for name in models[0])}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """All models."""
        return {"models": server["models"]}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """All models, with the first one chosen until the losses are measured."""
        models = download["models"]
        return {"models": models, "model": select_model(models, 0), "cluster": torch.zeros_like(info.size).long()}

    @override
    def personal_passes(self) -> Sequence[Pass]:
        """The choice."""
        return (Measure(self.sum_losses, self.choose_model),)

    def sum_losses(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Summed cross-entropy of each model, shape (k,)."""
        logits = [self.net(select_model(client["models"], index), batch.x) for index in range(self.clusters)]
        losses = [batch.sum(F.cross_entropy(outputs, batch.y, reduction="none")) for outputs in logits]
        return {"loss": torch.stack(losses)}

    def choose_model(self, client: State, sums: dict[str, Tensor]) -> State:
        """The model with the lowest loss."""
        is_best = sums["loss"] == sums["loss"].amin(-1, keepdim=True)
        order = torch.arange(self.clusters, device=is_best.device)  # the lowest index of the best models
        index = torch.where(is_best, order, self.clusters - 1).amin(-1)
        model = client["models"].map(lambda value: value.index_select(0, index.reshape(1)).squeeze(0))
        return client | {"model": model, "cluster": index}

    @override
    def upload(self, client: State) -> State:
        """The trained model and its index."""
        return {"model": client["model"], "cluster": client["cluster"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The weighted mean of each cluster."""
        models = [select_model(server["models"], index) for index in range(self.clusters)]
        for index in range(self.clusters):
            members = [entry for entry in uploads if int(entry[2]["cluster"]) == index]
            if members:
                models[index] = Uploads(*zip(*members, strict=True)).mean("model")
        return {"models": Tensors((name, torch.stack([model[name] for model in models])) for name in models[0])}

    @override
    def global_model(self, server: State) -> None:
        """There is no single global model, but k models."""
