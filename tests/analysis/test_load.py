"""`fedpipe.load`: results of a study in Python, compared with its files and with the numbers of the engine."""

import ast
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from sklearn.metrics import balanced_accuracy_score, f1_score

import fedpipe
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage.files import read_json
from fedpipe.core.storage.layout import RunFiles
from fedpipe.data import class_names
from fedpipe.engine import collect
from fedpipe.report import statistics, tables
from tests import small_studies as studies
from tests.analysis.conftest import finish
from tests.docs.page_blocks import ROOT, blocks

LABELS = ("fedavg", "pfedme", "fedproto")
ROUNDS = 3
GRID = {"partition.alpha": [0.3, 1.0]}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study, whose folder is not the working directory."""
    folder = tmp_path_factory.mktemp("loaded")
    params = studies.settings(LABELS, ROUNDS, study={"seeds": [0, 1], "grid": GRID})
    params["algorithms"]["pfedme"] = {"attraction": 5.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finish(params)
    return folder


@pytest.fixture(scope="module")
def results(study: Path) -> Any:
    return fedpipe.load(study / "params.yaml")


def test_load_finds_study_next_to_other_params_yaml(in_empty_folder: Path) -> None:
    """`fedpipe init` creates a project with a Snakefile. Its studies may have any name."""
    Path("Snakefile").touch()
    finish(studies.settings(rounds=1))
    for name in ("params", "other"):
        path = Path(f"studies/{name}.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(Path("params.yaml").read_bytes())
    with pytest.raises(ArtifactError, match=r"fedpipe run --params studies/other\.yaml"):
        fedpipe.load("studies/other.yaml")
    assert fedpipe.load(in_empty_folder).folder == in_empty_folder


def test_fedpipe_import_loads_no_slow_packages() -> None:
    heavy = {"torch", "pandas", "numpy", "pydantic", "yaml", "pyarrow", "matplotlib"}
    modules = subprocess.run(
        [sys.executable, "-c", "import fedpipe, sys; fedpipe.load; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not heavy & {name.partition(".")[0] for name in modules}


def test_load_accepts_params_yaml_study_folder_and_results_folder(
    study: Path, results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(study)
    for way in ("params.yaml", ".", "results", study, study / "results"):
        pd.testing.assert_frame_equal(fedpipe.load(way).accuracies, results.accuracies)
    assert Path.cwd() == study
    assert repr(results) == f"<results of {study}/params.yaml: {', '.join(LABELS)}; seeds 0, 1>"


def test_result_frames_contain_numbers_of_tables(study: Path, results: Any) -> None:
    table = pd.read_csv(study / "results/tables/results.csv", dtype={"partition.alpha": str}, keep_default_na=False)
    assert tables.encode_table_csv(results.table) == (study / "results/tables/results.csv").read_bytes()
    last = results.accuracies.query(f"round == {ROUNDS} and average == 'sample'")
    means = last.groupby(["algorithm", "partition.alpha", "protocol"])["accuracy"].mean() * 100
    rows = table[(table["average"] == "sample") & (table["round"] == "last") & (table["seeds"] > 0)]
    for row in rows.to_dict("records"):
        assert means[row["algorithm"], row["partition.alpha"], row["protocol"]] == pytest.approx(float(row["mean"]))
    assert len(means) == len(rows) > 0
    client_rows = results.clients.query(f"round == {ROUNDS} and protocol == 'personal-on-local'")
    sums = client_rows.groupby(["algorithm", "partition.alpha", "seed"])[["correct", "total"]].sum()
    frame = last[last["protocol"] == "personal-on-local"].set_index(["algorithm", "partition.alpha", "seed"])[
        "accuracy"
    ]
    pd.testing.assert_series_equal(sums["correct"] / sums["total"], frame.sort_index(), check_names=False)


def test_traffic_times_and_matrices_frames_cover_runs_and_rounds(study: Path, results: Any) -> None:
    runs = len(LABELS) * 2 * 2
    assert len(results.traffic) == len(results.times) == runs * ROUNDS
    files = json.loads((study / "results/plan.json").read_text())["runs"]
    table = {
        run["key"]: json.loads((study / run["path"] / f"joined/{ROUNDS:04d}/times.json").read_text()) for run in files
    }
    for row in results.times.to_dict("records"):
        assert row["train"] == table[row["key"]]["rounds"][row["round"] - 1]["train"]
    assert (results.traffic.query("algorithm == 'fedavg'")["bytes_up"] > 0).all()
    entries = results.matrices.query("algorithm == 'fedavg' and matrix == 'SL' and round == 2 and seed == 1")
    assert len(entries) == 2 * 10 * 10
    sums = entries.groupby(["partition.alpha", "row"])["value"].sum()
    np.testing.assert_allclose(sums, 1, rtol=1e-6)


def test_random_constants_of_network_depend_only_on_seed(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs and the loaded model have the same frozen layer, for any state of PyTorch's global generator."""
    monkeypatch.syspath_prepend(str(in_empty_folder))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (in_empty_folder / "own.py").write_text(
        "from torch import nn\n\n\ndef random_features(shape, num_classes):\n"
        "    layer = nn.Linear(64, 32).requires_grad_(False)\n"
        "    return nn.Sequential(nn.Flatten(), layer, nn.ReLU()), nn.Linear(32, num_classes)\n"
    )
    params = studies.settings(rounds=2, study={"seeds": [0, 1]}) | {"model": {"name": "own.random_features"}}
    plan, layers = studies.prepare(params), {}
    for number in (1, 2):
        torch.manual_seed(number)
        for run in studies.open_runs(plan):
            list(run.run_segment(number))
            layers[run.settings.seed, number] = run.algorithm.net._module.body[1].weight
    assert torch.equal(layers[0, 1], layers[0, 2])
    assert not torch.equal(layers[0, 2], layers[1, 2])
    for run in studies.open_runs(plan):
        collect.collect_rounds(run.files, 2, plan.keep_models)
    results = fedpipe.load("params.yaml")
    accuracies = results.accuracies.query("protocol == 'global-on-global' and round == 2 and average == 'sample'")
    for seed, accuracy in accuracies.set_index("seed")["accuracy"].items():
        torch.manual_seed(3)
        x, y = results.test("fedavg", seed)
        assert (results.model("fedavg", seed)(x).argmax(1) == y).double().mean() == pytest.approx(accuracy)


