"""Runs, their keys and what the plan writes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpipe.core.components import component, registry
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import sha256_of
from fedpipe.planning import planner
from fedpipe.planning.plan import Plan
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report import contents
from fedpipe.settings import federation, loader, methods, parser
from tests import small_studies as studies

OWN = '''
from dataclasses import dataclass

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.data.partitions.iid import IID
from fedpipe.models.mlp import MLP


@dataclass(frozen=True, kw_only=True)
class Own(FedAvg):
    """FedAvg by another name."""


@dataclass(frozen=True, kw_only=True)
class Alike(IID):
    """IID by another name."""


@dataclass(frozen=True, kw_only=True)
class Layers(MLP):
    """MLP by another name."""
'''


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def make(settings: dict[str, Any]) -> NewPlan:
    studies.write(settings, Path())
    return planner.make_plan(Path("params.yaml"))


def study(labels: tuple[str, ...] = ("fedavg",), **values: Any) -> dict[str, Any]:
    """The tests' study with the values at dotted keys replaced; two underscores stand for a dot."""
    return loader.override_settings(
        studies.settings(labels), {key.replace("__", "."): value for key, value in values.items()}
    )


def key(settings: dict[str, Any], label: str = "fedavg", seed: int = 0) -> str:
    return RunSettings.from_params(parser.parse_params(settings), label, seed).key


def refused(settings: dict[str, Any]) -> list[str]:
    with pytest.raises(SettingsError) as error:
        make(settings)
    return str(error.value).splitlines()


# -- keys --------------------------------------------------------------------------------------------------------------


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: reversed_keys(part) for name, part in reversed(value.items())}
    return value


def test_a_key_is_twelve_hexadecimal_digits() -> None:
    assert len(key(study())) == 12
    assert int(key(study()), 16) >= 0


def test_the_order_of_yaml_keys_is_not_in_the_key() -> None:
    settings = study(("fedavg", "feddw"), algorithms__feddw={"mu": 0.5, "mode": "code"})
    backwards = reversed_keys(settings)
    assert list(backwards) != list(settings)
    for label in ("fedavg", "feddw"):
        assert key(backwards, label) == key(settings, label)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"partition.alpha": 10}, {"partition.alpha": 10.0}),
        ({"federation.participation": 1}, {"federation.participation": 1.0}),
        ({"federation.learning_rate": 0.001}, {"federation.learning_rate": "1e-3"}),
        ({"algorithms.fedprox.mu": 1}, {"algorithms.fedprox.mu": 1.0}),
        ({"algorithms.fedprox": {}}, {"algorithms.fedprox": {"mu": 0.01}}),
        ({"algorithms.fedprox": {"algorithm": "fedprox"}}, {"algorithms.fedprox": {}}),
        ({"algorithms.fedprox": {"algorithm": "fedpipe.algorithms.fedprox.FedProx"}}, {"algorithms.fedprox": {}}),
        ({"model": {"name": "mlp"}}, {"model": {"name": "mlp", "hidden": [64]}}),
        (
            {"dataset.test_fraction": 0.3},
            {"dataset.test_fraction": 0.25},
        ),  # nothing depends on it: the split is official
        ({"evaluation.protocols": ["global-on-global"]}, {"evaluation": {"protocols": ["global-on-global"]}}),
    ],
    ids=str,
)
def test_equal_settings_have_equal_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    settings = study(("fedprox",))
    assert key(loader.override_settings(settings, one), "fedprox") == key(
        loader.override_settings(settings, other), "fedprox"
    )


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("fedprox", {"algorithms.fedprox.mu": 0.5}),
    ("feddw", {"algorithms.feddw.mode": "code"}),
    ("cwfedavg", {"algorithms.cwfedavg.class_wise": 2}),
    *(
        ("fedavg", {name: value})
        for name, value in {
            "dataset.split": "pooled",
            "partition.scheme": "iid",
            "partition.alpha": 0.4,
            "partition.minimum": 2,
            "partition.seed": 3,
            "model.name": "cnn",
            "model.hidden": [17],
            "federation.clients": 11,
            "federation.participation": 0.6,
            "federation.local_epochs": 2,
            "federation.batch_size": 39,
            "federation.optimizer": "adam",
            "federation.learning_rate": 0.11,
            "federation.momentum": 0.5,
            "federation.weight_decay": 0.001,
            "federation.weighting": "uniform",
            "federation.dtype": "float64",
            "evaluation.protocols": ["global-on-global"],
            "evaluation.every": 2,
        }.items()
    ),
]


