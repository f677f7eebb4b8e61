"""Studies of the papers are planned without their data, and have the runs of the paper."""

import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpipe.core.storage import layout
from fedpipe.papers import layouts, make, published
from fedpipe.planning import planner
from fedpipe.planning.planner import NewPlan
from fedpipe.settings.loader import read_params
from tests.small_studies import ROOT

STUDIES = {
    str(path.relative_to(ROOT / "studies/papers").with_suffix(""))
    for path in (ROOT / "studies/papers").rglob("*.yaml")
    if path.name != layout.DVC_YAML and layout.READINGS not in path.parts
}
for_each_study = pytest.mark.parametrize("study", sorted(STUDIES))
RUNS = {
    "feddw/table1": 480,
    "feddw/table2": 360,
    "feddw/table3": 7,
    "feddw/table4": 60,
    "feddual/table1": 81,
    "feddual/table2": 9,
    "feddual/table3": 9,
    "feddual/table4": 9,
    "pfps_lwc/table2": 63,
    "pfps_lwc/table3": 63,
    "pfps_lwc/table4": 42,
    "pfps_lwc/table5": 24,
    "pfps_lwc/figure7": 17,
    "pfps_lwc/figure8": 16,
    "cwfedavg/table1": 189,
    "cwfedavg/table2": 135,
    "cwfedavg/table3": 75,
    "cwfedavg/table4": 18,
    "cwfedavg/table6": 12,
}
SHARED = {  #: number of runs that two studies share
    ("feddw/figure6", "feddw/table1"): 20,
    ("feddual/table2", "feddual/table1"): 3,
    ("feddual/table3", "feddual/table1"): 3,
    ("feddual/table4", "feddual/table1"): 3,
    ("feddual/figure15", "feddual/figure14"): 27,
    ("feddual/figure14", "feddual/table1"): 27,
    ("pfps_lwc/table5", "pfps_lwc/table2"): 6,
    ("pfps_lwc/table5", "pfps_lwc/table3"): 6,
    ("pfps_lwc/figure7", "pfps_lwc/table2"): 1,
    ("pfps_lwc/figure8", "pfps_lwc/table2"): 2,
    ("cwfedavg/table3", "cwfedavg/table1"): 30,
    ("cwfedavg/table4", "cwfedavg/table3"): 6,
}


@functools.cache
def plan_study(study: str, preset: str = "full") -> NewPlan:
    return planner.make_plan(Path("studies/papers") / f"{study}.yaml", preset)


@pytest.fixture(autouse=True)
def folder_with_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with only the studies, without data and results."""
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPIPE_MIRROR", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])


def list_run_paths(study: str) -> set[Path]:
    return {run.path for run in plan_study(study).runs}


def list_columns(study: str, preset: str = "full") -> set[str]:
    """List the names of a study's columns: values of its grid axes with slashes between them."""
    plan = plan_study(study, preset)
    names = [axis for axis in plan.grid if not axis.startswith("algorithms.")]
    return {"/".join(str(cell.grid[axis]) for axis in names if axis in cell.grid) for cell in plan.cells}


@for_each_study
def test_study_is_planned_without_data(study: str) -> None:
    plan = plan_study(study)
    assert {cell.algorithm for cell in plan.cells} == set(plan.algorithms)
    assert len(plan.runs) == RUNS.get(study, len(plan.runs))


@pytest.mark.slow
@for_each_study
def test_study_has_smaller_presets(study: str) -> None:
    assert set(read_params(Path("studies/papers") / f"{study}.yaml")["presets"]) >= {"smoke", "reduced"}
    whole = plan_study(study)
    for preset in ("smoke", "reduced"):
        plan = plan_study(study, preset)
        assert plan.seeds == (0,)
        assert len(plan.runs) <= len(whole.runs)
        assert set(plan.algorithms) <= set(whole.algorithms)
        assert {partition["dataset"].get("subset", 0) for partition in plan.partitions.values()} != {
            0
        } or preset != "smoke"


@for_each_study
def test_only_preset_smoke_generates_data(study: str) -> None:
    params = read_params(Path("studies/papers") / f"{study}.yaml")
    presets = params.pop("presets")
    assert [preset for preset, changes in presets.items() if "generate" in str(changes)] == ["smoke"]
    assert "generate" not in str(params)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["smoke", "reduced"])
@pytest.mark.parametrize("paper", layouts.load_papers().values(), ids=layouts.PAPER_STEMS)
def test_smaller_preset_has_only_cells_of_tables(paper: layouts.Paper, preset: str) -> None:
    for table in paper.tables.values():
        if table.study and table.metric != "hyperparameter":
            study = f"{paper.stem}/{table.study}"
            assert list_columns(study, preset) <= set(table.column_paths), study
            assert set(plan_study(study, preset).algorithms) <= {row.method for row in table.rows.values()}


@pytest.mark.slow
def test_feddual_preset_rates_has_all_learning_rates() -> None:
    plan = plan_study("feddual/table1", "rates")
    assert len(plan.runs) == 3 * 3 * 5 * (7 + 4 + 4)
    assert plan.report.best_over == ("federation.learning_rate", "algorithms.fedprox.mu", "algorithms.fednova.mu")


