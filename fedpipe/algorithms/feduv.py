"""FedUV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedUV(FedAvg):
    r"""FedAvg with two regularizers that emulate IID training: variance of predictions and uniformity of features.

    Source: Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024.

    Method: with p the softmax outputs and z the features of a batch,

    .. math::
        \min_\theta F_k(\theta) + a_V V + a_U U, \qquad
        V = \frac{1}{C} \sum_c \max(0, C^{-1/2} - \mathrm{std}_i \, p_{ic}), \qquad
        U = \mathrm{mean}_{i < j} \, e^{-\lVert z_i - z_j \rVert^2 / s} ,

    where std is the unbiased standard deviation over the batch and s the squared median of the distances that are not 0
    (of an even number, the lower middle one). :math:`C^{-1/2}` is the deviation of C one-hot predictions of different
    classes. In a larger balanced batch they have :math:`\sqrt{(1 - 1/C) / C}`, so V is slightly above 0. A term that is
    undefined, for a batch of one sample or features that are all equal, is 0.

    State: none. Traffic: the model down, the model up.
    Values used: 2.5 and 0.5 (its own code, FedDW, cwFedAvg, with the names lambda and mu swapped between them).

    Deviations
    ----------
    Features z
        Code: the output of a projection between the body and the output layer. FedDW's code: the input of the output
        layer. Here: the input of the output layer of the study's model.
    Kernel width s
        Code: z is not normalized, and the gradient flows through s. Here: as the code.
    Strength of the variance for C classes
        Paper: C / 4. Code: 2.5. Here: 2.5, or C / 4 with ``variance: C/4``.

    Parameters
    ----------
    variance
        Strength a_V of the predictions' variance. C/4 is proportional to the number of classes.
    uniformity
        Strength a_U of the features' uniformity.
    """

    variance: Annotated[float, Field(ge=0)] | Literal["C/4"] = 2.5
    uniformity: Annotated[float, Field(ge=0)] = 0.5

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and both regularizers."""
        z = self.net.features(client["model"], batch.x)
        logits = self.net.classify(client["model"], z)
        strength = logits.shape[-1] / 4 if self.variance == "C/4" else self.variance
        v, u = compute_variance_deficit(logits.softmax(-1), batch), compute_uniformity_loss(z, batch)
        return cross_entropy(logits, batch) + strength * v + self.uniformity * u


def compute_variance_deficit(p: Tensor, batch: Batch) -> Tensor:
    """V of predictions of shape (B, C), a scalar: how far they vary less than C one-hot ones."""
    rounding = (len(p) * torch.finfo(p.dtype).eps) ** 2
    std = batch.variance(p).clamp(min=rounding).sqrt()  # one below rounding has no gradient
    return F.relu(p.shape[-1] ** -0.5 - std).mean() * (batch.size() > 1)


def compute_uniformity_loss(z: Tensor, batch: Batch) -> Tensor:
    """U of features of shape (B, d), a scalar: the mean kernel of the batch's pairs."""
    is_pair = batch.make_pair_mask(z.dtype)
    square_distances = (z.unsqueeze(1) - z).square().sum(-1)
    sorted_distances = (is_pair * square_distances.detach()).flatten().sort(descending=True, stable=True)
    positive_count = (sorted_distances.values > 0).sum()
    median = square_distances.flatten().gather(0, sorted_distances.indices.gather(0, (positive_count // 2).reshape(1)))
    kernel = (-square_distances / torch.where(positive_count > 0, median, 1.0)).exp()
    return (is_pair * kernel).sum() * ((positive_count > 0) / is_pair.sum().clamp(min=1))
