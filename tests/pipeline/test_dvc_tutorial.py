"""docs/dvc.md: run all blocks of commands in order, and compare their numbers with runs without DVC."""

import contextlib
import csv
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests import small_studies as studies
from tests.analysis.conftest import finish
from tests.browser import BROWSER
from tests.docs.page_blocks import blocks
from tests.pipeline.conftest import Project, count_jobs, list_stages
from tests.report.test_plots import count_pixels

pytestmark = pytest.mark.slow

NOTHING = "Nothing to be done"
REPORT = ("tables", "figures", "plots", ".provenance")  #: rebuilt files
RECORDED_FILES = ("results/plan.json", "results/complete.txt")  #: next to the rebuilt files
POINTS = [(0.1, 0.1), (0.1, 1.0), (0.1, 2.0), (1.0, 0.1), (1.0, 2.0)]  #: (alpha, mu) of all experiments


def make_small_study(alpha: float = 0.1, mu: float = 0.1) -> dict[str, Any]:
    """Return a study in which mu changes the accuracies after two rounds."""
    params = studies.settings(("fedavg", "feddw"), 2, federation={"batch_size": 10})
    params["partition"]["alpha"] = alpha
    params["algorithms"]["feddw"] = {"mu": mu}
    return params


class Story(NamedTuple):
    """Project, outputs and results of the tutorial."""

    project: Project
    outputs: dict[str, str]  #: output of each block, by its first command
    kept: dict[str, Any]  #: intermediate results
    truth: dict[tuple[float, float], dict[str, Any]]  #: metrics of the same settings, run without Snakemake and DVC


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder, truth = tmp_path_factory.mktemp("tutorial"), {}
    for alpha, mu in POINTS:
        with contextlib.chdir(tmp_path_factory.mktemp("truth")):
            finish(make_small_study(alpha, mu))
            truth[alpha, mu] = json.loads(Path("results/metrics.json").read_text())
    assert len({str(metrics) for metrics in truth.values()}) == len(POINTS), "all experiments have different metrics"

    project = Project(studies.copy_project(folder / "project"))
    shutil.rmtree(project.folder / "studies")  # `fedpipe prune` would plan all studies of the papers
    project.run("git", "init", "-q", "-b", "main")
    project.write(make_small_study())
    project.commit("params")
    outputs: dict[str, str] = {}
    kept: dict[str, Any] = {}
    for commands in re.findall(r"```sh\n(.*?)```", (project.folder / "docs/dvc.md").read_text(), flags=re.S):
        name = commands.partition("\n")[0]
        if name.startswith("dvc plots"):
            kept["plots"] = json.loads(project.run("dvc", "plots", "diff", "v1", "louder", "--json"))
        outputs[name] = project.run("bash", "-ec", commands)
        if name == "dvc repro":
            kept["bits"], kept["table"] = project.hash_results(), read_table(project)
        if name.startswith("dvc exp run -n"):
            kept["louder"] = project.metrics()
    return Story(project, outputs, kept, truth)


def get_output(story: Story, start: str) -> str:
    (found,) = (printed for name, printed in story.outputs.items() if name.startswith(start))
    return found


def list_objects(store: Path) -> set[str]:
    return {path.parent.name + path.name for path in store.rglob("*") if path.is_file()}


def compute_md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def read_table(project: Project) -> bytes:
    return (project.folder / "results/tables/results.md").read_bytes()


def test_dvc_repro_runs_study_and_experiment_runs_one_algorithm(story: Story) -> None:
    assert count_jobs(get_output(story, "dvc repro"))["segment"] == 2
    changed = get_output(story, "dvc exp run -n louder")
    assert count_jobs(changed)["segment"] == 1
    assert "segment FedDW seed 0" in changed
    assert story.kept["louder"] == story.truth[0.1, 1.0]
    assert "workspace − HEAD" in changed
    assert re.search(r"^\| FedDW ", changed, flags=re.M)
    assert not re.search(r"^\| FedAvg ", changed, flags=re.M), "FedAvg has the same runs"
    assert count_jobs(get_output(story, "for alpha"))["segment"] == 4, "FedAvg runs once for the other alpha"


def test_dvc_exp_show_has_metrics_of_each_experiment(story: Story) -> None:
    shown = story.project.run("dvc", "exp", "show", "--csv", "--all-commits")
    rows = list(csv.DictReader(io.StringIO(shown)))
    experiments = {row["Experiment"]: row for row in rows if row["rev"] != "workspace" and row["Experiment"]}
    named = {name: row for name, row in experiments.items() if name == "louder" or name.startswith("grid")}
    assert len(named) == 5
    points = set()
    for name, row in named.items():
        point = (float(row["partition.alpha"]), float(row["algorithms.feddw.mu"]))
        points.add(point)
        found = {column: float(row[column]) for column in story.truth[point]}
        assert found == story.truth[point], name
    assert points == set(POINTS)


