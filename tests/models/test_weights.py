"""Initial weights of any model from a file, whose SHA-256 is part of the key."""

import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError, UserError
from fedpipe.core.storage import files
from fedpipe.core.storage.layout import RunFiles
from fedpipe.planning import planner
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings import parser
from tests import small_studies as studies
from tests.errors import rejects
from tests.models import published

SHAPE, CLASSES = (1, 8, 8), 10
CUSTOM_MODULE = textwrap.dedent(
    """
    from collections.abc import Callable
    from dataclasses import dataclass

    from torch import nn

    from fedpipe.algorithms.fedavg import FedAvg
    from fedpipe.models.base import Model, Network


    def make(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU()), nn.Linear(5, classes)


    @dataclass(frozen=True, kw_only=True)
    class Family(Model):
        width: int = 6

        def build(self, shape, classes):
            return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, self.width), nn.ReLU()), nn.Linear(6, classes))


    class Second(FedAvg):
        def init(self, initial_model):
            return {"model": initial_model(1)}
    """
)


@pytest.fixture(autouse=True)
def enter_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_weights.py").write_text(CUSTOM_MODULE)


def make_state(model: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """A state dict of the section's network, with random numbers."""
    family: Any = registry.parse_component(component.MODEL, model)
    return published.randomize(family.build(SHAPE, CLASSES), seed)


def make_study(model: dict[str, Any], tensors: Any = None, path: str = "start.pt", **sections: Any) -> dict[str, Any]:
    """Settings of a study whose initial model has these tensors."""
    torch.save(make_state(model) if tensors is None else tensors, path)
    settings = studies.settings(**sections)
    settings["model"] = model | {"weights": path, "sha256": files.compute_file_sha256(Path(path))}
    return settings


def compute_key(settings: dict[str, Any]) -> str:
    return RunSettings.from_params(parser.parse_params(settings), settings["study"]["algorithms"][0], 0).key


MLP = {"name": "mlp", "hidden": [16]}
MODELS = [
    MLP,
    {"name": "cnn", "channels": [4, 4], "hidden": 8, "batch_norm": True},
    {"name": "own_weights.make"},
    {"name": "own_weights.Family", "width": 6},
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_runs_start_from_tensors_of_weights_file(model: dict[str, Any], dtype: str) -> None:
    tensors = {
        name: value.double() + 1e-12 if dtype == "float64" and value.is_floating_point() else value
        for name, value in make_state(model).items()
    }
    settings = make_study(model, tensors, rounds=1, study={"seeds": [0, 1]}, federation={"dtype": dtype})
    bits = []
    for path in [str(run.path) for run in studies.prepare(settings).runs]:
        assert not CliRunner().invoke(app.app, ["segment", path, "--stop", "1"], catch_exceptions=False).exit_code
        model_tensors = files.read_pt(RunFiles(Path(path)).get_round_files(0).server_state)["model"]
        expected = {name: value for name, value in tensors.items() if not name.endswith("num_batches_tracked")}
        assert model_tensors.keys() == expected.keys()
        assert all(torch.equal(model_tensors[name], expected[name]) for name in expected)
        bits.append(files.compute_file_sha256(RunFiles(Path(path)).get_round_files(1).server_state))
    assert bits[0] != bits[1], "seeds still draw partition and batches"


def test_initial_weights_without_file_are_random() -> None:
    plain = registry.parse_component(component.MODEL, MLP)
    one, other = ({**plain.build_initial_network(SHAPE, CLASSES).state_dict()} for _ in range(2))  # type: ignore[attr-defined]
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_run_key_contains_sha256_of_weights_file_and_not_its_path() -> None:
    settings = make_study(MLP)
    Path("elsewhere").mkdir()
    shutil.copy("start.pt", "elsewhere/first.pt")
    other_settings = settings | {"model": settings["model"] | {"weights": "elsewhere/first.pt"}}
    assert compute_key(other_settings) == compute_key(settings)
    others = (make_study(MLP, make_state(MLP, 4), "other.pt"), studies.settings())
    assert len({compute_key(settings), *map(compute_key, others)}) == 3
    studies.write(settings, Path())
    planner.write_plan(planner.make_plan(Path("params.yaml")))
    studies.write(other_settings, Path())
    planner.write_plan(plan := planner.make_plan(Path("params.yaml")))
    run_yaml = yaml.safe_load((plan.runs[0].path / "run.yaml").read_text())
    assert "weights" not in run_yaml["model"]
    assert run_yaml["model"]["sha256"] == settings["model"]["sha256"]
    assert run_yaml["origin"] == {"model": {"weights": "elsewhere/first.pt"}}
    run_settings = RunSettings.read(plan.runs[0].path / "run.yaml")
    assert run_settings.build_model() == registry.parse_component(component.MODEL, other_settings["model"])


def test_algorithm_with_different_head_initializes_head_randomly() -> None:
    plan = studies.prepare(studies.settings(("fednh", "feddw"), 1) | {"model": make_study(MLP)["model"]})
    models = {}
    for run in studies.open_runs(plan):
        run.write_initial_round()
        models[run.settings.algorithm["name"]] = run.load_server_state(0)["model"]
    tensors = make_state(MLP)
    for model in models.values():
        assert all(torch.equal(model[name], tensors[name]) for name in tensors if name.startswith("body."))
    assert torch.equal(models["feddw"]["head.weight"], tensors["head.weight"])
    assert "head.bias" not in models["feddw"]
    assert not torch.equal(models["fednh"]["head.weight"], tensors["head.weight"])


# -- errors before any job ---------------------------------------------------------------------------------------------


def change_state(change: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in (make_state(MLP) | change).items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"head.bias": None}, "start.pt has no tensor 'head.bias'. The network has 4 tensors"),
        ({"fc.bias": torch.zeros(10)}, "start.pt has a tensor 'fc.bias'"),
        (
            {"head.weight": torch.zeros(10, 15)},
            "'head.weight' of start.pt is float32 of shape (10, 15). Use float32 of shape (10, 16)",
        ),
        (
            {"head.bias": torch.zeros(10, dtype=torch.int64)},
            "'head.bias' of start.pt is int64 of shape (10,). Use float32 of shape (10,)",
        ),
        ({"head.bias": torch.full((10,), torch.nan)}, "'head.bias' of start.pt contains NaN"),
        ({"head.bias": 3}, "start.pt can't be read ('head.bias' is not a tensor)"),
    ],
    ids=["missing", "extra", "shape", "integers", "nan", "number"],
)
def test_weights_of_different_network_are_rejected_with_tensor_name(tensors: dict[str, Any], message: str) -> None:
    with rejects(f"model.weights: {message}"):
        parser.parse_params(make_study(MLP, change_state(tensors)))
    parser.parse_params(make_study(MLP, change_state({})))