@pytest.mark.parametrize(
    ("label", "change"), CHANGES, ids=[f"{label}-{next(iter(change))}" for label, change in CHANGES]
)
def test_everything_that_changes_bits_changes_the_key(label: str, change: dict[str, Any]) -> None:
    settings = study((label,))
    changed = loader.override_settings(settings, change)
    if "partition.scheme" in change:
        changed["partition"] = {"scheme": "iid"}
    if "model.name" in change:
        changed["model"] = {"name": "cnn"}
    assert key(changed, label) != key(settings, label)


def test_the_seed_is_in_the_key() -> None:
    assert len({key(study(), seed=seed) for seed in range(5)}) == 5


def test_every_field_of_the_federation_is_in_the_key_but_rounds() -> None:
    held = RunSettings.from_params(parser.parse_params(study()), "fedavg", 0).federation
    assert set(held) == set(federation.Federation.model_fields) - {"rounds"}


@pytest.mark.parametrize(
    "change",
    [
        {"federation.rounds": 8},
        {"execution.rounds_per_job": 2},
        {"execution.stack": 4},
        {"execution.graphs": True},
        {"artifacts.keep_models": "last"},
        {"report.round": "best"},
        {"study.seeds": [0, 1]},
    ],
    ids=str,
)
def test_what_changes_no_bits_is_not_in_the_key(change: dict[str, Any]) -> None:
    assert key(loader.override_settings(study(), change)) == key(study())


def test_another_algorithms_hyper_parameters_are_not_in_the_key() -> None:
    settings = study(("fedavg", "fedprox"))
    assert key(loader.override_settings(settings, {"algorithms.fedprox.mu": 9})) == key(settings)


def test_the_finetuned_protocols_epochs_count_only_where_they_are_measured() -> None:
    """Otherwise an edit without any effect trains everything again, as `dataset.test_fraction` would."""
    assert key(study(evaluation__finetune_epochs=5)) == key(study())
    finetuned = study(evaluation__protocols=["finetuned-on-local"])
    assert key(loader.override_settings(finetuned, {"evaluation.finetune_epochs": 5})) != key(finetuned)


def test_the_order_of_protocols_is_not_in_the_key() -> None:
    one, other = (study(evaluation__protocols=names) for names in (PROTOCOLS, PROTOCOLS[::-1]))
    assert key(one) == key(other)


PROTOCOLS = ["global-on-global", "personal-on-local"]


@pytest.mark.parametrize("section", ["algorithm", "model", "partition", "dataset"])
def test_the_code_of_every_component_is_in_the_key(section: str) -> None:
    settings = RunSettings.from_params(parser.parse_params(study()), "fedavg", 0)
    described = getattr(settings, section)
    assert re.fullmatch("[0-9a-f]{12}", described["code"])
    assert dataclasses.replace(settings, **{section: described | {"code": "0" * 12}}).key != settings.key


# -- the product -------------------------------------------------------------------------------------------------------


def test_algorithms_times_seeds_times_grid() -> None:
    settings = study(("fedavg", "fedprox"), study__seeds=[0, 1, 2])
    settings["study"]["grid"] = {"partition.alpha": [0.1, 0.5], "federation.learning_rate": [0.1, 0.2]}
    made = make(settings)
    runs = {(cell.algorithm, cell.seed, *cell.grid.values()) for cell in made.cells}
    assert len(made.runs) == len(runs) == 2 * 3 * 2 * 2
    assert len({str(run.path) for run in made.runs}) == len(runs)
    assert len(made.partitions) == 3 * 2
    assert {run.partition for run in made.runs} == set(made.partitions)


