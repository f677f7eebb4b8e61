"""Verdicts: against numbers worked out by hand, and against scipy's tests."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from fedpipe.papers import published, verdicts
from fedpipe.papers.verdicts import Number, Spread

TESTS = 10_000


def test_a_number_of_values_by_seed():
    number = Number.from_values({0: 61.0, 1: 62.0, 2: 66.0})
    assert (number.mean, number.runs) == (63.0, 3)
    assert number.std == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert Number.from_values({3: 61.0}).std is None


def test_pooled_by_degrees_of_freedom_without_single_runs():
    numbers = [Number(1, 2.0, 3), Number(1, 1.0, 5), Number(1, None, 1), Number(1, None, None)]
    spread = verdicts.pool_spreads(numbers)
    assert spread.df == 6
    assert spread.std == pytest.approx(math.sqrt((2 * 4 + 4 * 1) / 6))
    assert verdicts.pool_spreads(numbers[2:]) is None


def test_a_band_worked_out_by_hand():
    # s^2/n = 9/3 = 3 and S^2/m = 4/5 = 0.8; df = 3.8^2 / (3^2/2 + 0.8^2/4) = 14.44 / 4.66
    band = verdicts.compute_band(Number(50, 2, 5), Number(50, 3, 3), None, TESTS)
    assert band.error == pytest.approx(math.sqrt(3.8))
    assert band.t == pytest.approx(stats.t.ppf(0.975, 14.44 / 4.66))
    assert band.width == pytest.approx(band.t * band.error)
    assert band.floor == 1.0  # twice the sampling error of 10,000 tests at 50% is one point, too


def test_values_agree_where_welchs_test_finds_no_difference():
    chance, judged = np.random.default_rng(1), {"agrees": 0, "other": 0}
    for _ in range(500):
        std, other = chance.uniform(2, 4, 2)
        runs, others = chance.integers(3, 8, 2).tolist()
        mean = 50 + chance.normal(0, 4)
        verdict = verdicts.judge_value(Number(50, std, runs), Number(mean, other, others), None, 10**9)
        if verdict.band.t == verdicts.MAX_T or verdict.band.width == verdict.band.floor:
            continue
        p = stats.ttest_ind_from_stats(50, std, runs, mean, other, others, equal_var=False).pvalue
        assert (verdict.word == "agrees") == (p >= 0.05)
        judged["agrees" if p >= 0.05 else "other"] += 1
    assert min(judged.values()) > 50


def test_t_is_capped_at_that_of_two_degrees_of_freedom():
    band = verdicts.compute_band(Number(50, 10, 2), Number(50, 0.01, 2), None, TESTS)
    assert band.t == 4.3 < stats.t.ppf(0.975, 1.1)


@pytest.mark.parametrize(
    ("mean", "tests", "floor"),
    [
        (80.0, 10_000, 1.0),  # 2 sqrt(80 * 20 / 10000) = 0.8
        (50.0, 1_000, 2 * math.sqrt(2.5)),
        (95.0, 10_000, 1.0),
        (95.01, 10_000, 0.5),
        (96.0, 100, math.sqrt(3.84)),  # half of 2 sqrt(96 * 4 / 100)
    ],
)
def test_floor(mean, tests, floor):
    band = verdicts.compute_band(Number(mean, 0.01, 5), Number(mean, 0.01, 5), None, tests)
    assert band.floor == band.width == pytest.approx(floor)


@pytest.mark.parametrize(
    ("difference", "word"),
    [(0.99, "agrees"), (-0.99, "agrees"), (1.01, "near"), (-2.99, "near"), (3.01, "differs"), (-30, "differs")],
)
def test_words_by_bands(difference, word):
    verdict = verdicts.judge_value(Number(80, 0.1, 5), Number(80 + difference, 0.1, 3), None, TESTS)
    assert (verdict.word, verdict.difference) == (word, pytest.approx(difference))


def test_one_or_two_seeds_agree_with_that_caveat_only():
    spread = Spread(0.1, 20)
    one, two = (Number(80, std, runs) for std, runs in ((None, 1), (0.1, 2)))
    assert verdicts.judge_value(Number(80, 0.1, 5), one, spread, TESTS).word == "agrees (one seed)"
    assert verdicts.judge_value(Number(80, 0.1, 5), two, spread, TESTS).word == "agrees (two seeds)"
    assert verdicts.judge_value(Number(90, 0.1, 5), one, spread, TESTS).word == "differs"


def test_a_missing_std_is_the_columns():
    # both sides of one run: error^2 = 2 * 1.5^2, with the 20 degrees of freedom of each counted once more
    band = verdicts.compute_band(Number(50), Number(50, None, 1), Spread(1.5, 20), TESTS)
    assert band.error == pytest.approx(1.5 * math.sqrt(2))
    assert band.t == pytest.approx(stats.t.ppf(0.975, 40))


def test_where_nothing_tells_how_runs_vary_the_floor_is_the_band():
    band = verdicts.compute_band(Number(80), Number(80, None, 1), None, TESTS)
    assert band == (1.0, 0.0, 0.0, 1.0)


def test_failed_in_print():
    assert verdicts.judge_failure(Number(50, 1, 3), 1, 10).word == "agrees"
    assert verdicts.judge_failure(Number(20, 1, 3), 0, 10).word == "agrees"
    assert verdicts.judge_failure(Number(20.1, 1, 3), 0, 10).word == "differs"
    assert verdicts.judge_failure(Number(1.9, None, 1), 0, 100).word == "agrees (one seed)"


def test_formulas_to_a_thousandth():
    assert verdicts.judge_exact_value(11.18, 11.181642).word == "agrees"
    assert verdicts.judge_exact_value(1122.67, 1122.78).word == "agrees"
    assert verdicts.judge_exact_value(11.18, 11.2).word == "differs"
    assert verdicts.judge_exact_value(2, 2).word == "agrees"


def test_tau_b_is_scipys_where_ties_are_equal_values():
    chance = np.random.default_rng(2)
    for _ in range(100):
        one, two = chance.integers(0, 5, (2, 7))
        if len(set(one)) == 1 or len(set(two)) == 1:
            continue
        signs = [[np.sign(of[a] - of[b]) for a in range(7) for b in range(a)] for of in (one, two)]
        assert verdicts.compute_tau_b(*signs) == pytest.approx(stats.kendalltau(one, two, variant="b").statistic)
    assert verdicts.compute_tau_b([0, 0], [1, 1]) is None


def test_an_order_worked_out_by_hand():
    print_ = {"a": Number(90, 0.1, 5), "b": Number(80, 0.1, 5), "c": Number(70, 0.1, 5), "d": Number(70.05, 0.1, 5)}
    # standard errors are 0.14 of a difference: c and d are a tie in print, a and b a tie here
    here = {"a": Number(85, 0.1, 1), "b": Number(85.05, 0.1, 1), "c": Number(70, 0.1, 1), "d": Number(60, 0.1, 1)}
    order = verdicts.compare_orders(print_, here)
    assert order.methods == 4
    assert order.resolved_pairs == 5  # all but c and d
    assert order.concordant_pairs == 4  # all of these but a and b, which stand the other way round
    assert order.tau == pytest.approx(4 / math.sqrt(5 * 5))  # ac ad bc bd agree; ab is untied in print, cd here
    assert (order.best_published, order.best_measured, order.is_winner_confirmed) == ("a", "b", True)


def test_print_and_print_are_of_one_order():
    columns = {}
    for place, number in published.load_published().items():
        if number.status == "target":
            column = columns.setdefault((place.paper, place.table, place.column), {})
            column[place.row] = Number(number.mean, number.std, number.runs)
    for column in columns.values():
        order = verdicts.compare_orders(column, column)
        assert order.tau == (pytest.approx(1) if order.resolved_pairs else None)
        assert order.concordant_pairs == order.resolved_pairs
        assert order.is_winner_confirmed


def test_a_reversed_order():
    print_ = {name: Number(mean, 0.1, 5) for name, mean in zip("abc", (50, 60, 70), strict=True)}
    here = {name: Number(mean, 0.1, 5) for name, mean in zip("abc", (70, 60, 50), strict=True)}
    order = verdicts.compare_orders(print_, here)
    assert (
        order.tau,
        order.concordant_pairs,
        order.best_published,
        order.best_measured,
        order.is_winner_confirmed,
    ) == (-1, 0, "c", "a", False)


def test_an_order_where_nothing_tells_how_runs_vary():
    """PFPS-LWC, one seed as in print: runs are taken to vary by a point, on both sides and in the ceiling."""
    columns = {}
    for place, number in published.load_published().items():
        if (place.paper, number.status) == ("PFPS-LWC", "target"):
            column = columns.setdefault(place.table, {}).setdefault(place.column, {})
            column[place.row] = Number(number.mean, number.std, number.runs)
    shares = {}
    for table, found in columns.items():
        orders = [verdicts.compare_orders(column, column) for column in found.values()]
        pairs = sum(math.comb(order.methods, 2) for order in orders)
        shares[table] = round(100 * sum(order.resolved_pairs for order in orders) / pairs)
    assert shares == {"Table 2": 80, "Table 3": 83, "Table 4": 87, "Table 5": 28}
    near, far = ({"a": Number(80), "b": Number(80 - by), "c": Number(10)} for by in (2.8, 2.9))
    assert [verdicts.compare_orders(print_, print_).resolved_pairs for print_ in (near, far)] == [2, 3]
    assert verdicts.compare_orders(near, near | {"b": Number(81.4)}).is_winner_confirmed, (
        "within the error of a difference, 1.41 points"
    )
    assert not verdicts.compare_orders(near, near | {"b": Number(81.5)}).is_winner_confirmed


def test_what_one_side_lacks_has_no_order():
    assert verdicts.compare_orders({"a": Number(1), "b": Number(2)}, {"b": Number(1)}) is None


def columns(table):
    """Print's numbers of a table by column and row."""
    found = {}
    for place, number in published.load_published().items():
        if (place.table, number.status) == (table, "target"):
            column = found.setdefault((place.paper, place.column), {})
            column[place.row] = Number(number.mean, number.std, number.runs)
    return found


