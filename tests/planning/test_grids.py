"""Unused parameters of partition schemes, incomplete grid keys, and missing data sets of grids and presets."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.planning import download, planner
from tests import small_studies as studies
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def plan_study(labels: tuple[str, ...] = ("fedavg",), **sections: Any) -> planner.NewPlan:
    studies.write(studies.settings(labels, **sections), Path())
    return planner.make_plan()


IGNORED_KEY = r"^partition\.alpha: 0\.3 .* scheme iid "


def test_grid_over_schemes_warns_about_and_ignores_unused_parameters() -> None:
    plan = plan_study(study={"grid": {"partition.scheme": ["iid", "dirichlet"]}})
    (warning,) = plan.warnings
    assert re.match(IGNORED_KEY, warning)
    iid = plan_study(partition={"scheme": "iid"})
    alone = plan_study()
    assert {run.key for run in plan.runs} == {run.key for run in (*iid.runs, *alone.runs)}


def test_partition_warns_about_and_ignores_parameters_of_other_scheme() -> None:
    """For example, ``dvc exp run -S partition.scheme=iid`` keeps the other keys."""
    studies.write(studies.settings() | {"partition": {"scheme": "iid"}}, Path())
    clean = planner.make_plan()
    plan = plan_study(partition={"scheme": "iid"})
    assert (Path("params.yaml").read_text()).count("alpha: 0.3") == 1
    (warning,) = plan.warnings
    assert re.match(IGNORED_KEY, warning)
    assert clean.warnings == ()
    assert [run.key for run in plan.runs] == [run.key for run in clean.runs]


def test_grid_points_contain_only_parameters_of_their_scheme() -> None:
    plan = plan_study(study={"grid": {"partition.scheme": ["iid", "dirichlet"], "partition.alpha": [0.1, 0.5]}})
    points = [cell.grid for cell in plan.cells]
    assert points == [
        {"partition.scheme": "iid"},
        {"partition.scheme": "dirichlet", "partition.alpha": 0.1},
        {"partition.scheme": "dirichlet", "partition.alpha": 0.5},
    ]
    assert len(plan.runs) == 3


def test_missing_grid_dataset_error_shows_download_command_of_study() -> None:
    Path("studies").mkdir()
    params = studies.settings(study={"grid": {"dataset.sha256": ["0" * 64]}})
    params["dataset"] = {"name": "npz", "path": "own.npz", "sha256": "1" * 64, "split": "pooled"}
    studies.write(params, Path())
    Path("params.yaml").rename("studies/own.yaml")
    with pytest.raises(SettingsError, match=r"is not stored.*`fedpipe download --params studies/own\.yaml`"):
        planner.make_plan(Path("studies/own.yaml"))


def test_download_stores_datasets_of_grid_and_presets() -> None:
    """The study uses several data sets in user files."""
    for name, samples in (("one", 60), ("two", 80), ("small", 40)):
        np.savez(
            f"{name}.npz",
            **{f"x_{part}": np.ones((samples, 8)) for part in ("train", "test")},
            **{f"y_{part}": np.arange(samples) % 3 for part in ("train", "test")},
        )
    data = {
        name: {"dataset.path": f"{name}.npz", "dataset.sha256": files.compute_file_sha256(Path(f"{name}.npz"))}
        for name in ("one", "two", "small")
    }
    settings = studies.settings(study={"grid": {"data": {name: data[name] for name in ("one", "two")}}})
    settings["dataset"] = {"name": "npz", "path": "one.npz", "sha256": data["one"]["dataset.sha256"]}
    settings["presets"] = {"smoke": {"study.grid.data": {"small": data["small"]}}}
    studies.write(settings, Path())
    for preset in ("full", "smoke"):
        with pytest.raises(SettingsError, match=r"is not stored.*`fedpipe download`"):
            planner.make_plan(preset=preset)
    result = CliRunner().invoke(app.app, ["download"])
    assert result.stdout.count(" is stored.\n") == 3, result
    assert len(planner.make_plan().runs) == 2
    assert len(planner.make_plan(preset="smoke").runs) == 1
    assert CliRunner().invoke(app.app, ["download"]).stdout.count(" is stored.\n") == 1, "stored data sets are reused"


@pytest.mark.parametrize(
    "sections",
    [
        {"presets": 5},
        {"presets": {"smoke": None}},
        {"presets": {"smoke": {1: 2}}},
        {"presets": {"smoke": {"study.grid": 5}}},
        {"study": [1]},
        {"study": {"grid": 5}},
        {"study": {"grid": {"federation.rounds": 5}}},
        {"study": {"grid": {"data": {"small": None}}}},
    ],
)
def test_download_leaves_invalid_grids_and_presets_to_plan(sections: dict[str, Any]) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(sections))
    assert download.download_and_pin_dataset(None, Path("params.yaml")).endswith(" is stored.")
    with pytest.raises(SettingsError, match=r"^(presets|study)[:.]"):
        planner.make_plan(preset="smoke")


def test_error_of_value_in_preset_names_preset() -> None:
    """The file has a valid number of rounds, and the preset an invalid one."""
    settings = studies.settings(presets={"smoke": {"federation.rounds": 0}})
    planner.make_plan(settings=settings)
    with rejects("federation.rounds: 0 ... (with preset smoke)"):
        planner.make_plan(settings=settings, preset="smoke")


def test_error_of_several_sections_in_preset_names_preset() -> None:
    """A rank test needs a table with several methods, and the preset has one."""
    settings = studies.settings(("fedavg", "fedprox", "feddw"), report={"rank_test": "holm"})
    settings["study"]["grid"] = {"partition.alpha": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]}
    settings["presets"] = {"smoke": {"study.algorithms": ["fedavg"]}}
    planner.make_plan(settings=settings)
    with rejects("report.rank_test: ... (with preset smoke)"):
        planner.make_plan(settings=settings, preset="smoke")


def test_name_of_method_that_is_too_long_for_file_is_rejected() -> None:
    name = "a" * 101
    with pytest.raises(SettingsError, match=rf"study.algorithms.0: '{name}' can't be used"):
        planner.make_plan(settings=studies.settings((name,), algorithms={name: {"algorithm": "fedavg"}}))


def test_missing_sha256_error_of_preset_shows_command_or_sha256() -> None:
    """The command fills in only the sha256 of the study's data set. For a preset's data set, the error shows it."""
    Path("studies").mkdir()
    np.savez(
        "own.npz", x_train=np.zeros((9, 8)), y_train=np.arange(9) % 3, x_test=np.zeros((3, 8)), y_test=np.arange(3)
    )
    own = {"name": "npz", "path": "own.npz", "split": "pooled"}
    for dataset, preset, advice in (
        (own, {"federation.rounds": 1}, "`fedpipe download --params studies/own.yaml`"),
        ({"name": "digits"}, {"dataset": own}, files.compute_file_sha256(Path("own.npz"))),
    ):
        studies.write(studies.settings() | {"dataset": dataset, "presets": {"smoke": preset}}, Path())
        Path("params.yaml").replace("studies/own.yaml")
        with rejects(f"dataset.sha256: missing for own.npz ... {advice}"):
            planner.make_plan(Path("studies/own.yaml"), "smoke")
