"""Diagnostics in a study: their keys, the states that they need, and invalid settings."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpipe.core.components import code_digest
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files
from fedpipe.planning import planner
from fedpipe.planning.plan import Plan
from fedpipe.settings.federation import Federation
from tests import small_studies as studies
from tests.errors import rejects
from tests.small_studies import run_command

NORMS = {"kind": "head-norms", "rounds": [2]}


def plan_study(diagnostics: dict[str, Any], **sections: Any) -> planner.NewPlan:
    params = studies.settings(("fedavg", "cwfedavg"), 4, diagnostics=diagnostics, **sections)
    studies.write(params, Path())
    return planner.make_plan(Path("params.yaml"))


def test_diagnostic_key_depends_on_run_round_settings_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    base_plan = plan_study({"n": NORMS})
    assert {run.key for run in base_plan.runs} == {run.key for run in plan_study({}).runs}
    other_plans = [
        plan_study({"n": NORMS | {"rounds": [3]}}),
        plan_study({"n": NORMS | {"models": ["received"]}}),
        plan_study({"n": NORMS | {"finetune_epochs": 5}}),
        plan_study({"n": NORMS}, federation={"learning_rate": 0.2}),
    ]
    assert {diagnostic.key for diagnostic in plan_study({"m": NORMS}).diagnostics} == {
        diagnostic.key for diagnostic in base_plan.diagnostics
    }, "keys must not depend on the names of diagnostics"
    monkeypatch.setattr(code_digest, "compute_diagnostic_digest", lambda kind: "another")
    other_plans.append(plan_study({"n": NORMS}))
    keys = [diagnostic.key for plan in (base_plan, *other_plans) for diagnostic in plan.diagnostics]
    assert len(set(keys)) == len(keys) == 12


def test_code_digest_differs_between_diagnostics_and_from_shared_code() -> None:
    assert len({code_digest.compute_diagnostic_digest(kind) for kind in code_digest.DIAGNOSTIC_MODULES}) == len(
        code_digest.DIAGNOSTIC_MODULES
    )
    expected = code_digest.compute_shared_code_digest()
    assert expected not in {code_digest.compute_diagnostic_digest(kind) for kind in code_digest.DIAGNOSTIC_MODULES}


def test_diagnostics_select_rounds_algorithms_seeds_and_grid_points() -> None:
    diagnostics = {
        "all": {"kind": "gradients"},
        "some": {
            "kind": "gradients",
            "rounds": [1, "last"],
            "algorithms": ["fedavg"],
            "seeds": [1],
            "where": {"partition.alpha": 0.5, "federation.batch_size": [10, 20]},
        },
    }
    grid = {"partition.alpha": [0.3, 0.5], "federation.batch_size": [10, 20, 30]}
    plan = plan_study(diagnostics, study={"algorithms": ["fedavg", "cwfedavg"], "seeds": [0, 1], "grid": grid})
    assert len([diagnostic for diagnostic in plan.diagnostics if diagnostic.name == "all"]) == len(plan.runs) == 24
    chosen = [diagnostic for diagnostic in plan.diagnostics if diagnostic.name == "some"]
    cells = {(cell.algorithm, cell.key): cell for cell in plan.cells}
    result = [(cells[diagnostic.algorithm, diagnostic.run_key], diagnostic.round) for diagnostic in chosen]
    points = [(cell.seed, cell.grid["partition.alpha"], cell.grid["federation.batch_size"], n) for cell, n in result]
    assert points == [(1, 0.5, size, number) for size in (10, 20) for number in (1, 4)]
    planner.write_plan(plan)
    stored_plan = Plan.read(Path("results/plan.json"))
    assert stored_plan.diagnostics == plan.diagnostics
    for diagnostic in plan.diagnostics:
        stored_settings = yaml.safe_load(diagnostic.files.settings.read_text())
        assert (stored_settings["run"], stored_settings["round"], stored_settings["kind"]) == (
            diagnostic.run_key,
            diagnostic.round,
            "gradients",
        )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (NORMS | {"rounds": [5]}, r"^diagnostics\.n\.rounds: 5 .* 4"),
        (NORMS | {"rounds": [0]}, r"^diagnostics\.n\.rounds\.0: 0 "),
        (NORMS | {"algorithms": ["moon"]}, r"^diagnostics\.n\.algorithms: .*'moon'"),
        (NORMS | {"seeds": [7]}, r"^diagnostics\.n\.seeds: .*'7'"),
        (
            NORMS | {"where": {"partition.alpha": 0.5}},
            r"^diagnostics\.n\.where: 'partition\.alpha' is not in study\.grid",
        ),
        (NORMS | {"models": ["class"]}, r"^diagnostics\.n\.models: 'class' .*fedavg"),
        (NORMS | {"models": ["trained", "trained"]}, r"'trained' is listed twice"),
        (NORMS | {"modles": []}, r"^diagnostics\.n\.modles: unknown key.*'models'"),
        ({"kind": "head_norms"}, r"^diagnostics\.n\.kind: .*'head_norms'.*'head-norms'"),
        ({"rounds": [1]}, r"^diagnostics\.n.*kind.* missing"),
        ({"kind": "locals", "clients": [10]}, r"^diagnostics\.n\.clients: .*10"),
        ({"kind": "surface", "points": 2}, r"^diagnostics\.n\.points: 2 "),
        (
            {"kind": "features", "samples": 20, "algorithms": ["fedavg"]},
            r"^diagnostics\.n\.perplexity: 30 .* 30 vectors, 20 test samples .* less than 30",
        ),
    ],
    ids=str,
)
def test_plan_rejects_invalid_diagnostics(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        plan_study({"n": entry})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "rejects_local", "rejects_deep_head"),
    [
        ({"kind": "head-norms"}, False, True),
        ({"kind": "head-norms", "models": ["trained", "global"]}, True, True),
        ({"kind": "features"}, True, True),
        ({"kind": "surface"}, True, False),
        ({"kind": "gradients"}, False, False),
        ({"kind": "locals"}, False, True),
    ],
    ids=str,
)
def test_plan_rejects_diagnostic_of_model_that_method_lacks(
    entry: dict[str, Any], rejects_local: bool, rejects_deep_head: bool, own_module: Path
) -> None:
    """The error names the diagnostic and the method. A diagnostic of other methods or grid points is accepted."""
    own_module.write_text(
        "from torch import nn\n\ndef deep_head(shape, classes):\n"
        "    return nn.Flatten(), nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, classes))\n"
    )
    study = {"algorithms": ["fedavg", "local"], "grid": {"model.name": ["own.deep_head", "cnn"]}}

    def plan(**selection: Any) -> planner.NewPlan:
        params = studies.settings(("fedavg", "local"), 4, study=study, diagnostics={"n": entry | selection})
        studies.write(params | {"model": {}}, Path())
        return planner.make_plan()

    assert plan(algorithms=["fedavg"], where={"model.name": "cnn"}).diagnostics
    for is_rejected, selection, pattern in (
        (rejects_local, {"where": {"model.name": "cnn"}}, r"local, which has no global model"),
        (rejects_deep_head, {"algorithms": ["fedavg"]}, r"fedavg, whose models have no head\.weight"),
    ):
        if is_rejected:
            with pytest.raises(SettingsError, match=rf"^diagnostics\.n: {entry['kind']} can't be used with {pattern}"):
                plan(**selection)
        else:
            assert plan(**selection).diagnostics


def test_plan_without_running_statistics_of_server_has_no_global_model(own_module: Path) -> None:
    """With `buffers: keep` each client has the running statistics. A network without BatchNorm has none."""
    own_module.write_text(
        "from torch import nn\n\ndef normalized(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4)), nn.Linear(4, classes)\n"
    )

    def plan(model: str, **sections: Any) -> planner.NewPlan:
        params = studies.settings(("fedavg",), 4, federation={"buffers": "keep"}, **sections)
        studies.write(params | {"model": {"name": model}}, Path())
        return planner.make_plan()

    surface = {"s": {"kind": "surface"}}
    assert plan("mlp", diagnostics=surface).diagnostics
    with rejects("diagnostics.s: surface can't be used with fedavg, which has no global model"):
        plan("own.normalized", diagnostics=surface)
    evaluation = {"protocols": ["global-on-global"]}
    assert not plan("mlp", evaluation=evaluation).warnings
    (warning,) = plan("own.normalized", evaluation=evaluation).warnings
    assert warning.startswith("evaluation.protocols: fedavg has no model for global-on-global")


def test_plan_allows_perplexity_below_number_of_vectors() -> None:
    """The data sets of a grid may have other numbers of classes, so only the diagnostic's job checks it."""
    entry = {"kind": "features", "samples": 20, "perplexity": 29.5, "algorithms": ["fedavg"]}
    assert plan_study({"n": entry}).diagnostics
    grid = {"dataset.subset": [200, 300]}
    assert plan_study({"n": entry | {"perplexity": 30}}, study={"algorithms": ["fedavg"], "grid": grid}).diagnostics


