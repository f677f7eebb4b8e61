"""Server optimizers as a user meets them: `federation.server` in params.yaml, in a grid, in tables, in runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedpipe.cli import app
from fedpipe.core.components import component, registry
from fedpipe.engine import collect
from fedpipe.engine.server.server import M, V
from fedpipe.planning import planner
from tests import small_studies as studies

ADAM = {"optimizer": "adam", "learning_rate": 0.01}
GRID = [{"optimizer": "sgd"}, {"optimizer": "momentum"}, ADAM]
AVERAGING = [
    name
    for name in registry.list_components(component.ALGORITHM)
    if registry.find_component(component.ALGORITHM, name).server_optimizer_part  # type: ignore[attr-defined]
]
ALONE = sorted(set(registry.list_components(component.ALGORITHM)) - set(AVERAGING))

Command = Callable[..., tuple[str, str, Any]]


@pytest.fixture
def fedpipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``fedpipe("plan")``: what the command says on both streams, and its exit status."""

    def run(*words: str) -> tuple[str, str, Any]:
        monkeypatch.setattr(sys, "argv", ["fedpipe", *words])
        with pytest.raises(SystemExit) as end:
            app.main()
        return *capsys.readouterr(), end.value.code or 0

    return run


def study(*labels: str, server: Any = None, **sections: Any) -> dict[str, Any]:
    more = {} if server is None else {"federation": {"server": server}}
    return studies.settings(labels or ("fedavg",), **more, **sections)


def keys(params: dict[str, Any]) -> list[str]:
    studies.write(params, Path())
    return [run.key for run in planner.make_plan().runs]


def test_a_grid_from_params_yaml_to_the_table(fedpipe: Command) -> None:
    params = study("fedavg", "fedper", rounds=2)
    params["study"]["grid"] = {"federation.server": GRID}
    made = studies.prepare(params)
    assert len(made.runs) == 6
    for planned, run in zip(made.runs, studies.open_runs(made), strict=True):
        *_, done = run.run_segment(planned.rounds)
        collect.collect_rounds(run.files, done, "all")
    told, _, status = fedpipe("plan", "--dry-run")
    assert status == 0
    assert told.count("federation.server={'optimizer': 'momentum'}") == 2
    assert fedpipe("table")[2] == 0
    shown = pd.read_csv("results/tables/results.csv")
    fedavg = shown[(shown["algorithm"] == "fedavg") & (shown["protocol"] == "global-on-global")]
    assert [json.loads(point) for point in fedavg["federation.server"].unique()] == GRID
    text = Path("results/tables/results.md").read_text()
    assert all(json.dumps(point, sort_keys=True) in text for point in GRID)
    assert fedpipe("figure", "curves")[2] == 0
    losses = {
        run.files.path.name: pd.read_parquet(run.files.merged_files(2).metrics)["loss"].sum()
        for run in studies.open_runs(made)
    }
    assert len(set(losses.values())) == 6


def test_sgd_at_rate_1_has_the_key_of_no_entry() -> None:
    plain = keys(study())
    for server in ({}, {"optimizer": "sgd"}, {"optimizer": "sgd", "learning_rate": 1}, {"learning_rate": 1.0}):
        assert keys(study(server=server)) == plain
    for server in (ADAM, {"optimizer": "momentum"}, {"learning_rate": 0.5}):
        assert keys(study(server=server)) != plain


def test_a_default_that_is_typed_changes_no_key() -> None:
    wanted = keys(study(server={"optimizer": "yogi"}))
    for more in ({"learning_rate": 1}, {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3}, {"momentum": None}):
        assert keys(study(server={"optimizer": "yogi", **more})) == wanted
    assert keys(study(server={"optimizer": "yogi", "beta1": 0.8})) != wanted


