"""The forms of figures: what is drawn, with which labels, and the same bytes each time."""

import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from fedpipe.papers import figures, layouts
from fedpipe.papers.svg import SVG_NAMESPACE, inline_svg

HOSTILE = 'a <b>&"$\\frac{</b>'
GRID = [(x, y) for x in np.linspace(-1, 1, 5) for y in np.linspace(-1, 1, 5)]


def frame(names, rows):
    return pd.DataFrame(rows, columns=names.split())


def lines(panels=("one",), names=("fedavg", HOSTILE), x=(1, 2, 3)):
    rows = [(panel, line, at, 10 * at, 1.0) for panel in panels for line in names for at in x]
    return frame("panel line x mean std", rows)


def cells(panels=("one",), size=(3, 4), low=0.0):
    rows = [(panel, *place, value + low) for panel in panels for place, value in np.ndenumerate(np.ones(size))]
    return frame("panel row column value", rows)


STEPS = frame("panel class step value", [(p, c, s, 0.1 * c) for p in ("a", HOSTILE) for c in range(3) for s in (0, 1)])
POINTS = frame("group true estimate", [("a", 0.1, 0.2), (HOSTILE, 0.3, 0.3)])
WEIGHTS = frame(
    "panel layer source target weight critical", [(HOSTILE, 0, 0, 1, 0.5, True), (HOSTILE, 1, 1, 0, -1.0, False)]
)
FORMS = {
    "curves": lambda: figures.render_curves(lines()),
    "sweep": lambda: figures.render_sweep(lines(), HOSTILE),
    "bars": lambda: figures.render_bars(frame("panel line value", [("a", "x", 3.0), ("a", HOSTILE, np.nan)])),
    "heatmaps": lambda: figures.render_heatmaps(cells([HOSTILE])),
    "circles": lambda: figures.render_circles(
        frame("panel class share norm contrary", [(HOSTILE, 0, 0.9, 1.5, False), (HOSTILE, 1, 0.1, 1.0, True)])
    ),
    "scatter": lambda: figures.render_scatter(
        frame("x y class kind", [(0, 0, HOSTILE, "feature"), (0.1, 0, HOSTILE, "row"), (1, 1, "b", "feature")])
    ),
    "surface": lambda: figures.render_surface(frame("panel x y value", [(HOSTILE, x, y, x * x + y) for x, y in GRID])),
    "layers": lambda: figures.render_layers(frame("line layer mean", [("IID", HOSTILE, 1.0), ("IID", "head", 2.0)])),
    "traces": lambda: figures.render_traces(STEPS, POINTS),
}


@pytest.fixture(scope="module")
def drawn():
    """An SVG of each form."""
    return {form: draw() for form, draw in FORMS.items()}


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{{{SVG_NAMESPACE}}}text")]


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_text_as_they_are_and_bytes_the_same(drawn, form):
    svg = drawn[form]
    assert svg == FORMS[form]()
    assert any(HOSTILE in text for text in texts(svg)), texts(svg)
    assert "date" not in svg
    assert "Verdana" in svg


@pytest.mark.parametrize("form", FORMS)
def test_a_page_takes_each_form(drawn, form):
    made = inline_svg(drawn[form], "x-", "what it shows")
    assert set(re.findall(r'(?:href="|url\()#(..)', made)) <= {"x-"}
    assert not re.search(r'href="(?!#|data:image/png)', made)
    assert 'aria-label="what it shows"' in made
    assert "<style" not in made


def test_panels_that_look_the_same_leave_names_unique():
    made = inline_svg(figures.render_heatmaps(cells(["a", "b"])), "x-", "twice the same")
    names = re.findall(r'\bid="([^"]*)"', made)
    assert len(set(names)) == len(names)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', made)) == set(names)


