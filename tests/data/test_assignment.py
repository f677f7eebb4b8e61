"""Assignments: coverage, official and pooled test sets, seeds, and reading from a file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.data.assignment import Assignment, assign_samples, compute_assignment_sha256
from fedpipe.data.partitions.base import Integers, Scheme
from fedpipe.data.partitions.dirichlet import Dirichlet
from fedpipe.data.partitions.dirichlet_balanced import DirichletBalanced
from fedpipe.data.partitions.dirichlet_feddw import DirichletFedDW
from fedpipe.data.partitions.dirichlet_overlap import DirichletOverlap
from fedpipe.data.partitions.file import File
from fedpipe.data.partitions.iid import IID
from fedpipe.data.partitions.pathological import Pathological
from fedpipe.data.partitions.quantity import Quantity

Split = Literal["official", "pooled"]
SPLITS: tuple[Split, ...] = ("official", "pooled")


@dataclass(frozen=True, kw_only=True)
class FixedScheme(Scheme):
    """Assigns each sample to the client in ``owner``."""

    owner: tuple[int, ...]

    @override
    def assign(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        return np.array(self.owner)


@dataclass(frozen=True, kw_only=True)
class UnseededScheme(Scheme):
    """Draws its numbers from a generator without a seed, or from that of its argument."""

    is_seeded: bool = False

    @override
    def assign(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        generator = rng if self.is_seeded else np.random.default_rng()
        return generator.permutation(len(labels)) % num_clients


def make_labels(train: int = 100, test: int = 25, num_classes: int = 10) -> tuple[Integers, np.ndarray]:
    """Return shuffled labels and the test mask, with the given numbers of samples of each class."""
    labels = np.repeat(np.arange(num_classes), train + test)
    is_test = np.tile(np.arange(train + test) < test, num_classes)
    order = np.random.default_rng(0).permutation(len(labels))
    return labels[order], is_test[order]


def assign_digits(
    scheme: Scheme,
    split: Split,
    num_clients: int = 10,
    test_fraction: float = 0.25,
    seed: int = 0,
    stratified: bool = False,
    validation: float = 0,
    **sizes: int,
) -> tuple[Any, Integers, np.ndarray]:
    labels, is_test = make_labels(**sizes)
    table = assign_samples(scheme, labels, is_test, num_clients, split, test_fraction, seed, stratified, validation)
    return table, labels, is_test


def assign_to_owners(
    owner: Sequence[int],
    labels: Sequence[int],
    test: Sequence[bool] | None = None,
    fraction: float = 0.25,
    seed: int = 0,
    **options: Any,
) -> Assignment:
    """Return the assignment if each sample has this owner. Without ``test``, the split is pooled."""
    scheme, split = FixedScheme(owner=tuple(owner)), SPLITS[test is None]
    is_test = np.zeros(len(labels), dtype=np.bool_) if test is None else np.array(test)
    table = assign_samples(scheme, np.array(labels), is_test, max(owner) + 1, split, fraction, seed, **options)
    return Assignment.from_table(table)


@given(
    split=st.sampled_from(SPLITS),
    scheme=st.sampled_from(
        [
            IID(),
            Dirichlet(alpha=0.05),
            DirichletBalanced(minimum=3),
            DirichletFedDW(alpha=0.05),
            Pathological(classes_per_client=3),
            Quantity(minimum=1),
        ]
    ),
    clients=st.integers(4, 25),
    seed=st.integers(0, 99),
    stratified=st.booleans(),
    validation=st.sampled_from([0, 0.1, 0.9]),
)
@settings(max_examples=80)
def test_assignment_contains_every_sample_once_and_trains_every_client(
    split: Split, scheme: Scheme, clients: int, seed: int, stratified: bool, validation: float
) -> None:
    table, labels, _ = assign_digits(scheme, split, clients, seed=seed, stratified=stratified, validation=validation)
    assert table["sample"].to_pylist() == list(range(len(labels)))
    assert table["label"].to_pylist() == labels.tolist()
    assert [str(kind) for kind in table.schema.types] == ["int64", "int32", "int64", "string"]
    assignment = Assignment.from_table(table)
    all_samples = np.concatenate([*assignment.train, *assignment.validation, assignment.global_test])
    assert np.array_equal(np.sort(all_samples), np.arange(len(labels)))
    assert len(assignment.train) == len(assignment.validation) == len(assignment.test) == clients
    assert assignment.class_counts.sum(axis=1).min() >= 1
    assert any(len(samples) for samples in assignment.validation) == bool(validation)
    assert set(np.concatenate(assignment.test)) <= set(assignment.global_test)


@pytest.mark.parametrize("split", SPLITS)
def test_assignment_is_determined_by_seed(split: Split) -> None:
    first, *_ = assign_digits(IID(), split)
    assert first.equals(assign_digits(IID(), split)[0])
    assert not first.equals(assign_digits(IID(), split, seed=1)[0])


@pytest.mark.parametrize("split", SPLITS)
def test_partition_seed_overrides_run_seed(split: Split) -> None:
    fixed = [assign_digits(Dirichlet(seed=7), split, seed=seed)[0] for seed in (0, 1)]
    assert fixed[0].equals(fixed[1])
    assert fixed[0].equals(assign_digits(Dirichlet(), split, seed=7)[0])


@pytest.mark.parametrize("scheme", [IID(), Dirichlet(alpha=0.1), Pathological()], ids=repr)
def test_official_test_sets_match_class_proportions_of_clients(scheme: Scheme) -> None:
    table, labels, is_test = assign_digits(scheme, "official")
    assignment = Assignment.from_table(table)
    assert np.array_equal(assignment.global_test, np.flatnonzero(is_test))
    assert np.array_equal(np.sort(np.concatenate(assignment.test)), assignment.global_test)
    for counts, test in zip(assignment.class_counts, assignment.test, strict=True):
        assert np.abs(np.bincount(labels[test], minlength=10) - counts * 25 / 100).max() < 1


def test_official_test_sizes_follow_largest_remainder() -> None:
    assignment = assign_to_owners([0, 0, 0, 1, 1, 2], labels=[0] * 10, test=[False] * 6 + [True] * 4)
    # quotas 2, 4/3, 2/3: the last sample goes to the third client
    assert [len(test) for test in assignment.test] == [2, 1, 1]
    assert [train.tolist() for train in assignment.train] == [[0, 1, 2], [3, 4], [5]]
    assert assignment.class_counts.sum(axis=1).tolist() == [3, 2, 1]


def test_largest_remainder_breaks_ties_at_random() -> None:
    assignments = [assign_to_owners(range(4), [0] * 5, [False] * 4 + [True], seed=seed) for seed in range(40)]
    assert {np.argmax([len(test) for test in assignment.test]) for assignment in assignments} == {0, 1, 2, 3}


def test_class_without_training_client_is_only_in_global_test_set() -> None:
    labels = np.array([0, 0, 1, 1, 2, 0])
    is_test = np.array([False, False, False, False, True, True])
    table = assign_samples(FixedScheme(owner=(0, 0, 1, 1)), labels, is_test, 2, "official", 0.25, 0)
    assert table["client"].to_pylist() == [0, 0, 1, 1, -1, 0]
    assignment = Assignment.from_table(table)
    assert assignment.global_test.tolist() == [4, 5]
    assert [test.tolist() for test in assignment.test] == [[5], []]
    assert assignment.class_counts.tolist() == [[2, 0, 0], [0, 2, 0]]


@pytest.mark.parametrize(
    ("test_fraction", "test_sizes"), [(0.25, [0, 0, 1, 25]), (0.29, [0, 0, 1, 29]), (0.99, [0, 2, 3, 99])]
)
def test_pooled_test_set_sizes_are_rounded_down(test_fraction: float, test_sizes: list[int]) -> None:
    sizes = [1, 3, 4, 100]
    assignment = assign_to_owners(np.repeat(np.arange(4), sizes).tolist(), [0] * 108, fraction=test_fraction)
    assert [len(test) for test in assignment.test] == test_sizes
    assert [len(train) + len(test) for train, test in zip(assignment.train, assignment.test, strict=True)] == sizes
    assert assignment.train[0].tolist() == [0]


def test_pooled_split_ignores_official_split() -> None:
    labels, is_test = make_labels()
    tables = [assign_samples(IID(), labels, test, 10, "pooled", 0.25, 0) for test in (is_test, ~is_test)]
    assert tables[0].equals(tables[1])


def test_pooled_test_set_of_client_ignores_other_clients() -> None:
    first, second = (
        assign_to_owners([0] * 20 + others, [0] * 40, fraction=0.5) for others in ([1] * 20, [1] * 5 + [2] * 15)
    )
    assert np.array_equal(first.test[0], second.test[0])


def test_assignment_supports_clients_with_one_sample() -> None:
    table, *_ = assign_digits(IID(), "official", num_clients=50, train=5, test=3)
    assignment = Assignment.from_table(table)
    assert assignment.class_counts.sum(axis=1).tolist() == [1] * 50
    assert assignment.class_counts.shape == (50, 10)
    assert sum(len(test) for test in assignment.test) == 30


def test_assignment_sha256_equals_pinned_value() -> None:
    columns = {"sample": [0, 1, 2], "client": [1, 0, -1], "label": [3, 3, 4], "split": ["train", "validation", "test"]}
    sha256 = compute_assignment_sha256(pa.table(columns))
    assert sha256 == "0b2c72382213410a3d85071dd8ec4406140e82545d443e30a36c0e298d403e1b"


def test_assignment_survives_write_and_read(tmp_path: Path) -> None:
    table, *_ = assign_digits(Dirichlet(), "official")
    path = tmp_path / "assignment.parquet"
    sha256 = files.write_parquet(path, table)
    assignment, direct = Assignment.read(path, sha256), Assignment.from_table(table)
    assert files.read_parquet(path).equals(table)
    assert np.array_equal(assignment.class_counts, direct.class_counts)
    assert all(np.array_equal(a, b) for a, b in zip(assignment.train, direct.train, strict=True))
    assert all(
        array.dtype == np.int64 for array in [*assignment.train, *assignment.test, assignment.class_counts.sum(axis=1)]
    )
    assert assignment.global_test.dtype == np.int64
    assert all((np.diff(array) > 0).all() for array in [*assignment.train, *assignment.test, assignment.global_test])


def test_official_split_rejects_more_clients_than_training_samples() -> None:
    labels, is_test = make_labels(train=1, test=1)
    with pytest.raises(SettingsError, match=r"^federation\.clients: 11 .* Use at most 10\.$"):
        assign_samples(IID(), labels, is_test, 11, "official", 0.25, 0)
    assign_samples(IID(), labels, is_test, 11, "pooled", 0.25, 0)


def test_official_split_needs_test_set() -> None:
    with pytest.raises(SettingsError, match=r"^dataset\.split: 'official' needs a test set"):
        assign_samples(IID(), np.zeros(9, dtype=np.int64), np.zeros(9, dtype=np.bool_), 2, "official", 0.25, 0)


@pytest.mark.parametrize("owner", [(0, 0, 0), (0, 1), (0, 1, 2), (0, 1, -1)])
def test_assignment_rejects_invalid_output_of_custom_scheme(owner: tuple[int, ...]) -> None:
    labels = np.zeros(3, dtype=np.int64)
    with pytest.raises(SettingsError, match=r"^partition\.scheme: '.*FixedScheme' .* the 2 clients"):
        assign_samples(FixedScheme(owner=owner), labels, labels == 1, 2, "pooled", 0.25, 0)


@pytest.mark.parametrize("split", SPLITS)
def test_assignment_rejects_custom_scheme_that_ignores_its_generator(split: Split) -> None:
    """Its clients would differ between machines, although runs have the same key."""
    with pytest.raises(SettingsError, match=r"^partition\.scheme: '.*UnseededScheme' .* `rng`"):
        assign_digits(UnseededScheme(), split)
    assign_digits(UnseededScheme(is_seeded=True), split)


# -- test and validation samples ---------------------------------------------------------------------------------------


@given(
    test_fraction=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    scheme=st.sampled_from([IID(), Dirichlet(alpha=0.2), Pathological(classes_per_client=3)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_stratified_test_set_matches_class_proportions_of_client(
    test_fraction: float, scheme: Scheme, seed: int
) -> None:
    table, labels, _ = assign_digits(scheme, "pooled", test_fraction=test_fraction, seed=seed, stratified=True)
    assignment = Assignment.from_table(table)
    for train, test in zip(assignment.train, assignment.test, strict=True):
        size, test_counts = len(train) + len(test), np.bincount(labels[test], minlength=10)
        assert test_counts.sum() == math.floor(size * test_fraction + 1e-9)
        exact = test_counts.sum() * (test_counts + np.bincount(labels[train], minlength=10)) / size
        assert np.abs(test_counts - exact).max() < 1
        assert not (test_counts[exact == 0]).any()


def test_stratified_split_follows_largest_remainder() -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 4])
    assignments = [assign_to_owners([0] * 84, labels, seed=seed, stratified=True) for seed in range(20)]
    splits = [tuple(np.bincount(labels[assignment.test[0]]).tolist()) for assignment in assignments]
    assert splits[0] == (12, 8, 1)  # exact quotas 12.5, 7.5 and 1: the tie is broken at random
    assert {*splits} == {(13, 7, 1), (12, 8, 1)}


def test_unstratified_split_ignores_classes() -> None:
    one, other = (assign_to_owners([0] * 40, labels, fraction=0.5) for labels in ([0] * 40, [0, 1, 2, 3] * 10))
    assert np.array_equal(one.train, other.train)
    assert np.array_equal(one.test, other.test)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("stratified", [False, True])
def test_validation_samples_come_from_training_samples_of_client(split: Split, stratified: bool) -> None:
    without_validation, with_validation = (
        Assignment.from_table(assign_digits(Dirichlet(alpha=0.3), split, stratified=stratified, validation=fraction)[0])
        for fraction in (0, 0.2)
    )
    assert not any(len(samples) for samples in without_validation.validation)
    assert np.array_equal(with_validation.global_test, without_validation.global_test)
    for client in range(10):
        assert np.array_equal(with_validation.test[client], without_validation.test[client])
        assert len(with_validation.validation[client]) == len(without_validation.train[client]) // 5
        both = np.sort(np.concatenate([with_validation.train[client], with_validation.validation[client]]))
        assert np.array_equal(both, without_validation.train[client])
    assert with_validation.class_counts.sum(axis=1).tolist() == [len(train) for train in with_validation.train]


def test_stratified_validation_set_matches_class_proportions() -> None:
    table, labels, _ = assign_digits(IID(), "official", num_clients=2, stratified=True, validation=0.1, train=100)
    for samples, counts in zip(
        Assignment.from_table(table).validation, Assignment.from_table(table).class_counts, strict=True
    ):
        assert np.abs(np.bincount(labels[samples], minlength=10) - counts / 9).max() < 1


def test_client_with_one_sample_has_no_validation_set() -> None:
    assignment = assign_to_owners([0, 1, 1], [0] * 3, fraction=0.5, validation_fraction=0.9)
    assert [len(samples) for samples in assignment.validation] == [0, 0]


# -- overlapping clients -----------------------------------------------------------------------------------------------


def test_dirichlet_overlap_has_one_row_per_sample_and_client() -> None:
    table, labels, is_test = assign_digits(DirichletOverlap(alpha=0.5), "official")
    rows = list(zip(table["sample"].to_pylist(), table["client"].to_pylist(), strict=True))
    assert rows == sorted(set(rows))
    assignment = Assignment.from_table(table)
    train_samples = np.concatenate(assignment.train)
    assert len(np.unique(train_samples)) < len(train_samples)  # some samples have several clients
    assert len(np.unique(train_samples)) < (~is_test).sum()  # some samples have no client
    assert not is_test[train_samples].any()
    assert (assignment.class_counts >= 1).all()
    assert np.array_equal(assignment.class_counts.sum(axis=1), [len(train) for train in assignment.train])
    assert np.array_equal(labels[table["sample"].to_numpy()], table["label"].to_numpy())


def test_test_sets_of_overlapping_clients_are_disjoint_and_proportional() -> None:
    table, labels, is_test = assign_digits(DirichletOverlap(alpha=0.5), "official")
    assignment = Assignment.from_table(table)
    assert np.array_equal(assignment.global_test, np.flatnonzero(is_test))
    assert np.array_equal(np.sort(np.concatenate(assignment.test)), assignment.global_test)
    class_sizes = assignment.class_counts.sum(axis=0)
    for counts, test in zip(assignment.class_counts, assignment.test, strict=True):
        assert np.abs(np.bincount(labels[test], minlength=10) - counts * 25 / class_sizes).max() < 1


def test_dirichlet_overlap_rejects_validation_fraction_and_pooled_split() -> None:
    with pytest.raises(SettingsError, match=r"^dataset\.validation_fraction: 0\.5 .* clients share samples.* Use 0\.$"):
        assign_digits(DirichletOverlap(alpha=5), "official", validation=0.5)
    with pytest.raises(SettingsError, match=r"^dataset\.split: 'pooled' .* clients share samples.* Use 'official'\.$"):
        assign_digits(DirichletOverlap(), "pooled")


# -- partition files ---------------------------------------------------------------------------------------------------


def write_scheme(path: Path, table: Any) -> File:
    """Write the table to a file, and return a scheme that reads it."""
    return File(path=str(path), sha256=files.write_parquet(path, table))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("scheme", [Dirichlet(alpha=0.3), DirichletOverlap(alpha=0.3)], ids=repr)
def test_file_scheme_reproduces_written_assignment(tmp_path: Path, split: Split, scheme: Scheme) -> None:
    table, labels, is_test = assign_digits(scheme, "official", validation=0 if scheme.has_overlap else 0.1)
    scheme = write_scheme(tmp_path / "assignment.parquet", table)
    for seed in (0, 1):
        assert assign_samples(scheme, labels, is_test, 10, split, 0.25, seed).equals(table)


@pytest.mark.parametrize("split", SPLITS)
def test_file_scheme_without_split_column_is_split_like_other_schemes(tmp_path: Path, split: Split) -> None:
    table, labels, is_test = assign_digits(Dirichlet(alpha=0.3), split, validation=0.1)
    partitioned = (
        table if split == "pooled" else table.filter(np.isin(table["split"].to_numpy(), ["train", "validation"]))
    )
    scheme = write_scheme(tmp_path / "own.parquet", partitioned.select(["client", "sample"]))
    assert assign_samples(scheme, labels, is_test, 10, split, 0.25, 0, validation_fraction=0.1).equals(table)


def test_file_scheme_may_omit_samples(tmp_path: Path) -> None:
    table, labels, is_test = assign_digits(IID(), "pooled")
    scheme = write_scheme(tmp_path / "own.parquet", table.slice(0, 100).select(["sample", "client"]))
    assignment = Assignment.from_table(assign_samples(scheme, labels, is_test, 10, "pooled", 0.25, 0))
    assert sum(map(len, assignment.train)) + len(assignment.global_test) == 100


def test_file_scheme_with_shared_samples_rejects_pooled_split(tmp_path: Path) -> None:
    table, labels, is_test = assign_digits(DirichletOverlap(alpha=0.3), "official")
    train = table.filter(table["split"].to_numpy() == "train").select(["sample", "client"])
    scheme = write_scheme(tmp_path / "own.parquet", train)
    assign_samples(scheme, labels, is_test, 10, "official", 0.25, 0)
    with pytest.raises(SettingsError, match=r"^dataset\.split: 'pooled' .* clients share samples"):
        assign_samples(scheme, labels, is_test, 10, "pooled", 0.25, 0)
