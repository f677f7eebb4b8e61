"""Content, layout and reproducibility of figures."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.text import Text

from fedpipe.core.storage import files, layout
from fedpipe.data.class_names import select_class_names
from fedpipe.report import plots
from fedpipe.report.figures import curves as curves_figure
from fedpipe.report.figures import matrices, partition, style
from fedpipe.report.matrices import ModelMatrices
from fedpipe.settings.report import Report
from tests import small_studies as studies
from tests.report.conftest import PARTITION

GLOBAL, LOCAL = "Global test accuracy (global model)", "Local test accuracy (personalized)"  #: metrics

NEURIPS = style.PAGES["neurips"]
SETTINGS = {"dataset": {"name": "digits"}, "partition": {"scheme": "dirichlet", "alpha": 0.3}, "seed": 4}


def make_lines(make, counts, rounds=3):
    """Make a study with one method per count. The count is the number of correct answers of 20 in each round."""
    tree = make(["fedavg", *(f"other{index:02d}" for index in range(1, len(counts)))], [0])
    tree.write_all([{"global-on-global": [(count, 20)]}] * rounds for count in counts)
    return tree


def plot_curves(tree):
    """Plot the curves of all metrics of a study."""
    return curves_figure.build_curves_figure(tree.plan, tree.data.build_metric_curves())


def plot_twice(write, stem):
    """Draw a figure two times. Return the bytes of its files each time."""
    result = []
    for _ in range(2):
        write()
        result.append([Path(f"results/figures/{stem}.{kind}").read_bytes() for kind in ("svg", "pdf", "png")])
    return result


def test_line_styles_of_many_algorithms_differ():
    looks = [style.get_line_style(index) for index in range(40)]
    assert len({(look["color"], str(look["linestyle"]), look["marker"]) for look in looks}) == 40
    assert len({look["color"] for look in looks[:10]}) == len({look["marker"] for look in looks[:10]}) == 10


def test_curves_figure_has_equal_bytes_each_time_without_date(two):
    first, second = plot_twice(lambda: curves_figure.write_curves_figure(two.data), "curves")
    assert first == second
    assert b"<dc:date>" not in first[0]
    assert b"CreationDate" not in first[1]
    assert b"Matplotlib" not in first[2]


def test_curves_figure_stores_text_as_text(two):
    """The SVG lists fallback fonts, and the PDF embeds its fonts."""
    curves_figure.write_curves_figure(two.data)
    svg, pdf = (Path(f"results/figures/curves.{kind}").read_bytes() for kind in ("svg", "pdf"))
    assert b">Global test accuracy</text>" in svg
    assert svg.count(b"'DejaVu Sans'") == svg.count(b"'DejaVu Sans', Verdana, sans-serif") > 0
    assert b"/Type3" not in pdf
    assert b"/TrueType" in pdf or b"/CIDFontType2" in pdf


def test_curves_figure_labels_coinciding_lines(make):
    """Two lines are equal in both panels, and a third is equal in one panel."""
    tree = make(["fedavg", "feddw", "other"], [0])
    for index, (server, local) in enumerate([(3, 4), (3, 4), (5, 4)]):
        tree.write(index, [{"global-on-global": [(server, 10)], "personal-on-local": [(local, 10)] * 2}] * 3)
    first, second = plot_curves(tree).axes
    assert [text.get_text() for text in first.texts] == ["fedavg = feddw"]
    assert [text.get_text() for text in second.texts] == ["fedavg = feddw = other"]


def test_equalities_in_low_panel_are_below_each_other(make):
    names = ["fedavg", "a method with a long name", "another method with a long name", "feddw"]
    tree = make(names, [0], {"partition.alpha": [number / 10 for number in range(1, 13)]})
    for index, run in enumerate(tree.runs):
        right = 3 if run.algorithm in names[:2] else 4
        tree.write(index, [{"global-on-global": [(right, 10)]}] * 3)
    figure = plot_curves(tree)
    (text,) = figure.axes[0].texts
    assert text.get_text().split("\n") == [
        "fedavg = a method with a long name",
        "another method with a long name =",
        "feddw",
    ]


def test_panel_title_shows_equality_with_fedavg(make):
    names = ["fedavg", "feddw", "half", *(f"other{index:02d}" for index in range(9))]
    tree = make(names, [0])
    for index, name in enumerate(names):
        same, half = name in ("fedavg", "feddw", "half"), name != "half"
        result = {"global-on-global": [(1 if same else index, 20)], "personal-on-local": [(2 if half else 3, 20)] * 2}
        tree.write(index, [result] * 3)
    panels = [ax for ax in plot_curves(tree).axes if ax.axison]
    assert [ax.get_title("left") for ax in panels][:4] == ["fedavg", "feddw = fedavg", "half", "other00"]


def find_overlaps(texts, renderer):
    """Find the pairs of texts that overlap."""
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]
    return [(one, other) for (one, a), (other, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]


@pytest.mark.slow
@pytest.mark.parametrize("panels", ["a grid's", "methods'"])
def test_labels_of_27_panels_do_not_overlap(make, panels):
    """The study has a thousand rounds and long grid values."""
    alphas = [0.12345678901234567 + index for index in range(9)]
    names = ["fedavg", "feddw"] if panels == "a grid's" else [f"other{index:02d}" for index in range(27)]
    tree = make(names, [0], {"partition.alpha": alphas} if panels == "a grid's" else None)
    protocols = ("global-on-global", "personal-on-local", "finetuned-on-local")
    tree.change(protocols=protocols)
    tree.write_all([{protocol: [(4, 10)] for protocol in protocols}] * 2 for index in range(len(tree.runs)))
    frame = tree.data.build_metric_curves()
    figure = curves_figure.build_curves_figure(tree.plan, frame.assign(round=frame["round"].replace(2, 1000)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn_axes = [ax for ax in figure.axes if ax.axison]
    assert len(drawn_axes) == 27
    inside = [
        label
        for ax in drawn_axes
        for tick, label in zip(ax.get_xticks(), ax.get_xticklabels(), strict=False)  # no labels if they are hidden
        if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1] and label.get_visible()
    ]
    assert len(inside) >= 6
    assert find_overlaps(inside, canvas.get_renderer()) == []
    titles = [ax.title if ax.get_title() else ax._left_title for ax in drawn_axes]  # type: ignore[attr-defined]
    assert find_overlaps(titles, canvas.get_renderer()) == []


def list_partition_names(make, *partitions):
    """Return the names of partitions with these settings."""
    tree = make(["fedavg"])
    dataset = {"name": "digits", "split": "official"}
    scheme = {"scheme": "dirichlet", "alpha": 0.2, "minimum": 10, "code": "0"}
    settings = {
        f"{index:012x}": {"clients": 10, "seed": 0}
        | changes
        | {"dataset": dataset | changes.get("dataset", {}), "partition": scheme | changes.get("partition", {})}
        for index, changes in enumerate(partitions)
    }
    tree.change(partitions=settings)
    return list(tree.plan.partition_names.values())


def test_partition_names_contain_differing_settings(make):
    assert list_partition_names(make, {}, {"seed": 1}) == ["dirichlet-0.2-seed0", "dirichlet-0.2-seed1"]
    names = ["dirichlet-0.2-clients10-seed0", "dirichlet-0.2-clients20-seed0"]
    assert list_partition_names(make, {}, {"clients": 20}) == names
    other = {"partition": {"minimum": 5, "alpha": 1.0}, "dataset": {"name": "mnist"}}
    names = ["digits-dirichlet-0.2-minimum10-seed0", "mnist-dirichlet-1.0-minimum5-seed0"]
    assert list_partition_names(make, {}, other) == names
    odd = {"partition": {"scheme": "own.Sets", "sets": "a/b c"}}
    assert list_partition_names(make, odd)[0] == "own.Sets-0.2-a_b_c-seed0"
    same = list_partition_names(make, {}, {"dataset": {"test_fraction": 0.5}})
    assert same == ["dirichlet-0.2-seed0-000000000000", "dirichlet-0.2-seed0-000000000001"], "keys distinguish them"


def test_dvc_plots_use_colors_of_figures():
    """Colors follow the order of lines in the file, as in the figure. Vega's default would sort lines by name."""
    template = json.loads((studies.ROOT / ".dvc/plots/curves.json").read_text())
    color = template["spec"]["encoding"]["color"]
    assert (color["field"], color["sort"]) == ("line", None)
    assert color["scale"] == {"range": list(style.COLORS)}
    assert [layer["mark"]["type"] for layer in template["spec"]["layer"]] == ["area", "line"]