def test_ceilings_rise_with_runs_and_are_the_same_each_time():
    close = [Number(mean, 0.5, 5) for mean in (60, 60.8, 61.6, 62.4)]
    spread = Spread(0.5, 16)
    one, many = (verdicts.estimate_expected_tau(close, [Number(60, None, runs)] * 4, spread) for runs in (1, 1000))
    assert 0 < one < many <= 1
    assert verdicts.estimate_expected_tau(close, [Number(60, None, 1)] * 4, spread) == one
    blurred = verdicts.estimate_expected_tau(close, [Number(60, None, 1, min_std=2.0)] * 4, spread)
    assert blurred < one, "the same on fewer test samples"
    apart = [Number(mean, 0.5, 5) for mean in (20, 40, 60)]
    assert verdicts.estimate_expected_tau(apart, [Number(60, None, 1)] * 3, spread) == 1


@pytest.mark.parametrize(
    ("paper", "table", "column", "runs", "least"),
    [
        ("FedDW", "Table I", "practical/CIFAR-10", 1, 0.0),
        ("FedDW", "Table I", "practical/CIFAR-10", 3, 0.5),
        ("FedDW", "Table I", "practical/MNIST", 1, 0.1),
        ("cwFedAvg", "Table 1", "practical/MNIST", 3, 0.0),
        ("cwFedAvg", "Table 6", "AG News", 1, 1.3),
        ("PFPS-LWC", "Table 5", "CIFAR-10/0.3", 1, 0.0),
    ],
)
def test_a_ceiling_is_what_replicas_have_by_the_rule_that_ours_have(paper, table, column, runs, least):
    print_ = columns(table)[paper, column]
    chance, spread = np.random.default_rng(3), verdicts.pool_spreads(print_.values()) or Spread(verdicts.DEFAULT_STD, 1)
    stds = {name: max(spread.std if number.std is None else number.std, least) for name, number in print_.items()}
    found = []
    for _ in range(150):
        replica = {
            name: dataclasses.replace(
                Number.from_values({seed: chance.normal(number.mean, stds[name]) for seed in range(runs)}),
                min_std=least,
            )
            for name, number in print_.items()
        }
        order = verdicts.compare_orders(print_, replica)
        found += [] if order.tau is None else [order.tau]
    error = np.std(found) / math.sqrt(len(found))
    assert order.expected_tau == pytest.approx(np.mean(found), abs=4 * error + 0.01)


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_methods_that_are_equal_are_seldom_told_apart(runs):
    """At a reduced scale: some 500 test samples, where print has 0.1 points between runs on all of them."""
    chance, told = np.random.default_rng(4), 0
    for _ in range(1000):
        one, two = (Number.from_values(dict(enumerate(100 * chance.binomial(500, 0.9, runs) / 500))) for _ in range(2))
        one, two = (
            dataclasses.replace(number, min_std=verdicts.compute_sampling_error(90, 500)) for number in (one, two)
        )
        told += verdicts.compute_contrast(one, two, Spread(0.1, 40)).sign != "?"
    assert told / 1000 < 0.07


