"""The stack executor: many clients in one call, with their tensors along a leading axis on the device.

The plan of a pass is sent to the device in one transfer. The pass then runs without the CPU, except that a pass with a
condition (`when`) reads it before each epoch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import (
    FIRST,
    ClientTask,
    Executor,
    Outcome,
    get_passes,
    make_client_start_state,
    make_client_upload,
    make_kept_client_state,
    measure_seconds_since,
)
from fedpipe.engine.clients.federated_data import FederatedData, Integers
from fedpipe.engine.stack import schedule
from fedpipe.engine.stack.graphs import CaptureBackend, GraphCache
from fedpipe.engine.stack.stack_run import StackRun, explain_out_of_memory, get_logits_batch_size, take_first_rows
from fedpipe.engine.torch_env.trees import count_bytes, make_contiguous, move_state, stack_states, unstack_client
from fedpipe.engine.user_errors import explain_user_errors


class StackExecutor(Executor):
    """Trains up to ``width`` clients at a time, in stacks that depend only on the round's participants.

    The first rows are the largest clients. As other clients finish, the stack becomes narrower in fixed widths, and
    clients that finish in between are idle. Padding samples have no weight. A client's bits depend on the round's
    participants, and not on which of them this job trains: the rows of the others are empty.

    Device memory grows with ``width``. Without a ``backend``, steps are not recorded.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: FederatedData,
        width: int,
        finetune_epochs: int = 1,
        backend: CaptureBackend | None = None,
        storage_device: torch.device | None = None,
    ) -> None:
        self.name = f"stack of {width}"
        torch.set_num_threads(1)  # on a CPU the order of sums depends on threads
        self._algorithm, self._clients, self._width = algorithm, clients, width
        self._finetune_epochs, self._backend = finetune_epochs, backend
        self._graph_cache = backend and GraphCache(backend)
        self._round_algorithm, self._storage_device = algorithm, storage_device or clients.device

    @override
    def run(self, task: ClientTask) -> Iterator[Outcome]:
        self._bind_round_algorithm(task.round)
        outcomes, ids = dict[int, Outcome](), frozenset(task.ids)
        participants = self._clients.ids if task.participants is None else task.participants
        for stack_clients in schedule.group_clients_into_stacks(self._clients.sizes, participants, self._width):
            if local_clients := [client for client in stack_clients if client in ids]:
                with torch.no_grad(), explain_user_errors(self._algorithm), explain_out_of_memory(self._width):
                    stack_outcomes = self._run_stack(task, stack_clients, local_clients)
                outcomes |= {outcome.client: outcome for outcome in stack_outcomes}
        return (outcomes.pop(client) for client in task.ids)

    def _bind_round_algorithm(self, round_number: int) -> None:
        """Set the round's learning rate. Recorded steps contain the rate, so they are discarded."""
        previous_federation = self._round_algorithm.federation
        self._round_algorithm = self._algorithm.bind_round(round_number, self._clients.seed)
        if self._backend is not None and self._round_algorithm.federation != previous_federation:
            self._graph_cache = GraphCache(self._backend)

    def _run_stack(self, task: ClientTask, stack_clients: list[int], local_clients: list[int]) -> list[Outcome]:
        algorithm, device = self._round_algorithm, self._clients.device
        clients = task.select_round_samples(self._clients)
        allowed_widths = schedule.get_allowed_stack_widths(self._width)
        stack_run = StackRun(
            algorithm, clients, task.round, stack_clients, local_clients, allowed_widths, self._graph_cache
        )
        common, client_parts = contract.validate_download(algorithm, task.send(stack_run.rows))
        axes = dict.fromkeys(common) | dict.fromkeys(client_parts, 0)
        kept_states = stack_states([task.get_kept_state(client) for client in stack_run.rows], device)
        client_infos = clients.get_client_info(stack_run.rows, task.round, kept_states[FIRST])
        state: State = vmap(functools.partial(make_client_start_state, algorithm), in_dims=(0, axes, 0))(
            kept_states, move_state(common | client_parts, device), client_infos
        )
        start_time = time.perf_counter()
        for number, pass_ in enumerate(get_passes(algorithm, task.phase, self._finetune_epochs)):
            state = stack_run.run_pass(pass_, state, f"pass {number} of the phase '{task.phase}'")
        seconds = measure_seconds_since(start_time, device) / len(local_clients)
        scores = {test: stack_run.score_clients(state, task.phase, test, task.metrics) for test in task.tests}
        uploads, kept_stack = {}, {}
        if task.phase == "train":
            upload_state, kept_state = (
                vmap(functools.partial(part, algorithm))(state) for part in (make_client_upload, make_kept_client_state)
            )
            stop = stack_clients.index(local_clients[-1]) + 1
            uploads, kept_stack = (
                move_state(make_contiguous(take_first_rows(part, stop)), self._storage_device)
                for part in (upload_state, kept_state)
            )
        outcomes = []
        for number, client in enumerate(local_clients):
            row, client_scores = stack_clients.index(client), {test: rows[number] for test, rows in scores.items()}
            down = count_bytes(algorithm.traffic(common | unstack_client(client_parts, row)))
            upload_state = unstack_client(uploads, row)
            up = count_bytes(algorithm.traffic(upload_state)) if upload_state else 0
            outcomes.append(
                Outcome(client, down, up, upload_state, unstack_client(kept_stack, row), client_scores, seconds)
            )
        return outcomes

    @override
    def compute_logits(self, model: Tensors, indices: Integers, round_number: int) -> Tensor:
        model = model.map(lambda value: value.to(self._clients.device))
        width = 1 if self._algorithm.net.has_batch_statistics else self._width
        chunks = np.array_split(indices, max(1, -(-len(indices) // get_logits_batch_size(self._clients, width))))
        with torch.no_grad():
            batches = (
                self._clients.gather_server_test_inputs(chunk, round_number, number)
                for number, chunk in enumerate(chunks)
            )
            return torch.cat([self._algorithm.net(model, x) for x in batches])


def parse_stack_width(executor_name: str) -> int:
    """Parse the width of a recorded executor. The loop has the width 1."""
    width = executor_name.removeprefix("stack of ")
    return int(width) if width.isdigit() else 1
