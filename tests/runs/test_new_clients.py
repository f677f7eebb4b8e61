"""New clients never participate. They do not change other clients, and the method defines what they receive."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.batch import State
from fedpipe.cli.docs.pages import get_new_client_sentence
from fedpipe.core.components import component, registry
from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import RunFiles
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.load import load_federated_data
from fedpipe.engine.new_clients import add_new_client
from fedpipe.engine.run import Run
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.execution import Execution
from tests import small_studies as studies

CLIENTS, ROUNDS = 6, 2
PROTOCOLS = [f"{model}-on-local" for model in ("global", "personal", "trained", "kept", "finetuned")]
ALGORITHMS = studies.mark_others_slow(registry.list_components(component.ALGORITHM), ("fedavg", "scaffold", "cwfedavg"))
Rows = list[dict[str, Any]]


def prepare(*labels: str, **federation: Any) -> NewPlan:
    sections = {
        "partition": {"alpha": 10.0},  # with a small alpha, no other client's model helps a new client of FedFomo
        "federation": {"clients": CLIENTS, "participation": 0.75} | federation,
        "evaluation": {"protocols": ["global-on-global", *PROTOCOLS, "prototype-on-local"]},
    }
    return studies.prepare(studies.settings(labels, ROUNDS, **sections))


def run_all(run: Run) -> Rows:
    """Run all rounds. Return the rows of the metrics."""
    studies.finish_run(run, ROUNDS)
    return layout.read_merged_table(run.files.list_merged_files()[-1].metrics).to_pylist()


def load_clients(run: Run, ids: range = range(CLIENTS), larger: tuple[int, ...] = ()) -> FederatedData:
    """Load the samples of some clients. Clients in ``larger`` have the training samples of all, with other labels."""
    clients = load_federated_data(run.settings, torch.float32, torch.device("cpu"))
    x, y = torch.cat([clients.x, clients.x]), torch.cat([clients.y, 9 - clients.y])
    everything = np.concatenate(clients.train) + len(clients.y)
    train = [everything if client in larger else clients.train[client] for client in ids]
    test = [clients.test[client] for client in ids]
    checksums = clients.data_checksums
    return FederatedData(x, y, train, test, clients.global_test, 10, clients.seed, data_checksums=checksums)


def open_copy(run: Run, clients: FederatedData, settings: RunSettings | None = None, stack: int = 1) -> Run:
    """Open a run without rounds in another folder, with other samples."""
    settings = settings or run.settings
    files = RunFiles(Path("other") / settings.algorithm["name"] / settings.key)
    files.path.mkdir(parents=True)
    files.settings.write_text(settings.to_yaml())
    return Run(files, Execution(stack=stack), clients=clients)


def list_seen_rows(rows: Rows) -> Rows:
    return [row for row in rows if not row["protocol"].startswith("new-")]


def iterate_tensors(state: State) -> Iterator[torch.Tensor]:
    for value in state.values():
        yield from value.values() if isinstance(value, Tensors) else [value]


def assert_same_states(one: Run, other: Run) -> None:
    """Require equal bits of the states of the server and the clients."""
    for number in range(ROUNDS + 1):
        states = [
            [run.load_server_state(number), *(run.load_kept_state(client, number) for client in one.clients.ids)]
            for run in (one, other)
        ]
        for one_state, other_state in zip(*states, strict=True):
            for value, other_value in zip(iterate_tensors(one_state), iterate_tensors(other_state), strict=True):
                assert torch.equal(value, other_value)


@pytest.mark.parametrize("label", ALGORITHMS)
def test_samples_of_new_clients_do_not_change_other_clients(label: str) -> None:
    """The other clients have equal bits without new clients 4 and 5, and if these two have other samples."""
    (run,) = studies.open_runs(prepare(label, held_out=[4, 5]), stack=1)
    rows = run_all(run)
    assert run.algorithm.federation.clients == 4
    other = open_copy(run, load_clients(run, larger=(4, 5)))
    other_rows = run_all(other)
    assert list_seen_rows(rows) == list_seen_rows(other_rows)
    assert rows != other_rows, "fine-tuning on other samples should change the numbers of new clients"
    assert_same_states(run, other)
    assert {row["client"] for row in list_seen_rows(rows)} == {0, 1, 2, 3} | ({-1} if has_global(run) else set())
    assert {row["client"] for row in rows if row["protocol"].startswith("new-")} == {4, 5}
    check_personal_model(run, rows)
    small_settings = RunSettings.read(prepare(label, clients=4).runs[0].files.settings)
    small = open_copy(run, load_clients(run, range(4)), small_settings)
    assert list_seen_rows(rows) == run_all(small)
    assert_same_states(run, small)


@pytest.mark.parametrize("label", ["fedavg", "cwfedavg"])
def test_new_clients_may_have_arbitrary_ids(label: str) -> None:
    """The samples of new clients 1 and 4 do not change other clients."""
    (run,) = studies.open_runs(prepare(label, held_out=[1, 4]), stack=1)
    rows = run_all(run)
    other = open_copy(run, load_clients(run, larger=(1, 4)))
    assert list_seen_rows(rows) == list_seen_rows(run_all(other))
    assert_same_states(run, other)
    assert {row["client"] for row in list_seen_rows(rows)} == {0, 2, 3, 5} | ({-1} if has_global(run) else set())
    assert {row["client"] for row in rows if row["protocol"].startswith("new-")} == {1, 4}


def has_global(run: Run) -> bool:
    return run.algorithm.global_model(run.load_server_state(0)) is not None


def check_personal_model(run: Run, rows: Rows) -> None:
    """The personal model of new clients is measured if and only if it changes, as the method's docstring states."""
    new_clients = run.new_clients
    is_initial = "has the initial model" in get_new_client_sentence(type(run.algorithm))
    assert any(row["protocol"] == "new-personal-on-local" for row in rows) != is_initial
    assert any(row["protocol"] == "new-global-on-local" for row in rows) == has_global(run)
    assert any(row["protocol"] == "new-finetuned-on-local" for row in rows)
    assert not any(row["protocol"] in {"new-kept-on-local", "new-trained-on-local"} for row in rows)
    vars(new_clients)["_is_personal_model_trained"] = True
    losses = []
    for number in (0, ROUNDS):
        table = new_clients.evaluate(
            run.load_server_state(number), lambda client, number=number: run.load_kept_state(client, number), number
        )
        losses.append([row["loss"] for row in table.to_pylist() if row["protocol"] == "new-personal-on-local"])
    assert (losses[0] == losses[1]) == is_initial


