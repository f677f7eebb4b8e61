"""docs/dvc.md, "Fetch a colleague's experiment": two clones of a bare repository, and a DVC remote between them."""

from pathlib import Path

import pytest

from tests import small_studies as studies
from tests.docs.page_blocks import blocks
from tests.pipeline.conftest import Project

pytestmark = pytest.mark.slow


def test_experiment_transfers_from_one_clone_to_another(project: Project, tmp_path: Path) -> None:
    sent, fetched = [block for block in blocks("docs/dvc.md") if block.section == "Fetch a colleague's experiment"]
    small = studies.settings(("fedavg", "feddw"), 2, federation={"batch_size": 10})
    small["algorithms"]["feddw"] = {"mu": 1.0}
    studies.write(small, project.folder)
    project.commit()
    project.run("dvc", "repro")
    project.run("dvc", "remote", "add", "-d", "store", str(tmp_path / "store"))
    project.commit()
    project.run("git", "init", "-q", "--bare", "-b", "main", str(tmp_path / "origin.git"))
    project.run("git", "remote", "add", "origin", str(tmp_path / "origin.git"))
    project.run("git", "push", "-q", "origin", "HEAD:main")
    project.run("dvc", "push")
    project.run("dvc", "exp", "run", "-n", "louder", "-S", "algorithms.feddw.mu=10.0")
    louder = project.metrics()
    project.run("bash", "-ec", sent.text)

    project.run("git", "clone", "-q", str(tmp_path / "origin.git"), str(tmp_path / "theirs"))
    theirs = Project(tmp_path / "theirs")
    printed = theirs.run("bash", "-ec", fetched.text)
    assert "workspace − louder" in printed
    assert "| algorithm.mu" in printed
    theirs.run("dvc", "exp", "apply", "louder")
    assert theirs.metrics() == louder
    assert "Nothing to be done" in theirs.run("fedpipe", "run", "-n")