def test_dvc_outputs_match_paths_of_results_and_pages() -> None:
    """The path of a study at preset full does not contain the preset."""
    stages = yaml.safe_load((ROOT / "studies/papers" / layout.DVC_YAML).read_text())["stages"]

    def get_output_path(stage: str, **item: str) -> Path:
        (((path, _),),) = (output.items() for output in stages[stage]["outs"])
        for key, value in item.items():
            path = path.replace(f"${{item.{key}}}", value)
        return Path(path)

    path = Path("studies/papers/feddw/table1.yaml")
    assert get_output_path("whole", study="feddw/table1") == layout.StudyFiles.from_params(path, "full").plan.parent
    assert (
        get_output_path("table", study="feddw/table1", preset="smoke")
        == layout.StudyFiles.from_params(path, "smoke").plan.parent
    )
    assert get_output_path("pages", preset="full") == make.get_pages_folder("full")


def test_each_table_and_figure_with_runs_has_study() -> None:
    expected = set()
    for paper in layouts.load_papers().values():
        studies = [table.study for table in paper.tables.values()] + [figure.study for figure in paper.figures.values()]
        expected |= {f"{paper.stem}/{study}" for study in studies if study}
    assert expected == STUDIES


@pytest.mark.parametrize("paper", layouts.load_papers().values(), ids=layouts.PAPER_STEMS)
def test_layout_rows_and_columns_match_studies(paper: layouts.Paper) -> None:
    for number, table in paper.tables.items():
        if table.study is None or table.metric == "hyperparameter":
            continue
        plan = plan_study(f"{paper.stem}/{table.study}")
        methods = {row.method for row in table.rows.values() if row.method}
        assert methods == set(plan.algorithms), number
        elsewhere = {column for repeat in table.repeats for column in repeat.columns if not repeat.rows}
        formulas = {column for column in table.column_paths if table.get_metric("", column) != table.metric}
        assert set(table.column_paths) - elsewhere - formulas == list_columns(f"{paper.stem}/{table.study}"), number
        for row, entry in table.rows.items():
            if entry.method and table.metric == "accuracy_pct":
                assert plan.method_protocols.get(entry.method, plan.protocols[0]) == table.get_protocol(row), (
                    number,
                    row,
                )


@pytest.mark.parametrize(("study", "other"), SHARED, ids=["-".join(pair) for pair in SHARED])
def test_two_studies_share_expected_number_of_runs(study: str, other: str) -> None:
    assert len(list_run_paths(study) & list_run_paths(other)) == SHARED[study, other]


