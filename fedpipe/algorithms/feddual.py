"""FedDUAL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.adaptive_loss import AdaptiveLoss
from fedpipe.algorithms.barycenter import Barycenter
from fedpipe.algorithms.batch import Batch, State

CODE_SETTINGS: dict[str, Any] = {"vector": "gradient", "iterations": 1000, "layers": 1, "distance": "exact"}
MODE_SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"vector": "pseudo-gradient", "iterations": 150},
    "code": CODE_SETTINGS,
}


@dataclass(frozen=True, kw_only=True)
class FedDUAL(Barycenter, AdaptiveLoss):
    r"""An adaptive loss at the clients, and a Wasserstein barycenter of the last layers' updates at the server.

    Source: Sahoo et al., FedDUAL: A Dual-Strategy with Adaptive Loss and Dynamic Aggregation for Mitigating Data
    Heterogeneity in Federated Learning, 2025, eq. 3-13, Alg. 1.

    Method: (i) with p and q the softmax over all trained weights of the local and the global model and A the accuracies
    on the client's training data, the client minimizes, with :math:`\beta` measured before each epoch,

    .. math:: (1 - \beta) F_k + \beta \sum_i p_i \log (p_i / q_i), \qquad
              \beta = \sigma(A_{local} - A_{global}).

    (ii) For each tensor of the last layers, with :math:`x_k` the client's update, the server starts at the mean and
    repeats

    .. math:: b \leftarrow \sum_k \gamma_k x_k / \sum_k \gamma_k, \qquad \gamma_k = \exp(-W(b, x_k) / \epsilon),

    and moves the tensor by -b. All other tensors are the uniform mean of the clients'. W is the 1-D Wasserstein-1
    distance between the values of two tensors. Both averages are uniform by definition of the method.

    Since beta is between 0.27 and 0.73 and the gradient of the divergence is tiny, (i) mostly halves the risk, which
    with SGD is about half the learning rate. At the paper's :math:`\epsilon` of 1e-5, (ii) picks the client nearest to
    the mean. The effective number of clients :math:`1 / \sum w_k^2` is recorded every round.

    State: none. Traffic: the model down, the model up (with ``vector: gradient`` also the last layers' gradients).
    Values used: epsilon 1e-5 (1e-4 in another sentence), 150 iterations, two layers. 1e-5, 1000 and one in its code.

    Deviations
    ----------
    Beta
        Paper: does not state when the accuracies are measured. Code: :math:`A_{local}` and p before any training, so
        that beta is 1/2, the divergence is 0 without a gradient, and the loss is half the risk. Here:
        :math:`A_{global}` when the round begins, :math:`A_{local}` before each epoch. As the code with ``mode: code``.
    Kernel
        Paper: :math:`\gamma`, which underflows. Code: not in the log domain. With mean kernel g it multiplies b by
        g / (g + 1e-10). This factor is almost 0 if all distances are larger than about 25 epsilon. The tensor then does
        not change.
        Here: a softmax in the log domain. As the code with ``mode: code``.
    Distance W
        Paper: approximated by Sinkhorn and Knopp, without a value of the regularization. Code: the exact distance.
        Here: ``distance``, by default exact. With ``sinkhorn``, POT computes it.
    Layers
        Paper: the last two. Code: weight and bias of the output layer. Here: ``layers``, by default 1 as in the code.
    Updates
        Paper: the pseudo-gradient in its proof, the gradient in Alg. 1. Code: the gradient. Here: ``vector``. The
        gradient is taken in evaluation mode and of images without augmentation, as accuracies are.
    Frozen base (VGG16)
        Code: p and q also contain the frozen weights, which are equal in both models and only dilute the divergence.
        Here: p and q are over the trained weights. Running statistics are not weights.
    ``mode: code``
        Code: ``vector: gradient``, ``iterations: 1000``, ``layers: 1`` and ``distance: exact``. Here: the same, and
        other values are an error, because no code has them.

    Parameters
    ----------
    epsilon
        Width of the kernel.
    iterations
        Maximum number of fixed-point iterations. They end when b does not change. By default 150 (paper), 1000 (code).
    layers
        How many parametrized layers, from the output, the barycenter combines. Or their names, such as [body.0, head].
    mode
        The paper's definition, or the authors' code. See the deviations.
    vector
        What the barycenter combines: the pseudo-gradient theta^t - theta_k (the paper's proof), or the gradient of the
        summed loss over the client's data at the trained model (Alg. 1 and code). By default the mode's.
    distance
        W: the exact distance, or the one with the transport plan of Sinkhorn and Knopp (sinkhorn).
    regularization
        With ``distance: sinkhorn``, weight of the plan's entropy, as a fraction of the largest difference of values.
    adaptive_loss, dynamic_aggregation
        Parts (i) and (ii). Without one of them it is the paper's ablation.
    """

    mode: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        for name, value in MODE_SETTINGS[self.mode].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        conflicts = {name: getattr(self, name) for name, value in CODE_SETTINGS.items() if getattr(self, name) != value}
        if self.mode == "code" and conflicts:
            conflict_text, code_text = (
                ", ".join(f"{name}: {value}" for name, value in settings.items())
                for settings in (conflicts, CODE_SETTINGS)
            )
            raise ValueError(
                f"{conflict_text} can't be used with mode: code, which sets {code_text}. Remove {', '.join(conflicts)}."
            )

    # -- the authors' code -------------------------------------------------------------------------------------------

    @property
    @override
    def has_adaptive_beta(self) -> bool:
        """Beta is 1/2 in the authors' code."""
        return super().has_adaptive_beta and self.mode == "paper"

    @property
    @override
    def has_underflowing_kernel(self) -> bool:
        """The kernel of the authors' code."""
        return self.mode == "code"

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk in eq. 5. The authors' code has half of it."""
        loss = super().loss(client, batch)
        return loss / 2 if self.mode == "code" and self.adaptive_loss else loss
