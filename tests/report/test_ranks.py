"""Friedman's test, comparisons of pairs, and the critical-difference diagram."""

import csv
import dataclasses
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.planning.rank_test import check_rank_test, count_columns_for_significance, count_rows_and_columns
from fedpipe.report import contents, ranks
from fedpipe.report.figures import style
from fedpipe.report.figures.ranks import build_ranks_figure, write_ranks_figure
from fedpipe.settings.report import Report
from tests.report.conftest import read_markdown_rows

#: AUC of four variants of C4.5 on 14 data sets: Demšar, JMLR 2006, table 6. The paper ranks the 13th row by more
#: digits: one 0.975 has rank 2, and the other has rank 3.
NAMES = ("C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf")
DEMSAR = np.array(
    [
        [0.763, 0.768, 0.771, 0.798],
        [0.599, 0.591, 0.590, 0.569],
        [0.954, 0.971, 0.968, 0.967],
        [0.628, 0.661, 0.654, 0.657],
        [0.882, 0.888, 0.886, 0.898],
        [0.936, 0.931, 0.916, 0.931],
        [0.661, 0.668, 0.609, 0.685],
        [0.583, 0.583, 0.563, 0.625],
        [0.775, 0.838, 0.866, 0.875],
        [1.000, 1.000, 1.000, 1.000],
        [0.940, 0.962, 0.965, 0.962],
        [0.619, 0.666, 0.614, 0.669],
        [0.972, 0.981, 0.975, 0.9749],
        [0.957, 0.978, 0.946, 0.970],
    ]
).T


def test_compare_ranks_matches_published_example():
    """Mean ranks 3.143, 2.000, 2.893 and 1.964, chi-squared 9.28 without correction for ties, and CD 1.25."""
    comparison = ranks.compare_ranks(NAMES, DEMSAR, 1, "nemenyi")
    assert comparison.names == ("C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5")
    assert comparison.mean_ranks == pytest.approx([27.5 / 14, 28 / 14, 40.5 / 14, 44 / 14])
    assert (comparison.columns, round(comparison.critical_difference, 2)) == (14, 1.25)
    uncorrected = 12 * 14 / (4 * 5) * (sum(comparison.mean_ranks**2) - 4 * 5**2 / 4)
    assert round(uncorrected, 2) == 9.28
    tied = 3 * (2**3 - 2) + (4**3 - 4)  # three columns with two equal methods, and one with four
    assert comparison.statistic == pytest.approx(uncorrected / (1 - tied / (14 * (4**3 - 4))))
    assert comparison.statistic == pytest.approx(stats.friedmanchisquare(*DEMSAR).statistic)
    assert comparison.p_value == pytest.approx(stats.chi2.sf(comparison.statistic, 3))
    assert comparison.is_significant
    assert comparison.indistinguishable_groups == [range(4)]  # the paper: 3.143 - 1.964 < 1.25


def test_nemenyi_p_values_equal_studentized_range():
    comparison = ranks.compare_ranks(NAMES, DEMSAR, 1, "nemenyi")
    distance = (comparison.mean_ranks[3] - comparison.mean_ranks[0]) / np.sqrt(4 * 5 / (6 * 14)) * np.sqrt(2)
    assert comparison.pair_p_values[0, 3] == pytest.approx(stats.studentized_range.sf(distance, 4, np.inf))
    assert comparison.pair_p_values == pytest.approx(comparison.pair_p_values.T)
    differences = np.abs(comparison.mean_ranks[:, None] - comparison.mean_ranks)
    assert ((comparison.pair_p_values < 0.05) == (differences > comparison.critical_difference)).all()


