"""cwFedAvg."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class CwFedAvg(Algorithm):
    r"""One global model per class; each client gets a mixture of them, weighted by its class distribution.

    Source: Lee and Choi, Class-Wise Federated Averaging for Efficient Personalization, ICCV 2025, eq. 4-9, Alg. 1.
    With :math:`p_{ij}` the share of class j at client i, and :math:`p_i` the client's weight,

    .. math::
        w^G_j = \sum_{i \in S} q_{ij} w_i, \quad q_{ij} = \frac{p_i p_{ij}}{\sum_{l \in S} p_l p_{lj}}, \qquad
        w_i \leftarrow \sum_j p_{ij} w^G_j .

    The server need not be told :math:`p_{ij}`: it is read off the uploaded head, :math:`\tilde p_{ij} = \lVert row_j
    \rVert / \sum_k \lVert row_k \rVert` (eq. 4), which weight-distribution regularization (WDR, eq. 8) brings near it:

    .. math:: \min_w F_i(w) + \lambda \lVert p_i - \tilde p_i(w) \rVert_2 .

    Which tensors are class-wise is a setting; the others are averaged as in FedAvg. A client that is not in the round
    keeps its last uploaded distribution (uniform before its first). A class that nobody in the round owns keeps its
    model, and is left out of the mixtures of all clients that own another.

    State: class models and distributions at the server. Traffic: the model down (mixed by the server), the model up
    (with ``distribution: empirical`` also C counts); there is no global model.

    The authors' code halves lambda, and the published values are the code's: ``wdr_factor`` 0.5 (the default) is code
    mode, 1 paper mode. Not followed, in either: its :math:`p_{ij}` count the client's test samples too; here they are
    shares of what it trains on, since no label of a test may reach training (with ``dataset.stratified`` both are the
    same, to rounding). Its loader drops an epoch's last batch where that is not full, in every method alike; here it
    is kept, or a client of fewer samples than a batch would upload what it was sent.
    Values of lambda used: 10 (MNIST, CIFAR-10), 1000 (CIFAR-100), 2000 (Tiny ImageNet).

    Parameters
    ----------
    wdr
        Strength lambda of WDR; 0 leaves it out.
    wdr_factor
        Factor of lambda: 1 as in the paper, 0.5 as in its code.
    class_wise
        Which layers are class-wise: all, the output layer, or that many layers from the output down (0: FedAvg).
    distribution
        approximate: from the uploaded head; empirical: from the client's class counts.
    """

    wdr: Annotated[float, Field(ge=0)] = 10.0
    wdr_factor: Annotated[float, Field(gt=0)] = 0.5
    class_wise: Literal["all", "output"] | Annotated[int, Field(ge=0)] = "output"
    distribution: Literal["approximate", "empirical"] = "approximate"

    @property
    def class_wise_names(self) -> tuple[str, ...]:
        """Names of the class-wise tensors."""
        count = {"all": len(self.net.layers()), "output": 1}.get(str(self.class_wise), self.class_wise)
        return self.net.last_layer_names(int(count))

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """Equal class models, and uniform distributions."""
        model = fresh(0)
        classes = len(model["head.weight"])
        uniform = model["head.weight"].new_full((self.federation.clients, classes), 1 / classes)
        return {
            "base": model.without(self.class_wise_names),
            "classes": model.only(self.class_wise_names).map(lambda value: value.expand(classes, *value.shape)),
            "owned": torch.ones_like(uniform[0]),
            "distributions": uniform,
        }

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """Eq. 7: the averaged tensors, and each client's mixture of the class models."""
        distributions = server["distributions"][list(ids)]
        covered_distributions = distributions * server["owned"]
        p = torch.where(covered_distributions.sum(1, keepdim=True) > 0, covered_distributions, distributions)
        p = p / p.sum(1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        return {"base": server["base"]}, {"upper": server["classes"].map(lambda value: torch.tensordot(p, value, 1))}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The personal model, and the client's true class distribution."""
        model = self.net.to_model(received["base"] | received["upper"])
        return {"model": model, "p": info.classes / info.size, "counts": info.classes}

    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and WDR (eq. 8)."""
        if not self.wdr:
            return self.risk(client, batch)
        distance = torch.linalg.vector_norm(client["p"] - approximate_distribution(client["model"]["head.weight"]))
        return self.risk(client, batch) + self.wdr_factor * self.wdr * distance

    def upload(self, client: State) -> State:
        """The model, and the class counts where they are asked for."""
        extra = {"counts": client["counts"]} if self.distribution == "empirical" else {}
        return {"model": client["model"]} | extra

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """Eq. 5-6 for the class-wise tensors, FedAvg for the others."""
        distributions, class_mass = server["distributions"].clone(), torch.zeros_like(server["owned"])
        base, classes = server["base"].zeros(), server["classes"].zeros()
        for client, weight, upload in uploads:
            model = upload["model"]
            if self.distribution == "empirical":
                p = upload["counts"] / upload["counts"].sum()
            else:
                p = approximate_distribution(model["head.weight"])
            distributions[client] = p
            base = base + weight * model.only(base)
            classes = classes + model.only(classes).map(lambda value, q=weight * p: torch.tensordot(q, value, 0))
            class_mass = class_mass + weight * p

        def normalize_class_models(name: str) -> Tensor:
            mass = class_mass.reshape(-1, *(1,) * (classes[name].dim() - 1))
            return torch.where(mass > 0, classes[name] / mass, server["classes"][name])

        return {
            "base": base,
            "classes": Tensors((name, normalize_class_models(name)) for name in self.class_wise_names),
            "owned": (class_mass > 0).to(class_mass.dtype),
            "distributions": distributions,
        }

    def global_model(self, server: State) -> None:
        """There are class models and personal mixtures, but no global model."""


def approximate_distribution(head: Tensor) -> Tensor:
    """Eq. 4: the shares of the row norms of an output layer of shape (C, d), shape (C,)."""
    norms = torch.linalg.vector_norm(head, dim=-1)
    return norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)
