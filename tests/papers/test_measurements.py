"""Cells and figures of the papers from small studies on digits, which have the names of the papers' studies."""

from __future__ import annotations

import functools
import io
import itertools
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files
from fedpipe.engine.diagnostics import stage
from fedpipe.papers import comparison, figures, layouts, make, measurements, published
from fedpipe.papers.comparison import MeasuredCell
from fedpipe.papers.figures import SvgFigure
from fedpipe.papers.published import CellId
from fedpipe.papers.runs import LocalRun
from fedpipe.papers.studies import HERE, PaperStudy
from fedpipe.planning import planner
from fedpipe.planning.plan import Plan
from fedpipe.planning.planner import NewPlan
from fedpipe.report import contents
from fedpipe.report.contrasts import RunMean
from fedpipe.report.data import StudyData
from fedpipe.settings.execution import Execution
from tests import small_studies as studies

PFPS, CW = layouts.load_papers()["PFPS-LWC"], layouts.load_papers()["cwFedAvg"]
SMOKE = {"smoke": {"federation.rounds": 2, "dataset.subset": 200}}
GRID = {
    "evaluation": {"protocols": ["personal-on-local", "prototype-on-local"]},
    "algorithms": {"fedper": {}, "fedproto": {"protocol": "prototype-on-local"}},
    "study": {
        "algorithms": ["fedper", "fedproto"],
        "seeds": [0, 1],
        "grid": {"partition.alpha": [0.3, 0.5], "federation.participation": [0.3, 0.5]},
    },
}
SWEEP = {
    "evaluation": {"protocols": ["personal-on-local"]},
    "algorithms": {"fedper": {}, "pfps_lwc": {}},
    "study": {
        "algorithms": ["fedper", "pfps_lwc"],
        "grid": {
            "setting": {
                "Figure 8a/8": {"federation.batch_size": 8},
                "Figure 8a/64": {"federation.batch_size": 64},
                "Figure 8b/9": {"federation.local_epochs": 9},
            }
        },
    },
}
COMMUNICATION = {
    "evaluation": {"protocols": ["personal-on-local", "trained-on-local"]},
    "federation": {"participation": 1.0, "buffers": "keep"},
    "algorithms": {"ifca": {"clusters": 3}, "fedamp": {"protocol": "trained-on-local"}},
    "study": {
        "algorithms": ["fedavg", "ifca", "fedamp", "cwfedavg"],
        "grid": {"setting": {"alpha=0.5": {"partition.alpha": 0.5}}},
    },
    "report": {"round": "best"},
}
NORMS = {
    "federation": {"participation": 1.0},
    "study": {
        "algorithms": ["cwfedavg"],
        "grid": {"data": {"CIFAR-10": {"partition.alpha": 0.3}}, "algorithms.cwfedavg.wdr": [0, 10]},
    },
    "evaluation": {"protocols": ["personal-on-local"]},
    "diagnostics": {"norms": {"kind": "head-norms"}},
}


def declare_study(name: str, **sections: Any) -> NewPlan:
    """Write a study and plan it at preset smoke."""
    path = Path(f"studies/papers/{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = tuple(sections["study"]["algorithms"])
    base = studies.settings(labels, 5, model={"name": "mlp", "hidden": [8]})
    for key, section in sections.items():
        base[key] = base.get(key, {}) | section
    path.write_text(yaml.safe_dump(base | {"presets": SMOKE}, sort_keys=False))
    planner.write_plan(plan := planner.make_plan(path, "smoke"))
    return plan


def run_study(plan: NewPlan) -> None:
    studies.prepare_data(plan)
    studies.finish_study(plan)
    for planned in plan.diagnostics:
        stage.run_diagnostic(planned.files.settings, Execution())


@pytest.fixture(scope="module")
def finished_studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, NewPlan]]:
    """Four studies with all runs, in the current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("papers"))
        plans = {
            "pfps_lwc/table2": declare_study("pfps_lwc/table2", **GRID),
            "pfps_lwc/figure8": declare_study("pfps_lwc/figure8", **SWEEP),
            "cwfedavg/table2": declare_study("cwfedavg/table2", **COMMUNICATION),
            "cwfedavg/figure5": declare_study("cwfedavg/figure5", **NORMS),
        }
        for plan in plans.values():
            run_study(plan)
        yield plans


def make_finder(paper: layouts.Paper, preset: str = "smoke") -> measurements.StudyFinder:
    """Return a function that finds a paper's studies by name."""
    return functools.cache(lambda name: PaperStudy.find_planned_study(paper.stem, name, preset))


