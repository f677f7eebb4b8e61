"""DVC stages that run Snakemake: reproduction, recording, and clones."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import small_studies as studies
from tests.pipeline.conftest import Project, count_jobs, list_stages

NOTHING = "Nothing to be done"


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
def test_dvc_repro_records_results_and_reruns_only_edited_algorithm(project: Project, tmp_path: Path) -> None:
    params = studies.settings(("fedavg", "fedprox", "scaffold"), 2)
    params["algorithms"]["fedprox"] = {"mu": 0.1}
    studies.write(params, project.folder)
    project.commit()
    printed = project.run("dvc", "repro")
    assert count_jobs(printed)["segment"] == 3
    untracked = project.run("git", "status", "--porcelain").splitlines()
    assert untracked == ["?? dvc.lock", "?? results/keys/", "?? results/metrics.json", "?? results/plots/"]
    project.commit("results")
    assert list_stages(project.run("dvc", "repro")) == ["plan"]
    assert NOTHING in project.snakemake("-n", "all")
    first = project.metrics()

    # dvc exp show has the accuracies as columns
    header, *rows = project.run("dvc", "exp", "show", "--csv").splitlines()
    columns = dict(zip(header.split(","), rows[0].split(","), strict=False))
    assert float(columns["scaffold"]) == first["scaffold"]

    # an edit of a hyperparameter of one algorithm reruns only this algorithm
    project.edit(algorithms={"fedprox": {"mu": 5.0}})
    printed = project.run("dvc", "repro")
    assert count_jobs(printed)["segment"] == 1
    assert "segment FedProx seed 0" in printed
    ran = [line for line in printed.splitlines() if line.startswith("Running stage 'train@")]
    assert ran == ["Running stage 'train@fedprox':"]
    second = project.metrics()
    assert second["fedavg"] == first["fedavg"]
    assert second["scaffold"] == first["scaffold"]
    project.commit("mu 5")

    # a clone has nothing to do after a pull, and reruns all runs with another learning rate
    remote, clone = tmp_path / "remote", Project(tmp_path / "elsewhere" / "clone")
    project.run("dvc", "remote", "add", "-d", "store", str(remote))
    project.commit("remote")
    project.run("dvc", "push", "-q")
    clone.folder.parent.mkdir()
    project.run("git", "clone", "-q", str(project.folder), str(clone.folder))
    clone.run("dvc", "pull", "-q")
    assert NOTHING in clone.run("snakemake", "-n", "all")
    assert NOTHING in clone.run("snakemake", "--profile", "slurm", "-n", "all")
    assert list_stages(clone.run("dvc", "repro")) == ["plan"]
    assert clone.hash_results() == project.hash_results()
    clone.edit(federation={"learning_rate": 0.2})
    assert count_jobs(clone.run("snakemake", "-n", "all"))["segment"] == 3


@pytest.mark.slow
def test_dvc_repro_records_study_with_grid_axes_and_presets(project: Project) -> None:
    """The matrix of stages reads study.algorithms, which is in the same section as the grid."""
    params = studies.settings(("fedavg", "fedprox"), 1)
    params["algorithms"]["fedprox"] = {
        "mu": 0.1,
        "overrides": {"federation.rounds": 2},
        "protocol": "personal-on-local",
    }
    params["study"]["grid"] = {"environment": {"mild/1": {"partition.alpha": 10.0}, "harsh": {"partition.alpha": 0.1}}}
    params["presets"] = {"smoke": {"study.grid": {}}}
    studies.write(params, project.folder)
    project.commit()
    printed = project.run("dvc", "repro")
    assert count_jobs(printed)["segment"] == 4
    assert {"train@fedavg", "train@fedprox"} <= set(list_stages(printed))
    assert set(project.metrics()["fedprox"]) == {"environment=mild/1", "environment=harsh"}
    assert list_stages(project.run("dvc", "repro")) == ["plan"]
