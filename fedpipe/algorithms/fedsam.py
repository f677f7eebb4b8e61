"""FedSAM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Train


@dataclass(frozen=True, kw_only=True)
class FedSAM(FedAvg):
    r"""FedAvg whose clients train with sharpness-aware minimization (SAM), which searches for flat minima.

    Source: Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022, Alg. 1, and Caldarola
    et al., Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022.

    Method: a local step uses the gradient at the point near :math:`\theta` with the largest loss, to first order:

    .. math::
        \tilde\theta = \theta + \rho \, \nabla F_k(\theta) / \lVert \nabla F_k(\theta) \rVert, \qquad
        \theta \leftarrow \theta - \eta \nabla F_k(\tilde\theta).

    Both gradients use the same batch, so that a step costs twice as much as in FedAvg.

    State: none. Traffic: the model down, the model up.
    Values used: rho 0.05 (FedDecorr's code), 0.1 (Caldarola et al. for CIFAR-10).

    Deviations
    ----------
    Norm of the gradient
        Code: 1e-16 (Caldarola et al.) or 1e-12 (FedDecorr's) is added to it. Here: 1e-12.
    Adaptive SAM and weight averaging
        Paper: Caldarola et al. also use both. Here: SAM.
    Weight decay
        Here: of :math:`\theta`, as in the code, and not of :math:`\tilde\theta`.
    BatchNorm's running statistics
        Here: those of the second gradient's batch statistics.

    Parameters
    ----------
    rho
        Distance of the point at which the gradient is computed. 0 gives FedAvg.
    """

    rho: Annotated[float, Field(ge=0)] = 0.05

    @override
    def training_pass(self) -> Train:
        """Steps of SAM."""
        return replace(super().training_pass(), step=self.step)

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One step along the gradient at the perturbed model."""
        g = gradient(client)
        perturbation = self.rho / (g.norm() + 1e-12) * g
        model = client["model"] | (client["model"].only(g) + perturbation)
        return gradient.descend(client, gradient(client | {"model": model}))
