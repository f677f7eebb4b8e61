"""Measured cells next to published ones: verdicts, orders, claims and cells.csv."""

import dataclasses
import io
import math
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedpipe.papers import comparison, layouts, pages, published
from fedpipe.papers.comparison import MeasuredCell
from fedpipe.report import contrasts
from fedpipe.report.contrasts import RunMean
from tests.small_studies import ROOT

HEAD = [
    *("paper", "table", "row", "column", "metric"),
    *("published_mean", "published_std", "published_runs", "status"),
    *("measured_mean", "measured_std", "measured_runs", "preset", "verdict", "keys", "origin"),
]
FEDDW_CELL = ("FedDW", "Table I", "FedDW", "practical/CIFAR-10")


def make_cell_id(paper, *names):
    """Make the id of a cell from its paper, table, row and column."""
    return layouts.load_papers()[paper].make_cell_id(*names)


def make_measured_cell(*names, values, **others):
    """Make one measured cell. Return it by its id."""
    fields = {"keys": ("abc",), "test_samples": 10_000, "classes": 10} | others
    return {make_cell_id(*names): MeasuredCell(RunMean.from_values(values), **fields)}


def change_each(measured, **others):
    """Change the same fields of all cells."""
    return {cell_id: dataclasses.replace(cell, **others) for cell_id, cell in measured.items()}


def compare(measured, preset="full"):
    return comparison.compare_with_published_cells(measured, preset)


def compare_cell(*names, values, **others):
    """Compare one measured cell with its published number."""
    return compare(make_measured_cell(*names, values=values, **others)).cells[make_cell_id(*names)]


@pytest.mark.parametrize("preset", ["full", "reduced", "smoke"])
def test_comparison_csv_has_row_for_each_published_number(compared, preset):
    for compared_ in (compared[preset], comparison.compare_with_published_cells({}, preset)):
        table = pd.read_csv(io.BytesIO(comparison.encode_comparison_csv(compared_)), keep_default_na=False)
        assert list(table.columns) == HEAD
        assert len(table) == 641
        assert set(table["preset"]) == {preset}
        assert (table["verdict"] != "").all()
        assert list(table["status"]) == [number.status for number in published.load_published_numbers().values()]


@pytest.mark.parametrize("folder", sorted((ROOT / "docs/papers").glob("*/")), ids=lambda folder: folder.name)
def test_stored_pages_contain_all_published_numbers(folder):
    """docs/papers is a copy of results/papers."""
    table = pd.read_csv(folder / "cells.csv", keep_default_na=False)
    assert list(table.columns) in (HEAD, HEAD[:-1])  # pages from before stored runs have no origin
    assert set(table["preset"]) == {folder.name}
    cell_ids = [tuple(row) for row in table[list(published.CellId._fields)].itertuples(index=False)]
    assert cell_ids == [tuple(number.cell_id) for number in published.load_published_numbers().values()]
    assert (table["measured_mean"] != "").any()
    pages = {path.name: path.read_text() for path in folder.glob("*.html")}
    assert set(pages) == {"index.html", *(f"{paper.stem}.html" for paper in layouts.load_papers().values())}
    for text in pages.values():
        assert set(re.findall(r'href="#([^"]+)"', text)) <= set(re.findall(r' id="([^"]+)"', text))
        for target in re.findall(r'href="(?!data:)([^"#]+)', text):
            assert (folder / target).is_file()


def test_smaller_presets_have_no_verdicts(compared):
    verdicts = {"agrees", "differs"}
    words = {preset: {cell.verdict_text for cell in result.cells.values()} for preset, result in compared.items()}
    assert not verdicts & (words["reduced"] | words["smoke"])
    assert verdicts & words["full"]


def test_reduced_preset_compares_orders_but_smoke_does_not(compared):
    assert compared["smoke"].orders == {}
    reduced = compared["reduced"].orders
    assert reduced == compared["full"].orders
    assert ("FedDW", "Table I", "practical/IMDB", "all") in reduced
    suspect = reduced["cwFedAvg", "Table 2", "alpha=1.0", "all"]
    assert suspect.methods == 7, "FedNH and FedUV are not targets in this column"


def test_global_and_personalized_methods_are_ordered_separately():
    """Only the two global methods are reversed. The paper does not separate PFPS-LWC from FedPer."""
    values = {"FedAvg": 60, "FedProx": 50, "FedPer": 80, "FedProto": 70, "PFPS-LWC": 90}
    measured = {}
    for row, value in values.items():
        measured |= make_measured_cell("PFPS-LWC", "Table 4", row, "CIFAR-10/0.3", values={0: value})
    orders = {key[3]: order for key, order in compare(measured).orders.items()}
    assert {kind: (order.methods, order.tau) for kind, order in orders.items()} == {
        "all": (5, 7 / 9),
        "global": (2, -1),
        "personal": (3, 1),
    }


