"""`fedpipe prune`: files that no study or commit needs, with real git and dvc."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpipe.analysis import prune
from fedpipe.cli.app import app
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.planning import planner
from tests import small_studies as studies
from tests.analysis.conftest import ROUNDS, finish
from tests.pipeline.conftest import ENVIRONMENT

pytestmark = pytest.mark.slow

Run = Callable[..., str]


def run_command(*command: str) -> str:
    """Run a command. Return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout


@pytest.fixture(scope="module")
def recorded_study(finished_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished study as a repository of git and dvc, recorded and committed."""
    folder = tmp_path_factory.mktemp("recorded") / "study"
    shutil.copytree(finished_study, folder)
    for name in ("dvc.yaml", ".dvcignore", ".gitignore", "results/.gitignore", "Snakefile"):
        shutil.copy(studies.ROOT / name, folder / name)
    shutil.copytree(studies.ROOT / "workflow/rules", folder / "workflow/rules")
    for name in ("tables", "figures", "plots", "diagnostics", "features", ".provenance", "../fedpipe"):
        (folder / "results" / name).mkdir(exist_ok=True)
    for name in ("clients", "matrices", "partition"):
        (folder / f"results/plots/{name}.csv").write_text("")
    with contextlib.chdir(folder):
        run_command("git", "init", "-q", "-b", "main")
        run_command("dvc", "init", "-q")
        record()
    return folder


@pytest.fixture
def run(recorded_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command in a copy of the recorded study."""
    folder = tmp_path / "study"
    shutil.copytree(recorded_study, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", ENVIRONMENT["PATH"])
    return run_command


def record(message: str = "a study") -> None:
    run_command("dvc", "commit", "-f", "-q")
    run_command("git", "add", "-A")
    run_command("git", "commit", "-qm", message)


def rerun_study(alpha: float) -> set[Path]:
    """Run the study with another alpha. Return the folders of its runs."""
    params = studies.settings(("fedavg", "scaffold"), ROUNDS, study={"seeds": [0]})
    params["partition"]["alpha"] = alpha
    return {run.path for run in finish(params).runs}


def test_prune_keeps_files_that_study_or_commit_needs(run: Run) -> None:
    assert prune.find_unneeded_files() == []
    rerun_study(9.0)
    record("another alpha")
    assert prune.find_unneeded_files() == [], "the first commit needs the first runs"
    run("git", "commit", "-q", "--amend", "-m", "reworded")
    run("git", "tag", "first", "HEAD~1")
    assert prune.find_unneeded_files() == []


def test_prune_lists_and_removes_files_of_abandoned_study(run: Run) -> None:
    before = {path for path in Path("results").rglob("*") if path.is_file()}
    params = Path("params.yaml").read_text()
    removable_runs = rerun_study(9.0)
    run("dvc", "commit", "-f", "-q")
    Path("params.yaml").write_text(params)
    unneeded_files = prune.find_unneeded_files()
    (partition_folder,) = (entry.paths[0] for entry in unneeded_files if "partitions" in str(entry))
    assert {entry.paths[0] for entry in unneeded_files} == {*removable_runs, partition_folder}
    assert not any(entry.uncached_count for entry in unneeded_files)
    sizes = [
        sum(path.stat().st_size for path in entry.paths[0].rglob("*") if path.is_file()) for entry in unneeded_files
    ]
    assert [entry.size for entry in unneeded_files] == sizes

    runner = CliRunner()
    dry_result = runner.invoke(app, ["prune"], input="n\n")
    assert all(f"  {path}\n" in dry_result.stdout for path in removable_runs)
    assert all(path.is_dir() for path in removable_runs), "the files are listed but not removed"
    result = runner.invoke(app, ["prune", "--yes"])
    assert result.exit_code == 0
    assert {path for path in Path("results").rglob("*") if path.is_file()} == before
    assert runner.invoke(app, ["prune", "--yes"]).stdout == "Nothing to remove.\n"


def test_prune_removes_diagnostics_of_removed_runs_and_unused_features(run: Run) -> None:
    needed = {Path("results/diagnostics", *path.parts[2:]) for path in Path("results/runs").glob("*/*")}
    params = Path("params.yaml").read_text()
    removable_runs = {Path("results/diagnostics", *path.parts[2:]) for path in rerun_study(9.0)}
    for folder in needed | removable_runs:
        (folder / "0001").mkdir(parents=True)
        (folder / "0001/gradients-0123456789ab.json").write_text(str(folder))
    features = Path("results/features/digits-0123456789ab-vgg16-0123456789ab.pt")
    features.write_text("features")
    run("dvc", "commit", "-f", "-q")
    Path("params.yaml").write_text(params)
    unneeded_files = prune.find_unneeded_files()
    paths = {part.paths[0] for part in unneeded_files}
    assert paths >= {*removable_runs, features}
    assert not paths & needed
    prune.remove_files(unneeded_files)
    assert all(folder.is_dir() for folder in needed)
    assert not any(path.exists() for path in {*removable_runs, features})


def test_prune_never_removes_files_missing_from_dvc_cache(run: Run) -> None:
    params = Path("params.yaml").read_text()
    removable_runs = rerun_study(9.0)
    (other_run,) = (run.path for run in finish(studies.settings(("fedprox",), 1)).runs)
    Path("params.yaml").write_text(params)
    unneeded_files = prune.find_unneeded_files()
    assert all(entry.uncached_count for entry in unneeded_files)
    with pytest.raises(ArtifactError, match=r"^results/.*: DVC's cache lacks \d+ "):
        prune.remove_files(unneeded_files)
    result = CliRunner().invoke(app, ["prune", "--yes"])
    for path in removable_runs:
        assert re.search(
            rf"^{path} \(.*\) is not in DVC's cache, so it is kept\. Type `dvc commit`", result.stdout, re.M
        )
    assert re.search(rf"^{other_run} \(.*\) .*, so it is kept\. You can delete it\.$", result.stdout, re.M)
    assert "Nothing to remove." in result.stdout
    assert all(path.is_dir() for path in removable_runs)


def test_prune_removes_cached_files_next_to_uncached_ones(run: Run) -> None:
    params = Path("params.yaml").read_text()
    cached_runs = rerun_study(9.0)
    run("dvc", "commit", "-f", "-q")
    uncached_runs = rerun_study(10.0)
    Path("params.yaml").write_text(params)
    result = CliRunner().invoke(app, ["prune", "--yes"])
    assert result.exit_code == 0
    assert not any(path.exists() for path in cached_runs)
    for path in uncached_runs:
        assert path.is_dir()
        assert re.search(rf"^{path} \(.*\) is not in DVC's cache, so it is kept\.", result.stdout, re.M)


def test_prune_error_contains_message_of_git(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "true")
    with pytest.raises(ArtifactError, match=r"^`.*` failed .fatal: detected dubious ownership"):
        prune.find_unneeded_files()


def test_prune_keeps_runs_of_other_study(run: Run) -> None:
    params = Path("params.yaml").read_text()
    rerun_study(9.0)
    Path("studies/deep").mkdir(parents=True)
    Path("params.yaml").rename("studies/deep/other.yaml")
    Path("params.yaml").write_text(params)
    assert prune.find_unneeded_files() == []
    plan = Path("results/studies/deep/other/plan.json")
    plan.parent.mkdir(parents=True)
    planner.make_plan(Path("studies/deep/other.yaml")).write()
    assert prune.find_plans_of_missing_studies() == {}
    Path("studies/deep/other.yaml").rename("other.yaml")
    assert f"{plan}: studies/deep/other.yaml does not exist" in CliRunner().invoke(app, ["prune"], input="n\n").stdout
    Path("studies/deep/other.yaml").write_text("federation: {rounds: 0}\n")
    with pytest.raises(SettingsError, match=r"^studies/deep/other.yaml: .* federation.rounds: 0"):
        prune.find_unneeded_files()


def test_prune_accepts_study_with_dataset_that_is_not_downloaded(run: Run) -> None:
    Path("studies").mkdir(exist_ok=True)
    study = "dataset: {name: huggingface, path: flwrlabs/femnist, label: character}\n"
    Path("studies/femnist.yaml").write_text(study)
    assert prune.find_unneeded_files() == []
    Path("studies/femnist.yaml").write_text(study + "federation: {rounds: 0}\n")
    assert prune.find_unneeded_files() == []
    Path("studies/femnist.yaml").write_text(study.replace("label:", "lable:"))
    with pytest.raises(SettingsError, match=r"^studies/femnist.yaml: .* dataset.lable"):
        prune.find_unneeded_files()


def test_prune_keeps_runs_of_both_sides_of_committed_merge_conflict(run: Run) -> None:
    keys, params = Path("results/keys/fedavg.json"), Path("params.yaml").read_text()
    ours = keys.read_text()
    rerun_study(9.0)
    run("dvc", "commit", "-f", "-q")
    keys.write_text(f"<<<<<<< HEAD\n{ours}=======\n{keys.read_text()}>>>>>>> theirs\n")
    run("git", "commit", "-qam", "merged")
    keys.write_text(ours)
    Path("params.yaml").write_text(params)
    assert prune.find_unneeded_files() == []


def test_prune_keeps_runs_of_dvc_experiment(run: Run) -> None:
    """Only a ref of DVC's experiments contains the commit."""
    head = run("git", "rev-parse", "HEAD").strip()
    rerun_study(9.0)
    record("an experiment")
    run("git", "update-ref", "refs/exps/ab/cd/try", "HEAD")
    run("git", "reset", "-q", "--hard", head)
    run("dvc", "checkout", "-q")
    rerun_study(9.0)
    Path("params.yaml").write_text(run("git", "show", "HEAD:params.yaml"))
    assert prune.find_unneeded_files() == []
    run("git", "update-ref", "-d", "refs/exps/ab/cd/try")
    assert len(prune.find_unneeded_files()) == 3


def test_prune_keeps_files_of_committed_runs_of_other_version(run: Run) -> None:
    params = Path("params.yaml").read_text()
    removable_runs = rerun_study(9.0)
    record("another alpha")
    for path in removable_runs:
        settings = path / "run.yaml"
        settings.write_text(settings.read_text() + "novelty: 1\n")
    Path("params.yaml").write_text(params)
    assert prune.find_unneeded_files() == []
