"""Plan warnings about methods that have no effect or equal another method."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner
from typing_extensions import override

from fedpipe.algorithms.batch import State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.uploads import Uploads
from fedpipe.cli import app
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import Model, Network
from fedpipe.planning import planner
from fedpipe.report import tables
from fedpipe.report.data import StudyData
from fedpipe.settings import loader
from tests import small_studies as studies
from tests.report.conftest import Tree

pytestmark = pytest.mark.usefixtures("in_empty_folder")


class Unbuildable(Model):
    """A custom model that needs a missing file."""

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        raise FileNotFoundError("weights.pt")


class Normalized(Model):
    """A custom model with a nested normalization layer."""

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        body = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 8), nn.Sequential(nn.GroupNorm(2, 8))))
        return Network(body, nn.Linear(8, num_classes))


class UnknownSetting(FedAvg):
    """A custom method with a misspelled setting."""

    unsupported_settings = ("weight_decays",)


class Misspelled(FedAvg):
    """A custom method whose server update has another name than the hook."""

    def agregate(self, server: State, uploads: Uploads) -> State:
        return server


class Softmax(Model):
    """A custom model whose outputs are probabilities."""

    @override
    def build(self, shape: tuple[int, ...], num_classes: int) -> Network:
        return Network(nn.Flatten(), nn.Sequential(nn.Linear(64, num_classes), nn.Softmax(1)))


def make_study(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a study of four rounds with one algorithm, ``x``."""
    return studies.settings((), algorithms={"x": parameters}, study={"algorithms": ["x"]})


def list_warnings(settings: dict[str, Any]) -> list[str]:
    studies.write(settings, Path())
    return list(planner.make_plan().warnings)


TUNE = {"over": {"federation.learning_rate": {"log": [0.01, 1]}}, "draws": 2, "rungs": [4], "seeds": [7]}
TUNE |= {"by": "finetuned-on-validation"}
BEST_OVER: dict[str, Any] = {"study.grid": {"partition.alpha": [0.3, 1.0]}, "report.best_over": ["partition.alpha"]}
VALIDATED: dict[str, Any] = {
    "dataset.validation_fraction": 0.2,
    "evaluation.protocols": ["global-on-global", "global-on-validation"],
}
CIFAR = {"dataset": {"name": "cifar10"}}
CIFAR_CNN5 = {"name": "cnn5", "hidden": [8, 8]}
FEDBN = ("algorithms.x: ", "normalization layers")
FEDFOMO = ("algorithms.x", "dataset.validation_fraction")
#: Parameters of the algorithm, sections of params.yaml, and the beginning and other parts of the warning.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "fedbn-mlp": ({"algorithm": "fedbn"}, {}, FEDBN),
    "fedbn-cnn": ({"algorithm": "fedbn"}, {"model": {"name": "cnn", "hidden": 8}}, (*FEDBN, "model.batch_norm")),
    "fedbn-cnn-normalized": ({"algorithm": "fedbn"}, {"model": {"name": "cnn", "hidden": 8, "batch_norm": True}}, ()),
    "fedbn-cnn5": ({"algorithm": "fedbn"}, {"model": CIFAR_CNN5, **CIFAR}, (*FEDBN, "model.batch_norm")),
    "fedbn-cnn5-normalized": ({"algorithm": "fedbn"}, {"model": CIFAR_CNN5 | {"batch_norm": True}, **CIFAR}, ()),
    "cfl": ({"algorithm": "cfl", "after": 4}, {}, ("algorithms.x.after: 4 ", "federation.rounds")),
    "cfl-that-may-split": ({"algorithm": "cfl", "after": 3}, {}, ()),
    "fedfomo": ({"algorithm": "fedfomo"}, {}, FEDFOMO),
    "fedfomo-validated": ({"algorithm": "fedfomo"}, {"dataset": {"validation_fraction": 0.2}}, ()),
    "fedpvr": ({"algorithm": "fedpvr", "layers": 3}, {}, ("algorithms.x.layers: 3 ", " 2 ", "SCAFFOLD")),
    "fedpvr-scaffold": ({"algorithm": "fedpvr", "layers": 2}, {}, ()),
    "feddual": ({"algorithm": "feddual", "layers": 3}, {}, ("algorithms.x.layers: 3 ", " 2 ", "barycenter")),
    "feddual-ablation": ({"algorithm": "feddual", "layers": 3, "dynamic_aggregation": False}, {}, ()),
    "fedper": ({"algorithm": "fedper", "layers": 3}, {}, ("algorithms.x.layers: 3 ", " 2 ")),
    "fedala": ({"algorithm": "fedala", "layers": 3}, {}, ("algorithms.x.layers: 3 ", " 2 ")),
    "lg_fedavg": ({"algorithm": "lg_fedavg", "layers": 3}, {}, ("algorithms.x.layers: 3 ", " 2 ", "FedAvg")),
    "fedavg": ({"algorithm": "fedavg"}, {}, ()),
    "softmax": (
        {"algorithm": "fedavg"},
        {"model": {"name": f"{__name__}.Softmax"}},
        (f"model.name: the outputs of '{__name__}.Softmax' are at least 0 and sum to 1",),
    ),
    "misspelled-hook": (
        {"algorithm": f"{__name__}.Misspelled"},
        {},
        (f"algorithms.x: {__name__}.Misspelled.agregate is never used", "Did you mean 'aggregate'?"),
    ),
    "unknown-setting": (
        {"algorithm": f"{__name__}.UnknownSetting"},
        {},
        (f"algorithms.x: {__name__}.UnknownSetting.unsupported_settings: 'weight_decays'", "'weight_decay'?"),
    ),
}