def test_dvc_exp_show_lists_only_changed_columns(story: Story) -> None:
    shown = get_output(story, "dvc exp show")
    for column in ("feddw", "partition.alpha", "algorithms.feddw.mu"):
        assert column in shown
    assert "learning_rate" not in shown
    assert "results/" not in shown
    assert str(story.truth[0.1, 1.0]["feddw"]) in shown


def test_dvc_diff_lists_changed_parameters_and_metrics(story: Story) -> None:
    old, new = (story.truth[0.1, mu] for mu in (0.1, 1.0))
    expected = {name: [old[name], new[name]] for name in new if old[name] != new[name]}
    assert expected
    shown = get_output(story, "fedpipe compare")
    rows = [line.split() for line in shown.splitlines()]
    found = {row[1]: [float(row[2]), float(row[3])] for row in rows if row and row[0] == "results/metrics.json"}
    assert found == expected
    assert ["params.yaml", "algorithms.feddw.mu", "0.1", "1.0"] in [row[:4] for row in rows]
    params = json.loads(story.project.run("dvc", "params", "diff", "v1", "louder", "--json"))
    assert params == {"params.yaml": {"algorithms.feddw.mu": {"old": 0.1, "new": 1.0, "diff": 0.9}}}
    metrics = json.loads(story.project.run("dvc", "metrics", "diff", "v1", "louder", "--json"))
    found = {name: [change["old"], change["new"]] for name, change in metrics["results/metrics.json"].items()}
    assert found == expected


def test_fedpipe_compare_shows_accuracies_of_two_experiments(story: Story) -> None:
    shown = get_output(story, "fedpipe compare v1 louder")
    old, new = (story.truth[0.1, mu]["feddw"] for mu in (0.1, 1.0))
    (row,) = [line for line in shown.splitlines() if re.match(r"\| FedDW +\| Global test accuracy ", line)]
    cells = [cell.split() for cell in row.strip("|").split("|")[2:]]
    assert [float(cells[0][0]), float(cells[1][0])] == [old, new]
    assert float(cells[2][0]) == pytest.approx(new - old, abs=0.011)
    assert cells[2][1:] == ["(one", "seed)"]
    assert re.search(r"\| algorithm\.mu +\| FedDW +\| +0\.1 +\| +1\.0 +\|", shown)


def test_dvc_plots_diff_has_numbers_of_both_revisions(story: Story) -> None:
    plots = story.kept["plots"]
    assert "errors" not in plots
    rows = {Path(name).stem: found[0]["content"]["data"]["values"] for name, found in plots["data"].items()}
    assert rows.keys() == {"curves", "clients", "matrices", "partition"}
    for rev, mu in (("v1", 0.1), ("louder", 1.0)):
        for label, accuracy in story.truth[0.1, mu].items():
            last = {
                row["protocol"]: float(row["mean"])
                for row in rows["curves"]
                if (row["rev"], row["line"], row["round"]) == (rev, label, "2")
            }
            assert last["global-on-global"] == pytest.approx(accuracy, abs=0.005)
            clients = [row for row in rows["clients"] if (row["rev"], row["line"]) == (rev, label)]
            samples = [int(row["samples"]) for row in clients]
            right = sum(float(row["accuracy"]) * int(row["samples"]) for row in clients)
            assert right / sum(samples) == pytest.approx(last["personal-on-local"], abs=0.005)
        for kind in ("SL", "CR"):
            cells = [row for row in rows["matrices"] if (row["rev"], row["matrix"]) == (rev, kind)]
            assert len(cells) == 2 * 100
            assert sum(float(cell["value"]) for cell in cells) == pytest.approx(20, abs=1e-3), "rows sum to one"
        partition_rows = [row for row in rows["partition"] if row["rev"] == rev]
        assert sum(int(row["samples"]) for row in partition_rows) == 1437
    moved = {
        rev: [row["value"] for row in rows["matrices"] if (row["rev"], row["line"]) == (rev, "feddw")]
        for rev in ("v1", "louder")
    }
    assert moved["v1"] != moved["louder"]


def test_dvc_plots_show_has_numbers_of_workspace(story: Story) -> None:
    shown = json.loads(story.project.run("dvc", "plots", "show", "--json"))
    rows = shown["data"]["results/plots/curves.csv"][0]["content"]["data"]["values"]
    shown_last = [row for row in rows if (row["round"], row["protocol"]) == ("2", "global-on-global")]
    last = {row["line"]: float(row["mean"]) for row in shown_last}
    truth = story.truth[0.1, 1.0]
    assert last == {label: pytest.approx(accuracy, abs=0.005) for label, accuracy in truth.items()}


def test_dvc_plots_page_draws_all_plots(story: Story, tmp_path: Path) -> None:
    """Vega draws every plot of the page in Chromium."""
    if not BROWSER:
        pytest.skip("Chromium is not installed")
    page = story.project.folder / "dvc_plots/index.html"
    assert page.read_text().count("vegaEmbed('#") == 4
    assert [len(colors) > 3 for colors in count_pixels(page, tmp_path / "profile")] == [True] * 4


def test_dvc_exp_apply_needs_no_runs(story: Story) -> None:
    assert list_stages(get_output(story, "dvc exp apply louder")) == ["plan"]
    assert story.project.metrics() == story.truth[0.1, 1.0]


