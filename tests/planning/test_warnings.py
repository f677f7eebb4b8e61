"""What a plan says of a study in which a method is idle, or another than its name says."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.models.base import Model, Network
from fedpipe.planning import planner
from fedpipe.report import tables
from fedpipe.report.data import StudyData
from tests import small_studies as studies
from tests.report.conftest import Tree

LAYERS = "parametrized layers of the network, so"


class Unbuildable(Model):
    """A model of one's own that needs what is not here."""

    def build(self, shape: tuple[int, ...], classes: int) -> Network:
        """Reads a file."""
        raise FileNotFoundError("weights.pt")


class Normalized(Model):
    """A model of one's own with a normalization layer inside another one."""

    def build(self, shape: tuple[int, ...], classes: int) -> Network:
        """A linear layer, and a group normalization."""
        body = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 8), nn.Sequential(nn.GroupNorm(2, 8))))
        return Network(body, nn.Linear(8, classes))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(parameters: dict[str, Any]) -> dict[str, Any]:
    """A study of four rounds with one algorithm, called ``x``."""
    return studies.settings((), algorithms={"x": parameters}, study={"algorithms": ["x"]})


def warned(settings: dict[str, Any]) -> list[str]:
    studies.write(settings, Path())
    found = list(planner.make_plan().warnings)
    return found


CIFAR = {"dataset": {"name": "cifar10"}}
FEDBN = "algorithms.x: the network of model.name has no normalization layers, so FedBN is FedAvg."
FEDFOMO = (
    "algorithms.x: dataset.validation_fraction is 0, so clients evaluate models on their training data. "
    "A usual value is 0.2."
)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "fedbn-mlp": ({"algorithm": "fedbn"}, {}, FEDBN),
    "fedbn-cnn": (
        {"algorithm": "fedbn"},
        {"model": {"name": "cnn", "hidden": 8}},
        f"{FEDBN} Use model.batch_norm true.",
    ),
    "fedbn-cnn-normalized": (
        {"algorithm": "fedbn"},
        {"model": {"name": "cnn", "hidden": 8, "batch_norm": True}},
        None,
    ),
    "fedbn-cnn5": (
        {"algorithm": "fedbn"},
        {"model": {"name": "cnn5", "hidden": [8, 8]}, **CIFAR},
        f"{FEDBN} Use model.batch_norm true.",
    ),
    "fedbn-cnn5-normalized": (
        {"algorithm": "fedbn"},
        {"model": {"name": "cnn5", "hidden": [8, 8], "batch_norm": True}, **CIFAR},
        None,
    ),
    "cfl": (
        {"algorithm": "cfl", "after": 4},
        {},
        "algorithms.x.after: 4 is not less than federation.rounds (4), so no cluster is ever split and CFL is FedAvg.",
    ),
    "cfl-that-may-split": ({"algorithm": "cfl", "after": 3}, {}, None),
    "fedfomo": ({"algorithm": "fedfomo"}, {}, FEDFOMO),
    "fedfomo-validated": ({"algorithm": "fedfomo"}, {"dataset": {"validation_fraction": 0.2}}, None),
    "fedpvr": (
        {"algorithm": "fedpvr", "layers": 3},
        {},
        f"algorithms.x.layers: 3 is more than the 2 {LAYERS} all layers are corrected, which is SCAFFOLD.",
    ),
    "fedpvr-scaffold": ({"algorithm": "fedpvr", "layers": 2}, {}, None),
    "feddual": (
        {"algorithm": "feddual", "layers": 3},
        {},
        f"algorithms.x.layers: 3 is more than the 2 {LAYERS} the barycenter combines all layers.",
    ),
    "feddual-ablation": ({"algorithm": "feddual", "layers": 3, "dynamic_aggregation": False}, {}, None),
    "fedper": (
        {"algorithm": "fedper", "layers": 3},
        {},
        f"algorithms.x.layers: 3 is more than the 2 {LAYERS} all layers are personal and clients train alone.",
    ),
    "fedala": (
        {"algorithm": "fedala", "layers": 3},
        {},
        f"algorithms.x.layers: 3 is more than the 2 {LAYERS} all layers are mixed.",
    ),
    "fedavg": ({"algorithm": "fedavg"}, {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_warning_is_one_sentence_that_begins_with_its_key(case: str) -> None:
    parameters, sections, wanted = CASES[case]
    assert warned(study(parameters) | sections) == ([wanted] if wanted else [])


@pytest.mark.parametrize(("split", "wanted"), [("validation", []), ("train", [FEDFOMO])])
def test_a_partition_of_ones_own_may_bring_validation_data(split: str, wanted: list[str]) -> None:
    uses = ["train"] * 1000 + [split] * 300 + ["test"] * 100
    rows = [f"{sample},{sample % 10},{use}" for sample, use in enumerate(uses)]
    Path("mine.csv").write_text("\n".join(["sample,client,split", *rows]))
    sha256 = hashlib.sha256(Path("mine.csv").read_bytes()).hexdigest()
    partition = {"scheme": "file", "path": "mine.csv", "sha256": sha256}
    assert warned(study({"algorithm": "fedfomo"}) | {"partition": partition}) == wanted


def test_weights_are_not_fetched_to_count_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A frozen base has no layers that train."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan downloads nothing")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (found,) = warned(study({"algorithm": "fedpvr", "layers": 3}) | CIFAR | {"model": {"name": "vgg16"}})
    assert found.startswith("algorithms.x.layers: 3 is more than the 2 parametrized layers")


@pytest.mark.parametrize("family", ["Unbuildable", "Normalized"])
def test_a_model_of_ones_own_stops_no_plan(family: str) -> None:
    assert warned(study({"algorithm": "fedbn"}) | {"model": {"name": f"{__name__}.{family}"}}) == []


def test_each_is_said_once_and_points_of_a_grid_have_their_own() -> None:
    grid = {"partition.alpha": [0.3, 1.0], "algorithms.x.after": [1, 4, 9]}
    found = warned(study({"algorithm": "cfl"}) | {"study": {"algorithms": ["x"], "seeds": [0, 1], "grid": grid}})
    assert [sentence.partition(" is ")[0] for sentence in found] == [
        "algorithms.x.after: 4",
        "algorithms.x.after: 9",
    ]


def test_the_command_prints_them_beside_its_output_and_records_them() -> None:
    studies.write(study({"algorithm": "cfl"}), Path())
    command = [sys.executable, "-m", "fedpipe", "plan", "--dry-run"]
    dry = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(dry.stdout.splitlines()) == 1
    (line,) = dry.stderr.splitlines()
    assert line.startswith("fedpipe: warning: algorithms.x.after: 20 is not less than federation.rounds (4)")
    assert not Path("results").exists()
    done = CliRunner().invoke(app.app, ["plan"], catch_exceptions=False)
    assert done.stderr == dry.stderr
    recorded = json.loads(Path("results/plan.json").read_text())["warnings"]
    assert [f"fedpipe: warning: {sentence}" for sentence in recorded] == [line]


def test_of_several_studies_each_warning_names_its_own() -> None:
    for name in ("one", "two"):
        path = Path("studies/a") / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(study({"algorithm": "cfl"})))
    command = [sys.executable, "-m", "fedpipe", "plan", "--params", "studies/a", "--dry-run"]
    *told, last = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    assert last.startswith("fedpipe: 2 studies: ")
    assert [line.partition(" is not less")[0] for line in told] == [
        f"fedpipe: warning: studies/a/{name}.yaml: algorithms.x.after: 20" for name in ("one", "two")
    ]


