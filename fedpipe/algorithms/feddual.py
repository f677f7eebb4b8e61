"""FedDUAL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Measure, Pass, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork
from fedpipe.settings.params import Params

CODE_SETTINGS: dict[str, Any] = {"vector": "gradient", "iterations": 1000, "layers": 1}
MODE_SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"vector": "pseudo-gradient", "iterations": 150},
    "code": CODE_SETTINGS,
}


@dataclass(frozen=True, kw_only=True)
class FedDUAL(FedAvg):
    r"""An adaptive loss at the clients, and a Wasserstein barycenter of the last layers' updates at the server.

    Source: Sahoo et al., FedDUAL: A Dual-Strategy with Adaptive Loss and Dynamic Aggregation for Mitigating Data
    Heterogeneity in Federated Learning, 2025, eq. 3-13, Alg. 1.

    (i) With p and q the softmax over all trained weights of the local and the global model and A the accuracies on the
    client's training data, the client minimizes, with :math:`\beta` measured anew before each epoch,

    .. math:: (1 - \beta) F_k + \beta \sum_i p_i \log (p_i / q_i), \qquad
              \beta = \sigma(A_{local} - A_{global}).

    (ii) For each tensor of the last layers, with :math:`x_k` the client's update, the server starts at the mean and
    repeats

    .. math:: b \leftarrow \sum_k \gamma_k x_k / \sum_k \gamma_k, \qquad \gamma_k = \exp(-W(b, x_k) / \epsilon),

    and moves the tensor by -b; all other tensors are the uniform mean of the clients'. W is the exact 1-D
    Wasserstein-1 distance between the values of two tensors, as in the authors' code; the weights are a softmax in the
    log domain, since :math:`\gamma` underflows. At the paper's :math:`\epsilon` of 1e-5 the rule picks the client
    nearest to the mean; the effective number of clients :math:`1 / \sum w_k^2` is recorded every round.

    In both averages clients count alike, by definition of the method.

    Since beta lies between 0.27 and 0.73 and the divergence's gradient is tiny, (i) acts mostly as a factor of about a
    half on the risk: with SGD, as about half the learning rate. Running statistics are no weights. Of a network with a
    frozen base (VGG16) p and q are over what is left to train; the authors' code flattens the frozen weights too, which
    are equal in both models and only dilute the divergence of the others.

    ``mode: code`` follows the authors' code where it differs. (i) It measures A_local and takes p before anything is
    trained, so that beta is 1/2, the divergence 0 without a gradient, and the loss half the risk. (ii) Its kernel is
    not in the log domain: with mean kernel g it shrinks b by g / (g + 1e-10), to 0 where all distances are beyond some
    25 epsilon, which leaves the tensor as it was. With it come ``vector: gradient``, ``iterations: 1000`` and
    ``layers: 1``, and other values are refused, since no code has them.

    State: none. Traffic: the model down, the model up (with ``vector: gradient`` also the last layers' gradients).
    Deviations: the paper says "the last two layers", its code takes the output layer's weight and bias (``layers: 1``);
    A_global is measured as the round begins; when A_local is, it does not say (here: before each epoch). The gradient
    of ``vector: gradient`` is taken, as accuracies are, in evaluation mode and of images as they are.
    Values used: epsilon 1e-5 (1e-4 in another sentence), 150 iterations, two layers; 1e-5, 1000 and one in its code.

    Parameters
    ----------
    epsilon
        Width of the kernel.
    iterations
        At most so many fixed-point iterations; they end when b stands still. By default 150 (paper), 1000 (code).
    layers
        How many parametrized layers, from the output, the barycenter combines; or their names, as [body.0, head].
    mode
        The paper's definition, or the authors' code; see above.
    vector
        What the barycenter combines: the pseudo-gradient theta^t - theta_k (the paper's proof), or the gradient of the
        summed loss over the client's data at the trained model (Alg. 1 and code). By default the mode's.
    adaptive_loss, dynamic_aggregation
        Parts (i) and (ii); without one of them it is the paper's ablation.
    """

    epsilon: Annotated[float, Field(gt=0)] = 1e-5
    iterations: Annotated[int, Field(ge=1)] | None = None
    layers: Annotated[int, Field(ge=1)] | Annotated[tuple[str, ...], Field(min_length=1)] = 1
    mode: Literal["paper", "code"] = "paper"
    vector: Literal["pseudo-gradient", "gradient"] | None = None
    adaptive_loss: bool = True
    dynamic_aggregation: bool = True

    def __post_init__(self) -> None:
        for name, value in MODE_SETTINGS[self.mode].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        conflicts = [
            f"{name}: {getattr(self, name)}" for name, value in CODE_SETTINGS.items() if getattr(self, name) != value
        ]
        if self.mode == "code" and conflicts:
            required_settings = ", ".join(f"{name}: {value}" for name, value in CODE_SETTINGS.items())
            raise ValueError(
                f"{', '.join(conflicts)} can't be used with mode: code, which is {required_settings}; leave it to the "
                "mode."
            )

    @property
    def local_steps_refusal(self) -> str | None:
        """Beta is measured before each."""
        return "whose adaptive loss is weighed anew before each epoch" if self._has_adaptive_beta else None

    @property
    def _has_adaptive_beta(self) -> bool:
        return self.adaptive_loss and self.mode == "paper"

    @property
    def barycenter_names(self) -> tuple[str, ...]:
        """Names of the parameters that the barycenter combines."""
        if not self.dynamic_aggregation:
            return ()
        if isinstance(self.layers, int):
            return self.net.last_layer_names(self.layers, buffers=False)
        self._check_layer_names("algorithms.feddual", self.net)
        return tuple(name for name in self.net.names if get_layer_name(name) in self.layers)

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """The model, and all clients effective."""
        model = fresh(0)
        one = next(iter(model.values())).new_ones(())
        return {
            "model": model,
            "effective": Tensors((name, one * self.federation.participants) for name in self.barycenter_names),
        }

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The global model, to train, and to compare with."""
        model, zero = received["model"], torch.zeros_like(info.size)
        return {
            "model": model,
            "anchor": self.net.parameters(model).flat(),
            "global_accuracy": zero,
            "beta": zero,
            "gradient": model.only(self.barycenter_names).zeros(),
        }

    def local_passes(self) -> Sequence[Pass]:
        """The global accuracy; then beta and one epoch, again and again."""
        passes: list[Pass] = [Train(self.loss)]
        if self._has_adaptive_beta:
            epoch = (Measure(self.count_correct, self.compute_beta), Train(self.loss, step=self.step, epochs=1))
            passes = [
                Measure(self.count_correct, self.store_global_accuracy),
                *epoch * cast(int, self.federation.local_epochs),
            ]
        if self.dynamic_aggregation and self.vector == "gradient":
            gradient_pass = Train(
                self.risk,
                only=self.barycenter_names,
                epochs=1,
                step=self.accumulate_gradient,
                stream="gradient",
                eval_mode=True,
            )
            passes.append(gradient_pass)
        return passes

    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk, as much as eq. 5 has of it; beta is 0 where it was not measured, as in fine-tuning."""
        if not self.adaptive_loss:
            return self.risk(client, batch)
        return (
            (1 - client["beta"]) * self.risk(client, batch) if self._has_adaptive_beta else self.risk(client, batch) / 2
        )

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """A step of the federation's optimizer along the gradient of eq. 5."""
        g, theta = gradient(client)[0], self.net.parameters(client["model"])
        divergence = client["beta"] * compute_divergence_gradient(theta.flat(), client["anchor"])
        return gradient.descend(client, g + theta.unflat(divergence))

    def count_correct(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Number of samples that the client's model gets right, and of all."""
        is_correct = self.net(client["model"], batch.x).argmax(-1) == batch.y
        return {"right": batch.sum(is_correct.to(client["beta"].dtype)), "all": batch.size()}

    def store_global_accuracy(self, client: State, sums: dict[str, Tensor]) -> State:
        """The global model's accuracy."""
        return client | {"global_accuracy": sums["right"] / sums["all"]}

    def compute_beta(self, client: State, sums: dict[str, Tensor]) -> State:
        """Eq. 6: beta from the local model's accuracy."""
        return client | {"beta": torch.sigmoid(sums["right"] / sums["all"] - client["global_accuracy"])}

    def accumulate_gradient(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """Adds the gradient of the batch's summed loss; the model stays."""
        return client | {"gradient": client["gradient"] + batch.size() * gradient(client)[0]}

    def upload(self, client: State) -> State:
        """The model, and the gradient where it is asked for."""
        extra = {"gradient": client["gradient"]} if self.vector == "gradient" else {}
        return {"model": client["model"]} | extra

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """Alg. 1, lines 17-24."""
        uploads, theta = uploads.uniform(), server["model"]
        model, effective = uploads.mean("model"), Tensors()
        for name in self.barycenter_names:
            if self.vector == "gradient":
                updates = [upload["gradient"][name] for _, _, upload in uploads]
            else:
                updates = [theta[name] - upload["model"][name] for _, _, upload in uploads]
            vectors, has_underflow = torch.stack(updates).flatten(1), self.mode == "code"
            mixture, weights = compute_barycenter(vectors, self.epsilon, cast(int, self.iterations), has_underflow)
            model[name] = theta[name] - mixture.reshape(theta[name].shape)
            effective[name] = 1 / weights.square().sum()
        return {"model": model, "effective": effective}

    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """The effective number of clients behind each tensor of the last layers."""
        return {f"effective_clients.{name}": value for name, value in server["effective"].items()}

    def warnings(self, params: Params, key: str) -> Sequence[str]:
        """Layers that do not exist, which names of some may not be."""
        if not isinstance(self.layers, int):
            try:
                info, model = params.dataset.facts, params.model
                net = FunctionalNetwork(
                    lambda: self.adapt(model.build_without_weights(info.shape, info.classes)), device="meta"
                )
            except Exception:  # a user's own model that can't be built here: its jobs will say why
                return ()
            self._check_layer_names(key, net)
            return ()
        layers = self.layers if self.dynamic_aggregation else 0
        return self.warn_about_layers(params, f"{key}.layers", layers, "so that the barycenter combines all of them")

    def _check_layer_names(self, key: str, net: FunctionalNetwork) -> None:
        layer_names = list(dict.fromkeys(map(get_layer_name, net.names)))
        for name in () if isinstance(self.layers, int) else self.layers:
            if name not in layer_names:
                raise SettingsError(
                    f"{key}.layers: the network has no layer '{name}'; {suggest_name(name, layer_names)}"
                )


def get_layer_name(name: str) -> str:
    """The layer that a tensor belongs to."""
    return name.rpartition(".")[0]


def compute_divergence_gradient(local: Tensor, anchor: Tensor) -> Tensor:
    r"""Gradient of eq. 4 in the local weights; both arguments are vectors, shape (L,), and so is the gradient.

    With d the difference of the two, :math:`\log (p_i / q_i)` is :math:`d_i` but for a constant, and the gradient of
    their divergence :math:`p_i (d_i - \sum_j p_j d_j)`.
    """
    p, d = local.softmax(0), local - anchor
    return p * (d - p.dot(d))


def compute_barycenter(
    updates: Tensor, epsilon: float, iterations: int, has_underflow: bool = False
) -> tuple[Tensor, Tensor]:
    """Eq. 12-13 in the log domain: the kernel-weighted mean of m vectors, shape (m, L), and its m weights.

    With ``has_underflow``, the mean vanishes with the kernel, as in the authors' code.
    """
    sorted_updates, b = updates.sort(1).values, updates.mean(0)
    weights = updates.new_full((len(updates),), 1 / len(updates))
    for _ in range(iterations):
        distances = (b.sort().values - sorted_updates).abs().mean(1)  # of as many values each: rank by rank
        weights = (-distances / epsilon).softmax(0)
        previous, b = b, weights @ updates
        if has_underflow:
            kernel = (-distances / epsilon).exp().mean()
            b = b * kernel / (kernel + 1e-10)
        if torch.equal(previous, b):
            break
    return b, weights
