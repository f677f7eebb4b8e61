"""FedPAC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.class_means import compute_class_means
from fedpipe.algorithms.model_stack import repeat_model
from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.passes import Measure, Pass, Train
from fedpipe.algorithms.prototypes import compute_prototype_loss, store_prototypes
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors

RIDGE = 1e-12  #: added to the diagonal, relative to the trace, so that every problem has one solution


@dataclass(frozen=True, kw_only=True)
class FedPAC(SharedBody):
    r"""Aligns features to global prototypes, and combines the heads of clients with similar features for each client.

    Source: Xu, Tong and Huang, Personalized Federated Learning with Feature Alignment and Classifier Collaboration,
    ICLR 2023, Alg. 1.

    Method: client k trains its head for one epoch, then the body under it on
    :math:`F_k + \frac{\lambda}{d} mean_x \lVert f(x) - \bar C_y \rVert^2`, with prototypes :math:`\bar C_c` averaged by
    counts. Client k's next head is :math:`\sum_j \alpha_{kj} h_j`. With :math:`p_{jc}` the fraction of class c,
    :math:`\mu_{jc}` its mean feature by the downloaded body and :math:`\phi_{jc} = p_{jc} \mu_{jc}`,

    .. math::
        \alpha_k = \arg\min_{\alpha \ge 0, \; \sum_j \alpha_j = 1} \sum_j \alpha_j^2 V_j
        + \sum_c \Bigl\lVert \phi_{kc} - \sum_j \alpha_j \phi_{jc} \Bigr\rVert^2, \qquad
        V_j = \frac{1}{n_j} \Bigl( mean_x \lVert f(x) \rVert^2 - \sum_c \lVert \phi_{jc} \rVert^2 \Bigr) .

    State: all heads and the prototypes at the server. Traffic: the model, C x d and C flags down. The model, two times
    C x d, C counts and a variance up. There is no global model. Value of lambda used: 1.

    A client that never participated receives the body and has the initial head.

    Deviations
    ----------
    Solver of :math:`\alpha`
        Code: an approximate one. It sets weights below 0.001 to 0, and drops small eigenvalues if one is negative.
        Here: exact, by non-negative least squares. A client whose statistics are not finite has its own head.
    Learning rate of the head
        Code: 0.1, five or ten times that of the body. PFLlib: that of the body. Here: that of the body.
    Prototypes of a class
        Paper: averaged by counts. PFLlib: uniform. Here: as the paper.
    Classes without a global prototype
        Code: an error, or the client's prototype before training. PFLlib: no pull. Here: no pull. A class without
        samples in a round has its last prototype.
    Mode of the model
        Code: the authors' trains in evaluation mode, and measures the statistics of a client's first round in training
        mode. PFLlib's trains in training mode. Here: training in training mode, statistics and prototypes in
        evaluation mode, without augmentation.
    Combination of heads
        Code: PFLlib's replaces heads while it combines those of the next clients. Here: of the uploaded heads.

    Parameters
    ----------
    penalty
        Strength lambda of the pull to the prototypes.
    head_epochs
        Epochs of the head, before the federation's epochs or steps of the body.
    """

    penalty: Annotated[float, Field(ge=0)] = 1.0
    head_epochs: Annotated[int, Field(ge=0)] = 1

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The body, the same head for all clients, and no prototypes."""
        model = initial_model(0)
        heads = repeat_model(model.only(self.personal_tensor_names), self.federation.clients)
        weight = model["head.weight"]
        prototypes = {"prototypes": torch.zeros_like(weight), "known": weight.new_zeros(len(weight))}
        return super().init(initial_model) | {"heads": heads} | prototypes

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """Nothing, because the server has the heads."""
        return {}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The body and the prototypes, and each client's head."""
        common = {name: server[name] for name in ("body", "prototypes", "known")}
        return common, {"head": server["heads"].map(lambda value: value[list(ids)])}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The personal model, the global prototypes, and empty statistics."""
        zeros, counts = torch.zeros_like(download["prototypes"]), info.class_counts
        statistics = {"phi": zeros, "variance": torch.zeros_like(info.size), "own": zeros, "counts": counts}
        prototypes = {"prototypes": download["prototypes"], "known": download["known"]}
        return super().start({"head": download["head"]}, download, info) | prototypes | statistics

    @override
    def training_pass(self) -> Train:
        """The head."""
        return Train(self.risk, only=self.net.head_names)

    @override
    def local_passes(self) -> Sequence[Pass]:
        """The statistics of the downloaded body, then the head, the body and the client's prototypes."""
        return (
            Measure(self.sum_features, self.store_statistics),
            replace(self.training_pass(), epochs=self.head_epochs, stream="head"),
            Train(self.loss, only=self.net.body_names),
            Measure(self.sum_features, store_prototypes),
        )

    def sum_features(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Sums of the features by class, and of their squared norms."""
        z = self.net.features(client["model"], batch.x)
        return {"sums": batch.class_sums(z, len(client["counts"])), "squares": batch.sum(z.square().sum(-1))}

    def store_statistics(self, client: State, sums: dict[str, Tensor]) -> State:
        """The class means times the fractions of the classes, and the variance."""
        size = client["counts"].sum()
        phi = sums["sums"] / size
        return client | {"phi": phi, "variance": (sums["squares"] / size - phi.square().sum()) / size}

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the pull to the prototypes."""
        return compute_prototype_loss(self.net, client, batch, self.penalty)

    @override
    def upload(self, client: State) -> State:
        """The model, the statistics, and the prototypes with their counts."""
        head = client["model"].only(self.personal_tensor_names)
        statistics = {name: client[name] for name in ("phi", "variance", "own", "counts")}
        return super().upload(client) | {"head": head} | statistics

    @override
    def keep(self, client: State) -> State:
        """Nothing, because the server has the heads."""
        return {}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean of the bodies, the participants' combined heads, and the mean prototypes."""
        weights = compute_head_weights(torch.stack(uploads["phi"]), torch.stack(uploads["variance"]))
        ids = torch.tensor(uploads.ids)
        heads = Tensors()
        for name, value in server["heads"].items():
            trained = torch.stack([head[name] for head in uploads["head"]])
            heads[name] = value.index_copy(0, ids, torch.tensordot(weights, trained, 1))
        has_class = (sum(uploads["counts"]) > 0).to(server["known"].dtype)
        return super().aggregate(server, uploads) | {
            "heads": heads,
            "prototypes": compute_class_means(uploads["own"], uploads["counts"], default=server["prototypes"]),
            "known": torch.maximum(server["known"], has_class),
        }

    @override
    def global_model(self, server: State) -> None:
        """Each client has its own head."""


def compute_head_weights(phi: Tensor, variances: Tensor) -> Tensor:
    """The weights alpha of m clients' heads for each of them, shape (m, m).

    Parameters
    ----------
    phi
        Mean features of each class times the fraction of the class, shape (m, C, d).
    variances
        V, shape (m,).
    """
    vectors, rows = phi.flatten(1).double(), []
    for index, vector in enumerate(vectors):
        differences = vectors - vector
        matrix = differences @ differences.T + variances.double().clamp(min=0).diag()
        if matrix.isfinite().all():
            rows.append(minimize_on_simplex(matrix))
        else:
            rows.append(torch.eye(len(vectors), dtype=matrix.dtype)[index])
    return torch.stack(rows).to(phi.dtype)


def minimize_on_simplex(matrix: Tensor) -> Tensor:
    r"""The point of the simplex that minimizes :math:`\alpha^T P \alpha`, shape (m,), for a PSD matrix of shape (m, m).

    It is :math:`\beta / \sum \beta` with :math:`\beta \ge 0` the minimizer of :math:`\beta^T P \beta / 2 - \sum \beta`,
    which has the same optimality conditions and is a problem of non-negative least squares.
    """
    from scipy.optimize import nnls

    scale = matrix.trace().clamp(min=torch.finfo(matrix.dtype).tiny)
    factor = torch.linalg.cholesky(matrix / scale + RIDGE * torch.eye(len(matrix), dtype=matrix.dtype))
    target = torch.linalg.solve_triangular(factor, torch.ones_like(factor[:, :1]), upper=False).flatten()
    solution, _ = nnls(np.asarray(factor.T), np.asarray(target))
    return torch.as_tensor(solution / solution.sum())