def read_settings(study: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Read the settings of a study's runs by method, values of the column, and seed."""
    plan = plan_study(study)
    texts = {str(cell.files.settings): plan.file_texts[str(cell.files.settings)] for cell in plan.cells}
    read_ = {path: yaml.load(text, yaml.CSafeLoader) for path, text in texts.items()}
    return {
        (cell.algorithm, *map(str, cell.grid.values()), str(cell.seed)): read_[str(cell.files.settings)]
        | {"rounds": cell.rounds}
        for cell in plan.cells
    }


PUBLISHED_SETTINGS = {  #: settings in the papers' texts for all runs of a table or figure, with all values
    ("feddw/table1",): {
        "federation.clients": {10},
        "federation.participation": {1.0, 0.5},
        "partition.alpha": {0.5, 0.1},
        "federation.batch_size": {128, 512},
        "federation.local_epochs": {5},
        "federation.optimizer": {"adam", "sgd"},  # Per-FedAvg's plain steps (D6)
        "federation.learning_rate": {0.001},
        "rounds": {50, 10},
        "seed": set(range(5)),
    },
    ("feddual/table1", "feddual/table2"): {
        "federation.clients": {100},
        "federation.participation": {0.1},
        "partition.alpha": {0.01},
        "federation.batch_size": {32},
        "federation.local_epochs": {3},
        "seed": set(range(3)),
    },
    ("pfps_lwc/table2", "pfps_lwc/table3", "pfps_lwc/table4", "pfps_lwc/table5"): {
        "federation.clients": {10},
        "federation.participation": {0.3, 0.5, 0.7},
        "federation.batch_size": {64},
        "federation.local_epochs": {5},
        "federation.optimizer": {"sgd"},
        "federation.learning_rate": {0.01},
        "rounds": {20},
        "seed": {0},
    },
    ("cwfedavg/table1", "cwfedavg/table3", "cwfedavg/table4", "cwfedavg/table6"): {
        "federation.clients": {20},
        "federation.participation": {1.0},
        "federation.batch_size": {10},
        "federation.local_epochs": {1},
        "federation.optimizer": {"sgd"},
        "federation.learning_rate": {0.005},
        "dataset.test_fraction": {0.25},
        "rounds": {1000},
        "seed": set(range(3)),
    },
}


@pytest.mark.parametrize(
    ("study", "stated"), [(study, stated) for studies_, stated in PUBLISHED_SETTINGS.items() for study in studies_]
)
def test_runs_have_settings_of_papers_text(study: str, stated: dict[str, set[Any]]) -> None:
    found: dict[str, set[Any]] = {name: set() for name in stated}
    for run in read_settings(study).values():
        for name in stated:
            part, _, key = name.partition(".")
            found[name] |= {run[part][key] if key else run[part]}
    assert found == stated


def test_fedrep_epochs_sum_to_local_epochs() -> None:
    """FedRep has its own numbers of epochs, which a column with other local epochs must also set."""
    checked = set()
    for study in ("feddw/table1", "feddw/table2"):
        for (method, *_), run in read_settings(study).items():
            if method == "fedrep":
                epochs = run["algorithm"]["head_epochs"] + run["algorithm"]["body_epochs"]
                assert epochs == run["federation"]["local_epochs"]
                checked.add(epochs)
    assert checked == {5, 10, 2}


def test_pfps_lwc_baselines_have_published_parameters() -> None:
    """FedProto has its parameters of CIFAR-10, as its paper has no CIFAR-100. pFedMe's inner rate is a reading."""
    for study in ("pfps_lwc/table2", "pfps_lwc/table3", "pfps_lwc/table4"):
        for (method, *_), run in read_settings(study).items():
            parameters = {
                "fedproto": {"penalty": 0.1},
                "pfedme": {"attraction": 15, "inner_steps": 5, "inner_rate": 0.01},
            }
            assert {name: run["algorithm"][name] for name in parameters.get(method, {})} == parameters.get(method, {})
            assert run["federation"]["momentum"] == (0 if method == "pfedme" else 0.9), "D36"


def test_pfps_lwc_figure_5_has_curves_of_four_panels() -> None:
    """The panels have CIFAR-10 at (beta, P) = (0.5, 0.3) and (0.3, 0.5), and CIFAR-100 at (0.1, 0.5) and (0.5, 0.5)."""
    found = set()
    for part in layouts.load_papers()["PFPS-LWC"].figures["Figure 5"].run_selections:
        for cell in plan_study(f"pfps_lwc/{part.study}").cells:
            point = cell.grid["partition.alpha"], cell.grid["federation.participation"]
            expected = [value if isinstance(value, list) else [value] for value in part.where.values()]
            assert list(part.where) == ["partition.alpha", "federation.participation"]
            if all(value in among for value, among in zip(point, expected, strict=True)):
                found.add((part.study, *point))
    assert found == {("table2", 0.5, 0.3), ("table2", 0.3, 0.5), ("table3", 0.1, 0.5), ("table3", 0.5, 0.5)}


def test_cwfedavg_study_has_published_hyperparameters() -> None:
    """The hyperparameters are in Table 5 and in the text of cwFedAvg's paper."""
    names = {"alpha_k": "alpha", "sigma": "sigma", "eps1": "eps1", "eps2": "eps2", "rho": "rho"}
    special_names = {("FedProx", "mu"): "mu", ("FedAMP", "lambda"): "attraction", ("FedUV", "mu"): "variance"}
    special_names |= {("FedUV", "lambda"): "uniformity"}
    methods = {
        "FedProx": "fedprox",
        "FedAMP": "fedamp",
        "CFL": "cfl",
        "IFCA": "ifca",
        "FedNH": "fednh",
        "FedUV": "feduv",
    }
    plan = plan_study("cwfedavg/table1")
    checked = 0
    for cell_id, number in published.load_published_numbers().items():
        if (cell_id.paper, cell_id.metric) != ("cwFedAvg", "hyperparameter"):
            continue
        for cell in plan.cells:
            data = str(cell.grid["data"]).partition("/")[2].rstrip("*")
            if cell_id.row == "cwFedAvg" and (cell.algorithm, f"lambda/{data}") == ("cwfedavg", cell_id.column):
                parameter = "wdr"
            elif cell.algorithm != methods.get(cell_id.row):
                continue
            elif cell_id.row == "IFCA":
                if data not in cell_id.column.removeprefix("k/").split(" and "):
                    continue
                parameter = "clusters"
            else:
                parameter = special_names.get((cell_id.row, cell_id.column)) or names[cell_id.column]
            settings = yaml.safe_load(plan.file_texts[str(cell.files.settings)])
            assert settings["algorithm"][parameter] == number.mean, (cell_id, data)
            checked += 1
    # Per seed: 7 columns with 9 parameters of FedProx, FedAMP, CFL, FedNH and FedUV, 6 with IFCA's, and 7 with lambda.
    assert checked == 3 * (7 * 9 + 6 + 7)


def test_papers_page_contains_readings_of_studies() -> None:
    page = (ROOT / "docs/papers.md").read_text()
    readings = [int(number) for number in re.findall(r"^\| D(\d+) \|", page, flags=re.M)]
    assert readings == list(range(1, len(readings) + 1))
    named: set[int] = set()
    for path in (ROOT / "studies/papers").glob("*/*.yaml"):
        for first, last in re.findall(r"\bD(\d+)(?:-D(\d+))?\b", path.read_text()):
            named |= set(range(int(first), int(last or first) + 1))
    assert len(named) > 20
    assert named <= set(readings)