def test_a_grid_of_one_algorithm_does_not_multiply_others() -> None:
    settings = study(("fedavg", "fedprox"), study__seeds=[0, 1])
    settings["study"]["grid"] = {"algorithms.fedprox.mu": [0.1, 1.0, 10.0]}
    made = make(settings)
    grids = [cell.grid for cell in made.cells if cell.algorithm == "fedavg"]
    assert grids == [{}, {}]
    mus = [cell.grid["algorithms.fedprox.mu"] for cell in made.cells if cell.algorithm == "fedprox"]
    assert sorted(mus) == [0.1, 0.1, 1.0, 1.0, 10.0, 10.0]


@pytest.mark.parametrize("values", [[10, 10.0], [10, "10"], [10.0, "1e1"]])
def test_a_value_that_stands_twice_in_the_grid_however_written_is_refused(values: list[Any]) -> None:
    settings = study()
    settings["study"]["grid"] = {"partition.alpha": values}
    with pytest.raises(SettingsError, match=r"^study\.grid\.partition\.alpha: '10(\.0)?' is listed twice"):
        make(settings)


def test_a_grid_of_whole_entries_tells_its_runs_apart() -> None:
    """Else the table takes different hyper-parameters for seeds of one setting."""
    settings = study(("fedprox",))
    settings["study"]["grid"] = {"algorithms.fedprox": [{"mu": 0.1}, {"mu": 1.0}]}
    points = [str(cell.grid) for cell in make(settings).cells]
    assert len(points) == len(set(points)) == 2


def test_points_of_one_key_are_one_run_and_each_a_cell() -> None:
    """With the official split, nothing depends on the share of a pooled one."""
    settings = study(("fedavg", "fedprox"))
    settings["study"]["grid"] = {"dataset.test_fraction": [0.2, 0.3], "algorithms.fedprox.mu": [0.1, 1.0]}
    made = make(settings)
    assert [run.algorithm for run in made.runs] == ["fedavg", "fedprox", "fedprox"]
    assert len({str(run.path) for run in made.runs}) == 3
    shares = [cell.grid["dataset.test_fraction"] for cell in made.cells if cell.algorithm == "fedavg"]
    assert shares == [0.2, 0.3]
    assert len(made.cells) == 2 + 4
    assert {(cell.algorithm, cell.key) for cell in made.cells} == {(run.algorithm, run.key) for run in made.runs}


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


def test_an_axis_changes_its_keys_together() -> None:
    """Each run is that of a study without a grid in which these keys stand; only the product of axes is a grid."""
    settings = study(("fedavg", "fedprox"), study__seeds=[0, 1])
    settings["study"]["grid"] = {"environment": ENVIRONMENT, "data": DATA, "federation.learning_rate": [0.1, 0.2]}
    made = make(settings)
    assert len(made.cells) == len(made.runs) == 2 * 2 * 2 * 2 * 2
    assert made.grid == {
        "environment": ["mild", "harsh"],
        "data": ["digits", "flat MNIST/2"],
        "federation.learning_rate": [0.1, 0.2],
    }
    runs = {run.key: run for run in made.runs}
    for cell in made.cells:
        point = cell.grid
        changes = ENVIRONMENT[point["environment"]] | DATA[point["data"]]
        alone = study(("fedavg", "fedprox"), federation__learning_rate=point["federation.learning_rate"])
        assert cell.key == key(loader.override_settings(alone, changes), cell.algorithm, cell.seed)
        assert (cell.rounds, runs[cell.key].dataset.split("-")[0]) == ((4, "digits"), (6, "mnist"))[
            point["data"] != "digits"
        ]
    assert {run.participants for run in made.runs} == {5, 10}


def test_the_settings_at_one_value_of_an_axis_are_not_left_at_the_next() -> None:
    settings = study()
    settings["study"]["grid"] = {"data": dict(reversed(DATA.items()))}
    first, second = make(settings).runs
    assert (first.rounds, second.rounds) == (6, 4)
    assert second.key == key(study())


def test_an_axis_of_one_algorithm_does_not_multiply_others() -> None:
    settings = study(("fedavg", "fedprox", "pfps_lwc"))
    mu = {"weak": {"algorithms.fedprox.mu": 0.1}, "strong": {"algorithms.fedprox.mu": 1.0}, "own": {}}
    settings["study"]["grid"] = {"pull": mu}
    cells = make(settings).cells
    assert [(cell.algorithm, cell.grid) for cell in cells if cell.algorithm != "fedprox"] == [
        ("fedavg", {}),
        ("pfps_lwc", {}),
    ]
    assert [cell.grid["pull"] for cell in cells if cell.algorithm == "fedprox"] == ["weak", "strong", "own"]