@pytest.mark.usefixtures("in_empty_folder")
def test_matrices_frame_is_empty_for_method_without_global_model(results: Any) -> None:
    params = studies.settings(("local",), 1, study={"seeds": [0], "grid": GRID})
    finish(params | {"evaluation": {"protocols": ["personal-on-local"]}})
    frame = fedpipe.load("params.yaml").matrices
    assert not len(frame)
    assert list(frame.columns) == list(results.matrices.columns)


def test_fairness_frame_describes_clients_of_last_round(results: Any) -> None:
    frame = results.fairness.query("algorithm == 'fedavg' and protocol == 'personal-on-local'")
    assert len(frame) == 2 * 2
    for row in frame.to_dict("records"):
        rows = results.clients.query(
            f"key == '{row['key']}' and protocol == 'personal-on-local' and round == {ROUNDS} and total > 0"
        )
        shares = sorted(rows["correct"] / rows["total"])
        assert row["clients"] == len(shares) == 10
        assert row["std"] == pytest.approx(np.std(shares))
        assert (row["worst"], row["lowest"]) == (pytest.approx(shares[0]), pytest.approx(shares[0]))
    assert set(results.fairness["protocol"]) == {"personal-on-local"}


def test_to_target_returns_first_round_and_bytes_that_reach_target(results: Any) -> None:
    curves = results.accuracies.query(
        "algorithm == 'fedavg' and protocol == 'global-on-global' and average == 'sample'"
    )
    target = float(curves["accuracy"].median())
    frame = results.to_target(target)
    assert set(frame["algorithm"]) == {"fedavg", "pfedme"}, "FedProto has no global model"
    reached = 0
    for row in frame[frame["algorithm"] == "fedavg"].to_dict("records"):
        run = curves[curves["key"] == row["key"]].set_index("round")["accuracy"]
        rounds = [number for number in sorted(run.index) if run[number] >= target]
        if not rounds:
            assert np.isnan(row["round"])
            assert np.isnan(row["bytes"])
            continue
        reached += 1
        assert row["round"] == rounds[0]
        sent = results.traffic[(results.traffic["key"] == row["key"]) & (results.traffic["algorithm"] == "fedavg")]
        sent = sent[sent["round"] <= rounds[0]]
        assert row["bytes"] == (5 * (sent["bytes_down"] + sent["bytes_up"])).sum() > 0
    assert reached
    assert results.to_target(1.0)["round"].isna().all()
    with pytest.raises(SettingsError, match=r"^accuracy: 70 .* 0\.7 "):
        results.to_target(70)
    with pytest.raises(SettingsError, match=r"^protocol: 'kept-on-local' is not measured"):
        results.to_target(0.5, "kept-on-local")


