"""Partition schemes: true partitions, nobody empty, what each promises, errors as sentences."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedpipe import registry
from fedpipe.data.partitions.base import Integers, Scheme
from fedpipe.data.partitions.dirichlet import Dirichlet
from fedpipe.data.partitions.iid import IID
from fedpipe.data.partitions.pathological import Pathological
from fedpipe.data.partitions.shards import Shards
from fedpipe.errors import SettingsError

SCHEMES = [IID(), Dirichlet(alpha=0.1), Dirichlet(alpha=5, minimum=3), Pathological(), Shards()]
DIGITS = np.repeat(np.arange(10), 140)

labelled = st.builds(
    lambda counts, seed: np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts)),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(0, 99),
)


def deal(scheme: Scheme, labels: Integers, clients: int, seed: int = 0) -> Integers:
    scheme.check(clients, len(np.unique(labels)), len(labels))
    return scheme.assign(labels, clients, np.random.default_rng(seed))


def counts_of(owner: Integers, labels: Integers, clients: int) -> Integers:
    counts = np.zeros((clients, labels.max() + 1), dtype=np.int64)
    np.add.at(counts, (owner, labels), 1)
    return counts


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@given(labels=labelled, clients=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_sample_has_one_client_and_every_client_a_sample(
    scheme: Scheme, labels: Integers, clients: int, seed: int
) -> None:
    try:
        owner = deal(scheme, labels, clients, seed)
    except SettingsError:
        assume(False)
    assert owner.shape == labels.shape
    assert owner.dtype == np.int64
    assert set(owner) == set(range(clients))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_seed_is_an_assignment(scheme: Scheme) -> None:
    first = deal(scheme, DIGITS, 10)
    assert np.array_equal(first, deal(scheme, DIGITS, 10))
    assert not np.array_equal(first, deal(scheme, DIGITS, 10, seed=1))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_only_the_order_of_labels_counts_not_their_values(scheme: Scheme) -> None:
    assert np.array_equal(deal(scheme, DIGITS, 10), deal(scheme, 3 * DIGITS + 7, 10))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_one_client_owns_all(scheme: Scheme) -> None:
    labels = np.repeat([0, 1], 20)
    assert not deal(scheme, labels, 1).any()


@pytest.mark.parametrize("scheme", [IID(), Dirichlet(alpha=0.01), Shards(shards_per_client=1)], ids=repr)
def test_as_many_clients_as_samples(scheme: Scheme) -> None:
    labels = np.repeat([0, 1, 2], 10)
    assert sorted(deal(scheme, labels, 30)) == list(range(30))


def test_iid_sizes_differ_by_at_most_one_and_labels_do_not_matter() -> None:
    owner = deal(IID(), DIGITS, 9)
    assert sorted(np.bincount(owner)) == [155] * 4 + [156] * 5
    assert np.array_equal(owner, deal(IID(), DIGITS[::-1], 9))


def test_dirichlet_is_near_iid_for_a_large_alpha() -> None:
    counts = counts_of(deal(Dirichlet(alpha=1e6), DIGITS, 10), DIGITS, 10)
    assert np.abs(counts - 14).max() <= 1


def test_dirichlet_gives_a_class_to_few_for_a_small_alpha() -> None:
    counts = counts_of(deal(Dirichlet(alpha=0.001), DIGITS, 5), DIGITS, 5)
    assert (counts.max(axis=0) > 0.9 * 140).sum() >= 8


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    labels, clients, alpha = np.repeat(np.arange(400), 200), 4, 0.5
    shares = counts_of(deal(Dirichlet(alpha=alpha), labels, clients), labels, clients) / 200
    mean, variance = 1 / clients, (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.mean(axis=1) == pytest.approx(mean, abs=0.06)
    assert shares.var(axis=1) == pytest.approx(variance, abs=0.015)


@pytest.mark.parametrize("minimum", [1, 40, 600])
def test_dirichlet_keeps_its_promise_where_redrawing_could_not(minimum: int) -> None:
    labels = np.repeat(np.arange(10), 6000)
    owner = deal(Dirichlet(alpha=0.01, minimum=minimum), labels, 100)
    assert np.bincount(owner, minlength=100).min() >= minimum


def test_dirichlet_moves_no_more_than_it_must() -> None:
    labels, rng = np.repeat(np.arange(10), 6000), np.random.default_rng(0)
    scheme = Dirichlet(alpha=0.01, minimum=40)
    drawn = scheme._draw(labels, 100, rng)
    mended = scheme._repair(drawn, 100, rng)
    before, after = np.bincount(drawn, minlength=100), np.bincount(mended, minlength=100)
    assert (drawn != mended).sum() == np.maximum(40 - before, 0).sum()
    assert np.array_equal(after[before < 40], np.full((before < 40).sum(), 40))
    assert after[before >= 40].min() >= 40


@given(clients=st.integers(1, 40), classes=st.integers(1, 12), k=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_pathological_gives_everyone_k_classes_and_every_class_its_owners(
    clients: int, classes: int, k: int, seed: int
) -> None:
    assume(k <= classes <= clients * k)
    labels = np.repeat(np.arange(classes), clients + np.arange(classes))
    counts = counts_of(deal(Pathological(classes_per_client=k), labels, clients, seed), labels, clients)
    assert ((counts > 0).sum(axis=1) == k).all()
    owners = (counts > 0).sum(axis=0)
    assert owners.min() == clients * k // classes
    assert owners.max() == -(-clients * k // classes)
    assert np.array_equal(counts.sum(axis=0), clients + np.arange(classes))


def test_pathological_parts_are_unequal_and_pairs_of_classes_vary() -> None:
    counts = counts_of(deal(Pathological(), DIGITS, 20), DIGITS, 20)
    assert all(len(set(column[column > 0])) > 1 for column in counts.T)
    assert len({tuple(np.flatnonzero(row)) for row in counts}) > 5


@given(clients=st.integers(1, 20), shards=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_shards_are_equal_and_hold_few_classes(clients: int, shards: int, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(DIGITS)
    owner = deal(Shards(shards_per_client=shards), labels, clients, seed)
    sizes, small = np.bincount(owner), 1400 // (clients * shards)
    assert (sizes >= shards * small).all()
    assert (sizes <= shards * (small + 1)).all()
    if small >= 140:
        return
    assert ((counts_of(owner, labels, clients) > 0).sum(axis=1) <= 2 * shards).all()


def test_shards_of_mcmahan() -> None:
    labels = np.repeat(np.arange(10), 6000)
    counts = counts_of(deal(Shards(), labels, 100), labels, 100)
    assert (counts.sum(axis=1) == 600).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert set(np.unique(counts)) <= {0, 300, 600}


@pytest.mark.parametrize(
    ("scheme", "clients", "samples", "sentence"),
    [
        (IID(), 30, 20, "federation.clients: 30 is more than the 20 samples to deal; it should be at most 20."),
        (
            Dirichlet(minimum=5),
            10,
            45,
            (
                "partition.minimum: 5 for each of 10 clients is more than the 45 samples; "
                "it should be at most 4, or federation.clients at most 9."
            ),
        ),
        (
            Shards(shards_per_client=5),
            10,
            45,
            (
                "partition.shards_per_client: 5 for each of 10 clients are more shards than the 45 samples; "
                "it should be at most 4."
            ),
        ),
        (
            Pathological(classes_per_client=11),
            10,
            1000,
            "partition.classes_per_client: 11 is more than the 10 classes of the data set; it should be at most 10.",
        ),
        (
            Pathological(),
            4,
            1000,
            (
                "partition.classes_per_client: 2 for each of 4 clients can't cover the 10 classes of the data set; "
                "it should be at least 3."
            ),
        ),
        (
            Pathological(classes_per_client=3),
            10,
            25,
            (
                "partition.classes_per_client: 3 for each of 10 clients needs 30 samples, but there are 25; "
                "it should be at most 2."
            ),
        ),
    ],
)
def test_the_impossible_is_refused(scheme: Scheme, clients: int, samples: int, sentence: str) -> None:
    with pytest.raises(SettingsError) as error:
        scheme.check(clients, 10, samples)
    assert str(error.value) == sentence


def test_a_class_too_small_for_its_owners_is_refused() -> None:
    labels = np.repeat([0, 1, 2], [50, 50, 3])
    with pytest.raises(SettingsError, match=r"^partition\.classes_per_client: 2 .* gives class 2 \d+ owners, .*3 samp"):
        deal(Pathological(), labels, 9)


@pytest.mark.parametrize(
    ("name", "parameters", "key"),
    [
        ("dirichlet", {"alpha": 0}, "partition.alpha: "),
        ("dirichlet", {"alpha": float("inf")}, "partition.alpha: "),
        ("dirichlet", {"minimum": 0}, "partition.minimum: "),
        ("pathological", {"classes_per_client": 0}, "partition.classes_per_client: "),
        ("shards", {"shards_per_client": 0}, "partition.shards_per_client: "),
        ("iid", {"alpha": 1}, "partition.alpha: unknown key"),
    ],
)
def test_parameters_are_checked(name: str, parameters: dict[str, float], key: str) -> None:
    with pytest.raises(SettingsError) as error:
        registry.build(registry.PARTITION, name, parameters)
    assert str(error.value).startswith(key)


def test_schemes_are_found_by_name() -> None:
    assert {"dirichlet", "iid", "pathological", "shards"} <= set(registry.names(registry.PARTITION))
    assert registry.build(registry.PARTITION, "dirichlet", {}) == Dirichlet(alpha=0.5, minimum=1, seed=None)
