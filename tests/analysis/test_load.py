"""`fedpipe.load`: a study's results in Python, held against its files and against the engine's own numbers."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import shutil
import subprocess
import sys
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
from fedpipe.core.components import pinned_files
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.data import class_names
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


def test_the_import_loads_nothing_that_takes_time() -> None:
    heavy = {"torch", "pandas", "numpy", "pydantic", "yaml", "pyarrow", "matplotlib"}
    said = subprocess.run(
        [sys.executable, "-c", "import fedpipe, sys; fedpipe.load; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not heavy & {name.partition(".")[0] for name in said.split()}


def test_every_way_to_name_the_study_is_the_same(study: Path, results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(study)
    for way in ("params.yaml", ".", "results", study, study / "results"):
        pd.testing.assert_frame_equal(fedpipe.load(way).accuracies, results.accuracies)
    assert Path.cwd() == study
    assert repr(results) == f"<results of {study}/params.yaml: {', '.join(LABELS)}; seeds 0, 1>"


def test_frames_say_what_the_tables_say(study: Path, results: Any) -> None:
    written = pd.read_csv(study / "results/tables/results.csv", dtype={"partition.alpha": str}, keep_default_na=False)
    assert tables.encode_csv(results.table) == (study / "results/tables/results.csv").read_bytes()
    last = results.accuracies.query(f"round == {ROUNDS} and average == 'sample'")
    means = last.groupby(["algorithm", "partition.alpha", "protocol"])["accuracy"].mean() * 100
    rows = written[(written["average"] == "sample") & (written["round"] == "last") & (written["seeds"] > 0)]
    for row in rows.to_dict("records"):
        assert means[row["algorithm"], row["partition.alpha"], row["protocol"]] == pytest.approx(float(row["mean"]))
    assert len(means) == len(rows) > 0
    of_clients = results.clients.query(f"round == {ROUNDS} and protocol == 'personal-on-local'")
    sums = of_clients.groupby(["algorithm", "partition.alpha", "seed"])[["correct", "total"]].sum()
    found = last[last["protocol"] == "personal-on-local"].set_index(["algorithm", "partition.alpha", "seed"])[
        "accuracy"
    ]
    pd.testing.assert_series_equal(sums["correct"] / sums["total"], found.sort_index(), check_names=False)


def test_traffic_times_and_matrices_have_a_row_for_each_thing(study: Path, results: Any) -> None:
    runs = len(LABELS) * 2 * 2
    assert len(results.traffic) == len(results.times) == runs * ROUNDS
    files = json.loads((study / "results/plan.json").read_text())["runs"]
    written = {
        run["key"]: json.loads((study / run["path"] / f"joined/{ROUNDS:04d}/times.json").read_text()) for run in files
    }
    for row in results.times.to_dict("records"):
        assert row["train"] == written[row["key"]]["rounds"][row["round"] - 1]["train"]
    assert (results.traffic.query("algorithm == 'fedavg'")["bytes_up"] > 0).all()
    entries = results.matrices.query("algorithm == 'fedavg' and matrix == 'SL' and round == 2 and seed == 1")
    assert len(entries) == 2 * 10 * 10
    sums = entries.groupby(["partition.alpha", "row"])["value"].sum()
    np.testing.assert_allclose(sums, 1, rtol=1e-6)


def test_of_methods_without_a_global_model_there_are_no_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    params = studies.settings(("local",), 1, study={"seeds": [0], "grid": GRID})
    finish(params | {"evaluation": {"protocols": ["personal-on-local"]}})
    found = fedpipe.load("params.yaml").matrices
    assert not len(found)
    assert list(found.columns) == list(results.matrices.columns)


def test_fairness_is_of_the_clients_of_the_last_round(results: Any) -> None:
    found = results.fairness.query("algorithm == 'fedavg' and protocol == 'personal-on-local'")
    assert len(found) == 2 * 2
    for row in found.to_dict("records"):
        rows = results.clients.query(
            f"key == '{row['key']}' and protocol == 'personal-on-local' and round == {ROUNDS} and total > 0"
        )
        shares = sorted(rows["correct"] / rows["total"])
        assert row["clients"] == len(shares) == 10
        assert row["std"] == pytest.approx(np.std(shares))
        assert (row["worst"], row["lowest"]) == (pytest.approx(shares[0]), pytest.approx(shares[0]))
    assert set(results.fairness["protocol"]) == {"personal-on-local"}


def test_rounds_and_bytes_to_a_target_are_those_of_the_first_round_that_has_it(results: Any) -> None:
    curves = results.accuracies.query(
        "algorithm == 'fedavg' and protocol == 'global-on-global' and average == 'sample'"
    )
    target = float(curves["accuracy"].median())
    found = results.to_target(target)
    assert set(found["algorithm"]) == {"fedavg", "pfedme"}, "FedProto has no global model"
    reached = 0
    for row in found[found["algorithm"] == "fedavg"].to_dict("records"):
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
    with pytest.raises(SettingsError, match=r"accuracy: 70 can't be used. Use a share, as 0.7 for 70 %"):
        results.to_target(70)
    with pytest.raises(SettingsError, match=r"protocol: nothing is measured by 'kept-on-local'"):
        results.to_target(0.5, "kept-on-local")


def test_partitions_and_provenance_lead_from_a_row_to_its_samples(study: Path, results: Any) -> None:
    assert not results.provenance.duplicated(["algorithm", "key"]).any()
    merged = results.accuracies.merge(results.provenance, on=["algorithm", "key", "seed"], how="left")
    assert merged["partition"].notna().all()
    (made,) = results.provenance.query("algorithm == 'fedavg' and seed == 1 and `partition.alpha` == '0.3'").to_dict(
        "records"
    )
    assert made["torch"] == torch.__version__
    settings = yaml.safe_load((study / made["run"] / "run.yaml").read_text())
    assert settings == results.settings("fedavg", 1, alpha=0.3)
    assert settings == results.settings("fedavg", 1, **{"partition.alpha": 0.3}), "the grid's own word for it"
    assert (settings["partition"]["alpha"], settings["seed"]) == (0.3, 1)
    owned = results.partitions[results.partitions["partition"] == made["partition"]]
    assert owned["sample"].is_unique
    assert len(owned) == 1797
    assert set(owned["class_name"]) == set("0123456789")
    assert set(owned["client"]) - {-1} == set(range(10))


@pytest.mark.parametrize(
    ("algorithm", "client"),
    [("fedavg", None), ("fedavg", 3), ("pfedme", 3), ("fedproto", 0)],
)
def test_a_models_right_answers_are_those_that_the_run_counted(
    results: Any, algorithm: str, client: int | None
) -> None:
    """Of every round: the module on the run's test samples, against the counts in the run's own table."""
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
    made = model.provenance
    assert (made["algorithm"], made["seed"], made["round"], made["client"], made["key"]) == (
        algorithm,
        1,
        ROUNDS,
        client,
        row["key"],
    )
    assert (results.folder / made["state"]).is_file()


def test_a_state_is_what_the_run_has_stored(results: Any) -> None:
    (made,) = results.provenance.query("algorithm == 'pfedme' and seed == 1 and `partition.alpha` == '1.0'").to_dict(
        "records"
    )
    rounds = results.folder / made["run"] / "rounds"
    before: dict[int, Any] = {
        client: results.state("pfedme", 1, client=client, round=0, alpha=1.0) for client in range(10)
    }
    for number in range(1, ROUNDS + 1):
        stored = torch.load(rounds / f"{number:04d}/server.pt", weights_only=True)
        found = results.state("pfedme", 1, round=number, alpha=1.0)
        torch.testing.assert_close(found, stored, rtol=0, atol=0)
        packed = torch.load(rounds / f"{number:04d}/clients.pt", weights_only=True)
        for client in range(10):
            kept = results.state("pfedme", 1, client=client, round=number, alpha=1.0)
            rows = (packed["ids"] == client).nonzero().flatten().tolist()
            for part, name in ((part, name) for part, tensors in kept.items() for name in tensors):
                wanted = packed["kept"][part][name][rows[0]] if rows else before[client][part][name]
                assert torch.equal(kept[part][name], wanted)
            before[client] = kept
    torch.testing.assert_close(results.state("pfedme", 1, alpha=1.0), found, rtol=0, atol=0)
    assert results.state("fedavg", client=0, alpha=0.3) == {}, "FedAvg's clients keep nothing"
    model = results.model("fedavg", alpha=0.3).state_dict()
    assert all(torch.equal(model[name], value) for name, value in results.state("fedavg", alpha=0.3)["model"].items())


def test_of_pruned_states_those_that_are_there_are_right_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the clients train in a round: what the others keep lies in earlier ones, some of which are pruned."""
    loaded = []
    for keep in ("all", 3):
        (tmp_path / str(keep)).mkdir()
        monkeypatch.chdir(tmp_path / str(keep))
        finish(studies.settings(("scaffold",), 7) | {"artifacts": {"keep_models": keep}})
        loaded.append(fedpipe.load())
    whole, some = loaded
    lost = 0
    for client in (None, *range(10)):
        told: dict[int, str] = {}
        for number in range(8):
            try:
                found = some.state("scaffold", client=client, round=number)
            except ArtifactError as error:
                told[number] = str(error)
                continue
            torch.testing.assert_close(found, whole.state("scaffold", client=client, round=number), rtol=0, atol=0)
        there = ", ".join(str(number) for number in range(8) if number not in told)
        whose = "the state" if client is None else f"what client {client} keeps"
        for number, sentence in told.items():
            assert f": {whose} of round {number} is not there (see artifacts.keep_models, or `dvc pull`)" in sentence
            assert sentence.endswith(f"; of these rounds it is: {there}.")
        assert there.endswith("6, 7")
        if client is None:
            assert there == "0, 3, 6, 7"
        elif 3 in told:
            lost += 1
            with pytest.raises(ArtifactError, match=f": what client {client} keeps of round 3 is not there"):
                some.model("scaffold", client=client, round=3)
    assert 0 < lost < 10


