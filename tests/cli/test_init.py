"""`fedpipe init`: a project of one's own is laid out, and brought to a later version; by an installed wheel, too."""

from __future__ import annotations

import hashlib
import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

import fedpipe
from fedpipe.cli.scaffold import project
from fedpipe.core.errors import SettingsError
from fedpipe.settings import loader, parser
from tests import small_studies as studies
from tests.docs.page_blocks import ROOT

RECORD = "workflow/laid_out.json"


@pytest.fixture
def laid_out(tmp_path: Path) -> Path:
    folder = tmp_path / "study"
    project.create_project(folder)
    return folder


def earlier(folder: Path, name: str, text: str = "of an earlier version\n") -> None:
    """Have a file as an earlier version laid it out."""
    (folder / name).write_text(text)
    held = json.loads((folder / RECORD).read_text())
    held["sha256"][name] = hashlib.sha256(text.encode()).hexdigest()
    (folder / RECORD).write_text(json.dumps(held | {"version": "0.0.1"}))


def test_it_has_the_files_of_the_clone(laid_out: Path) -> None:
    for name in ("Snakefile", "dvc.yaml", "workflow/rules/common.smk", ".dvc/plots/curves.json"):
        assert (laid_out / name).read_bytes() == (ROOT / name).read_bytes()
    assert {path.name for path in (laid_out / "workflow/profiles").iterdir()} == {"local", "gpu", "slurm"}
    assert (laid_out / "slurm/config.yaml").is_file(), "--profile slurm is found"
    assert (laid_out / "own.py").is_file()
    environment = yaml.safe_load((laid_out / "workflow/envs/fedpipe.yaml").read_text())
    (packages,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert packages == [f"fedpipe =={project_version()}"], "it installs no clone"
    assert parser.parse_params(loader.read_params(laid_out / "params.yaml")).study.algorithms
    assert project.get_outdated_warning(laid_out) is None
    assert project.get_outdated_warning(ROOT) is None, "a clone is none"


def test_an_edited_study_of_the_clone_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = studies.copy_project(tmp_path / "clone")
    shipped = (clone / "params.yaml").read_bytes()
    monkeypatch.setattr(fedpipe, "__file__", str(clone / "fedpipe/__init__.py"))
    (clone / "params.yaml").write_text("study: {seeds: [7]}\n")
    project.create_project(tmp_path / "without_git")
    assert (tmp_path / "without_git/params.yaml").read_text() == "study: {seeds: [7]}\n", "nothing else is there"
    (clone / "params.yaml").write_bytes(shipped)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "params.yaml"], [*author, "commit", "-q", "-m", "begin"]):
        subprocess.run(["git", *command], cwd=clone, check=True)
    (clone / "params.yaml").write_text("study: {seeds: [7]}\n")
    project.create_project(tmp_path / "study")
    assert (tmp_path / "study/params.yaml").read_bytes() == shipped


def project_version() -> str:
    import fedpipe

    return fedpipe.__version__