@pytest.mark.parametrize(
    "tensors",
    [{"head.weight": published.MaliciousPickle()}, [torch.zeros(1)], published.MaliciousPickle()],
    ids=["member", "list", "file"],
)
def test_weights_file_with_other_objects_is_rejected_and_not_executed(tensors: Any) -> None:
    with pytest.raises(SettingsError, match=r"^model\.weights: start\.pt can't be read \("):
        parser.parse_params(make_study(MLP, tensors))
    assert not Path("mischief").exists()


def test_text_file_as_weights_is_rejected() -> None:
    Path("start.pt").write_text("weights\n")
    settings = studies.settings(model={"weights": "start.pt", "sha256": files.compute_file_sha256(Path("start.pt"))})
    with pytest.raises(SettingsError, match=r"^model\.weights: start\.pt can't be read \("):
        parser.parse_params(settings)


def test_changed_weights_file_error_contains_both_hashes() -> None:
    settings = make_study(MLP)
    declared = settings["model"]["sha256"]
    torch.save(make_state(MLP, 5), "start.pt")
    actual_sha256 = files.compute_file_sha256(Path("start.pt"))
    with rejects(f"model.sha256: {declared} ... start.pt ... {actual_sha256} ... `fedpipe download`"):
        parser.parse_params(settings)


def test_run_without_weights_file_is_planned_but_not_opened() -> None:
    plan = studies.prepare(make_study(MLP))
    Path("start.pt").unlink()
    planner.make_plan(Path("params.yaml"))
    with pytest.raises(SettingsError, match=r"^model\.weights: start\.pt is missing"):
        studies.open_runs(plan)


def test_weights_file_rejects_algorithm_with_several_initial_models() -> None:
    model, two_methods = {"model": make_study(MLP)["model"]}, studies.settings(("fedavg", "ifca"))
    with pytest.raises(SettingsError, match=r"^model\.weights: .*one initial model.* ifca"):
        parser.parse_params(two_methods | model)
    parser.parse_params(two_methods)
    custom = {"algorithms": {"second": {"algorithm": "own_weights.Second"}}, "study": {"algorithms": ["second"]}}
    plan = studies.prepare(studies.settings() | model | custom)
    with pytest.raises(UserError, match=r"^model\.weights: .*one initial model.* own_weights\.Second"):
        studies.open_runs(plan)
