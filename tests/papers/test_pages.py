"""Pages: complete, self-contained, harmless, and the same bytes each time; then seen by a real browser."""

import fcntl
import html
import html.parser
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pandas as pd
import pytest

from fedpipe.papers import cells, figures, layouts, pages, views
from fedpipe.papers.cells import MeasuredCell
from fedpipe.papers.pages import BuildInfo
from fedpipe.papers.svg import SVG_NAMESPACE, XLINK_NAMESPACE, SvgFigure, inline_svg
from fedpipe.papers.verdicts import Number

PAGES = ("index", "feddw", "feddual", "pfps_lwc", "cwfedavg")
ABOUT = BuildInfo("0123abc", 12.5, ("two cores", "torch 2.11.0"), "2026-11-22")
HOSTILE = """"><script>alert(1)</script><img src=x onerror='alert(2)'>'&amp;"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Parsed(html.parser.HTMLParser):
    """Elements of a page by name, with their attributes and, of headings, their text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.headings, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag == "h2"

    def handle_data(self, data):
        if self.inside:
            self.headings.append(data)
            self.inside = False

    def list_attributes(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def drawn():
    rows = [("a panel", line, x, 10.0 * x, 1.0) for line in ("fedavg", "feddw") for x in (1, 2, 3)]
    frame = pd.DataFrame(rows, columns=["panel", "line", "x", "mean", "std"])
    return SvgFigure(figures.render_curves(frame), frame.to_csv(index=False))


@pytest.fixture(scope="session")
def folder(measured_table, tmp_path_factory):
    """Pages of all cells but some, with two figures and a reason."""
    here = tmp_path_factory.mktemp("pages")
    missing = MeasuredCell(None, reason="too costly", hours=150.0)
    told = {
        place: missing if (place.paper, "Tiny" in place.column) == ("cwFedAvg", True) else cell
        for place, cell in measured_table.items()
    }
    some = {
        ("FedDW", "Figure 6"): drawn(),
        ("FedDW", "Figure 7"): drawn(),
        ("FedDUAL", "Figure 6"): "VGG16 is not here.",
    }
    pages.write_pages(here, "paper", told, some, ABOUT)
    return here


@pytest.fixture(scope="session")
def parsed(folder):
    return {name: Parsed((folder / f"{name}.html").read_text()) for name in PAGES}


def test_every_table_and_figure_has_its_heading(parsed):
    for paper in layouts.load_papers().values():
        headings = parsed[paper.stem].headings
        wanted = [*paper.tables, *paper.figures]
        assert [heading for heading in headings if heading in wanted] == wanted


def test_also_where_nothing_was_measured(measured_table, tmp_path):
    pages.write_pages(tmp_path, "smoke", {}, {}, ABOUT)
    for paper in layouts.load_papers().values():
        text = (tmp_path / f"{paper.stem}.html").read_text()
        assert {*paper.tables, *paper.figures} <= set(Parsed(text).headings)
        assert "not run" in text


def test_ids_are_unique_and_links_lead_somewhere(folder, parsed):
    ids = {name: page.list_attributes("id") for name, page in parsed.items()}
    for name, page in parsed.items():
        assert len(set(ids[name])) == len(ids[name])
        for link in page.list_attributes("href"):
            file, _, target = link.partition("#")
            if link == "data:," or file == "cells.csv" or (file.startswith("figures/") and (folder / file).is_file()):
                continue
            there = name if not file else file.removesuffix(".html")
            assert there in PAGES, link
            assert not target or target in ids[there], link


def test_self_contained_and_without_scripts(folder):
    for name in PAGES:
        text = (folder / f"{name}.html").read_text()
        page = Parsed(text)
        assert not {"script", "link", "img", "iframe", "object"} & {
            tag for tag, attributes in page.elements if attributes.get("href") != "data:,"
        }
        assert not [attribute for _, found in page.elements for attribute in found if attribute.startswith("on")]
        assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {SVG_NAMESPACE, XLINK_NAMESPACE}
        assert "@import" not in text


def test_a_cell_shows_both_numbers_its_verdict_in_words_and_what_it_is_made_of(folder, judged):
    text = (folder / "feddw.html").read_text()
    place = next(place for place in judged["paper"].cells if place[1:4] == ("Table I", "FedDW", "practical/CIFAR-10"))
    cell = judged["paper"].cells[place]
    shown = f"{cell.number.mean:.2f} ± {cell.number.std:.2f}"
    (found,) = re.findall(rf'<td class="(\w+)">[^\n]*<a href="#([\w-]+)">{re.escape(shown)}</a>', text)
    assert found[0] == cell.word.partition(" ")[0]
    sign = f'<span class="sign" aria-hidden="true">{views.SIGNS[cell.word]}</span>'
    assert f'{sign}<span class="spoken">{cell.word}: </span><a href="#{found[1]}">{shown}</a>' in text
    row = text[text.index(f'<tr id="{found[1]}">') :].partition("</tr>\n")[0]
    for told in ("66.24 ± 0.6", cell.word, *cell.measurement.keys, cell.measurement.trace_command, "floor 1.00"):
        assert told in row, told


def test_a_dash_tells_its_reason_with_the_hours_of_all_its_cells(folder):
    text = (folder / "cwfedavg.html").read_text()
    assert "too costly: some 2,700 h for 18 cells" in text  # Tiny ImageNet and Tiny ImageNet* of nine methods
    assert "VGG16 is not here." in (folder / "feddual.html").read_text()
    assert "A diagram: nothing of it is measured." in (folder / "feddw.html").read_text()
    assert "in print: it crashed, or did not converge" in (folder / "feddw.html").read_text()


def test_what_was_run_stands_at_the_top(folder):
    for name in PAGES:
        text = (folder / f"{name}.html").read_text()
        top = text.partition("</nav>")[2].partition("<h2")[0]
        for told in ("<strong>paper</strong>", "12.5", "0123abc", "two cores"):
            assert told in top
        assert "0123abc</code> on 2026-11-22" in text.partition("<footer>")[2]


def test_a_page_tells_what_the_paper_says_and_where_print_code_and_this_differ(folder):
    for paper in layouts.load_papers().values():
        text = html.unescape((folder / f"{paper.stem}.html").read_text())
        for table in paper.tables.values():
            assert table.caption in text
            assert all(f"<h3>{claim.says}</h3>" in text for claim in table.claims)
        for figure in paper.figures.values():
            assert f"<p>{figure.says}</p>" in text
        below = text.partition('<section id="deviations">')[2].partition("</section>")[0]
        assert paper.deviations
        for deviation in paper.deviations:
            for told in (deviation.about, deviation.print, deviation.code, deviation.here):
                assert told in below, told


def test_what_was_not_run_stands_below_with_its_cost(folder):
    text = (folder / "cwfedavg.html").read_text()
    below = text.partition('<section id="cost">')[2].partition("</section>")[0]
    row = next(row for row in below.split("<tr>") if "too costly" in row)
    assert '<a href="#table-1">Table 1</a>' in row
    assert "<td>18</td><td>some 2,700 h for 18 cells</td>" in row


def test_a_cell_with_some_of_its_runs_says_so_and_what_the_others_would_take(measured_table, tmp_path):
    place = next(place for place in measured_table if place[:4] == ("FedDW", "Table I", "FedDW", "practical/CIFAR-10"))
    pages.write_pages(
        tmp_path, "paper", measured_table | {place: replace(measured_table[place], missing_hours=12.0)}, {}, ABOUT
    )
    text = (tmp_path / "feddw.html").read_text()
    assert f"</sup> {views.INCOMPLETE_NOTE}</li>" in text.partition('id="table-i"')[2].partition("</section>")[0]
    below = text.partition('<section id="cost">')[2].partition("</section>")[0]
    assert f"{views.INCOMPLETE_NOTE}</td><td>1</td><td>some 12 h for 1 cell</td>" in below


def test_no_signs_at_smaller_scales(measured_table, tmp_path):
    for scale in ("reduced", "smoke"):
        pages.write_pages(tmp_path, scale, measured_table, {}, ABOUT)
        text = (tmp_path / "feddw.html").read_text()
        body = text[text.index('<section class="table"') :]
        assert not re.findall(r'<td class="(?:agrees|near|differs)"', body)
        assert 'class="sign"' not in body
        assert ("Order of methods" in body) == (scale == "reduced")


def test_generated_data_are_marked(measured_table, tmp_path):
    pages.write_pages(
        tmp_path,
        "smoke",
        {place: replace(cell, is_generated=True) for place, cell in measured_table.items()},
        {},
        ABOUT,
    )
    assert views.GENERATED_NOTE in html.unescape((tmp_path / "feddw.html").read_text())


def test_the_same_bytes_each_time(folder, measured_table, tmp_path):
    found = []
    for name in ("one", "two"):
        pages.write_pages(tmp_path / name, "paper", measured_table, {("FedDW", "Figure 6"): drawn()}, ABOUT)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        found.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert found[0] == found[1]
    figure = {f"figures/feddw-figure-6.{suffix}" for suffix in ("svg", "csv")}
    assert set(found[0]) == {*(f"{name}.html" for name in PAGES), "cells.csv", *figure}
    assert found[0]["figures/feddw-figure-6.csv"].decode() == drawn().csv
    pages.write_pages(tmp_path / "one", "paper", measured_table, {("FedDW", "Figure 6"): "Not run."}, ABOUT)
    assert not list((tmp_path / "one/figures").iterdir()), "what is no longer drawn does not stay"


@pytest.fixture(scope="session")
def hostile(make, tmp_path_factory):
    """Pages whose every text that comes from outside is hostile."""
    here = tmp_path_factory.mktemp("hostile")
    measured = {
        place: replace(cell, trace_command=HOSTILE, keys=(HOSTILE,), settings={HOSTILE: HOSTILE})
        for place, cell in make(keep=lambda place: place.paper == "FedDW").items()
    }
    missing = make(keep=lambda place: place.paper == "FedDUAL")
    measured |= dict.fromkeys(missing, MeasuredCell(None, reason=HOSTILE))
    told = {("FedDW", "Figure 6"): SvgFigure(drawn().svg, HOSTILE), ("FedDW", "Figure 7"): HOSTILE}
    pages.write_pages(here, "paper", measured, told, BuildInfo(HOSTILE, 1.0, (HOSTILE,), HOSTILE))
    return here


def test_hostile_texts_are_text(hostile):
    for name in PAGES:
        page = Parsed((hostile / f"{name}.html").read_text())
        assert not {"script", "img"} & {tag for tag, _ in page.elements}
        assert not [attribute for _, found in page.elements for attribute in found if attribute == "onerror"]


@pytest.mark.parametrize(
    "part",
    [
        "<script>alert(1)</script>",
        '<rect onclick="alert(1)"/>',
        '<image href="http://example.org/x.png"/>',
        '<use xlink:href="http://example.org/x.svg#a"/>',
        '<rect style="fill: url(http://example.org/x)"/>',
        "<foreignObject/>",
        '<a href="#x"/>',
    ],
)
def test_a_figure_that_acts_or_asks_is_refused(part):
    svg = f'<svg xmlns="{SVG_NAMESPACE}" xmlns:xlink="{XLINK_NAMESPACE}">{part}</svg>'
    with pytest.raises(ValueError, match="a figure can't"):
        inline_svg(svg, "x-", "label")


def test_a_column_that_is_another_tables_counts_once(make):
    """FedDW's Baseline1 of Table II is a column of Table I."""
    columns = {("Table I", "practical/CIFAR-10"), ("Table II", "Baseline1")}
    places = make(seeds=(0,), keep=lambda place: (place.table, place.column) in columns)
    comparison = cells.compare_cells(places, "reduced")
    assert {name[1:] for name in comparison.orders} == columns
    told = views.build_index_context(comparison, {})["totals"]["FedDW"]
    assert told["held"].endswith("of 1")


def test_a_cell_may_have_two_notes(find_cell):
    place = find_cell("FedDW", "Table I", "FedAvg", "practical/MNIST")
    both = MeasuredCell(Number.from_values({0: 9.0}), test_samples=10, classes=10, diverged_runs=1, is_generated=True)
    (table, *_) = views.build_paper_context(
        layouts.load_papers()["FedDW"], cells.compare_cells({place: both}, "smoke"), {}, {}
    )["tables"]
    notes = dict(table["notes"])
    (cell,) = (cell for _, row in table["body"] for cell in row if cell.target)
    assert [notes[letter].partition(" ")[0] for letter in cell.measured_note.split(", ")] == ["diverged:", "on"]


def test_figures_of_no_paper_are_refused(measured_table, tmp_path):
    with pytest.raises(ValueError, match="no figure of a paper"):
        pages.write_pages(tmp_path, "smoke", {}, {("FedDW", "Figure 9"): "?"}, ABOUT)
    assert not list(tmp_path.iterdir())


class Browser:
    """A headless Chromium, spoken to by its debugging pipe."""

    def __init__(self, profile):
        there, write = os.pipe()
        read, back = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (there, back)]

        def move_ends():  # the browser reads from 3 and writes to 4
            for number, end in zip((3, 4), ends, strict=True):
                os.dup2(end, number)

        command = [BROWSER, *flags, "about:blank"]
        self.process = subprocess.Popen(command, preexec_fn=move_ends, close_fds=False, stderr=subprocess.DEVNULL)
        for end in (there, back, *ends):
            os.close(end)
        self.reading, self.writing = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self.rest, self.events, self.number, self.session = b"", [], 0, None
        (target,) = [one for one in self("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        self.session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method, **parameters):
        """Call a method and return what it answers; events that come before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.writing.write(json.dumps(message).encode() + b"\0")
        self.writing.flush()
        while True:
            found = self.next()
            if found.get("id") == self.number:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def next(self):
        while b"\0" not in self.rest:
            part = self.reading.read1()
            assert part, "the browser is gone"
            self.rest += part
        first, _, self.rest = self.rest.partition(b"\0")
        return json.loads(first)

    def open(self, path, width):
        """Load a page at a width, and return all events until it is loaded."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        self.events = []
        self("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.next())
        return self.events

    def tell(self, expression):
        return self("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.reading.close()
        self.writing.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not BROWSER:
        pytest.skip("there is no Chromium here")
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


def seen(browser, path, width):
    """What a browser complained of, and what it asked for but the page itself."""
    events = browser.open(path, width)
    wrong = [event for event in events if event.get("method") in {"Log.entryAdded", "Runtime.exceptionThrown"}]
    wrong += [event for event in events if event.get("method") == "Runtime.consoleAPICalled"]
    asked = [
        event["params"]["request"]["url"] for event in events if event.get("method") == "Network.requestWillBeSent"
    ]
    return wrong, [url for url in asked if url != path.as_uri() and not url.startswith("data:")]


@pytest.mark.parametrize("name", PAGES)
def test_a_browser_shows_it_at_both_widths(browser, folder, name):
    for width in (1280, 375):
        assert seen(browser, folder / f"{name}.html", width) == ([], [])
        assert browser.tell("document.documentElement.scrollWidth") <= width
        assert browser.tell("document.compatMode") == "CSS1Compat"
    wide = browser.tell("[...document.querySelectorAll('table')].every(one => one.closest('.scroll'))")
    assert wide
    if name == "index":
        return
    paper = next(paper for paper in layouts.load_papers().values() if paper.stem == name)
    headings = browser.tell(
        "[...document.querySelectorAll('h2')].filter(one => one.offsetHeight).map(one => one.innerText)"
    )
    assert {*paper.tables, *paper.figures} <= set(headings)
    first = browser.tell("document.querySelector('table.results tbody td').getBoundingClientRect().left")
    assert first < 300, "the first column of numbers is on the screen of a phone"


def test_the_browser_tells_what_is_wrong(browser, tmp_path):
    page = tmp_path / "wrong.html"
    page.write_text("<!doctype html><img src='x.png'><div style='width: 500px'>.</div><script>nothing()</script>")
    wrong, asked = seen(browser, page, 375)
    assert {event["method"] for event in wrong} == {"Log.entryAdded", "Runtime.exceptionThrown"}
    assert asked == [(tmp_path / "x.png").as_uri()]
    assert browser.tell("document.documentElement.scrollWidth") > 375


def test_a_browser_draws_a_figure_in_its_own_box(browser, folder):
    seen(browser, folder / "feddw.html", 1280)
    box = "document.querySelector('#figure-6 svg').getBoundingClientRect()"
    assert browser.tell(f"{box}.width") > 500
    assert browser.tell(f"{box}.height") > 200
    texts = browser.tell("[...document.querySelectorAll('#figure-6 svg text')].map(one => one.textContent)")
    assert "a panel" in texts


def test_a_browser_finds_no_script_in_hostile_pages(browser, hostile):
    for name in PAGES:
        assert seen(browser, hostile / f"{name}.html", 375) == ([], [])
        assert browser.tell("document.scripts.length + document.images.length") == 0
        assert browser.tell("document.documentElement.scrollWidth") <= 375
        assert "alert(1)" in browser.tell("document.body.innerText")