def test_an_axis_of_an_algorithm_that_does_not_run_is_a_mistake() -> None:
    settings = study()
    settings["study"]["grid"] = {"pull": {"weak": {"algorithms.fedprox.mu": 0.1}}}
    with pytest.raises(SettingsError, match=r"^study\.grid: 'pull' varies nothing"):
        make(settings)


def test_settings_of_one_method_are_its_alone() -> None:
    """Its runs are those of a study in which the keys stand for all; the others' are as without."""
    settings = study(("fedavg", "scaffold"), federation__optimizer="adam")
    settings["algorithms"]["scaffold"] = {"overrides": {"federation.optimizer": "sgd", "federation.rounds": 6}}
    first, second = make(settings).runs
    assert first.key == key(study(federation__optimizer="adam"))
    assert second.key == key(study(("scaffold",)), "scaffold")
    assert (first.rounds, second.rounds) == (4, 6)
    assert first.partition == second.partition
    (sentence,) = refused(settings | {"algorithms": {}})
    assert sentence.startswith("federation.optimizer: adam can't be used with scaffold")


def test_settings_of_one_method_stand_above_those_of_the_grid() -> None:
    settings = study(("fedavg", "fedprox"))
    settings["algorithms"]["fedprox"] = {"overrides": {"model.hidden": [4]}}
    settings["study"]["grid"] = {"data": {"A": {}, "B": {"model": {"name": "mlp", "hidden": [8]}}}}
    made = {(cell.algorithm, cell.grid["data"]): cell.key for cell in make(settings).cells}
    assert made["fedprox", "A"] == made["fedprox", "B"] == key(study(("fedprox",), model__hidden=[4]), "fedprox")
    assert made["fedavg", "B"] == key(study(model__hidden=[8]))


def test_by_which_protocol_a_method_is_shown_is_in_no_key() -> None:
    settings = study(("fedavg", "fedprox"))
    settings["algorithms"]["fedprox"] = {"protocol": "personal-on-local"}
    made = make(settings)
    assert made.method_protocols == {"fedprox": "personal-on-local"}
    assert [run.key for run in made.runs] == [run.key for run in make(study(("fedavg", "fedprox"))).runs]


def test_what_a_method_is_called_is_in_no_key_and_makes_tables_anew() -> None:
    settings = study(("fedavg", "fedprox"))
    plain = make(settings)
    settings["algorithms"]["fedprox"] = {"title": "FedProx (μ = 0.01)"}
    made = make(settings)
    assert [made.title(label) for label in made.algorithms] == ["FedAvg", "FedProx (μ = 0.01)"]
    assert (made.runs, made.cells, made.file_texts) == (plain.runs, plain.cells, plain.file_texts)
    assert contents.compute_report_fingerprint(made) != contents.compute_report_fingerprint(plain)
    planner.write_plan(made)
    assert Plan.read(made.study_files.plan).titles == made.titles
    assert plain.titles == {"fedavg": "FedAvg", "fedprox": "FedProx"}


@pytest.mark.parametrize("name", registry.list_components(component.ALGORITHM))
def test_every_algorithm_has_a_display_name(name: str) -> None:
    title = methods.get_title(
        name, methods.Method(registry.parse_component(component.ALGORITHM, {}, name), methods.MethodOptions())
    )
    assert title != name
    assert re.sub(r"[^a-z]", "", title.lower()) == name.replace("_", "").removesuffix("plus")


def test_an_entry_that_is_not_called_like_its_algorithm_shows_its_label() -> None:
    settings = study(("fedavg", "fedprox", "mild"))
    settings["algorithms"] |= {
        "fedavg": {"dw": {"mu": 0.1}},
        "fedprox": {"algorithm": "fedavg"},
        "mild": {"algorithm": "fedprox", "mu": 0.001},
    }
    made = make(settings)
    assert [made.title(label) for label in made.algorithms] == ["FedAvg + DW", "fedprox", "mild"]


