import numpy as np
import pytest
import torch


@pytest.fixture
def clients(make_clients):
    return make_clients()


def test_client_info_describes_training_data(clients):
    info = clients.get_client_info(2, round_number=7, is_first=torch.ones(()))
    assert info.size.item() == 9
    assert info.class_counts.tolist() == [3, 0, 3, 3]
    assert (info.round.item(), info.is_first.item()) == (7, 1)
    assert {value.dtype for value in info[:-1]} == {torch.float64}
    assert info.noise_key.dtype == torch.int64


def test_client_info_of_several_clients_has_leading_axis(clients):
    info = clients.get_client_info([2, 0], round_number=1, is_first=torch.tensor([0, 1]))
    assert info.size.tolist() == [9, 1]
    assert info.class_counts.tolist() == [[3, 0, 3, 3], [1, 0, 0, 0]]
    assert info.round.tolist() == [1, 1]
    assert info.is_first.tolist() == [0, 1]


def test_epoch_order_is_permutation_of_client_samples(clients):
    order = clients.shuffle_indices(5, 1, "batches", 0)
    assert sorted(order) == list(clients.train[5])
    assert list(order) != list(clients.train[5])


def test_sample_order_depends_on_seed_round_stream_and_epoch(make_clients, clients):
    orders = [
        clients.shuffle_indices(5, 1, "batches", 0),
        clients.shuffle_indices(5, 2, "batches", 0),
        clients.shuffle_indices(5, 1, "batches", 1),
        clients.shuffle_indices(5, 1, "recall", 0),
        make_clients(seed=1).shuffle_indices(5, 1, "batches", 0),
    ]
    assert len({tuple(order) for order in orders}) == 5
    assert np.array_equal(clients.shuffle_indices(5, 1, "batches", 0), orders[0])


@pytest.mark.parametrize(
    ("client", "share", "count"), [(5, 0.8, 13), (7, 0.5, 10), (1, 0.5, 3), (0, 0.1, 1), (6, 0.1, 1)]
)
def test_sample_fraction_rounds_to_nearest_count_of_at_least_one(clients, client, share, count):
    order = clients.shuffle_indices(client, 1, "mixing", 0, share)
    assert len(order) == len(set(order)) == count
    assert set(order) <= set(clients.train[client])


def test_sample_fraction_is_drawn_once_per_round(clients):
    """The order differs between epochs, and the samples differ between rounds."""
    first_order, second_order = (clients.shuffle_indices(7, 1, "mixing", epoch, 0.5) for epoch in (0, 1))
    next_round_order = clients.shuffle_indices(7, 2, "mixing", 0, 0.5)
    assert set(first_order) == set(second_order)
    assert list(first_order) != list(second_order)
    assert set(first_order) != set(next_round_order)


def test_gather_samples_returns_samples_by_index(clients):
    x, y = clients.gather_samples(np.array([3, 1, 3]))
    assert torch.equal(x, clients.x[[3, 1, 3]])
    assert torch.equal(y, clients.y[[3, 1, 3]])