def require_warning(warnings: list[str], parts: tuple[str, ...]) -> None:
    """Require one warning with these parts, beginning with the first. Without parts, require none."""
    assert len(warnings) == bool(parts)
    for warning in warnings:
        assert warning.startswith(parts[0])
        assert all(part in warning for part in parts)
        assert ("model.batch_norm" in warning) == ("model.batch_norm" in parts)


class ReadsValues(FedAvg):
    """A custom method whose initial state depends on values, so that its models are unknown in the plan."""

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        return {"model": initial_model(0) * float(initial_model(0).norm())}


@pytest.mark.parametrize(
    ("protocols", "algorithms", "warned"),
    [
        (["global-on-global"], ["fedavg", "fedbabu", "fedper", "ifca", "local"], ["fedper", "ifca", "local"]),
        (["global-on-global", "kept-on-local"], ["ifca", "local"], []),
        (["prototype-on-local", "global-on-local"], ["fedavg", "fedproto", "fedper"], ["fedper"]),
        (["prototype-on-local"], ["fedavg", "fedproto"], ["fedavg"]),
    ],
)
def test_plan_warns_about_method_without_model_of_any_protocol(
    protocols: list[str], algorithms: list[str], warned: list[str]
) -> None:
    settings = studies.settings(algorithms, evaluation={"protocols": protocols})
    warnings = [warning for warning in list_warnings(settings) if warning.startswith("evaluation.protocols: ")]
    assert [warning.split()[1] for warning in warnings] == warned
    assert all(", ".join(protocols) in warning for warning in warnings)


def test_plan_has_no_protocol_warning_for_method_that_reads_values() -> None:
    algorithm = f"{ReadsValues.__module__}.ReadsValues"
    settings = make_study({"algorithm": algorithm}) | {"evaluation": {"protocols": ["global-on-global"]}}
    assert list_warnings(settings) == []


@pytest.mark.parametrize(("stack", "parts"), [(4, ("execution.stack: 4 ", "lstm")), (1, ()), ("auto", ())])
def test_plan_warns_about_stack_of_model_that_cannot_be_stacked(stack: int | str, parts: tuple[str, ...]) -> None:
    text = {"dataset": {"name": "generated", "like": "imdb"}, "model": {"name": "lstm", "vocabulary": 10000}}
    require_warning(list_warnings(studies.settings(execution={"stack": stack}) | text), parts)


@pytest.mark.parametrize("case", CASES)
def test_plan_warns_about_methods_without_effect(case: str) -> None:
    parameters, sections, parts = CASES[case]
    require_warning(list_warnings(make_study(parameters) | sections), parts)


@pytest.mark.parametrize(("split", "parts"), [("validation", ()), ("train", FEDFOMO)])
def test_fedfomo_warning_depends_on_validation_data_of_partition_file(split: str, parts: tuple[str, ...]) -> None:
    uses = ["train"] * 1000 + [split] * 300 + ["test"] * 100
    rows = [f"{sample},{sample % 10},{use}" for sample, use in enumerate(uses)]
    Path("mine.csv").write_text("\n".join(["sample,client,split", *rows]))
    sha256 = hashlib.sha256(Path("mine.csv").read_bytes()).hexdigest()
    partition = {"scheme": "file", "path": "mine.csv", "sha256": sha256}
    require_warning(list_warnings(make_study({"algorithm": "fedfomo"}) | {"partition": partition}), parts)