def test_partitions_and_provenance_frames_connect_run_with_its_samples(study: Path, results: Any) -> None:
    assert not results.provenance.duplicated(["algorithm", "key"]).any()
    merged = results.accuracies.merge(results.provenance, on=["algorithm", "key", "seed"], how="left")
    assert merged["partition"].notna().all()
    (run_row,) = results.provenance.query("algorithm == 'fedavg' and seed == 1 and `partition.alpha` == '0.3'").to_dict(
        "records"
    )
    assert run_row["torch"] == torch.__version__
    settings = yaml.safe_load((study / run_row["run"] / "run.yaml").read_text())
    assert settings == results.settings("fedavg", 1, alpha=0.3)
    assert settings == results.settings("fedavg", 1, **{"partition.alpha": 0.3}), "the full name in the grid"
    assert (settings["partition"]["alpha"], settings["seed"]) == (0.3, 1)
    owned = results.partitions[results.partitions["partition"] == run_row["partition"]]
    assert owned["sample"].is_unique
    assert len(owned) == 1797
    assert set(owned["class_name"]) == set("0123456789")
    assert set(owned["client"]) - {-1} == set(range(10))


def test_results_accept_client_number_and_client_name(results: Any) -> None:
    names = results.clients.query("client == 3")["client_name"].unique()
    (x, y), (named_x, named_y) = (
        results.test("fedavg", 1, client=client, alpha=1.0) for client in (np.int64(3), names[0])
    )
    assert torch.equal(x, named_x)
    assert torch.equal(y, named_y)


@pytest.mark.parametrize(("algorithm", "client"), [("fedavg", None), ("fedavg", 3), ("pfedme", 3), ("fedproto", 0)])
def test_loaded_model_has_as_many_correct_predictions_as_run(results: Any, algorithm: str, client: int | None) -> None:
    """In every round, compare the model's predictions on test samples with the counts in the run's table."""
    protocol = "global-on-global" if client is None else "personal-on-local"
    for number in range(1, ROUNDS + 1):
        model = results.model(algorithm, 1, client=client, round=number, alpha=1.0)
        x, y = results.test(algorithm, 1, client=client, alpha=1.0)
        with torch.no_grad():
            correct = int((model(x).argmax(1) == y).sum())
        rows = results.clients.query(
            f"algorithm == '{algorithm}' and seed == 1 and `partition.alpha` == '1.0' and round == {number} "
            f"and protocol == '{protocol}' and client == {-1 if client is None else client}"
        )
        (row,) = rows.to_dict("records")
        assert (correct, len(y)) == (row["correct"], row["total"])
    assert model.class_names == tuple("0123456789")
    assert not model.training
    provenance = model.provenance
    assert (
        provenance["algorithm"],
        provenance["seed"],
        provenance["round"],
        provenance["client"],
        provenance["key"],
    ) == (algorithm, 1, ROUNDS, client, row["key"])
    assert (results.folder / provenance["state"]).is_file()


