"""Snakemake's report of a study, as a browser shows it, and the names in tables, figures and reports."""

import base64
import csv
import re
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from tests import small_studies as studies
from tests.browser import Browser, list_problems
from tests.pipeline.conftest import Project, count_jobs

pytestmark = pytest.mark.slow

PRESS = """([...document.querySelectorAll("a, button")].find(one => one.textContent.trim() === %r).click(), true)"""
ROW = """[...document.querySelectorAll("tr")].find(row => row.textContent.includes(%r))"""


def press(browser: Any, text: str) -> None:
    assert browser.evaluate(PRESS % text)


def decode_data_uri(uri: str) -> bytes:
    """Decode the content of a data URI."""
    head, _, data = uri.partition(",")
    return base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)


def test_snakemake_report_shows_tables_and_figures_by_name(project: Project, browser: Browser) -> None:
    """Use the command of docs/architecture.md. The report shows partitions with their settings."""
    assert "`snakemake --report report.html`" in (project.folder / "docs/architecture.md").read_text()
    project.write(studies.settings(("fedavg", "feddw"), 2, study={"seeds": [0, 1]}))
    project.snakemake()
    project.run("snakemake", "--report", "report.html")
    assert project.run("git", "status", "--porcelain", "report.html") == "", "git ignores the report"
    problems, asked = list_problems(browser, project.folder / "report.html", 1280)
    assert [event for event in problems if event.get("method") == "Runtime.exceptionThrown"] == []
    assert asked == [], "the report needs no network"
    press(browser, "Results")
    shown = browser.evaluate("document.body.innerText")
    for name in ("table of accuracies", "learning curves", "SL and CR matrices"):
        assert name in shown
    assert browser.evaluate("(" + ROW % "table of accuracies" + '.querySelector("a").click(), true)')
    uri = browser.evaluate('document.querySelector("iframe").src')
    assert uri.startswith("data:text/html")
    assert decode_data_uri(uri) == (project.folder / "results/tables/results.html").read_bytes()
    browser.open(project.folder / "report.html", 1280)
    press(browser, "Partitions")
    row = browser.evaluate(ROW % "dirichlet" + ".innerText")
    assert {"digits", "dirichlet", "0.3", "10"} <= set(row.split())
    assert list_problems(browser, project.folder / "results/tables/results.html", 1280) == ([], [])
    cells = browser.evaluate(
        '[...document.querySelectorAll("tr")].map(row => [...row.children].map(one => one.innerText))'
    )
    assert cells[0][:2] == ["algorithm", "Global test accuracy (global model)"]
    assert [row[0] for row in cells[1:3]] == ["FedAvg", "FedDW"]
    table = (project.folder / "results/tables/results.md").read_text()
    assert all(cell in table for row in cells for cell in row)
    browser.open(project.folder / "results/figures/curves.svg", 1280)
    assert "FedDW" in browser.evaluate("document.documentElement.textContent"), (
        "the figure contains text instead of outlines"
    )


SCHEME = '''
from dataclasses import dataclass

from fedpipe.data.partitions.iid import IID


@dataclass(frozen=True, kw_only=True)
class Noted(IID):
    """IID with a remark."""

    note: str = ""
'''
HOSTILE = "</script><img src=x onerror='alert(1)'>"


def test_reports_and_tables_escape_markup_and_formulas_in_names(project: Project) -> None:
    """Titles, grid values and custom parameters are in snakemake's report, DVC's page, tables and figures."""
    (project.folder / "own.py").write_text(SCHEME)
    grid = {"data": {HOSTILE: {"dataset.subset": 300}, "=1+2": {"dataset.subset": 400}}}
    study = studies.settings(("fedavg", "feddw"), 1, study={"grid": grid})
    study["algorithms"] = {"fedavg": {"title": HOSTILE}, "feddw": {"title": "=1+2"}}
    project.write(study | {"partition": {"scheme": "own.Noted", "note": HOSTILE}})
    project.snakemake()
    project.run("snakemake", "--report", "report.html")
    project.run("dvc", "plots", "show", "-o", "plots")
    results = project.folder / "results"
    pages = [project.folder / "report.html", project.folder / "plots/index.html", *results.glob("figures/*.svg")]
    pages += [results / "tables/results.html", results / "tables/results.md"]
    assert len(pages) == 8, "two partitions have a figure each"
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<img src=x|</script><img", text), page
    table = csv.DictReader((results / "tables/results.csv").read_text(encoding="utf-8").splitlines())
    assert {row["data"] for row in table} == {HOSTILE, "'=1+2"}
    assert "\n'=1+2," in project.fedpipe("show", "--format", "csv")
    trace = project.fedpipe("trace", "results/tables/results.md", "feddw.data==1+2.global-on-global")
    assert trace.startswith("cell: feddw.data==1+2.global-on-global\n")
    assert "All verified: " in project.fedpipe("verify")


CW = {"algorithm": "fedprox", "mu": 10.0}


def test_new_method_title_rebuilds_table_and_figures_but_no_run(project: Project) -> None:
    project.write(studies.settings(("fedavg", "cwfedavg_10"), 1, algorithms={"cwfedavg_10": CW}))
    assert count_jobs(project.snakemake())["segment"] == 2
    metrics, bits = project.metrics(), project.hash_results()
    project.edit(algorithms={"cwfedavg_10": CW | {"title": "cwFedAvg (λ = 10)"}})
    again = count_jobs(project.snakemake())
    assert again == {"table": 1, "curves": 1, "matrices": 1, "all": 1}
    shown = project.fedpipe("show")
    assert "| cwFedAvg (λ = 10) |" in shown
    assert "cwfedavg_10" not in shown
    assert r"cwFedAvg ($\lambda$ = 10) &" in project.fedpipe("show", "--format", "latex")
    assert (project.metrics(), project.hash_results()) == (metrics, bits)
    project.fedpipe("trace", "results/tables/results.md", "cwfedavg_10.global-on-global")
