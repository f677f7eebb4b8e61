"""Runs, run keys and files of a plan."""

import dataclasses
import importlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpipe.core.components import component, registry
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import compute_file_sha256
from fedpipe.planning import code_changes, planner
from fedpipe.planning.plan import Plan
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings import federation, loader, methods, parser
from fedpipe.settings.report import Report
from tests import small_studies as studies
from tests.errors import rejects
from tests.planning.custom_components import CUSTOM_COMPONENTS

pytestmark = pytest.mark.usefixtures("in_empty_folder")

DERIVED_CLASS = '''

@dataclass(frozen=True, kw_only=True)
class Base(FedAvg):
    mu: float = 0.01
    sizes: tuple[int, ...] = field(default_factory=tuple)
    twice: float = field(init=False)

    def __post_init__(self, *_):
        object.__setattr__(self, "twice", 2 * self.mu)


@dataclass(frozen=True, kw_only=True)
class Prox(Base):
    """FedAvg with parameters of its base class."""
'''


def make_plan(settings: dict[str, Any]) -> NewPlan:
    studies.write(settings, Path())
    return planner.make_plan(Path("params.yaml"))


def make_study(labels: tuple[str, ...] = ("fedavg",), **values: Any) -> dict[str, Any]:
    """Return the test study with other values. Two underscores in a keyword mean a dot in the key."""
    return loader.override_settings(
        studies.settings(labels), {key.replace("__", "."): value for key, value in values.items()}
    )


def compute_key(settings: dict[str, Any], label: str = "fedavg", seed: int = 0) -> str:
    return RunSettings.from_params(parser.parse_params(settings), label, seed).key


# -- run keys ----------------------------------------------------------------------------------------------------------


def reverse_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: reverse_keys(part) for name, part in reversed(value.items())}
    return value


def test_run_key_ignores_order_of_yaml_keys() -> None:
    settings = make_study(("fedavg", "feddw"), algorithms__feddw={"mu": 0.5, "mode": "code"})
    backwards = reverse_keys(settings)
    assert list(backwards) != list(settings)
    for label in ("fedavg", "feddw"):
        assert compute_key(backwards, label) == compute_key(settings, label)


