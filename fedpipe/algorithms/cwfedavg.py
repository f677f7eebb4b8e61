"""cwFedAvg."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.class_means import divide_by_class_count
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class CwFedAvg(Algorithm):
    r"""One global model per class. Each client gets a mixture of them, weighted by its class distribution.

    Source: Lee and Choi, Class-Wise Federated Averaging for Efficient Personalization, ICCV 2025, eq. 4-9, Alg. 1.

    Method: with :math:`p_{ij}` the fraction of class j at client i, and :math:`p_i` the client's weight,

    .. math::
        w^G_j = \sum_{i \in S} q_{ij} w_i, \quad q_{ij} = \frac{p_i p_{ij}}{\sum_{l \in S} p_l p_{lj}}, \qquad
        w_i \leftarrow \sum_j p_{ij} w^G_j .

    The server computes :math:`p_{ij}` from the uploaded head, :math:`\tilde p_{ij} = \lVert row_j \rVert / \sum_k
    \lVert row_k \rVert` (eq. 4), and weight-distribution regularization (WDR, eq. 8) makes the two similar:

    .. math:: \min_w F_i(w) + \lambda \lVert p_i - \tilde p_i(w) \rVert_2 .

    Which tensors are class-wise is a setting. The others are averaged as in FedAvg.

    State: at the server the averaged tensors (``base``), the class models (``classes``), the clients' distributions,
    and whether each class had samples in the last round (``owned``). A download consists of ``base`` and the client's
    mixture of the class models (``upper``). Traffic: the model down, the model up (with ``distribution: empirical``
    also C counts). There is no global model.
    Values of lambda used: 10 (MNIST, CIFAR-10), 1000 (CIFAR-100), 2000 (Tiny ImageNet).

    A client that never participated receives the mean of the class models, because its distribution is uniform at the
    server.

    Deviations
    ----------
    Factor of WDR
        Paper: lambda. Code: half of it, and the published values are the code's. Here: ``wdr_factor``, by default 0.5.
    Class fractions :math:`p_{ij}`
        Code: also count the client's test samples. Here: those of its training samples, because no test label may reach
        training. With ``dataset.stratified`` both are equal up to rounding.
    Last batch of an epoch
        Code: dropped in every method if it is not full. Here: used. Otherwise a client with fewer samples than a batch
        would upload what it received.
    Clients outside the round
        Paper: Alg. 1 samples clients. Code: fails. Here: they keep their last uploaded distribution, which is uniform
        before their first.
    Classes without samples in a round
        Here: their models do not change, and only clients without samples of other classes use them.

    Parameters
    ----------
    wdr
        Strength lambda of WDR. 0 turns it off.
    wdr_factor
        Factor of lambda: 1 as in the paper, 0.5 as in its code.
    class_wise
        Which layers are class-wise: all, the output layer, or how many layers from the output (0: FedAvg).
    distribution
        approximate: from the uploaded head. empirical: from the client's class counts.
    """

    wdr: Annotated[float, Field(ge=0)] = 10.0
    wdr_factor: Annotated[float, Field(gt=0)] = 0.5
    class_wise: Literal["all", "output"] | Annotated[int, Field(ge=0)] = "output"
    distribution: Literal["approximate", "empirical"] = "approximate"

    @property
    def class_wise_tensor_names(self) -> tuple[str, ...]:
        """Names of the class-wise tensors."""
        count = {"all": len(self.net.layers()), "output": 1}.get(str(self.class_wise), self.class_wise)
        return self.net.last_layer_names(int(count))

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """Equal class models, and uniform distributions."""
        model = initial_model(0)
        classes = len(model["head.weight"])
        uniform = model["head.weight"].new_full((self.federation.clients, classes), 1 / classes)
        return {
            "base": model.without(self.class_wise_tensor_names),
            "classes": model.only(self.class_wise_tensor_names).map(lambda value: value.expand(classes, *value.shape)),
            "owned": torch.ones_like(uniform[0]),
            "distributions": uniform,
        }

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """Eq. 7: the averaged tensors, and each client's mixture of the class models."""
        distributions = server["distributions"][list(ids)]
        covered_distributions = distributions * server["owned"]
        p = torch.where(covered_distributions.sum(1, keepdim=True) > 0, covered_distributions, distributions)
        p = p / p.sum(1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        return {"base": server["base"]}, {"upper": server["classes"].map(lambda value: torch.tensordot(p, value, 1))}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The personal model, and the client's true class distribution."""
        model = self.net.to_model(download["base"] | download["upper"])
        return {"model": model, "p": info.class_counts / info.size, "counts": info.class_counts}

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and WDR (eq. 8)."""
        if not self.wdr:
            return self.risk(client, batch)
        distance = torch.linalg.vector_norm(
            client["p"] - approximate_class_distribution(client["model"]["head.weight"])
        )
        return self.risk(client, batch) + self.wdr_factor * self.wdr * distance

    @override
    def upload(self, client: State) -> State:
        """The model, and with ``distribution: empirical`` the class counts."""
        extra = {"counts": client["counts"]} if self.distribution == "empirical" else {}
        return {"model": client["model"]} | extra

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """Eq. 5-6 for the class-wise tensors, FedAvg for the others."""
        distributions, mass = server["distributions"].clone(), torch.zeros_like(server["owned"])
        base, sums = server["base"].zeros(), server["classes"].zeros()
        for client, weight, upload in uploads:
            model, p = upload["model"], self.get_class_distribution(upload)
            distributions[client], q = p, weight * p
            base = base + weight * model.only(base)
            sums = sums + model.only(sums).map(partial(torch.tensordot, q, dims=0))
            mass = mass + q
        classes = Tensors(
            (name, divide_by_class_count(sums[name], mass, default=server["classes"][name])) for name in sums
        )
        return {"base": base, "classes": classes, "owned": (mass > 0).to(mass.dtype), "distributions": distributions}

    def get_class_distribution(self, upload: State) -> Tensor:
        """The class distribution of the client that sent ``upload``, shape (C,)."""
        if self.distribution == "empirical":
            p: Tensor = upload["counts"] / upload["counts"].sum()
            return p
        return approximate_class_distribution(upload["model"]["head.weight"])

    @override
    def global_model(self, server: State) -> None:
        """There are class models and personal mixtures, but no global model."""


def approximate_class_distribution(head: Tensor) -> Tensor:
    """Eq. 4: the norms of the rows of an output layer of shape (C, d) divided by their sum, shape (C,)."""
    norms = torch.linalg.vector_norm(head, dim=-1)
    return norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)