def test_nothing_is_overwritten(laid_out: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in laid_out.rglob("*") if path.is_file()}
    with pytest.raises(
        SettingsError, match=r"study is a project already; `fedpipe init .*study --update` brings it up"
    ):
        project.create_project(laid_out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/params.yaml").write_text("study: {}\n")
    with pytest.raises(SettingsError, match=r"other/params.yaml is there already, and nothing is overwritten; name an"):
        project.create_project(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["params.yaml"]
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(
        SettingsError, match=r"other is no project that `fedpipe init` laid out; there is no workflow/l"
    ):
        project.update_project(tmp_path / "other")


def test_a_later_version_brings_its_files_and_keeps_what_is_yours(laid_out: Path) -> None:
    earlier(laid_out, "Snakefile")
    earlier(laid_out, "workflow/rules/gone.smk")
    earlier(laid_out, "workflow/rules/data.smk")
    (laid_out / "workflow/rules/data.smk").write_text("edited\n")
    (laid_out / "workflow/profiles/slurm/config.yaml").write_text("of our cluster\n")  # of this version, edited
    (laid_out / "params.yaml").write_text("study: {seeds: [7]}\n")
    told = project.get_outdated_warning(laid_out)
    assert told == (
        f"the workflow's files here are those of fedpipe 0.0.1, and {project_version()} is installed, which has "
        "others; `fedpipe init . --update` brings them, but for what you edited."
    )
    changed, kept = project.update_project(laid_out)
    assert (changed, kept) == (["Snakefile", "workflow/rules/gone.smk"], ["workflow/rules/data.smk"])
    assert (laid_out / "Snakefile").read_bytes() == (ROOT / "Snakefile").read_bytes()
    assert not (laid_out / "workflow/rules/gone.smk").exists()
    assert (laid_out / "workflow/rules/data.smk").read_text() == "edited\n"
    assert (laid_out / "workflow/profiles/slurm/config.yaml").read_text() == "of our cluster\n"
    assert (laid_out / "params.yaml").read_text() == "study: {seeds: [7]}\n"
    assert project.get_outdated_warning(laid_out) is None, "what was kept is told once"
    assert project.update_project(laid_out) == ([], [])


def test_what_was_deleted_comes_back(laid_out: Path) -> None:
    (laid_out / "dvc.yaml").unlink()
    assert project.update_project(laid_out) == (["dvc.yaml"], [])


@pytest.mark.slow
def test_the_wheel_runs_a_study_in_an_empty_folder(tmp_path: Path) -> None:
    """Built from the clone, installed into a new environment that shares what fedpipe needs, used from elsewhere."""
    clone = studies.copy_project(tmp_path / "clone")
    pip = [sys.executable, "-m", "pip"]
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "-w", tmp_path / "wheels", "."], cwd=clone, check=True)
    (wheel,) = (tmp_path / "wheels").glob("fedpipe-*.whl")
    venv.create(tmp_path / "venv")
    binaries = tmp_path / "venv/bin"
    python, home = binaries / "python", next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (home / "shared.pth").write_text("\n".join([*site.getsitepackages(), ""]))
    subprocess.run([*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    main = f"#!{python}\nimport sys\nfrom snakemake.cli import main\nsys.exit(main())\n"
    (binaries / "snakemake").write_text(main)
    (binaries / "snakemake").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{binaries}:{os.environ['PATH']}"}

    def typed(*command: str, at: str = "study", fails: bool = False) -> str:
        done = subprocess.run(command, cwd=tmp_path / at, env=environment, capture_output=True, text=True)
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    (tmp_path / "empty").mkdir()
    where = typed("python", "-c", "import fedpipe; print(fedpipe.__file__)", at="empty")
    assert where.startswith(str(tmp_path / "venv")), "the wheel's own code"
    assert "cd ../study && fedpipe run" in typed("fedpipe", "init", "../study", at="empty")
    studies.write(studies.settings(("fedavg",), 2), tmp_path / "study")
    params = yaml.safe_load((tmp_path / "study/params.yaml").read_text())
    params["algorithms"]["prox"] = {"algorithm": "own.Prox", "mu": 0.1}
    params["study"]["algorithms"] = ["fedavg", "prox"]
    studies.write(params, tmp_path / "study")
    typed("fedpipe", "check", "own.Prox")
    typed("fedpipe", "run")
    table = (tmp_path / "study/results/tables/results.md").read_text()
    assert "| FedAvg" in table
    assert "| prox" in table
    assert set(json.loads((tmp_path / "study/results/metrics.json").read_text())) == {"fedavg", "prox"}
    assert "Nothing to be done" in typed("fedpipe", "run")
    assert "is a project already" in typed("fedpipe", "init", ".", fails=True)
    earlier(tmp_path / "study", "dvc.yaml")
    assert "`fedpipe init . --update` brings them" in typed("fedpipe", "plan")
    assert typed("fedpipe", "init", ".", "--update") == "dvc.yaml\n"
    assert "--update" not in typed("fedpipe", "plan")
