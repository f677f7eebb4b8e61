"""FedPVR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fedpipe.algorithms.scaffold import Scaffold
from fedpipe.settings.params import Params


@dataclass(frozen=True, kw_only=True)
class FedPVR(Scaffold):
    r"""SCAFFOLD's variance reduction on the last layers only, where clients differ most.

    Source: Li et al., On the Effectiveness of Partial Variance Reduction in Federated Learning with Heterogeneous Data,
    CVPR 2023, Alg. 1. With V the parameters of the last ``layers`` layers,

    .. math:: y_V \leftarrow y_V - \eta \, (\nabla_V F_k(y) - c_k + c), \qquad
              y_{\bar V} \leftarrow \text{a step of the federation's optimizer},

    so that momentum acts outside V only (the authors use 0.9 there and none inside); controls and averages are
    SCAFFOLD's.

    State: :math:`c_k` and :math:`c` on V. Traffic: the model and V down, the model and V up.
    Values used by the authors: the output layer (ResNet-8), the three fully connected layers (VGG-11). FedDUAL does not
    say what it used.

    Parameters
    ----------
    layers
        How many parametrized layers, from the output, are corrected; with all of them it is SCAFFOLD, with 0 FedAvg of
        equal weights.
    server_rate
        The server's step :math:`\eta_g`.
    adam
        Obey ``federation.optimizer: adam``; see SCAFFOLD.
    """

    unsupported_settings: ClassVar[tuple[str, ...]] = ()  # outside V, steps are the federation's

    layers: Annotated[int, Field(ge=0)] = 1

    @property
    def corrected_names(self) -> tuple[str, ...]:
        """Names of V's parameters."""
        return self.net.last_layer_names(self.layers, buffers=False)

    def warnings(self, params: Params, key: str) -> Sequence[str]:
        """Layers that do not exist, and momentum that acts nowhere."""
        layers_key, momentum = f"{key}.layers", params.federation.momentum
        is_momentum_unused = momentum and self.layers >= (self.summarize_network(params).layer_count or self.layers + 1)
        momentum_warnings = (
            f"{layers_key}: {self.layers} corrects all layers, so that federation.momentum ({momentum}) acts nowhere.",
        )
        layer_warnings = self.warn_about_layers(
            params, layers_key, self.layers, "so that all are corrected, which is SCAFFOLD"
        )
        return (*layer_warnings, *(momentum_warnings if is_momentum_unused else ()))