FEDPROX, STEP, YOGI = "algorithms.fedprox", {"name": "step", "step_size": 3}, {"optimizer": "yogi"}
DRIFT: dict[str, Any] = {"round": 2, "clients": [1, 4], "label_map": {1: 2, 2: 1}}
#: Settings in a row have the same run key, and rows have different keys.
EQUAL_SETTINGS: list[list[dict[str, Any]]] = [
    [  # the study itself: other spellings, explicit defaults, and settings that do not change results
        {},
        {"federation.learning_rate": "1e-1"},
        {FEDPROX: {"mu": 0.01}},
        {FEDPROX: {"algorithm": "fedprox"}},
        {FEDPROX: {"algorithm": "fedpipe.algorithms.fedprox.FedProx"}},
        {"federation.schedule": {"name": "constant", "warmup": 0}},
        {"federation.local_epochs": 1, "federation.local_steps": None, "federation.clip_norm": None},
        {"federation.server": {}},
        {"federation.server": {"optimizer": "sgd"}},
        {"federation.server": {"learning_rate": 1.0}},
        {"federation.server": {"optimizer": "sgd", "learning_rate": 1}},
        {"federation.held_out": 0},
        {"federation.held_out": 0.0, "federation.drift": None},
        {"dataset": {"test_fraction": 0.3, "stratified": True, "validation_fraction": 0}},  # of an official split
        {"evaluation.metrics": ["nll", "accuracy"]},
        {"evaluation.finetune_epochs": 5},
        {"evaluation.protocols": ["personal-on-local", "global-on-global"]},
        {"federation.rounds": 8},
        {"study.seeds": [0, 1]},
        {"artifacts.keep_models": "last"},
        {"report": {"round": "best", "clients": "seen"}},
        {"report": {"statistics": ["worst_tenth", "difference"], "target": 0.7, "baseline": "fedprox"}},
        {"execution": {"rounds_per_job": 1, "clients_per_job": 3, "stack": 4, "graphs": False}},
    ],
    [{f"{FEDPROX}.mu": 0.5}],
    [{f"{FEDPROX}.mu": 1}, {f"{FEDPROX}.mu": 1.0}],
    [{FEDPROX: {"algorithm": "feddw"}}],
    [{FEDPROX: {"algorithm": "feddw", "mode": "code"}}],
    [{FEDPROX: {"algorithm": "cwfedavg"}}],
    [{FEDPROX: {"algorithm": "cwfedavg", "class_wise": 2}}],
    [{"partition.alpha": 10}, {"partition.alpha": 10.0}],
    [{"federation.participation": 1}, {"federation.participation": 1.0}],
    [{"federation.learning_rate": 0.001}, {"federation.learning_rate": "1e-3"}],
    [{"model": {"name": "mlp"}}, {"model": {"name": "mlp", "hidden": [64]}}],
    [{"dataset.split": "pooled"}],
    [{"dataset": {"split": "pooled", "stratified": True}}],
    [{"dataset.validation_fraction": 0.1}],
    [{"dataset": {"validation_fraction": 0.1, "stratified": True}}],
    [{"evaluation.protocols": ["finetuned-on-local"]}],
    [{"evaluation": {"protocols": ["finetuned-on-local"], "finetune_epochs": 5}}],
    [{"evaluation.metrics": ["auc"]}, {"evaluation.metrics": ["accuracy", "auc", "nll"]}],
    [{"evaluation.metrics": ["ece"]}],
    [{"evaluation.metrics": ["auc", "ece"]}, {"evaluation.metrics": ["ece", "accuracy", "auc"]}],
    [{"federation.server": {"optimizer": "momentum"}}],
    [{"federation.server": {"optimizer": "adam", "learning_rate": 0.01}}],
    [{"federation.server": {"learning_rate": 0.5}}],
    [
        {"federation.server": YOGI},
        {"federation.server": YOGI | {"learning_rate": 1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}},
        {"federation.server": YOGI | {"momentum": None}},
    ],
    [{"federation.server": YOGI | {"beta1": 0.8}}],
    [{"federation.schedule": {"warmup": 2}}],
    [{"federation.schedule": STEP}, {"federation.schedule": STEP | {"gamma": 0.1}}],
    [{"federation.schedule": STEP | {"gamma": 0.5}}],
    [{"federation.schedule": {"name": "exponential", "gamma": 0.5}}],
    [{"federation.schedule": {"name": "cosine", "period": 9}, "federation.rounds": rounds} for rounds in (4, 40)],
    [{"federation.held_out": [1, 4]}, {"federation.held_out": [4, 1]}],
    [{"federation.held_out": [1, 5]}],
    *(
        [{"federation.drift": {"round": 2} | drift}]
        for drift in ({}, {"round": 3}, {"clients": 0.2}, {"clients": [1, 4]})
    ),
    [{"federation.drift": {"round": 2, "label_map": {1: 2, 2: 1}}}],
    [
        {"federation.drift": DRIFT, "federation.rounds": 4},
        {"federation.drift": DRIFT, "federation.rounds": 8},
        {"federation.drift": DRIFT | {"clients": [4, 1], "label_map": {2: 1, 1: 2}, "kind": "labels", "angle": None}},
        {"federation.drift": DRIFT | {"label_map": {0: 0, 2: 1, 1: 2}}},
    ],
    [{"federation.drift": {"round": 2, "kind": "rotation"} | angle} for angle in ({}, {"angle": 180})],
    [{"federation.drift": {"round": 2, "kind": "rotation", "angle": 90}}],
    [{"partition": {"scheme": "iid"}}],
    [{"partition.alpha": 0.4}],
    [{"partition.minimum": 2}],
    [{"partition.seed": 3}],
    [{"model": {"name": "cnn"}}],
    [{"model.hidden": [17]}],
    [{"evaluation.protocols": ["global-on-global"]}],
    [{"evaluation.every": 2}],
    [{"federation.clients": 11}],
    [{"federation.participation": 0.6}],
    [{"federation.local_epochs": 2}],
    [{"federation.local_steps": 5}],
    [{"federation.clip_norm": 1.0}],
    [{"federation.batch_size": 39}],
    [{"federation.optimizer": "adam"}],
    [{"federation.learning_rate": 0.11}],
    [{"federation.momentum": 0.5}],
    [{"federation.weight_decay": 0.001}],
    [{"federation.weighting": "uniform"}],
    [{"federation.dtype": "float64"}],
]


def test_settings_have_equal_run_keys_only_in_same_row() -> None:
    study = make_study(("fedprox",))
    keys = [{compute_key(loader.override_settings(study, each), "fedprox") for each in row} for row in EQUAL_SETTINGS]
    assert [row for row, found in zip(EQUAL_SETTINGS, keys, strict=True) if len(found) > 1] == []
    assert len(set.union(*keys)) == len(keys)


def test_run_key_depends_on_seed() -> None:
    assert len({compute_key(make_study(), seed=seed) for seed in range(5)}) == 5


def test_run_key_contains_all_federation_fields_except_rounds() -> None:
    content = RunSettings.from_params(parser.parse_params(make_study()), "fedavg", 0).federation
    assert set(content) == set(federation.Federation.model_fields) - {"rounds", "held_out", "drift"}  # off


def test_run_key_of_defaults_contains_no_setting_that_is_off() -> None:
    """So a setting that is added later changes no key of runs without it."""
    params = parser.parse_params({"study": {"algorithms": ["fedavg"]}})
    settings = dataclasses.asdict(RunSettings.from_params(params, "fedavg", 0))
    for name in ("dataset", "partition", "model", "algorithm"):
        del settings[name]["code"]
    assert settings == {
        "dataset": {
            "name": "digits",
            "split": "official",
            "validation_fraction": 0.0,
            "sha256": "6c22173b92213b98d63c5dfb1ef609779fcc73b493cacdd73b16ddcecde4bec9",
        },
        "transforms": {"mean": [], "std": [], "crop": 0, "flip": False, "rotation": 0.0, "on_test": False},
        "partition": {"scheme": "dirichlet", "seed": None, "alpha": 0.5, "minimum": 1},
        "model": {
            "name": "cnn",
            "weights": None,
            "sha256": None,
            "channels": [16, 32],
            "hidden": 64,
            "batch_norm": False,
            "bias": True,
        },
        "algorithm": {"name": "fedavg"},
        "federation": {
            "clients": 10,
            "participation": 1.0,
            "local_epochs": 1,
            "local_steps": None,
            "batch_size": 32,
            "optimizer": "sgd",
            "learning_rate": 0.05,
            "schedule": {"name": "constant", "warmup": 0},
            "clip_norm": None,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "weighting": "count",
            "buffers": "average",
            "server": {"optimizer": "sgd", "learning_rate": 1.0},
            "dtype": "float32",
            "precision": "full",
        },
        "evaluation": {"protocols": ["global-on-global", "personal-on-local"], "every": 1},
        "seed": 0,
        "origin": {},
    }


