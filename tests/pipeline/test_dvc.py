"""DVC stages that run Snakemake: reproduction and recording."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests import small_studies as studies
from tests.docs.page_blocks import blocks
from tests.pipeline.conftest import Project, count_jobs, list_stages


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ({"seeds": [0]}, "Could not find 'study.algorithms'"),
        ({"algorithms": "fedavg"}, "'Value' object is not iterable"),
    ],
    ids=["left-out", "a-name"],
)
def test_dvc_page_quotes_dvc_errors_for_invalid_methods(study: dict[str, Any], message: str, tmp_path: Path) -> None:
    """DVC reads study.algorithms itself, so it prints its own errors instead of those of fedpipe."""
    from dvc.dvcfile import load_file
    from dvc.repo import Repo

    shutil.copy(studies.ROOT / "dvc.yaml", tmp_path)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"study": study}))
    repo = Repo.init(str(tmp_path), no_scm=True)
    with pytest.raises(Exception, match=message):
        list(load_file(repo, str(tmp_path / "dvc.yaml")).stages)
    repo.close()
    assert message in " ".join((studies.ROOT / "docs/dvc.md").read_text().split())


@pytest.mark.slow
def test_dvc_repro_records_grid(project: Project) -> None:
    """The matrix of stages reads study.algorithms, which is in the same section as the grid."""
    params = studies.settings(("fedavg", "fedprox"), 1)
    params["algorithms"]["fedprox"] = {"overrides": {"federation.rounds": 2}, "protocol": "personal-on-local"}
    params["study"]["grid"] = {"environment": {"mild/1": {"partition.alpha": 10.0}, "harsh": {"partition.alpha": 0.1}}}
    params["presets"] = {"smoke": {"study.grid": {}}}
    project.write(params)
    project.commit()
    printed = project.run("dvc", "repro")
    assert count_jobs(printed)["segment"] == 4
    assert {"train@fedavg", "train@fedprox"} <= set(list_stages(printed))
    untracked = project.run("git", "status", "--porcelain").splitlines()
    assert untracked == ["?? dvc.lock", "?? results/keys/", "?? results/metrics.json", "?? results/plots/"]
    assert set(project.metrics()["fedprox"]) == {"environment=mild/1", "environment=harsh"}
    assert list_stages(project.run("dvc", "repro")) == ["plan"]


@pytest.mark.slow
def test_project_can_be_a_folder_of_another_repository(project: Project) -> None:
    """As in the repository of a paper. Experiments of DVC and `fedpipe compare` use commits of that repository."""
    project.write(studies.settings(rounds=1))
    (project.folder / ".git").rename(project.folder.parent / ".git")
    project.commit()
    project.run("dvc", "repro")
    project.commit("results")
    project.run("dvc", "exp", "run", "--name", "longer", "-S", "federation.rounds=2")
    printed = project.fedpipe("compare", "longer", "HEAD")
    assert re.findall(r"^\| federation.rounds +\| all +\| (\d) +\| (\d) +\|$", printed, flags=re.M) == [("2", "1")]


@pytest.mark.slow
def test_line_of_cluster_page_makes_dvc_work_without_file_locks(project: Project) -> None:
    """As on Lustre with the option noflock, on which fedpipe and Snakemake work."""
    (line,) = [line for block in blocks("docs/cluster.md") for line in block.lines if "hardlink_lock" in line]
    (project.folder / "sitecustomize.py").write_text(
        "import errno, fcntl, os\n"
        "flock = fcntl.flock\n"
        "def fail_in_project(file, operation):\n"
        "    descriptor = file if isinstance(file, int) else file.fileno()\n"
        f"    if os.readlink(f'/proc/self/fd/{{descriptor}}').startswith({str(project.folder)!r}):\n"
        "        raise OSError(errno.ENOSYS, 'no flock here')\n"
        "    return flock(file, operation)\n"
        "fcntl.flock = fail_in_project\n"
    )
    project.write(studies.settings(rounds=1))
    project.commit()
    assert count_jobs(project.run("fedpipe", "run", "-v"))["segment"] == 1
    assert "Unable to acquire lock" in project.run("dvc", "repro", check=False)
    project.run("sh", "-c", line)
    assert "train@fedavg" in list_stages(project.run("dvc", "repro"))


@pytest.mark.slow
def test_dvc_page_lines_share_results_without_the_data(project: Project) -> None:
    """A colleague without the data sees the results. One with the data verifies them, and nothing is trained."""
    (lines,) = [block.lines for block in blocks("docs/dvc.md") if block.section == "Share results without the data"]
    stages = (project.folder / "dvc.yaml").read_text()
    for line in lines:
        old_line = line.replace(", push: false", "")
        assert stages.count(old_line) == 1
        stages = stages.replace(old_line, line)
    (project.folder / "dvc.yaml").write_text(stages)
    own = project.folder / "own.npz"
    np.savez(own, x=np.random.default_rng(0).random((300, 4)), y=np.arange(300) % 3)
    (project.folder / ".git/info/exclude").write_text("own.npz\n")
    project.write(studies.settings(rounds=1, dataset={"name": "npz", "path": "own.npz", "split": "pooled"}))
    project.run("fedpipe", "download")
    project.run("dvc", "repro")
    project.run("dvc", "remote", "add", "-d", "store", "../store")
    project.commit()
    project.run("dvc", "push")
    clone = Project(project.folder.with_name("clone"))
    project.run("git", "clone", "-q", ".", str(clone.folder))

    clone.run("dvc", "pull", "--allow-missing")
    assert not (clone.folder / "results/data").exists()
    assert "| FedAvg" in clone.fedpipe("show")
    assert "Run `fedpipe download`" in clone.fedpipe("plan", check=False)
    shutil.copy(own, clone.folder)
    clone.run("fedpipe", "download")
    assert "Nothing to be done" in clone.snakemake("-n", "all")
    assert "All verified: 1 run" in clone.fedpipe("verify")


@pytest.mark.slow
def test_dvc_page_steps_merge_two_branches_with_results(project: Project) -> None:
    """Both sides have results, and one has dropped a method."""
    taken, recorded = [block.text for block in blocks("docs/dvc.md") if block.section == "Merge two branches"]
    small = studies.settings(("fedavg", "fedprox", "feddw"), 2, federation={"batch_size": 20})
    small["algorithms"] |= {"fedprox": {"mu": 0.1}, "feddw": {"mu": 1.0}}
    project.write(small)
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
    project.write(small)  # manual merge: the methods of main, the mu of louder
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
