"""`report.clients`: tables, curves and statistics of seen clients, new clients, or both."""

import dataclasses
from collections.abc import Iterator

import pandas as pd
import pytest

from fedpipe.core.storage import layout
from fedpipe.planning.new_clients import list_reported_protocols
from fedpipe.planning.planner import NewPlan
from fedpipe.report import tables, wide, words
from fedpipe.report.data import StudyData
from fedpipe.report.figures import curves as curves_figure
from fedpipe.settings.base import Protocol
from fedpipe.settings.report import ReportedClients
from tests import small_studies as studies
from tests.report.conftest import read_markdown_rows

PROTOCOLS: tuple[Protocol, ...] = ("personal-on-local", "global-on-global", "finetuned-on-local")
SEEN, NEW = "Local test accuracy (personalized)", "Local test accuracy (new clients, personalized)"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewPlan]:
    """A study of two methods and one round, in which clients 1 and 4 of six are new."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("study"))
        sections = {
            "federation": {"clients": 6, "held_out": [1, 4]},
            "evaluation": {"protocols": list(PROTOCOLS)},
            "report": {"clients": "both"},
        }
        made = studies.prepare(studies.settings(("fedavg", "local"), 1, **sections))
        studies.finish_study(made)
        yield made


def build_report_data(plan: NewPlan, clients: ReportedClients) -> StudyData:
    protocols = tuple(list_reported_protocols(PROTOCOLS, clients))
    section = plan.report.model_copy(update={"clients": clients})
    return StudyData(dataclasses.replace(plan, protocols=protocols, report=section))


def compute_accuracy(plan: NewPlan, label: str, protocol: str) -> float:
    (run,) = (run for run in plan.runs if run.algorithm == label)
    rows = layout.read_merged_table(run.merged_files.metrics).to_pylist()
    rows = [row for row in rows if row["protocol"] == protocol]
    return 100 * sum(row["correct"] for row in rows) / sum(row["total"] for row in rows)


def read_rows(data: StudyData) -> dict[str, dict[str, str]]:
    """Return the cells of the Markdown table by method and column."""
    head, *rows = read_markdown_rows(tables.render_markdown_table(data))
    return {row[0]: dict(zip(head, row, strict=False)) for row in rows[:2]}


def test_markdown_table_has_new_clients_next_to_seen_clients(plan: NewPlan) -> None:
    rows = read_rows(build_report_data(plan, "both"))
    heads = list(rows["FedAvg"])
    assert heads[1:6] == [
        *(SEEN, NEW, "Global test accuracy (global model)"),
        *("Local test accuracy (fine-tuned)", "Local test accuracy (new clients, fine-tuned)"),
    ]
    for head, protocol in ((SEEN, PROTOCOLS[0]), (NEW, f"new-{PROTOCOLS[0]}")):
        assert float(rows["FedAvg"][head]) == pytest.approx(compute_accuracy(plan, "fedavg", protocol), abs=0.01)
    assert rows["Local"][NEW] == words.DASH
    assert rows["Local"][heads[5]] != words.DASH


def test_markdown_table_has_only_reported_clients(plan: NewPlan) -> None:
    both = read_rows(build_report_data(plan, "both"))["FedAvg"]
    seen, new = (read_rows(build_report_data(plan, clients))["FedAvg"] for clients in ("seen", "new"))
    assert not any("new clients" in head for head in seen)
    assert [head for head in new if "accuracy" in head] == [NEW, "Local test accuracy (new clients, fine-tuned)"]
    assert seen.items() | new.items() == both.items()
    text = tables.render_markdown_table(build_report_data(plan, "new"))
    assert "new-personal-on-local" in text
    assert "New clients never participate" in text
    assert "new clients" not in tables.render_markdown_table(build_report_data(plan, "seen")).lower()


def test_results_csv_has_all_clients(plan: NewPlan) -> None:
    protocols = {*PROTOCOLS, *(f"new-{name}" for name in PROTOCOLS[::2])}
    for clients in ("seen", "new", "both"):
        assert set(build_report_data(plan, clients).score_table["protocol"]) == protocols


def test_statistics_curves_and_latex_have_only_reported_clients(plan: NewPlan) -> None:
    expected = {clients: {*list_reported_protocols(PROTOCOLS, clients)} for clients in ("seen", "new", "both")}
    for clients, protocols in expected.items():
        data = build_report_data(plan, clients)
        assert set(data.statistics["protocol"]) == protocols
        assert set(data.build_metric_curves()["protocol"]) == protocols
        assert ("new clients" in wide.render_latex_table(data)) == (clients != "seen")
    section = {"figure_protocols": ("personal-on-local",), "clients": "both"}
    data = build_report_data(plan, "both")
    figure_plan = dataclasses.replace(data.plan, report=data.plan.report.model_copy(update=section))
    figure_protocols: pd.Series = StudyData(figure_plan).build_figure_curves()["protocol"]
    assert set(figure_protocols) == {"personal-on-local", "new-personal-on-local"}


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize("clients", ["seen", "new"])
def test_baseline_of_statistics_is_its_row_of_table(clients: str) -> None:
    """Seen clients select the best learning rate, also by a protocol of the method that only they have."""
    sections = {
        "dataset": {"name": "digits", "validation_fraction": 0.2},
        "federation": {"clients": 6, "held_out": [1, 4]},
        "evaluation": {"protocols": [*PROTOCOLS, "global-on-validation"]},
        "algorithms": {"fedavg": {"protocol": "global-on-validation"}},
        "study": {"algorithms": ["fedavg", "fedprox"], "seeds": [0], "grid": {"federation.learning_rate": [0.02, 0.2]}},
        "report": {
            "clients": clients,
            "best_over": ["federation.learning_rate"],
            "baseline": "fedavg",
            "statistics": ["difference"],
        },
    }
    plan = studies.prepare(studies.settings(("fedavg", "fedprox"), 1, **sections))
    studies.finish_study(plan)
    data = StudyData(plan)
    (baseline,) = (rate for label, rate in data.table_row_keys if label == "fedavg")
    scores = data.score_table.query("round == 'last' and average == 'sample'")
    means = scores.set_index(["algorithm", "federation.learning_rate", "protocol"])["mean"]
    selecting = {rate: means["fedavg", rate, "global-on-validation"] for rate in ("0.02", "0.2")}
    assert baseline == max(selecting, key=lambda rate: selecting[rate])
    differences = data.statistics[data.statistics["statistic"] == "difference"]
    assert not differences.empty
    for _, row in differences.iterrows():
        rate, protocol = row["federation.learning_rate"], row["protocol"]
        expected = means["fedprox", rate, protocol] - means["fedavg", baseline, protocol]
        assert row["mean"] == pytest.approx(expected)


def test_captions_name_held_out_clients_and_drift(plan: NewPlan) -> None:
    assert plan.held_out_notes == ("2 of 6 clients are held out, so they never train.",)
    drift_note = "From round 2 on, 3 of 6 clients have a concept drift: permuted classes."
    for clients in ("seen", "both"):
        data = build_report_data(plan, clients)
        data = StudyData(dataclasses.replace(data.plan, drift_notes=(drift_note,)))
        figure = curves_figure.build_curves_figure(data.plan, data.build_figure_curves())
        captions = [tables.render_markdown_table(data), wide.render_latex_table(data), figure.get_supxlabel()]
        for caption in captions:
            text = " ".join(caption.split())
            assert f"{plan.held_out_notes[0]} {drift_note}" in text