def test_the_pages_python_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finish(studies.settings(("scaffold",), 20))
    shown = [block.text for block in blocks("docs/python.md") if block.language == "python"]
    assert len(shown) == 2
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for text in shown:
            exec(text, names)
    assert [line.split()[0] for line in printed.getvalue().splitlines()] == ["1", "10", "20"]
    norms = [float(line.split()[1]) for line in printed.getvalue().splitlines()]
    assert 0 < norms[0] < norms[-1]


def test_classes_are_told_as_scikit_learn_tells_them(results: Any) -> None:
    """In the last round: of the global model on all test samples, and of personal models on each client's own."""
    run = results.accuracies.query("algorithm == 'fedavg' and seed == 1 and `partition.alpha` == '1.0'")["key"].iloc[0]
    found = statistics.compute_class_statistics(results.clients, ["key"]).set_index(["key", "protocol"]).loc[run]
    for protocol, clients in (("global-on-global", [None]), ("personal-on-local", range(10))):
        y, told = [], []
        for client in clients:
            x, labels = results.test("fedavg", 1, client=client, alpha=1.0)
            with torch.no_grad():
                told += results.model("fedavg", 1, client=client, alpha=1.0)(x).argmax(1).tolist()
            y += labels.tolist()
        wanted = {"macro_f1": f1_score(y, told, average="macro"), "balanced_accuracy": balanced_accuracy_score(y, told)}
        assert found.loc[protocol].to_dict() == pytest.approx(wanted, rel=1e-12)
    written = pd.read_csv(results.folder / "results/tables/statistics.csv", dtype={"partition.alpha": str})
    of = written.query("algorithm == 'fedavg' and `partition.alpha` == '1.0' and statistic == 'macro_f1'")
    assert of.set_index("protocol")["seeds"].to_dict() == {protocol: 2 for protocol in of["protocol"]}
    assert tables.encode_csv(results.statistics) == (results.folder / "results/tables/statistics.csv").read_bytes()


