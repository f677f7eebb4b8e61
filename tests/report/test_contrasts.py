"""Contrasts and orders of methods, compared with hand-computed numbers and scipy."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from fedpipe.papers import published
from fedpipe.report import contrasts
from fedpipe.report.contrasts import Contrast, RunMean, Spread


def load_published_columns():
    """Return the target numbers of each published column by paper, table, column and row."""
    columns = {}
    for cell_id, number in published.load_published_numbers().items():
        if number.status == "target":
            column = columns.setdefault((cell_id.paper, cell_id.table, cell_id.column), {})
            column[cell_id.row] = RunMean(number.mean, number.std, number.runs)
    return columns


def set_min_std(number, min_std):
    return dataclasses.replace(number, min_std=min_std)


def test_run_mean_from_values_has_mean_and_sample_std():
    number = RunMean.from_values({0: 61.0, 1: 62.0, 2: 66.0})
    assert (number.mean, number.runs) == (63.0, 3)
    assert number.std == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert RunMean.from_values({3: 61.0}).std is None


def test_pooled_std_is_weighted_by_degrees_of_freedom():
    numbers = [RunMean(1, 2.0, 3), RunMean(1, 1.0, 5), RunMean(1, None, 1), RunMean(1, None, None)]
    assert contrasts.pool_standard_deviations(numbers) == (pytest.approx(math.sqrt((2 * 4 + 4 * 1) / 6)), 6)
    assert contrasts.pool_standard_deviations(numbers[2:]) is None


def test_paired_contrast_equals_scipy_paired_t_interval():
    ours, other = (dict(enumerate(values)) for values in ([61, 64, 63, 70], [60, 62, 62.5, 66]))
    contrast = contrasts.compute_contrast(RunMean.from_values(ours), RunMean.from_values(other), None)
    low, high = stats.ttest_rel(list(ours.values()), list(other.values())).confidence_interval()
    assert contrast == (pytest.approx(1.875), pytest.approx(low), pytest.approx(high), True)
    assert (contrast.sign, low < 0 < high) == ("?", True)


def test_unpaired_contrast_equals_welch_interval():
    chance = np.random.default_rng(1)
    for _ in range(50):
        ours, other = (chance.normal(50, 3, int(chance.integers(2, 8))) for _ in range(2))
        numbers = [RunMean(float(np.mean(x)), float(np.std(x, ddof=1)), len(x)) for x in (ours, other)]
        low, high = stats.ttest_ind(ours, other, equal_var=False).confidence_interval()
        contrast = contrasts.compute_contrast(*numbers, None)  # type: ignore[call-arg]
        assert contrast[1:] == (pytest.approx(low), pytest.approx(high), False)
        assert contrast.sign == ("+" if low > 0 else "−" if high < 0 else "?")


def test_contrast_of_single_runs_uses_spread_of_column():
    ours, other = RunMean.from_values({0: 61.0}), RunMean.from_values({0: 60.0})
    assert contrasts.compute_contrast(ours, other, None) == (1.0, None, None, False)
    assert contrasts.compute_contrast(ours, other, None).sign == "?"
    wide = contrasts.compute_contrast(ours, other, Spread(0.1, 50))
    assert wide.high - wide.low == pytest.approx(2 * stats.t.ppf(0.975, 50) * 0.1 * math.sqrt(2))


def test_interval_of_pooled_spread_covers_true_difference():
    """Both means have the same estimate of the spread, so its degrees of freedom count once."""
    chance, covered, draws = np.random.default_rng(3), 0, 4000
    for _ in range(draws):
        spread = Spread(float(np.std(chance.normal(0, 1, 3), ddof=1)), 2)
        first, second = (RunMean(float(chance.normal(0, math.sqrt(1 / 3))), None, 3) for _ in range(2))
        contrast = contrasts.compute_contrast(first, second, spread)
        assert contrast.low is not None
        assert contrast.high is not None
        covered += contrast.low <= 0 <= contrast.high
    assert covered / draws == pytest.approx(0.95, abs=0.01)


def test_contrast_uncertainty_is_at_least_sampling_error():
    min_std = contrasts.compute_sampling_error(50, 10_000)
    one, two = (
        set_min_std(RunMean.from_values(values), min_std) for values in ({0: 50.0, 1: 51.0}, {0: 49.5, 1: 50.5})
    )
    contrast = contrasts.compute_contrast(one, two, None)
    assert (contrast.difference, contrast.is_paired, contrast.sign) == (0.5, True, "?")
    assert contrast.high - contrast.low == pytest.approx(2 * stats.norm.ppf(0.975) * min_std)
    assert contrasts.compute_contrast(RunMean(50, 0.0, 3), RunMean(49, 0.0, 3), None) == Contrast(1.0, 1.0, 1.0)


@pytest.mark.parametrize("values", [{0: 80.0, 1: 80.0}, {5: 80.0, 6: 80.2}])
def test_sampling_error_never_shortens_interval_of_few_seeds(values):
    """The variance of the sampling error is known, but not that between seeds, so its quantile is smaller."""
    one, two = RunMean.from_values({0: 80.5, 1: 81.3}), RunMean.from_values(values)
    widths = [
        contrasts.compute_contrast(set_min_std(one, min_std), set_min_std(two, min_std), None).width
        for min_std in (0.0, 0.5, 0.8, 3.0)
    ]
    assert widths == sorted(widths)
    assert widths[0] == widths[1] < widths[3]


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_contrast_rarely_separates_equal_methods(runs):
    """A reduced preset has 500 test samples. The paper's standard deviation between runs is 0.1 points."""
    chance, separated = np.random.default_rng(4), 0
    for _ in range(1000):
        one, two = (RunMean.from_values(dict(enumerate(100 * chance.binomial(500, 0.9, runs) / 500))) for _ in range(2))
        one, two = (set_min_std(number, contrasts.compute_sampling_error(90, 500)) for number in (one, two))
        separated += contrasts.compute_contrast(one, two, Spread(0.1, 40)).sign != "?"
    assert separated / 1000 < 0.07


