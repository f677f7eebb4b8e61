"""A batch with padding has the same statistics as its samples alone."""

import pytest
import torch

from fedpipe.algorithms.batch import Batch

VALUES = torch.tensor([[1.0, 2.0], [4.0, -3.0], [9.0, 0.5], [2.0, 7.0], [5.0, 5.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 2, 2, 1, 0])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_padding_changes_no_statistic(count: int, assert_same) -> None:
    mask = (torch.arange(5) < count).double()
    padded, plain = Batch(VALUES, LABELS, mask), Batch(VALUES[:count], LABELS[:count])
    column, labels = VALUES[:, 0], LABELS[:count]
    assert int(padded.size()) == int(plain.size()) == count
    assert_same(padded.sum(VALUES), VALUES[:count].sum(0), tolerance=1e-15)
    assert_same(padded.mean(column), column[:count].mean(), tolerance=1e-15)
    assert_same(plain.mean(column[:count]), column[:count].mean())
    variance = VALUES[:count].var(0) if count > 1 else torch.zeros(2).double()
    assert_same(padded.variance(VALUES), variance, tolerance=1e-14)
    assert_same(plain.variance(VALUES[:count]), variance, tolerance=1e-14)
    sums = torch.stack([VALUES[:count][labels == label].sum(0) for label in range(3)])
    assert_same(padded.class_sums(VALUES, 3), sums, tolerance=1e-15)
    assert_same(plain.class_sums(VALUES[:count], 3), sums, tolerance=1e-15)
    assert int(padded.make_pair_mask(torch.float64).sum()) == count * (count - 1) // 2
    assert padded.make_pair_mask(torch.float64)[:count, :count].equal(plain.make_pair_mask(torch.float64))


def test_statistics_of_padding_alone_are_0() -> None:
    """A client without samples in a step of its stack."""
    batch = Batch(VALUES, LABELS, torch.zeros(5, dtype=torch.float64))
    assert float(batch.mean(VALUES[:, 0])) == 0
    assert batch.variance(VALUES).tolist() == [0, 0]
