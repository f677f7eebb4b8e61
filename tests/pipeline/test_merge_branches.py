"""docs/dvc.md, "Merge two branches": both sides have results, and one has dropped a method."""

import pytest

from tests import small_studies as studies
from tests.docs.page_blocks import blocks
from tests.pipeline.conftest import Project, count_jobs, list_stages

pytestmark = pytest.mark.slow


def test_dvc_page_steps_merge_two_branches_with_results(project: Project) -> None:
    taken, recorded = [block.text for block in blocks("docs/dvc.md") if block.section == "Merge two branches"]
    small = studies.settings(("fedavg", "fedprox", "feddw"), 2, federation={"batch_size": 20})
    small["algorithms"] |= {"fedprox": {"mu": 0.1}, "feddw": {"mu": 1.0}}
    studies.write(small, project.folder)
    project.run("dvc", "repro")
    project.commit()
    project.run("git", "checkout", "-qb", "louder")
    project.edit(algorithms={"feddw": {"mu": 50.0}, "fedprox": {"mu": 5.0}})
    project.run("dvc", "repro")
    project.commit("louder")
    louder = project.metrics()
    project.run("git", "checkout", "-q", "main")
    project.run("dvc", "checkout", "-q")
    project.edit(study={"algorithms": ["fedavg", "feddw"]})
    project.run("dvc", "repro")
    project.commit("fewer")

    merge, *rest = taken.splitlines()
    assert "CONFLICT (modify/delete): results/keys/fedprox.json" in project.run(*merge.split(), check=False)
    studies.write(small, project.folder)  # manual merge: the methods of main, the mu of louder
    project.edit(study={"algorithms": ["fedavg", "feddw"]}, algorithms={"feddw": {"mu": 50.0}})
    project.run("bash", "-ec", "\n".join(rest))
    repro, *commit = recorded.splitlines()
    printed = project.run(*repro.split())
    assert "segment" not in count_jobs(printed), "all runs exist"
    project.run("bash", "-ec", "\n".join(commit))
    assert project.run("git", "status", "--porcelain") == ""
    assert len(project.run("git", "show", "-s", "--format=%P").split()) == 2
    assert project.metrics() == {name: louder[name] for name in ("fedavg", "feddw")}
    assert "fedprox" not in project.run("git", "ls-files", "results")
    assert list_stages(project.run("dvc", "repro")) == ["plan"]
