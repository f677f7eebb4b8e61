"""Each setting of local training changes each method's result, is an error, or its description names the method."""

import re
from typing import Any

import pytest

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.settings import parser
from fedpipe.settings.federation import Federation
from fedpipe.testing import describe_difference, make_trial
from tests import small_studies as studies

SETTINGS: dict[str, dict[str, Any]] = {
    "learning_rate": {"learning_rate": 0.04},
    "optimizer": {"optimizer": "adam"},
    "momentum": {"momentum": 0.5},
    "weight_decay": {"weight_decay": 0.01},
    "clip_norm": {"clip_norm": 0.1},
    "schedule": {"schedule": {"name": "exponential", "gamma": 0.5}},
    "local_epochs": {"local_epochs": 1},
    "local_steps": {"local_epochs": None, "local_steps": 1},
    "batch_size": {"batch_size": 3},
    "participation": {"participation": 0.75},
    "weighting": {"weighting": "uniform"},
    "server": {"server": {"learning_rate": 0.5}},
}
#: Values other than the default, so that two rounds use all parts of a method, and CCVR is fast.
PARAMETERS = {"ccvr": {"samples": 10}, "fedala": {"passes": 2}, "pfedme": {"attraction": 5.0}}


def is_rejected(name: str, settings: dict[str, Any]) -> bool:
    params = studies.settings((name,), algorithms={name: PARAMETERS.get(name, {})})
    params["federation"] |= settings
    try:
        parser.parse_params(params)
    except SettingsError:
        return True
    return False


def train(name: str, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Train for two rounds. Return the states of the server and of the clients."""
    algorithm = registry.build_component(component.ALGORITHM, name, PARAMETERS.get(name, {}))
    trial = make_trial(algorithm, **settings).run(2)
    return trial.server, trial.client_states


def find_named_methods(key: str) -> set[str]:
    """Find the methods that the description of a setting names as those without an effect."""
    description = Federation.model_fields[key].description or ""
    sentence = re.search(r"no effect on ([^.]*)\.", description)
    names = re.sub(r"\([^)]*\)", "", sentence[1]) if sentence else ""
    return set(re.findall(r"\w+", names)) & set(registry.list_components(component.ALGORITHM))


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.list_components(component.ALGORITHM))
def test_setting_changes_result_or_names_method(name: str) -> None:
    reference = train(name, {})
    for key, settings in SETTINGS.items():
        if is_rejected(name, settings):
            continue
        has_effect = describe_difference(reference, train(name, settings)) is not None
        assert has_effect == (name not in find_named_methods(key)), key