def test_checkout_of_tag_restores_results(story: Story) -> None:
    assert NOTHING in get_output(story, "git checkout -q v1")
    project = story.project
    project.run("git", "checkout", "-q", "v1")
    project.run("dvc", "checkout", "-q")
    assert project.hash_results() == story.kept["bits"]
    assert read_table(project) == story.kept["table"]
    assert project.metrics() == story.truth[0.1, 0.1]
    project.run("git", "checkout", "-q", "main")
    project.run("dvc", "checkout", "-q")


def test_clone_has_nothing_to_run_and_pushes_only_new_files(story: Story) -> None:
    assert NOTHING in get_output(story, "git clone")
    clone = Project(story.project.folder.parent / "elsewhere")
    assert list_stages(clone.run("dvc", "repro")) == ["plan"]
    assert clone.metrics() == story.truth[0.1, 1.0]
    before = {path for path in (clone.folder / "results/runs").rglob("*") if path.is_file()}
    stored = list_objects(story.project.folder.parent / "store")
    clone.edit(algorithms={"feddw": {"mu": 2.0}})
    printed = clone.run("dvc", "repro")
    assert count_jobs(printed)["segment"] == 1, "only FedDW runs"
    assert clone.metrics() == story.truth[0.1, 2.0]
    clone.commit("mu 2")
    clone.run("dvc", "push", "-q")
    sent = list_objects(story.project.folder.parent / "store") - stored
    runs = {path for path in (clone.folder / "results/runs").rglob("*") if path.is_file()} - before
    assert {path.relative_to(clone.folder).parts[2] for path in runs} == {"feddw"}
    report = [path for name in REPORT for path in (clone.folder / "results" / name).rglob("*") if path.is_file()]
    new = {compute_md5(path) for path in (*runs, *report, *map(clone.folder.joinpath, RECORDED_FILES))}
    assert {name for name in sent if not name.endswith(".dir")} <= new
    assert {compute_md5(path) for path in runs} <= sent | stored


def test_dvc_exp_run_temp_does_not_change_workspace(story: Story) -> None:
    """The experiment runs in a temporary folder, also with edits that are not committed."""
    project, edited = story.project, "fedpipe/algorithms/feddw.py"
    bits, params = project.hash_results(), (project.folder / "params.yaml").read_text()
    with (project.folder / edited).open("a") as file:
        file.write("# an edit that is not committed\n")
    project.run("dvc", "exp", "run", "--temp", "-n", "apart", "-S", "algorithms.feddw.mu=2.0")
    assert project.hash_results() == bits
    assert (project.folder / "params.yaml").read_text() == params
    project.run("git", "checkout", "-q", edited)
    refs = project.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").split()
    (apart,) = (ref for ref in refs if ref.endswith("/apart"))
    assert json.loads(project.run("git", "show", f"{apart}:results/metrics.json")) == story.truth[0.1, 2.0]
    assert project.run("git", "show", f"{apart}:{edited}").endswith("# an edit that is not committed\n")


def test_fedpipe_trace_and_verify_match_experiment(story: Story) -> None:
    printed = get_output(story, "fedpipe trace")
    verified = printed.index("results/runs/fedavg/")
    trace = story.project.fedpipe("trace", "results/tables/results.md", "feddw.global-on-global")
    assert printed.startswith(trace)
    found = yaml.safe_load(trace)
    assert found["accuracy (%)"] == pytest.approx(story.truth[0.1, 1.0]["feddw"], abs=0.005)
    assert found["settings"]["algorithm"]["mu"] == 1.0
    (run,) = found["runs"]
    assert not run["first recorded in"].startswith("no commit")
    assert "all bits agree" in printed[verified:]


def test_fedpipe_prune_keeps_files_that_commits_need(story: Story) -> None:
    assert "Nothing to remove." in get_output(story, "fedpipe prune")
    assert list_stages(get_output(story, "fedpipe prune")) == ["plan"]


def test_experiment_transfers_to_other_clone(story: Story) -> None:
    """Run the section "Fetch a colleague's experiment", with two clones of a bare repository and one DVC remote."""
    sent, fetched = [block for block in blocks("docs/dvc.md") if block.section == "Fetch a colleague's experiment"]
    project, folder = story.project, story.project.folder.parent
    origin, clone = folder / "origin.git", Project(folder / "clone")
    project.run("git", "init", "-q", "--bare", "-b", "main", str(origin))
    project.run("git", "remote", "add", "origin", str(origin))
    project.run("git", "push", "-q", "origin", "main~1:refs/heads/main")  # the commit from which the experiment started
    project.run("bash", "-ec", sent.text)

    project.run("git", "clone", "-q", str(origin), str(clone.folder))
    printed = clone.run("bash", "-ec", fetched.text)
    assert "workspace − louder" in printed
    assert "| algorithm.mu" in printed
    clone.run("dvc", "exp", "apply", "louder")
    assert clone.metrics() == story.kept["louder"]
    assert NOTHING in clone.run("fedpipe", "run", "-n")