def test_holm_corrects_scipy_signed_rank_p_values():
    """Eight columns in which A beats B, and B beats C: each p-value is 2 / 2^8, and three are corrected."""
    generator = np.random.default_rng(0)
    base = generator.random(8)
    scores = np.stack([base, base + 0.1 + generator.random(8), base + 2 + generator.random(8)])
    comparison = ranks.compare_ranks(("C", "B", "A"), scores, 1, "holm")
    assert comparison.names == ("A", "B", "C")
    assert comparison.pair_p_values[0, 1] == comparison.pair_p_values[1, 2] == pytest.approx(3 * 2 / 2**8)
    assert comparison.critical_difference is None
    assert comparison.indistinguishable_groups == []
    noisy = DEMSAR + 0.01 * generator.random(DEMSAR.shape)
    comparison = ranks.compare_ranks(NAMES, noisy, 1, "holm")
    order = [NAMES.index(name) for name in comparison.names]
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    raw = {pair: stats.wilcoxon(*noisy[[order[index] for index in pair]]).pvalue for pair in pairs}
    corrected = 0.0
    for position, pair in enumerate(sorted(pairs, key=raw.__getitem__)):
        corrected = max(corrected, min(1, (6 - position) * raw[pair]))
        assert comparison.pair_p_values[pair] == pytest.approx(corrected)


@pytest.mark.parametrize("rank_test", ["nemenyi", "holm"])
def test_compare_ranks_uses_equal_infinite_scores_as_equal_finite_scores(rank_test):
    """Two methods that diverge have an infinite NLL."""
    scores = np.random.default_rng(0).random((3, 12)) + np.array([[0], [0.5], [1]])
    results = []
    for worst in (9, np.inf):
        scores[:2, :3] = worst
        results.append(ranks.compare_ranks(("a", "b", "c"), scores, -1, rank_test).pair_p_values)
    assert results[1] == pytest.approx(results[0])


def test_means_of_equal_sums_are_ties():
    """The means of 331, 333 and 338 correct samples differ in the last bit between their orders."""
    first, second = (
        np.mean([100 * (count / 360) for count in counts]) for counts in ((331, 333, 338), (338, 331, 333))
    )
    assert first != second
    comparison = ranks.compare_ranks(
        ("a", "b", "c", "d"), np.array([[first] * 2, [second] * 2, [first] * 2, [1, 1]]), 1, "nemenyi"
    )
    assert comparison.mean_ranks.tolist() == [2, 2, 2, 4]
    assert comparison.statistic == pytest.approx(6)


@pytest.mark.parametrize("rank_test", ["nemenyi", "holm"])
def test_compare_ranks_with_negative_sign_prefers_lower_scores(rank_test):
    comparison = ranks.compare_ranks(NAMES, DEMSAR, 1, rank_test)
    mirrored = ranks.compare_ranks(NAMES, -DEMSAR, -1, rank_test)
    assert mirrored.names == comparison.names
    assert mirrored.mean_ranks == pytest.approx(comparison.mean_ranks)
    assert mirrored.pair_p_values == pytest.approx(comparison.pair_p_values)


@pytest.mark.parametrize("rank_test", ["nemenyi", "holm"])
def test_rank_test_finds_no_difference_between_equal_methods(rank_test):
    comparison = ranks.compare_ranks(("a", "b", "c"), np.ones((3, 10)), 1, rank_test)
    assert (comparison.statistic, comparison.p_value) == (0, 1)
    assert comparison.mean_ranks.tolist() == [2, 2, 2]
    assert comparison.indistinguishable_groups == [range(3)]


def test_indistinguishable_groups_are_maximal_ranges():
    comparison = ranks.compare_ranks(NAMES, DEMSAR, 1, "nemenyi")
    p_values = np.ones((4, 4))
    p_values[0, 2] = p_values[0, 3] = p_values[2, 3] = 0.01
    chain = comparison._replace(pair_p_values=np.minimum(p_values, p_values.T))
    assert chain.indistinguishable_groups == [range(2), range(1, 3)]
    assert comparison._replace(p_value=0.06, pair_p_values=np.zeros((4, 4))).indistinguishable_groups == [range(4)]


