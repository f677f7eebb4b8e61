"""New clients (`federation.held_out`): what they receive, and their evaluation.

A new client never participates. It receives what a seen client receives before its first round. An algorithm numbers
the S seen clients from 0, and each new client is its client S. So neither the number of new clients nor their samples
are in any state of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients import evaluation
from fedpipe.engine.clients.executor import Executor
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.server.server import make_download, make_initial_server_state
from fedpipe.planning.new_clients import is_personal_model_from_download, list_new_clients_protocols
from fedpipe.settings.base import convert_to_new_clients_protocol
from fedpipe.settings.evaluation import Evaluation


class NewClients:
    """The new clients of a run. ``algorithm`` is bound to one more client than the run's ``trained_algorithm``."""

    def __init__(
        self,
        algorithm: Algorithm,
        trained_algorithm: Algorithm,
        settings: Evaluation,
        clients: FederatedData,
        make_executor: Callable[[Algorithm, FederatedData], Executor],
        make_initial_model: Callable[[int], Tensors],
    ) -> None:
        self.algorithm, self._trained_algorithm, self._settings = algorithm, trained_algorithm, settings
        self.clients, self._make_executor, self._make_initial_model = clients, make_executor, make_initial_model

    @cached_property
    def _executor(self) -> Executor:
        return self._make_executor(self.algorithm, self.clients)

    @cached_property
    def _initial_server(self) -> State:
        """The initial state of a server with one more client."""
        with torch.no_grad():
            return make_initial_server_state(self.algorithm.bind_round(0, self.clients.seed), self._make_initial_model)

    @cached_property
    def _is_personal_model_trained(self) -> bool:
        x, _ = self.clients.gather_samples(self.clients.global_test[:1])
        return is_personal_model_from_download(self.algorithm, self._make_initial_model, x, self.clients.classes)

    def make_download_function(
        self, algorithm: Algorithm, server: State
    ) -> Callable[[Sequence[int]], tuple[State, State]]:
        """Make the function that gives the downloads of some new clients, which are equal."""
        larger_server, number = add_new_client(server, self._initial_server), algorithm.federation.clients - 1
        return partial(make_download, algorithm, larger_server, lambda ids: [number] * len(ids))

    def evaluate(self, server: State, get_kept_state: Callable[[int], State], round_number: int) -> pa.Table:
        """Evaluate the protocols that are defined for new clients, and make rows of the metrics.

        ``server`` is the server's state after a round.
        """
        protocols = list_new_clients_protocols(self._settings.protocols, self._is_personal_model_trained)
        metrics = evaluation.evaluate_round(
            self._settings.model_copy(update={"protocols": tuple(protocols)}),
            self._executor,
            self._trained_algorithm,
            self.clients,
            server,
            self.make_download_function(self.algorithm.bind_round(round_number + 1, self.clients.seed), server),
            get_kept_state,
            round_number,
        ).metrics
        names = pa.array(map(convert_to_new_clients_protocol, metrics["protocol"].to_pylist()), pa.string())
        return metrics.set_column(metrics.schema.get_field_index("protocol"), "protocol", names)


def add_new_client(server: State, larger_server: State) -> State:
    """Add a client that has not participated to a server's state.

    ``larger_server`` is the initial state of a server with one more client. The new client gets the last row of each
    tensor with a row (or a row and a column) per client.
    """

    def copy_into_larger(value: Tensor, larger_value: Tensor) -> Tensor:
        if value.shape == larger_value.shape:
            return value
        grown = torch.clone(larger_value.to(value.device), memory_format=torch.contiguous_format)
        grown[tuple(map(slice, value.shape))] = value
        return grown

    def copy_part_into_larger(value: Any, larger_value: Any) -> Any:
        if isinstance(value, Tensors):
            return Tensors((name, copy_into_larger(tensor, larger_value[name])) for name, tensor in value.items())
        return copy_into_larger(value, larger_value)

    return {part: copy_part_into_larger(value, larger_server[part]) for part, value in server.items()}
