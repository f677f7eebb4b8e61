"""Hostile names of clones, studies and archive members: they run no commands and write no files outside the clone."""

import os
import re
import zipfile
from pathlib import Path

import pytest
import yaml

from tests import small_studies as studies
from tests.pipeline.conftest import Project


def test_colon_in_clone_path_is_rejected(tmp_path: Path) -> None:
    """A colon separates entries of PYTHONPATH, so jobs would import the installed package instead of the clone."""
    project = Project(studies.copy_project(tmp_path / "2026-11-24T07:35"))
    project.write(studies.settings(rounds=1))
    output = project.snakemake("-n", "all", check=False)
    assert "':' can't be part of the path of a study's folder" in output
    assert "Traceback" not in output


def test_study_path_with_shell_characters_is_rejected_before_jobs_start(project: Project) -> None:
    for name in ("studies/a;touch PWN;.yaml", "studies/{a}.yaml"):
        project.write(studies.settings(rounds=1), name)
        output = project.snakemake("all", "--config", f"params={name}", check=False)
        assert output.count("can't be part of a study's path") == 1
        assert "Traceback" not in output
    assert not list(project.folder.rglob("PWN"))
    assert not list(project.folder.glob("results/*/*")), "no job may start"


@pytest.mark.slow
def test_hostile_plan_settings_run_no_shell_command(project: Project) -> None:
    """`dvc pull` fetches plan.json, so its settings must not become part of job commands."""
    project.write(studies.settings(rounds=1))
    project.run("fedpipe", "plan")
    place = project.folder / "results/plan.json"
    text = place.read_text()
    assert text.count('"auto"') == 2
    place.write_text(text.replace('"auto"', '"auto; touch PWN; "'))
    output = project.snakemake("partitions")
    assert not list(project.folder.rglob("PWN")), output


@pytest.mark.slow
def test_hostile_pack_writes_no_file_outside_clone(project: Project) -> None:
    """With clients_per_job, every snakemake unpacks the packs of earlier segments."""
    params = studies.settings(rounds=1, execution={"rounds_per_job": 1, "clients_per_job": 5})
    project.write(params)
    project.run("fedpipe", "plan")
    (settings,) = project.folder.glob("results/runs/*/*/run.yaml")
    for name in ("../../../../../PWN/round.json", f"{project.folder.parent}/PWN/round.json"):
        with zipfile.ZipFile(settings.with_name("rounds.zip"), "w") as archive:
            archive.writestr(name, yaml.safe_dump({}))
        (project.folder / "results/plan.json").unlink(missing_ok=True)
        output = project.snakemake("-n", "all", check=False)
        (line,) = (line for line in output.splitlines() if line.startswith("fedpipe: "))
        relative = os.path.relpath(settings.with_name("rounds.zip"), project.folder)
        assert re.match(rf"fedpipe: {relative} is damaged \(.*PWN/round\.json' is not a file of a round", line)
        assert "Traceback" not in output
        assert not list(project.folder.parent.rglob("PWN"))
