"""docs/readings.md matches the stored runs of its studies."""

import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from fedpipe.papers.stored_runs import AccuracyCurve, RunStore, StoredRun, compute_settings_digest
from fedpipe.planning import planner
from tests import small_studies as studies
from tests.analysis.conftest import finish
from tests.docs.page_blocks import blocks
from tests.small_studies import ROOT

READING = Path("studies/papers/pfps_lwc/readings/p2.yaml")
STUDY = """\
# yaml-language-server: $schema=../../../../params.schema.json
# P2: the network of FedPer has fewer units.
#
# Published: Table 2, FedPer, 0.1/0.3 at alpha=0.1
# Published: fedavg: Table 2, FedPer, 0.3/0.3 at alpha=0.3
dataset: {name: digits}
partition: {scheme: dirichlet, alpha: 0.1}
model: {name: mlp, hidden: [8]}
federation: {clients: 10, rounds: 2}
evaluation: {protocols: [personal-on-local]}
algorithms: {fedavg: {}, fedper: {}}
study:
  algorithms: [fedavg, fedper]
  seeds: [0]
  grid: {partition.alpha: [0.1, 0.3]}
report: {round: best}
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("readings")


@pytest.mark.slow  # it plans all readings
def test_readings_tables_match_stored_runs(program: ModuleType) -> None:
    page = program.PAGE.read_text()
    assert program.write_tables(page) == page, "run python benchmarks/readings.py"


def test_readings_name_published_numbers_that_chose_settings(program: ModuleType) -> None:
    texts = {reading.name: reading.study.read_text() for reading in program.list_readings()}
    compared = {name: text for name, text in texts.items() if "# Published:" in text}
    silent = [
        name
        for name, text in compared.items()
        if not re.search(r"^ *# (Numbers|No number was) used to choose", text, re.M)
    ]
    assert "cwfedavg/table1 two_classes_150" in compared, "a reading can be a preset"
    assert not silent


def test_readings_table_shows_published_numbers_and_commits(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # after the fixture `program`, which changes to the repository
    READING.parent.mkdir(parents=True)
    READING.write_text(STUDY)
    plan = planner.make_plan(READING)
    cell = next(cell for cell in plan.cells if (cell.algorithm, cell.grid["partition.alpha"]) == ("fedper", 0.1))
    text = {"preset": "full", "point": "alpha=0.1", "algorithm": "fedper", "key": cell.key, "device": "CPU"}
    text |= {name: "1" for name in ("fedpipe", "python", "torch", "numpy", "executor")}
    text |= {f"{name}_code": "0" * 12 for name in ("dataset", "partition", "model", "algorithm", "shared")}
    text["samples"] = "0" * 12
    numbers = dict.fromkeys(("round_seconds", "epoch_seconds", "bytes_down", "bytes_up"), 1.0)
    curve = AccuracyCurve(
        protocol="personal-on-local", average="sample", test_samples=100, rounds="1-2", accuracies="0.8125 0.75"
    )
    run = StoredRun(
        **text,
        **numbers,
        seed=0,
        rounds=2,
        settings=compute_settings_digest(vars(plan.run_settings[cell.key])),
        commit="abc1234567",
        date="2026-01-02",
        is_generated=False,
        is_diverged=True,
        classes=10,
        curves=(curve,),
    )
    RunStore(READING, [run]).write()
    page = program.write_tables("# Readings\n")
    assert page == program.write_tables(page), "the second call replaces the table"
    assert page.splitlines() == [
        "# Readings",
        "",
        "<!-- pfps_lwc/p2 -->",
        f"**P2: the network of FedPer has fewer units** ([p2.yaml](../{READING}))",
        "",
        "| method | point | accuracy | published | key | commit |",
        "| --- | --- | --- | --- | --- | --- |",
        "| FedAvg | alpha=0.1 | not run | – | – | – |",
        "| FedAvg | alpha=0.3 | not run | 79.74 | – | – |",
        f"| FedPer | alpha=0.1 | 81.25 (diverged) | 89.36 | `{cell.key[:8]}` | abc1234567 |",
        "| FedPer | alpha=0.3 | not run | – | – | – |",
        "<!-- end -->",
    ]
    READING.write_text(STUDY.replace("hidden: [8]", "hidden: [9]"))
    assert "81.25" not in program.write_tables(page), "the stored run had other settings"
    shutil.rmtree(READING.parent / "measured")
    READING.write_text(STUDY.replace("Table 2, FedPer, 0.1", "Table 2, FedBer, 0.1"))
    with pytest.raises(ValueError, match=r"p2\.yaml: '# Published: Table 2, FedBer, 0\.1/0\.3 at alpha=0\.1' is not"):
        program.write_tables(page)


@pytest.mark.usefixtures("in_empty_folder")
def test_feddw_gradient_program_prints_two_norms_per_participant(capsys: pytest.CaptureFixture[str]) -> None:
    plan = finish(studies.settings(("feddw",), rounds=2))
    (program,) = (block.text for block in blocks("docs/readings.md") if block.language == "python")
    capsys.readouterr()
    program = program.replace("studies/papers/feddw/readings/regularizer.yaml", "params.yaml")
    exec(program.replace("round=20", "round=2"), {})
    clients, risks, regularizers = zip(*map(str.split, capsys.readouterr().out.splitlines()), strict=True)
    (run,) = studies.open_runs(plan)
    assert list(map(int, clients)) == run.select_participants(2)
    assert len(set(risks)) == len(clients), "each client has other samples"
    assert len(set(regularizers)) == 1, "the regularizer depends on the global model only"
    assert 0 < float(regularizers[0]) < min(map(float, risks))
