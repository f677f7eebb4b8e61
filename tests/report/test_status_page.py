"""The page of `fedpipe status --html`: its content, its safety, and its display in a browser."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files
from fedpipe.core.storage.layout import StudyFiles
from fedpipe.planning import planner
from fedpipe.report import contents, status, status_page
from fedpipe.report.data import StudyData
from fedpipe.report.figures.partition import write_partition_figure
from tests import small_studies as studies
from tests.browser import list_problems

HOSTILE = """"><script>alert(1)</script><img src=x onerror='alert(2)'>'&amp;"""
PAGE = Path("status.html")
ROUNDS = 3


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of a complete run, a failed run with a hostile name and log, and a waiting run."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        labels = ("fedavg", "fedprox", "scaffold")
        plan = studies.prepare(studies.settings(labels, ROUNDS, algorithms={"fedprox": {"title": HOSTILE}}))
        done, failed, _ = studies.open_runs(plan)
        studies.finish_run(done, ROUNDS)
        list(failed.run_segment(2))
        log = Path("results/logs/segment/fedprox.log")
        files.write_bytes(log, "".join(f"line {number} {HOSTILE}\n" for number in range(30)).encode())
        record = {"event": "job_error", "error": "", "interrupted": False, "time": 1.7e9, "job": 3, "rule": "segment"}
        record |= {"output": [f"{failed.files.path}/segments/0003.json"], "log": [str(log)]}
        files.write_bytes(Path(".snakemake/fedpipe/jobs/1-8.jsonl"), json.dumps(record).encode())
        write_partition_figure(plan, plan.runs[0].partition)
    return folder


