"""What people read of a study, compared with what its runs give."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedpipe.analysis import verify_study
from fedpipe.cli import app
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import read_json, write_bytes, write_json
from fedpipe.planning.plan import Plan
from fedpipe.report import contents

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


def plan() -> Plan:
    return Plan.read(Path("results/plan.json"))


def read_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """What a command that refuses prints, and its sentence."""
    monkeypatch.setattr(sys, "argv", ["fedpipe", *arguments])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 2
    found = capsys.readouterr()
    return found.out, found.err


def retyped(path: Path) -> None:
    """Its last digit is another one."""
    text = path.read_text()
    place = max(text.rfind(digit) for digit in "0123456789")
    path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])


def test_a_sound_study_holds(study: Path) -> None:
    verdict = verify_study.verify_study(plan())
    assert verdict[:2] == (f"results: {len(FILES) + 1} files are what the runs of params.yaml give", True)
    done = CliRunner().invoke(app.app, ["verify", "--rerun", "0"])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == verdict.message
    runs, partitions = (
        f"{len(found)} {name}s" for name, found in (("run", plan().runs), ("partition", {*plan().partitions}))
    )
    assert done.stdout.splitlines()[-1] == f"all agrees: {runs}, {partitions}, {len(FILES) + 1} files"


@pytest.mark.parametrize("harm", [retyped, Path.unlink], ids=["retyped", "deleted"])
def test_verify_names_every_file_that_the_runs_do_not_give(study: Path, harm: Callable[[Path], None]) -> None:
    made = plan()
    for name in FILES:
        whole = Path(name).read_bytes()
        harm(Path(name))
        told = f"results: not what the runs of params.yaml give: {name}; delete what is there of them and type `fedpipe"
        assert verify_study.verify_study(made).message.startswith(told)
        if name != FILES[-1]:
            Path(name).write_bytes(whole)
    done = CliRunner().invoke(app.app, ["verify", "--rerun", "0"])
    assert done.exit_code == 1
    assert FILES[-1] in done.stdout.splitlines()[0]
    assert done.stdout.count("are as recorded") == 4


def test_a_number_typed_into_the_table_is_told(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Path(SHOWN)
    text = table.read_text()
    number = next(line for line in text.splitlines() if line.startswith("| FedAvg")).split("|")[2].split()[0]
    table.write_text(text.replace(number, "90.28"))
    sentence = f"fedpipe: {SHOWN} does not match the runs of params.yaml. Delete it and type `fedpipe run`.\n"
    assert read_error(monkeypatch, capsys, "show") == ("", sentence)
    assert read_error(monkeypatch, capsys, "trace", SHOWN, "fedavg.global-on-global") == ("", sentence)
    assert read_error(monkeypatch, capsys, "trace", str(table.absolute()), "fedavg.global-on-global") == ("", sentence)
    table.write_text(text)
    assert CliRunner().invoke(app.app, ["show"]).stdout.startswith(text)


def test_a_table_of_the_study_as_it_was_is_told(study: Path) -> None:
    """Its caption holds no method's parameters, so that nobody would see it."""
    params, text = Path("params.yaml"), Path(SHOWN).read_text()
    whole = params.read_text()
    for edited in (f"# a comment\n{whole}", f"{whole}execution: {{rounds_per_job: 1}}\n"):
        params.write_text(edited)
        shown = CliRunner().invoke(app.app, ["show"])
        assert (shown.stdout.startswith(text), shown.stderr) == (True, "")
    warning = "fedpipe: params.yaml or code has changed since these results were made."
    for edited in (whole.replace("learning_rate: 0.1", "learning_rate: 0.2"), "federation: {rounds: 0}\n", None):
        params.unlink() if edited is None else params.write_text(edited)
        shown = CliRunner().invoke(app.app, ["show"])
        assert (shown.stdout.startswith(text), shown.stderr.startswith(warning)) == (True, True)