def test_loaded_state_equals_stored_state_of_run(results: Any) -> None:
    (run_row,) = results.provenance.query("algorithm == 'pfedme' and seed == 1 and `partition.alpha` == '1.0'").to_dict(
        "records"
    )
    rounds = results.folder / run_row["run"] / "rounds"
    before: dict[int, Any] = {
        client: results.state("pfedme", 1, client=client, round=0, alpha=1.0) for client in range(10)
    }
    for number in range(1, ROUNDS + 1):
        stored = torch.load(rounds / f"{number:04d}/server.pt", weights_only=True)
        server_state = results.state("pfedme", 1, round=number, alpha=1.0)
        torch.testing.assert_close(server_state, stored, rtol=0, atol=0)
        packed = torch.load(rounds / f"{number:04d}/clients.pt", weights_only=True)
        for client in range(10):
            client_state = results.state("pfedme", 1, client=client, round=number, alpha=1.0)
            rows = (packed["ids"] == client).nonzero().flatten().tolist()
            for part, name in ((part, name) for part, tensors in client_state.items() for name in tensors):
                expected = packed["kept"][part][name][rows[0]] if rows else before[client][part][name]
                assert torch.equal(client_state[part][name], expected)
            before[client] = client_state
    torch.testing.assert_close(results.state("pfedme", 1, alpha=1.0), server_state, rtol=0, atol=0)
    assert results.state("fedavg", client=0, alpha=0.3) == {}, "FedAvg's clients have no state"
    model = results.model("fedavg", alpha=0.3).state_dict()
    assert all(torch.equal(model[name], value) for name, value in results.state("fedavg", alpha=0.3)["model"].items())


def test_plain_fedavg_loop_over_loaded_batches_computes_models_of_run(results: Any) -> None:
    """Reimplement FedAvg with a stored state, the samples, and the batches of each participant."""
    run, settings = {"algorithm": "fedavg", "seed": 1, "alpha": 1.0}, results.settings("fedavg", 1, alpha=1.0)
    x, y = results.samples(**run)
    rate, momentum = settings["federation"]["learning_rate"], settings["federation"]["momentum"]
    for number in range(1, ROUNDS + 1):
        uploads, sizes = [], []
        for client in results.participants(**run, round=number):
            model = results.model(**run, round=number - 1).train()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
            steps = results.batches(**run, client=client, round=number)
            for rows in steps:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            uploads.append(model.state_dict())
            sizes.append(len({row for rows in steps for row in rows}))
        stored = results.state(**run, round=number)["model"]
        for name, value in stored.items():
            mean = sum(size * upload[name] for size, upload in zip(sizes, uploads, strict=True)) / sum(sizes)
            torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)