def test_titles_of_methods_that_are_not_compared_may_be_alike() -> None:
    settings = study(("fedavg", "fedprox"))
    settings["algorithms"] |= {"fedprox": {"title": "FedProx"}, "mild": {"algorithm": "fedprox", "title": "FedProx"}}
    assert make(settings).titles == {"fedavg": "FedAvg", "fedprox": "FedProx"}


SCALED = {
    "smoke": {"federation.rounds": 2, "federation.local_epochs": 1, "dataset.subset": 300, "study.seeds": [7]},
    "reduced": {"study.grid.data": {"digits": {}, "MNIST": {"dataset": {"name": "mnist"}}}, "federation.rounds": 3},
    "single": {"study.algorithms": ["fedavg"]},
}


def scaled(preset: str) -> NewPlan:
    settings = study(("fedavg", "fedprox"), study__seeds=[0, 1]) | {"presets": SCALED}
    settings["algorithms"]["fedprox"] = {"overrides": {"federation.local_epochs": 5}}
    settings["study"]["grid"] = {"data": DATA, "partition.alpha": [0.1, 0.5]}
    studies.write(settings, Path())
    return planner.make_plan(Path("params.yaml"), preset)


def test_what_a_method_sets_for_itself_alone_stands_in_its_cells() -> None:
    """With the values that take effect; nothing where the preset sets the same key, for all methods."""
    own = {"fedavg": {}, "fedprox": {"federation.local_epochs": 5}}
    for preset, found in (("full", own), ("smoke", {"fedavg": {}, "fedprox": {}})):
        made = scaled(preset)
        assert all(cell.own == found[cell.algorithm] for cell in made.cells)
        planner.write_plan(made)
        assert Plan.read(made.study_files.plan).cells == made.cells


def test_what_a_method_sets_at_some_points_stands_in_their_cells() -> None:
    settings = study(("fedavg", "fedprox"))
    settings["algorithms"]["fedprox"] = {"overrides": {"model": {"name": "mlp", "hidden": [8]}, "model.hidden": [4]}}
    settings["study"]["grid"] = {
        "kind": {"as it is": {}, "long": {"algorithms.fedavg.overrides": {"federation.rounds": 9}}}
    }
    made = make(settings)
    assert {(cell.algorithm, cell.grid.get("kind", "")): cell.own for cell in made.cells} == {
        ("fedavg", "as it is"): {},
        ("fedavg", "long"): {"federation.rounds": 9},
        ("fedprox", ""): {"model": {"name": "mlp", "hidden": [4]}, "model.hidden": [4]},
    }
    assert {cell.rounds for cell in made.cells if cell.own == {"federation.rounds": 9}} == {9}


def test_a_preset_stands_above_the_grid_and_methods() -> None:
    """Its runs are those of a study in which its keys stand; and its name is in no key."""
    made = scaled("smoke")
    assert (made.seeds, len(made.cells)) == ((7,), 2 * 2 * 2)
    assert {cell.rounds for cell in made.cells} == {2}
    flat = {"dataset": {"name": "mnist", "subset": 300}, "model": DATA["flat MNIST/2"]["model"]}
    for cell in made.cells:
        changes = {"dataset.subset": 300} if cell.grid["data"] == "digits" else flat | {"algorithms.fedprox.mu": 0.5}
        alone = loader.override_settings(
            study(("fedavg", "fedprox"), partition__alpha=cell.grid["partition.alpha"]), changes
        )
        assert cell.key == key(alone, cell.algorithm, 7)
    assert scaled("reduced").grid["data"] == ["digits", "MNIST"]
    assert {cell.rounds for cell in scaled("reduced").cells} == {3}
    assert scaled("single").algorithms == ("fedavg",)
    assert {run.key for run in scaled("single").runs} < {run.key for run in scaled("full").runs}


