"""`federation.held_out` and `report.clients`: draws, run keys, and invalid combinations."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedpipe.planning import planner
from fedpipe.planning.new_clients import list_reported_protocols
from fedpipe.planning.planner import NewPlan
from fedpipe.settings.federation import Federation
from tests import small_studies as studies
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")

PERSONAL, FINETUNED = "personal-on-local", "finetuned-on-local"


def make_plan(*labels: str, protocols: tuple[str, ...] = (PERSONAL,), **sections: Any) -> NewPlan:
    params = studies.settings(labels or ("fedavg",), evaluation={"protocols": list(protocols)}, **sections)
    return planner.make_plan(settings=params)


def test_plan_contains_no_reported_clients_by_default() -> None:
    assert "clients" not in make_plan(report={"clients": "seen"}).to_dict()["report"]


def test_held_out_draw_depends_only_on_seed() -> None:
    federation = Federation(clients=10, held_out=0.3)
    assert federation.draw_held_out_clients(0) == federation.draw_held_out_clients(0)
    assert len({federation.draw_held_out_clients(seed) for seed in range(5)}) > 1
    for seed in range(5):
        few, many = (Federation(clients=10, held_out=held_out).draw_held_out_clients(seed) for held_out in (0.1, 0.5))
        assert (len(few), len(many)) == (1, 5)
        assert {*few} < {*many} < {*range(10)}
        other = Federation(clients=10, held_out=0.5, learning_rate=0.5, participation=0.1).draw_held_out_clients(seed)
        assert other == many
    assert Federation(clients=10, held_out=[7, 2]).draw_held_out_clients(3) == (2, 7)


@pytest.mark.parametrize(
    ("held_out", "participation", "participants"),
    [(0.2, 0.5, 4), ([0], 1.0, 9), (0.9, 0.1, 1), (0, 0.5, 5), (0, 0.01, 1), (0, 0.26, 3), (0, 1.0, 10)],
)
def test_participation_is_rounded_fraction_of_clients_that_are_not_held_out(
    held_out: Any, participation: float, participants: int
) -> None:
    plan = make_plan(federation={"clients": 10, "held_out": held_out, "participation": participation})
    assert plan.runs[0].participants == participants


def test_plan_lists_held_out_clients_only_if_all_runs_of_partition_agree() -> None:
    plan = make_plan("fedavg", "fedper", federation={"held_out": 0.3}, study={"seeds": [0, 1]})
    draws = {run.partition: Federation(clients=10, held_out=0.3).draw_held_out_clients(run.seed) for run in plan.runs}
    assert plan.held_out == draws
    assert len({*draws.values()}) == 2
    assert make_plan().held_out == {}
    assert make_plan(federation={"held_out": [2, 3]}, study={"seeds": [0]}).held_out == {plan.runs[0].partition: (2, 3)}
    grid = {"federation.held_out": [0.1, 0.2]}
    assert make_plan(study={"grid": grid}).held_out == {}, "both grid points share a partition"
    one_partition = {"partition": {"seed": 4}, "study": {"seeds": [0, 1]}}
    assert make_plan(federation={"held_out": 0.3}, **one_partition).held_out == {}
    assert len(make_plan(federation={"held_out": [1]}, **one_partition).held_out) == 1


def test_held_out_needs_protocol_for_new_clients() -> None:
    protocols = ("global-on-global", "trained-on-local", "kept-on-local")
    with rejects("evaluation.protocols ... federation.held_out: 0.2"):
        make_plan(protocols=protocols, federation={"held_out": 0.2})
    make_plan(protocols=(*protocols, FINETUNED), federation={"held_out": 0.2})
    make_plan(protocols=protocols)


@pytest.mark.parametrize("protocols", [("global-on-local",), ("global-on-local", PERSONAL)])
def test_held_out_needs_global_model_for_its_protocol(protocols: tuple[str, ...]) -> None:
    held_out = {"held_out": 0.2}
    with rejects(f"federation.held_out: 0.2 ... local ... {', '.join(protocols)} ... {FINETUNED}"):
        make_plan("fedavg", "local", protocols=protocols, federation=held_out)
    make_plan("fedavg", "ditto", protocols=protocols, federation=held_out)
    make_plan("fedavg", "local", protocols=protocols)


@pytest.mark.parametrize("label", ["local", "fedamp", "fedproto", "ditto", "pfedme"])
def test_held_out_rejects_methods_that_never_train_new_clients_models(label: str) -> None:
    held_out = {"held_out": [2, 3]}
    with rejects(f"federation.held_out: [2, 3] ... {label} ... {PERSONAL} ... {FINETUNED}"):
        make_plan("fedper", label, federation=held_out)
    make_plan(label, protocols=(PERSONAL, FINETUNED), federation=held_out)
    make_plan("fedper", "fedfomo", "ifca", "apfl", "fedpac", federation=held_out)
    make_plan(label)


def test_held_out_check_of_custom_method_depends_on_its_hooks(tmp_path: Path) -> None:
    Path("h1_methods.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedpipe.algorithms.fedavg import FedAvg\n"
        "from fedpipe.algorithms.local import Local\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Alone(Local):\n    pass\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Together(FedAvg):\n    pass\n"
    )
    algorithms = {name: {"algorithm": f"h1_methods.{name.capitalize()}"} for name in ("alone", "together")}
    held_out = {"held_out": 0.2}
    with rejects("federation.held_out: 0.2 ... alone"):
        make_plan("alone", algorithms=algorithms, federation=held_out)
    make_plan("together", algorithms=algorithms, federation=held_out)


def test_held_out_accepts_methods_that_download_integers_or_replace_nan() -> None:
    Path("h2_methods.py").write_text(
        "from dataclasses import dataclass\nimport torch\nfrom fedpipe.algorithms.fedavg import FedAvg\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Codes(FedAvg):\n"
        "    def send(self, server, ids):\n"
        "        return {'codes': server['model'].map(lambda value: torch.round(value * 100).to(torch.int16))}, {}\n\n"
        "    def start(self, state, download, info):\n"
        "        return {'model': download['codes'].map(lambda value: value.to(self.net.dtype) / 100)}\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Guarded(FedAvg):\n"
        "    def start(self, state, download, info):\n"
        "        return {'model': download['model'].map(torch.nan_to_num)}\n"
    )
    for name in ("Codes", "Guarded"):
        algorithms = {"own": {"algorithm": f"h2_methods.{name}"}}
        make_plan("own", algorithms=algorithms, federation={"held_out": 0.2})


# -- the report --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", ["new", "both"])
def test_report_of_new_clients_needs_held_out_clients(clients: str) -> None:
    with rejects(f"report.clients: {clients} ... federation.held_out"):
        make_plan(report={"clients": clients})
    make_plan(report={"clients": clients}, study={"grid": {"federation.held_out": [0, 0.2]}})


def test_plan_warns_about_held_out_clients_missing_from_report() -> None:
    held_out = {"held_out": 0.2}
    (warning,) = make_plan(federation=held_out).warnings
    assert re.match(r"federation\.held_out: .* 2 of 10 clients.*report\.clients", warning)
    assert not make_plan(federation=held_out, report={"clients": "both"}).warnings
    assert not make_plan().warnings


def test_protocols_of_new_clients_follow_protocols_of_seen_clients() -> None:
    protocols = ("global-on-global", PERSONAL, "kept-on-local", FINETUNED)
    new = [f"new-{name}" for name in (PERSONAL, FINETUNED)]
    assert list_reported_protocols(protocols, "seen") == [*protocols]
    assert list_reported_protocols(protocols, "new") == new
    assert list_reported_protocols(protocols, "both") == [
        *("global-on-global", PERSONAL, new[0], "kept-on-local", FINETUNED, new[1])
    ]
    held_out = {"held_out": 0.2}
    for clients in ("seen", "new", "both"):
        plan = make_plan(protocols=protocols, federation=held_out, report={"clients": clients})
        assert list(plan.protocols) == list_reported_protocols(protocols, clients)


def test_report_of_new_clients_shows_only_their_protocols() -> None:
    protocols, held_out = (PERSONAL, "kept-on-local"), {"held_out": 0.2}
    arguments: dict[str, Any] = {"protocols": protocols, "federation": held_out}
    figures = {"clients": "new", "figure_protocols": ["kept-on-local"]}
    with rejects("report.figure_protocols: kept-on-local ... report.clients"):
        make_plan(report=figures, **arguments)
    kept = {"fedavg": {"protocol": "kept-on-local"}}
    with rejects("algorithms.fedavg.protocol: kept-on-local"):
        make_plan(report={"clients": "new"}, algorithms=kept, **arguments)
    plan = make_plan(report={"clients": "both"}, algorithms=kept, **arguments)
    assert plan.get_method_protocol("fedavg", PERSONAL) == "kept-on-local"
    assert plan.get_method_protocol("fedavg", f"new-{PERSONAL}") == f"new-{PERSONAL}"
    own = {"fedavg": {"protocol": FINETUNED}}
    plan = make_plan(protocols=(PERSONAL, FINETUNED), federation=held_out, report={"clients": "both"}, algorithms=own)
    assert plan.get_method_protocol("fedavg", f"new-{PERSONAL}") == f"new-{FINETUNED}"
    plan = make_plan(protocols=(PERSONAL, FINETUNED), federation=held_out, report={"clients": "new"}, algorithms=own)
    assert plan.method_protocols == {"fedavg": f"new-{FINETUNED}"}
