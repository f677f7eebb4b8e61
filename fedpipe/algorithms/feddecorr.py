"""FedDecorr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.fedavg import FedAvg

EPSILON = 1e-8  #: added to variances (authors' code)


@dataclass(frozen=True, kw_only=True)
class FedDecorr(FedAvg):
    r"""FedAvg with a regularizer that decorrelates features, because heterogeneous clients use few dimensions.

    Source: Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning,
    ICLR 2023, eq. 5-6.

    Method: with K the correlation matrix, shape (d, d), of the features of a batch of B samples, client k minimizes

    .. math:: F_k(\theta) + \beta \frac{(B - 1)^2}{B} \frac{1}{d (d - 1)} \sum_{i \ne j} K_{ij}^2 .

    The regularizer of a batch of one sample is 0.

    State: none. Traffic: the model down, the model up. Value of beta used: 0.1.

    Deviations
    ----------
    Scale of the regularizer
        Paper: :math:`\lVert K \rVert_F^2 / d^2`. Code: without the diagonal, which is constant, and about B times as
        large. Here: as the code, because the published value of beta is the code's.

    Parameters
    ----------
    beta
        Strength of the regularizer.
    """

    beta: Annotated[float, Field(ge=0)] = 0.1

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the regularizer."""
        z = self.net.features(client["model"], batch.x)
        risk = cross_entropy(self.net.classify(client["model"], z), batch)
        return risk + self.beta * compute_correlation_penalty(z, batch)


def compute_correlation_penalty(z: Tensor, batch: Batch) -> Tensor:
    """The mean square of the correlations of features of shape (B, d), times (B - 1)^2 / B, a scalar."""
    size, width = batch.size().clamp(min=1), z.shape[-1]
    centered = z - batch.sum(z) / size
    standardized = centered / (batch.variance(z) + EPSILON).sqrt()
    samples = standardized if batch.mask is None else standardized * batch.mask.unsqueeze(-1)
    products = samples.T @ samples  # (B - 1) K
    return 2 * products.triu(1).square().sum() / max(width * (width - 1), 1) / size