def test_a_preset_has_a_place_of_its_own() -> None:
    for path, place in (("params.yaml", "results/studies/@smoke"), ("studies/a/t1.yaml", "results/studies/a/t1@smoke")):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(yaml.safe_dump(study() | {"presets": {"smoke": {"federation.rounds": 1}}}))
        planner.write_plan(made := planner.make_plan(Path(path), "smoke"))
        assert str(made.study_files.plan) == f"{place}/plan.json"
        assert Plan.read(made.study_files.plan).preset == "smoke"
        assert planner.list_presets(Path(path)) == ["full", "smoke"]
    with pytest.raises(SettingsError, match="'@' can't be part of a study's path"):
        layout.StudyFiles.from_params(Path("studies/a/t1@smoke.yaml"))


def test_a_preset_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(SettingsError, match=r"^--preset: 'smok' is no preset of this study. Did you mean 'smoke'\?$"):
        scaled("smok")
    settings = study(study__grid={"partition.alpha": [0.1, 0.5]}) | {"presets": {"smoke": {"partition.alpha": 1.0}}}
    studies.write(settings, Path())
    with pytest.raises(SettingsError, match=r"^study\.grid: 'partition\.alpha' varies nothing, since the preset sets"):
        planner.make_plan(Path("params.yaml"), "smoke")


def test_numbers_of_rounds_are_cells_of_one_run() -> None:
    settings = study(("fedavg",), execution={"rounds_per_job": 3})
    settings["study"]["grid"] = {"federation.rounds": [2, 7, 4]}
    made = make(settings)
    (run,) = made.runs
    assert run.rounds == 7
    assert [(cell.key, cell.rounds) for cell in made.cells] == [(run.key, 2), (run.key, 7), (run.key, 4)]
    assert made.round_counts == {run.path: (2, 4, 7)}
    assert [joined.round_count for joined in made.merged_files] == [2, 7, 4]


def test_two_entries_of_one_algorithm_are_two_runs() -> None:
    settings = study()
    settings["algorithms"] = {"weak": {"algorithm": "fedprox", "mu": 0.1}, "strong": {"algorithm": "fedprox", "mu": 9}}
    settings["study"]["algorithms"] = ["weak", "strong"]
    paths = [str(run.path) for run in make(settings).runs]
    assert [Path(path).parent.name for path in paths] == ["weak", "strong"]
    assert Path(paths[0]).name != Path(paths[1]).name


# -- what is written ---------------------------------------------------------------------------------------------------


def test_run_yaml_holds_the_settings_in_full_and_comes_back() -> None:
    made = make(study(("cwfedavg",), algorithms__cwfedavg={"wdr": 1e-5}))
    planner.write_plan(made)
    (run,) = made.runs
    path = run.files.settings
    settings = RunSettings.read(path)
    assert settings.key == run.key == path.parent.name
    assert settings == RunSettings.from_params(
        parser.parse_params(loader.read_params(Path("params.yaml"))), "cwfedavg", 0
    )
    algorithm: Any = settings.build_algorithm()
    assert algorithm.wdr == 1e-5
    assert settings.build_federation().learning_rate == 0.1
    assert set(yaml.safe_load(path.read_text())["algorithm"]) == {
        "name",
        "code",
        "wdr",
        "wdr_factor",
        "class_wise",
        "distribution",
    }


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda text: text.replace("learning_rate: 0.1", "learning_rate: 0.2"),
            "was edited: its key would be",
        ),
        (lambda text: text.replace("seed: 0", "sead: 0"), "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: "{", "is damaged"),
        (lambda text: text.replace("learning_rate: 0.1", "learning_rate: 2026-01-01"), "run.yaml"),
    ],
    ids=["edited", "another-key", "empty", "no-yaml", "a-date"],
)
def test_an_edited_run_yaml_is_refused(edit: Any, sentence: str) -> None:
    made = make(study())
    planner.write_plan(made)
    path = made.runs[0].files.settings
    path.write_text(edit(path.read_text()))
    with pytest.raises(ArtifactError, match=sentence):
        RunSettings.read(path)


def test_a_missing_run_yaml_says_what_to_type() -> None:
    with pytest.raises(ArtifactError, match="run `fedpipe plan` to write it again"):
        RunSettings.read(Path("results/runs/fedavg/0123456789ab/run.yaml"))


