"""Pages of the papers are complete, safe and reproducible, also in a browser."""

import html
import html.parser
import re
from dataclasses import replace

import pandas as pd
import pytest
from typing_extensions import override

from fedpipe.papers import comparison, layouts, pages
from fedpipe.papers.comparison import MeasuredCell
from fedpipe.papers.figures import SvgFigure
from fedpipe.papers.pages import BuildInfo
from fedpipe.report.contrasts import RunMean
from fedpipe.report.figures import panels
from tests.browser import list_problems

PAGES = ("index", "feddw", "feddual", "pfps_lwc", "cwfedavg")
ABOUT = BuildInfo("0123abc", "2026-11-22")
HOSTILE = """"><script>alert(1)</script><img src=x onerror='alert(2)'>'&amp;"""


class ParsedPage(html.parser.HTMLParser):
    """Elements of a page with their attributes, and the texts of headings."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.headings, self.inside = [], [], False
        self.feed(text)

    @override
    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag == "h2"

    @override
    def handle_data(self, data):
        if self.inside:
            self.headings.append(data)
            self.inside = False

    def get_values(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def list_figures(folder, name):
    """List the paths of the SVG files of a page, as the page links them."""
    return {str(path.relative_to(folder)) for path in folder.glob(f"figures/{name}-*.svg")}


def plot_figure():
    rows = [("a panel", line, x, 10.0 * x, 1.0) for line in ("fedavg", "feddw") for x in (1, 2, 3)]
    frame = pd.DataFrame(rows, columns=["panel", "line", "x", "mean", "std"])
    return SvgFigure(panels.plot_line_panels(frame, "round", "y"), frame.to_csv(index=False))


@pytest.fixture(scope="session")
def folder(measured_table, tmp_path_factory):
    """Pages of most cells, with two figures and a reason."""
    folder = tmp_path_factory.mktemp("pages")
    missing = MeasuredCell(None, reason="too costly")
    cells = {
        cell_id: missing if (cell_id.paper, "Tiny" in cell_id.column) == ("cwFedAvg", True) else cell
        for cell_id, cell in measured_table.items()
    }
    drawings = {
        ("FedDW", "Figure 6"): plot_figure(),
        ("FedDW", "Figure 7"): plot_figure(),
        ("FedDUAL", "Figure 6"): "VGG16 is not here.",
    }
    pages.write_pages(folder, "full", cells, drawings, ABOUT)
    return folder


@pytest.fixture(scope="session")
def parsed_pages(folder):
    return {name: ParsedPage((folder / f"{name}.html").read_text()) for name in PAGES}


def test_pages_have_heading_for_each_table_and_figure(parsed_pages):
    for paper in layouts.load_papers().values():
        headings = parsed_pages[paper.stem].headings
        expected_headings = [*paper.tables, *paper.figures]
        assert [heading for heading in headings if heading in expected_headings] == expected_headings


def test_pages_without_measured_cells_have_all_headings(measured_table, tmp_path):
    pages.write_pages(tmp_path, "smoke", {}, {}, ABOUT)
    for paper in layouts.load_papers().values():
        text = (tmp_path / f"{paper.stem}.html").read_text()
        assert {*paper.tables, *paper.figures} <= set(ParsedPage(text).headings)
        assert "not run" in text


def test_page_ids_are_unique_and_links_have_targets(folder, parsed_pages):
    ids = {name: page.get_values("id") for name, page in parsed_pages.items()}
    for name, page in parsed_pages.items():
        assert len(set(ids[name])) == len(ids[name])
        for link in page.get_values("href"):
            file, _, target = link.partition("#")
            if link == "data:," or file == "cells.csv" or (file.startswith("figures/") and (folder / file).is_file()):
                continue
            target_page = name if not file else file.removesuffix(".html")
            assert target_page in PAGES, link
            assert not target or target in ids[target_page], link


def test_pages_request_only_their_figures_and_run_no_scripts(folder):
    for name in PAGES:
        text = (folder / f"{name}.html").read_text()
        page = ParsedPage(text)
        assert not {"script", "link", "svg", "iframe", "object"} & {
            tag for tag, attributes in page.elements if attributes.get("href") != "data:,"
        }
        assert not [attribute for _, outputs in page.elements for attribute in outputs if attribute.startswith("on")]
        assert not re.findall(r"https?://[^\s\"'<)]+", text)
        assert {*page.get_values("src")} == list_figures(folder, name)
        assert "@import" not in text


def test_cell_shows_numbers_verdict_interval_and_runs(folder, compared):
    text = (folder / "feddw.html").read_text()
    cell_id = next(
        cell_id for cell_id in compared["full"].cells if cell_id[1:4] == ("Table I", "FedDW", "practical/CIFAR-10")
    )
    cell = compared["full"].cells[cell_id]
    number_text = f"{cell.measurement.number.mean:.2f} ± {cell.measurement.number.std:.2f}"
    (anchor,) = re.findall(rf'<a href="#([\w-]+)">{re.escape(number_text)}</a>', text)
    before = text[: text.index(f'<a href="#{anchor}">')]
    assert before.rpartition("<td ")[2].startswith(f'class="{cell.verdict_text}">')
    sign = f'<span class="sign" aria-hidden="true">{pages.SIGNS[cell.verdict_text]}</span>'
    assert before.rstrip().endswith(f'{sign}<span class="spoken">{cell.verdict_text}: </span>')
    row = text[text.index(f'<tr id="{anchor}">') :].partition("</tr>\n")[0]
    low, high = (f"{limit:+.2f}".replace("-", "−") for limit in cell.verdict.contrast[1:3])
    command = cell.measurement.trace_command
    for part in ("66.24 ± 0.6", cell.verdict_text, *cell.measurement.keys, command, f"[{low}, {high}]"):
        assert part in row, part


def test_missing_cells_and_figures_show_reason(folder):
    table = (folder / "cwfedavg.html").read_text().partition('id="table-1"')[2].partition("</section>")[0]
    assert "<li>too costly</li>" in table
    assert "VGG16 is not here." in (folder / "feddual.html").read_text()
    assert "A diagram: it contains no measurements." in (folder / "feddw.html").read_text()
    assert "failed in the paper" in (folder / "feddw.html").read_text()


def test_page_begins_with_claim_and_its_reproduction(folder, make, tmp_path):
    text = (folder / "cwfedavg.html").read_text().partition("<h2")[0]
    assert "<strong>cwFedAvg is ahead of FedAvg.</strong> In the paper (Table 1): ahead in 7 of 7 columns, +22" in text
    shifts = {"higher": (2.0, "yes"), "lower": (-15.0, "no"), "level": (0.0, "undecided (the 95% intervals contain 0)")}
    for name, (shift, word) in shifts.items():
        cells = make(keep=lambda cell_id: cell_id.table == "Table 1" and cell_id.row in {"FedAvg", "FedDUAL"})
        for cell_id in [cell_id for cell_id in cells if cell_id.paper == "FedDUAL" and cell_id.row == "FedDUAL"]:
            rival = cells[cell_id._replace(row="FedAvg")]
            values = {seed: value + shift for seed, value in rival.number.values.items()}
            cells[cell_id] = replace(rival, number=RunMean.from_values(values))
        pages.write_pages(tmp_path / name, "reduced", cells, {}, ABOUT)
        assert f"Reproduced: <strong>{word}</strong>" in (tmp_path / name / "feddual.html").read_text()
    pages.write_pages(tmp_path / "smoke", "smoke", cells, {}, ABOUT)
    assert "Reproduced: <strong>not compared</strong>" in (tmp_path / "smoke/feddual.html").read_text()


def test_page_shows_preset_and_commit_at_top(folder):
    for name in PAGES:
        text = (folder / f"{name}.html").read_text()
        top = text.partition("</nav>")[2].partition("<h2")[0]
        for part in ("<strong>full</strong>", "0123abc"):
            assert part in top
        assert "0123abc</code> on 2026-11-22" in text.partition("<footer>")[2]


def test_page_contains_claims_statements_and_deviations(folder):
    for paper in layouts.load_papers().values():
        text = html.unescape((folder / f"{paper.stem}.html").read_text())
        for table in paper.tables.values():
            assert table.caption in text
            assert all(f"<h3>{claim.statement}</h3>" in text for claim in table.claims)
        for figure in paper.figures.values():
            assert f"<p>{figure.statement}</p>" in text
        section = text.partition('<section id="deviations">')[2].partition("</section>")[0]
        assert paper.deviations
        for deviation in paper.deviations:
            for text in (deviation.topic, deviation.paper, deviation.code, deviation.fedpipe):
                assert text in section, text


def test_cell_marks_diverged_and_incomplete_runs(measured_table, tmp_path):
    cell_id = next(
        cell_id for cell_id in measured_table if cell_id[:4] == ("FedDW", "Table I", "FedDW", "practical/CIFAR-10")
    )
    changes = {"is_incomplete": True, "diverged_runs": 1}
    pages.write_pages(
        tmp_path, "full", measured_table | {cell_id: replace(measured_table[cell_id], **changes)}, {}, ABOUT
    )
    table = (tmp_path / "feddw.html").read_text().partition('id="table-i"')[2].partition("</section>")[0]
    notes = re.findall(r"<li>(\w+)", table)
    cell = table[: table.index("66.24 ± 0.6")].rpartition("<td ")[2]
    marks = re.findall(r"<sup>\[(\d+)\]</sup>", cell)
    assert [notes[int(number) - 1] for number in marks] == ["diverged", "incomplete"]


def test_pages_of_smaller_presets_have_no_verdict_signs(measured_table, tmp_path):
    for preset in ("reduced", "smoke"):
        pages.write_pages(tmp_path, preset, measured_table, {}, ABOUT)
        text = (tmp_path / "feddw.html").read_text()
        body = text[text.index('<section class="table"') :]
        assert not re.findall(r'<td class="(?:agrees|differs)"', body)
        assert 'class="sign"' not in body
        assert ("Order of methods" in body) == (preset == "reduced")


def test_page_marks_generated_data(measured_table, tmp_path):
    pages.write_pages(
        tmp_path,
        "smoke",
        {cell_id: replace(cell, is_generated=True) for cell_id, cell in measured_table.items()},
        {},
        ABOUT,
    )
    assert "on generated data with the data set's shape" in html.unescape((tmp_path / "feddw.html").read_text())


def test_written_pages_have_equal_bytes(folder, measured_table, tmp_path):
    outputs = []
    for name in ("one", "two"):
        pages.write_pages(tmp_path / name, "full", measured_table, {("FedDW", "Figure 6"): plot_figure()}, ABOUT)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        outputs.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert outputs[0] == outputs[1]
    figure = {f"figures/feddw-figure-6.{suffix}" for suffix in ("svg", "csv")}
    assert set(outputs[0]) == {*(f"{name}.html" for name in PAGES), "cells.csv", *figure}
    assert outputs[0]["figures/feddw-figure-6.csv"].decode() == plot_figure().csv
    pages.write_pages(tmp_path / "one", "full", measured_table, {("FedDW", "Figure 6"): "Not run."}, ABOUT)
    assert not list((tmp_path / "one/figures").iterdir()), "the files of a removed figure are deleted"


@pytest.fixture(scope="session")
def hostile_pages(make, tmp_path_factory):
    """Pages in which all external texts are hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    measured = {
        cell_id: replace(cell, trace_command=HOSTILE, keys=(HOSTILE,), reason=HOSTILE)
        for cell_id, cell in make(keep=lambda cell_id: cell_id.paper == "FedDW").items()
    }
    missing = make(keep=lambda cell_id: cell_id.paper == "FedDUAL")
    measured |= dict.fromkeys(missing, MeasuredCell(None, reason=HOSTILE))
    svg = f"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(3)</script>{HOSTILE}</svg>"
    drawings = {("FedDW", "Figure 6"): SvgFigure(svg, HOSTILE), ("FedDW", "Figure 7"): HOSTILE}
    pages.write_pages(folder, "full", measured, drawings, BuildInfo(HOSTILE, HOSTILE))
    return folder


