"""DVC's cache, however its files come into the folder: nothing that runs here changes a file of it."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests import small_studies as studies
from tests.pipeline.conftest import ENVIRONMENT, LOCAL, Project, count_jobs, list_stages

pytestmark = pytest.mark.slow

#: Root may write what is read-only. As a user who may not, it does without that one right.
AS_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


def list_damaged_files(cache: Path) -> list[str]:
    """The files of DVC's cache that aren't what their names say."""
    files = list((cache / "files/md5").glob("??/[!.]*"))  # .*.tmp is what DVC was fetching as it was killed
    assert files
    return [
        str(path)
        for path in files
        if hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        != (path.parent.name + path.name).removesuffix(".dir")
    ]


def links(folder: Path) -> int:
    """How many files below a folder share their bytes with another."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.is_symlink() or path.stat().st_nlink > 1 for path in files)


@pytest.mark.parametrize("kind", ["copy", "hardlink", "symlink"])
def test_an_edit_leaves_the_cache_as_it_is(project: Project, kind: str) -> None:
    """By dvc, and by snakemake alone."""
    if AS_USER and not shutil.which(AS_USER[0]):
        pytest.skip("root may write everything, and setpriv is not installed")
    params = studies.settings(("fedavg", "fedprox"), 2)
    params["algorithms"]["fedprox"] = {"mu": 0.1}
    studies.write(params, project.folder)
    project.commit()
    project.run("dvc", "config", "--local", "cache.type", kind)
    project.run(*AS_USER, "dvc", "repro")
    project.commit("results")
    cache = project.folder / ".dvc/cache"
    for place in ("results/.provenance", "results/runs", "results/tables"):
        assert bool(links(project.folder / place)) is (kind != "copy"), place
    first = project.metrics()

    project.edit(algorithms={"fedprox": {"mu": 5.0}})
    assert count_jobs(project.run(*AS_USER, "dvc", "repro"))["segment"] == 1
    assert list_damaged_files(cache) == []
    second = project.metrics()
    assert second["fedprox"] != first["fedprox"]
    project.commit("mu 5")

    # the tables alone, and by snakemake alone
    project.edit(report={"round": "best"})
    assert count_jobs(project.run(*AS_USER, "snakemake", "all", *LOCAL))["table"] == 1
    assert list_damaged_files(cache) == []
    assert "segment" not in count_jobs(project.run(*AS_USER, "dvc", "repro"))
    assert list_damaged_files(cache) == []
    assert list_stages(project.run(*AS_USER, "dvc", "repro")) == ["plan"]
    project.run("git", "checkout", "-q", ".")
    project.run(*AS_USER, "dvc", "checkout", "-q")
    assert project.metrics() == second
    assert "Nothing to be done" in project.snakemake("-n", "all")


def test_a_machine_that_is_set_to_links_gets_copies(project: Project, tmp_path: Path) -> None:
    """`.dvc/config` outdoes what an administrator set, and a user's `--local` outdoes it."""
    (tmp_path / "dvc").mkdir()
    (tmp_path / "dvc/config").write_text("[cache]\n    type = symlink\n")
    command = ("env", f"XDG_CONFIG_HOME={tmp_path}", "dvc", "config")
    assert project.run(*command, "--global", "cache.type").split() == ["symlink"]
    assert project.run(*command, "cache.type").split() == ["reflink,copy"]
    project.run(*command, "--local", "cache.type", "hardlink")
    assert project.run(*command, "cache.type").split() == ["hardlink"]


def test_what_lacks_its_record_is_not_taken_for_that_of_other_settings(project: Project) -> None:
    """So it is after a `dvc pull` that was cut short; what lies under keys needs no record."""
    studies.write(studies.settings(rounds=1), project.folder)
    project.snakemake()
    assert "Nothing to be done" in project.snakemake("-n", "all")
    for record in (project.folder / "results/.provenance").rglob("*"):
        record.unlink()
    project.edit(report={"average": "client"})
    assert set(count_jobs(project.snakemake())) == {"all", "table", "curves", "matrices", "partition_figure"}
    assert "Nothing to be done" in project.snakemake("-n", "all")


def start_command(project: Project, *command: str) -> subprocess.Popen[str]:
    """A command that nobody waits for, in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=project.folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_two_at_once_and_a_pull_that_is_killed(project: Project, tmp_path: Path) -> None:
    """One of two `dvc repro` does it and the other says why not; after the pull is typed again, all is there."""
    studies.write(studies.settings(rounds=1), project.folder)
    project.commit()
    both = [start_command(project, "dvc", "repro") for _ in range(2)]
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
    pull = start_command(clone, "dvc", "pull")
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
    assert list_stages(clone.run("dvc", "repro")) == ["plan"]