def test_runs_that_happen_to_be_alike_tell_nothing():
    """Two seeds with the same difference: as sure of it as the test set is, not surer."""
    least = verdicts.compute_sampling_error(50, 10_000)
    one, two = (
        dataclasses.replace(Number.from_values(values), min_std=least)
        for values in ({0: 50.0, 1: 51.0}, {0: 49.5, 1: 50.5})
    )
    found = verdicts.compute_contrast(one, two, None)
    assert (found.difference, found.is_paired, found.sign) == (0.5, True, "?")
    assert found.high - found.low == pytest.approx(2 * stats.norm.ppf(0.975) * least)
    exact = verdicts.compute_contrast(Number(50, 0.0, 3), Number(49, 0.0, 3), None)
    assert (exact.low, exact.high, exact.sign) == (1.0, 1.0, "+")


def test_of_prints_equal_bests_that_counts_which_is_best_here():
    """FedUV and FedDW have 99.52 in FedDW's Table I."""
    print_ = columns("Table I")["FedDW", "practical/MNIST"]
    here = {name: Number(90 + (name == "FedDW") - (name == "FedUV"), 0.1, 5) for name in print_}
    order = verdicts.compare_orders(print_, here)
    assert (order.best_published, order.best_measured, order.is_winner_confirmed) == ("FedDW", "FedDW", True)


