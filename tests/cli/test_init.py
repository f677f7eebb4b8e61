"""`fedpipe init` creates a project and updates it to a later version, also from an installed wheel."""

import hashlib
import json
import os
import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import fedpipe
from fedpipe.cli.app import app
from fedpipe.cli.scaffold import project
from fedpipe.core.errors import SettingsError
from fedpipe.settings import loader, parser
from tests import small_studies as studies
from tests.docs.page_blocks import ROOT

RECORD = "workflow/laid_out.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "study"
    project.create_project(folder)
    return folder


def write_earlier_file(folder: Path, name: str, text: str = "of an earlier version\n") -> None:
    """Write a file as if an earlier version had created it."""
    (folder / name).write_text(text)
    record = json.loads((folder / RECORD).read_text())
    record["sha256"][name] = hashlib.sha256(text.encode()).hexdigest()
    (folder / RECORD).write_text(json.dumps(record | {"version": "0.0.1"}))


def test_created_project_has_files_of_clone(folder: Path) -> None:
    for name in ("Snakefile", "dvc.yaml", "workflow/rules/common.smk", ".dvc/plots/curves.json"):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    assert {path.name for path in (folder / "workflow/profiles").iterdir()} == {"local", "gpu", "slurm"}
    assert (folder / "slurm/config.yaml").is_file(), "--profile slurm is found"
    assert (folder / "own.py").is_file()
    environment = yaml.safe_load((folder / "workflow/envs/fedpipe.yaml").read_text())
    (packages,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert packages == [f"fedpipe =={fedpipe.__version__}"], "the environment installs the package instead of a clone"
    assert parser.parse_params(loader.read_params(folder / "params.yaml")).study.algorithms
    assert project.get_outdated_warning(folder) is None
    assert project.get_outdated_warning(ROOT) is None, "a clone is not a project"


def test_create_project_overwrites_no_file(folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match=r"study is already a project.*`fedpipe init .*study --update`"):
        project.create_project(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/Snakefile").write_text("rule all:\n")
    with pytest.raises(SettingsError, match=r"other/Snakefile already exists"):
        project.create_project(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["Snakefile"]
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(SettingsError, match=r"other is not a project: workflow/laid_out.json"):
        project.update_project(tmp_path / "other")


def test_init_keeps_params_yaml_and_own_py_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    studies.write(studies.settings(), Path())
    Path("own.py").write_text("WIDTH = 3\n")
    before = [Path(name).read_bytes() for name in ("params.yaml", "own.py")]
    runner = CliRunner()
    with pytest.raises(SettingsError, match=r"^Snakefile: .*`fedpipe init \.`"):
        runner.invoke(app, ["run", "-n"], catch_exceptions=False)
    assert "Your params.yaml is kept.\nYour own.py is kept.\n" in runner.invoke(app, ["init", "."]).stdout
    assert [Path(name).read_bytes() for name in ("params.yaml", "own.py")] == before
    assert Path("Snakefile").is_file()
    assert project.get_outdated_warning(Path()) is None


def test_update_project_replaces_outdated_files_and_keeps_edited_files(folder: Path) -> None:
    write_earlier_file(folder, "Snakefile")
    write_earlier_file(folder, "workflow/rules/gone.smk")
    write_earlier_file(folder, "workflow/rules/data.smk")
    (folder / "workflow/rules/data.smk").write_text("edited\n")
    (folder / "workflow/profiles/slurm/config.yaml").write_text("of our cluster\n")  # of this version, edited
    (folder / "params.yaml").write_text("study: {seeds: [7]}\n")
    warning = project.get_outdated_warning(folder)
    command = [sys.executable, "-m", "fedpipe", "run", "--version"]
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ran.stderr.startswith(f"fedpipe: {warning}\nsnakemake all ")
    assert re.search(f"fedpipe 0.0.1, .*{re.escape(fedpipe.__version__)} .*`fedpipe init . --update`", warning)
    record = folder / project.RECORD_PATH
    record.write_text(json.dumps(json.loads(record.read_text()) | {"version": fedpipe.__version__}))
    assert "another commit of fedpipe" in project.get_outdated_warning(folder)
    assert project.update_project(folder) == (["Snakefile", "workflow/rules/gone.smk"], ["workflow/rules/data.smk"])
    assert (folder / "Snakefile").read_bytes() == (ROOT / "Snakefile").read_bytes()
    assert not (folder / "workflow/rules/gone.smk").exists()
    assert (folder / "workflow/rules/data.smk").read_text() == "edited\n"
    assert (folder / "workflow/profiles/slurm/config.yaml").read_text() == "of our cluster\n"
    assert (folder / "params.yaml").read_text() == "study: {seeds: [7]}\n"
    assert project.get_outdated_warning(folder) is None, "the warning lists an edited file once"
    assert project.update_project(folder) == ([], [])


def test_update_project_removes_template_of_plots_of_earlier_version(folder: Path) -> None:
    """`dvc plots` fails if the configuration names a template that does not exist."""
    write_earlier_file(folder, ".dvc/plots/page.html")
    config = folder / ".dvc/config"
    text = config.read_text()
    remote = "['remote \"lab\"']\n    url = /srv/dvc\n"
    config.write_text(f"{text}[plots]\n    html_template = plots/page.html\n{remote}")
    assert project.update_project(folder) == ([".dvc/plots/page.html", ".dvc/config"], [])
    assert config.read_text() == f"{text}[plots]\n{remote}"
    assert project.update_project(folder) == ([], [])
    subprocess.run(["git", "init", "-q", folder], check=True)
    dvc = Path(sys.executable).parent / "dvc"
    assert subprocess.check_output([dvc, "config", "remote.lab.url"], cwd=folder, text=True) == "/srv/dvc\n"


@pytest.mark.parametrize("name", ["../victim.txt", "{outside}/victim.txt", "link/victim.txt"])
def test_update_project_deletes_no_file_outside_project(folder: Path, name: str) -> None:
    (folder / "link").symlink_to(folder.parent)
    write_earlier_file(folder, name.format(outside=folder.parent))
    assert project.update_project(folder) == ([], [])
    assert (folder.parent / "victim.txt").is_file()


@pytest.mark.parametrize("record", ["[]", "{}", '{"sha256": []}', '{"sha256": 5}'])
def test_update_project_rejects_damaged_record(folder: Path, record: str) -> None:
    (folder / RECORD).write_text(record)
    for read_record in (project.update_project, project.get_outdated_warning):
        with pytest.raises(SettingsError, match=f"{RECORD} is damaged"):
            read_record(folder)


def test_init_rejects_folder_that_jobs_cannot_import_from(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"a:b: ':' can't be part"):
        project.create_project(tmp_path / "a:b")
    assert not [*tmp_path.iterdir()]


def test_update_project_restores_deleted_file_and_link_of_profile(folder: Path) -> None:
    for name in ("dvc.yaml", "slurm"):
        (folder / name).unlink()
        assert project.update_project(folder) == ([name], [])
    assert (folder / "slurm/config.yaml").is_file()


@pytest.mark.slow
def test_wheel_runs_study_in_empty_folder(tmp_path: Path) -> None:
    """Build the wheel from the clone, install it into a new environment with shared dependencies, and use it."""
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

    def run_command(*command: str, working_folder: str = "study", fails: bool = False) -> str:
        process = subprocess.run(
            command, cwd=tmp_path / working_folder, env=environment, capture_output=True, text=True
        )
        assert bool(process.returncode) == fails, process.stdout + process.stderr
        return process.stdout + process.stderr

    (tmp_path / "empty").mkdir()
    package_path = run_command("python", "-c", "import fedpipe; print(fedpipe.__file__)", working_folder="empty")
    assert package_path.startswith(str(tmp_path / "venv")), "fedpipe is imported from the wheel"
    assert "cd ../study && fedpipe run" in run_command("fedpipe", "init", "../study", working_folder="empty")
    studies.write(studies.settings(("fedavg",), 2), tmp_path / "study")
    params = yaml.safe_load((tmp_path / "study/params.yaml").read_text())
    params["algorithms"]["prox"] = {"algorithm": "own.Prox", "mu": 0.1}
    params["study"]["algorithms"] = ["fedavg", "prox"]
    studies.write(params, tmp_path / "study")
    run_command("fedpipe", "check", "own.Prox")
    run_command("fedpipe", "run")
    table = (tmp_path / "study/results/tables/results.md").read_text()
    assert "| FedAvg" in table
    assert "| prox" in table
    assert set(json.loads((tmp_path / "study/results/metrics.json").read_text())) == {"fedavg", "prox"}
    assert "Nothing to be done" in run_command("fedpipe", "run")
    assert "is already a project" in run_command("fedpipe", "init", ".", fails=True)
    write_earlier_file(tmp_path / "study", "dvc.yaml")
    assert "`fedpipe init . --update`" in run_command("fedpipe", "plan")
    assert run_command("fedpipe", "init", ".", "--update") == "Updated:\ndvc.yaml\n"
    assert "--update" not in run_command("fedpipe", "plan")
