"""Partition schemes: coverage, properties of each scheme, published rules and counts, and errors."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.files import compute_file_sha256, write_parquet
from fedpipe.data.partitions.base import Integers, SampleClientPairs, Scheme, top_up_clients
from fedpipe.data.partitions.dirichlet import Dirichlet
from fedpipe.data.partitions.dirichlet_balanced import DirichletBalanced
from fedpipe.data.partitions.dirichlet_feddw import DirichletFedDW
from fedpipe.data.partitions.dirichlet_overlap import DirichletOverlap
from fedpipe.data.partitions.file import File
from fedpipe.data.partitions.iid import IID
from fedpipe.data.partitions.pathological import Pathological
from fedpipe.data.partitions.pathological_ordered import PathologicalOrdered
from fedpipe.data.partitions.quantity import Quantity
from fedpipe.data.partitions.shards import Shards
from tests.errors import rejects

SCHEMES = [
    IID(),
    Dirichlet(alpha=0.1),
    Dirichlet(alpha=5, minimum=3),
    DirichletBalanced(minimum=2),
    DirichletFedDW(alpha=0.05),
    Pathological(),
    PathologicalOrdered(),
    Quantity(minimum=1),
    Quantity(alpha=3, minimum=2),
    Shards(),
]
EXCHANGEABLE = [
    IID(),
    Dirichlet(alpha=0.3),
    DirichletBalanced(alpha=0.3, minimum=1),
    DirichletFedDW(alpha=5),  # with a smaller alpha the first empty client gets its sample from the first classes
    Pathological(),
    Quantity(alpha=0.3, minimum=1),
    Shards(),
]
DIGITS = np.repeat(np.arange(10), 140)
MNIST = np.repeat(np.arange(10), 6000)

labeled = st.builds(
    lambda counts, seed: np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts)),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(0, 99),
)


def partition_labels(scheme: Scheme, labels: Integers, num_clients: int, seed: int = 0) -> SampleClientPairs:
    scheme.check(num_clients, len(np.unique(labels)), len(labels))
    return scheme.partition_samples(labels, np.arange(len(labels)), num_clients, np.random.default_rng(seed))


def assign_clients(scheme: Scheme, labels: Integers, num_clients: int, seed: int = 0) -> Integers:
    """Return the client of each sample."""
    sample, client, _ = partition_labels(scheme, labels, num_clients, seed)
    assert np.array_equal(sample, np.arange(len(labels)))
    return client


def count_classes(owner: Integers, labels: Integers, num_clients: int) -> Integers:
    counts = np.zeros((num_clients, labels.max() + 1), dtype=np.int64)
    np.add.at(counts, (owner, labels), 1)
    return counts


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@given(labels=labeled, clients=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_partition_covers_every_sample_and_every_client(
    scheme: Scheme, labels: Integers, clients: int, seed: int
) -> None:
    try:
        owner = assign_clients(scheme, labels, clients, seed)
    except SettingsError:
        assume(False)
    assert owner.shape == labels.shape
    assert owner.dtype == np.int64
    assert set(owner) == set(range(clients))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_partition_is_determined_by_seed(scheme: Scheme) -> None:
    first = assign_clients(scheme, DIGITS, 10)
    assert np.array_equal(first, assign_clients(scheme, DIGITS, 10))
    assert not np.array_equal(first, assign_clients(scheme, DIGITS, 10, seed=1))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_partition_depends_on_label_order_but_not_label_values(scheme: Scheme) -> None:
    assert np.array_equal(assign_clients(scheme, DIGITS, 10), assign_clients(scheme, 3 * DIGITS + 7, 10))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_partition_with_one_client_contains_all_samples(scheme: Scheme) -> None:
    labels = np.repeat([0, 1], 20)
    assert not assign_clients(scheme, labels, 1).any()


@pytest.mark.parametrize("scheme", [IID(), Dirichlet(alpha=0.01), Shards(shards_per_client=1)], ids=repr)
def test_partition_with_one_sample_per_client_covers_all_samples(scheme: Scheme) -> None:
    labels = np.repeat([0, 1, 2], 10)
    assert sorted(assign_clients(scheme, labels, 30)) == list(range(30))


def test_iid_sizes_differ_by_at_most_one_and_ignore_labels() -> None:
    owner = assign_clients(IID(), DIGITS, 9)
    assert sorted(np.bincount(owner)) == [155] * 4 + [156] * 5
    assert np.array_equal(owner, assign_clients(IID(), DIGITS[::-1], 9))


def test_dirichlet_with_large_alpha_is_nearly_iid() -> None:
    counts = count_classes(assign_clients(Dirichlet(alpha=1e6), DIGITS, 10), DIGITS, 10)
    assert np.abs(counts - 14).max() <= 1


def test_dirichlet_with_small_alpha_concentrates_classes() -> None:
    counts = count_classes(assign_clients(Dirichlet(alpha=0.001), DIGITS, 5), DIGITS, 5)
    assert (counts.max(axis=0) > 0.9 * 140).sum() >= 8


def test_dirichlet_fractions_match_moments_of_distribution() -> None:
    labels, clients, alpha = np.repeat(np.arange(400), 200), 4, 0.5
    fractions = count_classes(assign_clients(Dirichlet(alpha=alpha), labels, clients), labels, clients) / 200
    mean, variance = 1 / clients, (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert fractions.mean(axis=1) == pytest.approx(mean, abs=0.06)
    assert fractions.var(axis=1) == pytest.approx(variance, abs=0.015)


@given(labels=labeled, clients=st.integers(1, 12), alpha=st.sampled_from([0.05, 0.5, 20.0]), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_dirichlet_class_counts_match_drawn_fractions(labels: Integers, clients: int, alpha: float, seed: int) -> None:
    # draw_owners is the rule without the minimum, which no client of so few samples would reach
    owner = Dirichlet(alpha=alpha).draw_owners(labels, clients, np.random.default_rng(seed))
    rng, sizes = np.random.default_rng(seed), np.bincount(labels)
    for label, size in enumerate(sizes):
        rng.permutation(size)
        cuts = (np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * size).astype(np.int64)
        counts = np.bincount(owner[labels == label], minlength=clients)
        assert np.array_equal(counts, np.diff([0, *cuts, size]))


@pytest.mark.parametrize("scheme", EXCHANGEABLE, ids=repr)
def test_partition_has_equal_mean_class_counts_for_all_clients(scheme: Scheme) -> None:
    """All permutations of the clients are equally likely: each has the same mean number of samples of each class.

    Cuts are rounded down, as in the published rules, so the last client gets half a sample more of each class and the
    first one half a sample less.
    """
    labels, draws = np.repeat(np.arange(4), 500), 200
    counts = np.array([count_classes(assign_clients(scheme, labels, 4, seed), labels, 4) for seed in range(draws)])
    error = counts.std(axis=0) / np.sqrt(draws)
    assert (np.abs(counts.mean(axis=0) - 125) <= 4 * error + 0.5).all()


@pytest.mark.parametrize("minimum", [1, 40, 600])
def test_dirichlet_with_tiny_alpha_reaches_minimum(minimum: int) -> None:
    owner = assign_clients(Dirichlet(alpha=0.01, minimum=minimum), MNIST, 100)
    assert np.bincount(owner, minlength=100).min() >= minimum


def test_top_up_clients_moves_only_missing_samples() -> None:
    rng = np.random.default_rng(0)
    drawn = Dirichlet(alpha=0.01).draw_owners(MNIST, 100, rng)
    topped_up = top_up_clients(drawn, 100, 40, rng)
    before, after = np.bincount(drawn, minlength=100), np.bincount(topped_up, minlength=100)
    assert (drawn != topped_up).sum() == np.maximum(40 - before, 0).sum()
    assert np.array_equal(after[before < 40], np.full((before < 40).sum(), 40))
    assert after[before >= 40].min() >= 40


@given(clients=st.integers(1, 40), classes=st.integers(1, 12), k=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=150)
def test_pathological_assigns_k_classes_and_balances_owners(clients: int, classes: int, k: int, seed: int) -> None:
    assume(k <= classes <= clients * k)
    labels = np.repeat(np.arange(classes), clients + np.arange(classes))
    counts = count_classes(assign_clients(Pathological(classes_per_client=k), labels, clients, seed), labels, clients)
    assert ((counts > 0).sum(axis=1) == k).all()
    owners = (counts > 0).sum(axis=0)
    assert owners.min() == clients * k // classes
    assert owners.max() == -(-clients * k // classes)
    assert np.array_equal(counts.sum(axis=0), clients + np.arange(classes))


@pytest.mark.parametrize("scheme", [Pathological, PathologicalOrdered])
def test_pathological_equal_parts_differ_by_at_most_one_sample(scheme: type[Pathological]) -> None:
    labels = np.repeat(np.arange(10), 101)
    counts = count_classes(assign_clients(scheme(classes_per_client=5, parts="equal"), labels, 10), labels, 10)
    assert ((counts > 0).sum(axis=1) == 5).all()
    assert np.isin(counts[counts > 0], [20, 21]).all()


def test_pathological_part_sizes_and_class_pairs_vary() -> None:
    counts = count_classes(assign_clients(Pathological(), DIGITS, 20), DIGITS, 20)
    assert all(len(set(column[column > 0])) > 1 for column in counts.T)
    assert len({tuple(np.flatnonzero(row)) for row in counts}) > 5


@given(clients=st.integers(1, 20), shards=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=50)
def test_shards_have_equal_sizes_and_few_classes(clients: int, shards: int, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(DIGITS)
    owner = assign_clients(Shards(shards_per_client=shards), labels, clients, seed)
    sizes, small = np.bincount(owner), 1400 // (clients * shards)
    assert (sizes >= shards * small).all()
    assert (sizes <= shards * (small + 1)).all()
    if small >= 140:
        return
    assert ((count_classes(owner, labels, clients) > 0).sum(axis=1) <= 2 * shards).all()


def test_shards_match_partition_of_mcmahan() -> None:
    counts = count_classes(assign_clients(Shards(), MNIST, 100), MNIST, 100)
    assert (counts.sum(axis=1) == 600).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert set(np.unique(counts)) <= {0, 300, 600}


# -- the rules of PFLlib, FedDW and FedDUAL ----------------------------------------------------------------------------


def assign_like_pfllib_dir(
    labels: Integers, num_clients: int, alpha: float, rng: np.random.Generator, minimum: int
) -> tuple[Integers, int]:
    """PFLlib's "dir" as published: lists of indices, drawn again until all clients have enough samples."""
    draws = 0
    while True:
        draws += 1
        client_samples: list[list[int]] = [[] for _ in range(num_clients)]
        for label in np.unique(labels):
            members = np.where(labels == label)[0]
            rng.shuffle(members)
            fractions = rng.dirichlet(np.repeat(alpha, num_clients))
            fractions = fractions * [len(samples) < len(labels) / num_clients for samples in client_samples]
            fractions = fractions / fractions.sum()
            cuts = (np.cumsum(fractions) * len(members)).astype(int)[:-1]
            client_samples = [
                samples + part.tolist() for samples, part in zip(client_samples, np.split(members, cuts), strict=True)
            ]
        if min(len(samples) for samples in client_samples) >= minimum:
            break
    owner = np.empty(len(labels), dtype=np.int64)
    for client, samples in enumerate(client_samples):
        owner[samples] = client
    return owner, draws


