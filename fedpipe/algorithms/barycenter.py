"""FedDUAL's dynamic aggregation: a Wasserstein barycenter of the updates of the last layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import StudyFacts
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Pass, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork

MAX_SINKHORN_SIZE = 10_000  #: values of a tensor, whose costs then have 800 MB


@dataclass(frozen=True, kw_only=True)
class Barycenter(FedAvg):
    """Part (ii) of FedDUAL, eq. 7-13: FedAvg with uniform means, except for the last layers."""

    excess_layers_effect: ClassVar[str] = "so the barycenter combines all layers"

    epsilon: Annotated[float, Field(gt=0)] = 1e-5
    iterations: Annotated[int, Field(ge=1)] | None = None
    layers: Annotated[int, Field(ge=1)] | Annotated[tuple[str, ...], Field(min_length=1)] = 1
    distance: Literal["exact", "sinkhorn"] = "exact"
    regularization: Annotated[float, Field(ge=0.002)] = 0.05  # below, the kernel exp(-1 / regularization) underflows
    vector: Literal["pseudo-gradient", "gradient"] | None = None
    dynamic_aggregation: bool = True

    @property
    def has_underflowing_kernel(self) -> bool:
        """Whether the kernel is not in the log domain, as in the authors' code."""
        return False

    @property
    def barycenter_parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters that the barycenter combines."""
        self._check_layer_names("algorithms.feddual", self.net)
        return self._list_parameter_names(self.net)

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model, and all participants as effective clients."""
        model = initial_model(0)
        one = next(iter(model.values())).new_ones(())
        effective = Tensors((name, one * self.federation.participants) for name in self.barycenter_parameter_names)
        return {"model": model, "effective": effective}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, and a sum of gradients."""
        gradient = download["model"].only(self.barycenter_parameter_names).zeros()
        return super().start(state, download, info) | {"gradient": gradient}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Training, then the gradient at the trained model if the barycenter combines gradients."""
        if not self.dynamic_aggregation or self.vector != "gradient":
            return super().local_passes()
        gradient_pass = Train(
            self.risk,
            only=self.barycenter_parameter_names,
            epochs=1,
            step=self.accumulate_gradient,
            stream="gradient",
            eval_mode=True,
        )
        return (*super().local_passes(), gradient_pass)

    def accumulate_gradient(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """Add the gradient of the batch's summed loss. The model does not change."""
        return client | {"gradient": client["gradient"] + batch.size() * gradient(client)}

    @override
    def upload(self, client: State) -> State:
        """The model, and the gradient if the barycenter combines gradients."""
        return super().upload(client) | ({"gradient": client["gradient"]} if self.vector == "gradient" else {})

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """Alg. 1, lines 17-24."""
        uploads, theta = uploads.with_equal_weights(), server["model"]
        model, effective, iterations = uploads.mean("model"), Tensors(), cast(int, self.iterations)
        for name in self.barycenter_parameter_names:
            vectors = torch.stack(self._list_updates(name, theta, uploads)).flatten(1)
            mixture, weights = compute_barycenter(
                vectors, self.epsilon, iterations, self.has_underflowing_kernel, self.compute_distances
            )
            model[name] = theta[name] - mixture.reshape(theta[name].shape)
            effective[name] = 1 / weights.square().sum()
        return {"model": model, "effective": effective}

    def compute_distances(self, b: Tensor, updates: Tensor) -> Tensor:
        """Distances, shape (m,), of the values of ``b``, shape (L,), to those of each of ``updates``, shape (m, L)."""
        if self.distance == "exact":
            return compute_exact_distances(b, updates)
        return compute_sinkhorn_distances(b, updates, self.regularization)

    def _list_updates(self, name: str, theta: Tensors, uploads: Uploads) -> list[Tensor]:
        """The clients' updates of one tensor: their gradients or their pseudo-gradients."""
        if self.vector == "gradient":
            return [gradient[name] for gradient in uploads["gradient"]]
        return [theta[name] - model[name] for model in uploads["model"]]

    @override
    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """The effective number of clients of each tensor of the last layers."""
        return {f"effective_clients.{name}": value for name, value in server["effective"].items()}

    @override
    def warnings(self, study: StudyFacts, key: str) -> Sequence[str]:
        """Too many layers. Unknown names of layers, and tensors that are too large for Sinkhorn, are an error."""
        if study.network is not None:
            self._check_layer_names(key, study.network)
            self._check_layer_sizes(key, study.network)
        return super().warnings(study, key) if self.dynamic_aggregation and isinstance(self.layers, int) else ()

    def _list_parameter_names(self, net: FunctionalNetwork) -> tuple[str, ...]:
        if not self.dynamic_aggregation:
            return ()
        if isinstance(self.layers, int):
            return net.last_layer_names(self.layers, buffers=False)
        return tuple(name for name in net.names if get_layer_name(name) in self.layers)

    def _check_layer_sizes(self, key: str, net: FunctionalNetwork) -> None:
        """Reject large tensors for Sinkhorn, whose memory is quadratic in their size."""
        model = net.make_initial_model(0) if self.distance == "sinkhorn" else {}
        for name in self._list_parameter_names(net) if model else ():
            if (size := model[name].numel()) > MAX_SINKHORN_SIZE:
                raise SettingsError(
                    f"{key}.distance: 'sinkhorn' can't be used with the {size:,} values of {name}, because it compares "
                    f"each pair of values. Use 'exact', or layers with at most {MAX_SINKHORN_SIZE:,} values each."
                )

    def _check_layer_names(self, key: str, net: FunctionalNetwork) -> None:
        layer_names = list(dict.fromkeys(map(get_layer_name, net.names)))
        for name in () if isinstance(self.layers, int) else self.layers:
            if name not in layer_names:
                raise SettingsError(
                    f"{key}.layers: the network has no layer '{name}'. {suggest_name(name, layer_names)}"
                )


def get_layer_name(name: str) -> str:
    """The layer that a tensor belongs to."""
    return name.rpartition(".")[0]


def compute_exact_distances(b: Tensor, updates: Tensor) -> Tensor:
    """Wasserstein-1 distances of the values of ``b``, shape (L,), and of ``updates``, shape (m, L): shape (m,)."""
    return (b.sort().values - updates.sort(1).values).abs().mean(1)  # equal lengths: compare by rank


def compute_sinkhorn_distances(b: Tensor, updates: Tensor, regularization: float) -> Tensor:
    """The same distances with the transport plan of Sinkhorn and Knopp instead of the optimal one.

    The entropy of the plan has the weight ``regularization``, as a fraction of the largest difference of two values.
    """
    import ot

    distances = []
    for update in updates.double():
        costs = (b.double().unsqueeze(1) - update).abs()
        largest = costs.max().clamp(min=torch.finfo(torch.float64).tiny)
        distances.append(largest * ot.sinkhorn2([], [], costs / largest, regularization))
    return torch.stack(distances).to(b.dtype)


def compute_barycenter(
    updates: Tensor,
    epsilon: float,
    iterations: int,
    has_underflowing_kernel: bool = False,
    compute_distances: Callable[[Tensor, Tensor], Tensor] = compute_exact_distances,
) -> tuple[Tensor, Tensor]:
    """Eq. 12-13 in the log domain: the kernel-weighted mean of m vectors, shape (m, L), and its m weights.

    With ``has_underflowing_kernel`` the mean becomes 0 when the kernel underflows, as in the authors' code.
    """
    b = updates.mean(0)
    weights = updates.new_full((len(updates),), 1 / len(updates))
    for _ in range(iterations):
        distances = compute_distances(b, updates)
        weights = (-distances / epsilon).softmax(0)
        previous, b = b, weights @ updates
        if has_underflowing_kernel:
            kernel = (-distances / epsilon).exp().mean()
            b = b * kernel / (kernel + 1e-10)
        if torch.equal(previous, b):
            break
    return b, weights
