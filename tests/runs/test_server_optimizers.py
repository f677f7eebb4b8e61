"""`federation.server` in params.yaml, grids, tables and runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedpipe.core.components import component, registry
from fedpipe.engine.server.server import M, V
from tests import small_studies as studies
from tests.small_studies import RunFedpipe

ADAM = {"optimizer": "adam", "learning_rate": 0.01}
GRID = [{"optimizer": "sgd"}, {"optimizer": "momentum"}, ADAM]
AVERAGING = [
    name
    for name in registry.list_components(component.ALGORITHM)
    if registry.find_component(component.ALGORITHM, name).server_optimizer_part  # type: ignore[attr-defined]
]
NON_AVERAGING = sorted(set(registry.list_components(component.ALGORITHM)) - set(AVERAGING))


def make_study(*labels: str, server: Any = None, **sections: Any) -> dict[str, Any]:
    extra = {} if server is None else {"federation": {"server": server}}
    return studies.settings(labels or ("fedavg",), **extra, **sections)


def test_table_contains_grid_of_server_optimizers(run_fedpipe: RunFedpipe) -> None:
    params = make_study("fedavg", "fedper", rounds=2)
    params["study"]["grid"] = {"federation.server": GRID}
    plan = studies.prepare(params)
    assert len(plan.runs) == 6
    studies.finish_study(plan)
    status, message, _ = run_fedpipe("plan", "--dry-run")
    assert status == 0
    assert message.count("federation.server={'optimizer': 'momentum'}") == 2
    assert run_fedpipe("table")[0] == 0
    table = pd.read_csv("results/tables/results.csv")
    fedavg = table[(table["algorithm"] == "fedavg") & (table["protocol"] == "global-on-global")]
    assert [json.loads(point) for point in fedavg["federation.server"].unique()] == GRID
    text = Path("results/tables/results.md").read_text()
    assert all(json.dumps(point, sort_keys=True) in text for point in GRID)
    assert run_fedpipe("figure", "curves")[0] == 0
    losses = {
        run.files.path.name: pd.read_parquet(run.files.get_merged_files(2).metrics)["loss"].sum()
        for run in studies.open_runs(plan)
    }
    assert len(set(losses.values())) == 6


def test_resumed_run_continues_server_optimizer_state() -> None:
    """A run that is interrupted after two rounds or split into blocks has the state of one segment."""
    plan = studies.prepare(make_study("fedavg", "fedrep", server=ADAM))
    for planned in plan.runs:
        run = studies.require_equal_bits(dataclasses.replace(plan, runs=(planned,)), 4, size=3)
        part = {"fedavg": "model", "fedrep": "body"}[planned.algorithm]
        saved = torch.load(run.files.get_round_files(4).server_state, weights_only=True)
        names = {name for name in saved[part] if "running" not in name}
        assert {M, V} < saved.keys()
        assert names == saved[M].keys() == saved[V].keys()
        assert all(bool((value > 0).all()) for value in saved[V].values())


@pytest.mark.parametrize("name", NON_AVERAGING)
def test_plan_rejects_server_optimizer_without_averaged_model(run_fedpipe: RunFedpipe, name: str) -> None:
    studies.write(make_study("fedavg", name, server=ADAM), Path())
    status, _, message = run_fedpipe("plan")
    assert status == 2
    assert message.startswith(f"fedpipe: federation.server: {name} has no averaged model")
    assert "adam" in message
    studies.write(make_study("fedavg", name, server={"optimizer": "sgd"}), Path())
    assert run_fedpipe("plan")[0] == 0


def test_error_in_server_grid_shows_grid_point(run_fedpipe: RunFedpipe) -> None:
    params = make_study("fedproto")
    params["study"]["grid"] = {"federation.server": GRID}
    studies.write(params, Path())
    status, _, message = run_fedpipe("plan")
    assert status == 2
    assert message.startswith("fedpipe: federation.server: fedproto has no averaged model")
    assert "federation.server: {'optimizer': 'momentum'}" in message


def test_averaging_methods_are_planned_with_server_optimizer(run_fedpipe: RunFedpipe) -> None:
    studies.write(make_study(*AVERAGING, server={"optimizer": "momentum"}), Path())
    status, output, _ = run_fedpipe("plan", "--dry-run")
    assert status == 0
    assert [line.split()[0] for line in output.splitlines()] == AVERAGING