def test_plan_rejects_perplexity_that_small_subset_does_not_allow() -> None:
    """A fifth of the samples are test samples. With split pooled, only the job counts them."""
    entry = {"kind": "features", "algorithms": ["fedavg"]}
    dataset = {"subset": 60}
    with rejects("diagnostics.n.perplexity: 30 ... 22 vectors, 12 test samples ... less than 22"):
        plan_study({"n": entry}, dataset=dataset)
    assert plan_study({"n": entry | {"perplexity": 20}}, dataset=dataset).diagnostics
    assert plan_study({"n": entry}, dataset=dataset | {"split": "pooled"}).diagnostics


def test_plan_rejects_clients_that_do_not_train_in_round() -> None:
    """Participants depend on the round and the seed. A client that is held out never trains."""
    federation = {"clients": 6, "participation": 0.5}
    study = {"algorithms": ["fedavg"], "seeds": [3, 5]}
    rng_draws = {seed: Federation(**federation).draw_participants(seed, 2) for seed in (3, 5)}
    (common, *_), (absent, *_) = {*rng_draws[3]} & {*rng_draws[5]}, {*range(6)} - {*rng_draws[5]}
    entry = {"kind": "locals", "rounds": [2]}
    assert plan_study({"n": entry | {"clients": [common]}}, federation=federation, study=study).diagnostics
    with rejects(f"diagnostics.n.clients: with seed ... client {absent} does not train in round 2 ... participants"):
        plan_study({"n": entry | {"clients": [absent]}}, federation=federation, study=study)
    all_others = {"clients": 6, "participation": 1.0, "held_out": [1, 4]}
    assert plan_study({"n": entry | {"clients": [0, 5]}}, federation=all_others, study=study).diagnostics
    with rejects("diagnostics.n.clients: with seed 3, client 4 does not train ... participants, [0, 2, 3, 5]"):
        plan_study({"n": entry | {"clients": [0, 4]}}, federation=all_others, study=study)