def test_verdict_text_depends_on_available_numbers():
    measured = make_measured_cell(*FEDDW_CELL, values={0: 66.0, 1: 66.2, 2: 66.4})
    cells = compare(measured).cells
    assert cells[make_cell_id(*FEDDW_CELL)].verdict_text == "agrees"
    assert cells[make_cell_id("FedDW", "Table I", "FedAvg", "practical/CIFAR-10")].verdict_text == "not measured"
    assert cells[make_cell_id("FedDW", "Table III", "FedAvg", "CIFAR-100")].verdict_text == "not published"
    assert cells[make_cell_id("FedDW", "Table IV", "FedAvg", "with DW")].verdict_text == "not published"


@pytest.mark.parametrize(("values", "word"), [((66.0, 66.2, 66.4), "agrees"), ((70.0, 70.2, 70.4), "differs")])
def test_value_agrees_if_interval_of_difference_contains_zero(values, word):
    """The published value is 66.24 ± 0.6 of 5 runs. The sampling error of 10,000 tests is 0.47 points."""
    cell = compare_cell(*FEDDW_CELL, values=dict(enumerate(values)))
    difference = np.mean(values) - 66.24
    sampling_variance = values[1] * (100 - values[1]) / 10_000
    variances = [0.6**2 / 5, sampling_variance / 3]  # the sampling variance has no degrees of freedom
    half_width = stats.t.ppf(0.975, sum(variances) ** 2 / (variances[0] ** 2 / 4)) * math.sqrt(sum(variances))
    assert cell.verdict_text == word
    assert cell.verdict.contrast[:3] == pytest.approx((difference, difference - half_width, difference + half_width))


def test_interval_of_single_seed_uses_spread_of_column():
    cell = compare_cell("FedDW", "Table I", "FedProto", "pathological/MNIST", values={0: 56.0})
    assert cell.verdict_text == "agrees"
    spread = np.sqrt(np.mean(np.square([0.5, 0.1, 0.2, 0.3, 0.4, 1.2, 4.2, 1.2, 0.5, 2.2, 9.2, 0.5])))
    variances = [spread**2, 4.2**2 / 5]
    df = sum(variances) ** 2 / (variances[0] ** 2 / 48 + variances[1] ** 2 / 4)
    contrast = cell.verdict.contrast
    assert contrast.high - contrast.low == pytest.approx(2 * stats.t.ppf(0.975, df) * math.sqrt(sum(variances)))


def test_interval_without_standard_deviation_uses_sampling_error():
    """PFPS-LWC reports single runs."""
    names = ("PFPS-LWC", "Table 3", "FedPer", "0.5/0.3")
    target = published.load_published_numbers()[make_cell_id(*names)].mean
    limit = stats.norm.ppf(0.975) * math.sqrt(2) * contrasts.compute_sampling_error(target, 10_000)
    for gap, word in ((0.98 * limit, "agrees"), (1.02 * limit, "differs")):
        assert compare_cell(*names, values={0: target + gap}).verdict_text == word


def test_interval_includes_variation_between_partitions():
    """The published run and the measured run each have a random partition."""
    names = ("PFPS-LWC", "Table 2", "FedPer", "0.3/0.3")
    target = published.load_published_numbers()[make_cell_id(*names)].mean
    cell = compare_cell(*names, values={0: target - 5})
    sampling_variance = sum(contrasts.compute_sampling_error(mean, 10_000) ** 2 for mean in (target - 5, target))
    partition_variance = 2 * 2.84**2  # of the measured and the published run, with one estimate from 3 + 3 runs
    variance = sampling_variance + partition_variance
    half_width = stats.t.ppf(0.975, variance**2 / (partition_variance**2 / 4)) * math.sqrt(variance)
    assert cell.verdict_text == "agrees"
    assert cell.verdict.contrast[:3] == pytest.approx((-5, -5 - half_width, -5 + half_width))


def read_last_accuracies(reading):
    """Read the last accuracy in percent of the stored runs of a reading of PFPS-LWC."""
    runs, accuracies = (
        pd.read_csv(ROOT / f"studies/papers/pfps_lwc/readings/measured/{reading}.{name}.csv")
        for name in ("runs", "accuracies")
    )
    table = runs.merge(accuracies[accuracies["protocol"] == "personal-on-local"], on="id")
    return table.assign(accuracy=100 * table["accuracies"].str.split().str[-1].astype(float))


