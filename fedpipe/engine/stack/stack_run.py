"""One stack of clients in one round: its batches, steps and results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.passes import Measure, Pass, Train, Update
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.engine import contract
from fedpipe.engine.clients.executor import (
    MEASURE_BATCH,
    ClientPass,
    GradientAndLoss,
    LossFunction,
    Phase,
    Score,
    TestSet,
    activate_eval_mode,
    compute_client_logits,
    count_client_steps,
    count_predictions_by_class,
    get_epochs_and_steps,
    needs_noise_key,
    take_next_epochs_and_steps,
)
from fedpipe.engine.clients.federated_data import FederatedData, Integers
from fedpipe.engine.clients.metrics import compute_probability_metrics
from fedpipe.engine.clients.transforms import transform_images
from fedpipe.engine.stack import schedule
from fedpipe.engine.stack.graphs import GraphCache, StackStep
from fedpipe.engine.stack.schedule import BatchPlan, StackBatch, StepRange
from fedpipe.engine.torch_env.trees import unstack_client
from fedpipe.settings.base import Metric

Flags = Tensor  #: one Boolean per client, shape (width,)
NO_SAMPLES: Integers = np.empty(0, np.int64)  #: samples of a row that another job trains
Terms = Callable[[State, StackBatch], dict[str, Tensor]]  #: terms of a sum over the samples of a step


class StackRun:
    """The passes of one stack in one round.

    ``stack_clients`` are all participants of the stack, the largest first. This job trains ``local_clients`` of them,
    which are in the same order. The attribute ``rows`` has the client of each row, which is the same for all jobs,
    because kernels may round differently in another row. Rows without a client have unused copies of the last client's
    tensors.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: FederatedData,
        round_number: int,
        stack_clients: list[int],
        local_clients: list[int],
        allowed_widths: tuple[int, ...],
        graph_cache: GraphCache | None = None,
    ) -> None:
        self._algorithm, self._clients, self._round, self._graph_cache = algorithm, clients, round_number, graph_cache
        self._stack_clients, self._local_clients, self._allowed_widths = stack_clients, local_clients, allowed_widths
        width = min(allowed_width for allowed_width in allowed_widths if allowed_width >= len(stack_clients))
        self._row_clients = [client if client in local_clients else None for client in stack_clients]
        self._local_rows = [stack_clients.index(client) for client in local_clients]
        self.rows = [local_clients[-1] if client is None else client for client in self._row_clients]
        self.rows += local_clients[-1:] * (width - len(stack_clients))
        self._epochs: dict[int, dict[str, int]] = {client: {} for client in stack_clients}
        self._local_steps = {
            client: count_client_steps(algorithm, clients, client, round_number) for client in stack_clients
        }

    def run_pass(self, pass_: Pass, state: State, name: str = "pass") -> State:
        """Run a pass, which has the same name in every round."""
        match pass_:
            case Train():
                return self._run_train_pass(pass_, state, name)
            case Measure():
                return self._run_measure_pass(pass_, state)
            case Update():
                return vmap(functools.partial(contract.call_pass_function, self._algorithm, pass_.then))(state)

    def _collect_client_values(self, get_value: Callable[[int], Any], default: Any) -> list[Any]:
        """Map a function over the rows. Clients of another job get ``default``."""
        return [default if client is None else get_value(client) for client in self._row_clients]

    # -- training ----------------------------------------------------------------------------------------------------

    def _run_train_pass(self, training: Train, state: State, name: str) -> State:
        client_epochs = {
            client: take_next_epochs_and_steps(
                self._algorithm, training, self._epochs[client], self._local_steps[client]
            )
            for client in self._stack_clients
        }
        epochs, steps = client_epochs[self._stack_clients[0]]
        client_pass = self.make_client_pass(training, state)
        state = vmap(client_pass.add_optimizer_state)(state)
        step, step_ranges = self.make_stack_step(client_pass), self._make_step_ranges(training)
        active: Flags | None = None
        epoch_groups = [[epoch] for epoch in epochs] if training.when is not None else [list(epochs)] if epochs else []
        for epoch_group in epoch_groups:
            if training.when is not None:
                condition = vmap(client_pass.needs_another_epoch)(state)
                active = condition if active is None else active & condition
                if not bool(active[self._local_rows].any()):
                    break
            batch_plan = (
                self.make_batch_plan(training, epoch_group)
                if steps is None
                else self.make_fixed_step_plan(training, client_epochs)
            )
            for first in range(0, len(batch_plan.samples), step_ranges[-1].stop):
                for step_range in step_ranges:
                    range_plan = batch_plan.slice_steps(
                        first + step_range.first, first + step_range.stop, step_range.width
                    )
                    state = self._run_step_range(step, state, range_plan, active, name)
                if training.after is not None:
                    state = _step_live_clients(client_pass.finish_epoch, state, active)
        return state

    def make_client_pass(self, training: Train, state: State) -> ClientPass:
        """Make the pass of a client. It is that of the first client, because all clients have the same names."""
        return ClientPass(self._algorithm, training, unstack_client(state, 0), _compute_gradient_and_loss)

    def make_stack_step(self, client_pass: ClientPass) -> StackStep:
        """Make the step of a pass for a stack of any width."""

        def step_client(client: State, *batch: Tensor) -> State:
            return client_pass.take_step(client, Batch(*batch))

        return lambda state, stack_batch: _step_live_clients(
            step_client, state, stack_batch.live, *_gather_batch(self._clients, stack_batch)
        )

    def make_batch_plan(self, training: Train, epochs: Sequence[int]) -> BatchPlan:
        """Make the plan of some epochs on the device."""
        clients, size = self._clients, self._get_batch_size(training)
        num_steps = self._make_step_ranges(training)[-1].stop
        has_noise = needs_noise_key(self._algorithm, training, clients.transforms)
        tables = []
        for epoch in epochs:
            orders, keys = zip(
                *(self._draw_epoch(training, client, epoch) for client in self._row_clients), strict=True
            )
            noise_keys = keys if has_noise else None
            tables.append(schedule.make_sample_index_table(orders, noise_keys, size, num_steps, len(self.rows)))
        return BatchPlan.from_table(np.concatenate(tables), has_noise, clients.dtype, clients.device)

    def make_fixed_step_plan(self, training: Train, client_epochs: Mapping[int, tuple[range, int | None]]) -> BatchPlan:
        """Make the plan of fixed numbers of steps, across the epochs of each client."""
        max_steps = max(steps or 0 for _, steps in client_epochs.values())
        clients, size = self._clients, self._get_batch_size(training)
        has_noise = needs_noise_key(self._algorithm, training, clients.transforms)
        plan = schedule.make_sample_index_table([], [] if has_noise else None, size, max_steps, len(self.rows))
        for row, client in enumerate(self._row_clients):
            if client is None:
                continue
            (epochs, fixed_steps), length, tables = client_epochs[client], self._count_epoch_steps(training, client), []
            steps = fixed_steps or 0
            for epoch in epochs[: -(-steps // length)]:
                order, key = self._draw_epoch(training, client, epoch)
                tables.append(schedule.make_sample_index_table([order], [key] if has_noise else None, size, length, 1))
            plan[:steps, row] = np.concatenate(tables)[:steps, 0]
        return BatchPlan.from_table(plan, has_noise, clients.dtype, clients.device)

    def _draw_epoch(self, training: Train, client: int | None, epoch: int) -> tuple[Integers, int]:
        """Draw the order of a client's samples in an epoch, and its noise key. Other jobs' clients have no samples."""
        if client is None:
            return NO_SAMPLES, 0
        random_context = self._round, training.stream, epoch
        order = self._clients.shuffle_indices(client, *random_context, training.share)
        return order, self._clients.get_noise_key(client, *random_context)

    def _get_batch_size(self, training: Train) -> int:
        return self._clients.resolve_batch_size(self._algorithm.federation.batch_size) * training.batches

    def _make_step_ranges(self, training: Train) -> list[StepRange]:
        fixed_steps = (
            get_epochs_and_steps(self._algorithm, training, self._local_steps[client])[1]
            for client in self._stack_clients
        )
        counts = [
            steps or self._count_epoch_steps(training, client)
            for steps, client in zip(fixed_steps, self._stack_clients, strict=True)
        ]
        return schedule.split_steps_by_stack_width(counts, self._allowed_widths)

    def _count_epoch_steps(self, training: Train, client: int) -> int:
        """Count the steps of a client in an epoch."""
        sample_count = self._clients.compute_subset_size(client, training.share)
        return schedule.count_batches(sample_count, self._get_batch_size(training), training.steps)

    def _run_step_range(self, step: StackStep, state: State, plan: BatchPlan, active: Flags | None, name: str) -> State:
        """Run the steps of a range, for active clients if there is a condition."""
        width = plan.samples.shape[1]
        has_all_rows = width == len(self.rows)
        narrow_state, new_state = state if has_all_rows else take_first_rows(state, width), None
        if self._graph_cache is not None and active is None:
            new_state = self._graph_cache.run_step_range(name, step, narrow_state, plan, plan.has_idle_clients)
        if new_state is None:
            new_state = narrow_state
            for number in range(len(plan.samples)):
                stack_batch = plan.get_step_batch(number)
                if active is not None:
                    stack_batch = stack_batch._replace(
                        live=active[:width] if stack_batch.live is None else active[:width] & stack_batch.live
                    )
                new_state = step(new_state, stack_batch)
        return state | {
            name: value if has_all_rows or name not in state else _replace_first_rows(value, state[name])
            for name, value in new_state.items()
            if value is not narrow_state.get(name)
        }

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _run_measure_pass(self, measure_pass: Measure, state: State) -> State:
        def update_client(client: State, sums: dict[str, Tensor]) -> State:
            with activate_eval_mode(self._algorithm, client):
                return contract.call_pass_function(self._algorithm, measure_pass.then, client, sums)

        samples = self._clients.train if measure_pass.on == "train" else self._clients.validation_or_train
        noise_keys = self._collect_client_values(
            lambda client: self._clients.get_noise_key(client, self._round, "measure", 0), 0
        )
        sums = self._sum_over_samples(
            self.make_measure_function(measure_pass), state, samples, noise_keys if measure_pass.is_augmented else None
        )
        return vmap(update_client)(state, sums)

    def make_measure_function(self, measure_pass: Measure) -> Terms:
        """Make the function that computes the sums of a Measure pass over the samples of a step."""

        def compute_client_sums(client: State, *batch: Tensor) -> dict[str, Tensor]:
            with activate_eval_mode(self._algorithm, client, mask=batch[2]):
                return contract.compute_measure_pass_sums(self._algorithm, measure_pass, client, Batch(*batch))

        return lambda state, stack_batch: vmap(compute_client_sums)(state, *_gather_batch(self._clients, stack_batch))

    def score_clients(self, state: State, phase: Phase, test: TestSet, metrics: Sequence[Metric] = ()) -> list[Score]:
        """Score every client on a test set."""
        clients, step_logits = self._clients, list[Tensor]()
        samples = [clients.get_evaluation_indices(client, test) for client in range(len(clients))]
        noise_keys = self._collect_client_values(
            lambda client: clients.get_evaluation_noise_key(client, self._round, test), None
        )
        keys = [key or 0 for key in noise_keys] if any(key is not None for key in noise_keys) else None  # all or none

        def score_samples(client: State, *samples: Tensor) -> dict[str, Tensor]:
            batch = Batch(*samples)
            with activate_eval_mode(self._algorithm, client, batch.mask):
                logits = compute_client_logits(self._algorithm, phase, client, batch.x, clients.classes)
            losses = F.cross_entropy(logits, batch.y, reduction="none")
            losses = torch.where(samples[2] > 0, losses, 0)  # infinity times a mask of 0 would be NaN
            sums = {"classes": count_predictions_by_class(logits, batch), "loss": batch.sum(losses).double()}
            return sums | ({"logits": logits} if metrics else {})

        def score_stack_batch(state: State, row: StackBatch) -> dict[str, Tensor]:
            terms = vmap(score_samples)(state, *_gather_batch(clients, row))
            step_logits.extend([terms.pop("logits")] if metrics else [])
            return terms

        def compute_client_metrics(row: int) -> dict[str, Any]:
            if not metrics:
                return {}
            indices = samples[self.rows[row]]
            logits = torch.cat([logits[row] for logits in step_logits if row < len(logits)])
            return compute_probability_metrics(metrics, logits[: len(indices)], clients.get_labels(indices))

        sums = self._sum_over_samples(score_stack_batch, state, samples, keys)
        classes, loss = sums["classes"].cpu(), sums["loss"].tolist()
        return [Score.from_counts(classes[row], loss[row], **compute_client_metrics(row)) for row in self._local_rows]

    def _sum_over_samples(
        self, terms: Terms, state: State, samples: Sequence[Integers], keys: list[int] | None
    ) -> dict[str, Tensor]:
        """Sum ``terms`` over each client's samples, with its noise."""
        step_ranges, batch_plan = self.make_evaluation_plan(samples, keys)
        sums: dict[str, Tensor] = {}
        for step_range in step_ranges:
            narrow_state = take_first_rows(state, step_range.width)
            range_plan = batch_plan.slice_steps(step_range.first, step_range.stop, step_range.width)
            for number in range(len(range_plan.samples)):
                sums = {
                    name: _replace_first_rows(sums[name][: step_range.width] + term, sums[name]) if sums else term
                    for name, term in terms(narrow_state, range_plan.get_step_batch(number)).items()
                }
        return sums

    def make_evaluation_plan(
        self, samples: Sequence[Integers], keys: list[int] | None
    ) -> tuple[list[StepRange], BatchPlan]:
        """Make the plan of an evaluation. A client without samples has one empty batch."""
        counts = [schedule.count_batches(len(samples[client]), MEASURE_BATCH) for client in self._stack_clients]
        step_ranges = schedule.split_steps_by_stack_width(counts, self._allowed_widths)
        orders = self._collect_client_values(lambda client: samples[client], NO_SAMPLES)
        plan = schedule.make_sample_index_table(orders, keys, MEASURE_BATCH, step_ranges[-1].stop, len(self.rows))
        return step_ranges, BatchPlan.from_table(plan, keys is not None, self._clients.dtype, self._clients.device)


@contextmanager
def explain_out_of_memory(width: int) -> Iterator[None]:
    """Explain an out-of-memory error with the setting that reduces memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ", 1)[0]
        raise SettingsError(
            f"execution.stack: {width} clients in one call need more memory than the GPU has ({reason}). "
            f"Use a smaller number, such as {width // 2}. Results are equal up to rounding."
        ) from error


def get_logits_batch_size(clients: FederatedData, width: int) -> int:
    """Number of samples per call in the evaluation of the server's model: on a GPU as many as a stack's models.

    Small calls are slow on a GPU. If test samples have noise by batch, the size is the same everywhere.
    """
    on_gpu = clients.device.type == "cuda" and not clients.transforms.on_test
    return MEASURE_BATCH * width if on_gpu else MEASURE_BATCH


def _gather_batch(clients: FederatedData, stack_batch: StackBatch) -> tuple[Tensor, ...]:
    """Gather the samples of a step: inputs, classes, masks, and noise keys."""
    x, y = clients.gather_samples(stack_batch.samples)
    if stack_batch.noise_keys is None:
        return x, y, stack_batch.mask
    return (
        vmap(functools.partial(transform_images, clients.transforms))(x, stack_batch.noise_keys),
        y,
        stack_batch.mask,
        stack_batch.noise_keys,
    )


def take_first_rows(state: State, width: int) -> State:
    """Take the first rows. The same tensors if these are all rows."""
    return pytree.tree_map(lambda value: value if len(value) == width else value[:width], state)


def _replace_first_rows(first_rows: Any, all_rows: Any) -> Any:
    """Replace the first rows of ``all_rows`` by ``first_rows``."""
    return pytree.tree_map(
        lambda first, rows: first if len(first) == len(rows) else torch.cat([first, rows[len(first) :]]),
        first_rows,
        all_rows,
    )


def _compute_gradient_and_loss(compute_loss: LossFunction, parameters: Tensors) -> GradientAndLoss:
    """Compute gradient, loss and statistics (:class:`~fedpipe.engine.clients.executor.ClientPass`)."""
    return grad_and_value(compute_loss, has_aux=True)(parameters)


def _step_live_clients(step: Callable[..., State], state: State, live: Flags | None, *batch: Tensor) -> State:
    """Take a step for live clients (None: all)."""

    def compute_changed_parts(client: State, *args: Tensor) -> dict[str, Any]:
        return {part: value for part, value in step(client, *args).items() if value is not client.get(part)}

    changed_parts: State = vmap(compute_changed_parts)(state, *batch)
    if live is not None:

        def select_live_values(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(live.reshape(-1, *(1,) * (new.dim() - 1)), new, old)

        changed_parts = {
            part: pytree.tree_map(select_live_values, value, state[part]) for part, value in changed_parts.items()
        }
    return state | changed_parts