def test_one_order_has_one_kind_of_means():
    """Where a seed is missing, all that compares two methods is of the means over all of their seeds."""
    print_ = {"a": Number(50, 0.1, 5), "b": Number(40, 0.1, 5)}
    here = {"a": Number.from_values({0: 50.0, 1: 51.0}), "b": Number.from_values({0: 49.0, 1: 50.0, 2: 90.0})}
    order = verdicts.compare_orders(print_, here)
    assert (order.concordant_pairs, order.tau, order.best_measured) == (0, None, "b")
    contrast = verdicts.compute_contrast(here["a"], here["b"], None)
    assert (contrast.difference, contrast.is_paired) == (50.5 - 63, False)


def test_a_contrast_paired_by_seed_is_scipys():
    own, other = (
        {seed: value for seed, value in enumerate(values)} for values in ([61, 64, 63, 70], [60, 62, 62.5, 66])
    )
    contrast = verdicts.compute_contrast(Number.from_values(own), Number.from_values(other), None)
    low, high = stats.ttest_rel(list(own.values()), list(other.values())).confidence_interval()
    assert contrast == (pytest.approx(1.875), pytest.approx(low), pytest.approx(high), True)
    assert contrast.sign == "?"
    assert low < 0 < high


def test_a_contrast_without_common_seeds_is_welchs():
    own, other = {0: 61.0, 1: 64.0, 2: 63.0}, {5: 50.0, 6: 52.0, 7: 51.0, 8: 50.5}
    contrast = verdicts.compute_contrast(Number.from_values(own), Number.from_values(other), None)
    low, high = stats.ttest_ind(list(own.values()), list(other.values()), equal_var=False).confidence_interval()
    assert (contrast.low, contrast.high, contrast.is_paired) == (pytest.approx(low), pytest.approx(high), False)
    assert contrast.sign == "+"
    assert verdicts.compute_contrast(Number.from_values(other), Number.from_values(own), None).sign == "−"


def test_a_contrast_of_single_runs_has_the_columns_interval_or_none():
    own, other = Number.from_values({0: 61.0}), Number.from_values({0: 60.0})
    assert verdicts.compute_contrast(own, other, None) == (1.0, None, None, False)
    assert verdicts.compute_contrast(own, other, None).sign == "?"
    wide = verdicts.compute_contrast(own, other, Spread(0.1, 50))
    assert wide.high - wide.low == pytest.approx(2 * stats.t.ppf(0.975, 100) * 0.1 * math.sqrt(2))
