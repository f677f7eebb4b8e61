"""CFL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm, StudyFacts
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.model_stack import repeat_model, replace_models, select_model
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class CFL(Algorithm):
    r"""FedAvg per cluster. A cluster is bisected if its mean update is small but single updates are large.

    Source: Sattler, Mueller and Samek, Clustered Federated Learning, IEEE TNNLS 2021, and the authors' code.

    Method: all clients begin in one cluster. With :math:`\Delta_k` the updates of a round's participants in a cluster
    and their mean weighted as in FedAvg, the server splits the cluster in two if

    .. math::
        \Bigl\lVert mean_k \, \Delta_k \Bigr\rVert < \epsilon_1, \qquad \max_k \lVert \Delta_k \rVert > \epsilon_2,
        \qquad \sqrt{(1 - \alpha_{cross}) / 2} > \gamma,

    where :math:`\alpha_{cross}` is the highest cosine similarity of updates across the two parts. From that round on
    each part has its own model and average. Norms and similarities are of the trained parameters.

    State: one model slot for each client at the server, of which a cluster uses that of its lowest client, and the last
    updates of all clients. Traffic: the cluster's model down, a model up. There is no single global model.
    Values used: eps1 0.4, eps2 1.6 (authors' code), eps1 0.4, eps2 0.9 (cwFedAvg).

    A client that never participated receives the model of the cluster that contains the first client.

    Deviations
    ----------
    Clustering
        Code: agglomerative, of the cosine similarities with complete linkage. Here: as the code. Single linkage would
        minimize :math:`\alpha_{cross}`.
    Splits after the first
        Code: positions within the split cluster are used as numbers of clients, so that clients are in no cluster or in
        two. Here: each client is in one cluster.
    Averages
        Code: uniform, also of the mean update that eps1 limits. Here: ``federation.weighting``.
    Learning rate
        Code: times 0.99 in every round, also the first. Here: only ``federation.schedule`` changes it.
    Conditions of a split
        Paper: norms and the gap of similarities. Code: norms, after round 20, for clusters of at least three clients.
        Here: as the code, with ``after`` instead of 20. With ``gamma`` above 0, also the paper's gap. If
        ``federation.rounds`` is not larger than ``after``, CFL is FedAvg.
    Absent clients of a split cluster
        Here: assigned by their last update. Clients that have never uploaded stay with the part that contains the
        lowest index.
    Local optimizer
        Code: momentum persists over rounds. Here: the federation's optimizer, restarted in every round.
    Thresholds
        Paper: eps1 about a tenth of the largest norm. Here: fixed values. Norms depend on learning rate, epochs and
        model, so choose eps1 and eps2 by the recorded largest and mean norms.

    Parameters
    ----------
    eps1
        Split a cluster only if the norm of its mean update is smaller.
    eps2
        Split a cluster only if the largest norm of its clients' updates is larger.
    gamma
        Separation that a split must reach (paper). With 0 every split is allowed.
    after
        Split no cluster up to this round. It must be less than ``federation.rounds`` for any split.
    """

    eps1: Annotated[float, Field(ge=0)] = 0.4
    eps2: Annotated[float, Field(ge=0)] = 1.6
    gamma: Annotated[float, Field(ge=0, lt=1)] = 0.0
    after: Annotated[int, Field(ge=0)] = 20

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """All clients in one cluster, whose model is in the slot of client 0."""
        model, clients = initial_model(0), self.federation.clients
        parameters = self.net.parameters(model).flat()
        return {
            "models": repeat_model(model, clients),
            "cluster": torch.zeros(clients, dtype=torch.long),
            "updates": parameters.new_zeros(clients, len(parameters)),
            "seen": parameters.new_zeros(clients),
            "round": parameters.new_zeros(()),
            "norms": parameters.new_zeros(2),
        }

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model of each client's cluster."""
        slots = server["cluster"][list(ids)]
        return {}, {"model": server["models"].map(lambda value: value[slots])}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """Record the updates, split the clusters that are due, then average each cluster."""
        recorded = self._record_updates(server, uploads)
        cluster, norms = self._split_clusters(recorded, uploads)
        return recorded | {
            "models": self._average_clusters(server, cluster, uploads),
            "cluster": cluster,
            "norms": norms,
        }

    def _record_updates(self, server: State, uploads: Uploads) -> State:
        """The server's state with the participants' updates, before any split."""
        updates = server["updates"].clone()
        for client, _, upload in uploads:
            change = upload["model"] - select_model(server["models"], int(server["cluster"][client]))
            updates[client] = self.net.parameters(change).flat()
        return server | {"updates": updates, "seen": uploads.mark(server["seen"]), "round": server["round"] + 1}

    def _split_clusters(self, server: State, uploads: Uploads) -> tuple[Tensor, Tensor]:
        """Each client's cluster after the splits, and the largest norms of mean and single updates in a cluster."""
        cluster, updates, norms = server["cluster"].clone(), server["updates"], []
        for slot, cluster_uploads in _group_by_cluster(server["cluster"], uploads):
            cluster_updates = updates[list(cluster_uploads.ids)]
            mean_update = updates.new_tensor(cluster_uploads.weights) @ cluster_updates
            norms.append(torch.stack([mean_update.norm(), cluster_updates.norm(dim=1).max()]))
            members = torch.nonzero((server["cluster"] == slot) & (server["seen"] > 0)).flatten()
            if server["round"] > self.after and len(members) > 2 and self._is_heterogeneous(*norms[-1]):
                separated_clients = members[self.bipartition_updates(updates[members])]
                if len(separated_clients):
                    cluster[separated_clients] = separated_clients.min()
        return cluster, torch.stack(norms).amax(0)

    def _is_heterogeneous(self, mean_norm: Tensor, max_norm: Tensor) -> bool:
        """Whether a cluster has converged as a whole, but not each of its clients."""
        return bool(mean_norm < self.eps1 and max_norm > self.eps2)

    def bipartition_updates(self, updates: Tensor) -> Tensor:
        """Which ``updates``, shape (n, P), leave the first one's part, shape (n,). None do if gamma is not reached."""
        from sklearn.cluster import AgglomerativeClustering  # takes a second to import

        directions = F.normalize(updates, dim=1)
        similarity = directions @ directions.T
        clustering = AgglomerativeClustering(2, metric="precomputed", linkage="complete")
        labels = torch.as_tensor(clustering.fit_predict(1 - similarity.double().numpy()))
        is_separated = labels != labels[0]
        separation = ((1 - similarity[is_separated][:, ~is_separated].max()) / 2).clamp(min=0).sqrt()
        return is_separated & (separation > self.gamma)

    def _average_clusters(self, server: State, cluster: Tensor, uploads: Uploads) -> Tensors:
        """All slots, with the mean of each cluster, or the model before a split if no participant is in the part."""
        means = {slot: cluster_uploads.mean("model") for slot, cluster_uploads in _group_by_cluster(cluster, uploads)}
        slots = _list_used_clusters(cluster)
        models = [
            means[slot] if slot in means else select_model(server["models"], int(server["cluster"][slot]))
            for slot in slots
        ]
        return replace_models(server["models"], slots, models)

    @override
    def global_model(self, server: State) -> None:
        """Each cluster has its own model."""

    @override
    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """The number of clusters, and the largest norm of a cluster's mean update and of a client's update."""
        mean_norm, max_norm = server["norms"]
        clusters = torch.tensor(len(_list_used_clusters(server["cluster"])))
        return {"clusters": clusters, "mean_norm": mean_norm, "max_norm": max_norm}

    @override
    def warnings(self, study: StudyFacts, key: str) -> Sequence[str]:
        """A study that ends before the first split."""
        if self.after < study.rounds:
            return ()
        problem = f"{key}.after: {self.after} is not less than federation.rounds ({study.rounds})"
        return (f"{problem}, so no cluster is ever split and CFL is FedAvg.",)


def _list_used_clusters(cluster: Tensor) -> list[int]:
    """The slots in use, in ascending order."""
    return sorted(set(cluster.tolist()))


def _group_by_cluster(cluster: Tensor, uploads: Uploads) -> Iterator[tuple[int, Uploads]]:
    """The uploads of each cluster that has any."""
    for slot in _list_used_clusters(cluster):
        cluster_uploads = [entry for entry in uploads if int(cluster[entry[0]]) == slot]
        if cluster_uploads:
            yield slot, Uploads(*zip(*cluster_uploads, strict=True))