def test_run_key_contains_color_of_padding_only_if_it_is_black_and_has_effect() -> None:
    """The runs of version 0.2.0 are padded with the mean color. Their keys do not contain it."""

    def make_settings(**transforms: Any) -> RunSettings:
        return RunSettings.from_params(parser.parse_params(make_study() | {"transforms": transforms}), "fedavg", 0)

    plain, mean, black = make_settings(flip=True), make_settings(crop=2, fill="mean"), make_settings(rotation=10)
    assert "fill" not in plain.transforms
    assert make_settings(flip=True, fill="mean").key == plain.key
    assert "fill" not in mean.transforms
    assert mean.build_transforms_settings().fill == "mean"
    assert black.transforms["fill"] == black.build_transforms_settings().fill == "black"
    assert make_settings(rotation=10, fill="mean").key != black.key


def test_run_key_ignores_hyperparameters_of_other_algorithms() -> None:
    settings = make_study(("fedavg", "fedprox"))
    assert compute_key(loader.override_settings(settings, {"algorithms.fedprox.mu": 9})) == compute_key(settings)


@pytest.mark.parametrize("section", ["algorithm", "model", "partition", "dataset"])
def test_run_key_depends_on_code_of_each_component(section: str) -> None:
    settings = RunSettings.from_params(parser.parse_params(make_study()), "fedavg", 0)
    described = getattr(settings, section)
    assert re.fullmatch("[0-9a-f]{12}", described["code"])
    assert dataclasses.replace(settings, **{section: described | {"code": "0" * 12}}).key != settings.key


# -- runs and cells ----------------------------------------------------------------------------------------------------


def test_plan_is_product_of_algorithms_seeds_and_grid() -> None:
    grid = {"partition.alpha": [0.1, 0.5], "federation.learning_rate": [0.1, 0.2]}
    plan = make_plan(make_study(("fedavg", "fedprox"), study__seeds=[0, 1, 2], study__grid=grid))
    runs = {(cell.algorithm, cell.seed, *cell.grid.values()) for cell in plan.cells}
    assert len(plan.runs) == len(runs) == 2 * 3 * 2 * 2
    assert len({str(run.path) for run in plan.runs}) == len(runs)
    assert len(plan.partitions) == 3 * 2
    assert {run.partition for run in plan.runs} == set(plan.partitions)


def test_grid_of_one_algorithm_does_not_multiply_other_algorithms() -> None:
    grid = {"algorithms.fedprox.mu": [0.1, 1.0, 10.0]}
    plan = make_plan(make_study(("fedavg", "fedprox"), study__seeds=[0, 1], study__grid=grid))
    grids = [cell.grid for cell in plan.cells if cell.algorithm == "fedavg"]
    assert grids == [{}, {}]
    mus = [cell.grid["algorithms.fedprox.mu"] for cell in plan.cells if cell.algorithm == "fedprox"]
    assert sorted(mus) == [0.1, 0.1, 1.0, 1.0, 10.0, 10.0]


def test_grid_over_algorithm_entries_has_distinct_points() -> None:
    """Otherwise the table treats different hyperparameters as seeds of one setting."""
    plan = make_plan(make_study(("fedprox",), study__grid={"algorithms.fedprox": [{"mu": 0.1}, {"mu": 1.0}]}))
    points = [str(cell.grid) for cell in plan.cells]
    assert len(points) == len(set(points)) == 2


def test_grid_points_with_equal_run_keys_are_one_run_and_several_cells() -> None:
    """With the official split, no run depends on the test fraction of the pooled split."""
    grid = {"dataset.test_fraction": [0.2, 0.3], "algorithms.fedprox.mu": [0.1, 1.0]}
    plan = make_plan(make_study(("fedavg", "fedprox"), study__grid=grid))
    assert [run.algorithm for run in plan.runs] == ["fedavg", "fedprox", "fedprox"]
    assert len({str(run.path) for run in plan.runs}) == 3
    shares = [cell.grid["dataset.test_fraction"] for cell in plan.cells if cell.algorithm == "fedavg"]
    assert shares == [0.2, 0.3]
    assert len(plan.cells) == 2 + 4
    assert {(cell.algorithm, cell.key) for cell in plan.cells} == {(run.algorithm, run.key) for run in plan.runs}


ENVIRONMENT: dict[str, Any] = {
    "mild": {"partition.alpha": 0.5, "federation.participation": 1.0},
    "harsh": {"partition.alpha": 0.1},
}
DATA: dict[str, Any] = {
    "digits": {},
    "flat MNIST/2": {
        "dataset": {"name": "mnist"},
        "model": {"name": "mlp", "hidden": [4]},
        "federation.rounds": 6,
        "algorithms.fedprox.mu": 0.5,
    },
}


