"""Initial weights of any model, from a file that is part of the key."""

from __future__ import annotations

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

SHAPE, CLASSES = (1, 8, 8), 10
OWN = textwrap.dedent(
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
        def init(self, fresh):
            return {"model": fresh(1)}
    """
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_weights.py").write_text(OWN)


def state(model: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """A state dict of the network of this section, with numbers of its own."""
    family: Any = registry.parse_component(component.MODEL, model)
    random = torch.Generator().manual_seed(seed)
    held = family.build(SHAPE, CLASSES).state_dict()
    return {
        name: torch.rand(value.shape, generator=random) / 10 + 0.01 if value.is_floating_point() else value
        for name, value in held.items()
    }


def study(model: dict[str, Any], tensors: Any = None, path: str = "start.pt", **sections: Any) -> dict[str, Any]:
    """A study whose model begins with these tensors."""
    torch.save(state(model) if tensors is None else tensors, path)
    settings = studies.settings(**sections)
    settings["model"] = model | {"weights": path, "sha256": files.sha256_of(Path(path))}
    return settings


def key(settings: dict[str, Any]) -> str:
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
def test_every_run_begins_with_the_files_tensors(model: dict[str, Any], dtype: str) -> None:
    tensors = {
        name: value.double() + 1e-12 if dtype == "float64" and value.is_floating_point() else value
        for name, value in state(model).items()
    }
    settings = study(model, tensors, rounds=1, study={"seeds": [0, 1]}, federation={"dtype": dtype})
    bits = []
    for path in [str(run.path) for run in studies.prepare(settings).runs]:
        assert not CliRunner().invoke(app.app, ["segment", path, "--stop", "1"], catch_exceptions=False).exit_code
        begun = files.read_pt(RunFiles(Path(path)).round(0).server_state)["model"]
        wanted = {name: value for name, value in tensors.items() if not name.endswith("num_batches_tracked")}
        assert begun.keys() == wanted.keys()
        assert all(torch.equal(begun[name], wanted[name]) for name in wanted)
        bits.append(files.sha256_of(RunFiles(Path(path)).round(1).server_state))
    assert bits[0] != bits[1], "seeds still draw partition and batches"


def test_without_a_file_weights_are_drawn() -> None:
    plain = registry.parse_component(component.MODEL, MLP)
    one, other = ({**plain.build_initial_network(SHAPE, CLASSES).state_dict()} for _ in range(2))  # type: ignore[attr-defined]
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_the_key_holds_the_files_sum_and_not_where_it_lies() -> None:
    settings = study(MLP)
    Path("elsewhere").mkdir()
    shutil.copy("start.pt", "elsewhere/first.pt")
    moved = settings | {"model": settings["model"] | {"weights": "elsewhere/first.pt"}}
    assert key(moved) == key(settings)
    assert len({key(settings), key(study(MLP, state(MLP, 4), "other.pt")), key(studies.settings())}) == 3

    studies.write(settings, Path())
    planner.write_plan(planner.make_plan(Path("params.yaml")))
    studies.write(moved, Path())
    planner.write_plan(made := planner.make_plan(Path("params.yaml")))
    held = yaml.safe_load((made.runs[0].path / "run.yaml").read_text())
    assert "weights" not in held["model"]
    assert held["model"]["sha256"] == settings["model"]["sha256"]
    assert held["origin"] == {"model": {"weights": "elsewhere/first.pt"}}
    read = RunSettings.read(made.runs[0].path / "run.yaml")
    assert read.build_model() == registry.parse_component(component.MODEL, moved["model"])


def test_the_head_of_an_algorithms_own_is_drawn_as_ever() -> None:
    made = studies.prepare(
        study(MLP, rounds=1) | studies.settings(("fednh", "feddw"), 1, model={}) | {"model": study(MLP)["model"]}
    )
    begun = {}
    for run in studies.open_runs(made):
        run.initialize()
        begun[run.settings.algorithm["name"]] = run.load_server_state(0)["model"]
    tensors = state(MLP)
    for model in begun.values():
        assert all(torch.equal(model[name], tensors[name]) for name in tensors if name.startswith("body."))
    assert torch.equal(begun["feddw"]["head.weight"], tensors["head.weight"])
    assert "head.bias" not in begun["feddw"]
    assert not torch.equal(begun["fednh"]["head.weight"], tensors["head.weight"])


# -- what is refused, before any job -----------------------------------------------------------------------------------


def wrong(change: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in (state(MLP) | change).items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"head.bias": None}, "start.pt has no tensor 'head.bias'. It must have the 4 of the network, from 'body.1."),
        (
            {"fc.bias": torch.zeros(10)},
            "start.pt has a tensor 'fc.bias', which the network does not have. It must have the",
        ),
        (
            {"head.weight": torch.zeros(10, 15)},
            "'head.weight' of start.pt is float32 of shape (10, 15). Use float32 of shape (10, 16).",
        ),
        (
            {"head.bias": torch.zeros(10, dtype=torch.int64)},
            "'head.bias' of start.pt is int64 of shape (10,). Use float32 of shape (10,).",
        ),
        (
            {"head.bias": torch.full((10,), torch.nan)},
            "'head.bias' of start.pt holds NaN or infinity; no tensor should.",
        ),
        ({"head.bias": 3}, "start.pt can't be read ('head.bias' is no tensor). Use a state dict, tensors by"),
        ({}, None),
    ],
    ids=["missing", "extra", "shape", "integers", "nan", "number", "right"],
)
def test_another_network_is_refused_by_its_first_wrong_tensor(tensors: dict[str, Any], told: str | None) -> None:
    settings = study(MLP, wrong(tensors))
    if told is None:
        parser.parse_params(settings)
        return
    with pytest.raises(SettingsError) as error:
        parser.parse_params(settings)
    assert str(error.value).startswith(f"model.weights: {told}")
    assert "\n" not in str(error.value)


class Mischief:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("mischief"),)


@pytest.mark.parametrize(
    "tensors", [{"head.weight": Mischief()}, [torch.zeros(1)], Mischief()], ids=["in", "list", "it"]
)
def test_anything_else_than_tensors_is_refused_and_never_run(tensors: Any) -> None:
    with pytest.raises(SettingsError, match=r"^model\.weights: start\.pt can't be read \("):
        parser.parse_params(study(MLP, tensors))
    assert not Path("mischief").exists()


def test_a_file_that_is_none_is_refused() -> None:
    Path("start.pt").write_text("weights\n")
    settings = studies.settings(model={"weights": "start.pt", "sha256": files.sha256_of(Path("start.pt"))})
    with pytest.raises(SettingsError, match=r"^model\.weights: start\.pt can't be read \("):
        parser.parse_params(settings)


def test_a_file_that_changed_is_refused_with_both_sums() -> None:
    settings = study(MLP)
    declared = settings["model"]["sha256"]
    torch.save(state(MLP, 5), "start.pt")
    found = files.sha256_of(Path("start.pt"))
    with pytest.raises(SettingsError) as error:
        parser.parse_params(settings)
    assert str(error.value) == (
        f"model.sha256: {declared} is declared, but start.pt is another file, with SHA-256 {found}; put the declared "
        f"one there, or, if this one is meant, remove model.sha256 and run `fedpipe download`."
    )


def test_a_run_whose_file_is_gone_is_read_but_does_not_begin() -> None:
    made = studies.prepare(study(MLP))
    Path("start.pt").unlink()
    planner.make_plan(Path("params.yaml"))
    with pytest.raises(SettingsError, match=r"^model\.weights: start\.pt is missing. Use the file with SHA-256"):
        studies.open_runs(made)


def test_a_sum_without_a_file_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^model\.sha256: there is no model\.weights that it could belong to"):
        parser.parse_params(studies.settings(model={"sha256": "0" * 64}))


def test_several_initial_models_are_refused() -> None:
    settings = study(MLP)
    several = studies.settings(("fedavg", "ifca")) | {"model": settings["model"]}
    with pytest.raises(
        SettingsError, match=r"^model\.weights: a file holds one initial model, and ifca begins with sev"
    ):
        parser.parse_params(several)
    parser.parse_params(studies.settings(("fedavg", "ifca")))
    own = studies.settings() | {
        "model": settings["model"],
        "algorithms": {"second": {"algorithm": "own_weights.Second"}},
    }
    made = studies.prepare(own | {"study": {"algorithms": ["second"]}})
    with pytest.raises(
        UserError, match=r"^model\.weights: a file holds one initial model, and own_weights\.Second begins"
    ):
        studies.open_runs(made)
