"""FedPVR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.base import StudyFacts
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.passes import Gradient
from fedpipe.algorithms.scaffold import Scaffold
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedPVR(Scaffold):
    r"""SCAFFOLD's variance reduction on the last layers only, where clients differ most.

    Source: Li et al., On the Effectiveness of Partial Variance Reduction in Federated Learning with Heterogeneous Data,
    CVPR 2023, Alg. 1.

    Method: with V the parameters of the last ``layers`` layers,

    .. math:: y_V \leftarrow y_V - \eta \, (\nabla_V F_k(y) - c_k + c), \qquad
              y_{\bar V} \leftarrow \text{a step of the federation's optimizer},

    so that momentum acts only outside V (the authors use 0.9 there and none inside). Controls and averages are
    SCAFFOLD's.

    State: :math:`c_k` and :math:`c` on V. Traffic: the model and V down, the model and V up.
    Values used by the authors: the output layer (ResNet-8), the three fully connected layers (VGG-11). FedDUAL does not
    report its value.

    Deviations
    ----------
    Local optimizer and clipping
        Paper: SGD. Here: see SCAFFOLD, except that momentum is allowed.
    Weight decay
        Code: FedPVR and SCAFFOLD have none, FedAvg has one. Here: ``federation.weight_decay``.

    Parameters
    ----------
    layers
        How many parametrized layers, from the output, are corrected. All of them give SCAFFOLD, 0 gives FedAvg with
        equal weights.
    server_rate
        The server's step :math:`\eta_g`.
    adam
        Whether ``federation.optimizer: adam`` is allowed. See SCAFFOLD.
    """

    unsupported_settings: ClassVar[tuple[str, ...]] = ()  # momentum acts outside V
    excess_layers_effect: ClassVar[str] = "so all layers are corrected, which is SCAFFOLD"

    layers: Annotated[int, Field(ge=0)] = 1

    @property
    @override
    def corrected_parameter_names(self) -> tuple[str, ...]:
        """Names of V's parameters."""
        return self.net.last_layer_names(self.layers, buffers=False)

    @override
    def descend(self, client: State, direction: Tensors, gradient: Gradient) -> State:
        """The client after a step of the federation's optimizer, with a step of plain SGD on V."""
        federation, new_client = self.federation, super().descend(client, direction, gradient)
        if federation.optimizer == "adam" or not federation.momentum:
            return new_client
        y = client["model"].only(self.corrected_parameter_names)
        direction = direction.clipped(federation.clip_norm).only(y)
        y = y - federation.learning_rate * (direction + federation.weight_decay * y)
        return new_client | {"model": new_client["model"] | y}

    @override
    def warnings(self, study: StudyFacts, key: str) -> Sequence[str]:
        """Too many layers, and momentum without an effect."""
        warnings, momentum = super().warnings(study, key), study.momentum
        if not momentum or study.network is None or self.layers < len(study.network.layers()):
            return warnings
        problem = f"{key}.layers: {self.layers} corrects all layers"
        return (*warnings, f"{problem}, so federation.momentum ({momentum}) has no effect.")
