"""`snakemake papers` with preset smoke: some studies of the papers, their pages in a browser, and the DVC record."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fedpipe.papers import layouts
from tests.browser import BROWSER, Browser, list_problems
from tests.papers.test_pages import PAGES
from tests.pipeline.conftest import LOCAL, Project, count_jobs

pytestmark = pytest.mark.slow

PLACE = "results/papers/smoke"
BROKEN = """
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.errors import ArtifactError


class Broken(FedAvg):
    \"\"\"A method that fails in its first round.\"\"\"

    def send(self, server, ids):
        raise ArtifactError("it is broken")
"""
TABLE = "results/studies/papers/pfps_lwc/{}@smoke/tables/results.md"


def edit_study(project: Project, name: str, **values: dict[str, Any]) -> None:
    """Change axes of a study's grid, or its preset smoke."""
    path = project.folder / f"studies/papers/pfps_lwc/{name}.yaml"
    study = yaml.safe_load(path.read_text())
    for key, value in values.items():
        (study["study"]["grid"] if key != "smoke" else study["presets"])[key] = value
    path.write_text(yaml.safe_dump(study, sort_keys=False))


def run_papers(project: Project, status: int = 0) -> str:
    """Build the papers' pages. Return the output."""
    done = project.capture("snakemake", "papers", "--config", "preset=smoke", *LOCAL)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def read_cells(project: Project) -> pd.DataFrame:
    """Read the measured cells of the paper PFPS-LWC."""
    frame = pd.read_csv(project.folder / PLACE / "cells.csv")
    assert len(frame) == 641
    return frame[frame["measured_mean"].notna() & (frame["paper"] == "PFPS-LWC")]


def test_snakemake_papers_builds_pages_with_and_without_failed_runs(project: Project, tmp_path: Path) -> None:
    for path in (project.folder / "studies/papers").rglob("*.yaml"):
        if str(path).rpartition("/papers/")[2] not in ("pfps_lwc/table5.yaml", "pfps_lwc/figure8.yaml", "dvc.yaml"):
            path.unlink()
    smoke = {
        "federation.rounds": 2,
        "federation.local_epochs": 1,
        "dataset.subset": 600,
        "dataset.on_missing": "generate",
    }
    edit_study(project, "table5", smoke=smoke, **{"federation.participation": [0.3]})
    batches = {"Figure 8a/8": {"federation.batch_size": 8}, "Figure 8a/64": {"federation.batch_size": 64}}
    edit_study(project, "figure8", smoke=smoke | {"federation.participation": 0.3}, setting=batches)
    whole = (project.folder / "studies/papers/pfps_lwc/table5.yaml").read_text()
    (project.folder / "own.py").write_text(BROKEN)
    spoiled = yaml.safe_load(whole)
    spoiled["algorithms"]["plt"] = {"algorithm": "own.Broken"}
    (project.folder / "studies/papers/pfps_lwc/table5.yaml").write_text(yaml.safe_dump(spoiled, sort_keys=False))

    printed = run_papers(project, status=1)  # a method is broken
    assert f" {PLACE}/index.html" in printed
    # Two of the eight runs of table5 fail. Two of the four runs of figure8 are also in table5.
    assert count_jobs(printed)["segment"] == 8 + 2
    there = read_cells(project)
    assert [*there[there["table"] == "Table 5"]["row"]] == [row for row in ("neither", "LWC", "both") for _ in range(2)]
    assert {*there["verdict"]} == {"not judged (generated data)"}
    page = (project.folder / PLACE / "pfps_lwc.html").read_text()
    assert "segment failed: fedpipe: it is broken" in page
    assert (project.folder / TABLE.format("figure8")).is_file()
    assert not (project.folder / TABLE.format("table5")).exists()

    (project.folder / "studies/papers/pfps_lwc/table5.yaml").write_text(whole)
    printed = run_papers(project)
    assert f" {PLACE}/index.html" in printed
    assert count_jobs(printed)["segment"] == 2, "finished runs are reused"
    there = read_cells(project)
    assert {*there[there["table"] == "Table 5"]["column"]} == {"CIFAR-10/0.3", "CIFAR-100/0.3"}
    assert (project.folder / TABLE.format("table5")).is_file()
    page = (project.folder / PLACE / "pfps_lwc.html").read_text()
    assert "it is broken" not in page
    assert "on generated data" in page
    again = (project.folder / PLACE / "pfps_lwc.html").read_bytes()
    assert dict(count_jobs(run_papers(project))) == {"papers": 1}
    project.run("fedpipe", "papers", "--preset", "smoke")
    assert (project.folder / PLACE / "pfps_lwc.html").read_bytes() == again

    study = project.folder / "studies/papers/pfps_lwc/figure8.yaml"
    planned = study.read_text()
    study.write_text(planned.replace("learning_rate: 0.01", "learning_rate: 0.02"))
    output = project.run("fedpipe", "papers", "--preset", "smoke", check=False)
    assert "figure8.yaml has changed since it was planned. Type `make papers PRESET=smoke`" in output
    assert (project.folder / PLACE / "pfps_lwc.html").read_bytes() == again
    study.write_text(planned)

    _check_pages(project.folder / PLACE, tmp_path / "profile")
    _record_and_pull(project, tmp_path)


def _check_pages(folder: Path, profile: Path) -> None:
    """Check that a browser shows every table and figure without errors, and requests only the pages' figures."""
    if not BROWSER:
        return
    browser = Browser(profile)
    try:
        for name in PAGES:
            for width in (1280, 375):
                problems, requests = list_problems(browser, folder / f"{name}.html", width)
                assert not problems
                assert all(url.startswith(f"{(folder / 'figures').as_uri()}/") for url in requests), requests
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
            headings = browser.evaluate("[...document.querySelectorAll('h2')].map(one => one.innerText)")
            for paper in (paper for paper in layouts.load_papers().values() if paper.stem == name):
                assert {*paper.tables, *paper.figures} <= set(headings)
            if name == "pfps_lwc":
                assert browser.evaluate("document.querySelector('#figure-8 img').naturalWidth") > 500
                svg = (folder / "figures/pfps_lwc-figure-8.svg").read_text()
                assert all(f">{label}</text>" in svg for label in ("batch size", "FedPer", "PFPS-LWC"))
    finally:
        browser.close()


def _record_and_pull(project: Project, folder: Path) -> None:
    """Record tables and pages with DVC, and pull them in a clone. `dvc repro` of the project does not include them."""
    path = project.folder / "studies/papers/dvc.yaml"
    text = path.read_text()
    path.write_text(
        text.replace("pages: []", "pages: [smoke]")
        .replace("presets: []", "presets: [smoke]")
        .replace("studies: []", "studies: [pfps_lwc/table5, pfps_lwc/figure8]")
    )
    project.run("dvc", "remote", "add", "-d", "store", str(folder / "store"))
    project.run("dvc", "repro", "studies/papers/dvc.yaml")
    assert "studies/papers" not in project.run("dvc", "repro", "--dry", check=False)
    assert "papers" not in project.run("dvc", "exp", "show", "--csv")
    project.run("dvc", "push", "studies/papers/dvc.yaml")
    project.commit()
    project.run("git", "clone", "-q", ".", str(folder / "clone"))
    clone = Project(folder / "clone")
    clone.run("dvc", "pull", "studies/papers/dvc.yaml")
    for name in (f"{PLACE}/pfps_lwc.html", f"{PLACE}/cells.csv", TABLE.format("table5")):
        assert (clone.folder / name).read_bytes() == (project.folder / name).read_bytes()