def test_grid_axis_changes_its_keys_together() -> None:
    """Each run equals the run of a study with these keys and without a grid."""
    grid = {"environment": ENVIRONMENT, "data": DATA, "federation.learning_rate": [0.1, 0.2]}
    plan = make_plan(make_study(("fedavg", "fedprox"), study__seeds=[0, 1], study__grid=grid))
    assert len(plan.cells) == len(plan.runs) == 2 * 2 * 2 * 2 * 2
    names = {"environment": ["mild", "harsh"], "data": ["digits", "flat MNIST/2"]}
    assert plan.grid == {**names, "federation.learning_rate": [0.1, 0.2]}
    runs = {run.key: run for run in plan.runs}
    for cell in plan.cells:
        point = cell.grid
        changes = ENVIRONMENT[point["environment"]] | DATA[point["data"]]
        alone = make_study(("fedavg", "fedprox"), federation__learning_rate=point["federation.learning_rate"])
        assert cell.key == compute_key(loader.override_settings(alone, changes), cell.algorithm, cell.seed)
        assert (cell.rounds, runs[cell.key].dataset.split("-")[0]) == ((4, "digits"), (6, "mnist"))[
            point["data"] != "digits"
        ]
    assert {run.participants for run in plan.runs} == {5, 10}


def test_grid_axis_value_does_not_keep_settings_of_previous_value() -> None:
    first, second = make_plan(make_study(study__grid={"data": dict(reversed(DATA.items()))})).runs
    assert (first.rounds, second.rounds) == (6, 4)
    assert second.key == compute_key(make_study())


def test_grid_axis_of_one_algorithm_does_not_multiply_other_algorithms() -> None:
    mu = {"weak": {"algorithms.fedprox.mu": 0.1}, "strong": {"algorithms.fedprox.mu": 1.0}, "own": {}}
    cells = make_plan(make_study(("fedavg", "fedprox", "pfps_lwc"), study__grid={"pull": mu})).cells
    grids = {cell.algorithm: cell.grid for cell in cells if cell.algorithm != "fedprox"}
    assert grids == {"fedavg": {}, "pfps_lwc": {}}
    assert len(cells) == 2 + 3
    assert [cell.grid["pull"] for cell in cells if cell.algorithm == "fedprox"] == ["weak", "strong", "own"]


def test_algorithm_overrides_change_only_runs_of_their_algorithm() -> None:
    """The runs equal those of a study with these keys for all methods. Runs of other methods do not change."""
    settings = make_study(("fedavg", "scaffold"), federation__optimizer="adam")
    settings["algorithms"]["scaffold"] = {"overrides": {"federation.optimizer": "sgd", "federation.rounds": 6}}
    first, second = make_plan(settings).runs
    assert first.key == compute_key(make_study(federation__optimizer="adam"))
    assert second.key == compute_key(make_study(("scaffold",)), "scaffold")
    assert (first.rounds, second.rounds) == (4, 6)
    assert first.partition == second.partition
    with rejects("federation.optimizer: adam can't be used with scaffold"):
        make_plan(settings | {"algorithms": {}})


def test_algorithm_overrides_take_precedence_over_grid() -> None:
    settings = make_study(
        ("fedavg", "fedprox"),
        algorithms__fedprox={"overrides": {"model.hidden": [4]}},
        study__grid={"data": {"A": {}, "B": {"model": {"name": "mlp", "hidden": [8]}}}},
    )
    keys = {(cell.algorithm, cell.grid["data"]): cell.key for cell in make_plan(settings).cells}
    own_key = compute_key(make_study(("fedprox",), model__hidden=[4]), "fedprox")
    assert keys["fedprox", "A"] == keys["fedprox", "B"] == own_key
    assert keys["fedavg", "B"] == compute_key(make_study(model__hidden=[8]))


def test_run_key_ignores_reported_protocol_of_method() -> None:
    settings = make_study(("fedavg", "fedprox"))
    settings["algorithms"]["fedprox"] = {"protocol": "personal-on-local"}
    plan = make_plan(settings)
    assert plan.method_protocols == {"fedprox": "personal-on-local"}
    assert [run.key for run in plan.runs] == [run.key for run in make_plan(make_study(("fedavg", "fedprox"))).runs]


def test_method_title_changes_report_fingerprint_but_no_runs() -> None:
    settings = make_study(("fedavg", "fedprox"))
    plain = make_plan(settings)
    settings["algorithms"]["fedprox"] = {"title": "FedProx (μ = 0.01)"}
    plan = make_plan(settings)
    assert [plan.get_method_title(label) for label in plan.algorithms] == ["FedAvg", "FedProx (μ = 0.01)"]
    assert (plan.runs, plan.cells, plan.file_texts) == (plain.runs, plain.cells, plain.file_texts)
    assert plan.report_fingerprint != plain.report_fingerprint
    planner.write_plan(plan)
    assert Plan.read(plan.study_files.plan).titles == plan.titles
    assert plain.titles == {"fedavg": "FedAvg", "fedprox": "FedProx"}


@pytest.mark.parametrize("name", registry.list_components(component.ALGORITHM))
def test_every_algorithm_has_display_name(name: str) -> None:
    title = methods.get_method_title(name, methods.parse_method({}, name))
    assert title != name
    assert re.sub(r"[^a-z]", "", title.lower()) == name.replace("_", "").removesuffix("plus")