def test_tau_equals_scipy_if_paper_separates_all_pairs():
    chance = np.random.default_rng(2)
    for _ in range(50):
        one, two = (chance.permutation(7) for _ in range(2))
        columns = [
            {str(name): RunMean(float(mean), 0.01, 5) for name, mean in enumerate(means)} for means in (one, two)
        ]
        order = contrasts.compare_method_orders(*columns)
        assert order.tau == pytest.approx(stats.kendalltau(one, two).statistic)
        assert (order.methods, order.resolved_pairs) == (7, 21)


def test_method_order_matches_hand_computed_values():
    paper = {"a": RunMean(90, 0.1, 5), "b": RunMean(80, 0.1, 5), "c": RunMean(70, 0.1, 5), "d": RunMean(70.05, 0.1, 5)}
    ours = {"a": RunMean(85, 0.1, 1), "b": RunMean(85.05, 0.1, 1), "c": RunMean(70, 0.1, 1), "d": RunMean(60, 0.1, 1)}
    # The paper does not separate c and d: 0.05 is less than two standard errors. Of five pairs, a and b are reversed.
    assert contrasts.compare_method_orders(paper, ours) == (4, 5, pytest.approx((4 - 1) / 5), "a", "b", True)
    assert contrasts.compare_method_orders(paper, {"b": RunMean(1)}) is None


def test_tau_is_1_for_equal_order_and_minus_1_for_reverse():
    for column in load_published_columns().values():
        order = contrasts.compare_method_orders(column, column)
        assert order.tau == (pytest.approx(1) if order.resolved_pairs else None)
        assert order.is_winner_confirmed
        reverse = {name: dataclasses.replace(number, mean=-number.mean) for name, number in column.items()}
        if order.resolved_pairs:
            assert contrasts.compare_method_orders(column, reverse).tau == pytest.approx(-1)


def test_method_order_without_std_assumes_one_point():
    """PFPS-LWC's paper reports one seed, and our study has one seed."""
    near, far = ({"a": RunMean(80), "b": RunMean(80 - gap), "c": RunMean(10)} for gap in (2.8, 2.9))
    assert [contrasts.compare_method_orders(column, column).resolved_pairs for column in (near, far)] == [2, 3]
    assert contrasts.compare_method_orders(near, near | {"b": RunMean(81.4)}).is_winner_confirmed, "within 1.41 points"
    assert not contrasts.compare_method_orders(near, near | {"b": RunMean(81.5)}).is_winner_confirmed


def test_published_tie_is_resolved_by_best_measured_method():
    """In FedDW's Table I, FedUV and FedDW both have 99.52."""
    paper = load_published_columns()["FedDW", "Table I", "practical/MNIST"]
    ours = {name: RunMean(90 + (name == "FedDW") - (name == "FedUV"), 0.1, 5) for name in paper}
    assert contrasts.compare_method_orders(paper, ours)[3:] == ("FedDW", "FedDW", True)


def test_method_order_uses_means_over_all_seeds_of_each_method():
    """If a method lacks a seed, each mean is over all seeds of its method."""
    paper = {"a": RunMean(50, 0.1, 5), "b": RunMean(40, 0.1, 5)}
    ours = {"a": RunMean.from_values({0: 50.0, 1: 51.0}), "b": RunMean.from_values({0: 49.0, 1: 50.0, 2: 90.0})}
    order = contrasts.compare_method_orders(paper, ours)
    assert (order.tau, order.best_measured) == (-1, "b")
    contrast = contrasts.compute_contrast(ours["a"], ours["b"], None)
    assert (contrast.difference, contrast.is_paired) == (50.5 - 63, False)