@pytest.mark.parametrize(("rounds", "has_rate"), [([1], True), ([1, 4], False), (["last"], False)])
def test_plan_rejects_finetuned_norms_after_round_with_rate_0(rounds: list[Any], has_rate: bool) -> None:
    federation = {"schedule": {"name": "cosine", "period": 4}}
    entry = NORMS | {"rounds": rounds, "models": ["trained", "finetuned"]}
    if has_rate:
        assert plan_study({"n": entry}, federation=federation).diagnostics
        return
    with rejects("federation.schedule: after round ... learning rate is 0 ... (diagnostics.n.models)"):
        plan_study({"n": entry}, federation=federation)
    assert plan_study({"n": entry | {"models": ["trained"]}}, federation=federation).diagnostics


def test_plan_rejects_diagnostic_of_missing_grid_point() -> None:
    entry = NORMS | {"where": {"partition.alpha": 0.4}}
    with pytest.raises(SettingsError, match=r"^diagnostics\.n\.where: 'partition\.alpha' .*0\.4 .*study\.grid"):
        plan_study({"n": entry}, study={"algorithms": ["fedavg"], "grid": {"partition.alpha": [0.3, 0.5]}})
    with pytest.raises(SettingsError, match=r"^study\.grid: 'diagnostics\.n\.rounds' "):
        plan_study({"n": NORMS}, study={"algorithms": ["fedavg"], "grid": {"diagnostics.n.rounds": [[1], [2]]}})


@pytest.mark.parametrize("label", ["fedavg", "scaffold"])
def test_pruning_keeps_states_that_diagnostics_need(label: str) -> None:
    """One of the methods has kept states of clients."""
    params = studies.settings((label,), 6, artifacts={"keep_models": "last"}, dataset={"subset": 200})
    params["diagnostics"] = {"n": {"kind": "head-norms", "rounds": [3]}}
    plan = studies.prepare(params)
    (run,) = studies.open_runs(plan)
    studies.finish_run(run, 6, plan.keep_models)
    retained_rounds = [number for number in range(7) if run.files.get_round_files(number).server_state.exists()]
    assert retained_rounds == [0, 2, 3, 5, 6]
    (diagnostic,) = plan.diagnostics
    run_command("diagnostic", str(diagnostic.files.settings))
    table = files.read_parquet(diagnostic.files.table, files.read_recorded_sha256(diagnostic.files.table))
    assert table["owner"].unique().to_pylist() == run.select_participants(3)
    expected = studies.hash_results(run.files.path)
    run_command("diagnostic", str(diagnostic.files.settings))
    assert studies.hash_results(run.files.path) == expected, "a diagnostic must not change its run"
    assert files.read_parquet(diagnostic.files.table).equals(table)

    # the run has already deleted the states of round 4
    params["diagnostics"]["n"]["rounds"] = [4]
    (diagnostic,) = studies.prepare(params).diagnostics
    with pytest.raises(ArtifactError, match=r"states of round 4 .*artifacts\.keep_models .*`rm -r "):
        run_command("diagnostic", str(diagnostic.files.settings))
    assert not diagnostic.files.table.exists()


def test_diagnostic_rejects_edited_damaged_or_missing_settings() -> None:
    plan = plan_study({"n": NORMS | {"algorithms": ["fedavg"]}})
    planner.write_plan(plan)
    (diagnostic,) = plan.diagnostics
    path = diagnostic.files.settings
    settings_text = path.read_text()
    for edited_text, message in (
        (settings_text.replace("trained", "received"), "was edited"),
        (settings_text.replace("round: 2", "round: 3"), "was edited"),
        (settings_text.replace("round: 2", "round: two"), "is damaged ("),
        ("[]", "is damaged ("),
        ("a: [", "is damaged ("),
    ):
        assert edited_text != settings_text
        path.write_text(edited_text)
        with rejects(f"{path} {message}", ArtifactError):
            run_command("diagnostic", str(path))
    path.write_text(settings_text)
    with pytest.raises(ArtifactError, match="is missing"):
        run_command("diagnostic", str(path.with_name("head-norms-0123456789ab.yaml")))
