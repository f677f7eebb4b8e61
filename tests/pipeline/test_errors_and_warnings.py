"""Errors for wrong options of snakemake, and warnings about a study before it runs."""

import itertools

import pytest

from fedpipe.planning import planner
from fedpipe.settings import parser
from tests import small_studies as studies
from tests.pipeline.conftest import LOCAL, TABLE, Project, count_jobs
from tests.small_studies import AS_USER

WARNING = "fedpipe: warning: algorithms.cfl.after: 20 is not less than federation.rounds (1)"
KEPT = ["kept-on-global", "kept-on-local"]


@pytest.mark.slow
def test_snakemake_rejects_study_settings_in_config_options(project: Project) -> None:
    study = studies.settings(rounds=1)
    project.write(study, "studies/other.yaml")
    (project.folder / "mine.yaml").write_text("params: studies/other.yaml\n")
    project.write(study)
    for arguments, named in (
        (("--config", "params=params.yaml", "federation={rounds: 1}"), "'federation'"),
        (("--configfile", "studies/other.yaml"), ", ".join(f"'{section}'" for section in study)),
    ):
        printed = project.snakemake("all", *arguments, check=False)
        (error,) = (line for line in printed.splitlines() if line.startswith("fedpipe:"))
        assert error.startswith(f"fedpipe: {named} in --config or --configfile ")
        assert "--config params=studies/NAME.yaml" in error
        assert "Traceback" not in printed
        assert not count_jobs(printed)
        assert not (project.folder / "results/plan.json").exists()
    with pytest.raises(AssertionError, match="ended with 2"):
        project.snakemake("all", "--config", "parms=studies/other.yaml")
    assert "results/studies/other" in project.snakemake("-n", "all", "--configfile", "mine.yaml")


@pytest.mark.slow
def test_snakemake_explains_unreadable_results_of_another_user(project: Project) -> None:
    project.write(studies.settings(rounds=1))
    project.run("fedpipe", "plan")
    folder = project.folder / "results/runs"
    folder.chmod(0)
    printed = project.run(*AS_USER, "snakemake", "-n", "all", *LOCAL, check=False)
    folder.chmod(0o755)
    (error,) = (line for line in printed.splitlines() if line.startswith("fedpipe:"))
    assert error.startswith("fedpipe: results/runs/")
    assert "Permission denied" in error
    assert "Traceback" not in printed


@pytest.mark.slow
def test_new_mirror_files_replace_generated_samples(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snakemake plans a study with generated samples again each time, without any edit."""
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(project.folder / "cache"))
    project.write(studies.settings(dataset={"name": "mnist", "subset": 300, "on_missing": "generate"}))
    planner.write_plan(new_plan := planner.make_plan())
    assert [run.dataset.partition("-")[0] for run in new_plan.runs] == ["generated"]
    for file in parser.parse_dataset({"name": "mnist"}).configured_dataset.files:  # type: ignore[attr-defined]
        (project.folder / "mirror" / file.name).parent.mkdir(parents=True, exist_ok=True)
        (project.folder / "mirror" / file.name).write_bytes(b"")  # a dry run does not read them
    planned = project.run("env", "FEDPIPE_MIRROR=mirror", "XDG_CACHE_HOME=cache", "snakemake", "-n", "all", *LOCAL)
    assert count_jobs(planned)["segment"] == 1
    assert "results/data/mnist-" in planned
    assert "results/data/generated-" not in planned


@pytest.mark.slow
def test_snakemake_prints_plan_warnings_and_table_repeats_them(project: Project) -> None:
    project.write(studies.settings(("fedper", "cfl"), 1, evaluation={"protocols": KEPT}))
    assert project.snakemake(TABLE).count(WARNING) == 1
    message = project.fedpipe("show")
    assert f"Warning: {WARNING.removeprefix('fedpipe: warning: ')}" in message
    assert message.index("| FedPer") < message.index("Warning: ")
    table = (project.folder / "results/tables/results.csv").read_text()
    for algorithm, protocol in itertools.product(("fedper", "cfl"), KEPT):
        assert f"{algorithm},{protocol},accuracy,sample,last," in table
    again = project.snakemake("-n", TABLE)
    assert "Nothing to be done" in again
    assert WARNING not in again, "the plan is up to date"