def measure_paper(paper: layouts.Paper, preset: str = "smoke") -> dict[CellId, MeasuredCell]:
    """Measure a paper's cells by id."""
    return measurements.measure_paper_cells(paper, make_finder(paper, preset))


def require_number(cell: MeasuredCell) -> RunMean:
    """Return a cell's number, which must not be missing."""
    assert cell.number, cell.reason
    return cell.number


def find_row(plan: NewPlan, method: str, protocol: str, **point: str) -> pd.Series[Any]:
    """Find the row of a study's table with the number of a cell."""
    table = StudyData(plan).score_table
    is_selected = (table["algorithm"] == method) & (table["protocol"] == protocol)
    is_selected &= (table["round"] == plan.report.round) & (table["average"] == plan.report.average)
    for name, value in point.items():
        is_selected &= table[name] == value
    (row,) = [row for _, row in table[is_selected].iterrows()]
    return row


def test_measured_accuracy_matches_table_of_study(finished_studies: dict[str, NewPlan]) -> None:
    """Two grid axes have equal values, so only the order of the axes distinguishes the cells."""
    cells, plan = measure_paper(PFPS), finished_studies["pfps_lwc/table2"]
    rows_ = {"FedPer": ("fedper", "personal-on-local"), "FedProto": ("fedproto", "prototype-on-local")}
    for (row, (method, protocol)), alpha, share in itertools.product(rows_.items(), ("0.3", "0.5"), ("0.3", "0.5")):
        cell = cells[CellId("PFPS-LWC", "Table 2", row, f"{alpha}/{share}", "accuracy_pct")]
        row_of_table = find_row(plan, method, protocol, **{"partition.alpha": alpha, "federation.participation": share})
        assert (require_number(cell).mean, require_number(cell).std) == pytest.approx(
            (row_of_table["mean"], row_of_table["std"])
        )
        assert require_number(cell).runs == len(cell.keys) == len(require_number(cell).values) == 2
        assert cell.test_samples
        assert (cell.classes, cell.is_generated, cell.diverged_runs) == (10, False, 0)
    absent = cells[CellId("PFPS-LWC", "Table 2", "FedPer", "0.1/0.3", "accuracy_pct")]
    assert (absent.number, absent.reason) == (None, "not part of preset smoke")


@pytest.mark.parametrize(("protocol", "tests"), [("personal-on-local", 30), ("personal-on-global", 100)])
def test_count_test_samples_counts_shared_samples_once(protocol: str, tests: int) -> None:
    """Clients have separate test samples, or share the same ones."""
    totals = {"personal-on-local": (10, 20), "personal-on-global": (100, 100)}
    rows_ = [(number, name, total) for number in (1, 2) for name, two in totals.items() for total in two]
    metrics = pd.DataFrame(rows_, columns=["round", "protocol", "total"])
    assert LocalRun.count_test_samples(types.SimpleNamespace(metrics=metrics), protocol) == tests


def test_measured_cell_uses_protocol_and_round_of_method(finished_studies: dict[str, NewPlan]) -> None:
    cells, plan = measure_paper(CW), finished_studies["cwfedavg/table2"]
    for row, method, protocol in (
        ("FedAvg", "fedavg", "personal-on-local"),
        ("FedAMP", "fedamp", "trained-on-local"),
        ("cwFedAvg", "cwfedavg", "personal-on-local"),
    ):
        cell = cells[CellId("cwFedAvg", "Table 2", row, "alpha=0.5", "accuracy_pct")]
        assert require_number(cell).mean == pytest.approx(find_row(plan, method, protocol, setting="alpha=0.5")["mean"])


def test_communication_cost_counts_model_sizes(finished_studies: dict[str, NewPlan]) -> None:
    cells = measure_paper(CW)
    cost = {row: cells[CellId("cwFedAvg", "Table 2", row, "cost", "communication_cost")] for row in ("FedAvg", "IFCA")}
    assert {row: (require_number(cell).mean, cell.expected) for row, cell in cost.items()} == {
        "FedAvg": (2.0, 2.0),
        "IFCA": (pytest.approx(4.0, rel=1e-2), 4.0),
    }