def test_pages_escape_hostile_texts(hostile_pages):
    for name in PAGES:
        page = ParsedPage((hostile_pages / f"{name}.html").read_text())
        assert "script" not in {tag for tag, _ in page.elements}
        assert {*page.get_values("src")} == list_figures(hostile_pages, name)
        assert not [attribute for _, outputs in page.elements for attribute in outputs if attribute == "onerror"]


def test_summary_counts_repeated_column_once(make):
    """FedDW's Baseline1 of Table II is a column of Table I."""
    columns = {("Table I", "practical/CIFAR-10"), ("Table II", "Baseline1")}
    cells = make(seeds=(0,), keep=lambda cell_id: (cell_id.table, cell_id.column) in columns)
    compared = comparison.compare_with_published_cells(cells, "reduced")
    assert {name[1:3] for name in compared.orders} == columns
    paper = layouts.load_papers()["FedDW"]
    assert pages.summarize_tables(paper, list(paper.tables), compared).winners.endswith("of 1")


@pytest.mark.parametrize("name", PAGES)
def test_browser_shows_page_at_both_widths(browser, folder, name):
    for width in (1280, 375):
        problems, requests = list_problems(browser, folder / f"{name}.html", width)
        assert not problems
        assert {*requests} == {(folder / path).as_uri() for path in list_figures(folder, name)}
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.compatMode") == "CSS1Compat"
    wide = browser.evaluate("[...document.querySelectorAll('table')].every(one => one.closest('.scroll'))")
    assert wide
    if name == "index":
        return
    paper = next(paper for paper in layouts.load_papers().values() if paper.stem == name)
    headings = browser.evaluate(
        "[...document.querySelectorAll('h2')].filter(one => one.offsetHeight).map(one => one.innerText)"
    )
    assert {*paper.tables, *paper.figures} <= set(headings)
    first = browser.evaluate("document.querySelector('table.results tbody td').getBoundingClientRect().left")
    assert first < 300, "the first column of numbers is on the screen of a phone"