def test_variation_between_partitions_matches_stored_runs():
    table = read_last_accuracies("partition")
    assert len(table) == 18
    variances = table.groupby("point")["accuracy"].var()
    assert set(table.groupby("point").size()) == {3}
    assert comparison.PARTITION_STD_DF == 2 * (3 - 1)
    for column, std in layouts.load_papers()["PFPS-LWC"].tables["Table 2"].partition_std.items():
        alpha = column.partition("/")[0]
        points = [f"alpha={alpha}, scheme={scheme}" for scheme in ("dirichlet", "dirichlet-balanced")]
        assert std == pytest.approx(math.sqrt(variances[points].mean()), abs=0.005)


def test_claim_interval_at_full_includes_variation_of_difference_between_partitions():
    paper = layouts.load_papers()["PFPS-LWC"]
    table = paper.tables["Table 2"]
    cells = {}
    for row, value in (("PFPS-LWC", 74.0), ("FedPer", 72.0)):
        cells |= make_measured_cell("PFPS-LWC", "Table 2", row, "0.5/0.3", values={0: value}, test_samples=1000)
    intervals = {}
    for preset in ("full", "reduced"):
        checks = comparison.compute_claim_checks(paper, "Table 2", table.claims[0], compare(cells, preset))
        (intervals[preset],) = [check.measured_contrast for check in checks if check.measured_contrast]
    sampling_variance = (74 * 26 + 72 * 28) / 1000
    assert intervals["reduced"].high - 2 == pytest.approx(
        stats.norm.ppf(0.975) * math.sqrt(sampling_variance), rel=1e-6
    )
    draw_variance = table.difference_std["0.5/0.3"] ** 2  # of the difference, not of each method
    variance = sampling_variance + draw_variance
    half_width = stats.t.ppf(0.975, variance**2 / (draw_variance**2 / 2)) * math.sqrt(variance)
    assert intervals["full"][:3] == pytest.approx((2, 2 - half_width, 2 + half_width))


def test_variation_of_difference_between_partitions_matches_stored_runs():
    by_method = read_last_accuracies("claim-draws").pivot(index="seed", columns="algorithm", values="accuracy")
    assert len(by_method) == comparison.DIFFERENCE_STD_DF + 1
    std = (by_method["pfps_lwc"] - by_method["fedper"]).std()
    measured = layouts.load_papers()["PFPS-LWC"].tables["Table 2"].difference_std
    assert set(measured) == {"0.5/0.3", "0.5/0.5", "0.5/0.7"}
    assert list(measured.values()) == pytest.approx([std] * 3, abs=0.005)


def test_failed_published_cell_agrees_only_with_failed_runs():
    names, values = ("FedDW", "Table I", "Per-FedAvg", "pathological/CIFAR-10"), {0: 40.0, 1: 41.0, 2: 42.0}
    assert compare_cell(*names, values=values).verdict_text == "differs"
    assert compare_cell(*names, values=values, diverged_runs=1).verdict_text == "agrees"
    by_chance = compare_cell(*names, values={0: 20.0})
    assert by_chance.verdict_text == "agrees", "20 % is twice the accuracy of chance"


def test_formulas_are_compared_exactly():
    for expected, word in ((6.0, "agrees"), (3.0, "differs"), (None, "not judged")):
        cell = compare_cell("cwFedAvg", "Table 2", "FedFomo", "cost", values={0: 6.0}, expected=expected)
        assert cell.verdict_text == word
    for value, word in ((1122.78, "agrees"), (1124.0, "differs")):
        assert compare_cell("cwFedAvg", "Table 7", "cwFedAvg (All)", "100", values={0: value}).verdict_text == word


def test_generated_data_have_no_verdicts(measured_table):
    result = compare(change_each(measured_table, is_generated=True))
    assert not any(cell.verdict for cell in result.cells.values())
    assert result.orders == {}


def test_differences_are_computed_from_cells_by_seed():
    ours = make_measured_cell("PFPS-LWC", "Table 2", "PFPS-LWC", "0.5/0.3", values={0: 80.0, 1: 82.0})
    theirs = make_measured_cell("PFPS-LWC", "Table 2", "FedPer", "0.5/0.3", values={0: 75.0, 1: 78.0})
    difference_id = make_cell_id("PFPS-LWC", "Table 2", "Δ", "0.5/0.3")
    cell = compare(ours | theirs).cells[difference_id]
    assert cell.measurement.number.values == {0: 5.0, 1: 4.0}
    assert (cell.measurement.number.mean, cell.measurement.number.std) == (4.5, pytest.approx(np.sqrt(0.5)))
    assert (cell.verdict_text, cell.verdict) == ("not judged", None)
    alone = compare(ours).cells[difference_id]
    assert (alone.measurement.number, alone.verdict_text) == (None, "not measured")