def test_gain_in_text_is_difference_of_cells(finished_studies: dict[str, NewPlan]) -> None:
    cells, plan = measure_paper(PFPS), finished_studies["pfps_lwc/figure8"]
    gain = cells[CellId("PFPS-LWC", "text", "PFPS-LWC - FedPer", "Figure 8b/9", "accuracy_gain_points")]
    one, two = (
        find_row(plan, method, "personal-on-local", setting="Figure 8b/9")["mean"] for method in ("pfps_lwc", "fedper")
    )
    assert require_number(gain).mean == pytest.approx(one - two)
    assert len(gain.keys) == 2


def test_sweep_figure_has_points_of_study(finished_studies: dict[str, NewPlan]) -> None:
    drawings = figures.plot_figures(PFPS, make_finder(PFPS))
    figure = drawings["PFPS-LWC", "Figure 8"]
    lines = figure.csv.splitlines()
    assert lines[0] == "panel,line,x,mean"
    assert {tuple(line.split(",")[:3]) for line in lines[1:]} == {
        (panel, line, x)
        for panel, x in (("batch size", "8"), ("batch size", "64"), ("local epochs", "9"))
        for line in ("FedPer", "PFPS-LWC")
    }
    assert drawings["PFPS-LWC", "Figure 6"] == f"Not drawn: {measurements.NO_STUDY}."
    assert drawings["PFPS-LWC", "Figure 1"] == PFPS.figures["Figure 1"].reason


def test_estimation_error_figure_matches_head_norms(finished_studies: dict[str, NewPlan]) -> None:
    from fedpipe.engine.diagnostics import head_norms

    drawings = figures.plot_figures(CW, make_finder(CW))
    figure = drawings["cwFedAvg", "Figure 5"]
    rows = [line.split(",") for line in figure.csv.splitlines()]
    errors = {float(line[-2]): float(line[-1]) for line in rows if line[0].startswith('"R')}
    plan = finished_studies["cwfedavg/figure5"]
    for diagnostic in plan.diagnostics:
        (cell,) = [cell for cell in plan.cells if cell.key == diagnostic.run_key]
        table = files.read_parquet(diagnostic.files.table, files.read_recorded_sha256(diagnostic.files.table))
        assert errors[cell.grid["algorithms.cwfedavg.wdr"]] == pytest.approx(
            head_norms.compute_class_fraction_estimate_error(table), rel=1e-4
        )
    assert len(errors) == len(plan.diagnostics) == 2


def test_contradicting_classes_have_norms_that_grow_with_fraction() -> None:
    """FedDW's Figure 4: "higher proportions lead to smaller weight moduli"."""
    norms = pd.DataFrame({"share": [0.6, 0.3, 0.1, None], "norm": [1.0, 2.0, 3.0, 4.0]})
    assert not measurements.mark_contradicting_classes(norms).any()
    result = measurements.mark_contradicting_classes(norms.assign(norm=[4.0, 3.0, 2.0, 1.0]))
    assert list(result) == [True, True, True, False], "no class has fewer samples than a class without samples"
    close = norms.assign(norm=[2.5, 2.0, 3.0, 4.0])
    assert not measurements.mark_contradicting_classes(close).any(), "0.3 is not less than half of 0.6"


def test_norms_figure_scales_norms_to_sum_of_one(finished_studies: dict[str, NewPlan]) -> None:
    figure = layouts.Figure(form="shares", statement="norms", study="figure5", panels=("data",))
    drawing = figures.plot_figures(CW.model_copy(update={"figures": {"Figure 4": figure}}), make_finder(CW))[
        "cwFedAvg", "Figure 4"
    ]
    frame = pd.read_csv(io.StringIO(drawing.csv))
    assert len(frame) == 2 * figures.MAX_CLIENTS * 10
    assert frame["norm"].sum() == pytest.approx(2 * figures.MAX_CLIENTS, abs=1e-3), "the norms of a head sum to one"