@pytest.mark.parametrize(
    ("rank_test", "methods", "columns"),
    [("nemenyi", 3, 3), ("nemenyi", 10, 3), ("holm", 3, 7), ("holm", 4, 8), ("holm", 5, 9)],
)
def test_count_columns_for_significance_returns_minimum(rank_test, methods, columns):
    assert count_columns_for_significance(rank_test, methods) == columns
    order = np.arange(methods)[:, None] + np.linspace(0, 0.5, columns)

    def finds_difference(count):
        scores = order[:, :count] * np.arange(1, count + 1)  # no equal differences
        comparison = ranks.compare_ranks([*map(str, range(methods))], scores, 1, rank_test)
        return comparison.is_significant and (comparison.pair_p_values < 0.05).any()

    assert finds_difference(columns)
    assert not finds_difference(columns - 1)


# -- studies -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def study(make):
    """The published example: four methods, 14 columns, one seed. FedProx's mu is not a column."""
    tree = make(["local", "fedavg", "fedprox", "fedper"], [0], {"data": [f"set {index}" for index in range(14)]})
    for index, run in enumerate(tree.runs):
        column, method = divmod(index, 4)
        assert run.algorithm == tree.plan.algorithms[method]
        tree.write(index, [{"personal-on-local": [(round(10000 * DEMSAR[method, column]), 10000)] * 2}])
    tree.change(protocols=("personal-on-local",), report=Report(rank_test="nemenyi"), titles={"fedper": "FedPer"})
    return tree


def test_markdown_table_shows_mean_ranks(study):
    text = study.render_markdown()
    assert "Ranks of the methods in 14 columns of the table by Local test accuracy (personalized)." in text
    assert "chi-squared(3) = 10.23, p = 0.0167." in text
    assert "the critical difference of mean ranks is 1.25." in text
    assert read_markdown_rows(text, "FedPer")[-1] == ["FedPer", "1.96", "fedavg, fedprox, local"]
    assert read_markdown_rows(text, "local")[-1][:2] == ["local", "3.14"]


def test_markdown_table_ranks_methods_by_reported_metric_if_their_protocols_differ(study):
    for index, run in enumerate(study.runs):
        if run.algorithm == "fedavg":
            study.write(index, [{"global-on-global": [(1, 2)]}] * 2)
    study.change(method_protocols={"fedavg": "global-on-global"})
    text = study.render_markdown()
    assert "Ranks of the methods in 14 columns of the table by reported accuracy." in text


def test_ranks_csv_has_all_pairs(study):
    path = study.plan.study_files.ranks_table
    built = contents.build_table_files(study.data)
    rows = list(csv.DictReader(io.StringIO(built[path].decode())))
    assert len(rows) == 6
    assert (rows[0]["method"], rows[0]["other"]) == ("fedper", "fedavg")
    comparison = ranks.compare_ranks(NAMES, DEMSAR, 1, "nemenyi")
    assert [float(row["p"]) for row in rows] == pytest.approx(comparison.pair_p_values[np.triu_indices(4, 1)].tolist())
    study.change(report=Report())
    assert path not in contents.build_table_files(study.data)
    assert "Ranks" not in study.render_markdown()


def test_ranks_use_first_metric_and_its_direction(study):
    study.change(metrics=("accuracy",))
    best = ranks.build_ranked_table(study.data).compare_methods(study.plan).names[0]
    data = study.data
    flipped = dataclasses.replace(study.plan, metrics=("nll",))
    assert ranks.build_ranked_table(data).compare_methods(flipped).names[-1] == best == "fedper"


def test_ranks_omit_method_with_missing_number(study):
    index = next(number for number, run in enumerate(study.runs) if run.algorithm == "fedprox")
    study.write(index, [{"global-on-global": [(1, 2)]}])
    text = study.render_markdown()
    assert "fedprox is omitted, because a column has no number." in text
    assert "chi-squared(2)" in text