def test_browser_reports_problems_of_invalid_page(browser, tmp_path):
    page = tmp_path / "wrong.html"
    page.write_text("<!doctype html><img src='x.png'><div style='width: 500px'>.</div><script>nothing()</script>")
    problems, requests = list_problems(browser, page, 375)
    assert {event["method"] for event in problems} == {"Log.entryAdded", "Runtime.exceptionThrown"}
    assert requests == [(tmp_path / "x.png").as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") > 375


def test_browser_draws_figure_in_its_box(browser, folder):
    list_problems(browser, folder / "feddw.html", 1280)
    image = "document.querySelector('#figure-6 img')"
    assert browser.evaluate(f"{image}.naturalWidth") > 500
    box = f"{image}.getBoundingClientRect()"
    assert browser.evaluate(f"{box}.width") > 500
    assert browser.evaluate(f"{box}.height") > 200


def test_browser_runs_no_script_of_hostile_pages(browser, hostile_pages):
    for name in PAGES:
        problems, requests = list_problems(browser, hostile_pages / f"{name}.html", 375)
        assert not problems
        assert {*requests} == {(hostile_pages / path).as_uri() for path in list_figures(hostile_pages, name)}
        assert browser.evaluate("document.scripts.length") == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= 375
        assert "alert(1)" in browser.evaluate("document.body.innerText")
