"""Fidelity to the papers in a study: settings that the plan rejects, and the result files."""

import pandas as pd
import pytest

from tests import small_studies as studies

pytestmark = pytest.mark.usefixtures("in_empty_folder")

ALONE = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}


@pytest.fixture
def plan_study(run_fedpipe, in_empty_folder):
    """``plan_study(settings)``: standard error and exit status of `fedpipe plan`."""

    def plan(settings):
        studies.write(settings, in_empty_folder)
        status, _, error = run_fedpipe("plan")
        return error, status

    return plan


@pytest.mark.parametrize(
    ("setting", "default"),
    [({"optimizer": "adam"}, "sgd"), ({"momentum": 0.9}, "0.0"), ({"weight_decay": 0.001}, "0.0")],
)
def test_plan_rejects_settings_that_pfedme_ignores(plan_study, setting, default):
    (key, value), labels = *setting.items(), ("fedavg", "pfedme")
    message, status = plan_study(studies.settings(labels, federation=setting))
    assert status == 2
    assert message.startswith(f"fedpipe: federation.{key}: {value} can't be used with pfedme")
    assert message.endswith(f"Use {default}.\n")
    assert plan_study(studies.settings(labels, federation=ALONE))[1] == 0
    assert plan_study(studies.settings(("fedavg",), federation=setting))[1] == 0


@pytest.mark.parametrize(
    ("name", "setting", "default"),
    [
        ("scaffold", {"momentum": 0.9}, "0.0"),
        ("perfedavg", {"momentum": 0.9}, "0.0"),
        ("perfedavg", {"optimizer": "adam"}, "sgd"),
    ],
)
def test_plan_rejects_momentum_and_adam_that_algorithm_ignores(plan_study, name, setting, default):
    (key, value), labels = *setting.items(), ("fedavg", name)
    message, status = plan_study(studies.settings(labels, federation=setting))
    assert status == 2
    assert message.startswith(f"fedpipe: federation.{key}: {value} can't be used with {name}")
    assert message.endswith(f"Use {default}.\n")
    assert plan_study(studies.settings(labels, federation=ALONE | {"weight_decay": 0.01}))[1] == 0


def test_plan_warns_about_momentum_if_fedpvr_corrects_all_layers(plan_study):
    for layers, has_warning in ((1, False), (2, True), (3, True)):
        settings = studies.settings(
            ("fedpvr",), algorithms={"fedpvr": {"layers": layers}}, federation={"momentum": 0.9}
        )
        message, status = plan_study(settings)
        assert status in (0, None)
        assert (f"fedpvr.layers: {layers} corrects all layers, so federation.momentum (0.9)" in message) is has_warning
    settings["federation"]["momentum"] = 0.0
    assert "federation.momentum" not in plan_study(settings)[0]


def test_plan_rejects_feddual_code_mode_with_other_iterations(plan_study):
    message, status = plan_study(
        studies.settings(("feddual",), algorithms={"feddual": {"mode": "code", "iterations": 150}})
    )
    assert status == 2
    assert message.startswith("fedpipe: algorithms.feddual: iterations: 150 can't be used with mode: code")
    assert plan_study(studies.settings(("feddual",), algorithms={"feddual": {"mode": "code"}}))[1] == 0


def run_study(settings, **execution):
    """Run a study. Return the participants of each round, the rounds, and the metrics, by label."""
    plan, tables = studies.prepare(settings), {}
    for planned_run, run in zip(plan.runs, studies.open_runs(plan, **execution), strict=True):
        studies.finish_run(run, planned_run.rounds)
        ids = [set(run.select_participants(number)) for number in range(1, planned_run.rounds + 1)]
        merged_files = planned_run.merged_files
        tables[planned_run.algorithm] = (
            ids,
            pd.read_parquet(merged_files.rounds),
            pd.read_parquet(merged_files.metrics),
        )
    return tables


@pytest.mark.parametrize("stack", [1, 4])
def test_fedfomo_study_traffic_counts_uploaded_models_only(stack):
    """Five of ten clients participate. In round 2, new participants download five models and the others four."""
    participants, rounds, _ = run_study(studies.settings(("fedfomo",), rounds=2), stack=stack)["fedfomo"]
    model = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    counts = [5 - (client in participants[0]) for client in participants[1]]
    assert 0 < len(participants[0] & participants[1]) < 5
    assert rounds["bytes_down"].tolist() == [0, sum(counts) / 5 * model]
    assert rounds["bytes_up"].tolist() == [model, model + 4 * sum(counts) / 5]


def test_pfps_lwc_recall_changes_personal_losses_of_participants():
    """The ablation trains the same models in round 1. Afterwards only the losses of the participants differ."""
    algorithms = {"pfps_lwc": {}, "lwc": {"algorithm": "pfps_lwc", "recall_epochs": 0}}
    settings = studies.settings(tuple(algorithms), rounds=1, algorithms=algorithms)
    tables = run_study(settings)
    losses = {}
    for label, (*_, metrics) in tables.items():
        personal = metrics[metrics["protocol"] == "personal-on-local"]
        losses[label] = personal.set_index("client")["loss"].sort_index()
    is_different = losses["pfps_lwc"] != losses["lwc"]
    assert set(losses["lwc"].index[is_different]) == tables["lwc"][0][0]