def test_papers_pages_contain_measured_cells_and_reasons(finished_studies: dict[str, NewPlan]) -> None:
    compared = make.write_paper_pages("smoke")
    folder = make.get_pages_folder("smoke")
    frame = pd.read_csv(folder / "cells.csv")
    assert len(frame) == len(published.load_published_numbers())
    filled = frame[frame["measured_mean"].notna()]
    assert list(filled[filled["table"] == "Table 2"].value_counts(["paper"])) == [8, 8], "PFPS-LWC and cwFedAvg"
    assert (filled["preset"] == "smoke").all()
    assert (folder / "figures/pfps_lwc-figure-8.csv").is_file()
    text = (folder / "pfps_lwc.html").read_text()
    assert "Changed at this preset: federation.rounds 2; dataset.subset 200." in text
    assert measurements.NO_STUDY in text
    assert not compared.orders, "preset smoke does not compare orders"
    with pytest.raises(SettingsError, match=r"^--preset: 'smok' .* Did you mean 'smoke'"):
        make.write_paper_pages("smok")


def test_missing_run_changes_only_its_cells(finished_studies: dict[str, NewPlan], tmp_path: Path) -> None:
    plan = finished_studies["pfps_lwc/table2"]
    missing_cell = next(cell for cell in plan.cells if (cell.algorithm, cell.seed) == ("fedper", 0))
    column = f"{missing_cell.grid['partition.alpha']}/{missing_cell.grid['federation.participation']}"
    cell_id = CellId("PFPS-LWC", "Table 2", "FedPer", column, "accuracy_pct")
    before = measure_paper(PFPS)
    moved_folder = missing_cell.merged_files.path.rename(tmp_path / "away")
    try:
        after = measure_paper(PFPS)
        assert require_number(after[cell_id]).runs == 1, "the other seed is complete"
        assert (before[cell_id].is_incomplete, after[cell_id].is_incomplete) == (False, True)
        other = cell_id._replace(row="FedProto")
        assert after[other] == before[other]
        files.write_json(plan.study_files.unavailable_runs, {str(missing_cell.files.path): "data missing"})
        study = PaperStudy.find_planned_study("pfps_lwc", "table2", "smoke")
        assert study.explain_missing_number("fedper", column) == "data missing"
        assert study.get_missing_cells("fedper", column) == [missing_cell]
        assert study.get_missing_cells("fedper", "no such column") == []
    finally:
        files.write_json(plan.study_files.unavailable_runs, {})
        shutil.move(moved_folder, missing_cell.merged_files.path)


def test_hyperparameters_and_server_memory_match_published_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study gives the hyperparameters of cwFedAvg's paper, and shapes of tensors give its Table 7."""
    (tmp_path / "studies").symlink_to(studies.ROOT / "studies")
    monkeypatch.chdir(tmp_path)
    planner.write_plan(planner.make_plan(Path("studies/papers/cwfedavg/table1.yaml")))
    cells = measure_paper(CW, "full")
    numbers, checked = published.load_published_numbers(), 0
    for cell_id, cell in cells.items():
        if cell_id.metric in ("hyperparameter", "server_memory_million_parameters"):
            assert require_number(cell).mean == pytest.approx(numbers[cell_id].mean, rel=5e-3), cell_id
            checked += 1
    assert checked == 11 + 4 + 9
    compared = comparison.compare_with_published_cells(cells, "full")
    words = {
        cell_id[2:4]: cell.verdict_text
        for cell_id, cell in compared.cells.items()
        if cell_id[:2] == ("cwFedAvg", "Table 7")
    }
    assert [row for row, word in words.items() if word != "agrees"] == [("cwFedAvg (Output)", "100")], (
        "the paper also counts the averaged head"
    )


def test_papers_pages_reject_edited_study(finished_studies: dict[str, NewPlan]) -> None:
    make.write_paper_pages("smoke")
    page, study = make.get_pages_folder("smoke") / "pfps_lwc.html", finished_studies["pfps_lwc/figure8"].params
    page_bytes, planned = page.read_bytes(), study.read_text()
    edited = yaml.safe_load(planned)
    edited["federation"]["learning_rate"] = 0.123
    study.write_text(yaml.safe_dump(edited, sort_keys=False))
    with pytest.raises(ArtifactError, match=r"figure8.yaml has changed .* `fedpipe plan --params \S+ --preset smoke`"):
        make.write_paper_pages("smoke")
    assert page.read_bytes() == page_bytes
    study.write_text(f"# A comment changes nothing.\n{planned}")
    make.write_paper_pages("smoke")
    assert page.read_bytes() == page_bytes
    study.write_text(planned)