def test_its_state_is_saved_and_a_run_goes_on_from_it() -> None:
    """Interrupted after two rounds, and in blocks of clients: the bits of one go."""
    made = studies.prepare(study("fedavg", "fedrep", server=ADAM))
    for planned in made.runs:
        (run,) = studies.open_runs(dataclasses.replace(made, runs=(planned,)))
        *_, done = run.run_segment(4)
        whole = studies.bits(run.files.path)
        part = {"fedavg": "model", "fedrep": "body"}[planned.algorithm]
        saved = torch.load(run.files.round(done).server_state, weights_only=True)
        names = {name for name in saved[part] if "running" not in name}
        assert {M, V} < saved.keys()
        assert names == saved[M].keys() == saved[V].keys()
        assert all(bool((value > 0).all()) for value in saved[V].values())

        studies.forget(run.files.path)
        for stop in (2, 4):
            (again,) = studies.open_runs(dataclasses.replace(made, runs=(planned,)))
            list(again.run_segment(stop))
        assert studies.bits(run.files.path) == whole

        studies.forget(run.files.path)
        (again,) = studies.open_runs(dataclasses.replace(made, runs=(planned,)))
        again.initialize()
        for number in range(1, 5):
            ids = again.participants(number)
            again.aggregate(number, [again.train(number, ids[:2]), again.train(number, ids[2:])])
            again.evaluate(number)
        server = torch.load(again.files.round(4).server_state, weights_only=True)
        assert all(torch.equal(server[V][name], saved[V][name]) for name in names)


@pytest.mark.parametrize("name", ALONE)
def test_a_method_that_averages_no_model_refuses_before_any_job(fedpipe: Command, name: str) -> None:
    studies.write(study("fedavg", name, server=ADAM), Path())
    _, told, status = fedpipe("plan")
    assert status == 2
    assert told.startswith(f"fedpipe: federation.server: {name} has no averaged model")
    assert "adam" in told
    studies.write(study("fedavg", name, server={"optimizer": "sgd"}), Path())
    assert fedpipe("plan")[2] == 0


def test_in_a_grid_the_point_is_named(fedpipe: Command) -> None:
    params = study("fedproto")
    params["study"]["grid"] = {"federation.server": GRID}
    studies.write(params, Path())
    _, told, status = fedpipe("plan")
    assert status == 2
    assert told.startswith("fedpipe: federation.server: fedproto has no averaged model")
    assert "federation.server: {'optimizer': 'momentum'}" in told


@pytest.mark.parametrize("name", AVERAGING)
def test_every_other_method_is_planned_with_one(fedpipe: Command, name: str) -> None:
    studies.write(study(name, server={"optimizer": "momentum"}), Path())
    assert fedpipe("plan", "--dry-run")[2] == 0


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ({"optimizer": "adm"}, "federation.server.optimizer: 'adm' can't be used. Use 'sgd', 'momentum',"),
        ({"optimiser": "adam"}, "federation.server.optimiser: unknown key. Did you mean 'optimizer'?"),
        ({"optimizer": "adam", "beta3": 0.1}, "federation.server.beta3: unknown key. Did you mean 'beta2'?"),
        ({"optimizer": "momentum", "tau": 0.1}, "federation.server.tau: 0.1 "),
        ({"beta1": 0.9}, "federation.server.beta1: 0.9 "),
        ({"optimizer": "adam", "tau": 0}, "federation.server.tau: 0 "),
        ({"optimizer": "adam", "beta2": 1.0}, "federation.server.beta2: 1.0 "),
        ({"learning_rate": -1}, "federation.server.learning_rate: -1 "),
        ({"learning_rate": True}, "federation.server.learning_rate: true "),
        ("adam", "federation.server: 'adam' "),
    ],
)
def test_a_mistake_is_one_sentence(fedpipe: Command, server: Any, sentence: str) -> None:
    studies.write(study(server=server), Path())
    _, told, status = fedpipe("plan")
    assert status == 2
    assert told.startswith(f"fedpipe: {sentence}")
    assert told.count("\n") == 1
