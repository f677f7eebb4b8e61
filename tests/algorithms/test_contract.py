"""What holds for every algorithm: the packaged ones go through the checks that `fedpipe check` has for anybody's.

An algorithm that is added is tested as soon as its file is there. What is expected of it beyond the contract (traffic,
and what is left where it is switched off) it says in its own test, ``tests/algorithms/test_NAME.py``, as ``EXPECTED``.
"""

from __future__ import annotations

import functools
import importlib

import pytest

from fedpipe import testing
from fedpipe.core.components import component, registry
from fedpipe.engine import contract
from fedpipe.settings import study
from fedpipe.testing import Expected, checks, expected

ALGORITHMS = registry.list_components(component.ALGORITHM)


def build(name, **parameters):
    return registry.build_component(component.ALGORITHM, name, parameters)


def expected_of(name):
    """What an algorithm's own test says; where it says nothing, the algorithm's tests fail."""
    try:
        declared = getattr(importlib.import_module(f"test_{name}"), "EXPECTED", None)
    except ModuleNotFoundError:
        declared = None
    if not isinstance(declared, Expected):
        pytest.fail(
            f"tests/algorithms/test_{name}.py: EXPECTED is missing. Use fedpipe.testing.Expected, with the "
            f"traffic of {name} and the parameters that switch off what it adds.",
            pytrace=False,
        )
    return declared


@pytest.mark.parametrize("check", testing.CHECKS, ids=testing.title)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_keeps_the_contract(name, check):
    assert check(build(name, **expected_of(name).parameters)) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_axis_of_a_grid_can_be_called_as_what_it_records(name, monkeypatch):
    """The plan knows the names of all metrics, but for those with a dot, which no axis has."""
    recorded = []
    monkeypatch.setattr(contract, "validate_metrics", lambda _, given: recorded.extend(given) or dict(given))
    assert checks.check_hooks(build(name, **expected_of(name).parameters)) == []
    assert {metric for metric in recorded if "." not in metric} <= {*study.TABLE_COLUMNS}


@pytest.mark.parametrize("expectation", expected.EXPECTATIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_does_what_is_expected_of_it(name, expectation):
    assert testing.check_expected(functools.partial(build, name), expected_of(name), expectation) == []


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if build(name).needs_sgd])
def test_what_needs_sgd_can_be_told_to_obey(name):
    """The algorithms whose theory asks for SGD take Adam where that is insisted on."""
    assert checks.check_loop_and_stack_with_adam(build(name, **expected_of(name).parameters, adam=True)) == []


def test_the_parameters_of_a_file_that_is_missing_are_demanded():
    with pytest.raises(pytest.fail.Exception, match=r"^tests/algorithms/test_nowhere\.py: EXPECTED is missing; it"):
        expected_of("nowhere")


def test_what_is_expected_is_checked():
    """Of a method that is FedAvg: wrong traffic, an exception that holds after all, and names that don't exist."""
    whole = [({}, lambda n: (n.all, n.all))]
    fedavg = functools.partial(build, "fedavg")
    right = Expected(traffic=whole, centralized={})
    assert testing.check_expected(fedavg, right, "traffic") == []
    assert testing.check_expected(
        fedavg, Expected(traffic=[({}, lambda n: (n.all, n.body))], centralized={}), "traffic"
    ) == ["traffic: [(512, 512)] bytes are counted with {}, not (512, 288)"]
    excepted = Expected(traffic=whole, centralized={}, exceptions={"class_names": "of no reason"})
    assert testing.check_expected(fedavg, excepted, "class_names") == [
        "class_names: holds, although it should not (of no reason); strike that exception."
    ]
    fedprox = functools.partial(build, "fedprox")
    assert testing.check_expected(fedprox, right, "centralized")[0].startswith("centralized: one client alone trains")
    with pytest.raises(ValueError, match=r"^exceptions: 'U3' is not one of equal_uploads, centralized, no_learning"):
        Expected(traffic=whole, centralized={}, exceptions={"U3": "of no reason"})
    with pytest.raises(ValueError, match=r"^traffic: empty. Use numbers down and up, as \[\("):
        Expected(traffic=[], centralized={})
