"""Clients of stacks, widths of stacks, and batch plans of passes."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch.func import vmap

from fedpipe.algorithms.passes import Train
from fedpipe.data.assignment import Assignment, assign_samples
from fedpipe.data.partitions.dirichlet import Dirichlet
from fedpipe.engine.clients.transforms import transform_images
from fedpipe.engine.rounds import WIDTH_ON_GPU
from fedpipe.engine.stack import schedule
from fedpipe.engine.stack.schedule import StepRange
from fedpipe.engine.stack.stack_run import StackRun, _gather_batch
from fedpipe.settings.transforms import Transforms


def test_allowed_stack_widths_contain_largest_width():
    assert schedule.get_allowed_stack_widths(32) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert schedule.get_allowed_stack_widths(20) == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    assert [schedule.get_allowed_stack_widths(width) for width in (1, 2, 3)] == [(1,), (1, 2), (1, 2, 3)]


def test_stack_width_decreases_as_clients_finish():
    assert schedule.split_steps_by_stack_width([5, 3, 3, 1, 1], (1, 2, 3, 4, 6)) == [
        StepRange(6, 0, 1),
        StepRange(3, 1, 3),
        StepRange(1, 3, 5),
    ]
    assert schedule.split_steps_by_stack_width([1, 5, 3], (1, 2, 3)) == [StepRange(3, 0, 3), StepRange(2, 3, 5)], (
        "rows keep their order"
    )


def test_largest_clients_share_stack():
    sizes = np.array([3, 9, 3, 20, 1])
    assert schedule.group_clients_into_stacks(sizes, [4, 2, 0, 1, 3], 2) == [[3, 1], [0, 2], [4]]


@pytest.mark.parametrize(
    ("samples", "clients", "participants", "batch"),
    [(70_000, 20, 20, 10), (60_000, 100, 10, 64), (60_000, 100, 100, 64), (60_000, 1000, 100, 10)],
)
def test_stacks_contain_at_most_30_percent_padding(samples, clients, participants, batch):
    """If stacks had one width, only 10 to 25 percent of the samples in these cases would not be padding."""
    labels, fractions, block_fractions = np.arange(samples) % 10, [], []
    widths = schedule.get_allowed_stack_widths(WIDTH_ON_GPU)
    for seed in range(3):
        scheme = Dirichlet(alpha=0.1, minimum=40 if clients == 20 else 1)
        assignment = Assignment.from_table(
            assign_samples(scheme, labels, np.zeros(samples, bool), clients, "pooled", 0.25, seed=seed)
        )
        sizes = np.array([len(indices) for indices in assignment.train])
        ids = np.sort(np.random.default_rng(seed).choice(clients, participants, replace=False)).tolist()
        stacks = schedule.group_clients_into_stacks(sizes, ids, WIDTH_ON_GPU)
        assert sorted(itertools.chain(*stacks)) == ids
        counts = [[schedule.count_batches(sizes[client], batch) for client in stack] for stack in stacks]
        step_ranges = itertools.chain(*(schedule.split_steps_by_stack_width(stack, widths) for stack in counts))
        padded = sum(steps.width * (steps.stop - steps.first) * batch for steps in step_ranges)
        fractions.append(sizes[ids].sum() / padded)
        blocks = itertools.batched(ids, WIDTH_ON_GPU) if hasattr(itertools, "batched") else [ids]
        block_fractions += [sizes[list(block)].mean() / sizes[list(block)].max() for block in blocks]
    assert np.mean(fractions) >= 0.7
    assert np.mean(block_fractions) < 0.6, "client sizes must differ"


def gather_batches_stepwise(clients, orders, size, keys=None):
    """Gather the batches of all clients step by step, without a plan."""
    longest = max(len(order) for order in orders)
    rows = np.zeros((len(orders), -(-longest // size) * size), np.int64)
    is_sample = np.zeros(rows.shape, bool)
    for row, order in enumerate(orders):
        rows[row, : len(order)], is_sample[row, : len(order)] = order, True
    index, weight = torch.as_tensor(rows), torch.as_tensor(is_sample).to(clients.dtype)
    for number, start in enumerate(range(0, longest, size)):
        x, y = clients.gather_samples(index[:, start : start + size])
        mask = weight[:, start : start + size]
        if keys is None:
            yield start, (x, y, mask)
        else:
            noise = torch.tensor([key + number for key in keys])
            yield start, (vmap(functools.partial(transform_images, clients.transforms))(x, noise), y, mask, noise)


@pytest.mark.parametrize(
    ("transforms", "settings"),
    [
        (Transforms(), {}),
        (Transforms(mean=(0.1,), crop=1, flip=True), {}),
        (Transforms(), {"share": 0.5, "stream": "weights"}),
        (Transforms(flip=True), {"steps": 2, "batches": 2}),
    ],
)
def test_batch_plan_contains_batches_gathered_step_by_step(make_clients, make_trial, transforms, settings):
    clients = make_clients((1, 4, 4), transforms=transforms)
    trial = make_trial("fedavg", "cnn", clients, width=7)
    training = Train(trial.algorithm.loss, **settings)
    stack_clients = schedule.group_clients_into_stacks(clients.sizes, range(8), 7)[0]
    local_clients, size = [client for client in stack_clients if client != 3], 4 * training.batches
    rows = [stack_clients.index(client) for client in local_clients]
    stack_run = StackRun(
        trial.algorithm, clients, 5, stack_clients, local_clients, schedule.get_allowed_stack_widths(7)
    )
    batch_plan = stack_run.make_batch_plan(training, [2, 3])
    length = len(batch_plan.samples) // 2
    for epoch, first_step in ((2, 0), (3, length)):
        orders = [
            clients.shuffle_indices(client, 5, training.stream, epoch, training.share) for client in local_clients
        ]
        keys = (
            [clients.get_noise_key(client, 5, training.stream, epoch) for client in local_clients]
            if transforms.is_random
            else None
        )
        expected = list(itertools.islice(gather_batches_stepwise(clients, orders, size, keys), training.steps))
        assert len(expected) == length
        for number, (start, batch) in enumerate(expected):
            row = batch_plan.slice_steps(first_step, first_step + length, len(stack_clients)).get_step_batch(number)
            is_live = torch.tensor([len(order) > start for order in orders])
            assert torch.equal(row.live[rows], is_live)
            for result, value in zip(_gather_batch(clients, row), batch, strict=True):
                present = batch[2].bool() if value.dim() > 1 else slice(None)
                assert torch.equal(result[rows][present], value[present])
            assert torch.equal(row.mask[rows], batch[2])
    other_rows = [row for row, client in enumerate(stack_clients) if client == 3]
    assert len(other_rows) == 1, "another job trains one client"
    assert not batch_plan.live[:, other_rows].any()
    assert not batch_plan.mask[:, other_rows].any()
