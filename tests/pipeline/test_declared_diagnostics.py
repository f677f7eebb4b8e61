"""Diagnostics of params.yaml: snakemake computes them, and an edit of them trains nothing."""

import pyarrow.parquet as pq
import pytest

from tests import small_studies as studies
from tests.pipeline.conftest import Project, count_jobs


@pytest.mark.slow
def test_dag_computes_all_diagnostics_and_their_edit_trains_nothing(project: Project) -> None:
    params = studies.settings(("fedavg", "cwfedavg"), 3, dataset={"subset": 300}, artifacts={"keep_models": "last"})
    params["diagnostics"] = {
        "norms": {"kind": "head-norms", "rounds": [1, 3]},
        "classes": {"kind": "head-norms", "algorithms": ["cwfedavg"], "models": ["received", "finetuned", "class"]},
        "shares": {"kind": "locals", "rounds": [1], "algorithms": ["cwfedavg"]},
        "layers": {"kind": "gradients"},
        "flat": {"kind": "surface", "algorithms": ["fedavg"], "points": 3, "samples": 50},
        "plane": {"kind": "features", "algorithms": ["fedavg"], "samples": 30, "perplexity": 5},
    }
    project.write(params)
    done = count_jobs(project.snakemake("all"))
    assert (done["segment"], done["diagnostic"]) == (2, 4 + 1 + 1 + 2 + 1 + 1)
    diagnostics = project.folder / "results/diagnostics"
    found = {path.name.rpartition("-")[0] for path in diagnostics.rglob("*.parquet")}
    assert found == {"head-norms", "locals", "gradients", "surface", "features"}
    assert all(pq.read_table(path).num_rows for path in diagnostics.rglob("*.parquet"))
    runs = studies.hash_results(project.folder / "results/runs")

    project.edit(diagnostics={"flat": params["diagnostics"]["flat"] | {"points": 5}})
    done = count_jobs(project.snakemake("all"))
    assert {name: count for name, count in done.items() if name != "all"} == {"diagnostic": 1}
    assert sorted(pq.read_table(path).num_rows for path in diagnostics.rglob("surface-*.parquet")) == [9, 25]
    assert studies.hash_results(project.folder / "results/runs") == runs

    assert "Traceback" not in project.fedpipe("verify", "--rerun", "0")
    damaged = next(diagnostics.rglob("gradients-*.parquet"))
    damaged.write_bytes(damaged.read_bytes() + b"!")
    message = project.fedpipe("verify", "--rerun", "0", check=False)
    assert f"{damaged.relative_to(project.folder)} is damaged" in message
    damaged.unlink()
    assert count_jobs(project.snakemake("all"))["diagnostic"] == 1
    project.fedpipe("verify", "--rerun", "0")
    assert studies.hash_results(project.folder / "results/runs") == runs