def test_what_is_there_is_not_written_again() -> None:
    settings = study(study__seeds=[0, 1])
    made = make(settings)
    planner.write_plan(made)
    files = [Path(name) for name in made.files]
    assert len(files) == 5  # run.yaml and partition.yaml of two seeds, and where the data set comes from
    for file in files:
        os.utime(file, (1, 1))
    planner.write_plan(make(settings))
    assert [file.stat().st_mtime for file in files] == [1] * 5
    planner.write_plan(make(settings | {"federation": settings["federation"] | {"rounds": 8}}))
    assert [file.stat().st_mtime for file in files] == [1] * 5


PLACES = {
    "params.yaml": "results",
    "./params.yaml": "results",
    "studies/table1.yaml": "results/studies/table1",
    "studies/a/table1.yaml": "results/studies/a/table1",
    "studies/b/table1.yaml": "results/studies/b/table1",
    "studies/a.b.yaml": "results/studies/a.b",
    "studies/tables.yaml": "results/studies/tables",
    "studies/params.yaml": "results/studies/params",
}


def test_no_two_studies_have_one_place() -> None:
    found = {params: str(layout.StudyFiles.from_params(Path(params)).path) for params in PLACES}
    assert found == PLACES
    assert {str(layout.StudyFiles.from_params(Path.cwd() / params).path) for params in PLACES} == set(PLACES.values())


@pytest.mark.parametrize(
    "params",
    [
        "../x.yaml",
        "/elsewhere/x.yaml",
        "x.yaml",
        "other/params.yaml",
        "studies/../x.yaml",
        "studies/a/../../params.yaml",
        "studies/x.yml",
        "studies/x",
        "studies",
        "studies/...yaml",
        "studies/..yaml",
        "studies/.yaml",
    ],
)
def test_a_study_elsewhere_has_no_place(params: str) -> None:
    with pytest.raises(SettingsError, match=r"a study is params\.yaml, or lies below the folder studies"):
        layout.StudyFiles.from_params(Path(params))


@pytest.mark.parametrize("name", ["tables", "Figures", "plots", "keys", "logs", "plan.json", "metrics.json"])
def test_a_study_below_another_is_never_in_its_files(name: str) -> None:
    """studies/a.yaml has its tables in results/studies/a/tables."""
    for params in (f"studies/a/{name}.yaml", f"studies/a/{name}/x.yaml"):
        with pytest.raises(SettingsError, match=rf"'a/{name}' is for files of a study 'a'; rename '{name}'"):
            layout.StudyFiles.from_params(Path(params))


def test_a_study_without_a_place_writes_nothing() -> None:
    studies.write(study(), Path())
    Path("params.yaml").rename("x.yaml")
    made = planner.make_plan(Path("x.yaml"))  # for a dry run
    with pytest.raises(SettingsError, match=r"^x\.yaml: a study is params\.yaml"):
        planner.write_plan(made)
    assert [path.name for path in Path().iterdir()] == ["x.yaml"]


def test_make_writes_nothing() -> None:
    make(study())
    assert [path.name for path in Path().iterdir()] == ["params.yaml"]


def test_the_same_study_makes_the_same_plan() -> None:
    planner.write_plan(make(study()))
    first = Path("results/plan.json").read_bytes()
    planner.write_plan(make(study()))
    assert Path("results/plan.json").read_bytes() == first


def test_what_is_written_is_read_back() -> None:
    settings = study(("fedavg", "fedprox"), study__seeds=[0, 1], report__round="best")
    settings["study"]["grid"] = {"partition.alpha": [0.1, 1], "algorithms.fedprox.mu": [0.1, 1.0]}
    made = make(settings | {"execution": {"rounds_per_job": 1, "stack": 4}, "artifacts": {"keep_models": 2}})
    planner.write_plan(made)
    read = Plan.read(Path("results/plan.json"))
    assert type(read) is Plan
    assert all(getattr(made, field.name) == getattr(read, field.name) for field in dataclasses.fields(Plan))
    assert (read.execution.stack, read.keep_models, read.report.round, len(read.runs)) == (4, 2, "best", 2 * 2 * 3)


