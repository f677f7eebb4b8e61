"""CCVR."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad
from torch.nn.functional import cross_entropy
from typing_extensions import override

from fedpipe.algorithms.base import draw_normal, draw_uniform
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Measure, Pass
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class CCVR(FedAvg):
    r"""Retrains the head of FedAvg's model on virtual features, drawn from a Gaussian for each class.

    Source: Luo et al., No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data,
    NeurIPS 2021, Alg. 1.

    Method: clients measure the features f(x) of the downloaded model before they train it. With :math:`n_c` samples of
    class c at all participants, the server draws features of each class from

    .. math::
        \mathcal N(\mu_c, \Sigma_c), \qquad \mu_c = \frac{1}{n_c} \sum_{y = c} f(x), \qquad
        \Sigma_c = \frac{1}{n_c - 1} \Bigl( \sum_{y = c} f(x) f(x)^T - n_c \mu_c \mu_c^T \Bigr),

    and trains the head of the downloaded model on them. FedAvg's rounds continue with the model that is not calibrated.

    State: FedAvg's model, the calibrated one, and the last sums of each class at the server. Traffic: the model down.
    The model, C x d sums, C x d x d products and C counts up. Values used: 2000 (CIFAR-10), 500 (CIFAR-100) and 200
    (FL-bench) features of a class.

    A client that never participated receives FedAvg's model, which is not calibrated.

    Deviations
    ----------
    Time of the calibration
        Paper: once, after the last round, with all clients. Here: in each round, with its participants. The global
        model after round t is FedAvg's after round t - 1, calibrated. ``uncalibrated-on-global`` is FedAvg's after
        round t, with which clients begin, so that ``personal`` protocols measure it.
    Sums
        Paper: each client sends means and covariances. Here: sums, from which the server computes the same mean and
        covariance. FL-bench divides a client's covariance by n instead of n - 1.
    Classes with less than two samples in a round
        Here: their last sums. A class that has none is not in the calibration.
    Transformation of features
        Paper: Tukey's ladder of powers in some experiments. Here: none.
    Optimizer of the calibration
        Code: SGD with the clients' learning rate and batch size (FL-bench). Here: as the code, with the learning rate
        of the round. At the end of a cosine schedule the calibration therefore has little effect.

    Parameters
    ----------
    samples
        Number of virtual features of a class.
    epochs
        Epochs of the head on the virtual features.
    """

    samples: Annotated[int, Field(ge=1)] = 200
    epochs: Annotated[int, Field(ge=0)] = 1

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model, the same as the calibrated one, and sums of zeros."""
        model = initial_model(0)
        head = model["head.weight"]
        products = head.new_zeros(*head.shape, head.shape[1])
        sums = {"sums": torch.zeros_like(head), "products": products, "counts": head.new_zeros(len(head))}
        return {"model": model, "calibrated": model, **sums}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """FedAvg's model."""
        return {"model": server["model"]}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The model and sums of zeros."""
        head = download["model"]["head.weight"]
        products = head.new_zeros(*head.shape, head.shape[1])
        sums = {"sums": torch.zeros_like(head), "products": products}
        return {"model": download["model"], **sums, "counts": info.class_counts}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """The sums of the features, then training."""
        return (Measure(self.sum_features, lambda client, sums: client | sums), *super().local_passes())

    def sum_features(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Sums by class of the features and of their products."""
        z, num_classes = self.net.features(client["model"], batch.x), len(client["counts"])
        is_of_class = batch.class_sums(torch.eye(len(z), dtype=z.dtype, device=z.device), num_classes)  # shape (C, B)
        products = (is_of_class.unsqueeze(-1) * z).mT @ z  # without a tensor of shape (B, d, d)
        return {"sums": is_of_class @ z, "products": products}

    @override
    def upload(self, client: State) -> State:
        """The trained model, and the sums with their counts."""
        return {name: client[name] for name in ("model", "sums", "products", "counts")}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean model, and the downloaded model with a calibrated head."""
        counts = sum(uploads["counts"])
        is_new = counts >= 2

        def merge_class_sums(part: str) -> Tensor:
            total = sum(uploads[part])
            return torch.where(is_new.reshape(-1, *(1,) * (total.dim() - 1)), total, server[part])

        sums = {part: merge_class_sums(part) for part in ("sums", "products", "counts")}
        calibrated = server["model"] | self.calibrate_head(server["model"].only(self.net.head_names), sums)
        return {"model": uploads.mean("model"), "calibrated": calibrated, **sums}

    def calibrate_head(self, head: Tensors, sums: State) -> Tensors:
        """The head after SGD on virtual features, in batches of the federation's size."""
        classes = torch.nonzero(sums["counts"] >= 2).flatten()
        if not len(classes):
            return head
        features = self.draw_virtual_features({part: value[classes] for part, value in sums.items()}).to(self.net.dtype)
        z, y = features.flatten(0, 1), classes.repeat_interleave(self.samples)
        size = len(z) if self.federation.batch_size == "full" else self.federation.batch_size

        def compute_loss(head: Tensors, z: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.net.classify(head, z), y)

        for epoch in range(self.epochs):
            order = draw_uniform(self.server_noise_key, f"order/{epoch}", z.new_zeros(len(z))).argsort(stable=True)
            for first in range(0, len(z), size):
                batch = order[first : first + size]
                head = head - self.federation.learning_rate * grad(compute_loss)(head, z[batch], y[batch])
        return head

    def draw_virtual_features(self, sums: State) -> Tensor:
        """Virtual features, shape (classes, samples, d), from the sums of these classes."""
        counts, means = sums["counts"].double(), sums["sums"].double() / sums["counts"].double().unsqueeze(-1)
        outer = means.unsqueeze(-1) * means.unsqueeze(-2)
        n = counts.reshape(-1, 1, 1)
        covariances = (sums["products"].double() - n * outer) / (n - 1)
        values, vectors = torch.linalg.eigh((covariances + covariances.mT) / 2)
        square_norms = sums["products"].double().diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) / counts.unsqueeze(-1)
        rounding = 100 * torch.finfo(sums["products"].dtype).eps * square_norms
        values = torch.where(values > rounding, values, 0)
        roots = vectors * values.sqrt().unsqueeze(-2) @ vectors.mT
        noise = draw_normal(
            self.server_noise_key, "features", means.new_zeros(len(means), self.samples, means.shape[1])
        )
        return means.unsqueeze(1) + noise @ roots

    @override
    def global_model(self, server: State) -> Tensors:
        """The calibrated model of the previous round."""
        model: Tensors = server["calibrated"]
        return model

    @override
    def extra_models(self, server: State) -> Mapping[str, Tensors]:
        """FedAvg's model."""
        return {"uncalibrated": server["model"]}
