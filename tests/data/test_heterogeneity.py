"""Measures of heterogeneity: exact values, SciPy's values, and invariances."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from fedpipe.data import heterogeneity

client_counts = arrays.arrays(
    np.int64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(0, 50)
).map(lambda counts: counts + np.eye(*counts.shape, dtype=np.int64) + (counts.sum(axis=1, keepdims=True) == 0))


def test_label_entropy_and_js_distance_equal_exact_values() -> None:
    counts = np.array([[4, 0, 0, 0], [0, 2, 2, 0], [1, 1, 1, 1]])
    assert heterogeneity.compute_label_entropy(counts).tolist() == [0, 1, 2]
    assert heterogeneity.compute_js_distance(np.array([[3, 0], [0, 3]])) == pytest.approx(
        [0.5579230452841438] * 2, abs=1e-15
    )
    assert (heterogeneity.compute_js_distance(np.array([[3, 3], [1, 1]])) == 0).all()


def test_gini_equals_exact_values() -> None:
    assert heterogeneity.compute_gini(np.array([5, 5, 5])) == 0
    assert heterogeneity.compute_gini(np.array([1, 3])) == 0.25
    assert heterogeneity.compute_gini(np.array([0, 0, 0, 9])) == 0.75
    assert heterogeneity.compute_gini(np.array([3, 1, 2])) == pytest.approx(2 / 9)


@given(counts=client_counts)
def test_label_entropy_and_js_distance_match_scipy(counts: np.ndarray) -> None:
    pooled = counts.sum(axis=0) / counts.sum()
    js = [jensenshannon(row / row.sum(), pooled, base=2) for row in counts]
    assert heterogeneity.compute_js_distance(counts) ** 2 == pytest.approx(np.nan_to_num(js) ** 2, abs=1e-12)
    assert heterogeneity.compute_label_entropy(counts) == pytest.approx(
        [entropy(row, base=2) for row in counts], abs=1e-12
    )


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), seed=st.integers(0, 9))
def test_gini_equals_mean_difference_and_ignores_order_and_scale(sizes: list[int], seed: int) -> None:
    array = np.array(sizes)
    differences = np.abs(array[:, None] - array[None, :]).mean()
    assert heterogeneity.compute_gini(array) == pytest.approx(differences / (2 * array.mean()), abs=1e-12)
    shuffled = 3 * np.random.default_rng(seed).permutation(array)
    assert heterogeneity.compute_gini(shuffled) == pytest.approx(heterogeneity.compute_gini(array), abs=1e-12)


def test_client_summary_has_samples_classes_and_entropy() -> None:
    table = heterogeneity.make_heterogeneity_table(np.array([[4, 0], [3, 3]]))
    assert table.column_names == ["client", "samples", "classes", "entropy", "js_distance"]
    assert table["client"].to_pylist() == [0, 1]
    assert table["samples"].to_pylist() == [4, 6]
    assert table["classes"].to_pylist() == [1, 2]
    assert table["entropy"].to_pylist() == [0, 1]


def test_heterogeneity_summary_from_table_equals_summary_from_counts() -> None:
    counts = np.array([[4, 0], [3, 3]])
    summary = heterogeneity.HeterogeneitySummary.from_table(heterogeneity.make_heterogeneity_table(counts))
    assert summary == heterogeneity.HeterogeneitySummary.from_counts(counts)
    assert summary == (0.5, heterogeneity.compute_js_distance(counts).mean(), 0.1)


@given(counts=client_counts, seed=st.integers(0, 9))
def test_heterogeneity_ignores_order_of_clients_and_classes(counts: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clients, classes = rng.permutation(counts.shape[0]), rng.permutation(counts.shape[1])
    shuffled = counts[clients][:, classes]
    assert heterogeneity.HeterogeneitySummary.from_counts(shuffled) == pytest.approx(
        heterogeneity.HeterogeneitySummary.from_counts(counts), abs=1e-12
    )
    assert heterogeneity.compute_js_distance(shuffled) == pytest.approx(
        heterogeneity.compute_js_distance(counts)[clients], abs=1e-12
    )


def test_entropy_and_js_distance_without_samples_are_nan() -> None:
    counts = np.array([[2, 2], [0, 0]])
    assert np.isnan(heterogeneity.compute_label_entropy(counts)).tolist() == [False, True]
    assert np.isnan(heterogeneity.compute_js_distance(counts)).tolist() == [False, True]