def test_loaded_participants_and_batches_match_files_of_run(results: Any) -> None:
    run = {"algorithm": "pfedme", "seed": 1, "alpha": 1.0}
    (row,) = results.provenance.query("algorithm == 'pfedme' and seed == 1 and `partition.alpha` == '1.0'").to_dict(
        "records"
    )
    for number in range(1, ROUNDS + 1):
        files_of_round = RunFiles(results.folder / row["run"]).get_round_files(number)
        marker = read_json(files_of_round.complete_states_marker)
        trained = [client for client, last in enumerate(marker["last"]) if last == number]
        assert results.participants(**run, round=number) == trained
    owned = results.partitions.query("split == 'train'")
    for client in (0, 9):
        samples = owned[(owned["partition"] == row["partition"]) & (owned["client"] == client)]["sample"]
        steps = results.batches(**run, client=client, round=2)
        assert {row for rows in steps for row in rows} == set(samples)
    _, y = results.samples(**run)
    assert y[torch.tensor(owned["sample"].to_numpy())].tolist() == owned["label"].tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda results, run: results.participants(**run, round=0), "^round: 0 .* 1 to 3"),
        (lambda results, run: results.batches(**run, client=10, round=1), "^client: 10 .* 0 to 9"),
        (lambda results, run: results.batches(**run, client=0, round=4), "^round: 4 .* 1 to 3"),
        (lambda results, run: results.batches(**run, client=0, round=1, stream="head"), "^stream: .*'head'.* batches"),
    ],
)
def test_participants_and_batches_reject_invalid_arguments(results: Any, call: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        call(results, {"algorithm": "fedavg", "seed": 1, "alpha": 1.0})


def test_pruned_state_error_lists_stored_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the clients train in a round. States of other clients are in earlier rounds, and some are pruned."""
    loaded = []
    for keep in ("all", 3):
        (tmp_path / str(keep)).mkdir()
        monkeypatch.chdir(tmp_path / str(keep))
        finish(studies.settings(("scaffold",), 7) | {"artifacts": {"keep_models": keep}})
        loaded.append(fedpipe.load())
    complete, pruned = loaded
    lost_count = 0
    for client in (None, *range(10)):
        errors: dict[int, str] = {}
        for number in range(8):
            try:
                state = pruned.state("scaffold", client=client, round=number)
            except ArtifactError as error:
                errors[number] = str(error)
                continue
            torch.testing.assert_close(state, complete.state("scaffold", client=client, round=number), rtol=0, atol=0)
        stored_rounds = ", ".join(str(number) for number in range(8) if number not in errors)
        owner = "server" if client is None else f"client {client}"
        for number, message in errors.items():
            assert re.search(rf"{owner}\b.* round {number} is not stored .*artifacts.keep_models", message)
            assert "`dvc pull`" in message
            assert f" one of these rounds: {stored_rounds}. To compute it again, " in message
        assert stored_rounds.endswith("6, 7")
        if client is None:
            assert stored_rounds == "0, 3, 6, 7"
        elif 3 in errors:
            lost_count += 1
            with pytest.raises(ArtifactError, match=f"client {client} .*round 3 is not stored"):
                pruned.model("scaffold", client=client, round=3)
    assert 0 < lost_count < 10


@pytest.mark.usefixtures("in_empty_folder")
def test_python_page_code_runs() -> None:
    finish(studies.settings(("scaffold",), 20))
    code_blocks = [block.text for block in blocks("docs/python.md") if block.language == "python"]
    assert len(code_blocks) == 2
    names: dict[str, Any] = {}
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        for text in code_blocks:
            exec(text, names)
    assert [line.split()[0] for line in stdout.getvalue().splitlines()] == ["1", "10", "20"]
    norms = [float(line.split()[1]) for line in stdout.getvalue().splitlines()]
    assert 0 < norms[0] < norms[-1]


def test_class_statistics_equal_scikit_learn(results: Any) -> None:
    """Compare the global model on all test samples, and personal models on each client's samples."""
    run = results.accuracies.query("algorithm == 'fedavg' and seed == 1 and `partition.alpha` == '1.0'")["key"].iloc[0]
    frame = statistics.compute_class_statistics(results.clients, ["key"]).set_index(["key", "protocol"]).loc[run]
    for protocol, clients in (("global-on-global", [None]), ("personal-on-local", range(10))):
        y, predictions = [], []
        for client in clients:
            x, labels = results.test("fedavg", 1, client=client, alpha=1.0)
            with torch.no_grad():
                predictions += results.model("fedavg", 1, client=client, alpha=1.0)(x).argmax(1).tolist()
            y += labels.tolist()
        expected = {
            "macro_f1": f1_score(y, predictions, average="macro"),
            "balanced_accuracy": balanced_accuracy_score(y, predictions),
        }
        assert frame.loc[protocol].to_dict() == pytest.approx(expected, rel=1e-12)
    table = pd.read_csv(results.folder / "results/tables/statistics.csv", dtype={"partition.alpha": str})
    rows = table.query("algorithm == 'fedavg' and `partition.alpha` == '1.0' and statistic == 'macro_f1'")
    assert rows.set_index("protocol")["seeds"].to_dict() == {protocol: 2 for protocol in rows["protocol"]}
    assert (
        tables.encode_table_csv(results.statistics) == (results.folder / "results/tables/statistics.csv").read_bytes()
    )


@pytest.fixture
def user_torch_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, ...]]:
    """Settings that all differ from a run's, as :func:`read_torch_settings` returns them."""
    mode, threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    lowered = torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_deterministic_debug_mode("default")
    torch.set_num_threads(2)
    yield 0, 2, True, True, True
    torch.backends.cuda.matmul.allow_tf32 = lowered
    torch.set_deterministic_debug_mode(mode)
    torch.set_num_threads(threads)


def read_torch_settings() -> tuple[Any, ...]:
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    lowered = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    return torch.get_deterministic_debug_mode(), torch.get_num_threads(), filling, *lowered