def test_display_name_without_docstring_is_name_in_params_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """`PYTHONOPTIMIZE=2` removes docstrings."""
    monkeypatch.setattr("fedpipe.algorithms.feddw.__doc__", None)
    assert methods.get_method_title("feddw", methods.parse_method({}, "feddw")) == "feddw"


def test_method_title_is_label_if_label_differs_from_algorithm() -> None:
    settings = make_study(("fedavg", "fedprox", "mild"))
    settings["algorithms"] |= {
        "fedavg": {"dw": {"mu": 0.1}},
        "fedprox": {"algorithm": "fedavg"},
        "mild": {"algorithm": "fedprox", "mu": 0.001},
    }
    plan = make_plan(settings)
    assert [plan.get_method_title(label) for label in plan.algorithms] == ["FedAvg + DW", "fedprox", "mild"]


def test_methods_outside_study_can_have_equal_titles() -> None:
    settings = make_study(("fedavg", "fedprox"))
    settings["algorithms"] |= {"fedprox": {"title": "FedProx"}, "mild": {"algorithm": "fedprox", "title": "FedProx"}}
    assert make_plan(settings).titles == {"fedavg": "FedAvg", "fedprox": "FedProx"}


PRESETS = {
    "smoke": {"federation.rounds": 2, "federation.local_epochs": 1, "dataset.subset": 300, "study.seeds": [7]},
    "reduced": {"study.grid.data": {"digits": {}, "MNIST": {"dataset": {"name": "mnist"}}}, "federation.rounds": 3},
    "single": {"study.algorithms": ["fedavg"]},
}


def make_preset_plan(preset: str) -> NewPlan:
    grid, overrides = {"data": DATA, "partition.alpha": [0.1, 0.5]}, {"federation.local_epochs": 5}
    changes = {"study__grid": grid, "algorithms__fedprox": {"overrides": overrides}, "presets": PRESETS}
    studies.write(make_study(("fedavg", "fedprox"), study__seeds=[0, 1], **changes), Path())
    return planner.make_plan(Path("params.yaml"), preset)


def test_plan_cells_contain_algorithm_overrides_that_take_effect() -> None:
    """Cells do not contain keys that the preset sets for all methods."""
    own = {"fedavg": {}, "fedprox": {"federation.local_epochs": 5}}
    for preset, overrides in (("full", own), ("smoke", {"fedavg": {}, "fedprox": {}})):
        plan = make_preset_plan(preset)
        assert all(cell.own == overrides[cell.algorithm] for cell in plan.cells)
        planner.write_plan(plan)
        assert Plan.read(plan.study_files.plan).cells == plan.cells


def test_plan_cells_contain_algorithm_overrides_of_their_grid_point() -> None:
    overrides = {"model": {"name": "mlp", "hidden": [8]}, "model.hidden": [4]}
    kinds = {"as it is": {}, "long": {"algorithms.fedavg.overrides": {"federation.rounds": 9}}}
    changes = {"study__grid": {"kind": kinds}, "algorithms__fedprox": {"overrides": overrides}}
    plan = make_plan(make_study(("fedavg", "fedprox"), **changes))
    assert {(cell.algorithm, cell.grid.get("kind", "")): cell.own for cell in plan.cells} == {
        ("fedavg", "as it is"): {},
        ("fedavg", "long"): {"federation.rounds": 9},
        ("fedprox", ""): {"model": {"name": "mlp", "hidden": [4]}, "model.hidden": [4]},
    }
    assert {cell.rounds for cell in plan.cells if cell.own == {"federation.rounds": 9}} == {9}


def test_preset_takes_precedence_over_grid_and_algorithm_overrides() -> None:
    """The runs equal those of a study with the keys of the preset. No run key contains the preset's name."""
    plan = make_preset_plan("smoke")
    assert (plan.seeds, len(plan.cells)) == ((7,), 2 * 2 * 2)
    assert {cell.rounds for cell in plan.cells} == {2}
    flat = {"dataset": {"name": "mnist", "subset": 300}, "model": DATA["flat MNIST/2"]["model"]}
    for cell in plan.cells:
        changes = {"dataset.subset": 300} if cell.grid["data"] == "digits" else flat | {"algorithms.fedprox.mu": 0.5}
        alone = loader.override_settings(
            make_study(("fedavg", "fedprox"), partition__alpha=cell.grid["partition.alpha"]), changes
        )
        assert cell.key == compute_key(alone, cell.algorithm, 7)
    assert make_preset_plan("reduced").grid["data"] == ["digits", "MNIST"]
    assert {cell.rounds for cell in make_preset_plan("reduced").cells} == {3}
    assert make_preset_plan("single").algorithms == ("fedavg",)
    assert {run.key for run in make_preset_plan("single").runs} < {run.key for run in make_preset_plan("full").runs}


def test_each_preset_has_its_own_results_folder() -> None:
    folders = {"params.yaml": "results/studies/@smoke", "studies/a/t1.yaml": "results/studies/a/t1@smoke"}
    for path, folder in folders.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(yaml.safe_dump(make_study() | {"presets": {"smoke": {"federation.rounds": 1}}}))
        planner.write_plan(plan := planner.make_plan(Path(path), "smoke"))
        assert str(plan.study_files.plan) == f"{folder}/plan.json"
        assert Plan.read(plan.study_files.plan).preset == "smoke"
        assert planner.list_presets(Path(path)) == ["full", "smoke"]
    with pytest.raises(SettingsError, match="'@' can't be part of a study's path"):
        layout.StudyFiles.from_params(Path("studies/a/t1@smoke.yaml"))