@given(labels=labeled, clients=st.integers(1, 8), alpha=st.sampled_from([0.3, 1.0, 10.0]), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_dirichlet_balanced_equals_pfllib_draw_for_draw(
    labels: Integers, clients: int, alpha: float, seed: int
) -> None:
    scheme = DirichletBalanced(alpha=alpha, minimum=1)
    assume(clients <= len(labels) // 4)
    try:
        expected, draws = assign_like_pfllib_dir(labels, clients, alpha, np.random.default_rng(seed), 0)
    except ValueError:  # 0 / 0: only full clients have a positive fraction
        assume(False)
    assert draws == 1
    assert np.array_equal(scheme.draw_owners(labels, clients, np.random.default_rng(seed)), expected)


def test_dirichlet_balanced_redraws_like_pfllib() -> None:
    labels = np.random.default_rng(1).permutation(DIGITS)
    expected, draws = assign_like_pfllib_dir(labels, 20, 0.2, np.random.default_rng(0), 20)
    assert 1 < draws <= 20
    assert np.array_equal(assign_clients(DirichletBalanced(alpha=0.2, minimum=20), labels, 20, seed=0), expected)


@pytest.mark.parametrize(
    ("clients", "alpha", "first", "last"),
    [
        (20, 0.2, [0, 75, 2, 83, 0, 339, 1851, 1, 0, 633], [1, 3, 4, 2298, 1, 18, 233, 627, 0, 1]),
        (100, 0.3, [0, 35, 0, 129, 13, 113, 0, 0, 149, 18], [4, 304, 82, 141, 91, 0, 0, 0, 0, 0]),
    ],
)
def test_dirichlet_balanced_matches_pfllib_counts_of_cifar10(
    clients: int, alpha: float, first: list[int], last: list[int]
) -> None:
    """The counts are in PFLlib's config.json for 60,000 samples, drawn from NumPy's legacy generator with seed 1."""
    owner = DirichletBalanced(alpha=alpha).assign(MNIST, clients, np.random.RandomState(1))  # type: ignore[arg-type]
    counts = count_classes(owner, MNIST, clients)
    assert counts[0].tolist() == first
    assert counts[-1].tolist() == last


@given(clients=st.integers(1, 30), alpha=st.sampled_from([0.001, 0.05, 0.5]), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_dirichlet_balanced_skips_clients_with_enough_samples(clients: int, alpha: float, seed: int) -> None:
    owner = DirichletBalanced(alpha=alpha).draw_owners(DIGITS, clients, np.random.default_rng(seed))
    counts = count_classes(owner, DIGITS, clients)
    before = counts.cumsum(axis=1) - counts
    late = np.where(before >= len(DIGITS) / clients, counts, 0)
    assert not late[:-1].any()
    assert late[-1].max() <= 1  # the last client gets the remainder of rounding


def test_dirichlet_balanced_draws_again_if_only_large_clients_have_samples_of_class() -> None:
    """With a small alpha, a class has one client. Here it must be client 1 or 2."""
    scheme, sizes = DirichletBalanced(alpha=1e-6, minimum=1), np.array([10, 0, 0])
    draws = [scheme.draw_fractions(sizes, 12, np.random.default_rng(seed)).tolist() for seed in range(20)]
    assert {tuple(fractions) for fractions in draws} == {(0, 1, 0), (0, 0, 1)}


def test_dirichlet_balanced_has_smaller_largest_client_than_dirichlet() -> None:
    plain, balanced = (
        np.mean([np.bincount(assign_clients(scheme, DIGITS, 5, seed), minlength=5).max() for seed in range(40)])
        for scheme in (Dirichlet(alpha=0.5), DirichletBalanced(alpha=0.5, minimum=1))
    )
    assert balanced < 0.9 * plain


def assign_like_feddw(labels: Integers, num_clients: int, alpha: float, rng: np.random.Generator) -> list[Integers]:
    """FedDW's rule as published. An empty client gets sample 0, which keeps its owner."""
    fractions = rng.dirichlet([alpha] * num_clients, len(np.unique(labels)))
    client_parts: list[list[Integers]] = [[] for _ in range(num_clients)]
    for label, fraction in zip(np.unique(labels), fractions, strict=True):
        members = np.argwhere(labels == label).flatten()
        parts = np.split(members, (np.cumsum(fraction)[:-1] * len(members)).astype(int))
        for parts_of_client, part in zip(client_parts, parts, strict=True):
            parts_of_client.append(part)
    client_samples = [np.concatenate(parts_of_client) for parts_of_client in client_parts]
    return [samples if len(samples) else np.array([0]) for samples in client_samples]


@given(labels=labeled, clients=st.integers(1, 12), alpha=st.sampled_from([0.02, 0.3, 5.0]), seed=st.integers(0, 99))
@settings(max_examples=80)
def test_dirichlet_feddw_equals_published_rule_except_for_empty_clients(
    labels: Integers, clients: int, alpha: float, seed: int
) -> None:
    assume(clients <= len(labels))
    published = assign_like_feddw(labels, clients, alpha, np.random.default_rng(seed))
    owner = assign_clients(DirichletFedDW(alpha=alpha), labels, clients, seed)
    total = sum(len(samples) for samples in published)
    empty_count = total - len(labels)  # each is an empty client, whose sample has two owners
    moved_samples = [
        sample for client, samples in enumerate(published) for sample in samples if owner[sample] != client
    ]
    assert len(moved_samples) >= empty_count
    if not empty_count:
        assert not moved_samples
    sizes = np.bincount(owner, minlength=clients)
    assert sizes.min() >= 1
    moved = sum(max(0, len(samples) - size) for samples, size in zip(published, sizes, strict=True))
    assert moved == empty_count


def test_dirichlet_feddw_fills_empty_clients_with_first_samples() -> None:
    for seed in range(20):
        published = assign_like_feddw(DIGITS, 10, 0.02, np.random.default_rng(seed))
        empty = [client for client, samples in enumerate(published) if samples.tolist() == [0] and client]
        owner = assign_clients(DirichletFedDW(alpha=0.02), DIGITS, 10, seed)
        if len(empty) >= 2:
            assert owner[:2].tolist() == empty[:2]  # samples 0 and 1 of class 0, whose owner has other samples
            return
    pytest.fail("no seed leaves two clients empty")


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_feddw_gives_each_client_a_sample_if_there_are_no_more(seed: int) -> None:
    """With this alpha one client owns all four samples before the others are filled."""
    owner = assign_clients(DirichletFedDW(alpha=1e-3), np.zeros(4, dtype=np.int64), 4, seed)
    assert sorted(owner.tolist()) == [0, 1, 2, 3]


def assign_like_pfllib_pat(labels: Integers, num_clients: int, k: int, rng: np.random.Generator) -> Integers:
    """PFLlib's "pat" as published, without its minimum of least_samples / classes = 40 / 10 = 4 samples."""
    classes = len(np.unique(labels))
    missing_classes = [k] * num_clients
    owner = np.full(len(labels), -1)
    for label in range(classes):
        selected = [client for client in range(num_clients) if missing_classes[client] > 0]
        selected = selected[: int(np.ceil(num_clients / classes * k))]
        members = np.flatnonzero(labels == label)
        mean = len(members) / len(selected)
        numbers = rng.integers(max(int(mean / 10), 1), int(mean), len(selected) - 1).tolist()
        numbers.append(len(members) - sum(numbers))
        start = 0
        for client, number in zip(selected, numbers, strict=True):
            owner[members[start : start + number]] = client
            start += number
            missing_classes[client] -= 1
    return owner


class LegacyGenerator(np.random.RandomState):
    """NumPy's legacy generator with the method name of the new generator."""

    integers = np.random.RandomState.randint


def test_pathological_ordered_matches_pfllib_counts_of_cifar10() -> None:
    """The counts are in PFLlib's config.json for 100 clients with two classes each and seed 1."""
    owner = PathologicalOrdered().assign(MNIST, 100, LegacyGenerator(1))  # type: ignore[arg-type]
    counts = count_classes(owner, MNIST, 100)
    assert counts[0].tolist() == [67, 171, *[0] * 8]
    assert counts[19].tolist() == [2414, 3771, *[0] * 8]
    assert counts[20].tolist() == [0, 0, 94, 104, *[0] * 6]
    assert counts[99].tolist() == [*[0] * 8, 2813, 2248]


def test_pathological_ordered_assigns_same_classes_to_neighbors() -> None:
    counts = count_classes(assign_clients(PathologicalOrdered(), DIGITS, 20), DIGITS, 20)
    owned = [np.flatnonzero(row).tolist() for row in counts]
    assert owned == [[2 * group, 2 * group + 1] for group in range(5) for _ in range(4)]


@given(clients=st.integers(1, 40), classes=st.integers(1, 12), k=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=150)
def test_pathological_ordered_equals_pfllib_draw_for_draw(clients: int, classes: int, k: int, seed: int) -> None:
    assume(k <= classes <= clients * k)
    labels, scheme = np.repeat(np.arange(classes), 11 * clients), PathologicalOrdered(classes_per_client=k)
    try:
        expected = assign_like_pfllib_pat(labels, clients, k, np.random.default_rng(seed))
    except ZeroDivisionError:
        with pytest.raises(SettingsError, match="leaves class"):
            scheme.check(clients, classes, len(labels))
        return
    owner = assign_clients(scheme, labels, clients, seed)
    assert np.array_equal(owner, expected)
    class_counts = (count_classes(owner, labels, clients) > 0).sum(axis=1)
    assert 1 <= class_counts.min() <= class_counts.max() <= k
    assert classes % k or clients % (classes // k) or (class_counts == k).all()


@given(labels=labeled, clients=st.integers(1, 12), alpha=st.sampled_from([0.01, 0.5, 20.0]), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_dirichlet_overlap_class_counts_match_drawn_fractions(
    labels: Integers, clients: int, alpha: float, seed: int
) -> None:
    sample, client, split = partition_labels(DirichletOverlap(alpha=alpha), labels, clients, seed)
    assert split is None
    assert len(np.unique(np.stack([sample, client]), axis=1).T) == len(sample)  # no client draws a sample twice
    sizes = np.bincount(labels)
    fractions = np.random.default_rng(seed).dirichlet([alpha] * clients, len(sizes))  # the scheme's first draw
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    np.add.at(counts, (client, labels[sample]), 1)
    assert np.array_equal(counts.T, np.maximum(1, np.floor(fractions * sizes[:, None])))


def test_dirichlet_overlap_clients_draw_independently() -> None:
    """If two clients have half of a class each, they share a quarter of it, and a quarter has no client."""
    labels = np.zeros(4000, dtype=np.int64)
    sample, client, _ = partition_labels(DirichletOverlap(alpha=1e9), labels, 2)
    owners = np.bincount(sample, minlength=4000)
    assert np.bincount(client).tolist() == pytest.approx([2000, 2000], abs=1)
    assert [(owners == number).mean() for number in range(3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_dirichlet_overlap_draws_only_given_samples() -> None:
    labels, samples = np.tile([0, 1], 50), np.arange(40, 90)
    pairs = DirichletOverlap(alpha=1.0).partition_samples(labels, samples, 7, np.random.default_rng(0))
    assert set(pairs.sample) <= set(samples)


def test_dirichlet_overlap_is_determined_by_seed() -> None:
    first, repeated, other = (partition_labels(DirichletOverlap(), DIGITS, 10, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.sample, repeated.sample)
    assert np.array_equal(first.client, repeated.client)
    assert not np.array_equal(first.sample, other.sample)


# -- quantity ----------------------------------------------------------------------------------------------------------


def test_quantity_skews_sizes_but_not_classes() -> None:
    counts = count_classes(assign_clients(Quantity(alpha=0.5), MNIST, 20), MNIST, 20)
    sizes = counts.sum(axis=1)
    assert sizes.min() >= 10
    assert sizes.max() > 5 * np.median(sizes) / 2
    large = counts[sizes > 1000]
    assert np.abs(large / large.sum(axis=1, keepdims=True) - 0.1).max() < 0.05


def test_quantity_fractions_match_moments_of_distribution() -> None:
    owners = [assign_clients(Quantity(alpha=2, minimum=1), DIGITS, 4, seed) for seed in range(300)]
    fractions = np.array([np.bincount(owner) for owner in owners]) / 1400
    assert fractions.mean(axis=0) == pytest.approx(0.25, abs=0.03)
    assert fractions.var(axis=0) == pytest.approx(0.25 * 0.75 / (4 * 2 + 1), abs=0.006)


@given(size=st.integers(1, 400), clients=st.integers(1, 12), alpha=st.sampled_from([0.05, 2.0, 20.0]))
@settings(max_examples=60)
def test_quantity_sizes_match_drawn_fractions(size: int, clients: int, alpha: float) -> None:
    owner = Quantity(alpha=alpha).draw_owners(np.zeros(size, dtype=np.int64), clients, np.random.default_rng(0))
    fractions = np.random.default_rng(0).dirichlet([alpha] * clients)  # the scheme's first draw
    cuts = (np.cumsum(fractions)[:-1] * size).astype(np.int64)
    assert np.array_equal(np.bincount(owner, minlength=clients), np.diff([0, *cuts, size]))


# -- partition files ---------------------------------------------------------------------------------------------------


def write_scheme(path: Path, **columns: list[object]) -> File:
    """Write these columns to a file, and return a scheme that reads it."""
    if path.suffix == ".parquet":
        write_parquet(path, pa.table(columns))
    else:
        rows = zip(*columns.values(), strict=True)
        path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return make_file_scheme(path)


def make_file_scheme(path: Path) -> File:
    """Return a scheme that reads this file."""
    return File(path=str(path), sha256=compute_file_sha256(path))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_file_scheme_returns_pairs_of_file(tmp_path: Path, kind: str) -> None:
    labels = np.array([0, 1, 0, 1])
    pairs = partition_labels(write_scheme(tmp_path / f"own.{kind}", sample=[3, 0, 2], client=[0, 1, 0]), labels, 2)
    assert pairs.sample.tolist() == [3, 0, 2]
    assert pairs.client.tolist() == [0, 1, 0]
    assert pairs.split is None


def test_permuted_clients_in_file_permute_assignment(tmp_path: Path) -> None:
    owner, order = np.arange(1400) % 7, np.random.default_rng(0).permutation(7)
    files = [
        write_scheme(tmp_path / f"{name}.parquet", sample=list(range(1400)), client=clients.tolist())
        for name, clients in (("as-is", owner), ("permuted", order[owner]))
    ]
    first, second = (assign_clients(scheme, DIGITS, 7) for scheme in files)
    assert np.array_equal(order[first], second)


def test_file_scheme_reads_split_column(tmp_path: Path) -> None:
    scheme = write_scheme(
        tmp_path / "own.csv",
        sample=[0, 1, 2, 3],
        client=[0, 1, 0, -1],
        split=["train", "train", "validation", "test"],
        note=["a", "b", "c", "d"],
    )
    pairs = partition_labels(scheme, np.array([0, 0, 1, 1]), 2)
    assert pairs.split.tolist() == ["train", "train", "validation", "test"]


def test_file_scheme_needs_matching_sha256(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    scheme = write_scheme(path, sample=[0, 1], client=[0, 1])
    for sha256, problem in (("", "missing for"), ("12ab", "'12ab' is not the SHA-256 of")):
        with rejects(f"partition.sha256: {problem} {path}. ... {scheme.sha256}"):
            File(path=str(path), sha256=sha256).check(2, 1, 2)
    scheme.check(2, 1, 2)
    path.write_text("sample,client\n0,1\n1,0\n")
    with pytest.raises(SettingsError, match=r"^partition\.sha256: .* is not the SHA-256 of"):
        scheme.partition_samples(np.array([0, 0]), np.arange(2), 2, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sample": [0, 1]}, "own.csv has no column 'client'"),
        ({"sample": [0, 1.5], "client": [0, 1]}, "column 'sample' of .* not integers"),
        ({"sample": [0, ""], "client": [0, 1]}, "column 'sample' of .* not integers"),
        ({"sample": [0, 1], "client": [0, 3]}, r"^federation\.clients: 2 .* client 3\. Use 4\."),
        ({"sample": [0, 1], "client": [0, 0]}, "no training sample to client 1"),
        ({"sample": [0, 1], "client": [0, 1], "split": ["train", "test"]}, "no training sample to client 1"),
        (
            {"sample": [0, 1], "client": [0, 1], "split": ["train", "tset"]},
            "split 'tset' of .* Use train, validation, test",
        ),
        ({"sample": [0, 1, 2], "client": [0, 1, -1]}, "client -1 of .* Use at least 0"),
        ({"sample": [0, 1, 1], "client": [0, 1, 1]}, "a sample twice for one client"),
        ({"sample": [], "client": []}, "not integers|no training sample"),
    ],
    ids=str,
)
def test_file_scheme_rejects_invalid_columns(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        write_scheme(tmp_path / "own.csv", **columns).check(2, 2, 10)
    assert str(error.value).startswith(("partition.path: ", "federation.clients: "))


@pytest.mark.parametrize(
    "rows", ["sample,client\n7,0,0\n8,1,1\n", "sample,client\n0,7,0,0\n", "sample,client\n7,0,\n8,1,\n"]
)
def test_file_scheme_rejects_rows_longer_than_header(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(rows)
    with rejects(f"partition.path: {path} can't be read as CSV (a row has more fields than "):
        make_file_scheme(path).check(2, 2, 10)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("name", ["sample", "client", "split"])
def test_file_scheme_rejects_duplicate_column(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / f"own.{kind}"
    columns = {"sample": [0, 1], "client": [0, 1], "split": ["train", "train"], "note": ["a", "b"]}
    names = [*columns, "note", name]
    if kind == "parquet":
        write_parquet(path, pa.table([columns[column] for column in names], names=names))
    else:
        rows = zip(*(columns[column] for column in names), strict=True)
        path.write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)))
    with rejects(f"partition.path: {path} has the column '{name}' more than once"):
        make_file_scheme(path).check(2, 2, 10)


def test_file_scheme_rejects_unavailable_samples(tmp_path: Path) -> None:
    scheme = write_scheme(tmp_path / "own.csv", sample=[0, 4], client=[0, 1])
    for samples in (np.arange(4), np.array([0, 1, 2, 3, 5])):
        with pytest.raises(SettingsError, match=r"^partition\.path: sample 4 of .* can't be assigned"):
            scheme.partition_samples(np.zeros(6, dtype=np.int64), samples, 2, np.random.default_rng(0))


def test_file_scheme_rejects_missing_and_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "own.parquet"
    with pytest.raises(SettingsError, match=r"^partition\.path: .*own\.parquet can't be read \(No such file"):
        File(path=str(path)).check(1, 1, 1)
    path.write_text("sample,client\n")
    with pytest.raises(SettingsError, match=r"^partition\.path: .* can't be read as Parquet"):
        make_file_scheme(path).check(1, 1, 1)


# -- termination -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["dirichlet", "dirichlet-balanced", "dirichlet-feddw", "dirichlet-overlap", "quantity"]
)
@pytest.mark.parametrize("classes", [10, 100])
def test_partition_of_100_clients_with_tiny_alpha_ends(name: str, classes: int) -> None:
    labels = np.repeat(np.arange(classes), 60_000 // classes)
    scheme: Scheme = registry.build_component(component.PARTITION, name, {"alpha": 0.01})  # type: ignore[assignment]
    pairs = partition_labels(scheme, labels, 100)
    assert np.bincount(pairs.client, minlength=100).min() >= getattr(scheme, "minimum", 1)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "clients", "samples", "problem", "advice"),
    [
        (IID(), 30, 20, "federation.clients: 30", "Use at most 20."),
        (Dirichlet(minimum=5), 10, 45, "partition.minimum: 5", "Use at most 4, or federation.clients at most 9."),
        (Shards(shards_per_client=5), 10, 45, "partition.shards_per_client: 5", "Use at most 4."),
        (Pathological(classes_per_client=11), 10, 1000, "partition.classes_per_client: 11", "Use at most 10."),
        (Pathological(), 4, 1000, "partition.classes_per_client: 2", "Use at least 3."),
        (Pathological(classes_per_client=3), 10, 25, "partition.classes_per_client: 3", "Use at most 2."),
        (
            PathologicalOrdered(classes_per_client=3),
            9,
            1000,
            "partition.classes_per_client: 3 for each of 9 clients leaves class 9",
            "or the scheme 'pathological'.",
        ),
        (DirichletBalanced(), 100, 1437, "partition.minimum: 40", "Use at most 14, or federation.clients at most 35."),
        (Quantity(minimum=2000), 10, 1437, "partition.minimum: 2000", "Use at most 143."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Scheme) else str(value),
)
def test_scheme_rejects_impossible_settings(
    scheme: Scheme, clients: int, samples: int, problem: str, advice: str
) -> None:
    with rejects(problem) as error:
        scheme.check(clients, 10, samples)
    assert str(error.value).endswith(advice)


def test_pathological_rejects_class_with_too_few_samples() -> None:
    labels = np.repeat([0, 1, 2], [50, 50, 3])
    with pytest.raises(
        SettingsError, match=r"^partition\.classes_per_client: 2 .* gives class 2 to \d+ clients, .*3 samples"
    ):
        assign_clients(Pathological(), labels, 9)


@pytest.mark.parametrize(
    ("name", "parameters", "key"),
    [
        ("dirichlet", {"alpha": 0}, "partition.alpha: "),
        ("dirichlet", {"alpha": float("inf")}, "partition.alpha: "),
        ("dirichlet", {"minimum": 0}, "partition.minimum: "),
        ("pathological", {"classes_per_client": 0}, "partition.classes_per_client: "),
        ("shards", {"shards_per_client": 0}, "partition.shards_per_client: "),
        ("dirichlet-balanced", {"minimum": 0}, "partition.minimum: "),
        ("dirichlet-feddw", {"minimum": 10}, "partition.minimum: unknown key"),
        ("dirichlet-overlap", {"alpha": 0}, "partition.alpha: "),
        ("quantity", {"alpha": -1}, "partition.alpha: "),
        ("file", {}, "partition.path: missing. Give a value."),
        ("iid", {"alpha": 1}, "partition.alpha: unknown key"),
    ],
)
def test_scheme_rejects_invalid_parameters(name: str, parameters: dict[str, float], key: str) -> None:
    with rejects(key):
        registry.build_component(component.PARTITION, name, parameters)


def test_property_tests_cover_all_schemes() -> None:
    """If this fails, add the new scheme to SCHEMES. Other files test the exceptions."""
    tested_names = {registry.get_component_name(component.PARTITION, type(scheme)) for scheme in SCHEMES}
    exceptions = {"dirichlet-overlap", "file", "natural", "by-domain", "flwr-datasets"}
    assert tested_names | exceptions == set(registry.list_components(component.PARTITION))


def test_dirichlet_schemes_have_defaults() -> None:
    assert registry.build_component(component.PARTITION, "dirichlet", {}) == Dirichlet(alpha=0.5, minimum=1, seed=None)
    balanced = registry.build_component(component.PARTITION, "dirichlet-balanced", {})
    assert balanced == DirichletBalanced(alpha=0.1, minimum=40)
