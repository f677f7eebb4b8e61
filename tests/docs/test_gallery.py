"""The gallery contains every algorithm."""

from pathlib import Path

import pytest

from fedpipe.core.components import component, registry
from fedpipe.planning import planner
from fedpipe.settings import loader, parser
from tests import small_studies as studies

GALLERY = Path("studies/gallery.yaml")


def test_gallery_plans_each_algorithm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(studies.ROOT)
    plan = planner.make_plan(GALLERY)
    names = registry.list_components(component.ALGORITHM)
    assert sorted(plan.algorithms) == sorted(names)
    assert [run.algorithm for run in plan.runs] == [*plan.algorithms], "one run each"
    assert len(plan.partitions) == 1
    methods = parser.parse_params(loader.read_params(GALLERY)).algorithms
    for name in names:
        assert registry.get_component_name(component.ALGORITHM, type(methods[name].algorithm)) == name