def test_planning_downloads_no_weights_to_count_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A frozen base has no trainable layers."""

    def reject_download(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan downloads nothing")

    monkeypatch.setattr(torch.hub, "download_url_to_file", reject_download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (warning,) = list_warnings(make_study({"algorithm": "fedpvr", "layers": 3}) | CIFAR | {"model": {"name": "vgg16"}})
    assert re.match(r"algorithms\.x\.layers: 3 .* 2 ", warning)


@pytest.mark.parametrize("family", ["Unbuildable", "Normalized"])
def test_plan_of_custom_model_has_no_fedbn_warning(family: str) -> None:
    assert list_warnings(make_study({"algorithm": "fedbn"}) | {"model": {"name": f"{__name__}.{family}"}}) == []


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"dataset.test_fraction": 0.4}, "dataset.test_fraction: 0.4 has no effect, because dataset.split is"),
        ({"dataset.stratified": True}, "dataset.stratified: True has no effect, because no samples are split"),
        ({"dataset.label_noise_kind": "pairwise"}, "dataset.label_noise_kind: pairwise has no effect, because there"),
        ({"evaluation.finetune_epochs": 5}, "evaluation.finetune_epochs: 5 has no effect, because no model of"),
        ({"transforms.on_test": True}, "transforms.on_test: True has no effect, because there is no augmentation"),
        (VALIDATED | {"report.best_on": "validation"}, "report.best_on: validation has no effect, because there is no"),
        (VALIDATED | {"report.best_on": "validation", **BEST_OVER}, None),
        ({"dataset.test_fraction": 0.4, "dataset.split": "pooled"}, None),
        ({"dataset.label_noise_kind": "pairwise", "study.grid": {"dataset.label_noise": [0, 0.1]}}, None),
        ({"dataset.validation_fraction": 0.2, "evaluation.finetune_epochs": 5, "tune": TUNE}, None),
        ({"dataset.label_noise_kind": "pairwise", "dataset.label_noise": 0.1}, None),
        ({"evaluation.finetune_epochs": 5, "evaluation.protocols": ["finetuned-on-local"]}, None),
        ({"transforms.on_test": True, "transforms.flip": True}, None),
        ({"transforms.fill": "mean"}, "transforms.fill: mean has no effect, because there is no crop or rotation"),
        ({"transforms.fill": "mean", "transforms.rotation": 10}, None),
    ],
)
def test_plan_warns_about_settings_that_another_one_disables(changes: dict[str, Any], start: str | None) -> None:
    warnings = list_warnings(loader.override_settings(studies.settings(), changes))
    assert [warning.startswith(str(start)) for warning in warnings] == ([True] if start else [])


@pytest.mark.parametrize(
    "changes",
    [
        {"federation.schedule": {"name": "cosine", "period": 4}},
        {"federation.schedule": {"name": "cosine", "period": 3}},  # only the last round has rate 0
        {"federation.schedule": {"name": "cosine", "period": 2, "minimum": 0.01}},
        {"federation.schedule": {"name": "cosine", "period": 2}, "federation.optimizer": "adam"},
        {"federation.learning_rate": 0.0},
    ],
)
def test_plan_accepts_schedules_without_division_by_rate_of_zero(changes: dict[str, Any]) -> None:
    """Other schedules are among the invalid settings."""
    adam = {"algorithms.x.adam": True} if "federation.optimizer" in changes else {}
    settings = loader.override_settings(make_study({"algorithm": "scaffold"}), changes | adam)
    assert all("minimum in round" in warning for warning in list_warnings(settings))


def test_plan_warns_about_name_of_grid_without_effect() -> None:
    """A rank test would count equal columns as independent results."""
    grid: dict[str, Any] = {"dataset.test_fraction": [0.1, 0.5], "partition.alpha": [0.1, 0.5]}
    grid["env"] = {name: {"evaluation.finetune_epochs": epochs} for name, epochs in (("a", 1), ("b", 5))}
    grid["partition.scheme"] = ["iid", "dirichlet"]  # iid has no alpha, but dirichlet has
    warnings = list_warnings(studies.settings() | {"study": {"algorithms": ["fedavg"], "grid": grid}})
    assert [warning for warning in warnings if warning.startswith("study.grid")] == [
        f"study.grid: '{name}' has no effect, because all of its values give the same runs. Remove it."
        for name in ("dataset.test_fraction", "env")
    ]


@pytest.mark.parametrize(
    ("values", "report", "has_warning"),
    [
        ([0.1, 1], {}, True),
        ([0.1], {}, False),
        ([0.1, 1], {"best_over": ["algorithms.fedprox.mu"]}, False),
        ([0.1, 1], {"statistics": ["lowest"]}, False),
        ([0.1, 1], {"baseline": "fedavg"}, False),
    ],
)
def test_plan_warns_about_baseline_with_several_rows(
    values: list[float], report: dict[str, Any], has_warning: bool
) -> None:
    study = {"algorithms": ["fedavg", "fedprox"], "grid": {"algorithms.fedprox.mu": values, "partition.alpha": [1, 2]}}
    report = {"statistics": ["difference"], "baseline": "fedprox"} | report
    warnings = list_warnings(studies.settings() | {"study": study, "report": report})
    message = "report.baseline: the grid varies algorithms.fedprox.mu of fedprox, so methods without it have no"
    assert [warning.startswith(message) for warning in warnings] == [True] * has_warning


def test_plan_warnings_are_distinct_and_cover_grid_points() -> None:
    grid = {"partition.alpha": [0.3, 1.0], "algorithms.x.after": [1, 4, 9]}
    warnings = list_warnings(
        make_study({"algorithm": "cfl"}) | {"study": {"algorithms": ["x"], "seeds": [0, 1], "grid": grid}}
    )
    assert [re.match(r"[\w.]+: \d+", warning).group() for warning in warnings] == [  # type: ignore[union-attr]
        "algorithms.x.after: 4",
        "algorithms.x.after: 9",
    ]


def test_plan_command_prints_warnings_to_stderr_and_records_them() -> None:
    studies.write(make_study({"algorithm": "cfl"}), Path())
    command = [sys.executable, "-m", "fedpipe", "plan", "--dry-run"]
    dry = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(dry.stdout.splitlines()) == 1
    (line,) = dry.stderr.splitlines()
    assert line.startswith("fedpipe: warning: algorithms.x.after: 20 ")
    assert not Path("results").exists()
    done = CliRunner().invoke(app.app, ["plan"], catch_exceptions=False)
    assert done.stderr == dry.stderr
    recorded = json.loads(Path("results/plan.json").read_text())["warnings"]
    assert [f"fedpipe: warning: {sentence}" for sentence in recorded] == [line]


def test_plan_warnings_of_several_studies_begin_with_study_path() -> None:
    for name in ("one", "two"):
        path = Path("studies/a") / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(make_study({"algorithm": "cfl"})))
    command = [sys.executable, "-m", "fedpipe", "plan", "--params", "studies/a", "--dry-run"]
    *lines, last = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert last.startswith("fedpipe: 2 studies: ")
    assert [line.partition(": 20 ")[0] for line in lines] == [
        f"fedpipe: warning: studies/a/{name}.yaml: algorithms.x.after" for name in ("one", "two")
    ]


def test_results_table_is_followed_by_plan_warnings() -> None:
    tree = Tree(["fedavg"], seeds=[0])
    tree.write(0, [{"global-on-global": [(1, 2)]}] * 3)
    before = tables.render_markdown_table(StudyData(tree.plan))
    assert "Warning" not in before
    tree.change(warnings=("a.b: c is d.", "e: f."))
    after = tables.render_markdown_table(StudyData(tree.plan))
    above, _, below = after.partition("Warning: a.b: c is d.\n\nWarning: e: f.\n\n")
    assert above + below == before
    assert "| fedavg" in above


@pytest.mark.parametrize(
    ("dataset", "problem"),
    [
        ({"split": "pooled", "test_fraction": 0.2, "subset": 30}, "10 of 10 clients have no test sample"),
        ({"split": "pooled", "test_fraction": 0.4, "subset": 30}, None),
    ],
)
def test_plan_warns_about_clients_without_test_samples(dataset: dict[str, Any], problem: str | None) -> None:
    """A fifth of three samples rounds down to zero. The plan contains only the first seed's warning."""
    settings = studies.settings(dataset={"name": "digits"} | dataset, study={"seeds": [0, 1]})
    studies.prepare(settings | {"partition": {"scheme": "iid"}})
    plan = planner.make_plan()
    (first, second) = plan.partitions
    warning = f"{problem} in partition {first} (scheme iid, seed 0): 0, 1, 2, 3, 4, 5, 6, 7, 8, 9."
    assert plan.warnings == ((warning,) if problem else ())
    result = CliRunner().invoke(app.app, ["partition", "--preview"])
    assert (f"fedpipe: warning: {warning}\n" in result.output) == bool(problem)
    assert (f"in partition {second} (scheme iid, seed 1)" in result.output) == bool(problem)
