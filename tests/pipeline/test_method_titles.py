"""Titles of methods change tables and figures, but no runs."""

import pytest

from tests import small_studies as studies
from tests.pipeline.conftest import Project, count_jobs

CW = {"algorithm": "fedprox", "mu": 10.0}


@pytest.mark.slow
def test_new_method_title_rebuilds_table_and_figures_but_no_run(project: Project) -> None:
    studies.write(studies.settings(("fedavg", "cwfedavg_10"), 1, algorithms={"cwfedavg_10": CW}), project.folder)
    assert count_jobs(project.snakemake())["segment"] == 2
    metrics, bits = project.metrics(), project.hash_results()
    project.edit(algorithms={"cwfedavg_10": CW | {"title": "cwFedAvg (λ = 10)"}})
    again = count_jobs(project.snakemake())
    assert again == {"table": 1, "curves": 1, "matrices": 1, "all": 1}
    shown = project.run("fedpipe", "show")
    assert "| cwFedAvg (λ = 10) |" in shown
    assert "cwfedavg_10" not in shown
    assert r"cwFedAvg ($\lambda$ = 10) &" in project.run("fedpipe", "show", "--format", "latex")
    assert (project.metrics(), project.hash_results()) == (metrics, bits)
    project.run("fedpipe", "trace", "results/tables/results.md", "cwfedavg_10.global-on-global")
