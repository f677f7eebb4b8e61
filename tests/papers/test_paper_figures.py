"""The figures of the papers from the published numbers of docs/papers: what is drawn, its labels and its bytes."""

import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from fedpipe.papers import figures, layouts, pages
from fedpipe.report.figures import panels, style
from tests.small_studies import ROOT

HOSTILE = 'a <b>&"$\\frac{</b>'
GRID = [(x, y) for x in np.linspace(-1, 1, 5) for y in np.linspace(-1, 1, 5)]
FRAMES = {
    (paper.paper, heading): path
    for paper in layouts.load_papers().values()
    for heading in paper.figures
    if (path := ROOT / "docs/papers/reduced" / pages.get_figure_path(paper, heading, "csv")).is_file()
}


def frame(names, rows):
    return pd.DataFrame(rows, columns=names.split())


def lines(panels=("one",), names=("fedavg", HOSTILE), x=(1, 2, 3)):
    rows = [(panel, line, number, 10 * number, 1.0) for panel in panels for line in names for number in x]
    return frame("panel line x mean std", rows)


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def build_figure(render, *arguments, **options):
    """The matplotlib figure instead of its SVG."""
    with style.use_matplotlib_style(panels.PAGE):
        return render.__wrapped__(*arguments, **options)


FORMS = {
    "lines": lambda: panels.draw_line_panels(lines(), HOSTILE, "y"),
    "bars": lambda: panels.draw_bar_panels(frame("category mean", [(HOSTILE, 3.0), ("b", np.nan)]), "x"),
    "heat maps": lambda: panels.draw_heatmap_panels(
        frame("panel row column value", [(HOSTILE, *position, 1.0) for position in np.ndindex(3, 4)]), "x", "y", "z"
    ),
    "points": lambda: panels.draw_point_panels(
        frame("panel x y contrary", [(HOSTILE, 0, 0.9, False), (HOSTILE, 1, 0.1, True)]), "x", "y"
    ),
    "embedding": lambda: panels.draw_embedding_panels(
        frame("x y class kind", [(0, 0, HOSTILE, "feature"), (0.1, 0, HOSTILE, "row"), (1, 1, "b", "feature")])
    ),
    "surface": lambda: panels.draw_surface_panels(
        frame("panel x y value", [(HOSTILE, x, y, x * x + y) for x, y in GRID]), "z"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_plain_text_and_bytes_the_same(form):
    svg = FORMS[form]()
    assert svg == FORMS[form]()
    assert any(HOSTILE in text for text in texts(svg)), texts(svg)
    assert "date" not in svg
    assert "Verdana" in svg
    assert not re.search(r'href="(?!#|data:image/png)', svg)


def list_figures():
    """All figures. Those whose form an earlier one has are slow tests."""
    forms = set()
    for paper, heading in FRAMES:
        form = layouts.load_papers()[paper].figures[heading].form
        yield pytest.param((paper, heading), id=f"{paper}-{heading}", marks=[pytest.mark.slow] * (form in forms))
        forms.add(form)


@pytest.mark.parametrize("name", list(list_figures()))
def test_each_published_figure_fits_half_a_page(name):
    paper = layouts.load_papers()[name[0]]
    svg = figures.render_figure(paper, paper.figures[name[1]], pd.read_csv(FRAMES[name]))
    assert svg == FRAMES[name].with_suffix(".svg").read_text(), "the stored figure is drawn from the stored numbers"
    width, height = (float(re.search(rf'<svg [^>]*{side}="([\d.]+)pt"', svg).group(1)) for side in ("width", "height"))
    assert width == pytest.approx(396)
    assert height <= 324
    text = " ".join(filter(None, texts(svg)))
    assert not re.search(r"\b(alpha|mu|lambda|epsilon|body\.\d|personal-on-local)\b", text)


@pytest.mark.parametrize("stem", ["cwfedavg", "feddual", "feddw", "pfps_lwc"])
def test_the_stored_pages_contain_the_stored_figures(stem):
    folder = ROOT / "docs/papers/reduced"
    page = (folder / f"{stem}.html").read_text()
    figures_of_paper = sorted(folder.glob(f"figures/{stem}-*.svg"))
    assert figures_of_paper
    for path in figures_of_paper:
        assert pages.make_svg_data_uri(path.read_text()) in page, f"{path.name}: run docs/images/draw_papers.py"


def test_the_number_of_seeds_is_in_the_figure():
    paper = layouts.load_papers()["FedDUAL"]
    for seeds, sentence in (([3, 3, 3], "deviation of 3 seeds"), ([1, 2, 3], "deviation of up to 3 seeds")):
        rows = lines(names=("FedDUAL",)).assign(seeds=seeds)
        (note,) = (
            text for text in texts(figures.render_figure(paper, paper.figures["Figure 3"], rows)) if "seed" in text
        )
        assert sentence in note
    svg = figures.render_figure(paper, paper.figures["Figure 3"], lines(names=("FedDUAL",)).drop(columns="std"))
    assert "One seed." in texts(svg)


def test_rounds_to_targets_are_the_first_at_a_fraction_of_fedavgs_last_accuracy():
    values = {"FedAvg": [40, 79, 80, 80], "slow": [10, 20, 30, 64], "best": [90, 0, 0, 0], "never": [1, 2, 3, 4]}
    rows = [("a", line, 10 * x, value) for line, curve in values.items() for x, value in enumerate(curve, 1)]
    rounds = figures.compute_rounds_to_targets(frame("panel line x value", rows))
    result = rounds.pivot(index="line", columns="target", values="value")[[*figures.TARGET_FRACTIONS]]
    assert result.loc["FedAvg"].tolist() == [30, 20, 20]
    assert result.loc["best"].tolist() == [10, 10, 10]
    np.testing.assert_equal(result.loc["slow"].tolist(), [np.nan, np.nan, 40])
    assert result.loc["never"].isna().all()
    assert figures.compute_rounds_to_targets(frame("panel line x value", [("a", "slow", 1, 2)])).empty, "no FedAvg"


def test_every_form_of_a_figure_has_its_frame():
    forms = {figure.form for paper in layouts.load_papers().values() for figure in paper.figures.values()}
    assert forms - {"none"} == set(figures.FRAME_BUILDERS)
    assert {layouts.load_papers()[paper].figures[heading].form for paper, heading in FRAMES} == forms - {"none"}


def test_two_panels_of_one_figure_have_their_own_labels():
    """PFPS-LWC's Figure 8 varies the batch size in one and the local epochs in the other."""
    paper = layouts.load_papers()["PFPS-LWC"]
    svg = figures.render_figure(paper, paper.figures["Figure 8"], pd.read_csv(FRAMES["PFPS-LWC", "Figure 8"]))
    assert [text for text in texts(svg) if text in {"batch size", "local epochs"}] == ["batch size", "local epochs"]


def test_at_most_seven_lines_are_colored_with_the_papers_method_and_fedavg():
    """FedDW's Figure 7 has twelve methods."""
    paper = layouts.load_papers()["FedDW"]
    stored = pd.read_csv(FRAMES["FedDW", "Figure 7"])
    figure = build_figure(panels.draw_line_panels, stored, "round", "y", ("FedAvg", "FedDW"))
    colors = {line.get_label(): line.get_color() for line in figure.axes[0].get_lines()}
    colored = {name for name, color in colors.items() if color != panels.GRAY}
    assert len(colors) == 12
    assert len(colored) == len({colors[name] for name in colored}) == panels.MAX_COLORS
    assert {"FedAvg", "FedDW"} < colored
    labels = texts(figures.render_figure(paper, paper.figures["Figure 7"], stored))
    assert {"5 others", "Gray: FedRep, FedProto, FedALA, FedPer, Local."} <= {*labels}


def test_a_method_has_the_same_color_in_figures_that_list_the_methods_in_another_order():
    colors = []
    for names in (("FedPer", "FedAvg", "pFedMe", "FedBN"), ("FedBN", "pFedMe", "FedPer", "FedAvg")):
        figure = build_figure(panels.draw_line_panels, lines(names=names), "round", "y", ("FedAvg",))
        colors.append({line.get_label(): line.get_color() for line in figure.axes[0].get_lines()})
    assert colors[0] == colors[1]


def test_panels_share_the_vertical_axis_within_a_data_set_only():
    names = ("CIFAR-10, P = 0.3", "CIFAR-10, P = 0.7", "CIFAR-100, P = 0.3")
    rows = pd.concat([lines((name,)).assign(mean=20.0 * index) for index, name in enumerate(names)])
    limits = [ax.get_ylim() for ax in build_figure(panels.draw_line_panels, rows, "x", "y").axes]
    assert limits[0] == limits[1] != limits[2]


def test_ticks_are_values_of_the_data_with_zero_left_of_a_logarithmic_axis():
    labels = texts(panels.draw_line_panels(lines(x=(0, 0.01, 1, 100)).assign(mean=55.5), "μ", "y", (), True, True))
    assert [text for text in labels if text in {"0", "0.01", "1", "100"}] == ["0", "0.01", "1", "100"]
    labels = texts(panels.draw_line_panels(lines(x=(3, 5, 9)).assign(mean=55.5), "epochs", "y", (), True))
    assert [text for text in labels if text in {"3", "4", "5", "7", "9"}] == ["3", "5", "9"]
    labels = texts(panels.draw_line_panels(lines(x=range(1, 26)).assign(mean=55.5), "round", "y"))
    assert [text for text in labels if text.isdigit() and int(text) < 26] == ["5", "10", "15", "20", "25"]


@pytest.mark.parametrize("value", [2.3, np.nan, np.inf])
def test_what_has_no_slope_is_drawn(value):
    """A flat surface, and a sweep of which only 0 has run."""
    flat = frame("panel x y value", [("a", x, y, value) for x, y in GRID])
    assert "loss" in texts(panels.draw_surface_panels(flat, "loss"))
    assert "0" in texts(panels.draw_line_panels(lines(x=(0,)).assign(mean=55.5), "λ", "y", (), True, True))


def test_a_few_samples_more_or_less_do_not_look_like_a_result():
    flat = lines().assign(mean=69.16, std=0.01)
    for rows, span in ((flat, 2.0), (pd.concat([flat, lines(panels=("two",)).assign(mean=75.0)]), 5.0)):
        for ax in build_figure(panels.draw_line_panels, rows, "μ", "accuracy (%)").axes:
            low, high = ax.get_ylim()
            assert high - low >= span
            assert low < rows["mean"].min() <= rows["mean"].max() < high
    low, high = build_figure(panels.draw_line_panels, flat, "μ", "R").axes[0].get_ylim()
    assert high - low < 0.1


def test_measures_have_their_own_axes_and_presets():
    both = pd.concat([lines().assign(measure="accuracy (%)"), lines().assign(measure="R")])
    assert {"accuracy (%)", "R"} <= set(texts(panels.draw_line_panels(both, "λ", "")))
    cells = frame("panel row column value measure", [("a", 0, 0, 900.0, "samples"), ("b", 0, 0, 0.5, "norm")])
    assert {"samples", "norm"} <= set(texts(panels.draw_heatmap_panels(cells, "", "", "")))


def test_lines_that_hide_each_other_are_named():
    labels = texts(panels.draw_line_panels(lines(names=("FedAvg", "FedBN")), "round", "y"))
    assert "All lines have equal values." in labels
    other = lines(names=("FedDW",)).assign(mean=1.0)
    labels = texts(
        panels.draw_line_panels(pd.concat([lines(names=("FedAvg", "FedProx", "FedBN")), other]), "round", "y")
    )
    assert "FedAvg, FedProx and FedBN have equal values." in labels
    labels = texts(panels.draw_line_panels(pd.concat([lines(names=("FedAvg",)), other]), "round", "y"))
    assert not [text for text in labels if "equal" in text]


def test_a_missing_bar_and_a_counterexample_are_marked():
    assert texts(FORMS["bars"]()).count("not reached") == 1
    assert FORMS["points"]().lower().count(panels.WARNING_COLOR.lower()) >= 2
