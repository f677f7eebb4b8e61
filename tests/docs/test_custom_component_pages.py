"""Plan each study, train each network and check each algorithm of docs/custom-model.md and docs/custom-algorithm.md."""

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from typing_extensions import override

from fedpipe import testing
from fedpipe.algorithms.base import Algorithm, Batch, Gradient, Pass, State, Train
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.models.base import FunctionalNetwork
from fedpipe.planning import planner
from fedpipe.settings.federation import Schedule
from tests.docs.page_blocks import blocks, read

MODELS, ALGORITHMS = "docs/custom-model.md", "docs/custom-algorithm.md"
NAMES = re.findall(r"^class (\w+)\(", read(ALGORITHMS), flags=re.M)
#: The fast checks: names, hooks and shapes, and equal results of sequential and vectorized clients.
FAST = [check for check in testing.CHECKS if check.__name__ in {"check_names", "check_hooks", "check_loop_and_stack"}]


def read_code(page: str) -> str:
    """Return the module of all Python blocks of a page."""
    return "\n\n".join(block.text for block in blocks(page) if block.language == "python")


def list_studies(page: str) -> list[str]:
    return [block.text for block in blocks(page) if block.language == "yaml"]


def import_page(page: str) -> ModuleType:
    Path("own.py").write_text(read_code(page))
    return importlib.import_module("own")


@pytest.fixture
def models(own_module: Path) -> ModuleType:
    """The page's own.py, with its file of weights for digits."""
    module = import_page(MODELS)
    body, _ = module.network((1, 8, 8), 10)
    torch.save(body.state_dict(), "backbone.pt")
    return module


@pytest.fixture
def algorithms(own_module: Path) -> ModuleType:
    """The page's own.py, with the file that it reads."""
    Path("temperature.txt").write_text("2.0\n")
    return import_page(ALGORITHMS)


@pytest.mark.parametrize("study", list_studies(MODELS))
def test_study_with_custom_model_is_planned(models: ModuleType, study: str) -> None:
    Path("params.yaml").write_text(study)
    runs = planner.make_plan(Path("params.yaml")).runs
    settings = yaml.safe_load(study)
    widths = settings["study"].get("grid", {}).get("model.width", [None])
    assert len(runs) == len(settings["study"]["algorithms"]) * len(widths)


@pytest.mark.parametrize("name", ["own.network", "own.Wide", "own.pretrained"])
def test_custom_models_have_body_and_head(models: ModuleType, name: str) -> None:
    family: Any = registry.parse_component(component.MODEL, {"name": name})
    net = FunctionalNetwork(lambda: family.build_initial_network((1, 8, 8), 10))
    model = net.make_initial_model(0)
    assert net(model, torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert set(net.head_names) == {"head.weight", "head.bias"}
    if name == "own.pretrained":
        weights = torch.load("backbone.pt", weights_only=True)
        assert torch.equal(model["body.0.weight"], weights["0.weight"]), "the file has the weights of the body"
        assert not torch.equal(model["head.weight"], net.make_initial_model(1)["head.weight"]), "seeds change the head"


def test_map_of_custom_algorithm_page_lists_all_its_algorithms(algorithms: ModuleType) -> None:
    page = read(ALGORITHMS)
    assert set(NAMES) == set(re.findall(r"\| \[(\w+)\]\(#", page))
    assert len(NAMES) > 6


@pytest.mark.parametrize("name", NAMES)
def test_algorithm_of_page_passes_fast_contract_checks(algorithms: ModuleType, name: str) -> None:
    algorithm: Algorithm = getattr(algorithms, name)()
    assert [message for check in FAST for message in check(algorithm)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_algorithm_of_page_passes_all_contract_checks(algorithms: ModuleType, name: str) -> None:
    assert testing.check_algorithm(getattr(algorithms, name)()) == []


@pytest.mark.parametrize("study", list_studies(ALGORITHMS))
def test_study_with_custom_algorithm_is_planned(algorithms: ModuleType, study: str) -> None:
    Path("params.yaml").write_text(study)
    assert len(planner.make_plan(Path("params.yaml")).runs) == 1 + 2


@dataclass(frozen=True, kw_only=True)
class PlainSteps(FedAvg):
    """Steps along the gradient at a fixed rate."""

    @override
    def local_passes(self) -> Sequence[Pass]:
        return (Train(self.loss, step=self.step),)

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        g = gradient(client)
        return client | {"model": client["model"] | (client["model"].only(g) - 0.1 * g)}


@dataclass(frozen=True, kw_only=True)
class DescendingSteps(PlainSteps):
    """Steps of the federation's optimizer."""

    @override
    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        return gradient.descend(client, gradient(client))


def test_federation_settings_change_descend_but_not_gradient() -> None:
    """The page's table lists these settings."""
    changes: dict[str, Any] = {
        "clip_norm": 0.001,
        "weight_decay": 0.5,
        "optimizer": "adam",
        "momentum": 0.9,
        "learning_rate": 0.3,
        "schedule": Schedule(name="exponential", gamma=0.5),
    }
    rows = re.findall(r"^\| (`[^|]*) \| no", read(ALGORITHMS), flags=re.M)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [*changes]

    def train(algorithm: Algorithm, **federation: Any) -> Any:
        return testing.make_trial(algorithm, **federation).run(2).server["model"]

    plain, descending = train(PlainSteps()), train(DescendingSteps())
    testing.assert_same(descending, train(FedAvg()))
    for key, value in changes.items():
        testing.assert_same(train(PlainSteps(), **{key: value}), plain)
        assert testing.describe_difference(train(DescendingSteps(), **{key: value}), descending), key