def test_difference_has_diverged_runs_of_its_cells():
    both = make_measured_cell("PFPS-LWC", "Table 2", "PFPS-LWC", "0.5/0.3", values={0: 10.0}, diverged_runs=1)
    both |= make_measured_cell("PFPS-LWC", "Table 2", "FedPer", "0.5/0.3", values={0: 10.0})
    assert compare(both).cells[make_cell_id("PFPS-LWC", "Table 2", "Δ", "0.5/0.3")].measurement.diverged_runs == 1


def test_numbers_in_text_are_computed_from_cells(compared):
    all_cells = compared["full"].cells
    result = {tuple(cell_id)[2:]: cell for cell_id, cell in all_cells.items() if cell_id.table == "text"}
    mean = {cell_id: cell.measurement.number.mean for cell_id, cell in all_cells.items() if cell.measurement.number}

    def get_row(*names):
        return next(value for cell_id, value in mean.items() if tuple(cell_id)[:4] == names)

    drop = result["FedDW", "practical - pathological/CIFAR-10", "accuracy_drop_points"].measurement.number.mean
    one_way, other = (
        get_row("FedDW", "Table I", "FedDW", f"{name}/CIFAR-10") for name in ("practical", "pathological")
    )
    assert drop == pytest.approx(one_way - other)
    milliseconds = result["FedDW - FedAvg", "CIFAR-100", "time_difference_ms_per_epoch"].measurement.number.mean
    assert milliseconds == pytest.approx(0)
    gains = [
        get_row("PFPS-LWC", "Table 2", "Δ", f"{beta}/{fraction}")
        for beta in (0.1, 0.3, 0.5)
        for fraction in (0.3, 0.5, 0.7)
    ]
    assert result["PFPS-LWC - FedPer", "CIFAR-10", "best_gain_points"].measurement.number.mean == max(gains)


def test_claim_contrasts_method_with_best_rival():
    paper = layouts.load_papers()["cwFedAvg"]
    rows = {"FedAvg": 79.0, "FedAMP": 98.4, "FedFomo": 98.0, "cwFedAvg": 98.9}
    shifts = {0: 0.0, 1: 0.3, 2: 0.6}
    measured = {}
    for row, mean in rows.items():
        values = {seed: mean + by for seed, by in shifts.items()}
        measured |= make_measured_cell("cwFedAvg", "Table 6", row, "AG News", values=values)
    (result,) = comparison.compute_claim_checks(paper, "Table 6", paper.tables["Table 6"].claims[0], compare(measured))
    assert (result.published_rival, result.measured_rival) == ("FedAMP", "FedAMP")
    assert result.published_contrast.difference == pytest.approx(0.24)
    assert result.measured_contrast.is_paired
    assert result.measured_contrast.sign == "+"
    means = [98.9 + 0.3, 98.4 + 0.3]
    assert 0.5 - result.measured_contrast.low == pytest.approx(
        stats.norm.ppf(0.975) * math.sqrt(sum(mean * (100 - mean) / 10_000 / 3 for mean in means))
    ), "all seeds have the same difference, so only the sampling error of 10,000 tests remains"
    for unjudged in (compare(measured, "smoke"), compare(change_each(measured, is_generated=True))):
        (result,) = comparison.compute_claim_checks(paper, "Table 6", paper.tables["Table 6"].claims[0], unjudged)
        assert result.measured_contrast is None


def test_summary_counts_repeated_cells_once(compared):
    paper, result = layouts.load_papers()["FedDW"], compared["full"]
    single = [pages.summarize_tables(paper, [name], result).counts for name in ("Table I", "Table II")]
    both = pages.summarize_tables(paper, ["Table I", "Table II"], result).counts
    assert [(counts["all"], counts["measured"]) for counts in (*single, both)] == [(96, 96), (96, 96), (168, 168)]
    assert sum(count for word, count in both.items() if word not in {"all", "measured"}) == 168


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": RunMean.from_values({0: 166.0})}, "166.0 is not an accuracy in percent"),
        ({"number": RunMean.from_values({0: -1.0})}, "-1.0 is not an accuracy in percent"),
        ({"test_samples": None}, "needs its numbers of test samples and classes"),
        ({"classes": None}, "needs its numbers of test samples and classes"),
    ],
)
def test_comparison_rejects_invalid_accuracies(change, message):
    measured = make_measured_cell(*FEDDW_CELL, values={0: 66.0, 1: 66.2, 2: 66.4})
    with pytest.raises(ValueError, match=r"measured cells: .* 'practical/CIFAR-10'") as error:
        compare(change_each(measured, **change))
    assert message in str(error.value)


def test_comparison_rejects_unknown_cells():
    ((cell_id, cell),) = make_measured_cell(*FEDDW_CELL, values={0: 66.0}).items()
    with pytest.raises(ValueError, match=r"'FedNova', .* is not a cell of a paper"):
        compare({cell_id._replace(row="FedNova"): cell})