def test_loading_model_keeps_torch_settings_and_rng_state(results: Any, user_torch_settings: tuple[Any, ...]) -> None:
    drawn = torch.random.get_rng_state()
    assert read_torch_settings() == user_torch_settings
    results.model("pfedme", client=1, alpha=0.3)
    assert read_torch_settings() == user_torch_settings
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda results: results.model("fedagv"), "^'fedagv' .*'fedavg'"),
        (lambda results: results.model("fedavg", 7, alpha=0.3), r"^seed: 7 .*\[0, 1\]"),
        (lambda results: results.model("fedavg"), "^fedavg: 2 points .* alpha=0.3; alpha=1.0"),
        (lambda results: results.model("fedavg", alpha=0.5), "^fedavg: 0 points .* alpha=0.3; alpha=1.0"),
        (lambda results: results.model("fedavg", alfa=0.3), "^'alfa' .*'alpha'"),
        (lambda results: results.model("fedavg", alpha=0.3, round=4), "^round: 4 .* 0 to 3"),
        (lambda results: results.model("fedavg", alpha=0.3, client=10), "^client: 10 .* 0 to 9"),
        (lambda results: results.model("fedavg", alpha=0.3, client=np.int64(10)), "^client: 10 .* 0 to 9"),
        (lambda results: results.model("fedavg", alpha=0.3, client=1.5), "^client: 1.5 .* 0 to 9"),
        (lambda results: results.model("fedavg", alpha=0.3, client="Köln"), "^client: 'Köln' .* 0 to 9.* client_name"),
        (lambda results: results.test("fedavg", alpha=0.3, client=-1), "^client: -1 .* 0 to 9"),
        (lambda results: results.state("fedavg", alpha=0.3, round=-1), "^round: -1 .* 0 to 3"),
        (lambda results: results.state("fedavg", alpha=0.3, client=10), "^client: 10 .* 0 to 9"),
        (lambda results: results.state("fedavg"), "^fedavg: 2 points "),
        (lambda results: results.model("fedproto", alpha=0.3), "^fedproto has no global model.* client=0"),
    ],
)
def test_results_reject_unknown_method_seed_grid_point_round_or_client(results: Any, call: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        call(results)


@pytest.mark.usefixtures("in_empty_folder")
def test_results_accept_texts_of_frames_and_reject_value_that_does_not_concern_method() -> None:
    """A row of a frame identifies its run. Its grid values are texts."""
    grid = {"federation.learning_rate": [0.05, 1], "algorithms.fedprox.mu": [0.1, 1]}
    finish(studies.settings(("fedavg", "fedprox"), 1, study={"seeds": [0], "grid": grid}))
    results = fedpipe.load("params.yaml")
    for row in results.provenance.to_dict("records"):
        point = {name: row[name] for name in grid}
        settings = results.settings(row["algorithm"], row["seed"], **point)
        assert settings == yaml.safe_load((Path(row["run"]) / "run.yaml").read_text())
    assert results.settings("fedprox", learning_rate="1", mu=0.1) == results.settings(
        "fedprox", learning_rate=1.0, mu="0.1"
    )
    with pytest.raises(SettingsError, match=r"^mu: it does not concern fedavg\. Leave it out\."):
        results.settings("fedavg", learning_rate=1, mu=0.1)


def test_results_reject_models_and_batches_that_do_not_exist(own_module: Path) -> None:
    """BatchNorm's statistics are at the clients, client 9 never trains, and two networks of FedRoD make the logits."""
    own_module.write_text(
        "from torch import nn\n\ndef normalized(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4)), nn.Linear(4, classes)\n"
    )
    params = studies.settings(("fedavg", "fedrod"), 1, evaluation={"protocols": ["personal-on-local"]})
    params["federation"] |= {"buffers": "keep", "held_out": [9]}
    finish(params | {"model": {"name": "own.normalized"}})
    results = fedpipe.load()
    with pytest.raises(SettingsError, match=r"^fedavg: .* no BatchNorm statistics.*federation\.buffers: keep.* client"):
        results.model("fedavg")
    with pytest.raises(SettingsError, match=r"^client: 9 is held out .*\[0, 1, 2, 3, 4, 5, 6, 7, 8\]"):
        results.batches("fedavg", client=9, round=1)
    with pytest.raises(SettingsError, match=r"^client: .*FedRoD .*Use results\.state"):
        results.model("fedrod", client=0)


def test_load_rejects_edited_study_but_accepts_its_results_folder(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "copy")
    params = yaml.safe_load((study / "params.yaml").read_text())
    params["algorithms"]["pfedme"]["attraction"] = 2.0
    studies.write(params, tmp_path / "copy")
    with pytest.raises(ArtifactError, match=r"^results/plan.json .* params.yaml .*`fedpipe run`.* results "):
        fedpipe.load(tmp_path / "copy")
    assert fedpipe.load(tmp_path / "copy/results").settings("pfedme", alpha=0.3)["algorithm"]["attraction"] == 5.0
    damaged = next((tmp_path / "copy/results/runs/fedavg").glob("*/joined/0003/metrics.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    earlier = fedpipe.load(tmp_path / "copy/results")
    with pytest.raises(ArtifactError, match="is damaged"):
        _ = earlier.accuracies
    for path in (tmp_path / "copy/results/runs/fedavg").glob("*/rounds/0002/server.pt"):
        path.unlink()
    with pytest.raises(ArtifactError, match=r"server .*round 2 is not stored.*: 0, 1, 3\. .*`fedpipe run`\)\.$"):
        earlier.model("fedavg", alpha=0.3, round=2)
    for path in (tmp_path / "copy/results/runs/fedavg").glob("*/rounds.zip"):
        path.unlink()
    with pytest.raises(
        ArtifactError, match=r"round 2 is not complete\. Run its study \(`fedpipe run`\), or type `dvc pull`"
    ):
        earlier.model("fedavg", alpha=0.3, round=2)
    for run in (tmp_path / "copy/results/runs/pfedme").iterdir():  # an unpacked file is read instead of the packed one
        (run / "rounds/0001/state.json").write_text('{"last": [0]}')
    with pytest.raises(ArtifactError, match=r"0001/state.json can't be read .*last is missing or damaged"):
        earlier.state("pfedme", alpha=0.3, round=1, client=5)


def test_results_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells in order in the folder `examples` of a small study, as a kernel does."""
    book = nbformat.read(ROOT / "examples/results.ipynb", as_version=4)
    nbformat.validate(book)
    params = studies.settings(("fedavg", "feddw"), 2, study={"seeds": [0, 1]})
    params["algorithms"]["feddw"] = {"mu": 1.0}
    monkeypatch.chdir(tmp_path)
    finish(params)
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    values = []
    for cell in (cell for cell in book.cells if cell.cell_type == "code"):
        *body, last = ast.parse(cell.source).body
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), "notebook", "exec"), names)
            values.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
        else:
            exec(compile(ast.Module([*body, last], []), "notebook", "exec"), names)
    means = values[1]["mean"]
    table = (tmp_path / "results/tables/results.md").read_text()
    assert len(means) == 4
    assert all(f"| {mean:.2f} ±" in " ".join(table.split()) for mean in means)
    assert values[-1]["mu"] == 1.0


def test_load_rejects_folder_without_study_or_results(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^.*/params.yaml: params.yaml is not in this folder"):
        fedpipe.load(tmp_path / "params.yaml")
    studies.write(studies.settings(), tmp_path)
    with pytest.raises(ArtifactError, match=r"^results/plan.json is missing.*`fedpipe run`"):
        fedpipe.load(tmp_path)


def test_class_names_match_dataset() -> None:
    assert class_names.select_class_names("fashion_mnist", 10)[9] == "Ankle boot"
    hundred = class_names.select_class_names("cifar100", 100)
    assert list(hundred) == sorted(hundred)
    assert len(set(hundred)) == 100
    assert class_names.select_class_names("npz", 3) == ("0", "1", "2")
    assert class_names.select_class_names("npz", 2, ["ant", "cat", "dog"]) == ("ant", "cat"), (
        "the subset contains no dogs"
    )
    assert class_names.read_class_names_or_numbers(f"npz-{0:012x}", 2) == ("0", "1"), "not stored"
