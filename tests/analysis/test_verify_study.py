"""`fedpipe verify` of a study: tables, plots and keys, compared with the runs."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedpipe.analysis import verify
from fedpipe.cli import app
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import read_json, write_bytes, write_json
from fedpipe.planning.plan import Plan
from fedpipe.report import contents
from tests.small_studies import RunFedpipe

SHOWN = "results/tables/results.md"
FILES = (
    SHOWN,
    "results/tables/results.csv",
    "results/tables/results.html",
    "results/tables/statistics.csv",
    "results/tables/times.csv",
    "results/metrics.json",
    "results/plots/curves.csv",
    "results/plots/clients.csv",
    "results/plots/matrices.csv",
    "results/plots/partition.csv",
    "results/keys/fedavg.json",
)


def read_plan() -> Plan:
    return Plan.read(Path("results/plan.json"))


def read_error(run_fedpipe: RunFedpipe, *arguments: str) -> tuple[str, str]:
    """Run a command that fails. Return its output and its error."""
    status, output, error = run_fedpipe(*arguments)
    assert status == 2
    return output, error


def change_digit(path: Path) -> None:
    """Change the last digit of a file."""
    text = path.read_text()
    position = max(text.rfind(digit) for digit in "0123456789")
    path.write_text(text[:position] + str((int(text[position]) + 1) % 10) + text[position + 1 :])


def test_verify_study_accepts_intact_study(study: Path) -> None:
    verdict = verify.verify_study(read_plan())
    assert verdict.is_ok
    assert verdict.message.startswith(f"results: {len(FILES) + 1} files agree ")
    result = CliRunner().invoke(app.app, ["verify", "--rerun", "0"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == verdict.message
    run_count, partition_count = len(read_plan().runs), len({*read_plan().partitions})
    summary = f": {run_count} runs, {partition_count} partitions, {len(FILES) + 1} files"
    assert result.stdout.splitlines()[-1].endswith(summary)


@pytest.mark.parametrize("damage", [change_digit, Path.unlink], ids=["changed", "deleted"])
def test_verify_study_reports_every_file_that_differs_from_runs(study: Path, damage: Callable[[Path], None]) -> None:
    study_plan = read_plan()
    for name in FILES:
        data = Path(name).read_bytes()
        damage(Path(name))
        verdict = verify.verify_study(study_plan)
        assert not verdict.is_ok
        assert re.match(rf"results: .*params.yaml: {name}\. Delete .*`fedpipe run`", verdict.message)
        if name != FILES[-1]:
            Path(name).write_bytes(data)
    result = CliRunner().invoke(app.app, ["verify", "--rerun", "0"])
    assert result.exit_code == 1
    assert FILES[-1] in result.stdout.splitlines()[0]
    assert result.stdout.count("are as recorded") == 4


def test_show_and_trace_reject_manually_edited_table(study: Path, run_fedpipe: RunFedpipe) -> None:
    table = Path(SHOWN)
    text = table.read_text()
    number = next(line for line in text.splitlines() if line.startswith("| FedAvg")).split("|")[2].split()[0]
    table.write_text(text.replace(number, "90.28"))
    for arguments in (
        ["show"],
        ["trace", SHOWN, "fedavg.global-on-global"],
        ["trace", str(table.absolute()), "fedavg.global-on-global"],
    ):
        output, error = read_error(run_fedpipe, *arguments)
        assert output == ""
        assert re.fullmatch(rf"fedpipe: {SHOWN} .*runs of params.yaml.*`fedpipe run`.*\n", error)
    table.write_text(text)
    assert CliRunner().invoke(app.app, ["show"]).stdout.startswith(text)


def test_show_warns_about_outdated_table(study: Path) -> None:
    """The caption of the table does not contain the parameters of methods, so the change is invisible."""
    params, table = Path("params.yaml"), Path(SHOWN).read_text()
    original = params.read_text()
    for text in (f"# a comment\n{original}", f"{original}execution: {{rounds_per_job: 1}}\n"):
        params.write_text(text)
        result = CliRunner().invoke(app.app, ["show"])
        assert (result.stdout.startswith(table), result.stderr) == (True, "")
    for changed_text in (
        original.replace("learning_rate: 0.1", "learning_rate: 0.2"),
        "federation: {rounds: 0}\n",
        None,
    ):
        params.unlink() if changed_text is None else params.write_text(changed_text)
        result = CliRunner().invoke(app.app, ["show"])
        assert result.stdout.startswith(table)
        assert re.fullmatch("fedpipe: params.yaml or code has changed .*`fedpipe run`.*\n", result.stderr)


def test_trace_rejects_table_of_other_folder(study: Path, run_fedpipe: RunFedpipe) -> None:
    Path("copy").mkdir()
    for name in (SHOWN, "results/tables/results.csv", "results/plan.json"):
        write_bytes(Path("copy", name), Path(name).read_bytes())
    output, error = read_error(run_fedpipe, "trace", f"copy/{SHOWN}", "fedavg.global-on-global")
    assert output == ""
    assert error.startswith(f"fedpipe: 'copy/{SHOWN}' is not in the results of this folder")


def test_verify_study_rejects_plan_that_differs_from_settings(study: Path) -> None:
    """Otherwise a table with swapped rows would agree with its plan."""
    original_plan = read_plan()
    swapped_cells = tuple(dataclasses.replace(cell, seed=1 - cell.seed) for cell in original_plan.cells)
    swapped_plan = dataclasses.replace(original_plan, cells=swapped_cells)
    swapped_plan.write()
    verdict = verify.verify_study(swapped_plan)
    assert not verdict.is_ok
    assert re.match("results/plan.json: .* params.yaml.*`fedpipe run`", verdict.message)
    params = Path("params.yaml")
    params.write_text(params.read_text().replace("learning_rate: 0.1", "learning_rate: 0.2"))
    assert ". params.yaml has changed" in verify.verify_study(original_plan).message


def test_verify_study_ignores_source_hashes_if_plan_is_equal(study: Path) -> None:
    """After `dvc exp run` and `git checkout`, the recorded source hashes are those of the experiment."""
    sources = read_plan().study_files.source_hashes
    write_json(sources, read_json(sources) | {"params.yaml": "0" * 64})
    verdict = verify.verify_study(read_plan())
    assert verdict.is_ok
    assert "changed" not in verdict.message
    Path("params.yaml").write_text("study: {seeds: []}\n")
    note = ". params.yaml has changed since the results were computed"
    result = CliRunner().invoke(app.app, ["verify", "--rerun", "0"])
    first_line, *_, last_line = result.stdout.splitlines()
    assert first_line.endswith(note), "the study can't be planned"
    assert last_line.endswith(f" files{note}")


def test_commands_reject_merged_tables_with_wrong_number_of_rounds(study: Path, run_fedpipe: RunFedpipe) -> None:
    """The merged tables of three rounds are in the folder for two rounds."""
    study_plan = read_plan()
    runs, cells = (
        tuple(dataclasses.replace(part, rounds=2) for part in parts) for parts in (study_plan.runs, study_plan.cells)
    )
    dataclasses.replace(study_plan, runs=runs, cells=cells).write()
    run, files = runs[0], runs[0].files
    error = read_error(run_fedpipe, "record", run.algorithm)[1]
    assert re.match(f"fedpipe: {files.get_merged_files(2).marker} is missing.*`fedpipe run`", error)
    for other in runs:
        other.files.get_merged_files(3).path.rename(other.merged_files.path)
    problem = (
        rf"fedpipe: {files.get_merged_files(2).marker} .*\b3 rounds.*\b2\b.*elete {files.get_merged_files(2).path}\b.*"
    )
    staleness_warning = f"fedpipe: {contents.get_staleness_warning(read_plan())}"
    assert "has changed" in staleness_warning
    for command in (["record", run.algorithm], ["table"], ["figure", "curves"], ["show"]):
        *warnings, error = read_error(run_fedpipe, *command)[1].splitlines()
        assert warnings == ([staleness_warning] if command == ["show"] else [])
        assert re.fullmatch(problem, error)
    assert CliRunner().invoke(app.app, ["verify", "--rerun", "0"]).exit_code == 1


def test_report_commands_reject_fingerprint_of_earlier_plan(study: Path, run_fedpipe: RunFedpipe) -> None:
    """Otherwise snakemake records the new table as a table of the first plan and keeps it if that plan returns."""
    first_fingerprint, before = (
        read_plan().report_fingerprint,
        {name: Path(name).read_bytes() for name in FILES},
    )
    params = yaml.safe_load(Path("params.yaml").read_text()) | {"report": {"average": "client"}}
    Path("params.yaml").write_text(yaml.safe_dump(params))
    assert CliRunner().invoke(app.app, ["plan"]).exit_code == 0
    for command in (["table"], ["figure", "curves"], ["figure", "matrices"]):
        _, error = read_error(run_fedpipe, *command, "--plan-fingerprint", first_fingerprint)
        assert re.match("fedpipe: results/plan.json has changed .*params.yaml", error)
    assert {name: Path(name).read_bytes() for name in FILES} == before
    assert CliRunner().invoke(app.app, ["table", "--plan-fingerprint", read_plan().report_fingerprint]).exit_code == 0
    assert Path(SHOWN).read_bytes() != before[SHOWN]


def test_normalize_study_path_resolves_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable PWD of a shell is the typed path, and home folders on clusters are often links."""
    (tmp_path / "real/studies").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "link")
    monkeypatch.setenv("PWD", str(tmp_path / "link"))
    assert layout.normalize_study_path(tmp_path / "link/params.yaml") == Path("params.yaml")
    assert layout.normalize_study_path(tmp_path / "real/studies/a.yaml") == Path("studies/a.yaml")
    monkeypatch.setenv("PWD", str(tmp_path))
    assert layout.normalize_study_path(tmp_path / "params.yaml") == tmp_path / "params.yaml"