def test_plan_rejects_unknown_preset_and_preset_that_sets_grid_key() -> None:
    with pytest.raises(SettingsError, match=r"^--preset: 'smok' .* 'smoke'"):
        make_preset_plan("smok")
    presets = {"smoke": {"partition.alpha": 1.0}}
    studies.write(make_study(study__grid={"partition.alpha": [0.1, 0.5]}, presets=presets), Path())
    with pytest.raises(SettingsError, match=r"^study\.grid: 'partition\.alpha' has no effect, because the preset sets"):
        planner.make_plan(Path("params.yaml"), "smoke")


def test_grid_over_rounds_is_one_run_with_several_cells() -> None:
    plan = make_plan(make_study(execution={"rounds_per_job": 3}, study__grid={"federation.rounds": [2, 7, 4]}))
    (run,) = plan.runs
    assert run.rounds == 7
    assert [(cell.key, cell.rounds) for cell in plan.cells] == [(run.key, 2), (run.key, 7), (run.key, 4)]
    assert plan.round_counts_by_run == {run.path: (2, 4, 7)}
    assert [joined.round_count for joined in plan.merged_files] == [2, 7, 4]


def test_two_entries_of_one_algorithm_are_two_runs() -> None:
    settings = make_study()
    settings["algorithms"] = {"weak": {"algorithm": "fedprox", "mu": 0.1}, "strong": {"algorithm": "fedprox", "mu": 9}}
    settings["study"]["algorithms"] = ["weak", "strong"]
    paths = [str(run.path) for run in make_plan(settings).runs]
    assert [Path(path).parent.name for path in paths] == ["weak", "strong"]
    assert Path(paths[0]).name != Path(paths[1]).name


# -- files of a plan ---------------------------------------------------------------------------------------------------


def test_run_yaml_contains_all_settings_of_run() -> None:
    plan = make_plan(make_study(("cwfedavg",), algorithms__cwfedavg={"wdr": 1e-5}))
    planner.write_plan(plan)
    (run,) = plan.runs
    path = run.files.settings
    settings = RunSettings.read(path)
    assert settings.key == run.key == path.parent.name
    params = parser.parse_params(loader.read_params(Path("params.yaml")))
    assert settings == RunSettings.from_params(params, "cwfedavg", 0)
    algorithm: Any = settings.build_algorithm()
    assert algorithm.wdr == 1e-5
    assert settings.build_federation_settings().learning_rate == 0.1
    names = sorted(yaml.safe_load(path.read_text())["algorithm"])
    assert names == ["class_wise", "code", "distribution", "name", "wdr", "wdr_factor"]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            lambda text: text.replace("learning_rate: 0.1", "learning_rate: 0.2"),
            r"was edited: its settings belong to the name '\w+'. Run `fedpipe plan`",
        ),
        (lambda text: text.replace("seed: 0", "sead: 0"), "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: "{", "is damaged"),
        (lambda text: text.replace("learning_rate: 0.1", "learning_rate: 2026-01-01"), "run.yaml"),
        (lambda text: text.replace("learning_rate: 0.1", "learning_rate: .nan"), "is damaged"),
        (lambda text: f"{text}# caf\udce9", "is damaged"),
    ],
    ids=["edited", "another-key", "empty", "no-yaml", "a-date", "not-a-number", "not-utf-8"],
)
def test_edited_or_damaged_run_yaml_is_rejected(edit: Any, problem: str) -> None:
    plan = make_plan(make_study())
    planner.write_plan(plan)
    path = plan.runs[0].files.settings
    path.write_text(edit(path.read_text()), errors="surrogateescape")
    with pytest.raises(ArtifactError, match=problem):
        RunSettings.read(path)


@pytest.mark.parametrize("path", ["results/runs/fedavg/0123456789ab/run.yaml", "params.yaml/run.yaml"])
def test_missing_run_yaml_error_shows_plan_command(path: str) -> None:
    Path("params.yaml").touch()
    with pytest.raises(ArtifactError, match=f"^{path} is missing. .*`fedpipe plan`"):
        RunSettings.read(Path(path))


@pytest.mark.parametrize("content", ["{}", "[]", '{"made_by": 5}', '{"made_by": []}', '{"made_by": [5]}'])
def test_damaged_state_of_run_is_rejected(content: str) -> None:
    plan = make_plan(make_study())
    files = plan.runs[0].files.get_round_files(0)
    files.path.mkdir(parents=True)
    files.marker.write_text("{}")
    files.complete_states_marker.write_text(content)
    with pytest.raises(ArtifactError, match=rf"^{files.complete_states_marker} can't be read .*made_by"):
        list(code_changes.describe_runs_from_other_code(plan))


def test_write_plan_keeps_unchanged_files() -> None:
    settings = make_study(study__seeds=[0, 1])
    plan = make_plan(settings)
    planner.write_plan(plan)
    files = [Path(name) for name in plan.files]
    assert len(files) == 5  # run.yaml and partition.yaml of two seeds, and the data set's settings
    for file in files:
        os.utime(file, (1, 1))
    planner.write_plan(make_plan(settings))
    assert [file.stat().st_mtime for file in files] == [1] * 5
    planner.write_plan(make_plan(settings | {"federation": settings["federation"] | {"rounds": 8}}))
    assert [file.stat().st_mtime for file in files] == [1] * 5