def test_papers_pages_reject_plans_changed_since_fingerprint(finished_studies: dict[str, NewPlan]) -> None:
    fingerprint = contents.compute_plans_fingerprint(
        Plan.read(finished_studies[name].study_files.plan) for name in sorted(finished_studies)
    )
    make.write_paper_pages("smoke", fingerprint)
    study = finished_studies["pfps_lwc/figure8"]
    page, text = make.get_pages_folder("smoke") / "pfps_lwc.html", study.params.read_text()
    page_bytes = page.read_bytes()
    edited = yaml.safe_load(text)
    edited["federation"]["learning_rate"] = 0.123
    study.params.write_text(yaml.safe_dump(edited, sort_keys=False))
    planner.write_plan(planner.make_plan(study.params, "smoke"))
    with pytest.raises(ArtifactError, match=r"plans have changed .*`make papers PRESET=smoke` again"):
        make.write_paper_pages("smoke", fingerprint)
    assert page.read_bytes() == page_bytes
    study.params.write_text(text)
    planner.write_plan(study)


def imitate_study(cells_: list[types.SimpleNamespace], done: list[types.SimpleNamespace], **answers: Any) -> Any:
    """Make a fake study without files for `measurements` and `figures`."""
    methods = [cell.algorithm for cell in cells_]
    plan = types.SimpleNamespace(
        cells=cells_, algorithms=methods, seeds=[0], grid={"data": []}, preset="full", report=None
    )
    defaults = {
        "explain_missing_number": lambda method, column: "failed: boom",
        "get_column_name": lambda cell: cell.grid["data"],
        "get_run": lambda cell: types.SimpleNamespace(key=cell.key, is_generated=False, is_diverged=False),
        "describe_origin": lambda cell: HERE,
    }
    return types.SimpleNamespace(plan=plan, local_cells=done, finished_cells=done, **defaults | answers)


def plot_figure(name: str, heading: str, studies_by_name: dict[str, Any]) -> SvgFigure:
    """Draw one figure of a paper, which must not be missing."""
    paper = layouts.load_papers()[name]
    reduced_paper = paper.model_copy(update={"figures": {heading: paper.figures[heading]}})
    figure = figures.plot_figures(reduced_paper, studies_by_name.get)[name, heading]
    assert isinstance(figure, SvgFigure), figure
    return figure


def make_cell(method: str, seed: int = 0, **grid: Any) -> types.SimpleNamespace:
    key = f"{method}{seed}{grid}"
    return types.SimpleNamespace(algorithm=method, seed=seed, key=key, rounds=100, grid={"data": "FMNIST"} | grid)


def make_curve_loader(accuracy: dict[str, list[float]]) -> Any:
    """Make a function such as `PaperStudy.get_accuracy_curve`, from accuracies in percent by round."""
    return lambda cell: pd.DataFrame({"x": range(1, 1 + len(accuracy[cell.key])), "value": accuracy[cell.key]})


def test_rounds_to_target_use_mean_over_seeds() -> None:
    """FedAvg reaches its last mean accuracy, even if one of its seeds ends below it."""
    cells = {
        make_cell(method, seed).key: make_cell(method, seed) for method in ("fedavg", "feddual") for seed in (0, 1)
    }
    accuracy = {
        make_cell("fedavg", 0).key: [20, 60, 70],
        make_cell("fedavg", 1).key: [20, 30, 50],
        make_cell("feddual", 0).key: [20, 80, 80],
        make_cell("feddual", 1).key: [20, 55, 50],
    }
    study = imitate_study([*cells.values()], [*cells.values()], get_accuracy_curve=make_curve_loader(accuracy))
    figure = plot_figure("FedDUAL", "Figure 4", {"table1": study})
    result = pd.read_csv(io.StringIO(figure.csv))
    assert dict(zip(result["line"], result["value"], strict=True)) == {"FedAvg": 3, "FedDUAL": 2}
    assert {*result["panel"]} == {"FMNIST, FedAvg's last: 60.0 %"}
    assert "Mean accuracy of 2 seeds." in figure.svg
    assert "One seed." not in figure.svg