def test_curves_figure_has_panel_per_protocol_and_line_per_algorithm(two):
    figure = plot_curves(two)
    first, second = figure.axes
    assert first.get_title("left") == "Global test accuracy\n(global model)"
    assert [line.get_label() for line in first.lines] == ["fedavg"]
    assert first.lines[0].get_ydata().tolist() == pytest.approx([25, 60, 70])
    assert [line.get_label() for line in second.lines] == ["fedavg", "local"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg", "local"]


def test_curves_figure_has_panel_per_shared_grid_value(make):
    tree = make(["fedavg", "fedprox"], [0], {"partition.alpha": [0.1, 0.5], "algorithms.fedprox.mu": [1, 2]})
    tree.write_all([{"global-on-global": [(index, 10)]}] * 3 for index in range(len(tree.runs)))
    figure = plot_curves(tree)
    assert [ax.get_title("left") for ax in figure.axes if ax.axison] == [
        "Global test accuracy\n(global model)\nalpha=0.1",
        "Global test accuracy\n(global model)\nalpha=0.5",
    ]
    assert [line.get_label() for line in figure.axes[0].lines] == ["fedavg", "fedprox (mu=1)", "fedprox (mu=2)"]


@pytest.mark.parametrize("algorithms", [2, 7], ids=["legend", "a panel each"])
def test_curves_figure_shows_titles_of_algorithms(make, algorithms):
    tree = make_lines(make, [1, *range(1, algorithms)])
    tree.change(titles={"fedavg": "FedAvg ($λ$ = 10)", "other01": "Other <1>"})
    curves_figure.write_curves_figure(tree.data)
    svg = Path("results/figures/curves.svg").read_text()
    assert "FedAvg ($λ$" in svg, "the title is not rendered as mathematics"
    assert "Other &lt;1&gt;" in svg
    assert "fedavg" not in svg
    assert "other01" not in svg
    assert ("FedAvg ($λ$ = 10) (gray" in svg) == (algorithms == 7)


@pytest.mark.parametrize("width", ["neurips", "column"])
@pytest.mark.parametrize("algorithms", [2, 7], ids=["legend", "a panel each"])
def test_long_titles_of_curves_figure_are_inside_figure_and_do_not_overlap(make, algorithms, width):
    tree = make_lines(make, range(1, algorithms + 1))
    titles = {"fedavg": "federated_averaging_with_server_momentum_and_decay", "other01": "with many words " * 5}
    tree.change(titles=titles, report=Report(figure_width=width))
    figure = plot_curves(tree)
    figure.draw_without_rendering()
    assert max(text.get_window_extent().x1 for text in figure.legends[0].get_texts()) <= figure.bbox.x1
    boxes = [ax._left_title.get_window_extent() for ax in figure.axes if ax.get_title("left")]  # type: ignore[attr-defined]
    assert max(box.x1 for box in boxes) <= figure.bbox.x1
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("algorithms", [2, 7], ids=["legend", "a panel each"])
def test_curves_figure_shows_overrides_of_one_method(make, algorithms):
    tree = make_lines(make, [1, *range(1, algorithms)])
    plain = plot_curves(tree)
    first, second, *others = tree.plan.cells
    tree.change(cells=(first, dataclasses.replace(second, own={"federation.local_epochs": 15}), *others))
    figure = plot_curves(tree)
    assert plain.get_supxlabel() == "One seed."
    assert figure.get_supxlabel() == "One seed.\nOverrides of other01: federation.local_epochs=15."
    figure.draw_without_rendering()
    axes = [ax.get_tightbbox() for ax in figure.axes if ax.axison]
    assert figure._supxlabel.get_window_extent().y1 <= min(box.y0 for box in axes), "no axes overlap the note"  # type: ignore[attr-defined]
    curves_figure.write_curves_figure(tree.data)
    svg = Path("results/figures/curves.svg").read_text(encoding="utf-8")
    assert ">Overrides of other01: federation.local_epochs=15.<" in svg


@pytest.fixture
def three(make):
    """Three algorithms with equal results, matrices and overrides."""
    tree = make(["fedavg", "feddw", "other"], [0])
    for index in range(3):
        tree.write(index, [{"global-on-global": [(5, 10)], "personal-on-local": [(5, 10)] * 2}])
        tree.write_matrices(index, {"SL": 0.1, "CR": 0.2})
    tree.set_overrides(lambda cell: {"federation.rounds": 9})
    return tree


def test_matrices_figure_shows_overrides_of_drawn_methods(three):
    matrices.write_matrices_figure(three.data)
    svg = Path("results/figures/matrices.svg").read_text(encoding="utf-8")
    assert ">Overrides of fedavg, feddw: federation.rounds=9.<" in svg, "the note lists only drawn algorithms"


def test_curves_figure_keeps_lines_with_equal_titles(make):
    """A title can equal the name of another line."""
    tree = make(["fedavg", "fedprox"], [0], {"algorithms.fedprox.mu": [1]})
    tree.write_all([{"global-on-global": [(index + 1, 10)]}] * 3 for index in range(2))
    tree.change(titles={"fedavg": "FedProx (mu=1)", "fedprox": "FedProx"})
    figure = plot_curves(tree)
    assert [line.get_ydata()[-1] for line in figure.axes[0].lines] == [10, 20]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedProx (mu=1)"] * 2


def test_curves_figure_shows_best_grid_values_of_table(make):
    """A search adds no panels or lines. Accuracies on validation samples that it used are not drawn."""
    tree = make(["fedavg", "fedprox"], [0], {"partition.alpha": [0.1, 0.5], "federation.learning_rate": [0.01, 0.1]})
    right = {0: 3, 1: 3, 2: 6, 3: 1, 4: 5, 5: 2, 6: 4, 7: 9}  # by point, then algorithm
    for run, count in right.items():
        result = {"personal-on-local": [(count, 10)], "personal-on-validation": [(10 - count, 10)] * 2}
        tree.write(run, [result] * 3)
    tree.change(protocols=("personal-on-local", "personal-on-validation"))
    tree.change_report(best_over=("federation.learning_rate",))
    figure = curves_figure.build_curves_figure(tree.plan, tree.data.build_figure_curves())
    first, second, *_ = figure.axes
    assert [first.get_title(loc="left"), second.get_title(loc="left")] == [
        "Local test accuracy\n(personalized)\nalpha=0.1",
        "Local validation accuracy\n(personalized)\nalpha=0.1",
    ]
    assert figure.get_supylabel() == "accuracy (%)"
    ends = {line.get_label(): line.get_ydata()[-1] for line in first.get_lines()}
    assert ends == {"fedavg": 60, "fedprox": 30}
    frame = tree.data.build_figure_curves()
    assert len(frame) == 2 * 2 * 2 * 3
    tree.change_report(best_on="validation")
    frame = tree.data.build_figure_curves()
    assert set(frame["protocol"]) == {"personal-on-local"}
    assert frame.groupby(["algorithm", "partition.alpha"])["mean"].first().to_dict() == {
        ("fedavg", "0.1"): 30,
        ("fedavg", "0.5"): 40,
        ("fedprox", "0.1"): 10,
        ("fedprox", "0.5"): 20,
    }
    assert curves_figure.build_curves_figure(tree.plan, frame).get_supylabel() == "test accuracy (%)"


def test_matrices_figure_shows_best_grid_values_of_table(make):
    tree = make(["fedavg"], [0], {"federation.learning_rate": [0.01, 0.1]})
    for run, count in enumerate([3, 6]):
        tree.write(run, [{"global-on-global": [(count, 10)]}] * 3)
        tree.write_matrices(run, {"SL": count / 10, "CR": count / 10})
    assert list(matrices.read_figure_matrices(tree.data)) == ["fedavg (learning_rate=0.01)"]
    tree.change_report(best_over=("federation.learning_rate",))
    assert list(matrices.read_figure_matrices(tree.data)) == ["fedavg (learning_rate=0.1)"]


def test_curves_figure_of_many_algorithms_has_panels_with_gray_fedavg(make):
    names = [*(f"other{index:02d}" for index in range(10)), "fedavg"]
    tree = make(names, [0])
    for index in range(11):
        local = {"personal-on-local": [(index, 10), (0, 10)]}
        tree.write(index, [local if index == 3 else {"global-on-global": [(index, 20)]} | local] * 3)
    figure = plot_curves(tree)
    panels = [ax for ax in figure.axes if ax.axison]
    assert [ax.get_title("left") for ax in panels] == names
    assert len(figure.axes) == 12
    ends = [[(line.get_label(), line.get_ydata()[-1]) for line in ax.lines] for ax in panels]
    gray = ("fedavg (gray, for comparison)", 50)
    assert ends[2] == [gray, (GLOBAL, 10), gray, (LOCAL, 10)]
    assert ends[3] == [gray, (LOCAL, 15)], "a method without such a model has no line"
    assert ends[10] == [(GLOBAL, 50), (LOCAL, 50)]
    legend_texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend_texts == [GLOBAL, LOCAL, gray[0]]


def test_title_in_figure_with_hundreds_of_panels_has_one_letter_per_line():
    assert curves_figure._wrap_title("FedAvg", "a=1", 0) == "FedAvg\na\n=\n1"


def test_curves_figure_of_six_lines_has_legend(make):
    figure = plot_curves(make_lines(make, range(6)))
    assert [len(figure.legends[0].get_texts()), len(figure.axes[0].texts)] == [6, 0]


@pytest.mark.parametrize("algorithms", [2, 11], ids=["together", "apart"])
def test_curves_figure_of_one_round_has_markers_and_integer_tick(make, algorithms):
    ax = plot_curves(make_lines(make, range(algorithms), rounds=1)).axes[0]
    assert {line.get_marker() for line in ax.lines}.isdisjoint({"", "None"})
    low, high = ax.get_xlim()
    assert [tick for tick in ax.get_xticks() if low <= tick <= high] == [1]


def test_curves_figure_without_accuracies_has_note(make):
    tree = make(["local"], [0])
    tree.write(0, [{}])
    figure = plot_curves(tree)
    assert not [line for ax in figure.axes for line in ax.lines]
    assert figure.get_supxlabel() == "No method has a model of these protocols, so there are no curves."
    check_page(figure, NEURIPS)


def test_panel_without_finite_values_keeps_axis_limits(make):
    """For example, the NLL of a reference diverges. Each of seven lines has a panel."""
    names = [f"other{index}" for index in range(7)]
    tree = make(names, [0])
    for index in range(7):
        tree.write(index, [{"global-on-global": [(index + 1, 10)], "personal-on-local": [(1, 10)] * 2}] * 3)
    frame = tree.data.build_metric_curves()
    diverged = frame.assign(mean=frame["mean"].where(frame["algorithm"] != "other0"))
    for drawn_frame in (frame, diverged):
        panels = [ax for ax in curves_figure.build_curves_figure(tree.plan, drawn_frame).axes if ax.axison]
        assert {(ax.get_xlim(), ax.get_ylim()) for ax in panels} == {(panels[0].get_xlim(), panels[0].get_ylim())}
        low, high = panels[0].get_ylim()
        assert low < 20 < 70 < high < 100
        assert panels[0].get_xlim()[0] < 1 < 3 < panels[0].get_xlim()[1] < 4


def test_partition_figure_shows_counts_and_sizes():
    figure = partition.build_partition_figure(np.array([[3, 0], [1, 4]]), SETTINGS, NEURIPS)
    cells, bars = figure.axes
    assert sorted(text.get_text() for text in cells.texts) == ["1", "3", "4"]
    assert [bar.get_width() for bar in bars.patches] == [3, 5]  # type: ignore[attr-defined]
    assert figure.get_suptitle() == "digits: dirichlet, alpha = 0.3, seed 4"
    subset_settings = SETTINGS | {"dataset": {"name": "digits", "subset": 3}}
    subset = partition.build_partition_figure(np.array([[3]]), subset_settings, NEURIPS)
    assert subset.get_suptitle() == "digits (3 samples): dirichlet, alpha = 0.3, seed 4"
    note = figure.get_supxlabel().replace("\u00a0", " ")
    assert "Mean label entropy 0.36 bits" in note  # of 0 and 0.722
    assert "Gini index of sizes 0.125" in note


def test_partition_figure_marks_held_out_clients():
    for clients in (4, 100):
        counts = np.ones((clients, 2), dtype=np.int64)
        figure = partition.build_partition_figure(counts, SETTINGS, NEURIPS, held_out=[1, 3])
        colors = [to_hex(bar.get_facecolor()) for bar in figure.axes[1].patches]
        assert [client for client, color in enumerate(colors) if color == partition.HELD_OUT_COLOR] == [1, 3]
        assert set(colors) == {partition.HELD_OUT_COLOR, style.COLORS[0].lower()}
        assert "Clients with a gray bar are held out" in figure.get_supxlabel()
        check_page(figure, NEURIPS)
    plain = partition.build_partition_figure(np.ones((4, 2), dtype=np.int64), SETTINGS, NEURIPS)
    assert {to_hex(bar.get_facecolor()) for bar in plain.axes[1].patches} == {style.COLORS[0].lower()}
    assert "held out" not in plain.get_supxlabel()


def test_partition_figure_of_many_clients_has_color_bar_without_numbers():
    cells, _, bar = partition.build_partition_figure(np.ones((100, 10), dtype=np.int64), SETTINGS, NEURIPS).axes
    assert not cells.texts
    assert bar.get_ylabel() == "samples of a class"


@pytest.mark.parametrize("width", style.PAGES)
def test_partition_figure_of_a_thousand_clients_has_visible_bar_of_each(width, tmp_path):
    """A bar lower than a pixel would vanish if its edges were rounded to pixels."""
    page = style.PAGES[width]
    figure = partition.build_partition_figure(np.ones((1000, 10), dtype=np.int64), SETTINGS, page)
    style.save_figure(figure, tmp_path / "figure", page)
    pixels = imread(tmp_path / "figure.png")
    height, width_in_pixels, _ = pixels.shape
    box = figure.axes[1].get_position()
    rows = slice(round(height * (1 - box.y1)), round(height * (1 - box.y0)))
    column = pixels[rows, round(width_in_pixels * (box.x0 + box.width / 4)), :3]
    assert len(column) > 500
    assert (column < 0.9).any(axis=1).mean() > 0.9  # except the margins


def read_tick_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def test_partition_figure_shows_class_names_of_published_data_sets():
    def plot_class_axis(name, classes):
        names = select_class_names(name, classes)
        counts = np.ones((3, classes), dtype=np.int64)
        figure = partition.build_partition_figure(counts, SETTINGS, NEURIPS, class_names=names)
        figure.draw_without_rendering()
        return figure.axes[0].xaxis

    assert read_tick_labels(plot_class_axis("fashion_mnist", 10)) == FASHION
    assert {label.get_rotation() for label in plot_class_axis("fashion_mnist", 10).get_ticklabels()} == {90}
    assert read_tick_labels(plot_class_axis("ag_news", 4)) == ["World", "Sports", "Business", "Sci/Tech"]
    assert {label.get_rotation() for label in plot_class_axis("ag_news", 4).get_ticklabels()} == {0}
    for name, classes in (("cifar100", 100), ("npz", 3), ("generated", 10)):
        assert all(text.lstrip("−").isdecimal() for text in read_tick_labels(plot_class_axis(name, classes))), name


def test_matrices_figure_shows_class_names_of_published_data_sets(make):
    tree = make(["fedavg"], [0])
    tree.write_matrices(0, {"SL": 0.1, "CR": 0.2})
    runs = tuple(dataclasses.replace(run, dataset=f"imdb-{0:012x}") for run in tree.plan.runs)
    tree.change(runs=runs)
    result = matrices.read_figure_matrices(tree.data)
    assert result["fedavg"].class_names == ("negative", "positive")
    figure = matrices.build_matrices_figure(result, [], NEURIPS)
    assert read_tick_labels(figure.axes[0].xaxis) == read_tick_labels(figure.axes[0].yaxis) == ["negative", "positive"]


def test_partition_figure_shows_client_names_if_they_fit():
    for clients, has_names in ((21, True), (200, False)):
        names = [f"writer{client:02d}" for client in range(clients)]
        counts = np.ones((clients, 3), dtype=np.int64)
        figure = partition.build_partition_figure(counts, SETTINGS, NEURIPS, client_names=names)
        figure.draw_without_rendering()
        assert (read_tick_labels(figure.axes[0].yaxis) == names) is has_names
        check_page(figure, NEURIPS)


def test_partition_figure_distinguishes_zero_from_few_samples():
    cells, *_ = partition.build_partition_figure(np.array([[0, 1], [10000, 100]]), SETTINGS, NEURIPS).axes
    (image,) = cells.images
    assert image.get_array().mask.tolist() == [[True, False], [False, False]]
    assert image.norm([1, 100, 10000]).tolist() == pytest.approx([0.01, 0.1, 1])


def test_partition_figure_has_equal_bytes_each_time(make):
    tree = make(["fedavg"])
    table = {"sample": [0, 1, 2], "client": [0, 1, 1], "label": [0, 1, 0], "split": ["train", "train", "test"]}
    path = layout.get_assignment_path(PARTITION)
    tree.write_table(path, pa.table(table), "assignment.json")
    files.write_json(path.with_name("partition.yaml"), SETTINGS)  # JSON is YAML
    stem = "partition-dirichlet-0.3-seed0"
    first, second = plot_twice(lambda: partition.write_partition_figure(tree.plan, PARTITION), stem)
    assert first == second


@pytest.fixture
def four(make):
    """Four algorithms with different matrices. One has no global model."""
    tree = make(["local", "scaffold", "feddw", "fedavg"])
    for index, (number, _) in enumerate(itertools.product((None, 0.01, 0.02, 0.03), (0, 1))):
        value = None if number is None else {"SL": number + index % 2, "CR": number / 2}
        tree.write_matrices(index, value)
    return tree


def test_matrices_figure_shows_last_round_of_first_seed(four):
    result = matrices.read_figure_matrices(four.data)
    assert list(result) == ["fedavg", "feddw"]
    assert result["fedavg"].matrices["SL"] == pytest.approx(np.full((2, 2), 0.09))
    assert result["feddw"].matrices["CR"] == pytest.approx(np.full((2, 2), 0.03))
    first, second = plot_twice(lambda: matrices.write_matrices_figure(four.data), "matrices")
    assert first == second


def test_matrices_figure_shows_titles_of_algorithms(four):
    four.change(titles={"fedavg": "FedAvg (λ)"})
    matrices.write_matrices_figure(four.data)
    svg = Path("results/figures/matrices.svg").read_text()
    assert "FedAvg (λ), SL" in svg
    assert "feddw, SL" in svg
    lines = set(plots.build_matrix_entries(four.data)["line"])
    assert lines == {"fedavg", "feddw"}, "lines have labels, so DVC can compare commits"


def test_matrices_figure_shows_round_and_seed(make):
    tree = make(["feddw", "fedavg"], [0], {"federation.rounds": [3, 4]})
    cells = tuple(dataclasses.replace(cell, rounds=cell.grid["federation.rounds"]) for cell in tree.plan.cells)
    tree.change(cells=cells)
    for run in (0, 1):
        tree.write_matrices(run, {"SL": 0.1, "CR": 0.2})
    matrices.write_matrices_figure(tree.data)
    assert "Global models after round 3, seed 0" in Path("results/figures/matrices.svg").read_text()


def test_matrices_figure_without_fedavg_shows_first_global_models(four):
    four.change(algorithms=("local", "scaffold", "feddw"))
    assert list(matrices.read_figure_matrices(four.data)) == ["feddw", "scaffold"]
    four.change(algorithms=("local", "scaffold"))
    assert list(matrices.read_figure_matrices(four.data)) == ["scaffold"]


@pytest.mark.filterwarnings("error")
def test_matrices_figure_without_global_model_shows_note(four):
    four.change(algorithms=("local",))
    matrices.write_matrices_figure(four.data)
    assert Path("results/figures/matrices.svg").is_file()
    assert "no matrices" in matrices.build_matrices_figure({}, [], NEURIPS).get_supxlabel()


def check_page(figure, page):
    """Check the size of a figure, and that its texts are legible, inside the page, and do not overlap.

    One title can be above another.
    """
    canvas = FigureCanvasAgg(figure)
    with style.use_matplotlib_style(page):
        canvas.draw()
    width, height = figure.get_size_inches()
    assert width == page.width
    assert height <= page.max_height
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    drawn_axes = [ax for ax in figure.axes if ax.axison]
    assert min(text.get_fontsize() for text in texts) >= style.MIN_FONT_SIZE
    titles = [ax._left_title for ax in drawn_axes if ax._left_title.get_text()]
    notes = [figure._supxlabel, *titles, *(text for legend in figure.legends for text in legend.get_texts())]
    renderer = canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in notes if text is not None]
    assert all(box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 for box in boxes), "a text is cut off"
    assert find_overlaps(filter(None, notes), renderer) == []
    for ax in drawn_axes:
        assert ax.bbox.height > 2 * page.em_in_inches * figure.dpi, "the panel is too flat"
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
            visible = [label for tick, label in labels if low <= tick <= high and label.get_visible()]
            assert find_overlaps(visible, renderer) == []


