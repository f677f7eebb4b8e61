"""FedFomo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm, StudyFacts
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.model_stack import flatten_models, repeat_model, replace_models, select_model
from fedpipe.algorithms.passes import Measure, Pass, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors

EPSILON = 1e-5  #: added to distances, one of which may be 0 (PFLlib)


@dataclass(frozen=True, kw_only=True)
class FedFomo(Algorithm):
    r"""Each client downloads a few other clients' models and mixes in those that do better on its validation data.

    Source: Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021, eq. 3-5.

    Method: client i evaluates its last trained model and M others :math:`\theta_n` on validation data and compares them
    with the model :math:`\theta_i` from which its last training began,

    .. math::
        w_n = \frac{L_i(\theta_i) - L_i(\theta_n)}{\lVert \theta_n - \theta_i \rVert}, \qquad
        \theta_i \leftarrow \theta_i + \sum_n \frac{\max(w_n, 0)}{\sum_l \max(w_l, 0)} (\theta_n - \theta_i);

    then it trains. The server adds :math:`w_n` to the affinity :math:`P_{in}` and sends client i the M uploaded models
    of highest affinity: none in round 1, and fewer than M as long as fewer other clients have uploaded. Ties go to the
    lowest index, and models that client i has not tried yet rank above harmful ones.

    State: last trained model and :math:`\theta_i` at the client, all clients' last uploads and P at the server.
    Traffic: up to M models down. A model and their weights up. There is no global model.
    Values used: M 4 and 9 (authors' commands), 5 (FL-bench). PFLlib's 5, on which cwFedAvg's study was built, counts
    the client's own model, so it is 4 here.

    A client that never participated receives M uploaded models, those of the lowest clients, and mixes in those that do
    better than the initial model on its data.

    Deviations
    ----------
    No positive weight
        Paper: not stated. Code: the authors' client returns to the model with which it compares. Here: the client
        continues from its last trained model, as in PFLlib.
    Validation data
        Code: 20 % in the libraries. Here: ``dataset.validation_fraction`` of a client's training samples, 0 by default.
        Without any, a client evaluates the models on its training data.
    Distance
        Code: L1 by default. Here: Euclidean, of trained parameters.
    Own model
        Code: always a candidate. PFLlib sends it too, and counts it in M. Here: always a candidate, and never sent.
    Other candidates
        Code: the authors' are the models of the last round's participants, averages of clusters, and a global average.
        PFLlib's also the initial model, for clients without an upload. Here: all clients' last uploads.
    Affinity
        Code: the authors' adds :math:`w_n / \lvert \sum_l w_l \rvert`. PFLlib's adds :math:`w_n`. Here: :math:`w_n`.
    Exploration
        Paper: epsilon-greedy. Code: the authors' with epsilon 0.3, which decays. PFLlib's none. Here: none.
    Equal affinities
        Code: the authors' chooses at random. Here: the lowest clients.

    Parameters
    ----------
    downloads
        Models sent to each client, M. 0 is local training.
    """

    downloads: Annotated[int, Field(ge=0)] = 5

    @property
    def candidate_slot_count(self) -> int:
        """M, or as many other clients as there are."""
        return min(self.downloads, self.federation.clients - 1)

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """Initial state without uploads."""
        model, clients = initial_model(0), self.federation.clients
        affinity = model["head.weight"].new_zeros(clients, clients)
        return {"models": repeat_model(model, clients), "affinity": affinity, "seen": torch.zeros_like(affinity[0])}

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The initial model, twice."""
        return {"model": initial_model(0), "previous": initial_model(0)}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The candidates' models of each client in M slots, shape (M, ...), and their number. Empty slots are 0."""
        candidates = [self.select_candidates(server, client) for client in ids]
        candidate_counts = torch.tensor([len(client_candidates) for client_candidates in candidates]).to(server["seen"])
        slots = torch.stack(
            [
                F.pad(client_candidates, (0, self.candidate_slot_count - len(client_candidates)))
                for client_candidates in candidates
            ]
        )
        is_filled = torch.arange(self.candidate_slot_count) < candidate_counts.unsqueeze(1)

        def gather_models(value: Tensor) -> Tensor:
            return value[slots] * is_filled.reshape(*slots.shape, *(1,) * (value.dim() - 1)).to(value.dtype)

        return {}, {"others": server["models"].map(gather_models), "found": candidate_counts}

    def select_candidates(self, server: State, client: int) -> Tensor:
        """The clients whose models are sent to a client: at most M, all of which have uploaded one."""
        order = server["affinity"][client].sort(descending=True, stable=True).indices
        return order[(order != client) & (server["seen"][order] > 0)][: self.candidate_slot_count]

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The last trained model, the baseline and the candidates."""
        return {**state, **download, "gains": info.size.new_zeros(self.candidate_slot_count)}

    @override
    def personal_passes(self) -> Sequence[Pass]:
        """The mixture."""
        return (Measure(self.sum_losses, self.mix_models, on="validation"),)

    def sum_losses(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Summed cross-entropy of baseline, local model and candidates, shape (2 + M,), and the sample count."""
        other_models = [select_model(client["others"], index) for index in range(self.candidate_slot_count)]
        logits = [self.net(model, batch.x) for model in (client["previous"], client["model"], *other_models)]
        losses = [batch.sum(F.cross_entropy(outputs, batch.y, reduction="none")) for outputs in logits]
        return {"loss": torch.stack(losses), "size": batch.size()}

    def mix_models(self, client: State, sums: dict[str, Tensor]) -> State:
        """Weights of the candidates, with the local model first, and their mixture."""
        local_model, other_models = client["model"], client["others"]
        models = Tensors(
            (name, torch.cat([local_model[name].unsqueeze(0), other_models[name]])) for name in local_model
        )
        baseline = self.net.parameters(client["previous"]).flat()
        distances = torch.linalg.vector_norm(flatten_models(self.net.parameters(models)) - baseline, dim=-1)
        loss = sums["loss"] / sums["size"]
        is_filled = torch.arange(len(distances), device=loss.device) <= client["found"]
        gains = torch.where(is_filled, (loss[0] - loss[1:]) / (distances + EPSILON), 0)
        positive = gains.clamp(min=0)
        total, local_only = positive.sum(), (torch.arange(len(gains), device=gains.device) == 0).to(gains.dtype)
        weights = torch.where(total > 0, positive / torch.where(total > 0, total, 1), local_only)
        model = models.map(lambda value: torch.tensordot(weights, value, 1))
        return client | {"model": model, "gains": gains[1:]}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Training. The model before it is the baseline of the next comparison."""
        return (Update.copy("model", to="previous"), self.training_pass())

    @override
    def upload(self, client: State) -> State:
        """The model, the candidates' weights and their number."""
        return {"model": client["model"], "gains": client["gains"], "found": client["found"]}

    @override
    def traffic(self, state: State) -> State:
        """The state without empty slots and without their number."""
        candidate_count = int(state["found"])
        content = {part: value for part, value in state.items() if part != "found"}
        return {
            part: _take_first_entries(value, candidate_count) if part in {"others", "gains"} else value
            for part, value in content.items()
        }

    @override
    def keep(self, client: State) -> State:
        """The model before and after training."""
        return {"model": client["model"], "previous": client["previous"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The last uploads, and the affinities plus this round's weights."""
        affinity = server["affinity"].clone()
        for client, _, upload in uploads:
            candidates = self.select_candidates(server, client)
            affinity[client, candidates] += upload["gains"][: len(candidates)]
        models = replace_models(server["models"], uploads.ids, uploads["model"])
        return {"models": models, "affinity": affinity, "seen": uploads.mark(server["seen"])}

    @override
    def global_model(self, server: State) -> None:
        """There is no global model, only personal ones."""

    @override
    def warnings(self, study: StudyFacts, key: str) -> Sequence[str]:
        """Without validation data, models that fit the training data rank first."""
        if study.has_validation:
            return ()
        problem = f"{key}: dataset.validation_fraction is 0, so clients evaluate models on their training data"
        return (f"{problem}. A usual value is 0.2.",)


def _take_first_entries(slots: Tensors | Tensor, count: int) -> Tensors | Tensor:
    """Take the first ``count`` entries along the first axis."""
    return slots.map(lambda value: value[:count]) if isinstance(slots, Tensors) else slots[:count]
