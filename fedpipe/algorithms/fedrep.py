"""FedRep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.passes import Pass, Train


@dataclass(frozen=True, kw_only=True)
class FedRep(SharedBody):
    r"""A shared representation and personal heads. Each client trains its head first, then the representation.

    Source: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021, Alg. 1.

    Method: from the downloaded representation :math:`\phi^t`, client k fits its own head h, then the representation
    under it:

    .. math::
        h_k \leftarrow \arg\min_h F_k(\phi^t, h), \qquad
        \phi_k \leftarrow \arg\min_\phi F_k(\phi, h_k), \qquad
        \phi^{t+1} = \sum_{k \in S} w_k \phi_k ,

    by ``head_epochs`` and ``body_epochs`` epochs, which replace the federation's local epochs. Fine-tuning trains only
    the head, also for clients that never took part.

    State: the head at the client. Traffic: the representation down, the representation up. There is no global model.
    Values used: 10 and 1 epochs (CIFAR-10) or 5 (CIFAR-100) in its own paper, 1 and 4 in FedDW's code.

    Deviations
    ----------
    Averages
        Paper: uniform. Code: both occur. Here: ``federation.weighting``.
    Optimizer
        Code: one for both phases, SGD with momentum (Adam in FedDW's). Before PyTorch 2, the head drifts with it in the
        second phase. Here: each phase has its own optimizer and does not change the other's parameters.
    Weight decay
        Code: 1e-4, without biases. Here: ``federation.weight_decay``, with biases.
    Head of a client that never participated
        Code: the mean of the last round's heads. Here: the initial head.
    Heads at the end
        Code: all clients train their heads for 10 more epochs. Here: ``finetuned`` protocols do.
    Evaluated model
        Code: FedDW's evaluates each client's model as it was last trained. Here: the new representation with the old
        head. For FedDW's use ``kept-on-global``.

    Parameters
    ----------
    head_epochs
        Epochs of the head.
    body_epochs
        Epochs of the representation.
    """

    head_epochs: Annotated[int, Field(ge=0)] = 10
    body_epochs: Annotated[int, Field(ge=0)] = 1

    @property
    @override
    def local_steps_conflict(self) -> str | None:
        """It has parameters for the numbers of epochs."""
        return "whose length of training is set by head_epochs and body_epochs"

    @override
    def training_pass(self) -> Train:
        """The head."""
        return Train(self.loss, only=self.net.head_names)

    @override
    def local_passes(self) -> Sequence[Pass]:
        """The head, then the representation."""
        return (
            replace(self.training_pass(), epochs=self.head_epochs, stream="head"),
            Train(self.loss, only=self.net.body_names, epochs=self.body_epochs),
        )