WIDTHS = studies.mark_others_slow(style.PAGES, fast=("column", "slides"))  # the narrowest and the widest page


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lines", [1, 6, 9, pytest.param(27, marks=pytest.mark.slow)])
def test_curves_figure_fits_page(make, width, lines):
    names = ["FedAvg", "SCAFFOLD", "Per-FedAvg", "cwFedAvg (λ = 10)", *(f"Method{index:02d}" for index in range(27))]
    tree = make(names[:lines], [0, 1, 2])
    for index in range(3 * lines):
        counts = {"global-on-global": [(index % 10, 10)], "personal-on-local": [(index % 7, 10), (1, 10)]}
        tree.write(index, [counts] * 3)
    tree.change_report(figure_width=width)
    frame = tree.data.build_figure_curves()
    figure = curves_figure.build_curves_figure(tree.plan, frame.assign(round=frame["round"] * 1000))
    assert figure.get_supxlabel() == "Mean of 3 seeds. Band: one standard deviation."
    check_page(figure, style.PAGES[width])
    ticks = {tick for ax in figure.axes if ax.axison for tick in ax.get_xticks()}
    assert ticks <= {1000, 2000, 3000}, "ticks are measured rounds"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [(2, 2), (10, 10), (20, 100), (100, 10)], ids=str)
