"""The gallery contains every algorithm of the four papers, and the baselines of other papers."""

from pathlib import Path

import pytest

from fedpipe.core.components import component, registry
from fedpipe.planning import planner
from fedpipe.settings import loader, parser
from tests import small_studies as studies

PAPERS = [
    "fedavg",
    "fedprox",
    "local",
    "moon",
    "fedbabu",
    "feduv",
    "fedrep",
    "fedproto",
    "fedala",
    "perfedavg",
    "fedper",
    "feddw",
    "feddistill_plus",
    "fednova",
    "fedbn",
    "feddyn",
    "scaffold",
    "fedpvr",
    "feddual",
    "pfedme",
    "pfps_lwc",
    "fedamp",
    "fedfomo",
    "cfl",
    "ifca",
    "fednh",
    "cwfedavg",
    "ccvr",
    "fedas",
    "fedcp",
    "gpfl",
    "fedpac",
    "feddbe",
    "feddecorr",
    "fedexp",
    "fedntd",
]
BASELINES = ["ditto", "fedrod", "lg_fedavg", "fedlc", "apfl", "fedsam", "fedcm"]  #: of other papers


def test_gallery_plans_each_algorithm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(studies.ROOT)
    plan = planner.make_plan(Path("studies/gallery.yaml"))
    assert sorted(plan.algorithms) == sorted(PAPERS + BASELINES)
    assert set(PAPERS + BASELINES) == set(registry.list_components(component.ALGORITHM))
    assert [run.algorithm for run in plan.runs] == [*plan.algorithms], "one run each"
    assert len(plan.partitions) == 1
    study = parser.parse_params(loader.read_params(Path("studies/gallery.yaml")))
    assert {
        registry.get_component_name(component.ALGORITHM, type(study.algorithms[name].algorithm))
        for name in PAPERS + BASELINES
    } == set(PAPERS + BASELINES)
