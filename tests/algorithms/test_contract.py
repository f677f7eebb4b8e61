"""Tests of all packaged algorithms: the checks of `fedpipe check`, and the expectations of each algorithm.

A new algorithm is tested as soon as its file exists. Its test ``tests/algorithms/test_NAME.py`` declares its
expectations as ``EXPECTED``, such as its traffic and the parameters that switch it off.
"""

import functools
import importlib
import re

import pytest

from fedpipe import testing
from fedpipe.core.components import component, registry
from fedpipe.engine import contract
from fedpipe.settings import study
from fedpipe.settings.federation import Federation
from fedpipe.testing import checks
from tests import small_studies as studies
from tests.algorithms.expected import EXPECTATIONS, Expected, check_expectations

ALGORITHMS = registry.list_components(component.ALGORITHM)


def build_algorithm(name, **parameters):
    return registry.build_component(component.ALGORITHM, name, parameters)


def read_expectations(name):
    """Read the expectations in an algorithm's test. Fail if there are none."""
    try:
        expectations = getattr(importlib.import_module(f"test_{name}"), "EXPECTED", None)
    except ModuleNotFoundError:
        expectations = None
    if not isinstance(expectations, Expected):
        pytest.fail(
            f"tests/algorithms/test_{name}.py: EXPECTED is missing. Define an Expected of tests/algorithms/expected.py "
            f"with the traffic of {name} and the parameters that switch off what it adds.",
            pytrace=False,
        )
    return expectations


#: Checks that train for half a second. `make test` has them only for the representative methods.
LONG_CHECKS = {
    *(checks.check_loop_and_stack_with_adam, checks.check_evaluation, checks.check_batch_normalization),
    *(checks.check_training_in_blocks, checks.check_missing_classes, checks.check_loop_and_stack_with_convolutions),
}
CONTRACT = [
    pytest.param(
        name,
        check,
        id=f"{name}-{testing.get_check_title(check)}",
        marks=[pytest.mark.slow] if check in LONG_CHECKS and name not in studies.REPRESENTATIVE else [],
    )
    for name in ALGORITHMS
    for check in testing.CHECKS
    if check is not checks.check_hooks
]


@pytest.mark.parametrize(("name", "check"), CONTRACT)
def test_algorithm_satisfies_contract(name, check):
    assert check(build_algorithm(name, **read_expectations(name).parameters)) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_satisfies_check_of_hooks_and_grid_axes_cannot_use_its_metrics(name, monkeypatch):
    """The plan reserves the names of all metrics except those with a dot, because axis names have no dot."""
    names, validate = [], contract.validate_metrics
    monkeypatch.setattr(
        contract, "validate_metrics", lambda algorithm, metrics: names.extend(metrics) or validate(algorithm, metrics)
    )
    assert checks.check_hooks(build_algorithm(name, **read_expectations(name).parameters)) == []
    assert {metric for metric in names if "." not in metric} <= {*study.TABLE_COLUMNS}


@pytest.mark.parametrize("expectation", EXPECTATIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_meets_expectation(name, expectation):
    assert check_expectations(functools.partial(build_algorithm, name), read_expectations(name), expectation) == []


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if build_algorithm(name).needs_sgd])
def test_sgd_algorithm_accepts_adam_in_loop_and_stack(name):
    """Algorithms that need SGD accept Adam with ``adam: true``."""
    assert (
        checks.check_loop_and_stack_with_adam(build_algorithm(name, **read_expectations(name).parameters, adam=True))
        == []
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_weighting_is_ignored_only_by_methods_of_its_description(model):
    """They train equal bits with weights by samples and with equal weights, on clients of unequal sizes."""
    ignoring = set()
    for name in ALGORITHMS:
        algorithm = build_algorithm(name, **read_expectations(name).parameters)
        by_count, uniform = (testing.make_trial(algorithm, model, weighting=key).run(2) for key in ("count", "uniform"))
        assert len(set(by_count.clients.sizes)) > 1
        states = ((trial.server, trial.client_states) for trial in (by_count, uniform))
        if testing.describe_difference(*states) is None:
            ignoring.add(name)
    description = Federation.model_fields["weighting"].description
    assert "fedas (except on BatchNorm)" in description
    named = {name for name in ALGORITHMS if re.search(rf"\b{name}\b", description)}
    assert ignoring == (named - {"fedas"} if model == "norm" else named)


def test_missing_expectations_file_fails_with_message():
    with pytest.raises(pytest.fail.Exception, match=r"^tests/algorithms/test_nowhere\.py: EXPECTED is missing"):
        read_expectations("nowhere")


def test_check_expectations_reports_unmet_expectations():
    """Check FedAvg with wrong traffic, an unneeded exception, and unknown names."""
    model_traffic = [({}, lambda n: (n.all, n.all))]
    fedavg = functools.partial(build_algorithm, "fedavg")
    expectations = Expected(traffic=model_traffic, centralized={})
    assert check_expectations(fedavg, expectations, "traffic") == []
    wrong_traffic = Expected(traffic=[({}, lambda n: (n.all, n.body))], centralized={})
    (message,) = check_expectations(fedavg, wrong_traffic, "traffic")
    assert message.startswith("traffic: (512, 512) bytes")
    assert "(512, 288)" in message
    wrong_exception = Expected(traffic=model_traffic, centralized={}, exceptions={"class_names": "for no reason"})
    (message,) = check_expectations(fedavg, wrong_exception, "class_names")
    assert message.startswith("class_names: ")
    assert "for no reason" in message
    fedprox = functools.partial(build_algorithm, "fedprox")
    (message,) = check_expectations(fedprox, expectations, "centralized")
    assert message.startswith("centralized: a single client trains another model")
    with pytest.raises(ValueError, match=r"^exceptions: 'U3' .*: equal_uploads, centralized, no_learning"):
        Expected(traffic=model_traffic, centralized={}, exceptions={"U3": "for no reason"})
    with pytest.raises(ValueError, match=r"^traffic: empty"):
        Expected(traffic=[], centralized={})
