"""No command changes files of DVC's cache, even if the files of the workspace are hard or symbolic links to them."""

import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import small_studies as studies
from tests.pipeline.conftest import LOCAL, Project, count_jobs, list_stages
from tests.small_studies import AS_USER

pytestmark = pytest.mark.slow

OUTPUT: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def list_damaged_files(cache: Path) -> list[str]:
    """List the files of DVC's cache whose MD5 differs from their name."""
    files = list((cache / "files/md5").glob("??/[!.]*"))  # a killed DVC leaves .*.tmp
    assert files
    return [
        str(path)
        for path in files
        if hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        != (path.parent.name + path.name).removesuffix(".dir")
    ]


def test_edited_study_does_not_change_dvc_cache(project: Project) -> None:
    """Run the edited study with dvc, and with snakemake only, while files are hard links and symbolic links."""
    if AS_USER and not shutil.which(AS_USER[0]):
        pytest.skip("root may write everything, and setpriv is not installed")
    params = studies.settings(("fedavg", "fedprox"), 2)
    params["algorithms"]["fedprox"] = {"mu": 0.1}
    project.write(params)
    project.commit()
    project.run("dvc", "config", "--local", "cache.type", "hardlink")
    project.run(*AS_USER, "dvc", "repro")
    project.commit("results")
    cache = project.folder / ".dvc/cache"

    for kind, mu in (("hardlink", 5.0), ("symlink", 6.0)):
        project.run("dvc", "config", "--local", "cache.type", kind)
        project.run(*AS_USER, "dvc", "checkout", "-q", "--relink")
        for place in ("results/.provenance", "results/runs", "results/tables"):
            files = [path for path in (project.folder / place).rglob("*") if path.is_file()]
            assert any(path.is_symlink() if kind == "symlink" else path.stat().st_nlink > 1 for path in files), place
        first = project.metrics()
        project.edit(algorithms={"fedprox": {"mu": mu}})
        assert count_jobs(project.run(*AS_USER, "dvc", "repro"))["segment"] == 1
        assert list_damaged_files(cache) == []
        second = project.metrics()
        assert second["fedprox"] != first["fedprox"]
        project.commit(f"mu {mu}")

        # only the tables change, and only snakemake runs
        project.edit(report={"round": "best"})
        assert count_jobs(project.run(*AS_USER, "snakemake", "all", *LOCAL))["table"] == 1
        assert list_damaged_files(cache) == []
        assert "segment" not in count_jobs(project.run(*AS_USER, "dvc", "repro"))
        assert list_damaged_files(cache) == []
        project.run("git", "checkout", "-q", ".")
        project.run(*AS_USER, "dvc", "checkout", "-q")
        assert project.metrics() == second
        assert "Nothing to be done" in project.snakemake("-n", "all")


def test_project_cache_type_takes_precedence_over_global_cache_type(project: Project, tmp_path: Path) -> None:
    """`.dvc/config` takes precedence over global settings. `--local` takes precedence over `.dvc/config`."""
    (tmp_path / "dvc").mkdir()
    (tmp_path / "dvc/config").write_text("[cache]\n    type = symlink\n")
    command = ("env", f"XDG_CONFIG_HOME={tmp_path}", "dvc", "config")
    assert project.run(*command, "--global", "cache.type").split() == ["symlink"]
    assert project.run(*command, "cache.type").split() == ["reflink,copy"]
    project.run(*command, "--local", "cache.type", "hardlink")
    assert project.run(*command, "cache.type").split() == ["hardlink"]


def test_report_without_provenance_records_is_rebuilt(project: Project) -> None:
    """An interrupted `dvc pull` leaves no records. Runs need no record, because their paths contain the run key."""
    project.write(studies.settings(rounds=1))
    project.snakemake()
    for record in (project.folder / "results/.provenance").rglob("*"):
        record.unlink()
    project.edit(report={"average": "client"})
    assert set(count_jobs(project.snakemake())) == {"all", "table", "curves", "matrices", "partition_figure"}
    assert "Nothing to be done" in project.snakemake("-n", "all")


def test_concurrent_dvc_repro_and_killed_dvc_pull_damage_no_file(project: Project, tmp_path: Path) -> None:
    """At least one of two `dvc repro` succeeds. A second `dvc pull` completes a killed one."""
    project.write(studies.settings(("scaffold",), 1))  # clients have states
    project.commit()
    both = [project.start_command("dvc", "repro", **OUTPUT) for _ in range(2)]
    printed = [process.communicate()[0] for process in both]
    assert 0 in [process.returncode for process in both], printed
    for process, text in zip(both, printed, strict=True):
        assert process.returncode == 0 or "is busy" in text or "locked" in text, text
    assert "segment" not in count_jobs(project.run("dvc", "repro"))
    assert list_damaged_files(project.folder / ".dvc/cache") == []
    project.run("dvc", "remote", "add", "-d", "store", str(tmp_path / "store"))
    project.commit("results")
    project.run("dvc", "push", "-q")

    clone = Project(tmp_path / "clone")
    project.run("git", "clone", "-q", str(project.folder), str(clone.folder))
    pull = clone.start_command("dvc", "pull", **OUTPUT)
    cache = clone.folder / ".dvc/cache/files"
    while pull.poll() is None and not any(path.is_file() for path in cache.rglob("*")):
        pass
    if pull.poll() is None:
        os.killpg(pull.pid, signal.SIGKILL)
    pull.communicate()
    clone.run("dvc", "pull")
    assert list_damaged_files(clone.folder / ".dvc/cache") == []
    assert clone.hash_results() == project.hash_results()
    assert "Nothing to be done" in clone.run("snakemake", "-n", "all")
    assert "Nothing to be done" in clone.run("snakemake", "--profile", "slurm", "-n", "all")
    assert list_stages(clone.run("dvc", "repro")) == ["plan"]