def test_torchs_own_settings_stay_as_they_were(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def settings() -> tuple[Any, ...]:
        filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        lowered = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        return torch.get_deterministic_debug_mode(), torch.get_num_threads(), filling, *lowered

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before, drawn = settings(), torch.random.get_rng_state()
    results.model("pfedme", client=1, alpha=0.3)
    assert settings() == before
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda results: results.model("fedagv"), "'fedagv' is not in the study. Did you mean 'fedavg'"),
        (lambda results: results.model("fedavg", 7, alpha=0.3), r"seed: 7 is not in the study; .* \[0, 1\]"),
        (
            lambda results: results.model("fedavg"),
            "fedavg: name one point of the grid, .* alpha=0.3; alpha=1.0",
        ),
        (
            lambda results: results.model("fedavg", alfa=0.3),
            "alfa: not varied by the study's grid. Did you mean",
        ),
        (lambda results: results.model("fedavg", alpha=0.3, round=4), "round: 4 is none of the run's; .* from 0 to 3"),
        (lambda results: results.model("fedavg", alpha=0.3, client=10), "client: 10 is none of the run's"),
        (lambda results: results.test("fedavg", alpha=0.3, client=-1), "client: -1 is none of the run's"),
        (
            lambda results: results.state("fedavg", alpha=0.3, round=-1),
            "round: -1 is none of the run's; .* from 0 to 3",
        ),
        (lambda results: results.state("fedavg", alpha=0.3, client=10), "client: 10 is none of the run's"),
        (lambda results: results.state("fedavg"), "fedavg: name one point of the grid"),
        (lambda results: results.model("fedproto", alpha=0.3), "fedproto has no global model; name a client"),
    ],
)
def test_what_is_not_there_is_refused_in_a_sentence(results: Any, call: Any, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        call(results)


def test_an_edited_study_is_refused_and_its_folder_is_not(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "copy")
    params = yaml.safe_load((study / "params.yaml").read_text())
    params["algorithms"]["pfedme"]["attraction"] = 2.0
    studies.write(params, tmp_path / "copy")
    with pytest.raises(ArtifactError, match=r"results/plan.json is not the plan of params.yaml as it is now; type `"):
        fedpipe.load(tmp_path / "copy")
    assert fedpipe.load(tmp_path / "copy/results").settings("pfedme", alpha=0.3)["algorithm"]["attraction"] == 5.0
    damaged = next((tmp_path / "copy/results/runs/fedavg").glob("*/joined/0003/metrics.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    earlier = fedpipe.load(tmp_path / "copy/results")
    with pytest.raises(ArtifactError, match="is damaged"):
        _ = earlier.accuracies
    for path in (tmp_path / "copy/results/runs/fedavg").glob("*/rounds/0002/server.pt"):
        path.unlink()
    with pytest.raises(ArtifactError, match=r"the state of round 2 is not there .* it is: 0, 1, 3\."):
        earlier.model("fedavg", alpha=0.3, round=2)


def test_the_notebook_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, in its folder of a clone that has run a small study, as a kernel would."""
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
    shown = []
    for cell in (cell for cell in book.cells if cell.cell_type == "code"):
        assert not cell.outputs, "it is committed without outputs"
        *body, last = ast.parse(cell.source).body
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), "notebook", "exec"), names)
            shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))
        else:
            exec(compile(ast.Module([*body, last], []), "notebook", "exec"), names)
    means = shown[1]["mean"]
    table = (tmp_path / "results/tables/results.md").read_text()
    assert len(means) == 4
    assert all(f"| {mean:.2f} ±" in " ".join(table.split()) for mean in means)
    assert shown[-1]["mu"] == 1.0


def test_a_folder_without_a_study_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no params.yaml in that folder or above it"):
        fedpipe.load(tmp_path / "params.yaml")
    studies.write(studies.settings(), tmp_path)
    with pytest.raises(ArtifactError, match=r"results/plan.json is missing; type `fedpipe run` first"):
        fedpipe.load(tmp_path)


def test_classes_have_the_names_that_the_data_set_gives_them(tmp_path: Path) -> None:
    assert class_names.get_class_names({"name": "fashion_mnist"}, 10)[9] == "Ankle boot"
    hundred = class_names.get_class_names({"name": "cifar100"}, 100)
    assert list(hundred) == sorted(hundred)
    assert len(set(hundred)) == 100
    assert class_names.get_class_names({"name": "npz", "path": "own.npz"}, 3) == ("0", "1", "2")
    for name in ("cat", "ant"):
        (tmp_path / "images/train" / name).mkdir(parents=True)
        (tmp_path / "images/train" / name / "1.png").write_bytes(b"")
    origin = {
        "name": "folder",
        "path": str(tmp_path / "images"),
        "sha256": pinned_files.compute_content_sha256(tmp_path / "images"),
    }
    assert class_names.get_class_names(origin, 2) == ("ant", "cat")
    assert class_names.get_class_names(origin | {"sha256": "0" * 64}, 2) == ("0", "1"), (
        "of another folder nothing is known"
    )