STUDY_FOLDERS = {
    "params.yaml": "results",
    "./params.yaml": "results",
    "studies/table1.yaml": "results/studies/table1",
    "studies/a/table1.yaml": "results/studies/a/table1",
    "studies/b/table1.yaml": "results/studies/b/table1",
    "studies/a.b.yaml": "results/studies/a.b",
    "studies/tables.yaml": "results/studies/tables",
    "studies/params.yaml": "results/studies/params",
}


def test_each_study_has_its_own_results_folder() -> None:
    folders = {params: str(layout.StudyFiles.from_params(Path(params)).path) for params in STUDY_FOLDERS}
    assert folders == STUDY_FOLDERS
    folders = {params: str(layout.StudyFiles.from_params(Path.cwd() / params).path) for params in STUDY_FOLDERS}
    assert folders == STUDY_FOLDERS, "also with absolute paths"


@pytest.mark.parametrize(
    "params",
    [
        *("../x.yaml", "/elsewhere/x.yaml", "x.yaml", "other/params.yaml"),
        *("studies/../x.yaml", "studies/a/../../params.yaml", "studies/x.yml", "studies/x"),
        *("studies", "studies/...yaml", "studies/..yaml", "studies/.yaml"),
    ],
)
def test_invalid_study_path_is_rejected(params: str) -> None:
    with pytest.raises(SettingsError, match=rf"{re.escape(params)}: .*params\.yaml"):
        layout.StudyFiles.from_params(Path(params))


@pytest.mark.parametrize("name", ["tables", "Figures", "plots", "keys", "logs", "plan.json", "metrics.json"])
def test_study_path_inside_results_of_other_study_is_rejected(name: str) -> None:
    """studies/a.yaml has its tables in results/studies/a/tables."""
    for params in (f"studies/a/{name}.yaml", f"studies/a/{name}/x.yaml"):
        with pytest.raises(SettingsError, match=rf"'a/{name}' .* study 'a'.* '{name}'"):
            layout.StudyFiles.from_params(Path(params))


def test_write_plan_of_misplaced_study_raises_and_writes_nothing() -> None:
    studies.write(make_study(), Path())
    Path("params.yaml").rename("x.yaml")
    plan = planner.make_plan(Path("x.yaml"))
    with pytest.raises(SettingsError, match=r"^x\.yaml: .*params\.yaml"):
        planner.write_plan(plan)
    assert [path.name for path in Path().iterdir()] == ["x.yaml"]


def test_plan_file_round_trip_keeps_all_fields() -> None:
    report: dict[str, Any] = {
        **{"round": "mean-last", "last_k": 3, "average": "client", "clients": "both"},
        **{"best_over": ["federation.learning_rate"], "best_on": "validation"},
        **{"statistics": ["worst_tenth", "difference"], "target": 0.7, "baseline": "fedavg"},
        **{"figure_width": "slides", "figure_protocols": ["global-on-local"], "figure_algorithms": ["fedprox"]},
    }
    settings = make_study(
        ("fedavg", "fedprox"),
        study__seeds=[0, 1],
        study__grid={"federation.learning_rate": [0.1, 1], "algorithms.fedprox.mu": [0.1, 1.0]},
        dataset__validation_fraction=0.2,
        federation__held_out=[2],
        evaluation__protocols=["global-on-local", "global-on-validation"],
        execution={"rounds_per_job": 1, "stack": 4},
        artifacts={"keep_models": 2},
        report=report,
    )
    plan = make_plan(settings)
    planner.write_plan(plan)
    read = Plan.read(Path("results/plan.json"))
    assert type(read) is Plan
    assert all(getattr(plan, field.name) == getattr(read, field.name) for field in dataclasses.fields(Plan))
    assert {name for name, value in read.report if value != getattr(Report(), name)} == set(report)
    assert set(report) == set(Report.model_fields) - {"rank_test"}  # it needs more methods
    assert (read.execution.stack, read.keep_models, len(read.runs)) == (4, 2, 2 * 2 * 3)


def test_plan_of_earlier_version_is_read_with_defaults() -> None:
    """The plan lacks fields that were added later with a default."""
    plan = make_plan(make_study())
    planner.write_plan(plan)
    content = json.loads(plan.study_files.plan.read_text())
    del content["execution"]["graphs"], content["titles"]
    for name in ("best_on", "statistics", "target", "baseline"):
        del content["report"][name]
    plan.study_files.plan.write_text(json.dumps(content))
    read = Plan.read(plan.study_files.plan)
    assert (read.execution, read.report, read.titles) == (plan.execution, plan.report, {})
    del content["report"]
    plan.study_files.plan.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=r"^results/plan\.json is not the plan of the study"):
        Plan.read(plan.study_files.plan)


def test_planning_builds_each_component_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: Counter[str] = Counter()
    build = registry.build_component

    def build_and_count(kind: component.ComponentKind, *arguments: Any) -> Any:
        built[kind.section] += 1
        return build(kind, *arguments)

    monkeypatch.setattr(registry, "build_component", build_and_count)
    settings = make_study(("fedavg", "fedprox", "strong"), study__seeds=[0, 1, 2], dataset__name="digits")
    settings["algorithms"]["strong"] = {"algorithm": "fedprox"}
    del settings["algorithms"]["fedavg"]  # a built-in algorithm needs no entry
    make_plan(settings)
    assert built == {"algorithms": 3, "partition": 1, "model": 1, "dataset": 1}