def test_the_table_repeats_them_under_itself() -> None:
    tree = Tree(["fedavg"], seeds=[0])
    tree.write(0, [{"global-on-global": [(1, 2)]}] * 3)
    before = tables.render_markdown(StudyData(tree.plan))
    assert "Warning" not in before
    tree.change(warnings=("a.b: c is d.", "e: f."))
    after = tables.render_markdown(StudyData(tree.plan))
    above, _, below = after.partition("Warning: a.b: c is d.\n\nWarning: e: f.\n\n")
    assert above + below == before
    assert "| fedavg" in above


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ({"split": "pooled", "test_fraction": 0.2, "subset": 30}, "10 of 10 clients have no test sample"),
        ({"split": "pooled", "test_fraction": 0.4, "subset": 30}, None),
    ],
)
def test_clients_without_test_samples_are_listed(
    dataset: dict[str, Any], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three samples each, of which one fifth is none; so for all seeds, of which the first is enough."""
    monkeypatch.chdir(tmp_path)
    settings = studies.settings(dataset={"name": "digits"} | dataset, study={"seeds": [0, 1]})
    studies.prepare(settings | {"partition": {"scheme": "iid"}})
    made = planner.make_plan()
    (first, second) = made.partitions
    sentence = f"{told} in partition {first} (scheme iid, seed 0): 0, 1, 2, 3, 4, 5, 6, 7, 8, 9."
    assert made.warnings == ((sentence,) if told else ())
    printed = CliRunner().invoke(app.app, ["partition", "--preview"])
    assert (f"fedpipe: warning: {sentence}\n" in printed.output) == bool(told)
    assert (f"in partition {second} (scheme iid, seed 1)" in printed.output) == bool(told)