def test_a_panel_each_and_a_legend_of_several_lines_only():
    found = texts(figures.render_curves(lines(panels=("one", "two"), names=("fedavg", "feddw"))))
    assert [found.count(name) for name in ("one", "two", "fedavg", "feddw")] == [1, 1, 1, 1]
    assert "fedavg" not in texts(figures.render_curves(lines(names=("fedavg",))))


def test_a_sweep_has_its_values_as_ticks_with_zero_left_of_a_logarithmic_axis():
    found = texts(figures.render_sweep(lines(x=(0, 0.01, 1, 100)).assign(mean=55.5), "mu", log=True))
    assert [text for text in found if text in {"0", "0.01", "1", "100"}] == ["0", "0.01", "1", "100"]
    found = texts(figures.render_sweep(lines(x=(3, 5, 9)), "epochs"))
    assert [text for text in found if text in {"3", "4", "5", "7", "9"}] == ["3", "5", "9"]


def test_a_sweep_of_which_only_zero_was_run_is_drawn():
    started = pd.concat([lines(("one",), x=(0, 1, 10)), lines(("two",), x=(0,))]).assign(mean=55.5)
    for frame in (started, lines(x=(0,))):
        assert "0" in texts(figures.render_sweep(frame, "lambda", log=True))


@pytest.mark.parametrize("value", [2.3, np.nan, np.inf])
def test_a_surface_without_a_slope_is_drawn(value):
    flat = frame("panel x y value", [("a", x, y, value) for x, y in GRID])
    assert "training loss" in texts(figures.render_surface(flat))


def test_a_few_samples_more_or_less_do_not_look_like_a_result():
    """Also where panels share an axis, and the first one is the flat one."""
    flat = lines().assign(mean=69.16, std=0.01)
    for frame, span in ((flat, 2.0), (pd.concat([flat, lines(panels=("two",)).assign(mean=75.0)]), 5.0)):
        for ax in figures.render_sweep.__wrapped__(frame, "mu").axes:
            low, high = ax.get_ylim()
            assert high - low >= span
            assert low < frame["mean"].min() <= frame["mean"].max() < high
    low, high = figures.render_sweep.__wrapped__(flat, "mu", "R").axes[0].get_ylim()
    assert high - low < 0.1


def test_two_measures_have_an_axis_each():
    both = pd.concat([lines().assign(measure="accuracy (%)"), lines().assign(measure="R")])
    found = texts(figures.render_sweep(both, "lambda"))
    assert [found.count(name) for name in ("accuracy (%)", "R", "one")] == [1, 1, 2]


def test_bars_tell_numbers_and_what_was_not_reached():
    found = texts(figures.render_bars(frame("panel line value", [("a", "x", 12.0), ("a", "y", np.nan)])))
    assert "12" in found
    assert found.count("not reached") == 1
    (ax,) = figures.render_bars.__wrapped__(frame("panel line value", [("a", name, np.nan) for name in "xyz"])).axes
    assert ax.get_ylim() == (2.5, -0.5), "also the last line has its place above the axis"


def test_small_heat_maps_tell_their_numbers_and_large_ones_do_not():
    assert texts(figures.render_heatmaps(cells(low=41.0))).count("42") == 12
    assert texts(figures.render_heatmaps(cells(size=(30, 30), low=41.0))).count("42") == 0


def test_measures_of_heat_maps_have_scales_of_their_own():
    both = pd.concat(
        [cells(["a"]).assign(measure="samples", value=900.0), cells(["b"]).assign(measure="norm", value=0.5)]
    )
    found = texts(figures.render_heatmaps(both))
    assert {"samples", "norm"} <= set(found)


def test_every_form_of_a_figure_can_be_drawn():
    forms = {figure.form for paper in layouts.load_papers().values() for figure in paper.figures.values()}
    assert forms - {"diagram", "paths"} == set(FORMS), "paths of the toy network are a dash, with its reason"


def test_counterexamples_are_red(drawn):
    assert drawn["circles"].lower().count(figures.CONTRADICTION_COLOR.lower()) >= 2
