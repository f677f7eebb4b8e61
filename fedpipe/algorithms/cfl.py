"""CFL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.model_stack import repeat_model, replace_models, select_model
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.settings.params import Params


@dataclass(frozen=True, kw_only=True)
class CFL(Algorithm):
    r"""FedAvg per cluster; a cluster is bisected once its mean update is small but single updates stay large.

    Source: Sattler, Mueller and Samek, Clustered Federated Learning, IEEE TNNLS 2021, and the authors' code.
    With :math:`\Delta_k` the updates of a round's participants in a cluster c, their mean weighted as in FedAvg, c is
    split when

    .. math::
        \Bigl\lVert mean_k \, \Delta_k \Bigr\rVert < \epsilon_1, \qquad \max_k \lVert \Delta_k \rVert > \epsilon_2,
        \qquad \sqrt{(1 - \alpha_{cross}) / 2} > \gamma,

    by agglomerative clustering of the updates' cosine similarities with complete linkage (authors' code);
    :math:`\alpha_{cross}` is the highest similarity across the two parts, which single linkage would make smallest. A
    part is averaged by itself from that round on. Clusters of one or two clients stay whole, and so do all in the first
    ``after`` rounds (authors' code): where ``federation.rounds`` is no more than that, CFL is FedAvg.

    Of a cluster that is split, clients that are not in the round go by their last update; who never uploaded goes with
    the part of the lowest index. Norms and similarities are of trained parameters.

    State: a slot for each client at the server, of which a cluster's lowest client holds its model, and all clients'
    last updates. Traffic: the cluster's model down, a model up; there is no single global model. Deviations: the
    federation's optimizer starts afresh in every round (the authors' momentum persists). Norms depend on learning rate,
    epochs and model, so thresholds do not carry over: the recorded largest and mean norms show where they would lie
    (the paper: eps1 about a tenth of the largest norm).
    Values used: eps1 0.4, eps2 1.6 (authors' code), eps1 0.4, eps2 0.9 (cwFedAvg).

    Parameters
    ----------
    eps1
        A cluster rests where its mean update is shorter.
    eps2
        Its clients disagree where the longest update is longer.
    gamma
        Separation that a split must reach (paper); at 0 any will do.
    after
        No cluster is split up to this round; to see any split, it must be less than ``federation.rounds``.
    """

    eps1: Annotated[float, Field(ge=0)] = 0.4
    eps2: Annotated[float, Field(ge=0)] = 1.6
    gamma: Annotated[float, Field(ge=0, lt=1)] = 0.0
    after: Annotated[int, Field(ge=0)] = 20

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """All clients in one cluster, whose model lies in the slot of client 0."""
        model, clients = fresh(0), self.federation.clients
        parameters = self.net.parameters(model).flat()
        return {
            "models": repeat_model(model, clients),
            "cluster": torch.zeros(clients, dtype=torch.long),
            "updates": parameters.new_zeros(clients, len(parameters)),
            "seen": parameters.new_zeros(clients),
            "round": parameters.new_zeros(()),
            "norms": parameters.new_zeros(2),
        }

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model of each client's cluster."""
        slots = server["cluster"][list(ids)]
        return {}, {"model": server["models"].map(lambda value: value[slots])}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """Clusters that are due are split; then each is averaged."""
        models, cluster, number = server["models"], server["cluster"], server["round"] + 1
        updates, has_uploaded = server["updates"].clone(), server["seen"].index_fill(0, torch.tensor(uploads.ids), 1)
        for client, _, upload in uploads:
            change = upload["model"] - select_model(models, int(cluster[client]))
            updates[client] = self.net.parameters(change).flat()
        new_cluster, norms = cluster.clone(), []
        for slot, cluster_uploads in _group_by_cluster(cluster, uploads):
            weights = updates.new_tensor(cluster_uploads.weights)
            cluster_updates = updates[list(cluster_uploads.ids)]
            norms.append(torch.stack([(weights @ cluster_updates).norm(), cluster_updates.norm(dim=1).max()]))
            members = torch.nonzero((cluster == slot) & (has_uploaded > 0)).flatten()
            if number > self.after and len(members) > 2 and norms[-1][0] < self.eps1 and norms[-1][1] > self.eps2:
                separated_clients = members[self.bipartition(updates[members])]
                if len(separated_clients):
                    new_cluster[separated_clients] = separated_clients.min()
        means = {
            slot: cluster_uploads.mean("model") for slot, cluster_uploads in _group_by_cluster(new_cluster, uploads)
        }
        slots = _list_clusters(new_cluster)
        new_models = [means[slot] if slot in means else select_model(models, int(cluster[slot])) for slot in slots]
        return {
            "models": replace_models(models, slots, new_models),
            "cluster": new_cluster,
            "updates": updates,
            "seen": has_uploaded,
            "round": number,
            "norms": torch.stack(norms).amax(0),
        }

    def bipartition(self, updates: Tensor) -> Tensor:
        """Which ``updates``, shape (n, P), leave the first one's part, shape (n,); none where gamma is not reached."""
        from sklearn.cluster import AgglomerativeClustering  # takes a second to import

        directions = F.normalize(updates, dim=1)
        similarity = directions @ directions.T
        clustering = AgglomerativeClustering(2, metric="precomputed", linkage="complete")
        labels = torch.as_tensor(clustering.fit_predict(1 - similarity.double().numpy()))
        is_separated = labels != labels[0]
        separation = ((1 - similarity[is_separated][:, ~is_separated].max()) / 2).clamp(min=0).sqrt()
        return is_separated & (separation > self.gamma)

    def global_model(self, server: State) -> None:
        """There are clusters' models and none that is global."""

    def metrics(self, server: State) -> Mapping[str, Tensor]:
        """Clusters; and, of the cluster where it is largest, the mean update's norm and the longest update's."""
        mean, longest = server["norms"]
        return {
            "clusters": torch.tensor(len(_list_clusters(server["cluster"]))),
            "mean_norm": mean,
            "max_norm": longest,
        }

    def warnings(self, params: Params, key: str) -> Sequence[str]:
        """In a study that ends before the first split there is one cluster."""
        rounds = params.federation.rounds
        if self.after < rounds:
            return ()
        problem = f"{key}.after: {self.after} is no less than federation.rounds ({rounds})"
        return (f"{problem}, so that no cluster is ever split and CFL is FedAvg.",)


def _list_clusters(cluster: Tensor) -> list[int]:
    """The slots in use, in ascending order."""
    return sorted(set(cluster.tolist()))


def _group_by_cluster(cluster: Tensor, uploads: Uploads) -> Iterator[tuple[int, Uploads]]:
    """The uploads of each cluster that has any."""
    for slot in _list_clusters(cluster):
        cluster_uploads = [entry for entry in uploads if int(cluster[entry[0]]) == slot]
        if cluster_uploads:
            yield slot, Uploads(*zip(*cluster_uploads, strict=True))
