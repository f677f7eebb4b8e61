"""What nothing needs any more, with real git and dvc."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpipe.analysis import prune
from fedpipe.cli.app import app
from fedpipe.core.errors import ArtifactError, SettingsError
from tests import small_studies as studies
from tests.analysis.conftest import ROUNDS, finish
from tests.pipeline.conftest import ENVIRONMENT

pytestmark = pytest.mark.slow

Run = Callable[..., str]


def run_command(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout


@pytest.fixture(scope="module")
def recorded(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished study as a repository of git and dvc, recorded and committed."""
    folder = tmp_path_factory.mktemp("recorded") / "study"
    shutil.copytree(finished, folder)
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
def run(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs commands in a copy of its own of the recorded study."""
    folder = tmp_path / "study"
    shutil.copytree(recorded, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", ENVIRONMENT["PATH"])
    return run_command


def record(message: str = "a study") -> None:
    run_command("dvc", "commit", "-f", "-q")
    run_command("git", "add", "-A")
    run_command("git", "commit", "-qm", message)


def rerun_study(alpha: float) -> set[Path]:
    """The same study at another alpha: its runs' folders."""
    params = studies.settings(("fedavg", "scaffold"), ROUNDS, study={"seeds": [0]})
    params["partition"]["alpha"] = alpha
    return {run.path for run in finish(params).runs}


def test_what_a_study_or_a_commit_needs_stays(run: Run) -> None:
    assert prune.find_unneeded_files() == []
    rerun_study(9.0)
    record("another alpha")
    assert prune.find_unneeded_files() == [], "the first commit needs the first runs"
    run("git", "commit", "-q", "--amend", "-m", "reworded")
    run("git", "tag", "first", "HEAD~1")
    assert prune.find_unneeded_files() == []


def test_what_only_a_try_needed_is_shown_and_removed(run: Run) -> None:
    before = {path for path in Path("results").rglob("*") if path.is_file()}
    params = Path("params.yaml").read_text()
    tried = rerun_study(9.0)
    run("dvc", "commit", "-f", "-q")
    Path("params.yaml").write_text(params)
    found = prune.find_unneeded_files()
    (dealt,) = (entry.paths[0] for entry in found if "partitions" in str(entry))
    assert {entry.paths[0] for entry in found} == {*tried, dealt}
    assert not any(entry.uncached_count for entry in found)
    sizes = [sum(path.stat().st_size for path in entry.paths[0].rglob("*") if path.is_file()) for entry in found]
    assert [entry.size for entry in found] == sizes

    runner = CliRunner()
    refused = runner.invoke(app, ["prune"], input="n\n")
    assert all(f"  {path}\n" in refused.stdout for path in tried)
    assert all(path.is_dir() for path in tried), "shown, not removed"
    removed = runner.invoke(app, ["prune", "--yes"])
    assert removed.exit_code == 0
    assert {path for path in Path("results").rglob("*") if path.is_file()} == before
    assert runner.invoke(app, ["prune", "--yes"]).stdout == "Nothing to remove.\n"


def test_diagnostics_go_with_their_runs_and_features_that_no_run_is_of(run: Run) -> None:
    needed = {Path("results/diagnostics", *path.parts[2:]) for path in Path("results/runs").glob("*/*")}
    params = Path("params.yaml").read_text()
    tried = {Path("results/diagnostics", *path.parts[2:]) for path in rerun_study(9.0)}
    for folder in needed | tried:
        (folder / "0001").mkdir(parents=True)
        (folder / "0001/gradients-0123456789ab.json").write_text(str(folder))
    features = Path("results/features/digits-0123456789ab-vgg16-0123456789ab.pt")
    features.write_text("features")
    run("dvc", "commit", "-f", "-q")
    Path("params.yaml").write_text(params)
    found = prune.find_unneeded_files()
    paths = {part.paths[0] for part in found}
    assert paths >= {*tried, features}
    assert not paths & needed
    prune.remove_files(found)
    assert all(folder.is_dir() for folder in needed)
    assert not any(path.exists() for path in {*tried, features})


def test_what_is_not_in_the_cache_is_never_removed(run: Run) -> None:
    params = Path("params.yaml").read_text()
    tried = rerun_study(9.0)
    Path("params.yaml").write_text(params)
    found = prune.find_unneeded_files()
    assert all(entry.uncached_count for entry in found)
    with pytest.raises(ArtifactError, match=r"is not in DVC's cache \(\d+ of its files\); nothing was removed"):
        prune.remove_files(found)
    done = CliRunner().invoke(app, ["prune", "--yes"])
    assert "is not in DVC's cache and stays" in done.stdout
    assert "Nothing to remove." in done.stdout
    assert all(path.is_dir() for path in tried)


def test_why_git_refuses_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "true")
    with pytest.raises(ArtifactError, match=r"fails here .fatal: detected dubious ownership.*; prune needs a clone"):
        prune.find_unneeded_files()


def test_another_study_keeps_its_runs(run: Run) -> None:
    params = Path("params.yaml").read_text()
    rerun_study(9.0)
    Path("studies/deep").mkdir(parents=True)
    Path("params.yaml").rename("studies/deep/other.yaml")
    Path("params.yaml").write_text(params)
    assert prune.find_unneeded_files() == []
    Path("studies/deep/other.yaml").write_text("federation: {rounds: 0}\n")
    with pytest.raises(SettingsError, match=r"^studies/deep/other.yaml: what this study needs can't be known\."):
        prune.find_unneeded_files()


def test_a_merge_that_was_committed_with_its_conflicts_keeps_what_both_sides_name(run: Run) -> None:
    keys, params = Path("results/keys/fedavg.json"), Path("params.yaml").read_text()
    ours = keys.read_text()
    rerun_study(9.0)
    run("dvc", "commit", "-f", "-q")
    keys.write_text(f"<<<<<<< HEAD\n{ours}=======\n{keys.read_text()}>>>>>>> theirs\n")
    run("git", "commit", "-qam", "merged")
    keys.write_text(ours)
    Path("params.yaml").write_text(params)
    assert prune.find_unneeded_files() == []


def test_an_experiment_keeps_its_runs(run: Run) -> None:
    """A commit that only a ref of DVC's experiments holds."""
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


def test_a_committed_run_of_another_version_keeps_what_it_may_need(run: Run) -> None:
    params = Path("params.yaml").read_text()
    tried = rerun_study(9.0)
    record("another alpha")
    for path in tried:
        settings = path / "run.yaml"
        settings.write_text(settings.read_text() + "novelty: 1\n")
    Path("params.yaml").write_text(params)
    assert prune.find_unneeded_files() == []


def test_records_of_what_is_removed_go_too(run: Run) -> None:
    params = Path("params.yaml").read_text()
    tried = sorted(rerun_study(9.0))[0]
    Path("params.yaml").write_text(params)
    name, long = f"{tried}/metrics.parquet", f"{tried}/{'x' * 300}"

    def encoded(output: str) -> Path:
        text = base64.urlsafe_b64encode(output.encode()).decode()
        parts = [text[start : start + 254] for start in range(0, len(text), 254)]
        return Path("results/.provenance", *(f"@{part}" for part in parts[:-1]), parts[-1])

    for output in (name, long, "results/tables/results.md"):
        encoded(output).parent.mkdir(parents=True, exist_ok=True)
        encoded(output).write_text("{}")
    run("dvc", "commit", "-f", "-q")
    prune.remove_files(prune.find_unneeded_files())
    assert not encoded(name).exists()
    assert not encoded(long).exists()
    assert encoded("results/tables/results.md").exists()