def test_partition_figure_fits_page(width, shape):
    counts = np.random.default_rng(0).integers(0, 4000, shape)
    names = select_class_names("fashion_mnist" if shape[1] == 10 else "cifar100", shape[1])
    for class_names in (names, [name * 9 for name in names]):
        page = style.PAGES[width]
        check_page(partition.build_partition_figure(counts, SETTINGS, page, class_names=class_names), page)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("classes", "methods"), [(10, 1), (10, 2), (100, 2)])
def test_matrices_figure_fits_page(width, classes, methods):
    values = np.random.default_rng(0).dirichlet(np.ones(classes), classes)
    names = FASHION if classes == 10 else [*map(str, range(classes))]
    each = ModelMatrices(None, {"SL": values, "CR": values}, tuple(names))
    selected_matrices = dict(itertools.islice([("FedAvg", each), ("FedDW (mu=0.1)", each)], methods))
    figure = matrices.build_matrices_figure(selected_matrices, ["Global models."], style.PAGES[width])
    check_page(figure, style.PAGES[width])


def test_round_ticks_are_measured_rounds():
    assert style.choose_round_ticks(range(1, 41), 5) == [10, 20, 30, 40]
    assert style.choose_round_ticks([40, 5, 5, 20], 5) == [5, 20, 40]
    assert style.choose_round_ticks(range(7, 100, 10), 4) == [7, 37, 67, 97], "ticks include the last round"
    assert style.choose_round_ticks([], 3) == []


def test_report_settings_select_methods_and_protocols_of_figures(three):
    """Overrides of methods that are not drawn have no note. The table keeps all methods."""
    before = three.plan.report_fingerprint
    three.change_report(figure_algorithms=("other", "feddw"), figure_protocols=("personal-on-local",))
    assert three.plan.report_fingerprint != before, "figures are drawn again"
    frame = three.data.build_figure_curves()
    assert set(frame["algorithm"]) == {"feddw", "other"}
    assert set(frame["protocol"]) == {"personal-on-local"}
    figure = curves_figure.build_curves_figure(three.plan, frame)
    assert [ax.get_title("left") for ax in figure.axes] == ["Local test accuracy\n(personalized)"]
    assert "feddw" in figure.get_supxlabel()
    assert "fedavg" not in figure.get_supxlabel()
    assert list(matrices.read_figure_matrices(three.data)) == ["other", "feddw"]
    assert set(three.data.build_metric_curves()["algorithm"]) == {"fedavg", "feddw", "other"}