@pytest.fixture(autouse=True)
def in_copy(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(study, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def write_page(params: str = "params.yaml", **options: Any) -> str:
    """Write the page in this process. Return its text."""
    status_page.update_status_page(Path(params), "full", PAGE, **options)
    return PAGE.read_text()


def run_status(*options: str) -> str:
    command = [sys.executable, "-m", "fedpipe", "status", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_status_command_writes_page_with_valid_links(tmp_path: Path) -> None:
    page = tmp_path / "pages/a page.html"
    assert run_status("--html", "pages/a page.html") == "The page is in pages/a page.html. Open it in a browser.\n"
    links = [unquote(link) for link in re.findall('href="([^#"]+)"', page.read_text()) if link != "data:,"]
    assert {"../params.yaml", "../results/logs/segment/fedprox.log"} < set(links)
    assert any("figures/partition-" in link for link in links)
    assert all((page.parent / link).is_file() for link in links), "links are relative to the page"


def test_status_page_shows_studies_next_to_damaged_files() -> None:
    for name in ("other", "same"):
        files.write_bytes(Path(f"studies/{name}.yaml"), Path("params.yaml").read_bytes())
        planner.write_plan(planner.make_plan(Path(f"studies/{name}.yaml")))
    plan = StudyFiles.from_params(Path("studies/other.yaml")).plan
    plan.write_text("{")
    times = planner.make_plan().runs[0].merged_files.times
    times.write_text("{")
    with pytest.raises(ArtifactError, match=rf"^{plan} can't be read"):
        write_page("studies")
    text = html.unescape(PAGE.read_text())
    assert f"{plan} can't be read" in text
    assert f"{times} can't be read" in text
    assert '<span class="state damaged">1 damaged</span>' in text
    assert "line 29" in text, "the log of the failed run"
    with pytest.raises(ArtifactError, match=rf"^{times} can't be read"):
        write_page()


def test_status_page_is_one_file_without_scripts_or_requests() -> None:
    text = write_page()
    assert "http-equiv" not in text
    assert not re.search(r"""<(?:script|link rel="stylesheet"|img|iframe)|https?:|url\(|@import""", text)
    assert "<script" not in text.lower()
    assert "line 29 &#34;&gt;&lt;script&gt;alert(1)" in text
    assert "line 10 " in text
    assert "line 9 " not in text, "the page shows only the end of a log"


def test_browser_shows_rows_and_curves_of_status_page(browser: Any, tmp_path: Path) -> None:
    write_page()
    plan = planner.make_plan()
    runs, _ = status.load_progress_and_failures(plan)
    for width in (1280, 375):
        assert list_problems(browser, tmp_path / PAGE, width) == ([], [])
        assert browser.evaluate("document.scripts.length + document.images.length") == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.open(tmp_path / PAGE, 1280)
    rows = browser.evaluate(
        '[...document.querySelectorAll("table.runs tbody tr")].map(row => [...row.cells].map(cell => cell.innerText))'
    )
    assert [row[:2] for row in rows] == [[HOSTILE, "failed"], ["SCAFFOLD", "waiting"], ["FedAvg", "done"]]
    assert {row[0]: row[3] for row in rows} == {HOSTILE: "2/3", "SCAFFOLD": "0/3", "FedAvg": "3/3"}
    accuracies = {run.name.removesuffix(" seed 0"): run.accuracy for run in runs}
    assert rows[2][4] == f"{100 * (accuracies['FedAvg'] or 0):.2f} %"
    lines = browser.evaluate(
        '[...document.querySelectorAll("svg.chart")].map(chart => [...chart.querySelectorAll("polyline")].map('
        'line => [line.querySelector("title").textContent, line.points.length, line.getBoundingClientRect().width]))'
    )
    assert len(lines) == len(plan.protocols)
    assert {name: points for name, points, _ in lines[0]} == {"FedAvg seed 0": ROUNDS, f"{HOSTILE} seed 0": 2}
    assert all(width > 100 for _, _, width in lines[0])
    assert "line 29 " + HOSTILE in browser.evaluate('document.querySelector(".failure pre").innerText')


def test_status_page_colors_follow_light_and_dark_mode(browser: Any, tmp_path: Path) -> None:
    write_page()
    lightness = {}
    for mode in ("light", "dark"):
        browser("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": mode}])
        browser.open(tmp_path / PAGE, 1280)
        colors = [
            browser.evaluate(f"getComputedStyle(document.querySelector({element!r})).{name}")
            for element, name in (("body", "backgroundColor"), ("body", "color"), ("svg.chart polyline", "stroke"))
        ]
        lightness[mode] = [sum(map(int, re.findall(r"\d+", color)[:3])) / 3 for color in colors]
    browser("Emulation.setEmulatedMedia", features=[])
    background, text, line = lightness["light"]
    assert background > 200 > line > text
    background, text, line = lightness["dark"]
    assert background < 60 < line < text


def test_status_page_links_only_tables_of_current_plan() -> None:
    plan = studies.prepare(studies.settings(rounds=ROUNDS))
    contents.write_report_files(contents.build_report_files(StudyData(plan)))
    text = write_page()
    assert 'href="results/tables/results.html"' in text
    assert "1 of 1" in re.sub("<.*?>", "", text)
    studies.prepare(studies.settings(rounds=ROUNDS - 1))
    assert "results/tables/results.html" not in write_page()


def test_status_page_of_folder_has_section_per_study() -> None:
    Path("studies").mkdir()
    for name in ("one", "two", "unplanned"):
        shutil.copy("params.yaml", f"studies/{name}.yaml")
    with pytest.raises(ArtifactError, match="--params: no study in studies has a plan"):
        write_page("studies")
    for name in ("one", "two"):
        planner.write_plan(planner.make_plan(Path(f"studies/{name}.yaml")))
    text = write_page("studies")
    assert re.findall("<h2>(.*)</h2>", text) == ["studies/one.yaml", "studies/two.yaml"]
    links = [("study-1", "studies/one.yaml"), ("study-2", "studies/two.yaml")]
    assert re.findall('<a href="#(.*?)">(.*?)</a>', text) == links
    assert "<summary>Without a plan: 1</summary>studies/unplanned.yaml</details>" in text


def test_watched_status_page_reloads_until_all_runs_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test computes the only run during the first pause between updates."""
    reloads = []

    def compute_run(seconds: float) -> None:
        reloads.append(re.findall('http-equiv="refresh" content="([0-9]+)"', PAGE.read_text()))
        (run,) = studies.open_runs(plan)
        studies.finish_run(run, 1)

    plan = studies.prepare(studies.settings(("feddw",), 1))
    monkeypatch.setattr(status_page.time, "sleep", compute_run)
    assert "http-equiv" not in write_page(watch=True)
    assert reloads == [[str(status_page.REFRESH_SECONDS)]]


@pytest.mark.parametrize("name", ["params.yaml", "status", "status.HTML"])
def test_status_page_rejects_path_that_is_not_html(name: str) -> None:
    before = Path("params.yaml").read_bytes()
    with pytest.raises(SettingsError, match=rf"--html: {re.escape(name)} "):
        status_page.update_status_page(Path("params.yaml"), "full", Path(name))
    assert Path("params.yaml").read_bytes() == before


def test_status_page_colors_only_best_configurations() -> None:
    """The grid has more configurations than colors. The other configurations are gray, and all have a row."""
    rates = [round(0.02 * step, 2) for step in range(1, status_page.COLOR_COUNT + 3)]
    plan = studies.prepare(studies.settings(rounds=1, study={"grid": {"federation.learning_rate": rates}}))
    for run in studies.open_runs(plan):
        list(run.run_segment(1))
    (progress,) = status_page.write_status_page(status_page.PlansOfStudies([plan], [], []), PAGE)
    means = {line.name: line.compute_last_accuracies(plan.protocols[0])[0] for line in progress.configurations}
    assert len(means) == len(rates) == len(progress.ranked_configurations)
    assert len(progress.css_color_classes) == status_page.COLOR_COUNT
    gray_means = [means[name] for name in means.keys() - progress.css_color_classes]
    assert min(means[name] for name in progress.css_color_classes) >= max(gray_means)
    assert PAGE.read_text().count('<polyline class="rest"') == len(plan.protocols) * 2 + 2


def test_curve_of_shorter_run_ends_at_its_last_round_on_common_axis() -> None:
    budgets = {
        f"{rounds} rounds": {"federation.rounds": rounds, "federation.batch_size": 10 * rounds} for rounds in (2, 4)
    }
    plan = studies.prepare(studies.settings(study={"grid": {"budget": budgets}}))
    for run, rounds in zip(studies.open_runs(plan), (2, 4), strict=True):
        list(run.run_segment(rounds))
    progress = status_page.StudyProgress(plan)
    chart = progress.accuracy_charts[0]
    positions = {label: x for x, label in chart.round_labels}
    ends = {line.name: float(line.points.split()[-1].partition(",")[0]) for line in chart.lines}
    assert ends == {f"FedAvg budget={rounds} rounds seed 0": positions[rounds] for rounds in ("2", "4")}
    assert {row.curve.split()[-1].partition(",")[0] for row in progress.run_rows} == {"96"}, "sparklines have own axes"


def test_status_page_ranks_methods_by_reported_protocol() -> None:
    """FedAvg's global model and Local's models are next to each other, as in the table."""
    study = studies.settings(("fedavg", "local"), 1, algorithms={"local": {"protocol": "personal-on-local"}})
    plan = studies.prepare(study)
    for run in studies.open_runs(plan):
        list(run.run_segment(1))
    (progress,) = status_page.write_status_page(status_page.PlansOfStudies([plan], [], []), PAGE)
    fedavg, local = progress.configurations
    assert (fedavg.protocol, local.protocol) == ("global-on-global", "personal-on-local")
    accuracies = [item.compute_last_accuracies(item.protocol)[0] for item in (fedavg, local)]
    assert accuracies == [run.accuracy for run in progress.runs]
    assert accuracies[0] != accuracies[1]
    assert progress.ranked_configurations == ([fedavg, local] if accuracies[0] > accuracies[1] else [local, fedavg])
    points = [len(row.curve.split()) for row in progress.run_rows]
    assert points == [2, 2], "each run has a dot: a line of two equal points"


def test_configuration_mean_uses_begun_runs_only_if_none_is_complete() -> None:
    """A seed that has just begun does not lower the accuracy of its configuration."""

    def make_progress(state: status.RunState, rounds: int, accuracy: float) -> status.RunProgress:
        curves = {rounds: {"global-on-global": accuracy}}
        return status.RunProgress("run", state, rounds, 40, accuracy, 1.0, curves)

    waiting = status.RunProgress("run", "waiting", 0, 40, None, None)
    begun = [make_progress("running", 3, 0.25), make_progress("stopped", 30, 0.75), waiting]
    configuration = status_page.Configuration("FedAvg", begun, "global-on-global")
    assert configuration.format_last_accuracy("global-on-global") == "50.00 ± 35.36"
    assert configuration.summarized_round_range == "3–30"
    configuration = status_page.Configuration("FedAvg", [*begun, make_progress("done", 40, 0.9)], "global-on-global")
    assert configuration.format_last_accuracy("global-on-global") == "90.00"
    assert configuration.summarized_round_range == "40"
