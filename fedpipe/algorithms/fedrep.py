"""FedRep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.passes import Pass, Train


@dataclass(frozen=True, kw_only=True)
class FedRep(SharedBody):
    r"""A shared representation and personal heads; each client trains its head first, then the representation.

    Source: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021, Alg. 1.
    From the downloaded representation :math:`\phi^t`, client k fits its own head h, then the representation under it:

    .. math::
        h_k \leftarrow \arg\min_h F_k(\phi^t, h), \qquad
        \phi_k \leftarrow \arg\min_\phi F_k(\phi, h_k), \qquad
        \phi^{t+1} = \sum_{k \in S} w_k \phi_k ,

    by ``head_epochs`` and ``body_epochs`` epochs, which stand in for the federation's local epochs. Each phase has an
    optimizer of its own and leaves the other's parameters bit by bit as they are (one Adam for both, as in FedDW's
    code, would let the head drift in the second phase).

    State: the head at the client. Traffic: the representation down, the representation up; there is no global model.
    Fine-tuning trains the head alone, as all clients do at the end of the authors' code (there: 10 epochs), which also
    gives a head to those who never took part. Deviations: the paper takes uniform means; here the study's weighting
    holds (the authors' code has both). FedDW's code measures each client's model as it was last trained
    (``kept-on-global``). Values used: 10 and 1 epochs (CIFAR-10) or 5 (CIFAR-100) in its own paper, 1 and 4 in FedDW's
    code.

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
    def local_steps_refusal(self) -> str | None:
        """It counts its own."""
        return "whose head_epochs and body_epochs say how long it trains"

    def local_passes(self) -> Sequence[Pass]:
        """The head, then the representation."""
        return (
            Train(self.loss, only=self.net.head_names, epochs=self.head_epochs, stream="head"),
            Train(self.loss, only=self.net.body_names, epochs=self.body_epochs),
        )

    def finetune(self, epochs: int) -> Sequence[Pass]:
        """The head alone."""
        return (Train(self.loss, only=self.net.head_names, epochs=epochs, stream="finetune"),)