def test_a_plan_of_an_earlier_version_is_read() -> None:
    """What has been added since, with a default, is missing there."""
    made = make(study())
    planner.write_plan(made)
    held = json.loads(made.study_files.plan.read_text())
    del held["execution"]["graphs"], held["report"]["best_on"], held["titles"]
    made.study_files.plan.write_text(json.dumps(held))
    read = Plan.read(made.study_files.plan)
    assert (read.execution, read.report, read.titles) == (made.execution, made.report, {})
    del held["report"]
    made.study_files.plan.write_text(json.dumps(held))
    with pytest.raises(ArtifactError, match=r"^results/plan.json is not the plan of the study that belongs there"):
        Plan.read(made.study_files.plan)


def test_reading_a_plan_imports_nothing_that_takes_time() -> None:
    """Every node that parses the Snakefile does it."""
    planner.write_plan(make(study()))
    program = (
        "import sys; from pathlib import Path\n"
        "from fedpipe.planning.plan import Plan; Plan.read(Path('results/plan.json'))\n"
        "print(*{'torch', 'numpy', 'pandas', 'yaml'} & sys.modules.keys())"
    )
    environment = os.environ | {"PYTHONPATH": str(studies.ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_each_component_is_built_once_on_its_way_from_params_to_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    built: Counter[str] = Counter()
    build = registry.build_component

    def counted(kind: component.ComponentKind, *arguments: Any) -> Any:
        built[kind.section] += 1
        return build(kind, *arguments)

    monkeypatch.setattr(registry, "build_component", counted)
    settings = study(("fedavg", "fedprox", "strong"), study__seeds=[0, 1, 2], dataset__name="digits")
    settings["algorithms"]["strong"] = {"algorithm": "fedprox"}
    del settings["algorithms"]["fedavg"]  # one of fedpipe's needs no entry
    make(settings)
    assert built == {"algorithms": 3, "partition": 1, "model": 1, "dataset": 1}


def test_a_method_without_an_entry_has_its_defaults_and_its_key() -> None:
    with_entries, without = study(("fedavg", "fedprox")), study(("fedavg", "fedprox"))
    del without["algorithms"]
    assert [run.key for run in make(without).runs] == [run.key for run in make(with_entries).runs]


# -- sources -----------------------------------------------------------------------------------------------------------


def changed(made: NewPlan) -> set[str]:
    """The sources that are not what the plan was made of, as the Snakefile finds them."""
    return {path for path, sha256 in made.sources.items() if sha256_of(Path(path)) != sha256}


@pytest.mark.parametrize(
    "settings",
    [
        study(algorithms__own={"algorithm": "{module}.Own"}, study__algorithms=["own"]),
        study(partition={"scheme": "{module}.Alike"}),
        study(model={"name": "{module}.Layers"}),
    ],
    ids=["algorithm", "partition", "model"],
)
def test_ones_own_components_are_sources_of_the_plan(settings: dict[str, Any], request: pytest.FixtureRequest) -> None:
    module = f"own_{request.node.callspec.id}"
    file = Path(f"{module}.py")
    file.write_text(OWN)
    importlib.invalidate_caches()
    made = make(yaml.safe_load(yaml.safe_dump(settings).replace("{module}", module)))
    assert made.runs
    assert changed(made) == set()
    file.write_text(OWN + "# changed\n")
    assert changed(made) == {file.name}


def test_params_yaml_and_the_package_are_sources_of_the_plan() -> None:
    made = make(study())
    assert "params.yaml" in made.sources
    assert any(path.endswith("fedpipe/algorithms/fedavg.py") for path in made.sources)
    Path("params.yaml").write_text(Path("params.yaml").read_text() + "# a comment\n")
    assert changed(made) == {"params.yaml"}


def test_a_field_that_would_hide_the_code_in_the_key_is_refused(in_empty_folder: Path) -> None:
    """A parameter of that name would stand in the key where the digest of the source should."""
    text = OWN.replace('"""FedAvg by another name."""', '"""FedAvg by another name."""\n\n    code: str = "fixed"')
    (in_empty_folder / "hiding.py").write_text(text)
    settings = study() | {"algorithms": {"fedavg": {"algorithm": "hiding.Own"}}}
    sentence = r"algorithms\.fedavg: 'hiding\.Own' has a field 'code', which stands for its source in keys; rename it"
    with pytest.raises(SettingsError, match=sentence):
        make(settings)