def test_a_table_of_another_folder_is_not_traced(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("copy").mkdir()
    for name in (SHOWN, "results/tables/results.csv", "results/plan.json"):
        write_bytes(Path("copy", name), Path(name).read_bytes())
    out, sentence = read_error(monkeypatch, capsys, "trace", f"copy/{SHOWN}", "fedavg.global-on-global")
    assert out == ""
    assert sentence.startswith(f"fedpipe: 'copy/{SHOWN}' is not a table of this folder's studies")


def test_a_plan_that_its_settings_do_not_give_is_told(study: Path) -> None:
    """Else a table whose rows were swapped is what its plan gives."""
    sound = plan()
    swapped = tuple(dataclasses.replace(cell, seed=1 - cell.seed) for cell in sound.cells)
    made = dataclasses.replace(sound, cells=swapped)
    made.write()
    assert verify_study.verify_study(made)[:2] == (
        "results/plan.json: not what params.yaml gives; delete it and type `fedpipe run`",
        False,
    )
    params = Path("params.yaml")
    params.write_text(params.read_text().replace("learning_rate: 0.1", "learning_rate: 0.2"))
    assert verify_study.verify_study(sound).message.endswith("; params.yaml changed since they were made")


def test_a_file_that_gives_the_same_plan_has_not_changed(study: Path) -> None:
    """As after `dvc exp run` and `git checkout`: the marks of what the plan was made of are the experiment's."""
    sources = plan().study_files.sources
    write_json(sources, read_json(sources) | {"params.yaml": "0" * 64})
    assert verify_study.verify_study(plan())[:2] == (
        f"results: {len(FILES) + 1} files are what the runs of params.yaml give",
        True,
    )
    Path("params.yaml").write_text("study: {seeds: []}\n")
    assert verify_study.verify_study(plan()).message.endswith("; params.yaml changed since they were made"), (
        "and can't be planned"
    )


def test_other_rounds_than_the_plans_are_refused_wherever_they_lie(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The joined tables of three rounds, taken for those of two."""
    made = plan()
    runs, cells = (tuple(dataclasses.replace(part, rounds=2) for part in parts) for parts in (made.runs, made.cells))
    dataclasses.replace(made, runs=runs, cells=cells).write()
    run, files = runs[0], runs[0].files
    missing = f"fedpipe: {files.merged_files(2).marker} is missing; type `fedpipe run` to make it again.\n"
    assert read_error(monkeypatch, capsys, "record", run.algorithm)[1] == missing
    for other in runs:
        other.files.merged_files(3).path.rename(other.merged_files.path)
    wrong = (
        f"{files.merged_files(2).marker} is of 3 rounds and should be of 2; delete {files.merged_files(2).path} and "
        "run again.\n"
    )
    since = f"fedpipe: {contents.get_staleness_warning(plan())}\n"
    assert "has changed since these results were made" in since
    for command in (["record", run.algorithm], ["table"], ["figure", "curves"], ["show"]):
        before = since if command == ["show"] else ""
        assert read_error(monkeypatch, capsys, *command)[1] == f"{before}fedpipe: {wrong}"
    assert CliRunner().invoke(app.app, ["verify", "--rerun", "0"]).exit_code == 1


def test_a_snakemake_makes_no_table_of_a_plan_that_was_made_meanwhile(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be recorded as one of the plan that it began with, and stay where that plan comes back."""
    began, before = contents.compute_report_fingerprint(plan()), {name: Path(name).read_bytes() for name in FILES}
    params = yaml.safe_load(Path("params.yaml").read_text()) | {"report": {"average": "client"}}
    Path("params.yaml").write_text(yaml.safe_dump(params))
    assert CliRunner().invoke(app.app, ["plan"]).exit_code == 0
    for what in (["table"], ["figure", "curves"], ["figure", "matrices"]):
        _, sentence = read_error(monkeypatch, capsys, *what, "--plan-fingerprint", began)
        assert "results/plan.json has changed since this Snakemake began, because params.yaml was" in sentence
    assert {name: Path(name).read_bytes() for name in FILES} == before
    assert (
        CliRunner()
        .invoke(app.app, ["table", "--plan-fingerprint", contents.compute_report_fingerprint(plan())])
        .exit_code
        == 0
    )
    assert Path(SHOWN).read_bytes() != before[SHOWN]


def test_a_study_is_itself_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's PWD is the path that was typed, as homes of clusters often are links."""
    (tmp_path / "real/studies").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "link")
    monkeypatch.setenv("PWD", str(tmp_path / "link"))
    assert layout.normalize_study_path(tmp_path / "link/params.yaml") == Path("params.yaml")
    assert layout.normalize_study_path(tmp_path / "real/studies/a.yaml") == Path("studies/a.yaml")
    monkeypatch.setenv("PWD", str(tmp_path))
    assert layout.normalize_study_path(tmp_path / "params.yaml") == tmp_path / "params.yaml"
