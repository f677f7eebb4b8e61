"""Figures of the papers, drawn from the stored numbers in docs/papers: content, labels and bytes."""

import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from fedpipe.papers import figures, layouts, pages
from fedpipe.report.figures import panels, style
from tests.browser import list_problems
from tests.small_studies import ROOT

HOSTILE = 'a <b>&"$\\frac{</b>'
GRID = [(x, y) for x in np.linspace(-1, 1, 5) for y in np.linspace(-1, 1, 5)]
FRAMES = {
    (paper.paper, heading): path
    for paper in layouts.load_papers().values()
    for heading in paper.figures
    if (path := ROOT / "docs/papers/reduced" / pages.get_figure_path(paper, heading, "csv")).is_file()
}
STORED_PAGES = sorted((ROOT / "docs/papers").glob("*/*.html"))


def make_frame(names, rows):
    return pd.DataFrame(rows, columns=names.split())


def make_lines(panels=("one",), names=("fedavg", HOSTILE), x=(1, 2, 3)):
    rows = [(panel, line, number, 10 * number, 1.0) for panel in panels for line in names for number in x]
    return make_frame("panel line x mean std", rows)


def list_texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def build_figure(render, *arguments, **options):
    """Return the matplotlib figure instead of its SVG."""
    with style.use_matplotlib_style(panels.PAGE):
        return render.__wrapped__(*arguments, **options)