def test_ranked_table_has_row_per_grid_value_of_one_method(make):
    tree = make(["fedavg", "fedprox"], [0], {"partition.alpha": [0.1, 0.5, 1], "algorithms.fedprox.mu": [1, 2]})
    tree.write_all([{"global-on-global": [(index, 10)]}] for index in range(len(tree.runs)))
    tree.change(report=Report(rank_test="nemenyi"))
    assert count_rows_and_columns(tree.plan) == (3, 3)
    table = ranks.build_ranked_table(tree.data)
    assert {*table.scores} == {"fedavg", "fedprox (mu=1)", "fedprox (mu=2)"}
    assert {len(scores) for scores in table.scores.values()} == {3}


def test_ranks_figure_shows_methods_ranks_and_groups(study, tmp_path):
    write_ranks_figure(study.data)
    (path,) = study.plan.study_files.figures_folder.glob("*.svg")
    assert path.name == "ranks.svg"
    assert path in study.plan.figure_files
    text = path.read_text(encoding="utf-8")
    assert all(name in text for name in ("FedPer  1.96", "3.14  local", "critical difference 1.25", "Nemenyi"))
    before = path.read_bytes()
    write_ranks_figure(study.data)
    assert path.read_bytes() == before
    comparison = ranks.compare_ranks(NAMES, DEMSAR, 1, "nemenyi")
    (ax,) = build_ranks_figure(style.PAGES["neurips"], comparison, list(comparison.names), []).axes
    bars = [line for line in ax.get_lines() if line.get_linewidth() == 3.5]
    assert len(bars) == len(comparison.indistinguishable_groups) == 1
    low, high = bars[0].get_xdata()
    assert low < comparison.mean_ranks[0]
    assert high > comparison.mean_ranks[-1]


@pytest.mark.parametrize("page", style.PAGES.values(), ids=style.PAGES)
def test_long_titles_of_ranks_figure_are_inside_figure_and_do_not_overlap(page):
    comparison = ranks.compare_ranks(NAMES, DEMSAR, 1, "nemenyi")
    titles = [f"FedProx (mu=0.0{index}, local_epochs=15, proximal_term_of_each_layer=true)" for index in range(4)]
    figure = build_ranks_figure(page, comparison, titles, ["A note."])
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if "FedProx" in text.get_text()]
    assert all(figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1 for box in boxes)
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))
    assert min(box.y0 for box in boxes) >= figure._supxlabel.get_window_extent().y1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("is_missing", "size"),
    [
        (lambda method, column: method in (1, 2), "2 x 14"),
        (lambda method, column: column > 0, "4 x 1"),
        (lambda method, column: True, "0 x 0"),
    ],
    ids=["methods", "columns", "all"],
)
def test_ranks_figure_rejects_too_few_methods_or_columns(study, is_missing, size):
    for index in range(len(study.runs)):
        column, method = divmod(index, 4)
        if is_missing(method, column):
            study.write(index, [{"global-on-global": [(1, 2)]}])
    assert "Friedman" not in study.render_markdown()
    with pytest.raises(ArtifactError, match=rf"^report\.rank_test: nemenyi .* 3 methods and 2 columns, .* {size}\."):
        write_ranks_figure(study.data)


@pytest.mark.parametrize(
    ("algorithms", "columns", "rank_test", "sizes"),
    [(2, 14, "nemenyi", "3 methods and 3 columns"), (3, 2, "nemenyi", "3 columns"), (4, 7, "holm", "8 columns")],
)
def test_plan_rejects_rank_test_of_too_small_table(make, algorithms, columns, rank_test, sizes):
    tree = make(["fedavg", "fedprox", "local", "fedper"][:algorithms], [0], {"partition.alpha": [*range(columns)]})
    tree.change(report=Report(rank_test=rank_test))
    with pytest.raises(SettingsError, match=rf"^report\.rank_test: {rank_test} .* {sizes}"):
        check_rank_test(tree.plan)
    tree.change(report=Report())
    check_rank_test(tree.plan)


def test_study_without_rank_test_has_no_ranks_figure(study):
    files = layout.StudyFiles.from_params(Path("params.yaml"))
    assert files.ranks_table == Path("results/tables/ranks.csv")
    study.change(report=Report())
    assert not any(path.stem == "ranks" for path in study.plan.figure_files)