def test_method_without_entry_has_run_key_of_its_defaults() -> None:
    with_entries, without = make_study(("fedavg", "fedprox")), make_study(("fedavg", "fedprox"))
    del without["algorithms"]
    assert [run.key for run in make_plan(without).runs] == [run.key for run in make_plan(with_entries).runs]


# -- sources -----------------------------------------------------------------------------------------------------------


def find_changed_sources(plan: NewPlan) -> set[str]:
    """Find sources that have changed since planning."""
    return {path for path, sha256 in plan.source_hashes.items() if compute_file_sha256(Path(path)) != sha256}


@pytest.mark.parametrize(
    "settings",
    [
        make_study(algorithms__own={"algorithm": "{module}.Own"}, study__algorithms=["own"]),
        make_study(partition={"scheme": "{module}.Alike"}),
        make_study(model={"name": "{module}.Layers"}),
    ],
    ids=["algorithm", "partition", "model"],
)
def test_custom_components_are_sources_of_plan(settings: dict[str, Any], request: pytest.FixtureRequest) -> None:
    module = f"own_{request.node.callspec.id}"
    file = Path(f"{module}.py")
    file.write_text(CUSTOM_COMPONENTS)
    importlib.invalidate_caches()
    plan = make_plan(yaml.safe_load(yaml.safe_dump(settings).replace("{module}", module)))
    assert plan.runs
    assert find_changed_sources(plan) == set()
    file.write_text(CUSTOM_COMPONENTS + "# changed\n")
    assert find_changed_sources(plan) == {file.name}


def test_params_yaml_and_package_are_sources_of_plan() -> None:
    plan = make_plan(make_study())
    assert "params.yaml" in plan.source_hashes
    assert any(path.endswith("fedpipe/algorithms/fedavg.py") for path in plan.source_hashes)
    Path("params.yaml").write_text(Path("params.yaml").read_text() + "# a comment\n")
    assert find_changed_sources(plan) == {"params.yaml"}


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("Own", "code: str = 'fixed'", "algorithms.fedavg: 'own.Own' has a field 'code'"),
        ("Own", "name: str = 'l2'", "algorithms.fedavg: 'own.Own' has a field 'name'"),
        ("Own", "algorithm: str = 'l2'", "algorithms.fedavg: 'own.Own' has a field 'algorithm'"),
        ("Layers", "name: str = 'l2'", "model.name: 'own.Layers' has a field 'name'"),
        ("Alike", "scheme: str = 'l2'", "partition.scheme: 'own.Alike' has a field 'scheme'"),
        ("Own", "mu: InitVar[float] = 0.1", "algorithms.fedavg: 'own.Own' has an argument 'mu' that is not a field"),
        ("Prox", "mu = 1.0", "algorithms.fedavg: 'own.Prox' sets 'mu' without a type ... `mu: float = 1.0`"),
        ("Prox", "sizes = (1,)", "algorithms.fedavg: 'own.Prox' sets 'sizes' without a type"),
        ("Prox", "def mu(self): pass", "algorithms.fedavg: 'own.Prox' has a method 'mu' with the name of a field"),
        ("Prox", "mu = property(id)", "algorithms.fedavg: 'own.Prox' has a method 'mu' with the name of a field"),
        ("Prox", "file: Path = Path('t.txt')", "algorithms: PosixPath('t.txt') ... 'file' of 'own.Prox' ... str"),
        ("Prox", "rare: frozenset[int] = frozenset({1})", "algorithms: frozenset({1}) ... 'rare' ... tuple"),
    ],
)
def test_custom_component_with_parameter_that_keys_cannot_contain_is_rejected(
    name: str, line: str, message: str, own_module: Path
) -> None:
    """For example, a parameter `code` would replace the digest of the source code in the run key."""
    own_module.write_text(add_line_to_class(CUSTOM_COMPONENTS + DERIVED_CLASS, name, line))
    algorithm = {"algorithms": {"fedavg": {"algorithm": f"own.{name}"}}}
    sections = {"Layers": {"model": {"name": "own.Layers"}}, "Alike": {"partition": {"scheme": "own.Alike"}}}
    with rejects(message):
        make_plan(make_study() | sections.get(name, algorithm))


@pytest.mark.parametrize("line", ["mu: float = 1.0", "mu: ClassVar[float] = 1.0"])
def test_run_rebuilds_algorithm_with_changed_default_and_computed_field(line: str, own_module: Path) -> None:
    own_module.write_text(add_line_to_class(CUSTOM_COMPONENTS + DERIVED_CLASS, "Prox", line))
    params = parser.parse_params(make_study() | {"algorithms": {"fedavg": {"algorithm": "own.Prox"}}})
    algorithm: Any = RunSettings.from_params(params, "fedavg", seed=0).build_algorithm()
    assert (algorithm.mu, algorithm.twice) == (1.0, 2.0)


def add_line_to_class(text: str, name: str, line: str) -> str:
    before, start, after = text.partition(f"class {name}(")
    first_line, _, rest = after.partition("\n")
    return f"{before}{start}{first_line}\n    {line}\n{rest}"