def test_figure_shows_missing_cells() -> None:
    cells = [make_cell("fedavg"), make_cell("feddual"), make_cell("feddual", 1), make_cell("moon")]
    study = imitate_study(cells, cells[:1], get_accuracy_curve=make_curve_loader({cells[0].key: [50.0]}))
    figure = plot_figure("FedDUAL", "Figure 3", {"table1": study})
    assert figure.missing == "FedDUAL, FMNIST, MOON, FMNIST (failed: boom)"


def test_matrices_figure_shows_first_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [make_cell("fedavg", seed, distribution="IID") for seed in (0, 1)]
    for cell in cells:
        cell.merged_files = cell.seed
    monkeypatch.setattr(
        figures,
        "read_last_measured_matrices",
        lambda seed: pd.DataFrame({"matrix": ["SL", "CR"], "class": [0, 0], "0": [float(seed)] * 2}),
    )
    figure = plot_figure("FedDW", "Figure 8", {"figure8": imitate_study(cells, cells)})
    assert pd.read_csv(io.StringIO(figure.csv))["value"].tolist() == [0, 0]


def test_norms_figure_labels_run_without_wdr() -> None:
    """cwFedAvg's Figure 11 has a run of Table 1 with WDR, and a run of Figure 5 without WDR."""
    norms = pd.DataFrame(
        [{"model": "trained", "owner": 0, "class": 0, "norm": 1.0, "relative": 1.0, "share": 1.0, "samples": 5}]
    )
    cell_without_wdr = make_cell("cwfedavg", data="CIFAR-100", **{"algorithms.cwfedavg.wdr": 0})
    cell_with_wdr = make_cell("cwfedavg", data="practical/CIFAR-100")
    diagnostics = {"load_diagnostics": lambda kind, cell: [norms]}
    figure5, table1 = (
        imitate_study([cell_without_wdr], [cell_without_wdr], **diagnostics),
        imitate_study([cell_with_wdr], [cell_with_wdr], **diagnostics),
    )
    for studies_by_name, names in (
        ({"figure5": figure5}, {"cwFedAvg, λ = 0, trained models"}),
        ({"figure5": figure5, "table1": table1}, {"cwFedAvg, trained models", "cwFedAvg, λ = 0, trained models"}),
    ):
        figure = plot_figure("cwFedAvg", "Figure 11", studies_by_name)
        assert {*pd.read_csv(io.StringIO(figure.csv))["panel"]} == {"training data", *names}


def test_best_epsilon_needs_all_runs() -> None:
    cells = [make_cell("feddual", **{"algorithms.feddual.epsilon": epsilon}) for epsilon in (1e-5, 1e-3)]
    accuracy = {cells[0].key: 70.0, cells[1].key: 71.0}
    (text,) = (text for text in layouts.load_papers()["FedDUAL"].text if text.metric == "best_epsilon")
    for done, expected in ((cells[:1], None), (cells, 1e-3)):
        study = imitate_study(cells, done, get_accuracy=lambda cell: accuracy[cell.key])
        measured_cell = measurements.measure_prose_number(text, {text.study: study}.get)
        assert (measured_cell.number.mean if measured_cell.number else None) == expected
        assert measured_cell.reason == ("" if expected else "failed: boom")


def test_counterexamples_are_scaled_to_100_clients() -> None:
    """The paper reports 3 of 100 experiments."""
    rows = [(0, 0.9, 1.0), (0, 0.1, 2.0), (1, 0.9, 2.0), (1, 0.1, 1.0), (2, 0.5, 1.0), (2, 0.5, 1.0), (3, 1.0, 1.0)]
    norms = pd.DataFrame(rows, columns=["owner", "share", "norm"])
    (text,) = (text for text in layouts.load_papers()["FedDW"].text if text.metric == "counterexamples")
    cells = [make_cell("fedavg")]
    study = imitate_study(cells, cells, load_diagnostics=lambda kind, cell: [norms])
    measured_cell = measurements.measure_prose_number(text, {text.study: study}.get)
    assert (require_number(measured_cell).mean, require_number(measured_cell).runs) == (25.0, 1)