FORMS = {
    "lines": lambda: panels.plot_line_panels(make_lines(), HOSTILE, "y"),
    "bars": lambda: panels.plot_bar_panels(make_frame("category mean", [(HOSTILE, 3.0), ("b", np.nan)]), "x"),
    "heat maps": lambda: panels.plot_heatmap_panels(
        make_frame("panel row column value", [(HOSTILE, *position, 1.0) for position in np.ndindex(3, 4)]),
        "x",
        "y",
        "z",
    ),
    "points": lambda: panels.plot_point_panels(
        make_frame("panel x y contrary", [(HOSTILE, 0, 0.9, False), (HOSTILE, 1, 0.1, True)]), "x", "y"
    ),
    "embedding": lambda: panels.plot_embedding_panels(
        make_frame("x y class kind", [(0, 0, HOSTILE, "feature"), (0.1, 0, HOSTILE, "row"), (1, 1, "b", "feature")])
    ),
    "surface": lambda: panels.plot_surface_panels(
        make_frame("panel x y value", [(HOSTILE, x, y, x * x + y) for x, y in GRID]), "z"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_figure_escapes_labels_and_has_equal_bytes(form):
    svg = FORMS[form]()
    assert svg == FORMS[form]()
    assert any(HOSTILE in text for text in list_texts(svg)), list_texts(svg)
    assert "date" not in svg
    assert "Verdana" in svg
    assert not re.search(r'href="(?!#|data:image/png)', svg)


def list_figures():
    """Yield all figures. A figure is a slow test if an earlier figure has the same form."""
    forms = set()
    for paper, heading in FRAMES:
        form = layouts.load_papers()[paper].figures[heading].form
        yield pytest.param((paper, heading), id=f"{paper}-{heading}", marks=[pytest.mark.slow] * (form in forms))
        forms.add(form)


@pytest.mark.parametrize("name", list(list_figures()))
def test_stored_figure_matches_its_csv_and_fits_half_page(name):
    paper = layouts.load_papers()[name[0]]
    svg = figures.render_figure(paper, paper.figures[name[1]], pd.read_csv(FRAMES[name]))
    assert svg == FRAMES[name].with_suffix(".svg").read_text(), "the stored figure should match the stored numbers"
    width, height = (float(re.search(rf'<svg [^>]*{side}="([\d.]+)pt"', svg).group(1)) for side in ("width", "height"))
    assert width == pytest.approx(396)
    assert height <= 324
    text = " ".join(filter(None, list_texts(svg)))
    assert not re.search(r"\b(alpha|mu|lambda|epsilon|body\.\d|personal-on-local)\b", text)


def test_stored_pages_link_stored_figures():
    for page in STORED_PAGES:
        links = re.findall(r'<img [^>]*src="([^"]*)"', page.read_text())
        assert sorted(links) == sorted(
            f"figures/{path.name}" for path in page.parent.glob(f"figures/{page.stem}-*.svg")
        )


def test_browser_shows_figures_of_stored_pages(browser):
    for page in STORED_PAGES:
        assert list_problems(browser, page, 1280)[0] == []
        widths = browser.evaluate("[...document.images].map(image => image.naturalWidth)")
        assert len(widths) == page.read_text().count("<img ")
        assert all(width > 200 for width in widths), page


def test_figure_shows_number_of_seeds():
    paper = layouts.load_papers()["FedDUAL"]
    for seeds, sentence in (([3, 3, 3], "deviation of 3 seeds"), ([1, 2, 3], "deviation of up to 3 seeds")):
        rows = make_lines(names=("FedDUAL",)).assign(seeds=seeds)
        (note,) = (
            text for text in list_texts(figures.render_figure(paper, paper.figures["Figure 3"], rows)) if "seed" in text
        )
        assert sentence in note
    svg = figures.render_figure(paper, paper.figures["Figure 3"], make_lines(names=("FedDUAL",)).drop(columns="std"))
    assert "One seed." in list_texts(svg)


def test_rounds_to_targets_depend_on_last_accuracy_of_fedavg():
    values = {"FedAvg": [40, 79, 80, 80], "slow": [10, 20, 30, 64], "best": [90, 0, 0, 0], "never": [1, 2, 3, 4]}
    rows = [("a", line, 10 * x, value) for line, curve in values.items() for x, value in enumerate(curve, 1)]
    rounds = figures.compute_rounds_to_targets(make_frame("panel line x value", rows))
    result = rounds.pivot(index="line", columns="target", values="value")[[*figures.TARGET_FRACTIONS]]
    assert result.loc["FedAvg"].tolist() == [30, 20, 20]
    assert result.loc["best"].tolist() == [10, 10, 10]
    np.testing.assert_equal(result.loc["slow"].tolist(), [np.nan, np.nan, 40])
    assert result.loc["never"].isna().all()
    assert figures.compute_rounds_to_targets(make_frame("panel line x value", [("a", "slow", 1, 2)])).empty, "no FedAvg"


def test_each_figure_form_has_frame_builder():
    forms = {figure.form for paper in layouts.load_papers().values() for figure in paper.figures.values()}
    assert forms - {"none"} == set(figures.FRAME_BUILDERS)
    assert {layouts.load_papers()[paper].figures[heading].form for paper, heading in FRAMES} == forms - {"none"}


def test_panels_of_figure_have_their_own_axis_labels():
    """PFPS-LWC's Figure 8 varies the batch size in one panel and the local epochs in the other."""
    paper = layouts.load_papers()["PFPS-LWC"]
    svg = figures.render_figure(paper, paper.figures["Figure 8"], pd.read_csv(FRAMES["PFPS-LWC", "Figure 8"]))
    assert [text for text in list_texts(svg) if text in {"batch size", "local epochs"}] == [
        "batch size",
        "local epochs",
    ]


def test_line_panels_color_at_most_seven_lines():
    """FedDW's Figure 7 has twelve methods."""
    paper = layouts.load_papers()["FedDW"]
    stored = pd.read_csv(FRAMES["FedDW", "Figure 7"])
    figure = build_figure(panels.plot_line_panels, stored, "round", "y", ("FedAvg", "FedDW"))
    colors = {line.get_label(): line.get_color() for line in figure.axes[0].get_lines()}
    colored = {name for name, color in colors.items() if color != panels.GRAY}
    assert len(colors) == 12
    assert len(colored) == len({colors[name] for name in colored}) == panels.MAX_COLORS
    assert {"FedAvg", "FedDW"} < colored
    labels = list_texts(figures.render_figure(paper, paper.figures["Figure 7"], stored))
    assert {"5 others", "Gray: FedRep, FedProto, FedALA, FedPer, Local."} <= {*labels}


def test_color_of_method_ignores_order_of_methods():
    colors = []
    for names in (("FedPer", "FedAvg", "pFedMe", "FedBN"), ("FedBN", "pFedMe", "FedPer", "FedAvg")):
        figure = build_figure(panels.plot_line_panels, make_lines(names=names), "round", "y", ("FedAvg",))
        colors.append({line.get_label(): line.get_color() for line in figure.axes[0].get_lines()})
    assert colors[0] == colors[1]


def test_only_panels_of_one_dataset_share_vertical_axis():
    names = ("CIFAR-10, P = 0.3", "CIFAR-10, P = 0.7", "CIFAR-100, P = 0.3")
    rows = pd.concat([make_lines((name,)).assign(mean=20.0 * index) for index, name in enumerate(names)])
    limits = [ax.get_ylim() for ax in build_figure(panels.plot_line_panels, rows, "x", "y").axes]
    assert limits[0] == limits[1] != limits[2]


def test_ticks_are_data_values_with_zero_left_of_logarithmic_axis():
    labels = list_texts(
        panels.plot_line_panels(make_lines(x=(0, 0.01, 1, 100)).assign(mean=55.5), "μ", "y", (), True, True)
    )
    assert [text for text in labels if text in {"0", "0.01", "1", "100"}] == ["0", "0.01", "1", "100"]
    labels = list_texts(panels.plot_line_panels(make_lines(x=(3, 5, 9)).assign(mean=55.5), "epochs", "y", (), True))
    assert [text for text in labels if text in {"3", "4", "5", "7", "9"}] == ["3", "5", "9"]
    labels = list_texts(panels.plot_line_panels(make_lines(x=range(1, 26)).assign(mean=55.5), "round", "y"))
    assert [text for text in labels if text.isdigit() and int(text) < 26] == ["5", "10", "15", "20", "25"]


@pytest.mark.parametrize("value", [2.3, np.nan, np.inf])
def test_flat_surface_is_drawn(value):
    flat = make_frame("panel x y value", [("a", x, y, value) for x, y in GRID])
    assert "loss" in list_texts(panels.plot_surface_panels(flat, "loss"))


def test_sweep_of_single_value_is_drawn():
    assert "0" in list_texts(panels.plot_line_panels(make_lines(x=(0,)).assign(mean=55.5), "λ", "y", (), True, True))


def test_accuracy_axis_has_minimum_span():
    flat = make_lines().assign(mean=69.16, std=0.01)
    for rows, span in ((flat, 2.0), (pd.concat([flat, make_lines(panels=("two",)).assign(mean=75.0)]), 5.0)):
        for ax in build_figure(panels.plot_line_panels, rows, "μ", "accuracy (%)").axes:
            low, high = ax.get_ylim()
            assert high - low >= span
            assert low < rows["mean"].min() <= rows["mean"].max() < high
    low, high = build_figure(panels.plot_line_panels, flat, "μ", "R").axes[0].get_ylim()
    assert high - low < 0.1


def test_measures_have_their_own_axes_and_scales():
    both = pd.concat([make_lines().assign(measure="accuracy (%)"), make_lines().assign(measure="R")])
    assert {"accuracy (%)", "R"} <= set(list_texts(panels.plot_line_panels(both, "λ", "")))
    cells = make_frame("panel row column value measure", [("a", 0, 0, 900.0, "samples"), ("b", 0, 0, 0.5, "norm")])
    assert {"samples", "norm"} <= set(list_texts(panels.plot_heatmap_panels(cells, "", "", "")))


def test_figure_shows_which_lines_have_equal_values():
    labels = list_texts(panels.plot_line_panels(make_lines(names=("FedAvg", "FedBN")), "round", "y"))
    assert "All lines have equal values." in labels
    other = make_lines(names=("FedDW",)).assign(mean=1.0)
    labels = list_texts(
        panels.plot_line_panels(pd.concat([make_lines(names=("FedAvg", "FedProx", "FedBN")), other]), "round", "y")
    )
    assert "FedAvg, FedProx and FedBN have equal values." in labels
    labels = list_texts(panels.plot_line_panels(pd.concat([make_lines(names=("FedAvg",)), other]), "round", "y"))
    assert not [text for text in labels if "equal" in text]


def test_figure_marks_missing_bars_and_counterexamples():
    rows = [("one", "a", 3.0), ("one", "b", np.nan), ("two", "a", 3.0)]  # b has no run in panel two
    texts = list_texts(panels.plot_bar_panels(make_frame("panel category mean", rows), "rounds"))
    assert texts.count("not reached") == 1
    assert FORMS["points"]().lower().count(panels.WARNING_COLOR.lower()) >= 2