@pytest.mark.parametrize("label", ["fedavg", "cwfedavg"])
def test_sizes_of_new_clients_do_not_change_stack(label: str) -> None:
    (run,) = studies.open_runs(prepare(label, held_out=[1, 4], batch_size="full"), stack=4)
    rows = run_all(run)
    other = open_copy(run, load_clients(run, larger=(1, 4)), stack=4)
    assert list_seen_rows(rows) == list_seen_rows(run_all(other))
    assert_same_states(run, other)


def test_global_model_matches_plain_loop_over_seen_clients() -> None:
    (run,) = studies.open_runs(prepare("fedavg", held_out=[0, 2]), stack=1)
    run_all(run)
    model = {name: value.clone() for name, value in run.load_server_state(0)["model"].items()}
    clients, participants = load_clients(run), []
    for number in range(1, ROUNDS + 1):
        participants.append(run.select_participants(number))
        uploads, sizes = [], []
        for client in participants[-1]:
            tensors = {name: value.clone().requires_grad_() for name, value in model.items()}
            order = clients.shuffle_indices(client, number, "batches", 0)
            for first in range(0, len(order), 40):
                x, y = clients.gather_samples(order[first : first + 40])
                loss = cross_entropy(run.algorithm.net(Tensors(tensors), x), y)
                gradients = torch.autograd.grad(loss, list(tensors.values()))
                steps = zip(tensors.items(), gradients, strict=True)
                tensors = {name: (value - 0.1 * g).detach().requires_grad_() for (name, value), g in steps}
            uploads.append(tensors)
            sizes.append(len(order))
        weights = [size / sum(sizes) for size in sizes]
        model = {
            name: sum(weight * upload[name].detach() for weight, upload in zip(weights, uploads, strict=True))
            for name in model
        }
    assert [len(ids) for ids in participants] == [3, 3], "0.75 of 4 seen clients"
    assert not {*participants[0], *participants[1]} & {0, 2}
    for name, value in run.load_server_state(ROUNDS)["model"].items():
        torch.testing.assert_close(value, model[name], rtol=0, atol=1e-6)


def test_server_state_has_rows_only_for_seen_clients() -> None:
    (run,) = studies.open_runs(prepare("fedamp", held_out=[0, 2]), stack=1)
    run_all(run)
    server = run.load_server_state(1)
    participants = run.select_participants(1)
    assert run.clients.ids == [1, 3, 4, 5]
    assert server["seen"].tolist() == [float(client in participants) for client in run.clients.ids]
    for position, client in enumerate(run.clients.ids):
        kept = run.load_kept_state(client, 1)["model"]
        assert all(torch.equal(value[position], kept[name]) for name, value in server["models"].items())


@pytest.mark.parametrize("label", ["fedavg", "fedala", "cwfedavg"])
def test_blocks_and_resumed_run_with_new_clients_have_equal_bits(label: str) -> None:
    studies.require_equal_bits(prepare(label, held_out=0.34), ROUNDS, size=2, stack=1)


def test_stack_and_loop_have_close_scores_of_new_clients() -> None:
    plan = prepare("fedavg", "fedfomo", held_out=[0, 2])
    for run in studies.open_runs(plan, stack=1):
        rows = run_all(run)
        studies.delete_rounds(run.files.path)
        stack_rows = run_all(Run(run.files, Execution(stack=4)))
        for row, stack_row in zip(rows, stack_rows, strict=True):
            assert [row[name] for name in ("round", "client", "protocol", "total")] == [
                stack_row[name] for name in ("round", "client", "protocol", "total")
            ]
            assert row["loss"] == pytest.approx(stack_row["loss"], rel=1e-4)


# -- what new clients receive ------------------------------------------------------------------------------------------


def make_download(label: str) -> tuple[Run, State, State]:
    """Return a finished run, its server state, and the download of a new client."""
    (run,) = studies.open_runs(prepare(label, held_out=[0, 2]), stack=1)
    run_all(run)
    server = run.load_server_state(ROUNDS)
    common, own = run.new_clients.make_download_function(run.new_clients.algorithm, server)([0, 2])  # equal for both
    for value in iterate_tensors(own):
        torch.testing.assert_close(value[0], value[1])
    first = {
        part: value.map(lambda tensor: tensor[0]) if isinstance(value, Tensors) else value[0]
        for part, value in own.items()
    }
    return run, server, common | first


def test_cwfedavg_sends_new_clients_mean_of_class_models() -> None:
    _, server, download = make_download("cwfedavg")
    for name, value in server["classes"].items():
        torch.testing.assert_close(download["upper"][name], value.mean(0))


def test_cfl_sends_new_clients_model_of_first_cluster() -> None:
    _, server, download = make_download("cfl")
    assert all(torch.equal(download["model"][name], value[0]) for name, value in server["models"].items())


def test_fedfomo_sends_new_clients_uploaded_models() -> None:
    _, server, download = make_download("fedfomo")
    uploaded = torch.nonzero(server["seen"]).flatten()
    assert download["found"] == len(uploaded) >= 3
    for name, value in server["models"].items():
        assert torch.equal(download["others"][name][: len(uploaded)], value[uploaded])


def test_fedpac_sends_new_clients_initial_head() -> None:
    run, server, download = make_download("fedpac")
    initial = run.make_initial_model(0)
    assert all(torch.equal(value, initial[name]) for name, value in download["head"].items())
    assert all(torch.equal(value, server["body"][name]) for name, value in download["body"].items())


def test_add_new_client_appends_rows_of_initial_state() -> None:
    server = {"mixing": torch.full((2, 2), 5.0), "models": Tensors(w=torch.zeros(2, 3)), "step": torch.tensor(7.0)}
    larger = {"mixing": torch.eye(3), "models": Tensors(w=torch.ones(3, 3)), "step": torch.tensor(0.0)}
    grown = add_new_client(server, larger)
    assert grown["mixing"].tolist() == [[5, 5, 0], [5, 5, 0], [0, 0, 1]]
    assert grown["models"]["w"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert grown["step"] == 7
    assert torch.equal(larger["mixing"], torch.eye(3)), "the initial state has changed"
